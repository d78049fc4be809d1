"""From a name to kernel-ready, memory-mapped weights."""
