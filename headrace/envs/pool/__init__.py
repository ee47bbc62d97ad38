"""Worker processes for Python environments: ``group`` is what the path sees, ``worker`` what runs in a process."""
