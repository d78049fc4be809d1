// out[i] = act[i] @ weight.T over a range of panels and rows: the frame around the tiles of linear_float.hpp and
// linear_int.hpp.
//
// A tile computes kRows rows x 16 outputs into `sums` [kRows][16]; every output element has one accumulation chain
// along k, the same for every kRows, so the height of a tile, and with it the number of rows in the batch, cannot show
// in the bits. What happens to the sums (bias, add, store) is separate code: kept out of the tile, it costs no
// registers there.
#pragma once

#include "isa.hpp"
#include "table.hpp"

namespace llmctl::cpu {

template <class Isa>
LLMCTL_INLINE void finish_tile(const LinearArgs& a, const float* sums, int rows, int row, int panel) {
  for (int i = 0; i < rows; ++i) {
    float* out = a.out.row(row + i) + static_cast<long>(panel) * kPanel;
    for (int j = 0; j < kPanel; j += kLanes) {
      auto v = Isa::load(sums + i * kPanel + j);
      if (a.bias != nullptr) v = Isa::add(v, Isa::load(a.bias + static_cast<long>(panel) * kPanel + j));
      if (a.add) v = Isa::add(Isa::load(out + j), v);
      Isa::store(out + j, v);
    }
  }
}

// Runs Tile::run<kRows> over the rows, as high as possible, and over the panels outside: a panel stays in L1 while the
// rows pass by.
template <class Isa, class Tile>
LLMCTL_NOINLINE void linear(const LinearArgs& a, int panel_begin, int panel_end, int row_begin, int row_end,
                            int act_row) {
  alignas(32) float sums[Tile::kMaxRows * kPanel];
  for (int p = panel_begin; p < panel_end; ++p) {
    int i = row_begin;
    for (; i + Tile::kMaxRows <= row_end; i += Tile::kMaxRows) {
      Tile::template run<Tile::kMaxRows>(a, p, act_row + i, sums);
      finish_tile<Isa>(a, sums, Tile::kMaxRows, i, p);
    }
    const int left = row_end - i;
    switch (left) {
      case 5: Tile::template run<least(5, Tile::kMaxRows)>(a, p, act_row + i, sums); break;
      case 4: Tile::template run<least(4, Tile::kMaxRows)>(a, p, act_row + i, sums); break;
      case 3: Tile::template run<3>(a, p, act_row + i, sums); break;
      case 2: Tile::template run<2>(a, p, act_row + i, sums); break;
      case 1: Tile::template run<1>(a, p, act_row + i, sums); break;
      default: continue;
    }
    finish_tile<Isa>(a, sums, left, i, p);
  }
}

}  // namespace llmctl::cpu
