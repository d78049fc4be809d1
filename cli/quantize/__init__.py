"""Quantizing a checkpoint: calibration text, the walk over its layers, and what the result is worth."""
