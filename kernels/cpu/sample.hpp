// Sampling: one token for each logits row, a pure function of the row, its SampleRow and the tokens before it.
//
// The order of operations is that of SampleArgs in kernels/ops.py. No row is sorted: every truncation keeps a prefix of
// the order (score descending, id ascending), so it is known by its last token, a `Bound`. A bound is found by inserting
// into a short list (small top-k), or by a histogram over scores in which only the bin that holds the bound is ordered.
// The last pass adds noise to whatever is within the bound and skips blocks of 32 tokens that are not.
//
// Noise is Gumbel, -log(-log(u)), with u = (word + 1/2) / 2^32 and one Philox4x32-10 word per token. The largest values,
// which decide, come from u near 1, where u itself has lost them: there -log(u) is taken from 1 - u.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "isa.hpp"
#include "table.hpp"

namespace llmctl::cpu {

constexpr int kBins = 2048;
constexpr int kInsertMost = 64;  // up to this many entries a sorted list beats a histogram
// A histogram covers scores so far below the largest: first only those that nearly always hold the bound, then all that
// have weight worth telling apart, with the rest in the last bin.
constexpr float kWindows[] = {8.0f, 32.0f};
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The last token of a prefix of the order (score descending, id ascending).
struct Bound {
  float score;
  int id;
};
constexpr Bound kNoBound{kMinusInf, std::numeric_limits<int>::max()};

LLMCTL_INLINE bool comes_before(float score, int id, float other_score, int other_id) {
  return score > other_score || (score == other_score && id < other_id);
}

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

// Lanes of the scores from i on that are within the bound; padding and banned tokens are -inf and within none.
template <class Isa>
LLMCTL_INLINE typename Isa::F lanes_within(typename Isa::F score, int i, Bound bound) {
  const typename Isa::F limit = Isa::set1(bound.score);
  const int behind = bound.id - i < kLanes ? bound.id - i + 1 : kLanes;  // bound.id + 1 may overflow
  const typename Isa::F tied =
      Isa::bits_f(Isa::and_i(Isa::bits_i(Isa::equal(score, limit)), Isa::bits_i(Isa::lanes(0, behind))));
  const typename Isa::I within = Isa::or_i(Isa::bits_i(Isa::greater(score, limit)), Isa::bits_i(tied));
  return Isa::bits_f(Isa::and_i(within, Isa::bits_i(Isa::greater(score, Isa::set1(kMinusInf)))));
}

// The sum of e^(score - largest) within the bound. Lanes are added up in float32 over 512 scores, then in float64.
template <class Isa>
LLMCTL_NOINLINE double total_weight(const float* scores, int vocab, float largest, Bound within) {
  using F = typename Isa::F;
  const F top = Isa::set1(largest);
  double total = 0;
  for (int begin = 0; begin < vocab; begin += 512) {
    const int end = least(vocab, begin + 512);
    F sum = Isa::zero();
    for (int i = begin; i < end; i += kLanes) {
      const F score = Isa::load(scores + i);
      const F weight = exp<Isa>(Isa::sub(score, top));
      sum = Isa::add(sum, Isa::select(lanes_within<Isa>(score, i, within), weight, Isa::zero()));
    }
    total += Isa::sum(sum);
  }
  return total;
}

template <class Isa>
LLMCTL_INLINE float log_of(float x) {
  float lanes[kLanes];
  Isa::store(lanes, log<Isa>(Isa::set1(x)));
  return lanes[0];
}

// The first `count` (at most kInsertMost) tokens in order, as ids and scores. Returns how many there are.
template <class Isa>
LLMCTL_NOINLINE int first_in_order(const float* scores, int vocab, int count, int32_t* ids, float* values) {
  count = least(count, vocab);
  int found = 0;
  for (int i = 0; i < vocab; i += kLanes) {
    const float limit = found < count ? kMinusInf : values[count - 1];
    unsigned hits = Isa::mask_bits(Isa::greater(Isa::load(scores + i), Isa::set1(limit)));
    if (found < count) hits = i + kLanes <= vocab ? 0xFFu : (1u << (vocab - i)) - 1;
    for (; hits != 0; hits &= hits - 1) {
      const int id = i + __builtin_ctz(hits);
      const float score = scores[id];
      if (found == count && !(score > values[count - 1])) continue;
      int place = found < count ? found++ : count - 1;
      for (; place > 0 && score > values[place - 1]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = score;
      ids[place] = id;
    }
  }
  return found;
}

LLMCTL_INLINE void sift_down(int32_t* heap, int size, int at, const float* scores) {
  const int32_t id = heap[at];
  for (int child = 2 * at + 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size && comes_before(scores[heap[child + 1]], heap[child + 1], scores[heap[child]], heap[child])) {
      ++child;
    }
    if (!comes_before(scores[heap[child]], heap[child], scores[id], id)) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = id;
}

// How far the scores within the bound reach below the largest, at most `window`.
template <class Isa>
LLMCTL_INLINE float spread_of(const float* scores, int vocab, float largest, Bound within, float window) {
  using F = typename Isa::F;
  const F top = Isa::set1(largest);
  F spread = Isa::zero();
  for (int i = 0; i < vocab; i += kLanes) {
    const F score = Isa::load(scores + i);
    const F below = Isa::select(lanes_within<Isa>(score, i, within), Isa::sub(top, score), Isa::zero());
    spread = Isa::max(spread, below);
  }
  const float all = Isa::max_lane(spread);
  return all < window ? all : window;
}

// The bound of the shortest prefix, within another bound, that holds `count` tokens or the `share` of the weight
// e^score (one of the two is asked for: share 0 means count). Histogram bins descend in score; only the bin that holds
// the bound is brought in order, by a heap from which tokens are taken until the prefix is complete.
template <class Isa>
LLMCTL_NOINLINE Bound prefix_bound(const float* scores, int vocab, float largest, Bound within, int count, float share,
                                   int32_t* heap) {
  using F = typename Isa::F;
  const F top = Isa::set1(largest);
  const double wanted_weight = share > 0 ? share * total_weight<Isa>(scores, vocab, largest, within) : 0;
  double weight[kBins];
  int32_t held[kBins];
  int32_t bins[kLanes];
  float weights[kLanes] = {};
  for (const float window : kWindows) {
    const bool whole = window == kWindows[1];
    const float range = spread_of<Isa>(scores, vocab, largest, within, window);
    const F scale = Isa::set1(range > 1e-20f ? kBins / range : 0.0f);
    const F floor = Isa::set1(whole ? kMinusInf : largest - window);
    // Calls visit(lane, id) for the scores in use, with `bins` and, if wanted, `weights` set.
    const auto each_score = [&](bool with_weights, auto visit) {
      for (int i = 0; i < vocab; i += kLanes) {
        const F score = Isa::load(scores + i);
        const F in_use = lanes_within<Isa>(score, i, within);
        unsigned lanes = Isa::mask_bits(in_use) & Isa::mask_bits(Isa::greater(score, floor));
        if (lanes == 0) continue;
        const F bin = Isa::min(Isa::mul(Isa::sub(top, score), scale), Isa::set1(kBins - 1.0f));
        Isa::store_i(bins, Isa::to_int(bin));
        if (with_weights) Isa::store(weights, exp<Isa>(Isa::sub(score, top)));
        for (; lanes != 0; lanes &= lanes - 1) {
          const int lane = __builtin_ctz(lanes);
          visit(lane, i + lane);
        }
      }
    };

    for (int b = 0; b < kBins; ++b) {
      weight[b] = 0;
      held[b] = 0;
    }
    each_score(share > 0, [&](int lane, int) {
      weight[bins[lane]] += weights[lane];
      ++held[bins[lane]];
    });
    double have_weight = 0;
    long have = 0;
    const auto complete = [&](double more_weight, long more) {
      return share > 0 ? have_weight + more_weight >= wanted_weight : have + more >= count;
    };
    int bin = 0;
    for (; bin < kBins && !(held[bin] > 0 && complete(weight[bin], held[bin])); ++bin) {
      have_weight += weight[bin];
      have += held[bin];
    }
    if (bin == kBins) continue;

    int size = 0;
    each_score(false, [&](int lane, int id) {
      if (bins[lane] == bin) heap[size++] = id;
    });
    for (int at = size / 2 - 1; at >= 0; --at) sift_down(heap, size, at, scores);
    for (;;) {
      const Bound bound{scores[heap[0]], heap[0]};
      if (share > 0) Isa::store(weights, exp<Isa>(Isa::sub(Isa::set1(bound.score), top)));
      if (size == 1 || complete(weights[0], 1)) return bound;
      have_weight += weights[0];
      have += 1;
      heap[0] = heap[--size];
      sift_down(heap, size, 0, scores);
    }
  }
  return within;  // all that is possible is wanted, or the last weight was lost in rounding
}

// Four random words for each of 8 counters (first + lane, position, 0, 0): word w of lane c is for token 4 (first + c) + w.
// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
template <class Isa>
LLMCTL_INLINE void philox(uint32_t first, uint32_t position, uint64_t seed, typename Isa::I words[4]) {
  using I = typename Isa::I;
  const auto set = [](uint32_t v) { return Isa::set1_i(static_cast<int32_t>(v)); };
  I c0 = Isa::add_i(set(first), Isa::lane_index());
  I c1 = set(position);
  I c2 = Isa::zero_i();
  I c3 = Isa::zero_i();
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  const I m0 = set(0xD2511F53u);
  const I m1 = set(0xCD9E8D57u);
  LLMCTL_UNROLL
  for (int round = 0; round < 10; ++round) {
    const I high0 = Isa::mul_high_u32(m0, c0);
    const I high1 = Isa::mul_high_u32(m1, c2);
    const I low0 = Isa::mul_i(m0, c0);
    const I low1 = Isa::mul_i(m1, c2);
    c0 = Isa::xor_i(Isa::xor_i(high1, c1), set(k0));
    c1 = low1;
    c2 = Isa::xor_i(Isa::xor_i(high0, c3), set(k1));
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// -log(-log(u)) with u = (word + 1/2) / 2^32.
template <class Isa>
LLMCTL_INLINE typename Isa::F gumbel(typename Isa::I word) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  const I upper = Isa::sub_i(Isa::zero_i(), Isa::template shift_right<31>(word));  // -1 where u > 1/2
  // v = u, or 1 - u where u > 1/2, from an integer below 2^31.
  const F v = Isa::mul(Isa::add(Isa::to_float(Isa::xor_i(word, upper)), Isa::set1(0.5f)), Isa::set1(0x1p-32f));
  const F u = Isa::select(Isa::bits_f(upper), Isa::sub(Isa::set1(1.0f), v), v);
  F m, e;
  split_log<Isa>(u, m, e);
  // From sqrt(1/2) on the split is u = 1 + m: there m = -v, exactly.
  m = Isa::select(Isa::greater(Isa::set1(0.70710678f), u), m, Isa::sub(Isa::zero(), v));
  const F minus_log = Isa::sub(Isa::zero(), log_reduced<Isa>(m, e));
  return Isa::sub(Isa::zero(), log<Isa>(minus_log));
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
