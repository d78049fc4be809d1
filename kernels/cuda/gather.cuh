// out[row, j] = x[row, order[j]]: activations in the order in which a weight's groups want them (GPTQ with desc_act).
// Two columns per thread; grid (inputs / 256, rows), blocks of 128.
#pragma once

#include "linear_end.cuh"

namespace llmctl::cuda {

template <class T>
__global__ void __launch_bounds__(128) gather_inputs(T* out, const T* x, const int* order, int inputs) {
  const int column = (static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x)) * 2;
  if (column >= inputs) return;
  const long row = static_cast<long>(blockIdx.y) * inputs;
  out[row + column] = x[row + order[column]];
  out[row + column + 1] = x[row + order[column + 1]];
}

}  // namespace llmctl::cuda
