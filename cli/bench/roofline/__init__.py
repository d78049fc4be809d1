"""How near the kernels come to what the machine can do."""
