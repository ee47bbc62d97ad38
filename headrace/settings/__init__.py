"""Settings: dataclasses (``config``), presets, and their reading from Python, JSON and text (``fields``, ``primitives``)."""
