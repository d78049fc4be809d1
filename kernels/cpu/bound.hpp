// Truncation without sorting. Top-k, top-p and min-p each keep a prefix of the order (score descending, id ascending), so
// what they keep is known by its last token, a `Bound`. It is found by inserting into a short list (small top-k), or by
// a histogram over scores in which only the bin that holds the bound is brought in order.
#pragma once

#include <cstdint>
#include <limits>

#include "isa.hpp"

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

}  // namespace llmctl::cpu
