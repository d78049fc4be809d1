// Linear tiles for float weights with float32 activations: one fma per input, in ascending order.
//
// Panel: [k][16]. f32 and f16 hold columns 0..15 in order; bf16 holds pairs (column j, column j + 8), so that a shift
// and a mask give two vectors of 8 columns without a shuffle. 6 rows x 2 vectors of 8, or 8 rows x 16, are a tile.
#pragma once

#include "linear.hpp"

namespace llmctl::cpu {

template <WeightKind kKind>
constexpr long kFloatRowBytes = kPanel * (kKind == WeightKind::f32 ? 4 : 2);

// The 16 columns of one input, as vectors of C = Isa::Columns.
template <class C, WeightKind kKind>
LLMCTL_INLINE void load_columns(const uint8_t* w, typename C::F (&v)[kPanel / C::kWidth]) {
  if constexpr (kKind == WeightKind::bf16) {
    C::load_bf16_pairs(reinterpret_cast<const uint16_t*>(w), v);
  } else {
    LLMCTL_UNROLL
    for (int j = 0; j < kPanel / C::kWidth; ++j) {
      if constexpr (kKind == WeightKind::f32) {
        v[j] = C::load(reinterpret_cast<const float*>(w) + C::kWidth * j);
      } else {
        v[j] = C::load_f16(reinterpret_cast<const uint16_t*>(w) + C::kWidth * j);
      }
    }
  }
}

template <class C, WeightKind kKind, int kRows, int kPanels>
LLMCTL_NOINLINE void tile_float(const uint8_t* __restrict w, long next, Ahead ahead, const float* __restrict x,
                                long x_stride, int k, float* __restrict sums) {
  using F = typename C::F;
  constexpr int kAcross = kPanel / C::kWidth, kVectors = kPanels * kAcross;
  F acc[kRows][kVectors];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[i][v] = C::zero();
  }
#pragma GCC unroll 1
  for (int j = 0; j < k; ++j) {
    F columns[kPanels][kAcross];
    LLMCTL_UNROLL
    for (int p = 0; p < kPanels; ++p) load_columns<C, kKind>(w + p * next, columns[p]);
    ask_for<C, kPanels>(ahead, next);
    w += kFloatRowBytes<kKind>;
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xi = C::broadcast(x + i * x_stride + j);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[i][v] = C::fma(xi, columns[v / kAcross][v % kAcross], acc[i][v]);
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) C::store(at_sum<C, kRows>(sums, i, v), acc[i][v]);
  }
}

template <class Isa, WeightKind kKind>
struct FloatTile : NothingPrepared {
  static constexpr int kMaxRows = Isa::Columns::kFloatRows;
  static constexpr int kPanels = 1, kStreams = Isa::Columns::kFloatStreams,
                       kFewStreams = Isa::Columns::kFewStreams, kStep = 1;
  template <int kRows, int kPanels>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, const TileRows& rows, float* sums) {
    tile_float<typename Isa::Columns, kKind, kRows, kPanels>(a.weight.panel(panel), rows.apart * a.weight.panel_bytes,
                                                             rows.ahead, a.act.row(rows.act_row), a.act.k, a.act.k,
                                                             sums);
  }
};

}  // namespace llmctl::cpu
