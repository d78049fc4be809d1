// One token for each row of logits, as SampleArgs (kernels/ops.py) says: one block of threads per row.
//
// Truncation needs no sort: the score at which top-k or top-p cuts is found by its bits, a byte at a time, from counts
// or sums of probability per value of that byte. Counts are integers, and probabilities are summed as integers (in units
// of 2^-40 of the largest), so that the order in which threads add does not matter.
#pragma once

#include "noise.cuh"

namespace llmctl::cuda {

constexpr int kMaxTop = 20;

// What is asked of one row. Ids in `seen` and `bias` are each once in their list, and below the vocabulary's size.
struct alignas(16) SampleRow {
  uint64_t seed;
  int32_t position;  // of the token to be sampled
  int32_t seen_first, seen_count, bias_first, bias_count;
  int32_t top_k;     // 0: off
  int32_t logprobs;  // -1: none, else how many of the most likely
  float temperature, top_p, min_p, repetition, presence, frequency;
  int32_t reserved;
};

// Ordered as the scores are.
LLMCTL_DEVICE uint32_t key_of(float score) {
  const uint32_t bits = bits_of(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
LLMCTL_DEVICE float score_of(uint32_t key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// A score and its token; the better of two has the larger score, or the lower token.
struct Best {
  float score;
  int32_t token;
};
LLMCTL_DEVICE Best better(Best a, Best b) {
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

constexpr int kNoToken = 0x7fffffff;

template <int kThreads>
struct SampleShared {
  unsigned long long mass[256];  // or counts
  unsigned long long wanted;
  float sums[kThreads / 32];
  Best bests[kThreads / 32];
  int32_t ties[kThreads];
  int32_t byte;
};

template <int kThreads>
LLMCTL_DEVICE float block_sum(SampleShared<kThreads>& shared, float v) {
  v = sum_lanes(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < kThreads / 32; ++w) total += shared.sums[w];
  return total;
}

template <int kThreads>
LLMCTL_DEVICE Best block_best(SampleShared<kThreads>& shared, Best best) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.score, bit), __shfl_xor_sync(kAllLanes, best.token, bit)};
    best = better(best, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.bests[threadIdx.x / 32] = best;
  __syncthreads();
  best = shared.bests[0];
  for (int w = 1; w < kThreads / 32; ++w) best = better(best, shared.bests[w]);
  return best;
}

// Where a prefix of the order (score descending, token ascending) ends: with this token of this score.
struct Cut {
  uint32_t key;
  int32_t token;
};
LLMCTL_DEVICE bool inside(Cut cut, uint32_t key, int token) {
  return key > cut.key || (key == cut.key && token <= cut.token);
}

// The shortest prefix of what is inside `limit` whose weights reach `wanted` (1 at least; not more than there is).
// weight(score) is 1 to count, or the probability's integer.
template <int kThreads, class Weight>
LLMCTL_DEVICE Cut find_cut(SampleShared<kThreads>& shared, const float* scores, int vocabulary, Cut limit,
                           unsigned long long wanted, Weight weight) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += kThreads) shared.mass[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocabulary; i += kThreads) {
      const uint32_t key = key_of(scores[i]);
      if ((key & mask) != prefix || !inside(limit, key, i)) continue;
      const unsigned long long w = weight(scores[i]);
      if (w != 0) atomicAdd(&shared.mass[key >> shift & 255], w);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long left = wanted;
      int byte = 255;
      while (byte > 0 && shared.mass[byte] < left) left -= shared.mass[byte--];
      shared.byte = byte;
      shared.wanted = left;
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(shared.byte) << shift;
    mask |= 0xffu << shift;
    wanted = shared.wanted;
  }
  // Of the tokens with just this score, the lowest that are still wanted. Each thread looks at consecutive ones.
  const unsigned long long each = weight(score_of(prefix));
  const int ties = each == 0 ? kNoToken : static_cast<int>((wanted + each - 1) / each);
  const int span = (vocabulary + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) * span, end = min(first + span, vocabulary);
  int mine = 0;
  for (int i = first; i < end; ++i) {
    const uint32_t key = key_of(scores[i]);
    if (key == prefix && inside(limit, key, i)) ++mine;
  }
  __syncthreads();
  shared.ties[threadIdx.x] = mine;
  if (threadIdx.x == 0) shared.byte = limit.key == prefix ? limit.token : kNoToken;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) before += shared.ties[i];
  if (before < ties && before + mine >= ties) {
    int left = ties - before;
    for (int i = first; i < end; ++i) {
      const uint32_t key = key_of(scores[i]);
      if (key == prefix && inside(limit, key, i) && --left == 0) shared.byte = i;
    }
  }
  __syncthreads();
  return {prefix, shared.byte};
}

// grid: rows that could be. Shared memory: SampleShared<kThreads>.
//   logits  float32 [rows, stride];  scores  float32 [rows, vocabulary], scratch
//   seen_ids, seen_outputs  int32: tokens of the sequence so far, and how often each was output
//   bias_ids, bias_values   int32, float32
//   token, logprob, finite  [rows];  top_ids, top_logprobs  [rows, kMaxTop]
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sample(int32_t* token, float* logprob, uint8_t* finite, int32_t* top_ids, float* top_logprobs, float* scores,
           const float* logits, const SampleRow* rows, const int32_t* num_rows, const int32_t* seen_ids,
           const int32_t* seen_outputs, const int32_t* bias_ids, const float* bias_values, int vocabulary,
           int64_t stride) {
  const int row = blockIdx.x;
  if (row >= num_rows[0]) return;
  auto& shared = *reinterpret_cast<SampleShared<kThreads>*>(dynamic_shared());
  const SampleRow asked = rows[row];
  const float* logit = logits + row * stride;
  float* score = scores + static_cast<int64_t>(row) * vocabulary;
  const int tid = threadIdx.x;
  for (int i = tid; i < kMaxTop; i += kThreads) {
    top_ids[row * kMaxTop + i] = -1;
    top_logprobs[row * kMaxTop + i] = -infinity();
  }

  float broken = 0;
  Best top = {-infinity(), kNoToken};
  for (int i = tid; i < vocabulary; i += kThreads) {
    const float x = logit[i];
    if ((bits_of(x) & 0x7f800000u) == 0x7f800000u) broken = 1;
    score[i] = x;
    top = better(top, Best{x, i});
  }
  if (block_sum(shared, broken) > 0) {
    if (tid == 0) {
      token[row] = -1;
      logprob[row] = 0;
      finite[row] = 0;
    }
    return;
  }
  top = block_best(shared, top);

  for (int i = tid; i < asked.seen_count; i += kThreads) {
    const int id = seen_ids[asked.seen_first + i], count = seen_outputs[asked.seen_first + i];
    float x = score[id];
    x = x > 0 ? x / asked.repetition : x * asked.repetition;
    if (count > 0) {
      x = x - asked.frequency * static_cast<float>(count);
      x = x - asked.presence;
    }
    score[id] = x;
  }
  __syncthreads();
  for (int i = tid; i < asked.bias_count; i += kThreads) {
    score[bias_ids[asked.bias_first + i]] += bias_values[asked.bias_first + i];
  }
  __syncthreads();

  const bool greedy = asked.temperature == 0;
  Best best = {-infinity(), kNoToken};
  for (int i = tid; i < vocabulary; i += kThreads) {
    if (!greedy) score[i] = score[i] / asked.temperature;
    best = better(best, Best{score[i], i});
  }
  best = block_best(shared, best);
  if (!greedy && best.score > -infinity()) {
    const float largest = best.score;
    Cut cut = {0, kNoToken};
    if (asked.top_k > 0 && asked.top_k < vocabulary) {
      cut = find_cut<kThreads>(shared, score, vocabulary, cut, static_cast<unsigned long long>(asked.top_k),
                               [](float) { return 1ull; });
    }
    if (asked.top_p < 1) {
      const auto mass = [largest](float x) {
        return static_cast<unsigned long long>(exp2_fast((x - largest) * 1.4426950408889634f) * 1099511627776.0f);
      };
      unsigned long long total = 0;
      for (int i = tid; i < vocabulary; i += kThreads) {
        if (inside(cut, key_of(score[i]), i)) total += mass(score[i]);
      }
      __syncthreads();
      if (tid == 0) shared.wanted = 0;
      __syncthreads();
      atomicAdd(&shared.wanted, total);
      __syncthreads();
      total = shared.wanted;
      const double part = static_cast<double>(asked.top_p) * static_cast<double>(total);
      const unsigned long long wanted = static_cast<unsigned long long>(ceil(part));
      cut = find_cut<kThreads>(shared, score, vocabulary, cut, wanted > 0 ? wanted : 1, mass);
    }
    float m, e;
    split_log(asked.min_p, m, e);
    const float least = asked.min_p > 0 ? largest + log_reduced(m, e) : -infinity();
    best = {-infinity(), kNoToken};
    for (int c = tid; c < (vocabulary + 3) / 4; c += kThreads) {
      uint32_t words[4];
      philox(static_cast<uint32_t>(c), static_cast<uint32_t>(asked.position), asked.seed, words);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int i = 4 * c + w;
        if (i >= vocabulary) continue;
        const float x = score[i];
        if (x >= least && inside(cut, key_of(x), i)) best = better(best, Best{x + gumbel(words[w]), i});
      }
    }
    best = block_best(shared, best);
  }
  if (best.token == kNoToken) best.token = 0;

  if (tid == 0) {
    token[row] = best.token;
    finite[row] = 1;
    logprob[row] = 0;
  }
  if (asked.logprobs < 0) return;
  float sum = 0;
  for (int i = tid; i < vocabulary; i += kThreads) sum += exp2_fast((logit[i] - top.score) * 1.4426950408889634f);
  sum = block_sum(shared, sum);
  float m, e;
  split_log(sum, m, e);
  const float whole = top.score + log_reduced(m, e);
  if (tid == 0) logprob[row] = logit[best.token] - whole;
  Best last = {infinity(), -1};
  for (int n = 0; n < min(asked.logprobs, min(kMaxTop, vocabulary)); ++n) {
    Best next = {-infinity(), kNoToken};
    for (int i = tid; i < vocabulary; i += kThreads) {
      const Best x = {logit[i], i};
      if (x.score < last.score || (x.score == last.score && i > last.token)) next = better(next, x);
    }
    last = block_best(shared, next);
    if (tid == 0) {
      top_ids[row * kMaxTop + n] = last.token;
      top_logprobs[row * kMaxTop + n] = last.score - whole;
    }
  }
}

}  // namespace llmctl::cuda
