// y[n] = x[k] weight[n, k]^T for one row (or a few, each alone), without tensor cores: the weight is read once, in the
// layout of weight.cuh, and multiplied in float32.
//
// A block computes one panel of 16 outputs; grid (panels, rows). Its warps take the panel's units in turn, several at a
// time so that enough of the weight is under way, and a lane sums its inputs for its two outputs; then lanes, then warps
// in ascending order. x lies in shared memory, with zeros up to whole units. The order of summation is this kernel's
// own: its bits are not those of linear_mma.
#pragma once

#include "linear_end.cuh"

namespace llmctl::cuda {

template <class T, class W, int kGroup, Zero kZero, class Scale, int kWarps, End kEnd>
__global__ void __launch_bounds__(32 * kWarps)
    linear_vector(T* y, const T* x, const unsigned char* codes, const Scale* scales, const void* zeros, const T* bias,
                  const T* residual, int outputs, int inputs, int width) {
  static_assert(kGroup == 0 || kGroup == 32 || kGroup == 64 || kGroup == 128);
  constexpr bool kByGroup = kScaled<W> && kGroup > 0, kMin = kZero == Zero::kMin;
  constexpr int kVectors = kUnitVectors<W>, kAhead = kVectors == 1 ? 4 : 2;
  constexpr int kGroups = kByGroup && kGroup < kUnitInputs ? kUnitInputs / kGroup : 1;  // of one unit

  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int panel = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const int units = (inputs + kUnitInputs - 1) / kUnitInputs;
  const long groups = kByGroup ? units * kUnitInputs / (kByGroup ? kGroup : 1) : 1;

  T* inputs_of_row = reinterpret_cast<T*>(dynamic_shared());
  float* parts = reinterpret_cast<float*>(dynamic_shared() + units * kUnitInputs * sizeof(T));  // [warps][16]
  constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));
  for (int i = tid * kPerVector; i < units * kUnitInputs; i += 32 * kWarps * kPerVector) {
    const Vec4 v = i < inputs ? load_vec<Vec4>(x + static_cast<long>(row) * inputs + i) : Vec4{};
    store_vec(inputs_of_row + i, v);
  }
  __syncthreads();

  const unsigned char* stream = codes + static_cast<long>(panel) * units * kUnitBytes<W> + lane * 16;
  const Scale* scale_row = scales + panel * groups * kPanelOutputs;
  const Scale* min_row = static_cast<const Scale*>(zeros) + panel * groups * kPanelOutputs;
  const unsigned char* zero_row = static_cast<const unsigned char*>(zeros) + panel * groups * kPanelOutputs;
  ZeroPair whole_zero[2] = {zero_pair<Half>(kZero == Zero::kNone ? 8 : 0), zero_pair<Half>(kZero == Zero::kNone ? 8 : 0)};
  if constexpr (kZero == Zero::kInt && !kByGroup) {
    for (int half = 0; half < 2; ++half) whole_zero[half] = zero_pair<Half>(zero_row[2 * g + half]);
  }

  float total[2] = {}, whole_inputs = 0;
  for (int base = warp; base < units; base += kWarps * kAhead) {
    Vec4 unit[kAhead][kVectors];
    float scale[kAhead][kGroups][2], low[kAhead][kGroups][2];
    ZeroPair zero[kAhead][kGroups][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int u = base + a * kWarps;
      if (u >= units) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        unit[a][v] = load_stream(stream + static_cast<long>(u) * kUnitBytes<W> + v * 512);
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int group = kByGroup ? u * kUnitInputs / (kByGroup ? kGroup : 1) + i : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = group * kPanelOutputs + scale_place(8 * half + g);
          zero[a][i][half] = whole_zero[half];
          scale[a][i][half] = 1.0f;
          low[a][i][half] = 0.0f;
          if constexpr (kByGroup) {
            scale[a][i][half] = to_float(scale_row[place]);
            if constexpr (kMin) low[a][i][half] = to_float(min_row[place]);
            if constexpr (kZero == Zero::kInt) {
              zero[a][i][half] = zero_pair<Half>(zero_row[group * kPanelOutputs + 2 * g + half]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int u = base + a * kWarps;
      if (u >= units) continue;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        float part[2] = {}, all = 0;
#pragma unroll
        for (int s = 4 / kGroups * i; s < 4 / kGroups * (i + 1); ++s) {
          float in[4];
          const T* at = inputs_of_row + u * kUnitInputs + 16 * s + 2 * t;
          load_pair(at, in[0], in[1]);
          load_pair(at + 8, in[2], in[3]);
          if constexpr (kMin) all += in[0] + in[1] + (in[2] + in[3]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float w[4];
            values<W>(w, unit[a], s, half, zero[a][i][half]);
#pragma unroll
            for (int e = 0; e < 4; ++e) part[half] = fmaf(in[e], w[e], part[half]);
          }
        }
        whole_inputs += all;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[half] = fmaf(part[half], scale[a][i][half], total[half]);
          if constexpr (kMin && kByGroup) total[half] = fmaf(all, low[a][i][half], total[half]);
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kScaled<W> && !kByGroup) {
      const int place = scale_place(8 * half + g);
      total[half] *= to_float(scale_row[place]);
      if constexpr (kMin) total[half] = fmaf(whole_inputs, to_float(min_row[place]), total[half]);
    }
    total[half] = sum_lanes<4>(total[half]);
    if (t == 0) parts[warp * kPanelOutputs + 8 * half + g] = total[half];
  }
  __syncthreads();
  if (tid >= 4) return;
  float sums[2][2] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] += parts[w * kPanelOutputs + 8 * (i / 2) + 2 * tid + i % 2];
  }
  end_panel<T, kEnd>(y, bias, residual, row, panel, tid, outputs, width, sums);
}

}  // namespace llmctl::cuda
