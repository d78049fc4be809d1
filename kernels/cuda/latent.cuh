// Attention on latents (DeepSeek-V2, 2024) as they are stored: all heads share one row of a token, a latent of kRank
// values and a rotated key of kRope, so heads are to `latent_attend` what queries of one head are elsewhere. Queries come
// brought to where latents are, and what it gives are latents again: linear layers of each head by itself do both
// (linear_mma.cuh, batched).
//
// Layout of the cache: a block of `block_stride` bytes of 2^block_bits tokens holds, `layer_offset` bytes in, T [tokens]
// [kRank + kRope].
#pragma once

#include "attend.cuh"

namespace llmctl::cuda {

template <class T>
LLMCTL_DEVICE void store_two(T* to, float low, float high) {
  if constexpr (kSame<T, float>) {
    store_vec(to, Vec2{{bits_of(low), bits_of(high)}});
  } else {
    store_vec(to, pack_pair<T>(low, high));
  }
}

// Stores each token's latent, normed, and its key, rotated, and rotates the part of its queries that meets such keys.
// Grid (rows, (heads + 1) / 4), blocks of 128 threads: a warp has a head, the last one the latent.
//   queries  T [rows, heads, rank + rope]: gets the rotated part of q [rows, heads, nope + rope]
//   latent   T [rows, latent_stride], of which rank + rope are used;  weight float32 [rank]
//   cosines, sines  float32 [positions, rope / 2];  interleaved: dimensions 2i and 2i + 1 are a pair, else i and
//   i + rope / 2; what is written has pairs apart, in both
template <class T>
__global__ void __launch_bounds__(128)
    latent_store(T* queries, uint8_t* arena, const T* q, const T* latent, const float* weight, const float* cosines,
                 const float* sines, const int32_t* tables, const int32_t* slots, const int32_t* positions,
                 const int32_t* count, int64_t block_stride, int64_t layer_offset, int max_blocks, int block_bits,
                 int heads, int nope, int rank, int rope, int latent_stride, int interleaved, float eps) {
  const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y) * 4 + static_cast<int>(threadIdx.x) / 32;
  if (row >= *count || head > heads) return;
  const int position = positions[row], half = rope / 2;
  const T* from = latent + static_cast<int64_t>(row) * latent_stride;
  T* to = queries + (static_cast<int64_t>(row) * heads + head) * (rank + rope);
  if (head == heads) {
    const int32_t block = tables[static_cast<int64_t>(slots[row]) * max_blocks + (position >> block_bits)];
    to = reinterpret_cast<T*>(arena + block * block_stride + layer_offset) +
         static_cast<int64_t>(position & ((1 << block_bits) - 1)) * (rank + rope);
    float squares = 0;
    for (int i = lane; i < rank; i += 32) {
      const float v = to_float(from[i]);
      squares = fmaf(v, v, squares);
    }
    const float factor = 1.0f / sqrtf(sum_lanes(squares) / static_cast<float>(rank) + eps);
    for (int i = lane; i < rank; i += 32) to[i] = from_float<T>(to_float(from[i]) * factor * weight[i]);
    from += rank;
  } else {
    from = q + (static_cast<int64_t>(row) * heads + head) * (nope + rope) + nope;
  }
  for (int i = lane; i < half; i += 32) {
    const float a = to_float(from[interleaved ? 2 * i : i]), b = to_float(from[interleaved ? 2 * i + 1 : i + half]);
    const float c = cosines[static_cast<int64_t>(position) * half + i];
    const float s = sines[static_cast<int64_t>(position) * half + i];
    to[rank + i] = from_float<T>(a * c - b * s);
    to[rank + half + i] = from_float<T>(fmaf(b, c, a * s));
  }
}

template <class T, int kRank, int kRope, int kTilesM, int kWarps, int kTile, int kStages>
struct LatentShape {
  static constexpr int kRows = 16 * kTilesM, kThreads = 32 * kWarps, kWidth = kRank + kRope;
  static constexpr int kRowBytes = kWidth * static_cast<int>(sizeof(T));
  // Eight rows that follow one another begin in eight different quarters of the banks' width.
  static constexpr int kStride = kRowBytes + (kRowBytes / 16 % 2 == 0 ? 16 : 0);
  static constexpr int kQueryBytes = kRows * kStride, kStageBytes = kTile * kStride;
  static constexpr int kScoreStride = kTile + 4;
  static constexpr int kColumns = kRank / kWarps / 8;  // tiles of eight columns of the result, of each warp
  static_assert(kRank % (16 * kWarps) == 0 && kWidth % 32 == 0 && kTile % 16 == 0 && kStages >= 2);
};

// What lane (g, t) holds of rows g and g + 8, or of column g, for a step of 16: values 2t, 2t + 1, 2t + 8, 2t + 9.
LLMCTL_DEVICE void load_four(float (&out)[4], const float* from) {
  const Vec2 low = load_vec<Vec2>(from), high = load_vec<Vec2>(from + 8);
  out[0] = float_of(low.w[0]);
  out[1] = float_of(low.w[1]);
  out[2] = float_of(high.w[0]);
  out[3] = float_of(high.w[1]);
}

// grid: work items that could be. A block has kRows rows of a sequence's (query, head) pairs; its warps divide the tokens
// of a step for scores, and the latent's values for what comes of them. Scores, and then weights, lie in shared memory,
// where a warp makes the one of the other, row by row. Steps and cuts are at fixed positions as in `attend`.
//   q     T [rows, heads, kRank + kRope];  out T [rows, heads, kRank]
//   part_values  float32 [parts, kRows, kRank];  part_scales  float32 [parts, kRows, 2], both as in `attend`
//   scale  of scores, in log2
template <class T, class Mma, int kRank, int kRope, int kTilesM, int kWarps, int kTile, int kStages>
__global__ void __launch_bounds__(32 * kWarps)
    latent_attend(T* out, float* part_values, float* part_scales, const T* q, const uint8_t* arena,
                  const int32_t* tables, const AttendWork* work, const int32_t* num_work, int64_t block_stride,
                  int64_t layer_offset, int max_blocks, int heads, float scale, int block_bits) {
  using S = LatentShape<T, kRank, kRope, kTilesM, kWarps, kTile, kStages>;
  constexpr bool kExact = kSame<T, float>;
  if (static_cast<int>(blockIdx.x) >= num_work[0]) return;
  const AttendWork item = work[blockIdx.x];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  unsigned char* queries = dynamic_shared();
  unsigned char* stages = queries + S::kQueryBytes;
  float* scores = reinterpret_cast<float*>(stages + kStages * S::kStageBytes);
  float* tops = scores + S::kRows * S::kScoreStride;
  float* sums = tops + S::kRows;
  float* shrinks = sums + S::kRows;

  const int first_row = item.tile * S::kRows, rows = item.queries * heads;  // of the sequence's pairs
  const int64_t first_pair = static_cast<int64_t>(item.first_row) * heads + first_row;
  const int32_t* table = tables + static_cast<int64_t>(item.slot) * max_blocks;
  constexpr int kChunks = S::kRowBytes / 16;
  for (int i = tid; i < S::kRows * kChunks; i += S::kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const bool valid = first_row + r < rows;
    const int64_t pair = valid ? first_pair + r : 0;
    copy_16(queries + r * S::kStride + chunk * 16,
            reinterpret_cast<const unsigned char*>(q) + pair * S::kRowBytes + chunk * 16, valid);
  }
  const auto load = [&](int step, int slot) {
    const int first = item.begin + step * kTile;
    for (int i = tid; first < item.end && i < kTile * kChunks; i += S::kThreads) {
      const int r = i / kChunks, chunk = i % kChunks, token = first + r;
      const bool valid = token < item.end;
      const uint8_t* from = arena + layer_offset;
      if (valid) {
        const int inside = token & ((1 << block_bits) - 1);
        from += static_cast<int64_t>(table[token >> block_bits]) * block_stride + inside * S::kRowBytes + chunk * 16;
      }
      copy_16(stages + slot * S::kStageBytes + r * S::kStride + chunk * 16, from, valid);
    }
    copy_commit();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load(step, step);
  for (int r = tid; r < S::kRows; r += S::kThreads) {
    tops[r] = kLowest;
    sums[r] = 0;
  }

  float acc[kTilesM][S::kColumns][4] = {};
  const int steps = (item.end - item.begin + kTile - 1) / kTile;
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1, (step + kStages - 1) % kStages);
    const unsigned char* stage = stages + step % kStages * S::kStageBytes;
    const int first = item.begin + step * kTile;

    constexpr int kOfTokens = kTile / 8;
    for (int part = warp; part < kTilesM * kOfTokens; part += kWarps) {
      const int m = part / kOfTokens, n = part % kOfTokens;
      const unsigned char* tile = queries + 16 * m * S::kStride;
      const unsigned char* keys = stage + 8 * n * S::kStride;
      float score[4] = {0, 0, 0, 0};
      if constexpr (kIs16<Mma>) {
#pragma unroll 2
        for (int k = 0; k < S::kWidth; k += 32) {
          uint32_t b[4];
          load_matrices(b, keys + lane % 8 * S::kStride + (k + lane / 8 * 8) * 2);
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            uint32_t a[4];
            load_matrices(a, tile + lane % 16 * S::kStride + (k + 16 * u + lane / 16 * 8) * 2);
            const uint32_t two[2] = {b[2 * u], b[2 * u + 1]};
            mma_16<Mma>(score, a, two);
          }
        }
      } else {
        const float* of_g = reinterpret_cast<const float*>(tile + g * S::kStride) + 2 * t;
        const float* of_g8 = reinterpret_cast<const float*>(tile + (g + 8) * S::kStride) + 2 * t;
        const float* of_token = reinterpret_cast<const float*>(keys + g * S::kStride) + 2 * t;
#pragma unroll 2
        for (int k = 0; k < S::kWidth; k += 16) {
          float row_g[4], row_g8[4], column[4];
          load_four(row_g, of_g + k);
          load_four(row_g8, of_g8 + k);
          load_four(column, of_token + k);
          OperandB<Mma> b;
#pragma unroll
          for (int i = 0; i < 4; ++i) b.r[i] = bits_of(column[i]);
          multiply_add<Mma>(score, operand_a<Mma>(row_g, row_g8), b);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 16 * m + g + i / 2 * 8, token = first + 8 * n + 2 * t + i % 2;
        const bool visible = token < item.end && token <= item.first_position + (first_row + r) / heads;
        score[i] = visible ? score[i] * scale : -infinity();
      }
      float* to = scores + (16 * m + g) * S::kScoreStride + 8 * n + 2 * t;
      store_vec(to, Vec2{{bits_of(score[0]), bits_of(score[1])}});
      store_vec(to + 8 * S::kScoreStride, Vec2{{bits_of(score[2]), bits_of(score[3])}});
    }
    __syncthreads();
    for (int r = warp; r < S::kRows; r += kWarps) {
      float* row = scores + r * S::kScoreStride;
      float most = kLowest, weights = 0;
      for (int i = lane; i < kTile; i += 32) most = fmaxf(most, row[i]);
      const float before = tops[r], top = fmaxf(before, max_lanes(most));
      for (int i = lane; i < kTile; i += 32) {
        // Rounded as it is multiplied, so that the weights' sum is that of what was.
        const float weight = to_float(from_float<T>(exp2_of<kExact>(row[i] - top)));
        weights += weight;
        row[i] = weight;
      }
      weights = sum_lanes(weights);
      __syncwarp();
      if (lane == 0) {
        const float shrink = exp2_of<kExact>(before - top);
        tops[r] = top;
        shrinks[r] = shrink;
        sums[r] = fmaf(sums[r], shrink, weights);
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const float shrink[2] = {shrinks[16 * m + g], shrinks[16 * m + g + 8]};
#pragma unroll
      for (int n = 0; n < S::kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] *= shrink[i / 2];
      }
    }
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
      OperandA<Mma> weights[kTilesM];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        float row_g[4], row_g8[4];
        load_four(row_g, scores + (16 * m + g) * S::kScoreStride + 16 * j + 2 * t);
        load_four(row_g8, scores + (16 * m + g + 8) * S::kScoreStride + 16 * j + 2 * t);
        weights[m] = operand_a<Mma>(row_g, row_g8);
      }
      const unsigned char* values = stage + 16 * j * S::kStride + warp * S::kColumns * 8 * static_cast<int>(sizeof(T));
#pragma unroll
      for (int pair = 0; pair < S::kColumns / 2; ++pair) {
        OperandB<Mma> b[2];
        if constexpr (kIs16<Mma>) {
          uint32_t raw[4];
          load_matrices<true>(raw, values + lane % 16 * S::kStride + (2 * pair + lane / 16) * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) b[i / 2].r[i % 2] = raw[i];
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int token = 2 * t + i % 2 + i % 4 / 2 * 8;
            b[i / 4].r[i % 4] = load_vec<uint32_t>(values + token * S::kStride + ((2 * pair + i / 4) * 8 + g) * 4);
          }
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          multiply_add<Mma>(acc[m][2 * pair], weights[m], b[0]);
          multiply_add<Mma>(acc[m][2 * pair + 1], weights[m], b[1]);
        }
      }
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * m + g + 8 * half;
      if (first_row + r >= rows) continue;
      const int64_t place = static_cast<int64_t>(item.partial) * S::kRows + r;
      const float inverse = 1.0f / sums[r];
#pragma unroll
      for (int n = 0; n < S::kColumns; ++n) {
        const int column = (warp * S::kColumns + n) * 8 + 2 * t;
        const float low = acc[m][n][2 * half], high = acc[m][n][2 * half + 1];
        if (item.partial >= 0) {
          store_two(part_values + place * kRank + column, low, high);
        } else {
          store_two(out + (first_pair + r) * kRank + column, low * inverse, high * inverse);
        }
      }
      if (item.partial >= 0 && warp == 0 && t == 0) {
        part_scales[2 * place] = tops[r];
        part_scales[2 * place + 1] = sums[r];
      }
    }
  }
}

}  // namespace llmctl::cuda
