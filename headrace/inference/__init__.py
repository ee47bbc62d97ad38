"""Inference: what slots say to what they do. ``slots`` is the step; ``actor`` and ``central`` are where it runs."""
