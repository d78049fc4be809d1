// Low-rank adapters beside a linear layer: y[row] += scale * B (A x[row]), with the adapter of each row, -1 for none.
//
// Adapters lie in slots of equal size: A [slots][rank][inputs] and B [slots][outputs][rank], ranks padded with zeros to
// kRank. Both kernels sum a row's values in one order that depends on the row alone.
#pragma once

#include "linear_end.cuh"

namespace llmctl::cuda {

// low[row, r] = sum over inputs of A[slot, r] x[row], float32. A warp per r; grid (kRank / 4, rows), blocks of 4 warps.
// Lanes take pairs of inputs in turn.
template <class T, int kRank>
__global__ void __launch_bounds__(128) lora_shrink(float* low, const T* x, const T* a, const int* slots, int inputs) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(blockIdx.y);
  const int r = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32;
  const int slot = slots[row];
  if (slot < 0) return;
  const T* in = x + static_cast<long>(row) * inputs;
  const T* weight = a + (static_cast<long>(slot) * kRank + r) * inputs;
  float sum = 0;
  for (int k = 2 * lane; k < inputs; k += 64) {
    float x0, x1, a0, a1;
    load_pair(in + k, x0, x1);
    load_pair(weight + k, a0, a1);
    sum = fmaf(x1, a1, fmaf(x0, a0, sum));
  }
  sum = sum_lanes(sum);
  if (lane == 0) low[row * kRank + r] = sum;
}

// y[row, n] += scales[slot] * sum over r of B[slot, n, r] low[row, r]. Two outputs per thread; grid (outputs / 256, rows),
// blocks of 128; shared memory kRank floats.
template <class T, int kRank>
__global__ void __launch_bounds__(128)
    lora_expand(T* y, const float* low, const T* b, const float* scales, const int* slots, int outputs, int width) {
  const int row = static_cast<int>(blockIdx.y), slot = slots[row];
  if (slot < 0) return;
  float* values = reinterpret_cast<float*>(dynamic_shared());
  for (int r = static_cast<int>(threadIdx.x); r < kRank; r += 128) values[r] = low[row * kRank + r];
  __syncthreads();
  const int n = (static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x)) * 2;
  if (n >= outputs) return;
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const T* weight = b + (static_cast<long>(slot) * outputs + min(n + i, outputs - 1)) * kRank;
#pragma unroll
    for (int r = 0; r < kRank; r += 2) {
      float b0, b1;
      load_pair(weight + r, b0, b1);
      sums[i] = fmaf(b1, values[r + 1], fmaf(b0, values[r], sums[i]));
    }
  }
  float y0, y1;
  load_pair(y + static_cast<long>(row) * width + n, y0, y1);
  const float scale = scales[slot];
  store_pair(y + static_cast<long>(row) * width + n, fmaf(scale, sums[0], y0), fmaf(scale, sums[1], y1));
}

}  // namespace llmctl::cuda
