"""Inference: what slots say to what they do. ``slots`` is the step, ``actor`` the placement beside the environments."""
