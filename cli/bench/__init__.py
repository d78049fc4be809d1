"""Measuring ourselves and peers."""
