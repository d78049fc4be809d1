// Linear tiles of int4 weights in tile registers: the sums of a group are a few products of tiles, 16 rows x 16 columns.
// They are scaled as in linear_int.hpp, in the same order, so the bits are the same.
//
// A row of a tile register holds four k, a quad, of each of 16 columns, and its products are of signed bytes: a panel is
// unpacked before rows pass by it, to what its codes stand for - q - 8, q - z, or q where minima are added. Zero points
// are 0 to 16.
// A wide quad is two quads more, for its products are 16 times a code: each has 8 times the code, and the high part of
// the activations once.
//
// Of a group of 32, scaling takes more time than the products do, and beside tiles the vector unit has half its speed: there
// all kinds without minima have sums that need no conversion (kSumBias).
#pragma once

#include <algorithm>
#include <cstdlib>

#include "linear.hpp"
#include "linear_int.hpp"
#include "tile_unit.hpp"

namespace llmctl::cpu {

constexpr int kTileHeight = 16, kWideQuads = 2, kWideBytes = 4 * kWideQuads;
constexpr int kMostBiasedGroup = 1024;   // codes of 16 x 127, and four wide ones of 16 times that: their sum is smaller

// How a group lies in tiles: `steps` products of `step_bytes` a row, then one of its wide quad's two. A group of 32 is
// one product and has its wide quad's in it. Rows of the act are kActRow apart: no load of one crosses a cache line.
template <int kStepBytes>
struct StepShape {
  static_assert(kStepBytes == 32 || kStepBytes == 32 + kWideBytes || kStepBytes == 64);
  static constexpr int kCodes = kStepBytes == 64 ? 64 : 32;
  static constexpr int kActRow = kStepBytes == 32 ? 32 : 64;
  static constexpr bool kWideInside = kStepBytes > kCodes;
};

// The same of a weight, and the sizes that follow.
struct GroupTiles {
  int steps, step_bytes, act_row, tail_bytes;

  GroupTiles(int group, bool wide)
      : steps(group == 32 ? 1 : group / 64),
        step_bytes(group != 32 ? 64 : wide ? 32 + kWideBytes : 32),
        act_row(step_bytes == 32 ? 32 : 64),
        tail_bytes(wide && group != 32 ? kWideBytes : 0) {}
  static bool hold(int group) { return group == 32 || group % 64 == 0; }

  int quads() const { return (steps * step_bytes + tail_bytes) / 4; }
  long act_bytes() const { return kTileHeight * (static_cast<long>(steps) * act_row + tail_bytes); }
  long act_facts() const { return 2 * kTileHeight; }        // scales and sums
  long panel_bytes() const { return 64L * (quads() + 2); }  // quads, scales, and what is added
};

// Tiles of a thread: the sums, steps of rows and of columns, and those of wide quads. The groups take two sets in turn.
template <int kOdd>
struct TileNames {
  static constexpr int kSums = 4 * kOdd, kRows = kSums + 1, kColumns = kSums + 2, kWideRows = 3, kWideColumns = 7;
};

LLMCTL_INLINE TileShapes tile_shapes(const GroupTiles& group) {
  TileShapes to;
  for (int odd : {0, 4}) {
    to.set(odd, kTileHeight, 64);
    to.set(odd + 1, kTileHeight, group.step_bytes);
    to.set(odd + 2, group.step_bytes / 4, 64);
  }
  to.set(TileNames<0>::kWideRows, kTileHeight, kWideBytes);
  to.set(TileNames<0>::kWideColumns, kWideQuads, 64);
  return to;
}

// Some groups of `count` rows of the act as a whole tile, where missing rows are zeros: per group codes
// [steps][kTileHeight][kActRow] and those of its wide quad [kTileHeight][tail_bytes], and to `facts` scales and sums,
// float32 [groups][2][kTileHeight].
template <int kStepBytes, bool kSums>
LLMCTL_NOINLINE void gather_act(const Form& form, const GroupTiles& group, long act_k, long row, int count, long first,
                                long groups, uint8_t* __restrict to, float* __restrict facts) {
  using Step = StepShape<kStepBytes>;
  const int steps = group.steps;
  const long act_bytes = group.act_bytes(), in_row = act_k / form.group;
  if (count < kTileHeight) {
    std::memset(to, 0, groups * act_bytes);
    std::memset(facts, 0, groups * group.act_facts() * sizeof(float));
  }
  for (int i = 0; i < count; ++i) {
    const long at = (row + i) * in_row + first;
    const int8_t* __restrict codes = static_cast<const int8_t*>(form.codes) + (row + i) * act_k + first * form.group;
    uint8_t* __restrict out = to + i * Step::kActRow;
    for (long g = 0; g < groups; ++g, out += act_bytes) {
      for (int step = 0; step < steps; ++step, codes += Step::kCodes) {
        std::memcpy(out + step * kTileHeight * Step::kActRow, codes, Step::kCodes);
      }
      facts[g * 2 * kTileHeight + i] = form.scales[at + g];
      if constexpr (kSums) facts[(g * 2 + 1) * kTileHeight + i] = static_cast<float>(form.sums[at + g]);
      if constexpr (Step::kWideInside) {
        const int32_t twice[kWideQuads] = {form.high[at + g], form.high[at + g]};
        std::memcpy(out + Step::kCodes, twice, kWideBytes);
      }
    }
    if (group.tail_bytes != 0) {
      uint8_t* tail = to + steps * kTileHeight * Step::kActRow + i * kWideBytes;
      for (long g = 0; g < groups; ++g, tail += act_bytes) {
        const int32_t twice[kWideQuads] = {form.high[at + g], form.high[at + g]};
        std::memcpy(tail, twice, kWideBytes);
      }
    }
  }
}

// Some groups of a panel: its codes as signed bytes, by quads, then its scales and what is added to products, float32:
// minima, or what takes the bias off again, which is exact since a scale is finite and has 11 bits.
template <class C, WeightKind kKind>
LLMCTL_NOINLINE void unpack_panel(const uint8_t* __restrict w, const uint8_t* __restrict wide, const GroupTiles& group,
                                  long first, long groups, uint8_t* __restrict to) {
  using I = typename C::I;
  const long panel_bytes = group.panel_bytes();
  const int codes = group.steps * (group.step_bytes == 64 ? 16 : 8);  // quads
  w += first * (2 * kPanel * (kKind == WeightKind::int4 ? 1 : 2) + 32L * codes);
  float* scales = reinterpret_cast<float*>(to + panel_bytes - 128);
  for (long g = first; g < first + groups; ++g, to += panel_bytes, scales += panel_bytes / 4) {
    const auto scale = C::load_f16(reinterpret_cast<const uint16_t*>(w));
    C::store(scales, scale);
    w += 2 * kPanel;
    I off = C::set1_i(0x08080808);
    if constexpr (kKind != WeightKind::int4_min) C::store(scales + kPanel, C::mul(scale, C::set1(-kSumBias)));
    if constexpr (kKind != WeightKind::int4) {
      const auto zero = C::load_f16(reinterpret_cast<const uint16_t*>(w));
      if constexpr (kKind == WeightKind::int4_int) {
        off = C::mul_i(C::to_int(zero), C::set1_i(0x01010101));
      } else {
        C::store(scales + kPanel, zero);
      }
      w += 2 * kPanel;
    }
    for (int quad = 0; quad < codes; quad += 8) {
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
      for (int i = 0; i < kWideQuads; ++i) C::store_bytes(to + 64 * (codes + i), eightfold);
    }
  }
}

// Products of a group of `x` and of a panel's, into the sums of its set; both move on to the next group.
template <int kOdd, int kStepBytes, bool kBiased>
LLMCTL_INLINE void multiply_group(const GroupTiles& group, const uint8_t*& x, const uint8_t*& w) {
  using Names = TileNames<kOdd>;
  using Step = StepShape<kStepBytes>;
  alignas(64) static constexpr float kBias[kPanel] = {kSumBias, kSumBias, kSumBias, kSumBias, kSumBias, kSumBias,
                                                      kSumBias, kSumBias, kSumBias, kSumBias, kSumBias, kSumBias,
                                                      kSumBias, kSumBias, kSumBias, kSumBias};
  if constexpr (kBiased) {
    tile_load<Names::kSums>(kBias, 0);
  } else {
    tile_zero<Names::kSums>();
  }
  const int steps = kStepBytes == 64 ? group.steps : 1;
  const uint8_t* at = w;
  for (int step = 0; step < steps; ++step, x += kTileHeight * Step::kActRow, at += 16 * kStepBytes) {
    tile_load<Names::kRows>(x, Step::kActRow);
    tile_load<Names::kColumns>(at, 64);
    tile_dot4<Names::kSums, Names::kRows, Names::kColumns>();
  }
  if constexpr (kStepBytes == 64) {
    if (group.tail_bytes != 0) {
      tile_load<Names::kWideRows>(x, kWideBytes);
      tile_load<Names::kWideColumns>(at, 64);
      tile_dot4<Names::kSums, Names::kWideRows, Names::kWideColumns>();
      x += kTileHeight * kWideBytes;
    }
    w += group.panel_bytes();
  } else {
    w += 16 * kStepBytes + 128;
  }
}

// acc += a group's products times their scales: those of the columns, with what is added behind them, and those of the
// rows, with sums behind them.
template <class C, WeightKind kKind, bool kBiased, int kRows>
LLMCTL_INLINE void scale_group(const int32_t* products, const uint8_t* columns, const float* rows,
                               typename C::F (&acc)[kRows]) {
  using F = typename C::F;
  const float* scales = reinterpret_cast<const float*>(columns);
  const F scale = C::load(scales);
  F added = C::zero();
  if constexpr (kKind == WeightKind::int4_min || kBiased) added = C::load(scales + kPanel);
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    F value;
    if constexpr (kBiased) {  // exact but for the one rounding that the product of sum and scale has
      value = C::fma(C::load(reinterpret_cast<const float*>(products + kPanel * i)), scale, added);
    } else if constexpr (kKind == WeightKind::int4_min) {
      value = C::to_float(C::load_i(products + kPanel * i));
      value = C::fma(value, scale, C::mul(C::broadcast(rows + kTileHeight + i), added));
    } else {
      value = C::mul(C::to_float(C::load_i(products + kPanel * i)), scale);
    }
    acc[i] = C::fma(value, C::broadcast(rows + i), acc[i]);
  }
}

// Some groups of kRows x kPanel outputs of an unpacked panel, on top of those before them in `sums`. While a group is
// scaled, the next one's products are on their way to memory, and those of the one behind it are computed.
// It has no more pointers than registers: gcc would keep one in the vector unit, and tiles would wait for it.
template <class C, WeightKind kKind, int kStepBytes, bool kBiased, int kRows>
LLMCTL_NOINLINE void tile_in_registers(const GroupTiles& shape, const uint8_t* w, const uint8_t* x, const float* rows,
                                       long groups, float* __restrict sums) {
  alignas(64) int32_t products[2][kTileHeight * kPanel];
  const GroupTiles group = shape;
  const long panel_bytes = kStepBytes == 64 ? group.panel_bytes() : 16 * kStepBytes + 128;
  const uint8_t* columns = w + panel_bytes - 128;
  typename C::F acc[kRows];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) acc[i] = C::load(sums + i * kPanel);
  multiply_group<0, kStepBytes, kBiased>(group, x, w);
  if (groups > 1) multiply_group<1, kStepBytes, kBiased>(group, x, w);
  tile_store<TileNames<0>::kSums>(products[0], 64);
  for (long g = 0; g < groups; g += 2) {
    if (g + 2 < groups) multiply_group<0, kStepBytes, kBiased>(group, x, w);
    scale_group<C, kKind, kBiased, kRows>(products[0], columns, rows, acc);
    if (g + 1 < groups) tile_store<TileNames<1>::kSums>(products[1], 64);
    columns += panel_bytes, rows += 2 * kTileHeight;
    if (g + 1 == groups) break;
    if (g + 3 < groups) multiply_group<1, kStepBytes, kBiased>(group, x, w);
    scale_group<C, kKind, kBiased, kRows>(products[1], columns, rows, acc);
    if (g + 2 < groups) tile_store<TileNames<0>::kSums>(products[0], 64);
    columns += panel_bytes, rows += 2 * kTileHeight;
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) C::store(sums + i * kPanel, acc[i]);
}

template <class C, WeightKind kKind, int kStepBytes, bool kBiased>
LLMCTL_INLINE auto tile_of_height(int rows) {
  return rows <= 8    ? tile_in_registers<C, kKind, kStepBytes, kBiased, 8>
         : rows <= 12 ? tile_in_registers<C, kKind, kStepBytes, kBiased, 12>
                      : tile_in_registers<C, kKind, kStepBytes, kBiased, 16>;
}

// The calling thread's memory for rows, panels and sums, 64-byte aligned: too much for a stack, and as much as its largest
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

// Laying out rows pays with many panels, whatever their bytes: they are asked for ahead of their use.
constexpr LinearChunk kTilesChunk{128, 96, 96, 0};

// Whether rows are enough to pay for unpacking a panel, and leave little of the tiles empty: one that is nearly full, or
// more of them that are more than half. Groups of 32, which gain least, want full ones.
LLMCTL_INLINE bool are_enough_for_tiles(int rows, int group) {
  const int room = (rows + kTileHeight - 1) / kTileHeight * kTileHeight;
  if (group == 32) return rows > kTileHeight && 10 * rows >= 9 * room;
  return rows >= 22 || (rows >= 14 && rows <= kTileHeight);
}

// Outputs that no cache of a core has room for are written past it: reading them first, only to write them, would take as
// much time again, and weights stay there.
LLMCTL_INLINE bool are_streamed(const LinearArgs& a) {
  constexpr long kMostBytes = 2L << 20;
  const long rows = a.batch.counts[a.logit_rows_only ? kLogitRows : kRows];
  const bool aligned = reinterpret_cast<std::uintptr_t>(a.out.data) % 64 == 0 && a.out.stride % kPanel == 0;
  return aligned && !a.add && rows * a.out.stride * static_cast<long>(sizeof(float)) > kMostBytes;
}

// As finish_tile, to memory.
template <class C>
LLMCTL_NOINLINE void stream_tile(const LinearArgs& a, const float* sums, int rows, int row, int panel) {
  const long column = static_cast<long>(panel) * kPanel;
  const auto bias = a.bias != nullptr ? C::load(a.bias + column) : C::zero();
  for (int i = 0; i < rows; ++i) C::stream(a.out.row(row + i) + column, C::add(C::load(sums + i * kPanel), bias));
}

// Panels by rows in tiles: rows laid out a span of groups at a time, and of these a block of two panels and of every tile
// in turn, so that with all but the largest groups each product finds its panels in L1. False, and nothing done, if
// there is no memory.
template <class Isa, WeightKind kKind, int kStepBytes, bool kBiased>
LLMCTL_NOINLINE bool run_in_tiles(const LinearArgs& a, const GroupTiles& shape, Range panels, Range rows, int act_row) {
  using C = typename Isa::Columns;
  constexpr long kMostBytes = 768 << 10;  // of rows in tiles at a time: they stay in L2
  constexpr long kBlockBytes = 10 << 10;  // of a tile in a block of groups: it stays in L1, beside that of two panels
  constexpr int kPair = 2;                // panels that share what is in L1 of the rows
  constexpr long kSums = kTileHeight * kPanel;
  const int all = rows.end - rows.begin, tiles = (all + kTileHeight - 1) / kTileHeight;
  const int height = all / tiles, taller = all % tiles;
  const bool streams = are_streamed(a);
  const auto part_of = [](long n, long most) {  // one of the fewest even parts
    const long parts = (n + most - 1) / most;
    return (n + parts - 1) / parts;
  };
  const long groups = a.act.k / a.form.group, facts_of_group = shape.act_facts();
  const long group_bytes = shape.act_bytes() + facts_of_group * static_cast<long>(sizeof(float));
  const long in_span = part_of(groups, std::max(1L, kMostBytes / (tiles * group_bytes)));
  const long in_block = part_of(in_span, std::max(1L, kBlockBytes / shape.act_bytes()));
  const long tile_bytes = in_span * group_bytes, block_bytes = in_block * shape.panel_bytes();
  const int count = panels.end - panels.begin, kept = in_span < groups ? count : kPair;
  uint8_t* room = tile_room(tiles * tile_bytes + kPair * block_bytes + kSums * kept * tiles * sizeof(float));
  if (room == nullptr) return false;
  uint8_t* codes = room + tiles * tile_bytes;
  float* sums = reinterpret_cast<float*>(codes + kPair * block_bytes);
  const auto run = tile_of_height<C, kKind, kStepBytes, kBiased>(height + (taller != 0 ? 1 : 0));
  const auto each_tile = [&](const auto& visit) {
    for (int t = 0, row = rows.begin; t < tiles; ++t) {
      const int here = height + (t < taller ? 1 : 0);
      visit(t, row, here, room + t * tile_bytes);
      row += here;
    }
  };
  tiles_on(tile_shapes(shape));
  for (long span = 0; span < groups; span += in_span) {
    const long span_end = std::min(span + in_span, groups);
    each_tile([&](int, int row, int here, uint8_t* x) {
      gather_act<kStepBytes, kKind == WeightKind::int4_min>(
          a.form, shape, a.act.k, static_cast<long>(act_row) + row, here, span, span_end - span, x,
          reinterpret_cast<float*>(x + in_span * shape.act_bytes()));
    });
    for (int panel = panels.begin; panel < panels.end; panel += kPair) {
      const int pair = std::min(kPair, panels.end - panel), next = std::min(kPair, panels.end - panel - pair);
      // The next panels' parts of this span, each a share for every tile and block.
      const long shares = tiles * ((span_end - span + in_block - 1) / in_block);
      const long part = a.weight.panel_bytes * (span_end - span) / groups;
      Ahead ahead{a.weight.panel(panel + pair) + a.weight.panel_bytes * span / groups, (part + shares - 1) / shares};
      float* of_pair = sums + (kept == kPair ? 0 : (panel - panels.begin) * tiles * kSums);
      const auto at_sums = [&](int t, int p) { return of_pair + (t * pair + p) * kSums; };
      if (span == 0) std::memset(of_pair, 0, tiles * pair * kSums * sizeof(float));
      for (long block = span; block < span_end; block += in_block) {
        const long here = std::min(in_block, span_end - block);
        for (int p = 0; p < pair; ++p) {
          unpack_panel<C, kKind>(a.weight.panel(panel + p), a.form.wide, shape, block, here, codes + p * block_bytes);
        }
        const bool is_last = block + here == groups;
        each_tile([&](int t, int row, int high, const uint8_t* x) {
          const float* facts = reinterpret_cast<const float*>(x + in_span * shape.act_bytes());
          for (int p = 0; p < pair; ++p) {
            if (p < next) {
              const uint8_t* from = ahead.at + p * a.weight.panel_bytes;
              for (long at = 0; at < ahead.pace; at += 64) C::prefetch_to_l2(from + at);
            }
            if (is_last && !streams) {
              const long column = static_cast<long>(panel + p) * kPanel;
              for (int i = 0; i < high; ++i) __builtin_prefetch(a.out.row(row + i) + column, 1);
            }
            run(shape, codes + p * block_bytes, x + (block - span) * shape.act_bytes(),
                facts + (block - span) * facts_of_group, here, at_sums(t, p));
          }
          ahead.at += ahead.pace;
        });
      }
      if (span_end == groups) {
        each_tile([&](int t, int row, int high, const uint8_t*) {
          for (int p = 0; p < pair; ++p) {
            if (streams) {
              stream_tile<C>(a, at_sums(t, p), high, row, panel + p);
            } else {
              finish_tile<Isa>(a, at_sums(t, p), high, row, panel + p);
            }
          }
        });
      }
    }
  }
  if (streams) C::end_stream();
  tiles_off();
  return true;
}

// As `linear` of linear.hpp, which computes what is not faster here, few rows, and what is not done here: other groups.
template <class Isa, WeightKind kKind>
LLMCTL_NOINLINE void linear_tiles(const LinearArgs& a, int panel_begin, int panel_end, int row_begin, int row_end,
                                  int act_row) {
  constexpr bool kBiased = kKind != WeightKind::int4_min;
  const Range panels{panel_begin, panel_end}, rows{row_begin, row_end};
  const GroupTiles shape(a.form.group, a.form.wide != nullptr);
  bool done = false;
  if (are_enough_for_tiles(row_end - row_begin, a.form.group) && GroupTiles::hold(a.form.group)) {
    const auto run = shape.step_bytes == 32             ? run_in_tiles<Isa, kKind, 32, kBiased>
                     : shape.step_bytes != 64           ? run_in_tiles<Isa, kKind, 32 + kWideBytes, kBiased>
                     : a.form.group <= kMostBiasedGroup ? run_in_tiles<Isa, kKind, 64, kBiased>
                                                        : run_in_tiles<Isa, kKind, 64, false>;
    done = run(a, shape, panels, rows, act_row);
  }
  if (!done) {
    avx512_table().linear[static_cast<int>(kKind)](a, panel_begin, panel_end, row_begin, row_end, act_row);
  }
}

}  // namespace llmctl::cpu
