// out[i] = act[i] @ weight.T over a range of panels and rows: the frame around the tiles of linear_float.hpp and
// linear_int.hpp.
//
// A tile computes kRows rows x 16 outputs of each of kPanels panels into `sums` [kPanels][kRows][16]; every output
// element has one accumulation chain along k, the same for every kRows and kPanels, so the size of a tile, and with it
// the number of rows in the batch, cannot show in the bits. What happens to the sums (bias, add, store) is separate
// code: kept out of the tile, it costs no registers there.
#pragma once

#include "isa.hpp"
#include "table.hpp"

namespace llmctl::cpu {

// Weights that a tile asks memory for while it works: from `at` on, `pace` bytes in each of its steps along k, and as
// much of the panel behind.
struct Ahead {
  static constexpr long kBytes = 3072;  // how far ahead it is that a tile asks for what it reads itself

  const uint8_t* at;
  long pace;
};

// As much of each panel as a step of a tile asks for: what only a later tile reads is kept out of L1.
template <class C, int kPanels>
LLMCTL_INLINE void ask_for(Ahead& ahead, long next) {
  LLMCTL_UNROLL
  for (int p = 0; p < kPanels; ++p) {
    if constexpr (kPanels > 1) {
      C::prefetch_to_l2(ahead.at + p * next);
    } else {
      C::prefetch(ahead.at);
    }
  }
  ahead.at += ahead.pace;
}

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

// Where a tile's vector of sums [panels][kRows][16] lies.
template <class C, int kRows>
LLMCTL_INLINE float* at_sum(float* sums, int row, int v) {
  constexpr int kAcross = kPanel / C::kWidth;
  return sums + (v / kAcross * kRows + row) * kPanel + v % kAcross * C::kWidth;
}

// For tiles that read the act as it is.
struct NothingPrepared {
  using Args = LinearArgs;
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
  Ahead ahead;
  int apart = 1;  // from each of the tile's panels to the next
};

// What the `tile`th of `tiles` asks for that pass by some panels, of which `next` are left. The next panels are wanted
// by the time that these end, so every tile asks for a part of them; but the first panels of all are asked for just
// ahead of their first tile, and so is one panel of one tile, since a thread's panels are one stream. The hardware
// would stop at the end of each page.
template <class Tile, int kPanels>
LLMCTL_INLINE Ahead ahead_of(const LinearArgs& a, int panel, bool is_first, int next, int tile, int tiles) {
  const long steps = a.act.k / Tile::kStep, bytes = a.weight.panel_bytes;
  const uint8_t* w = a.weight.panel(panel);
  if (tiles == 1 || (is_first && tile == 0)) return {w + Ahead::kBytes, (bytes + steps - 1) / steps};
  if (next == 0) return {w, 0};
  const int share = tiles - is_first;
  const long pace = (bytes + share * steps - 1) / (share * steps);
  return {w + kPanels * bytes + (tile - is_first) * pace * steps, pace};
}

template <class Isa, class Tile, int kRows, int kPanels>
LLMCTL_INLINE void run_tile(const typename Tile::Args& a, const TileRows& rows, int panel) {
  alignas(64) float sums[kPanels * kRows * kPanel];
  for (int i = 0; i < kRows; ++i) {
    const float* out = a.out.row(rows.row + i) + static_cast<long>(panel) * kPanel;
    for (int p = 0; p < kPanels; ++p) __builtin_prefetch(out + p * rows.apart * kPanel, 1);
  }
  Tile::template run<kRows, kPanels>(a, panel, rows, sums);
  for (int p = 0; p < kPanels; ++p) {
    finish_tile<Isa>(a, sums + p * kRows * kPanel, kRows, rows.row, panel + p * rows.apart);
  }
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

// A few rows have little work but to wait for memory, which gives most to a few streams far apart: that many parts of
// the panels are read side by side, each asked for ahead. Returns the first panel that is left.
template <class Isa, class Tile, int kRows, int kStreams>
LLMCTL_INLINE int run_streams(const typename Tile::Args& a, TileRows rows, int panel_begin, int panel_end) {
  if constexpr (kStreams == 1) {
    return panel_begin;
  } else {
    const int apart = (panel_end - panel_begin) / kStreams;
    rows.apart = apart;
    for (int panel = panel_begin; panel < panel_begin + apart; ++panel) {
      rows.ahead = ahead_of<Tile, kStreams>(a, panel, true, 0, 0, 1);
      run_tile<Isa, Tile, kRows, kStreams>(a, rows, panel);
    }
    return run_streams<Isa, Tile, kRows, kStreams / 2>(a, rows, panel_begin + apart * kStreams, panel_end);
  }
}

// Runs the tiles of the rows, the fewest and those of about one height, for each panel: a panel stays in L1 while the
// rows pass by, of which Tile::kTogether tiles are prepared at a time. More rows than one tile wait for the loads of their
// values, which two panels share.
template <class Isa, class Tile>
LLMCTL_NOINLINE void linear(const typename Tile::Args& a, int panel_begin, int panel_end, int row_begin, int row_end,
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
                    room + room_for_row * (row - first_row), {}};
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
    const auto run_panels = [&]<int kPanels>(int panel) {
      row = first_row;
      for (int tile = first; tile < last; ++tile) {
        TileRows at = tile_at(first_row, tile, row);
        at.ahead = ahead_of<Tile, kPanels>(a, panel, panel == panel_begin, panel_end - panel - kPanels, tile - first,
                                           last - first);
        with_height<Tile::kMaxRows>(at.count, [&]<int kRows>() {
          // Of several tiles none is lower than half.
          if constexpr (kPanels == 1 || 2 * kRows >= Tile::kMaxRows) run_tile<Isa, Tile, kRows, kPanels>(a, at, panel);
        });
        row += at.count;
      }
    };
    int panel = panel_begin;
    if (tiles == 1) {
      with_height<Tile::kMaxRows>(rows, [&]<int kRows>() {
        constexpr int kStreams = kRows == 1 ? Tile::kStreams : kRows == 2 ? 2 * Tile::kFewStreams : Tile::kFewStreams;
        panel = run_streams<Isa, Tile, kRows, kStreams>(a, tile_at(first_row, first, first_row), panel, panel_end);
      });
    } else {
      for (; panel + Tile::kPanels <= panel_end; panel += Tile::kPanels) {
        run_panels.template operator()<Tile::kPanels>(panel);
      }
    }
    for (; panel < panel_end; ++panel) run_panels.template operator()<1>(panel);
  }
}

}  // namespace llmctl::cpu
