// What is done to the sums of a linear layer before they are stored, in one place for all kernels that make such sums.
#pragma once

#include "weight.cuh"

namespace llmctl::cuda {

// kStore  y = residual + sum + bias, with the residual, if there is one, in y's layout (y itself, too)
// kSilu, kGelu  y[j] = f(sum of gate j) * sum of up j, where a panel's outputs 0..7 are gates and 8..15 their ups
enum class End { kStore, kSilu, kGelu };

template <End kEnd>
constexpr bool kGated = kEnd == End::kSilu || kEnd == End::kGelu;

constexpr float kLog2E = 1.44269504f;

template <End kEnd>
LLMCTL_DEVICE float gate(float v) {
  if constexpr (kEnd == End::kSilu) return v / (1.0f + exp2_fast(-v * kLog2E));
  // gelu's tanh form: v * (1 + tanh u) / 2 is v / (1 + e^-2u).
  const float u = 0.7978845608f * fmaf(0.044715f * v * v, v, v);
  return v / (1.0f + exp2_fast(-2.0f * kLog2E * u));
}

template <class T>
LLMCTL_DEVICE void store_pair(T* p, float low, float high) {
  if constexpr (kSame<T, float>) {
    store_vec(p, Vec2{{bits_of(low), bits_of(high)}});
  } else {
    store_vec(p, pack_pair<T>(low, high));
  }
}
template <class T>
LLMCTL_DEVICE void load_pair(const T* p, float& low, float& high) {
  if constexpr (kSame<T, float>) {
    const Vec2 v = load_vec<Vec2>(p);
    low = float_of(v.w[0]);
    high = float_of(v.w[1]);
  } else {
    const uint32_t v = load_vec<uint32_t>(p);
    low = low_of<T>(v);
    high = high_of<T>(v);
  }
}

// Ends the sums of outputs 2t and 2t + 1 of each half of a panel, of one row; `width` is the row's length in y, even.
template <class T, End kEnd>
LLMCTL_DEVICE void end_panel(T* y, const T* bias, const T* residual, long row, int panel, int t, int outputs, int width,
                             float (&sums)[2][2]) {
  const int first = panel * kPanelOutputs + 2 * t;
  if (bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (first + 8 * half >= outputs) continue;
      float low, high;
      load_pair(bias + first + 8 * half, low, high);
      sums[half][0] += low;
      sums[half][1] += high;
    }
  }
  if constexpr (kGated<kEnd>) {
    const int column = panel * 8 + 2 * t;
    if (column >= width) return;
    store_pair(y + row * width + column, gate<kEnd>(sums[0][0]) * sums[1][0], gate<kEnd>(sums[0][1]) * sums[1][1]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = first + 8 * half;
      if (column >= outputs) continue;
      if (residual != nullptr) {
        float low, high;
        load_pair(residual + row * width + column, low, high);
        sums[half][0] += low;
        sums[half][1] += high;
      }
      store_pair(y + row * width + column, sums[half][0], sums[half][1]);
    }
  }
}

// The sums of a split contraction added up in ascending order, and ended: sums [splits][rows][panels * 16] float32.
// One thread per four outputs of a row: blocks of 128 over (panel, t), grid.y over rows.
template <class T, End kEnd>
__global__ void __launch_bounds__(128)
    linear_reduce(T* y, const float* sums, const T* bias, const T* residual, int rows, int outputs, int width,
                  int splits) {
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
  const int place = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.y);
  const int panel = place / 4, t = place % 4;
  if (panel >= panels) return;
  float total[2][2] = {};
  for (int split = 0; split < splits; ++split) {
    const float* part = sums + ((static_cast<long>(split) * rows + row) * panels + panel) * kPanelOutputs + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float low, high;
      load_pair(part + 8 * half, low, high);
      total[half][0] += low;
      total[half][1] += high;
    }
  }
  end_panel<T, kEnd>(y, bias, residual, row, panel, t, outputs, width, total);
}

}  // namespace llmctl::cuda
