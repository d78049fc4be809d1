"""CPU kernels: C++20 templates over an instruction set (`*.hpp`), their weight layout and their registration."""
