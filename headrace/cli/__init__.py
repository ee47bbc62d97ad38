"""The command line: ``main`` and the reading of its words."""
