// What rows.cuh does to buffers that lie together, for buffers that lie apart, as the ops of ops.py have them: gate and up
// of a feed-forward; and the bias of layers that a library multiplies.
#pragma once

#include "rows.cuh"

namespace llmctl::cuda {

// grid: (rows that could be, ceil(width / (128 * values in 16 bytes))), 128 threads. gate and up [rows, stride].
template <class Act, int kActivation>
__global__ void __launch_bounds__(128)
    act_mul_apart(Act* out, const Act* gate, const Act* up, const int32_t* num_rows, int width, int stride) {
  const int row = blockIdx.x, i = (blockIdx.y * 128 + threadIdx.x) * Pack<Act>::kCount;
  if (row >= num_rows[0] || i >= width) return;
  Pack<Act> x = load_pack(gate + static_cast<int64_t>(row) * stride + i);
  const Pack<Act> y = load_pack(up + static_cast<int64_t>(row) * stride + i);
#pragma unroll
  for (int j = 0; j < Pack<Act>::kCount; ++j) x.v[j] = activate<kActivation>(x.v[j]) * y.v[j];
  store_pack(out + static_cast<int64_t>(row) * width + i, x);
}

// grid: (rows that could be, ceil(width / (128 * values in 16 bytes))), 128 threads. Every row of y becomes the bias, or
// has it added; both have `width` values.
template <class Act, bool kAdd>
__global__ void __launch_bounds__(128) bias_rows(Act* y, const Act* bias, const int32_t* num_rows, int width) {
  const int row = blockIdx.x, i = (blockIdx.y * 128 + threadIdx.x) * Pack<Act>::kCount;
  if (row >= num_rows[0] || i >= width) return;
  Act* at = y + static_cast<int64_t>(row) * width + i;
  Pack<Act> v = load_pack(bias + i);
  if constexpr (kAdd) {
    const Pack<Act> before = load_pack(at);
#pragma unroll
    for (int j = 0; j < Pack<Act>::kCount; ++j) v.v[j] += before.v[j];
  }
  store_pack(at, v);
}

}  // namespace llmctl::cuda
