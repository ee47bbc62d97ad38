"""Benchmarks of the whole system: ``path`` measures it end to end, ``rooms`` each of its rooms alone."""
