// Mixture of experts around the grouped linear layer (linear_mma.cuh): who goes where, and the sum of what comes back.
//
// route      per token the experts of highest score and their weights
// group      (token, choice) pairs sorted by expert into tiles of rows that belong to one expert each
// combine    per token the weighted sum of its experts' outputs, in the order of its choices
//
// Everything has one order that depends on the token alone, or, in `group`, only decides in which tile a row lies.
#pragma once

#include "linear_end.cuh"

namespace llmctl::cuda {

enum class Score { kSoftmax, kSigmoid };

constexpr int kMaxExperts = 512;  // of one token's scores: 16 per lane

// logits [tokens, experts] -> ids, weights [tokens, choices], best first, ties to the lower id. One warp per token,
// blocks of 4 warps; there are *count tokens, whatever the grid has room for. `bias` [experts] or null is added to scores for the choice alone; weights are the scores, divided by
// their sum if `normalize`, times `scale`.
template <class T, Score kScore>
__global__ void __launch_bounds__(128)
    moe_route(int* ids, float* weights, const T* logits, const float* bias, const int* count, int experts, int choices,
              int normalize, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) * 4 + static_cast<int>(threadIdx.x) / 32;
  if (token >= *count) return;
  constexpr int kPerLane = kMaxExperts / 32;
  const float kNone = -3.0e38f;
  float score[kPerLane], rank[kPerLane];
  float most = kNone;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * 32 + lane;
    const float v = expert < experts ? to_float(logits[static_cast<long>(token) * experts + expert]) : kNone;
    score[i] = v > kNone ? fminf(v, -kNone) : kNone;  // NaN too, so that the ids are always those of experts
    most = fmaxf(most, score[i]);
  }
  if constexpr (kScore == Score::kSoftmax) {
    most = max_lanes(most);
    float all = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score[i] = i * 32 + lane < experts ? exp2_fast((score[i] - most) * kLog2E) : 0.0f;
      all += score[i];
    }
    all = sum_lanes(all);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] /= all;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = 1.0f / (1.0f + exp2_fast(-score[i] * kLog2E));
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * 32 + lane;
    rank[i] = expert < experts ? score[i] + (bias != nullptr ? bias[expert] : 0.0f) : kNone;
  }
  float chosen_sum = 0, mine = 0;
  for (int choice = 0; choice < choices; ++choice) {
    float best = rank[0], best_score = score[0];
    int best_id = lane;
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) {
      if (rank[i] > best) {
        best = rank[i];
        best_score = score[i];
        best_id = i * 32 + lane;
      }
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, bit);
      const float other_score = __shfl_xor_sync(kAllLanes, best_score, bit);
      const int other_id = __shfl_xor_sync(kAllLanes, best_id, bit);
      if (other > best || (other == best && other_id < best_id)) {
        best = other;
        best_score = other_score;
        best_id = other_id;
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 + lane == best_id) rank[i] = kNone;
    }
    chosen_sum += best_score;
    if (lane == choice) {
      mine = best_score;
      ids[token * choices + choice] = best_id;
    }
  }
  if (lane < choices) weights[token * choices + lane] = (normalize ? mine / chosen_sum : mine) * scale;
}

// Pairs p = token * choices + choice of *count tokens, sorted by expert and then by p: row_ids [tiles][kTileRows] gets p,
// -1 where a tile is not full; tile_expert [tiles] the tile's expert, -1 behind the last. One block of 512 threads; shared
// memory 2 * experts ints. There must be as many tiles as pairs / kTileRows + experts.
template <int kTileRows>
__global__ void __launch_bounds__(512)
    moe_group(int* row_ids, int* tile_expert, const int* ids, const int* count, int choices, int experts, int tiles) {
  const int pairs = *count * choices;
  int* counts = reinterpret_cast<int*>(dynamic_shared());
  int* first_tile = counts + experts;
  const int tid = static_cast<int>(threadIdx.x);
  for (int e = tid; e < experts; e += 512) counts[e] = 0;
  __syncthreads();
  for (int p = tid; p < pairs; p += 512) atomicAdd(counts + ids[p], 1);
  for (int i = tid; i < tiles * kTileRows; i += 512) row_ids[i] = -1;
  for (int i = tid; i < tiles; i += 512) tile_expert[i] = -1;
  __syncthreads();
  if (tid == 0) {
    int next = 0;
    for (int e = 0; e < experts; ++e) {
      first_tile[e] = next;
      next += (counts[e] + kTileRows - 1) / kTileRows;
    }
  }
  __syncthreads();
  // A warp lists an expert's pairs in ascending order.
  const int lane = tid % 32;
  for (int e = tid / 32; e < experts; e += 16) {
    if (counts[e] == 0) continue;
    int place = first_tile[e] * kTileRows;
    for (int base = 0; base < pairs; base += 32) {
      const bool mine = base + lane < pairs && ids[base + lane] == e;
      const unsigned votes = __ballot_sync(kAllLanes, mine);
      if (mine) row_ids[place + __popc(votes & ((1u << lane) - 1))] = base + lane;
      place += __popc(votes);
    }
    for (int i = lane; i < (counts[e] + kTileRows - 1) / kTileRows; i += 32) tile_expert[first_tile[e] + i] = e;
  }
}

// out[token] = (residual[token] +) sum over choices, in order, of weights[token, choice] * y[token * choices + choice].
// Grid (width / 256, tokens), blocks of 128 threads, two columns each; rows from *count on stay as they are.
template <class T, bool kAdd>
__global__ void __launch_bounds__(128)
    moe_combine(T* out, const T* y, const float* weights, const T* residual, const int* count, int choices, int width) {
  const int column = (static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x)) * 2;
  const long token = blockIdx.y;
  if (column >= width || token >= *count) return;
  float low = 0, high = 0;
  for (int choice = 0; choice < choices; ++choice) {
    float a, b;
    load_pair(y + (token * choices + choice) * width + column, a, b);
    const float weight = weights[token * choices + choice];
    low = fmaf(weight, a, low);
    high = fmaf(weight, b, high);
  }
  if constexpr (kAdd) {
    float a, b;
    load_pair(residual + token * width + column, a, b);
    low += a;
    high += b;
  }
  store_pair(out + token * width + column, low, high);
}

}  // namespace llmctl::cuda
