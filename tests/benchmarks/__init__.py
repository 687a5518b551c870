"""Measurements, side by side with other tiers. `run.py` is the command.

No test asserts a time. Both sides of a comparison alternate within one run, so that noise
hits both, and what is read is the ratio of each round, with its spread.
"""
