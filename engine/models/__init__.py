"""Decoders: one config-driven decoder for every family in the table."""
