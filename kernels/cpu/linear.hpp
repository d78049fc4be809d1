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

// How far ahead of a tile its weights are asked for, next panel included: the hardware stops at the end of a page, and
// a thread's panels are one stream.
constexpr int kPrefetchBytes = 1024;

// Adds bias and output where they are asked for, and stores.
template <class Isa>
LLMCTL_NOINLINE void finish_tile(const LinearArgs& a, const float* sums, int rows, int row, int panel) {
  using F = typename Isa::F;
  const long column = static_cast<long>(panel) * kPanel;
  F bias[2] = {Isa::zero(), Isa::zero()};
  if (a.bias != nullptr) bias[0] = Isa::load(a.bias + column), bias[1] = Isa::load(a.bias + column + kLanes);
  for (int i = 0; i < rows; ++i) {
    float* out = a.out.row(row + i) + column;
    F low = Isa::add(Isa::load(sums + i * kPanel), bias[0]);
    F high = Isa::add(Isa::load(sums + i * kPanel + kLanes), bias[1]);
    if (a.add) low = Isa::add(Isa::load(out), low), high = Isa::add(Isa::load(out + kLanes), high);
    Isa::store(out, low);
    Isa::store(out + kLanes, high);
  }
}

template <class Isa, class Tile, int kRows>
LLMCTL_INLINE void run_tile(const LinearArgs& a, int panel, int row, int act_row) {
  alignas(64) float sums[kRows * kPanel];
  Tile::template run<kRows>(a, panel, act_row + row, sums);
  finish_tile<Isa>(a, sums, kRows, row, panel);
}

// A tile of `rows` rows, one of 1..kMost.
template <class Isa, class Tile, int kMost>
LLMCTL_INLINE void run_height(const LinearArgs& a, int rows, int panel, int row, int act_row) {
  if constexpr (kMost > 0) {
    if (rows == kMost) {
      run_tile<Isa, Tile, kMost>(a, panel, row, act_row);
    } else {
      run_height<Isa, Tile, kMost - 1>(a, rows, panel, row, act_row);
    }
  }
}

// Runs Tile::run<kRows> over the rows, in the fewest tiles and those of about one height, and over the panels outside: a
// panel stays in L1 while the rows pass by.
template <class Isa, class Tile>
LLMCTL_NOINLINE void linear(const LinearArgs& a, int panel_begin, int panel_end, int row_begin, int row_end,
                            int act_row) {
  const int rows = row_end - row_begin, tiles = (rows + Tile::kMaxRows - 1) / Tile::kMaxRows;
  for (int p = panel_begin; p < panel_end; ++p) {
    int i = row_begin;
    for (int tile = 0; tile < tiles; ++tile) {
      const int height = rows / tiles + (tile < rows % tiles ? 1 : 0);
      run_height<Isa, Tile, Tile::kMaxRows>(a, height, p, i, act_row);
      i += height;
    }
  }
}

}  // namespace llmctl::cpu
