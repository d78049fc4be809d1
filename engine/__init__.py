"""Requests to tokens: schedule, run, sample."""
