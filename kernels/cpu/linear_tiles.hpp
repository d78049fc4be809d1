// Linear tiles of int4 weights in tile registers: the sums of a group are a few products of tiles, 16 rows x 16 columns.
// They are scaled as in linear_int.hpp, in the same order, so the bits are the same.
//
// A tile register takes four k of a column, a quad, as one of its rows, and its products are of signed bytes: a panel is
// unpacked before rows pass by it, to what its codes stand for - q - 8, q - z, or q where minima are added.
// A wide quad is two quads more, for its products are 16 times a code: each has 8 times the code, and the high part of
// the activations once.
#pragma once

#include <cstdlib>

#include "linear.hpp"
#include "linear_int.hpp"
#include "tile_unit.hpp"

namespace llmctl::cpu {

constexpr int kTileHeight = 16, kTileQuads = 16, kTileStep = 4 * kTileQuads, kWideQuads = 2;

// How a group lies in tiles: `steps` products of 64 k each, then one of its wide quad's two.
struct GroupTiles {
  int steps;
  bool wide;

  int quads() const { return steps * kTileQuads + (wide ? kWideQuads : 0); }
  long act_bytes() const { return kTileHeight * 4L * quads(); }
  long panel_bytes() const { return 64L * (quads() + 2); }  // quads, scales, minima
};

// Tiles of a thread: the sums, steps of rows and of columns, and those of wide quads. The groups take two sets in turn.
template <int kOdd>
struct TileNames {
  static constexpr int kSums = 4 * kOdd, kRows = kSums + 1, kColumns = kSums + 2, kWideRows = 3, kWideColumns = 7;
};

LLMCTL_INLINE TileShapes tile_shapes() {
  TileShapes to;
  for (int odd : {0, 4}) {
    to.set(odd, kTileHeight, 64);
    to.set(odd + 1, kTileHeight, kTileStep);
    to.set(odd + 2, kTileQuads, 64);
  }
  to.set(TileNames<0>::kWideRows, kTileHeight, 4 * kWideQuads);
  to.set(TileNames<0>::kWideColumns, kWideQuads, 64);
  return to;
}

// Rows of the act that are one tile high: per group codes [steps][kTileHeight][kTileStep] and [kTileHeight][8], then for
// every group scales and sums, float32 [2][kTileHeight].
LLMCTL_INLINE long tiled_act_bytes(const GroupTiles& tiles, long groups) {
  return groups * (tiles.act_bytes() + 8 * kTileHeight);
}

template <bool kWide, bool kSums>
LLMCTL_NOINLINE void gather_act(const Form& form, const GroupTiles& tiles, long act_k, long first, int count, long groups,
                                uint8_t* __restrict to) {
  const int8_t* __restrict codes = static_cast<const int8_t*>(form.codes) + first * act_k;
  const float* __restrict scales = form.scales + first * groups;
  const int32_t* __restrict sums = form.sums + first * groups;
  const int32_t* __restrict high = form.high + first * groups;
  const int steps = tiles.steps;
  const long act_bytes = tiles.act_bytes();
  float* __restrict facts = reinterpret_cast<float*>(to + groups * act_bytes);
  for (long g = 0; g < groups; ++g, codes += steps * kTileStep, to += act_bytes, facts += 2 * kTileHeight) {
    for (int i = 0; i < count; ++i) {
      for (int step = 0; step < steps; ++step) {
        std::memcpy(to + (step * kTileHeight + i) * kTileStep, codes + i * act_k + step * kTileStep, kTileStep);
      }
    }
    for (int i = 0; i < count; ++i) facts[i] = scales[i * groups + g];
    if constexpr (kSums) {
      for (int i = 0; i < count; ++i) facts[kTileHeight + i] = static_cast<float>(sums[i * groups + g]);
    }
    if constexpr (kWide) {
      uint8_t* wide = to + steps * kTileHeight * kTileStep;
      for (int i = 0; i < count; ++i) {
        const int32_t twice[kWideQuads] = {high[i * groups + g], high[i * groups + g]};
        std::memcpy(wide + i * sizeof(twice), twice, sizeof(twice));
      }
    }
  }
}

// A panel's codes as signed bytes, by quads, then its scales and minima as float32, per group.
template <class C, WeightKind kKind>
LLMCTL_NOINLINE void unpack_panel(const uint8_t* __restrict w, const uint8_t* __restrict wide, const GroupTiles& tiles,
                                  long groups, uint8_t* __restrict to) {
  using I = typename C::I;
  const long panel_bytes = tiles.panel_bytes();
  const int code_quads = tiles.steps * kTileQuads;
  float* scales = reinterpret_cast<float*>(to + 64 * tiles.quads());
  for (long g = 0; g < groups; ++g, to += panel_bytes, scales += panel_bytes / 4) {
    C::store(scales, C::load_f16(reinterpret_cast<const uint16_t*>(w)));
    w += 2 * kPanel;
    I off = C::set1_i(0x08080808);
    if constexpr (kKind != WeightKind::int4) {
      const auto zero = C::load_f16(reinterpret_cast<const uint16_t*>(w));
      if constexpr (kKind == WeightKind::int4_int) {
        off = C::mul_i(C::to_int(zero), C::set1_i(0x01010101));
      } else {
        C::store(scales + kPanel, zero);
      }
      w += 2 * kPanel;
    }
    for (int quad = 0; quad < code_quads; quad += 8) {
      LLMCTL_UNROLL
      for (int i = quad; i < quad + 8; i += 2, w += 64) {
        typename C::Codes4 low, high;
        C::load_codes4(w, low, high);
        if constexpr (kKind != WeightKind::int4_min) low = C::sub_bytes(low, off), high = C::sub_bytes(high, off);
        C::store_bytes(to + 64 * i, low);
        C::store_bytes(to + 64 * i + 64, high);
      }
    }
    if (wide != nullptr) {
      I eightfold = C::zero_i();
      if (wide[g] != kNoQuad) eightfold = C::bytes_times8(C::load_bytes(to + 64 * wide[g]));
      for (int i = 0; i < kWideQuads; ++i) C::store_bytes(to + 64 * (code_quads + i), eightfold);
    }
  }
}

template <class C>
LLMCTL_INLINE void ask_ahead(Ahead& ahead) {
  for (long at = 0; at < ahead.pace; at += 64) C::prefetch(ahead.at + at);
  ahead.at += ahead.pace;
}

// Products of a group of `x` and of a panel's, into the sums of its set; both move on to the next group.
template <int kOdd>
LLMCTL_INLINE void multiply_group(const GroupTiles& tiles, const uint8_t*& x, const uint8_t*& w) {
  using Names = TileNames<kOdd>;
  const uint8_t* at = w;
  tile_zero<Names::kSums>();
  for (int step = 0; step < tiles.steps; ++step, x += kTileHeight * kTileStep, at += 64 * kTileQuads) {
    tile_load<Names::kRows>(x, kTileStep);
    tile_load<Names::kColumns>(at, 64);
    tile_dot4<Names::kSums, Names::kRows, Names::kColumns>();
  }
  if (tiles.wide) {
    tile_load<Names::kWideRows>(x, 4 * kWideQuads);
    tile_load<Names::kWideColumns>(at, 64);
    tile_dot4<Names::kSums, Names::kWideRows, Names::kWideColumns>();
    x += kTileHeight * 4 * kWideQuads;
  }
  w += tiles.panel_bytes();
}

// acc += a group's products times their scales: those of the columns, with minima behind them, and those of the rows,
// with sums behind them.
template <class C, WeightKind kKind, int kRows>
LLMCTL_INLINE void scale_group(const int32_t* products, const uint8_t* columns, const float* rows,
                               typename C::F (&acc)[kRows]) {
  using F = typename C::F;
  const float* scales = reinterpret_cast<const float*>(columns);
  const F scale = C::load(scales);
  F zero = C::zero();
  if constexpr (kKind == WeightKind::int4_min) zero = C::load(scales + kPanel);
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    F value = C::to_float(C::load_i(products + kPanel * i));
    if constexpr (kKind == WeightKind::int4_min) {
      value = C::fma(value, scale, C::mul(C::broadcast(rows + kTileHeight + i), zero));
    } else {
      value = C::mul(value, scale);
    }
    acc[i] = C::fma(value, C::broadcast(rows + i), acc[i]);
  }
}

// kRows x kPanel outputs of an unpacked panel. While a group is scaled, the next one's products are on their way to
// memory, and those of the one behind it are computed.
template <class C, WeightKind kKind, int kRows>
LLMCTL_NOINLINE void tile_in_registers(const uint8_t* w, const uint8_t* x, GroupTiles tiles, long groups,
                                       Ahead ahead, float* __restrict sums) {
  alignas(64) int32_t products[2][kTileHeight * kPanel];
  const long panel_bytes = tiles.panel_bytes();
  const uint8_t* columns = w + 64 * tiles.quads();
  const float* rows = reinterpret_cast<const float*>(x + groups * tiles.act_bytes());
  typename C::F acc[kRows];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) acc[i] = C::zero();
  multiply_group<0>(tiles, x, w);
  if (groups > 1) multiply_group<1>(tiles, x, w);
  tile_store<TileNames<0>::kSums>(products[0], 64);
  for (long g = 0; g < groups; g += 2) {
    if (g + 2 < groups) multiply_group<0>(tiles, x, w);
    if (g + 1 < groups) tile_store<TileNames<1>::kSums>(products[1], 64);
    ask_ahead<C>(ahead);
    scale_group<C, kKind, kRows>(products[0], columns, rows, acc);
    columns += panel_bytes, rows += 2 * kTileHeight;
    if (g + 1 == groups) break;
    if (g + 3 < groups) multiply_group<1>(tiles, x, w);
    if (g + 2 < groups) tile_store<TileNames<0>::kSums>(products[0], 64);
    ask_ahead<C>(ahead);
    scale_group<C, kKind, kRows>(products[1], columns, rows, acc);
    columns += panel_bytes, rows += 2 * kTileHeight;
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) C::store(sums + i * kPanel, acc[i]);
}

// The calling thread's memory for what it unpacks, 64-byte aligned: too much for a stack, and as much as its largest
// linear needs. Null if there is none.
static uint8_t* tile_room(long bytes) {
  struct Room {
    void* data = nullptr;
    long bytes = 0;
    ~Room() { std::free(data); }
  };
  thread_local Room room;
  if (bytes > room.bytes) {
    std::free(room.data);
    const long whole = (bytes + 4095) / 4096 * 4096;
    room.data = std::aligned_alloc(4096, static_cast<std::size_t>(whole));
    room.bytes = room.data != nullptr ? whole : 0;
  }
  return static_cast<uint8_t*>(room.data);
}

// Whether rows are enough to pay for unpacking a panel: a tile that is nearly full, or two that are more than half.
LLMCTL_INLINE bool are_enough_for_tiles(int rows) { return rows >= 22 || (rows >= 14 && rows <= kTileHeight); }

// As `linear` of linear.hpp, which computes what is not faster here: few rows, and groups of 32, where scaling takes
// most of the time.
template <class Isa, WeightKind kKind>
LLMCTL_NOINLINE void linear_tiles(const LinearArgs& a, int panel_begin, int panel_end, int row_begin, int row_end,
                                  int act_row) {
  using C = typename Isa::Columns;
  constexpr long kMostBytes = 768 << 10;  // of rows in tiles at a time: they stay in L2, beside a panel
  const int rows = row_end - row_begin;
  const auto without_tiles = [&] {
    avx512_table().linear[static_cast<int>(kKind)](a, panel_begin, panel_end, row_begin, row_end, act_row);
  };
  if (!are_enough_for_tiles(rows) || a.form.group % kTileStep != 0) return without_tiles();
  const long groups = a.act.k / a.form.group;
  const GroupTiles tiles{a.form.group / kTileStep, a.form.wide != nullptr};
  const long tile_bytes = tiled_act_bytes(tiles, groups);
  const int all = (rows + kTileHeight - 1) / kTileHeight, height = rows / all, taller = rows % all;
  const int together = least(all, most(1, static_cast<int>(kMostBytes / tile_bytes)));
  uint8_t* room = tile_room(together * tile_bytes + groups * tiles.panel_bytes());
  if (room == nullptr) return without_tiles();
  uint8_t* codes = room + together * tile_bytes;
  std::memset(room, 0, together * tile_bytes);  // also of what no row fills
  constexpr bool kSums = kKind == WeightKind::int4_min;
  const auto gather = tiles.wide ? gather_act<true, kSums> : gather_act<false, kSums>;
  const int tallest = height + (taller != 0 ? 1 : 0);
  const auto run = tallest <= 8    ? tile_in_registers<C, kKind, 8>
                   : tallest <= 12 ? tile_in_registers<C, kKind, 12>
                                   : tile_in_registers<C, kKind, 16>;
  alignas(64) float sums[kTileHeight * kPanel];
  tiles_on(tile_shapes());
  int next_row = row_begin;
  for (int first = 0; first < all; first += together) {
    const int here = least(together, all - first), first_row = next_row;
    const auto each_tile = [&](const auto& visit) {
      next_row = first_row;
      for (int t = 0; t < here; ++t) {
        const int count = height + (first + t < taller ? 1 : 0);
        visit(t, next_row, count, room + t * tile_bytes);
        next_row += count;
      }
    };
    each_tile([&](int, int row, int count, uint8_t* x) {
      gather(a.form, tiles, a.act.k, static_cast<long>(act_row) + row, count, groups, x);
    });
    for (int panel = panel_begin; panel < panel_end; ++panel) {
      unpack_panel<C, kKind>(a.weight.panel(panel), a.form.wide, tiles, groups, codes);
      const long steps = here * groups;
      const long pace = panel + 1 == panel_end ? 0 : (a.weight.panel_bytes + steps - 1) / steps;
      each_tile([&](int t, int row, int count, const uint8_t* x) {
        const Ahead ahead{a.weight.panel(panel + 1) + t * groups * pace, pace};
        run(codes, x, tiles, groups, ahead, sums);
        finish_tile<Isa>(a, sums, count, row, panel);
      });
    }
  }
  tiles_off();
}

}  // namespace llmctl::cpu
