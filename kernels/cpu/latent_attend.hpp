// Attention on latents as they are stored: softmax(q . K) K, where all heads share K, a row for each position.
//
// A tile is one row of the batch times a chunk of kLatentHeads heads, which are lanes; up to kLatentTiles tiles of one
// sequence pass over a split of kAttendSplit positions together. Since a row's heads see the same positions, nothing is
// masked. The order of every sum is fixed by positions alone:
//   - a score is one chain of fmas over a row of K;
//   - a split's sum of weights is one chain over its positions, and so is each value of its result;
//   - splits are merged in ascending order (attend.hpp).
//
// Partial: float [rank + kPartialExtra]: result, then maximum, then sum; in the workspace one for each
// [row][head][split of max_splits], behind the queries.
#pragma once

#include "attend.hpp"

namespace llmctl::cpu {

constexpr int kScoreKeys = 8;  // positions whose scores are computed together

// Where the positions of a split are stored.
template <class Elem>
struct LatentSplit {
  const Elem* rows[kAttendSplit];
  int origin;
  int count;  // of positions that some row of the tiles sees
};

// out[p][lane] = keys[p] . q[.][lane] for kKeys rows of keys.
template <class Lanes, int kKeys, int kVectors>
LLMCTL_INLINE void score_keys(const float* __restrict keys, const float* __restrict q, int width,
                              float* __restrict out) {
  typename Lanes::F acc[kKeys][kVectors];
  LLMCTL_UNROLL
  for (int p = 0; p < kKeys; ++p) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[p][v] = Lanes::zero();
  }
#pragma GCC unroll 1
  for (int d = 0; d < width; ++d, q += kLatentHeads) {
    typename Lanes::F lanes[kVectors];
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) lanes[v] = Lanes::load(q + Lanes::kWidth * v);
    LLMCTL_UNROLL
    for (int p = 0; p < kKeys; ++p) {
      const typename Lanes::F x = Lanes::broadcast(keys + p * kMaxLatentWidth + d);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[p][v] = Lanes::fma(x, lanes[v], acc[p][v]);
    }
  }
  LLMCTL_UNROLL
  for (int p = 0; p < kKeys; ++p) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) Lanes::store(out + p * kLatentHeads + Lanes::kWidth * v, acc[p][v]);
  }
}

// Scores [kScoreKeys][kLatentHeads]; with at most kLanes heads the upper lanes are left as they are.
template <class Isa>
LLMCTL_NOINLINE void score_lanes(const float* keys, const float* q, int width, int heads, float* out) {
  using Wide = typename Isa::Columns;
  if (heads <= kLanes) {
    score_keys<Isa, kScoreKeys, 1>(keys, q, width, out);
  } else {
    constexpr int kVectors = kLatentHeads / Wide::kWidth, kKeys = kScoreKeys / kVectors;
    for (int p = 0; p < kScoreKeys; p += kKeys) {
      score_keys<Wide, kKeys, kVectors>(keys + p * kMaxLatentWidth, q, width, out + p * kLatentHeads);
    }
  }
}

// Scores of `count` positions to weights exp(score - maximum), 8 heads side by side. A NaN score stays NaN.
template <class Isa>
LLMCTL_INLINE void soften_lanes(float* scores, int count, float* maximum, float* sum) {
  using F = typename Isa::F;
  F top = Isa::load(scores);
  for (int t = 1; t < count; ++t) top = Isa::max(top, Isa::load(scores + t * kLatentHeads));
  Isa::store(maximum, top);
  F total = Isa::zero();
  for (int t = 0; t < count; ++t) {
    const F w = exp<Isa>(Isa::sub(Isa::load(scores + t * kLatentHeads), top));
    total = Isa::add(total, w);
    Isa::store(scores + t * kLatentHeads, w);
  }
  Isa::store(sum, total);
}

// out [kQ][kMaxHeadDim]: sum over positions of weight * row of K, for kQ heads.
template <class Isa, class Format, int kQ>
LLMCTL_NOINLINE void latent_values(const float* weights, const LatentSplit<typename Format::Elem>& split, int count,
                                   int rank, float* out) {
  each_strip<Isa, kQ>(rank, [&]<class Lanes, int kVectors>(int d, Lanes, std::integral_constant<int, kVectors>) {
    typename Lanes::F acc[kQ][kVectors];
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Lanes::zero();
    }
    for (int t = 0; t < count; ++t) {
      multiply_in<Lanes, Format, kQ, kVectors>(weights + t * kLatentHeads, 1, split.rows[t] + d, acc);
    }
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) Lanes::store(out + r * kMaxHeadDim + d + Lanes::kWidth * v, acc[r][v]);
    }
  });
}

template <class Isa, class Format>
LLMCTL_INLINE void latent_values_of(int heads, const float* weights, const LatentSplit<typename Format::Elem>& split,
                                    int count, int rank, float* out) {
  for (int h = 0; h < heads; h += kTileRows) {
    const float* w = weights + h;
    float* to = out + h * kMaxHeadDim;
    switch (heads - h) {
      case 1: latent_values<Isa, Format, 1>(w, split, count, rank, to); break;
      case 2: latent_values<Isa, Format, 2>(w, split, count, rank, to); break;
      case 3: latent_values<Isa, Format, 3>(w, split, count, rank, to); break;
      case 4: latent_values<Isa, Format, 4>(w, split, count, rank, to); break;
      case 5: latent_values<Isa, Format, 5>(w, split, count, rank, to); break;
      default: latent_values<Isa, Format, 6>(w, split, count, rank, to); break;
    }
  }
}

// What the tiles see of one split: how many positions each, and the weights of those.
template <class Elem>
struct LatentWeights {
  LatentSplit<Elem> split;
  int seen[kLatentTiles];
  alignas(64) float weights[kLatentTiles][kAttendSplit * kLatentHeads];
  alignas(64) float maximum[kLatentTiles][kLatentHeads];
  alignas(64) float sum[kLatentTiles][kLatentHeads];
};

// Stored rows are brought to float32 a few at a time, for all tiles.
template <class Isa, class Format>
LLMCTL_NOINLINE void weigh_split(const LatentArgs& a, const float* queries, const LatentTile& tile, int number,
                                 LatentWeights<typename Format::Elem>& found) {
  using Elem = typename Format::Elem;
  LatentSplit<Elem>& split = found.split;
  split.origin = number * kAttendSplit;
  split.count = 0;
  for (int i = 0; i < tile.rows; ++i) {
    found.seen[i] = least(kAttendSplit, a.batch.position[tile.first_row + i] + 1 - split.origin);
    split.count = most(split.count, found.seen[i]);
  }
  const int32_t* table = a.kv.table + a.batch.slot[tile.first_row] * a.kv.max_blocks;
  for (int t = 0; t < split.count; ++t) {
    const int p = split.origin + t;
    split.rows[t] = reinterpret_cast<const Elem*>(a.kv.row(table[p / a.kv.block_size], p % a.kv.block_size));
  }

  const int heads = latent_heads(a, tile.chunk);
  alignas(64) float keys[kScoreKeys * kMaxLatentWidth];
  for (int t = 0; t < split.count; t += kScoreKeys) {
    for (int p = 0; p < kScoreKeys; ++p) {  // behind the end the last one again: its scores are not read
      const Elem* row = split.rows[least(t + p, split.count - 1)];
      for (int d = 0; d < a.kv.width; d += kLanes) {
        Isa::store(keys + p * kMaxLatentWidth + d, Format::template load<Isa>(row + d));
      }
    }
    for (int i = 0; i < tile.rows; ++i) {
      if (t >= found.seen[i]) continue;
      score_lanes<Isa>(keys, latent_chunk(a, queries, tile.first_row + i, tile.chunk), a.kv.width, heads,
                       found.weights[i] + t * kLatentHeads);
    }
  }
  for (int i = 0; i < tile.rows; ++i) {
    if (found.seen[i] <= 0) continue;
    for (int h = 0; h < heads; h += kLanes) {
      soften_lanes<Isa>(found.weights[i] + h, found.seen[i], found.maximum[i] + h, found.sum[i] + h);
    }
  }
}

template <class Isa, class Format>
LLMCTL_NOINLINE void latent_split(const LatentArgs& a, const float* queries, int row, int chunk, int number,
                                  float* partials) {
  LatentWeights<typename Format::Elem> found;
  alignas(64) float out[kLatentHeads * kMaxHeadDim];
  const int heads = latent_heads(a, chunk), rank = a.up.k;
  weigh_split<Isa, Format>(a, queries, LatentTile{row, 1, chunk}, number, found);
  latent_values_of<Isa, Format>(heads, found.weights[0], found.split, found.seen[0], rank, out);
  for (int h = 0; h < heads; ++h) {
    float* to = partials + latent_partial(a, row, chunk * kLatentHeads + h, number);
    std::memcpy(to, out + h * kMaxHeadDim, sizeof(float) * static_cast<std::size_t>(rank));
    to[rank] = found.maximum[0][h];
    to[rank + 1] = found.sum[0][h];
  }
}

template <class Isa, class Format>
LLMCTL_NOINLINE void latent_whole(const LatentArgs& a, float* queries, const LatentTile& tile) {
  LatentWeights<typename Format::Elem> found;
  alignas(64) float out[kLatentHeads * kMaxHeadDim];
  alignas(64) float merged[kLatentTiles][kLatentHeads * kMaxHeadDim];
  Running running[kLatentTiles][kLatentHeads];
  const int heads = latent_heads(a, tile.chunk), rank = a.up.k;
  const int last = a.batch.position[tile.first_row + tile.rows - 1];
  for (int split = 0; split * kAttendSplit <= last; ++split) {
    weigh_split<Isa, Format>(a, queries, tile, split, found);
    for (int i = 0; i < tile.rows; ++i) {
      if (found.seen[i] <= 0) continue;
      float* to = split == 0 ? merged[i] : out;
      latent_values_of<Isa, Format>(heads, found.weights[i], found.split, found.seen[i], rank, to);
      for (int h = 0; h < heads; ++h) {
        Running& into = running[i][h];
        if (split == 0) {
          into = {found.maximum[i][h], found.sum[i][h], merged[i] + h * kMaxHeadDim};
        } else {
          merge_partial<Isa>(into, false, out + h * kMaxHeadDim, found.maximum[i][h], found.sum[i][h], rank);
        }
      }
    }
  }
  for (int i = 0; i < tile.rows; ++i) {
    float* to = latent_chunk(a, queries, tile.first_row + i, tile.chunk);
    for (int h = 0; h < heads; ++h) write_head<Isa>(running[i][h], to + static_cast<long>(h) * a.kv.width, rank, 1.0f);
  }
}

// The partials of one head, merged to where `latent_project` reads.
template <class Isa>
LLMCTL_NOINLINE void latent_merge(const LatentArgs& a, float* queries, const float* partials, int head, int row_begin,
                                  int row_end) {
  alignas(32) float merged[kMaxHeadDim];
  const int rank = a.up.k;
  for (int i = row_begin; i < row_end; ++i) {
    Running running{kNever, 0.0f, merged};
    for (int split = 0; split * kAttendSplit <= a.batch.position[i]; ++split) {
      const float* part = partials + latent_partial(a, i, head, split);
      merge_partial<Isa>(running, split == 0, part, part[rank], part[rank + 1], rank);
    }
    float* to = latent_chunk(a, queries, i, head / kLatentHeads) + static_cast<long>(head % kLatentHeads) * a.kv.width;
    write_head<Isa>(running, to, rank, 1.0f);
  }
}

}  // namespace llmctl::cpu
