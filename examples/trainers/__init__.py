"""Trainers from PyPI, tried by the checker on tiny models on CPU."""
