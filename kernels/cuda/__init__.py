"""Kernels for NVIDIA GPUs: CUDA C++ templates, compiled for exact types when first used, and run on CPUs in tests."""
