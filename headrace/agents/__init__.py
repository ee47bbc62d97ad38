"""Agents as records of functions: ``agent`` is the record, each other module an agent or a part agents share."""
