// Attention over a paged KV cache: softmax(q . K) V, cut into splits of kAttendSplit positions.
//
// A query tile is `queries` consecutive rows of one sequence times `heads` query heads of one KV head, at most
// kTileRows score rows together. Each split of a tile gives a partial result per score row (unnormalised output,
// maximum, sum), and partials are merged in ascending order of splits. The order of every sum is fixed by positions
// alone:
//   - a score is one chain of fmas over d, in a lane of its own;
//   - the sum of a split's weights has 8 lanes, position % 8; kAttendSplit and block sizes are multiples of 8, so the
//     block size cannot show;
//   - an output element is one chain of fmas over the split's positions.
// Rows of a tile see different ranges of positions. What a row does not see gets weight exactly 0, which leaves a chain
// as it is; and the loops run over the positions that some row of the tile sees, no further, since what lies outside
// may be another sequence's leftovers, NaN included.
//
// `attend_split` leaves partials in a workspace (few tiles: splits are spread over threads), `attend_whole` merges at
// once (many tiles); both go through `split_part` and `merge_partial`, so they give the same bits.
//
// Partial: float [kv.head_dim + kPartialExtra]: output, then maximum, then sum; in the workspace one for each
// [row][query head][split of max_splits].
#pragma once

#include <type_traits>

#include "act.hpp"
#include "kv_format.hpp"
#include "table.hpp"

namespace llmctl::cpu {

constexpr int kMaxSegments = kAttendSplit / 8 + 1;
constexpr float kNever = -__builtin_inff();

// A run of positions of one split inside one block.
template <class Elem>
struct Segment {
  const Elem* keys;              // column of the first position in [head_dim][block_size]
  const Elem* values;            // row of the first position in [block_size][head_dim]
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

// acc[r][v] += factor r * vector v. The smaller of the two sets stays in registers, the other passes through one: of 16
// registers 12 accumulators leave only four.
template <class Lanes, class Format, int kQ, int kVectors>
LLMCTL_INLINE void multiply_in(const float* factors, long factor_stride, const typename Format::Elem* vectors,
                               typename Lanes::F (&acc)[kQ][kVectors]) {
  using F = typename Lanes::F;
  if constexpr (kQ < kVectors) {
    F x[kQ];
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) x[r] = Lanes::broadcast(factors + r * factor_stride);
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const F y = Format::template load<Lanes>(vectors + Lanes::kWidth * v);
      LLMCTL_UNROLL
      for (int r = 0; r < kQ; ++r) acc[r][v] = Lanes::fma(x[r], y, acc[r][v]);
    }
  } else {
    F y[kVectors];
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) y[v] = Format::template load<Lanes>(vectors + Lanes::kWidth * v);
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      const F x = Lanes::broadcast(factors + r * factor_stride);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Lanes::fma(x, y[v], acc[r][v]);
    }
  }
}

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

// Scores of kVectors vectors of positions from `offset` of a segment on, for kQ queries q [head_dim][kQ].
template <class Lanes, class Format, int kQ, int kVectors>
LLMCTL_INLINE void score_strip(const float* __restrict q, const Segment<typename Format::Elem>& segment, int offset,
                               const Kv& kv, float* __restrict scores) {
  using Elem = typename Format::Elem;
  constexpr int kStripBytes = kVectors * Lanes::kWidth * static_cast<int>(sizeof(Elem));
  typename Lanes::F acc[kQ][kVectors];
  LLMCTL_UNROLL
  for (int r = 0; r < kQ; ++r) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Lanes::zero();
  }
  const long stride = kv.block_size;
  const Elem* keys = segment.keys + offset;
  const char* values = reinterpret_cast<const char*>(segment.values + static_cast<long>(offset) * kv.head_dim);
  for (int d = 0; d < kv.head_dim; ++d) {
    multiply_in<Lanes, Format, kQ, kVectors>(q, 1, keys, acc);
    fetch_step<kStripBytes>(values, d);
    q += kQ;
    keys += stride;
    values += kStripBytes;
  }
  LLMCTL_UNROLL
  for (int r = 0; r < kQ; ++r) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) Lanes::store(scores + r * kAttendSplit + Lanes::kWidth * v, acc[r][v]);
  }
}

// out [kQ][head_dim], kVectors vectors of dimensions from d on: sum over the split's positions from `from` on of weight
// * value. `next_keys` are those of as many segments of the split that is probably next.
template <class Lanes, class Format, int kQ, int kVectors>
LLMCTL_INLINE void value_strip(const float* __restrict weights, const Segment<typename Format::Elem>* segments,
                               int count, int from, int d, int head_dim, const char* const* next_keys,
                               float* __restrict out) {
  constexpr int kElemBytes = static_cast<int>(sizeof(typename Format::Elem));
  constexpr int kStripBytes = kVectors * Lanes::kWidth * kElemBytes;
  typename Lanes::F acc[kQ][kVectors];
  LLMCTL_UNROLL
  for (int r = 0; r < kQ; ++r) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Lanes::zero();
  }
  for (int s = 0; s < count; ++s) {
    const int begin = most(from, segments[s].at), end = segments[s].at + segments[s].count;
    const auto* values = segments[s].values + static_cast<long>(begin - segments[s].at) * head_dim + d;
    const char* next = next_keys[s] + static_cast<long>(d) * segments[s].count * kElemBytes;
    for (int t = begin; t < end; ++t) {
      multiply_in<Lanes, Format, kQ, kVectors>(weights + t, kAttendSplit, values, acc);
      fetch_step<kStripBytes>(next, t);
      values += head_dim;
      next += kStripBytes;
    }
  }
  LLMCTL_UNROLL
  for (int r = 0; r < kQ; ++r) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (Format::kFactor != 1.0f) acc[r][v] = Lanes::mul(acc[r][v], Lanes::set1(Format::kFactor));
      Lanes::store(out + r * kMaxHeadDim + d + Lanes::kWidth * v, acc[r][v]);
    }
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

// Scores [from, to) of one row to weights exp(score - maximum), 0 outside [first, end); all counted from the split's
// start, `from` and `to` multiples of 8. A NaN score stays NaN: the caller's finite check must see it.
template <class Isa>
LLMCTL_INLINE void soften(float* scores, int from, int to, int first, int end, float* maximum, float* sum) {
  using F = typename Isa::F;
  const F never = Isa::set1(kNever);
  F top = never;
  for (int t = from; t < to; t += kLanes) {
    F s = Isa::load(scores + t);
    if (t < first || t + kLanes > end) {
      s = Isa::select(Isa::lanes(first - t, end - t), s, never);
      Isa::store(scores + t, s);
    }
    top = Isa::max(top, s);
  }
  *maximum = Isa::max_lane(top);
  const F m = Isa::set1(*maximum);
  F total = Isa::zero();
  for (int t = from; t < to; t += kLanes) {
    const F s = Isa::load(scores + t);
    const F w = Isa::select(Isa::equal(s, never), Isa::zero(), exp<Isa>(Isa::sub(s, m)));
    total = Isa::add(total, w);
    Isa::store(scores + t, w);
  }
  *sum = Isa::sum(total);
}

// rows of [kAttendSplit] times the scale of each position's K or V. What is behind a segment's end is never used.
template <class Isa, class Elem>
LLMCTL_INLINE void apply_scales(float* rows, int num_rows, const Segment<Elem>* segments, int count,
                                const uint16_t* Segment<Elem>::* scales) {
  for (int s = 0; s < count; ++s) {
    for (int t = 0; t < segments[s].count; t += kLanes) {
      const auto scale = Isa::load_bf16(segments[s].*scales + t);
      for (int r = 0; r < num_rows; ++r) {
        float* at = rows + r * kAttendSplit + segments[s].at + t;
        Isa::store(at, Isa::mul(Isa::load(at), scale));
      }
    }
  }
}

// The scores of marked tokens become NaN.
template <class Isa, class Format>
LLMCTL_INLINE void apply_marks(float* scores, int num_rows, const Segment<typename Format::Elem>* segments, int count) {
  for (int s = 0; s < count; ++s) {
    for (int t = 0; t < segments[s].count; t += kLanes) {
      const auto mark = Format::template marked<Isa>(Format::template load<Isa>(segments[s].keys + t));
      if (Isa::mask_bits(mark) == 0) continue;
      for (int r = 0; r < num_rows; ++r) {
        float* at = scores + r * kAttendSplit + segments[s].at + t;
        Isa::store(at, Isa::select(mark, Isa::set1(__builtin_nanf("")), Isa::load(at)));
      }
    }
  }
}

// Partial results of one split for kQ score rows: out [kQ][kMaxHeadDim], maximum and sum [kQ]. `next` is the split of
// the same tile that this thread will probably do after it; it may be behind the last.
template <class Isa, class Format, int kQ>
LLMCTL_NOINLINE void split_part(const Kv& kv, const int32_t* table, int kv_head, const float* q, const Visible& visible,
                                int split, int next, float* out, float* maximum, float* sum) {
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

  Segment<Elem> segments[kMaxSegments];
  int count = 0;
  for (int p = low / kLanes * kLanes; p < high; ++count) {
    const int offset = p % kv.block_size, length = least(kv.block_size - offset, high - p);
    const long block = table[p / kv.block_size];
    const KvHalf keys = half_of(kv, block, kv_head, 0), values = half_of(kv, block, kv_head, 1);
    segments[count] = {reinterpret_cast<const Elem*>(keys.values) + offset,
                       reinterpret_cast<const Elem*>(values.values) + static_cast<long>(offset) * kv.head_dim,
                       keys.scales + offset, values.scales + offset, p - origin, length};
    p += length;
  }

  const char* next_keys[kMaxSegments];
  for (int s = 0; s < count; ++s) {
    const int p = least(next * kAttendSplit + segments[s].at, end - 1);
    next_keys[s] = reinterpret_cast<const char*>(half_of(kv, table[p / kv.block_size], kv_head, 0).values);
  }

  alignas(64) float scores[kQ * kAttendSplit];
  for (int s = 0; s < count; ++s) {
    each_strip<Isa, kQ>(segments[s].count, [&]<class Lanes, int kVectors>(int t, Lanes, std::integral_constant<int, kVectors>) {
      score_strip<Lanes, Format, kQ, kVectors>(q, segments[s], t, kv, scores + segments[s].at + t);
    });
  }
  if constexpr (Format::kScaled) apply_scales<Isa>(scores, kQ, segments, count, &Segment<Elem>::key_scales);
  if constexpr (Format::kMarked) apply_marks<Isa, Format>(scores, kQ, segments, count);

  const int from = low / kLanes * kLanes - origin, to = (high - origin + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < kQ; ++r) {
    soften<Isa>(scores + r * kAttendSplit, from, to, visible.first[r] - origin, visible.end[r] - origin, maximum + r,
                sum + r);
  }
  if constexpr (Format::kScaled) apply_scales<Isa>(scores, kQ, segments, count, &Segment<Elem>::value_scales);

  each_strip<Isa, kQ>(kv.head_dim, [&]<class Lanes, int kVectors>(int d, Lanes, std::integral_constant<int, kVectors>) {
    value_strip<Lanes, Format, kQ, kVectors>(scores, segments, count, low - origin, d, kv.head_dim, next_keys, out);
  });
}

template <class Isa, class Format>
LLMCTL_INLINE void split_part_of(int rows, const Kv& kv, const int32_t* table, int kv_head, const float* q,
                                 const Visible& visible, int split, int next, float* out, float* maximum,
                                 float* sum) {
  switch (rows) {
    case 1: return split_part<Isa, Format, 1>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
    case 2: return split_part<Isa, Format, 2>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
    case 3: return split_part<Isa, Format, 3>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
    case 4: return split_part<Isa, Format, 4>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
    case 5: return split_part<Isa, Format, 5>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
    default: return split_part<Isa, Format, 6>(kv, table, kv_head, q, visible, split, next, out, maximum, sum);
  }
}

// The running result of one score row over ascending splits.
struct Running {
  float maximum;
  float sum;
  float* out;  // [head_dim]
};

// Takes one more split into `to`; `first` starts it.
template <class Isa>
LLMCTL_INLINE void merge_partial(Running& to, bool first, const float* out, float maximum, float sum, int head_dim) {
  using F = typename Isa::F;
  if (first) {
    to.maximum = maximum;
    to.sum = sum;
    for (int d = 0; d < head_dim; d += kLanes) Isa::store(to.out + d, Isa::load(out + d));
    return;
  }
  const float top = to.maximum > maximum ? to.maximum : maximum;
  const F before = exp<Isa>(Isa::set1(to.maximum - top)), now = exp<Isa>(Isa::set1(maximum - top));
  alignas(32) float total[kLanes];
  Isa::store(total, Isa::fma(Isa::set1(sum), now, Isa::mul(Isa::set1(to.sum), before)));
  to.maximum = top;
  to.sum = total[0];
  for (int d = 0; d < head_dim; d += kLanes) {
    Isa::store(to.out + d, Isa::fma(Isa::load(out + d), now, Isa::mul(Isa::load(to.out + d), before)));
  }
}

// The finished head, `scale` times. Adding zero turns -0 into +0: a chain that underflows to -0 would else keep its sign or lose it by
// how many zero weights follow, which depends on the tile.
template <class Isa>
LLMCTL_INLINE void write_head(const Running& from, float* values, int head_dim, float scale) {
  const auto inverse = Isa::set1(scale / from.sum);
  for (int d = 0; d < head_dim; d += kLanes) {
    Isa::store(values + d, Isa::add(Isa::mul(Isa::load(from.out + d), inverse), Isa::zero()));
  }
}

// Query heads of a tile times `factor` as [head_dim][rows], and what each score row sees. Score row = query * heads +
// head.
LLMCTL_INLINE void open_tile(const AttendArgs& a, const AttendTile& tile, float factor, float* q, Visible& visible) {
  const int rows = tile.queries * tile.heads, head_dim = a.kv.head_dim;
  for (int r = 0; r < rows; ++r) {
    const int row = tile.first_row + r / tile.heads;
    const float* from = a.q.row(row) + static_cast<long>(tile.first_head + r % tile.heads) * head_dim;
    for (int d = 0; d < head_dim; ++d) q[d * rows + r] = from[d] * factor;
    const Range seen = visible_range(a.batch.position[row], a.window);
    visible.first[r] = seen.begin;
    visible.end[r] = seen.end;
  }
}

template <class Isa, class Format>
LLMCTL_NOINLINE void attend_split(const AttendArgs& a, const AttendTile& tile, int split, int next,
                                  float* partials) {
  alignas(32) float q[kTileRows * kMaxHeadDim], out[kTileRows * kMaxHeadDim];
  float maximum[kTileRows], sum[kTileRows];
  Visible visible;
  open_tile(a, tile, Format::kFactor, q, visible);
  const int rows = tile.queries * tile.heads;
  const int32_t* table = a.kv.table + a.batch.slot[tile.first_row] * a.kv.max_blocks;
  split_part_of<Isa, Format>(rows, a.kv, table, tile.kv_head, q, visible, split, next, out, maximum, sum);
  for (int r = 0; r < rows; ++r) {
    float* to = partials + partial_index(a, tile.first_row + r / tile.heads, tile.first_head + r % tile.heads, split);
    std::memcpy(to, out + r * kMaxHeadDim, sizeof(float) * static_cast<std::size_t>(a.kv.head_dim));
    to[a.kv.head_dim] = maximum[r];
    to[a.kv.head_dim + 1] = sum[r];
  }
}

template <class Isa, class Format>
LLMCTL_NOINLINE void attend_whole(const AttendArgs& a, const AttendTile& tile) {
  alignas(32) float q[kTileRows * kMaxHeadDim], out[kTileRows * kMaxHeadDim], merged[kTileRows * kMaxHeadDim];
  float maximum[kTileRows], sum[kTileRows];
  Visible visible;
  open_tile(a, tile, Format::kFactor, q, visible);
  const int rows = tile.queries * tile.heads, head_dim = a.kv.head_dim;
  const int32_t* table = a.kv.table + a.batch.slot[tile.first_row] * a.kv.max_blocks;
  Running running[kTileRows];
  for (int r = 0; r < rows; ++r) running[r] = {kNever, 0.0f, merged + r * kMaxHeadDim};
  const Range splits = tile_splits(a, tile);
  for (int split = splits.begin; split < splits.end; ++split) {
    split_part_of<Isa, Format>(rows, a.kv, table, tile.kv_head, q, visible, split, split + 1, out, maximum, sum);
    for (int r = 0; r < rows; ++r) {
      const Range own = split_range({visible.first[r], visible.end[r]});
      if (split < own.begin || split >= own.end) continue;
      merge_partial<Isa>(running[r], split == own.begin, out + r * kMaxHeadDim, maximum[r], sum[r], head_dim);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const long head = tile.first_head + r % tile.heads;
    float* values = a.act.row(tile.first_row + r / tile.heads) + head * head_dim;
    write_head<Isa>(running[r], values, head_dim, a.kv.value_scale(tile.kv_head));
  }
}

template <class Isa>
LLMCTL_NOINLINE void attend_merge(const AttendArgs& a, const float* partials, int row_begin, int row_end, int act_row) {
  alignas(32) float merged[kMaxHeadDim];
  const int head_dim = a.kv.head_dim;
  for (int i = row_begin; i < row_end; ++i) {
    float* values = a.act.row(act_row + i);
    if (partials == nullptr) {
      if (act_row != 0) std::memcpy(values, a.act.row(i), sizeof(float) * static_cast<std::size_t>(a.act.k));
    } else {
      const Range splits = split_range(visible_range(a.batch.position[i], a.window));
      for (int h = 0; h < a.num_heads; ++h) {
        Running running{kNever, 0.0f, merged};
        for (int split = splits.begin; split < splits.end; ++split) {
          const float* part = partials + partial_index(a, i, h, split);
          merge_partial<Isa>(running, split == splits.begin, part, part[head_dim], part[head_dim + 1], head_dim);
        }
        const float scale = a.kv.value_scale(h / (a.num_heads / a.kv.num_kv_heads));
        write_head<Isa>(running, values + static_cast<long>(h) * head_dim, head_dim, scale);
      }
    }
    quantize_forms<Isa>(a.act, act_row + i);
  }
}

}  // namespace llmctl::cpu
