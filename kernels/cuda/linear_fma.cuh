// y[m, n] = x[m, k] weight[n, k]^T in float32 throughout, one fma per input in ascending order: what the CPU's kernels
// compute with a float weight, to the bit. With codes, the sums of a group are scaled and added like that.
//
// A block of 128 threads computes 32 rows of 4 panels; grid (panels / 4, rows / 32). Grouped: see linear_mma.cuh, with
// tiles of 32 rows. Per step of 64 inputs, rows
// [32][64 + 4] and decoded weights [64][4 panels * 16 + 4] lie in shared memory, an output's column at
// scale_place(output); a thread sums 4 rows of the 4 outputs of one lane of a panel.
#pragma once

#include "linear_mma.cuh"

namespace llmctl::cuda {

constexpr int kFmaRows = 32;
constexpr int kFmaPanels = 4;

template <class W, int kGroup, Zero kZero, class Scale, End kEnd, bool kGrouped>
__global__ void __launch_bounds__(128, 1)
    linear_fma(float* y, const float* x, const unsigned char* codes, const Scale* scales, const void* zeros,
               const float* bias, const float* residual, int rows, int outputs, int inputs, int width,
               const int* row_ids, const int* tile_expert, int row_divisor, long code_stride, long scale_stride,
               long zero_stride) {
  constexpr bool kByGroup = kScaled<W> && kGroup > 0, kMin = kZero == Zero::kMin;
  constexpr int kPerGroup = kByGroup && kGroup < kUnitInputs ? kGroup : kUnitInputs;  // inputs of a group in one step
  constexpr int kRowStride = kUnitInputs + 4, kColumnStride = kFmaPanels * kPanelOutputs + 4;
  float* row_tile = reinterpret_cast<float*>(dynamic_shared());
  float* column_tile = row_tile + kFmaRows * kRowStride;

  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int first_row = static_cast<int>(blockIdx.y) * kFmaRows, first_panel = static_cast<int>(blockIdx.x) * kFmaPanels;
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
  const int steps = (inputs + kUnitInputs - 1) / kUnitInputs;
  const int groups = kByGroup ? steps * kUnitInputs / (kByGroup ? kGroup : 1) : 1;
  const int my_rows = tid / 16 * 4, my_panel = first_panel + tid % 16 / 4, my_t = tid % 4;  // of the sums
  const int decoded = min(first_panel + warp, panels - 1), weighed = min(my_panel, panels - 1);

  const bool batched = kGrouped && row_ids == nullptr;
  const int tile = static_cast<int>(blockIdx.y);
  const int expert = !kGrouped ? 0 : batched ? tile % row_divisor : tile_expert[tile];
  if constexpr (kGrouped) {
    if (expert < 0) return;
    codes += expert * code_stride;
    scales = reinterpret_cast<const Scale*>(reinterpret_cast<const unsigned char*>(scales) + expert * scale_stride);
    zeros = static_cast<const unsigned char*>(zeros) + expert * zero_stride;
    if (bias != nullptr) bias += static_cast<long>(expert) * (outputs + outputs % 2);
  }
  // Row of y, -1 for none.
  const auto row_of = [&](int r) {
    if (batched) {
      const int row = tile / row_divisor * kFmaRows + r;
      return row < rows ? row * row_divisor + expert : -1;
    }
    if constexpr (kGrouped) return row_ids[first_row + r];
    return first_row + r < rows ? first_row + r : -1;
  };

  float part[4][4] = {}, total[kByGroup ? 4 : 1][4] = {}, of_rows[kMin ? 4 : 1] = {};
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    for (int i = tid; i < kFmaRows * kUnitInputs / 4; i += 128) {
      const int r = i / (kUnitInputs / 4), column = i % (kUnitInputs / 4) * 4, k = step * kUnitInputs + column;
      const int row = row_of(r);
      const bool valid = row >= 0 && k < inputs;
      const long source = kGrouped && !batched ? row / row_divisor : row;
      store_vec(row_tile + r * kRowStride + column, valid ? load_vec<Vec4>(x + source * inputs + k) : Vec4{});
    }
    Vec4 unit[kUnitVectors<W>];
    const unsigned char* from = codes + (static_cast<long>(decoded) * steps + step) * kUnitBytes<W> + lane * 16;
#pragma unroll
    for (int v = 0; v < kUnitVectors<W>; ++v) unit[v] = load_stream(from + v * 512);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ZeroPair zero = zero_pair<Half>(kZero == Zero::kNone ? 8 : 0);
        if constexpr (kZero == Zero::kInt) {
          const int group = kByGroup ? (step * kUnitInputs + 16 * s) / (kByGroup ? kGroup : 1) : 0;
          const unsigned char* p = static_cast<const unsigned char*>(zeros);
          zero = zero_pair<Half>(p[(static_cast<long>(decoded) * groups + group) * kPanelOutputs + 2 * g + half]);
        }
        float v[4];
        values<W>(v, unit, s, half, zero);
        float* to = column_tile + (16 * s + 2 * t) * kColumnStride + warp * kPanelOutputs + scale_place(8 * half + g);
        to[0] = v[0];
        to[kColumnStride] = v[1];
        to[8 * kColumnStride] = v[2];
        to[9 * kColumnStride] = v[3];
      }
    }
    __syncthreads();
#pragma unroll
    for (int begin = 0; begin < kUnitInputs; begin += kPerGroup) {
      for (int k = begin; k < begin + kPerGroup; ++k) {
        const Vec4 w = load_vec<Vec4>(column_tile + k * kColumnStride + tid % 16 * 4);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float in = row_tile[(my_rows + r) * kRowStride + k];
          if constexpr (kMin) of_rows[r] += in;
#pragma unroll
          for (int c = 0; c < 4; ++c) part[r][c] = fmaf(in, float_of(w.w[c]), part[r][c]);
        }
      }
      if constexpr (kByGroup) {
        const int group = (step * kUnitInputs + begin) / kGroup;
        if ((step * kUnitInputs + begin + kPerGroup) % kGroup != 0) continue;
        const long place = (static_cast<long>(weighed) * groups + group) * kPanelOutputs + 4 * my_t;
        float scale[2][2], low[2][2] = {};
        load_scales(scale, scales + place);
        if constexpr (kMin) load_scales(low, static_cast<const Scale*>(zeros) + place);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            total[r][c] = fmaf(part[r][c], scale[c / 2][c % 2], total[r][c]);
            if constexpr (kMin) total[r][c] = fmaf(of_rows[r], low[c / 2][c % 2], total[r][c]);
            part[r][c] = 0;
          }
          if constexpr (kMin) of_rows[r] = 0;
        }
      }
    }
  }
  if (my_panel >= panels) return;
  float scale[2][2] = {}, low[2][2] = {};
  if constexpr (kScaled<W> && !kByGroup) {
    load_scales(scale, scales + my_panel * kPanelOutputs + 4 * my_t);
    if constexpr (kMin) load_scales(low, static_cast<const Scale*>(zeros) + my_panel * kPanelOutputs + 4 * my_t);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = row_of(my_rows + r);
    if (row < 0) continue;
    float sums[2][2];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float v = kByGroup ? total[kByGroup ? r : 0][c] : part[r][c];
      if constexpr (kScaled<W> && !kByGroup) {
        v *= scale[c / 2][c % 2];
        if constexpr (kMin) v = fmaf(of_rows[r], low[c / 2][c % 2], v);
      }
      sums[c / 2][c % 2] = v;
    }
    end_panel<float, kEnd>(y, bias, residual, row, my_panel, my_t, outputs, width, sums);
  }
}

}  // namespace llmctl::cuda
