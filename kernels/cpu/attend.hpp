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
// `attend_splits` leaves partials in a workspace (few tiles: splits are spread over threads), `attend_whole` merges at
// once (many tiles); both go through `split_part` and `merge_partial`, so they give the same bits.
//
// Partial: float [kv.head_dim + kPartialExtra]: output, then maximum, sum and how many splits it is of, from its own
// on; the workspace has room for one for each [row][query head][split of max_splits].
#pragma once

#include "act.hpp"
#include "attend_int16.hpp"

namespace llmctl::cpu {

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

// The partial results of one split for kQ score rows with queries q [head_dim][kQ].
template <class Isa, class Format, int kQ>
LLMCTL_INLINE void float_part(const Kv& kv, const float* q, const Visible& visible,
                              const SplitView<typename Format::Elem>& view, float* out, float* maximum, float* sum) {
  using Elem = typename Format::Elem;
  const Segment<Elem>* segments = view.segments;
  alignas(64) float scores[kQ * kAttendSplit];
  for (int s = 0; s < view.count; ++s) {
    each_strip<Isa, kQ>(segments[s].count, [&]<class Lanes, int kVectors>(int t, Lanes, std::integral_constant<int, kVectors>) {
      score_strip<Lanes, Format, kQ, kVectors>(q, segments[s], t, kv, scores + segments[s].at + t);
    });
  }
  if constexpr (Format::kScaled) apply_scales<Isa>(scores, kQ, segments, view.count, &Segment<Elem>::key_scales);
  if constexpr (Format::kMarked) apply_marks<Isa, Format>(scores, kQ, segments, view.count);

  const int to = (view.high + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < kQ; ++r) {
    soften<Isa>(scores + r * kAttendSplit, view.from, to, visible.first[r] - view.origin, visible.end[r] - view.origin,
                maximum + r, sum + r);
  }
  if constexpr (Format::kScaled) apply_scales<Isa>(scores, kQ, segments, view.count, &Segment<Elem>::value_scales);

  each_strip<Isa, kQ>(kv.head_dim, [&]<class Lanes, int kVectors>(int d, Lanes, std::integral_constant<int, kVectors>) {
    value_strip<Lanes, Format, kQ, kVectors>(scores, segments, view.count, view.low, d, kv.head_dim, view.next_keys, out);
  });
}

template <class Isa, class Format>
LLMCTL_INLINE void set_query(TileQueries<Format>& q, int rows, int r, const float* from, int head_dim) {
  if constexpr (Format::kPairs) {
    set_int16_query<Isa>(q, r, from, head_dim);
  } else {
    for (int d = 0; d < head_dim; ++d) q.values[d * rows + r] = from[d] * Format::kFactor;
  }
}

// Partial results of one split for kQ score rows: out [kQ][kMaxHeadDim], maximum and sum [kQ]. `next` is the split of
// the same tile that this thread will probably do after it; it may be behind the last.
template <class Isa, class Format, int kQ>
LLMCTL_NOINLINE void split_part(const Kv& kv, const int32_t* table, int kv_head, const TileQueries<Format>& q,
                                const Visible& visible, int split, int next, float* out, float* maximum, float* sum) {
  SplitView<typename Format::Elem> view;
  view_split<Format, kQ>(kv, table, kv_head, visible, split, next, view);
  if constexpr (Format::kPairs) {
    int16_part<Isa, kQ>(kv, q, visible, view, out, maximum, sum);
  } else {
    float_part<Isa, Format, kQ>(kv, q.values, visible, view, out, maximum, sum);
  }
}

template <class Isa, class Format>
LLMCTL_INLINE void split_part_of(int rows, const Kv& kv, const int32_t* table, int kv_head,
                                 const TileQueries<Format>& q, const Visible& visible, int split, int next, float* out, float* maximum,
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

// The queries of a tile, and what each score row sees. Score row = query * heads + head.
template <class Isa, class Format>
LLMCTL_INLINE void open_tile(const AttendArgs& a, const AttendTile& tile, TileQueries<Format>& q, Visible& visible) {
  const int rows = tile.queries * tile.heads;
  for (int r = 0; r < rows; ++r) {
    const int row = tile.first_row + r / tile.heads;
    set_query<Isa>(q, rows, r, a.q.row(row) + static_cast<long>(tile.first_head + r % tile.heads) * a.kv.head_dim,
                   a.kv.head_dim);
    const Range seen = visible_range(a.batch.position[row], a.window);
    visible.first[r] = seen.begin;
    visible.end[r] = seen.end;
  }
}

// A tile while its splits are merged.
template <class Format>
struct OpenTile {
  TileQueries<Format> q;
  alignas(64) float merged[kTileRows * kMaxHeadDim];
  Visible visible;
  Range splits;
  Running running[kTileRows];
};

template <class Isa, class Format>
LLMCTL_INLINE void start_tile(const AttendArgs& a, const AttendTile& tile, OpenTile<Format>& open) {
  open_tile<Isa>(a, tile, open.q, open.visible);
  open.splits = tile_splits(a, tile);
  for (int r = 0; r < tile.queries * tile.heads; ++r) open.running[r] = {kNever, 0.0f, open.merged + r * kMaxHeadDim};
}

LLMCTL_INLINE void write_partial(float* to, const float* out, float maximum, float sum, int splits, int head_dim) {
  std::memcpy(to, out, sizeof(float) * static_cast<std::size_t>(head_dim));
  to[head_dim] = maximum;
  to[head_dim + 1] = sum;
  to[head_dim + 2] = static_cast<float>(splits);
}

// What a row's first splits give is merged at once: one partial instead of many for the thread that merges the rest.
template <class Isa, class Format>
LLMCTL_NOINLINE void attend_splits(const AttendArgs& a, const AttendTile& tile, int begin, int end, float* partials) {
  OpenTile<Format> open;
  start_tile<Isa>(a, tile, open);
  alignas(64) float out[kTileRows * kMaxHeadDim];
  float maximum[kTileRows], sum[kTileRows];
  Range own[kTileRows];
  const int rows = tile.queries * tile.heads, head_dim = a.kv.head_dim;
  const int32_t* table = a.kv.table + a.batch.slot[tile.first_row] * a.kv.max_blocks;
  const auto partial_of = [&](int r, int split) {
    return partials + partial_index(a, tile.first_row + r / tile.heads, tile.first_head + r % tile.heads, split);
  };
  for (int r = 0; r < rows; ++r) own[r] = split_range({open.visible.first[r], open.visible.end[r]});
  for (int split = begin; split < end; ++split) {
    const int next = least(split + 1, end - 1);
    split_part_of<Isa, Format>(rows, a.kv, table, tile.kv_head, open.q, open.visible, split, next, out, maximum, sum);
    for (int r = 0; r < rows; ++r) {
      if (split < own[r].begin || split >= own[r].end) continue;
      const float* part = out + r * kMaxHeadDim;
      if (own[r].begin >= begin) {
        merge_partial<Isa>(open.running[r], split == own[r].begin, part, maximum[r], sum[r], head_dim);
      } else {
        write_partial(partial_of(r, split), part, maximum[r], sum[r], 1, head_dim);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int splits = least(end, own[r].end) - own[r].begin;
    if (own[r].begin < begin || splits <= 0) continue;
    const Running& all = open.running[r];
    write_partial(partial_of(r, own[r].begin), all.out, all.maximum, all.sum, splits, head_dim);
  }
}

// The keys and values of a split are read by all tiles before the next: they come from memory once.
template <class Isa, class Format>
LLMCTL_NOINLINE void attend_whole(const AttendArgs& a, const AttendTile* tiles, int count) {
  alignas(64) float out[kTileRows * kMaxHeadDim];
  float maximum[kTileRows], sum[kTileRows];
  OpenTile<Format> open[kWholeTiles];
  const int head_dim = a.kv.head_dim;
  const int32_t* table = a.kv.table + a.batch.slot[tiles[0].first_row] * a.kv.max_blocks;
  Range all = tile_splits(a, tiles[0]);
  for (int i = 0; i < count; ++i) {
    start_tile<Isa>(a, tiles[i], open[i]);
    all = {least(all.begin, open[i].splits.begin), most(all.end, open[i].splits.end)};
  }
  for (int split = all.begin; split < all.end; ++split) {
    for (int i = 0; i < count; ++i) {
      OpenTile<Format>& tile = open[i];
      if (split < tile.splits.begin || split >= tile.splits.end) continue;
      const int rows = tiles[i].queries * tiles[i].heads;
      const bool first = a.window == 0 && split == 0;  // of every row
      split_part_of<Isa, Format>(rows, a.kv, table, tiles[i].kv_head, tile.q, tile.visible, split, split + 1,
                                 first ? tile.merged : out, maximum, sum);
      for (int r = 0; r < rows; ++r) {
        if (first) {
          tile.running[r].maximum = maximum[r];
          tile.running[r].sum = sum[r];
          continue;
        }
        const Range own = split_range({tile.visible.first[r], tile.visible.end[r]});
        if (split < own.begin || split >= own.end) continue;
        merge_partial<Isa>(tile.running[r], split == own.begin, out + r * kMaxHeadDim, maximum[r], sum[r], head_dim);
      }
    }
  }
  for (int i = 0; i < count; ++i) {
    for (int r = 0; r < tiles[i].queries * tiles[i].heads; ++r) {
      const long head = tiles[i].first_head + r % tiles[i].heads;
      float* values = a.act.row(tiles[i].first_row + r / tiles[i].heads);
      write_head<Isa>(open[i].running[r], values + head * head_dim, head_dim, a.kv.value_scale(tiles[i].kv_head));
    }
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
        for (int split = splits.begin; split < splits.end;) {
          const float* part = partials + partial_index(a, i, h, split);
          merge_partial<Isa>(running, split == splits.begin, part, part[head_dim], part[head_dim + 1], head_dim);
          split += static_cast<int>(part[head_dim + 2]);
        }
        const float scale = a.kv.value_scale(h / (a.num_heads / a.kv.num_kv_heads));
        write_head<Isa>(running, values + static_cast<long>(h) * head_dim, head_dim, scale);
      }
    }
    quantize_forms<Isa>(a.act, act_row + i);
  }
}

}  // namespace llmctl::cpu
