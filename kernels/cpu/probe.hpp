// What this machine can do at most: loops that do nothing but read memory, or nothing but multiply and add.
//
// They are the roofs that `llmctl bench kernels` sets measured kernels against. Each picks the widest instructions that
// the CPU has, whether or not a kernel uses them.
#pragma once

#include <cstddef>

namespace llmctl::cpu {

enum class Probe {
  read,   // bytes: every thread sums its part of a buffer
  fma,    // float32 operations, a multiply-add counting as two
  int16,  // the same of 16-bit integers into 32-bit sums
  int8,   // the same of bytes into 32-bit sums
};

// Runs the loop `rounds` times on every thread of the pool; returns how many bytes or operations that were. Threads get
// whole cache lines of `data`, which only `read` touches.
double probe(Probe what, long rounds, const void* data, std::size_t bytes);

}  // namespace llmctl::cpu
