"""Metrics: what is measured (``schema``), how (``meter``, ``episodes``), where to (``sinks``, ``panel``)."""
