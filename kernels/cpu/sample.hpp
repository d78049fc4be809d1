// Sampling: one token for each logits row, a pure function of the row, its SampleRow and the tokens before it.
//
// The order of operations is that of SampleArgs in kernels/ops.py. A row is never sorted: what truncation keeps is known by
// its last token (bound.hpp), and the last pass adds noise (noise.hpp) to whatever is within that bound, skipping blocks
// of 32 tokens that are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "bound.hpp"
#include "isa.hpp"
#include "noise.hpp"
#include "table.hpp"

namespace llmctl::cpu {

// What one thread computes in: scores, a list of ids and counts, each of the vocabulary rounded up to 16.
// `counts` is zero between rows.
struct SampleScratch {
  float* scores;
  int32_t* ids;
  int32_t* counts;
};

LLMCTL_INLINE SampleScratch sample_scratch(std::byte* memory, int vocab) {
  const std::size_t padded = static_cast<std::size_t>((vocab + 15) / 16) * 16;
  float* scores = reinterpret_cast<float*>(memory);
  int32_t* ids = reinterpret_cast<int32_t*>(memory) + padded;
  return {scores, ids, ids + padded};
}

// Copies a row to `scores`, with -inf behind it up to a multiple of 16. False if it holds NaN or Inf.
template <class Isa>
LLMCTL_INLINE bool copy_finite(const float* logits, int vocab, float* scores) {
  using F = typename Isa::F;
  const F infinity = Isa::set1(-kMinusInf);
  F finite = Isa::equal(infinity, infinity);
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const F x = Isa::load(logits + i);
    finite = Isa::bits_f(Isa::and_i(Isa::bits_i(finite), Isa::bits_i(Isa::greater(infinity, Isa::abs(x)))));
    Isa::store(scores + i, x);
  }
  const int padded = (vocab + 15) / 16 * 16;
  for (; i < padded; i += kLanes) {
    const F real = Isa::lanes(0, vocab - i);
    const F x = Isa::load_part(logits + i, most(0, vocab - i));
    finite = Isa::bits_f(Isa::and_i(Isa::bits_i(finite), Isa::bits_i(Isa::greater(infinity, Isa::abs(x)))));
    Isa::store(scores + i, Isa::select(real, x, Isa::set1(kMinusInf)));
  }
  return Isa::mask_bits(finite) == 0xFF;
}

template <class Isa>
LLMCTL_INLINE float largest_of(const float* scores, int vocab) {
  typename Isa::F best = Isa::set1(kMinusInf);
  for (int i = 0; i < vocab; i += kLanes) best = Isa::max(best, Isa::load(scores + i));
  return Isa::max_lane(best);
}

// The lowest id whose score is `value`, which is one of them.
template <class Isa>
LLMCTL_INLINE int first_equal(const float* scores, int vocab, float value) {
  for (int i = 0; i < vocab; i += kLanes) {
    const unsigned hits = Isa::mask_bits(Isa::equal(Isa::load(scores + i), Isa::set1(value)));
    if (hits != 0) return i + __builtin_ctz(hits);
  }
  return 0;
}

// The token within the bound whose score plus noise is largest.
template <class Isa>
LLMCTL_NOINLINE int noisy_argmax(const float* scores, int vocab, Bound bound, uint64_t seed, uint32_t position) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  const F minus_inf = Isa::set1(kMinusInf);
  F best = minus_inf;
  I best_at = Isa::zero_i();
  for (int base = 0; base < vocab; base += 32) {
    F score[4];
    unsigned any = 0;
    for (int j = 0; j < 4; ++j) {
      const int i = base + j * kLanes;
      score[j] = minus_inf;
      if (i >= vocab) continue;
      const F raw = Isa::load(scores + i);
      const F within = lanes_within<Isa>(raw, i, bound);
      score[j] = Isa::select(within, raw, minus_inf);
      any |= Isa::mask_bits(within);
    }
    if (any == 0) continue;
    I words[4];
    philox<Isa>(static_cast<uint32_t>(base / 4), position, seed, words);
    float noise[4][kLanes];
    for (int w = 0; w < 4; ++w) Isa::store(noise[w], gumbel<Isa>(words[w]));
    float in_order[32];
    for (int c = 0; c < kLanes; ++c) {
      for (int w = 0; w < 4; ++w) in_order[4 * c + w] = noise[w][c];
    }
    for (int j = 0; j < 4; ++j) {
      const F value = Isa::add(score[j], Isa::load(in_order + j * kLanes));
      const F better = Isa::greater(value, best);
      best = Isa::select(better, value, best);
      const F at = Isa::bits_f(Isa::set1_i(base + j * kLanes));
      best_at = Isa::bits_i(Isa::select(better, at, Isa::bits_f(best_at)));
    }
  }
  float values[kLanes];
  int32_t at[kLanes];
  Isa::store(values, best);
  Isa::store_i(at, best_at);
  Bound chosen{values[0], at[0]};
  for (int lane = 1; lane < kLanes; ++lane) {
    if (comes_before(values[lane], at[lane] + lane, chosen.score, chosen.id)) chosen = {values[lane], at[lane] + lane};
  }
  return chosen.id;
}

// Repetition, frequency and presence penalties, then biases. Tokens outside the vocabulary have no score to change.
LLMCTL_INLINE void adjust_scores(const SampleRow& row, int vocab, const SampleScratch& scratch) {
  float* scores = scratch.scores;
  int32_t* counts = scratch.counts;  // twice the count in the output, plus one if seen at all
  const auto known = [vocab](int32_t token) { return token >= 0 && token < vocab; };
  if (row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f) {
    for (int i = 0; i < row.length; ++i) {
      const int32_t token = row.tokens[i];
      if (known(token)) counts[token] = (counts[token] | 1) + (i >= row.prompt_len ? 2 : 0);
    }
    for (int i = 0; i < row.length; ++i) {
      const int32_t token = row.tokens[i];
      if (!known(token) || counts[token] == 0) continue;
      const int used = counts[token] >> 1;
      counts[token] = 0;
      float score = scores[token];
      score = score > 0 ? score / row.repetition_penalty : score * row.repetition_penalty;
      if (used > 0) {
        score -= row.frequency_penalty * static_cast<float>(used);
        score -= row.presence_penalty;
      }
      scores[token] = score;
    }
  }
  for (int i = 0; i < row.num_bias; ++i) {
    if (known(row.bias_ids[i])) scores[row.bias_ids[i]] += row.bias_values[i];
  }
}

template <class Isa>
LLMCTL_INLINE int choose(const SampleRow& row, int vocab, const SampleScratch& scratch) {
  float* scores = scratch.scores;
  float largest = largest_of<Isa>(scores, vocab);
  if (row.temperature == 0.0f || largest == kMinusInf) return first_equal<Isa>(scores, vocab, largest);
  const typename Isa::F temperature = Isa::set1(row.temperature);
  for (int i = 0; i < vocab; i += kLanes) Isa::store(scores + i, Isa::div(Isa::load(scores + i), temperature));
  largest = largest / row.temperature;

  Bound bound = kNoBound;
  if (row.top_k > 0 && row.top_k <= kInsertMost && row.top_k < vocab) {
    int32_t ids[kInsertMost];
    float values[kInsertMost];
    const int last = first_in_order<Isa>(scores, vocab, row.top_k, ids, values) - 1;
    bound = {values[last], ids[last]};
  } else if (row.top_k > 0 && row.top_k < vocab) {
    bound = prefix_bound<Isa>(scores, vocab, largest, bound, row.top_k, 0.0f, scratch.ids);
  }
  if (row.top_p < 1.0f) bound = prefix_bound<Isa>(scores, vocab, largest, bound, 0, row.top_p, scratch.ids);
  if (row.min_p >= std::numeric_limits<float>::min()) {
    const float limit = largest + log_of<Isa>(row.min_p);
    if (limit > bound.score) bound = {limit, kNoBound.id};
  }
  return noisy_argmax<Isa>(scores, vocab, bound, row.seed, static_cast<uint32_t>(row.length));
}

template <class Isa>
LLMCTL_INLINE void sample_row(const SampleArgs& args, int r, const SampleScratch& scratch) {
  const SampleRow& row = args.rows[r];
  const int vocab = args.vocab_size;
  int32_t* top_ids = args.top_ids + static_cast<long>(r) * kMaxTop;
  float* top_logprobs = args.top_logprobs + static_cast<long>(r) * kMaxTop;
  for (int i = 0; i < kMaxTop; ++i) {
    top_ids[i] = -1;
    top_logprobs[i] = kMinusInf;
  }
  args.token[r] = -1;
  args.logprob[r] = 0.0f;
  args.finite[r] = copy_finite<Isa>(args.logits.row(r), vocab, scratch.scores);
  if (!args.finite[r]) return;

  float normalizer = 0.0f;
  if (row.logprobs >= 0) {
    const float largest = largest_of<Isa>(scratch.scores, vocab);
    normalizer = largest + log_of<Isa>(static_cast<float>(total_weight<Isa>(scratch.scores, vocab, largest, kNoBound)));
    const int count = least(row.logprobs, kMaxTop);
    const int found = count > 0 ? first_in_order<Isa>(scratch.scores, vocab, count, top_ids, top_logprobs) : 0;
    for (int i = 0; i < found; ++i) top_logprobs[i] -= normalizer;
  }
  adjust_scores(row, vocab, scratch);
  args.token[r] = choose<Isa>(row, vocab, scratch);
  if (row.logprobs >= 0) args.logprob[r] = args.logits.row(r)[args.token[r]] - normalizer;
}

// `memory` has sample_scratch_bytes, was zero when first used, and belongs to the calling thread.
template <class Isa>
LLMCTL_NOINLINE void sample_rows(const SampleArgs& args, int row_begin, int row_end, std::byte* memory) {
  const SampleScratch scratch = sample_scratch(memory, args.vocab_size);
  for (int r = row_begin; r < row_end; ++r) sample_row<Isa>(args, r, scratch);
}

}  // namespace llmctl::cpu
