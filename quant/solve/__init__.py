"""Solvers: pure functions from a weight, statistics of its inputs and a format to a WeightTensor."""
