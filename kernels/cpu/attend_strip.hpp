// What the score and value passes of attention share: where a split's keys and values lie, what a score row sees of
// them, and how columns are cut into strips that fill the registers.
#pragma once

#include <type_traits>

#include "kv_format.hpp"
#include "table.hpp"

namespace llmctl::cpu {

constexpr int kMaxSegments = kAttendSplit / 8 + 1;
constexpr int kExactRun = 64;  // products of int16 codes that an int32 holds
constexpr float kNever = -__builtin_inff();

// A run of positions of one split inside one block.
template <class Elem>
struct Segment {
  const Elem* keys;              // of the first position: its column in [head_dim][block_size]
  const Elem* values;            // of the first position: its row in [block_size][head_dim]
  const uint16_t* key_scales;    // of the first position, if the format has any
  const uint16_t* value_scales;
  int at;              // first position, counted from the start of the split; a multiple of 8
  int count;
};

// The positions that each score row of a tile sees: [first, end), absolute.
struct Visible {
  int first[kTileRows];
  int end[kTileRows];
};

// Queries of a tile, times what the format's loads leave to be done.
template <class Format>
struct TileQueries {
  alignas(64) float values[kTileRows * kMaxHeadDim];  // [head_dim][rows]
};

// Fetches what is needed later, a part of it in each step of a strip that reads as much. Memory is the limit when few
// queries share the keys, so it has to work all the time: while scores are computed the split's values come in, and
// while values are added up the keys of the next split.
template <int kStripBytes>
LLMCTL_INLINE void fetch_step(const char* at, int step) {
  constexpr int kEvery = kStripBytes >= 64 ? 1 : 64 / kStripBytes;  // a cache line serves so many steps
  if (step % kEvery == 0) {
    LLMCTL_UNROLL
    for (int line = 0; line < kStripBytes; line += 64) __builtin_prefetch(at + line, 0, 2);
  }
}

// Calls strip(at, lanes, vectors), types that say how many, over [0, count) in strips that are as wide as accumulators
// allow, the last ones narrow: up to kLanes - 1 more than count may be covered.
template <class Isa, int kQ, class Strip>
LLMCTL_INLINE void each_strip(int count, Strip&& strip) {
  using Wide = typename Isa::Columns;
  constexpr int kWide = (kQ <= 3 ? 32 : 16) * (Wide::kWidth > kLanes && kQ > 3 ? 2 : 1);
  int at = 0;
  for (; at + kWide - kLanes < count; at += kWide) strip(at, Wide{}, std::integral_constant<int, kWide / Wide::kWidth>{});
  for (; at + kLanes < count; at += 2 * kLanes) strip(at, Isa{}, std::integral_constant<int, 2>{});
  for (; at < count; at += kLanes) strip(at, Isa{}, std::integral_constant<int, 1>{});
}

// What a tile reads of one split: its positions in runs inside one block, and with a format of pairs inside kExactRun
// positions too. All positions are counted from the split's start.
template <class Elem>
struct SplitView {
  Segment<Elem> segments[kMaxSegments];
  const char* next_keys[kMaxSegments];  // of as many segments of the split that is probably next
  int count;
  int origin;  // the split's start
  int low;     // first position that some row sees
  int from;    // `low` rounded down to a multiple of 8, where the segments begin
  int high;    // end of the positions that some row sees
};

template <class Format, int kQ>
LLMCTL_INLINE void view_split(const Kv& kv, const int32_t* table, int kv_head, const Visible& visible, int split,
                              int next, SplitView<typename Format::Elem>& view) {
  using Elem = typename Format::Elem;
  const int origin = split * kAttendSplit;
  int low = visible.first[0], high = visible.end[0];
  for (int r = 1; r < kQ; ++r) {
    low = least(low, visible.first[r]);
    high = most(high, visible.end[r]);
  }
  const int end = high;
  low = most(low, origin);
  high = least(high, origin + kAttendSplit);

  int count = 0;
  for (int p = low / kLanes * kLanes; p < high; ++count) {
    const int offset = p % kv.block_size;
    int length = least(kv.block_size - offset, high - p);
    if constexpr (Format::kPairs) length = least(length, kExactRun - p % kExactRun);
    const long block = table[p / kv.block_size];
    const KvHalf keys = half_of(kv, block, kv_head, 0), values = half_of(kv, block, kv_head, 1);
    view.segments[count] = {reinterpret_cast<const Elem*>(keys.values) + offset * (Format::kPairs ? 2 : 1),
                            reinterpret_cast<const Elem*>(values.values) + static_cast<long>(offset) * kv.head_dim,
                            keys.scales + offset, values.scales + offset, p - origin, length};
    p += length;
  }
  for (int s = 0; s < count; ++s) {
    const int p = least(next * kAttendSplit + view.segments[s].at, end - 1);
    view.next_keys[s] = reinterpret_cast<const char*>(half_of(kv, table[p / kv.block_size], kv_head, 0).values);
  }
  view.count = count;
  view.origin = origin;
  view.low = low - origin;
  view.from = low / kLanes * kLanes - origin;
  view.high = high - origin;
}

}  // namespace llmctl::cpu
