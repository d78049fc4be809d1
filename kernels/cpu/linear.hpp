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

// For tiles that read the act as it is.
struct NothingPrepared {
  static constexpr int kTogether = 1 << 20;
  static long room_for_row(const LinearArgs&) { return 0; }
  template <int kRows>
  LLMCTL_INLINE void prepare(const LinearArgs&, long, int32_t*) {}
};

// Rows of the output, of the act, and what was prepared of them.
struct TileRows {
  int count, row;
  long act_row;
  int32_t* room;
};

template <class Isa, class Tile, int kRows>
LLMCTL_INLINE void run_tile(const LinearArgs& a, const TileRows& rows, int panel) {
  alignas(64) float sums[kRows * kPanel];
  for (int i = 0; i < kRows; ++i) __builtin_prefetch(a.out.row(rows.row + i) + static_cast<long>(panel) * kPanel, 1);
  Tile::template run<kRows>(a, panel, rows.act_row, rows.room, sums);
  finish_tile<Isa>(a, sums, kRows, rows.row, panel);
}

// Calls visit<kRows>() for the height of the tile, one of 1..kMost.
template <int kMost, class Visit>
LLMCTL_INLINE void with_height(int count, const Visit& visit) {
  if constexpr (kMost > 0) {
    if (count == kMost) {
      visit.template operator()<kMost>();
    } else {
      with_height<kMost - 1>(count, visit);
    }
  }
}

// Runs the tiles of the rows, the fewest and those of about one height, for each panel: a panel stays in L1 while the
// rows pass by, of which Tile::kTogether tiles are prepared at a time.
template <class Isa, class Tile>
LLMCTL_NOINLINE void linear(const LinearArgs& a, int panel_begin, int panel_end, int row_begin, int row_end,
                            int act_row) {
  const int rows = row_end - row_begin;
  if (rows == 0) return;
  const int tiles = (rows + Tile::kMaxRows - 1) / Tile::kMaxRows;
  const int height = rows / tiles, taller = rows % tiles;
  const long room_for_row = Tile::room_for_row(a);
  int32_t* room = static_cast<int32_t*>(
      __builtin_alloca(room_for_row * least(rows, Tile::kTogether * Tile::kMaxRows) * sizeof(int32_t)));
  const auto tile_at = [&](int first_row, int tile, int row) {
    return TileRows{height + (tile < taller ? 1 : 0), row, static_cast<long>(act_row) + row,
                    room + room_for_row * (row - first_row)};
  };
  int row = row_begin;
  for (int first = 0; first < tiles; first += Tile::kTogether) {
    const int last = least(tiles, first + Tile::kTogether), first_row = row;
    for (int tile = first; tile < last; ++tile) {
      const TileRows at = tile_at(first_row, tile, row);
      with_height<Tile::kMaxRows>(at.count, [&]<int kRows>() {
        Tile::template prepare<kRows>(a, at.act_row, at.room);
      });
      row += at.count;
    }
    for (int p = panel_begin; p < panel_end; ++p) {
      row = first_row;
      for (int tile = first; tile < last; ++tile) {
        const TileRows at = tile_at(first_row, tile, row);
        with_height<Tile::kMaxRows>(at.count, [&]<int kRows>() { run_tile<Isa, Tile, kRows>(a, at, p); });
        row += at.count;
      }
    }
  }
}

}  // namespace llmctl::cpu
