// Linear tiles for float weights with float32 activations: one fma per input, in ascending order.
//
// Panel: [k][16]. f32 and f16 hold columns 0..15 in order; bf16 holds pairs (column j, column j + 8), so that a shift
// and a mask give two vectors of 8 columns without a shuffle. 6 rows x 2 vectors = 12 accumulators.
#pragma once

#include "linear.hpp"

namespace llmctl::cpu {

template <class Isa, WeightKind kKind>
LLMCTL_INLINE void load_columns(const uint8_t* w, typename Isa::F& a, typename Isa::F& b) {
  if constexpr (kKind == WeightKind::f32) {
    const float* p = reinterpret_cast<const float*>(w);
    a = Isa::load(p);
    b = Isa::load(p + kLanes);
  } else if constexpr (kKind == WeightKind::f16) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(w);
    a = Isa::load_f16(p);
    b = Isa::load_f16(p + kLanes);
  } else {
    Isa::load_bf16_pairs(reinterpret_cast<const uint16_t*>(w), a, b);
  }
}

template <class Isa, WeightKind kKind, int kRows>
LLMCTL_NOINLINE void tile_float(const uint8_t* __restrict w, const float* __restrict x, long x_stride, int k,
                                float* __restrict sums) {
  using F = typename Isa::F;
  constexpr long kRowBytes = kPanel * (kKind == WeightKind::f32 ? 4 : 2);
  F acc[kRows][2];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = Isa::zero();
#pragma GCC unroll 1
  for (int j = 0; j < k; ++j) {
    F a, b;
    load_columns<Isa, kKind>(w, a, b);
    w += kRowBytes;
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xi = Isa::broadcast(x + i * x_stride + j);
      acc[i][0] = Isa::fma(xi, a, acc[i][0]);
      acc[i][1] = Isa::fma(xi, b, acc[i][1]);
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    Isa::store(sums + i * kPanel, acc[i][0]);
    Isa::store(sums + i * kPanel + kLanes, acc[i][1]);
  }
}

template <class Isa, WeightKind kKind>
struct FloatTile {
  static constexpr int kMaxRows = 6;
  template <int kRows>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, long row, float* sums) {
    tile_float<Isa, kKind, kRows>(a.weight.panel(panel), a.act.row(row), a.act.k, a.act.k, sums);
  }
};

}  // namespace llmctl::cpu
