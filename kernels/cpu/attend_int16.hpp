// Attention over an int16 cache: both products in exact integer arithmetic, two positions or dimensions at a time.
//
// Queries are quantized per row and head, the weights of a split per row after they are multiplied with the scales of
// the values. A sum of kExactRun products stays below 2^31, so its order cannot show:
//   keys    8191 x 4095 x 64,  values  2047 x 16383 x 64
// Longer sums are made of such runs, at fixed dimensions and positions, in float32. A weight has 14 bits below the
// largest of its split, which is more than the values have: small weights beside a large one are many.
#pragma once

#include "act.hpp"
#include "attend_strip.hpp"

namespace llmctl::cpu {

constexpr float kQueryTop = 4095.0f, kWeightTop = 16383.0f;
constexpr int kSoftLanes = 16;  // a row's sum of weights has one lane for each position % 16

static_assert(KvInt16::kKeyTop * double{kQueryTop} * kExactRun < 2147483648.0);
static_assert(KvInt16::kValueTop * double{kWeightTop} * kExactRun < 2147483648.0);

template <>
struct TileQueries<KvInt16> {
  alignas(64) int16_t codes[kTileRows * kMaxHeadDim];  // [rows][kMaxHeadDim]
  float scales[kTileRows];
};

template <class Isa>
LLMCTL_INLINE void set_int16_query(TileQueries<KvInt16>& q, int r, const float* from, int head_dim) {
  quantize_group<Isa>(from, head_dim, kQueryTop, q.codes + r * kMaxHeadDim, q.scales + r);
}

// acc[r][v] += pair r of factors * vector v of pairs.
template <class C, int kQ, int kVectors>
LLMCTL_INLINE void add_pairs(const int16_t* factors, long factor_stride, const int16_t* pairs,
                             typename C::I (&acc)[kQ][kVectors]) {
  if constexpr (kQ < kVectors) {
    typename C::X2 x[kQ];
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) x[r] = C::broadcast_x2(factors + r * factor_stride);
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto y = C::load_pairs(pairs + 2 * C::kWidth * v);
      LLMCTL_UNROLL
      for (int r = 0; r < kQ; ++r) acc[r][v] = C::dot2(acc[r][v], y, x[r]);
    }
  } else {
    typename C::Codes2 y[kVectors];
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) y[v] = C::load_pairs(pairs + 2 * C::kWidth * v);
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      const auto x = C::broadcast_x2(factors + r * factor_stride);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] = C::dot2(acc[r][v], y[v], x);
    }
  }
}

template <class C, int kQ, int kVectors>
LLMCTL_INLINE void clear(typename C::I (&acc)[kQ][kVectors]) {
  LLMCTL_UNROLL
  for (int r = 0; r < kQ; ++r) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = C::zero_i();
  }
}

// Scores of kVectors vectors of positions from `offset` of a segment on, without their scales.
template <class C, int kQ, int kVectors>
LLMCTL_INLINE void score_pairs(const int16_t* __restrict q, const Segment<int16_t>& segment, int offset, const Kv& kv,
                               float* __restrict scores) {
  constexpr int kStripBytes = kVectors * C::kWidth * 4;
  const long stride = 2L * kv.block_size;
  const int16_t* keys = segment.keys + 2 * offset;
  const char* values = reinterpret_cast<const char*>(segment.values + static_cast<long>(offset) * kv.head_dim);
  for (int begin = 0; begin < kv.head_dim; begin += kExactRun) {
    typename C::I acc[kQ][kVectors];
    clear<C>(acc);
    const int count = least(kExactRun, kv.head_dim - begin) / 2;
    for (int i = 0; i < count; ++i) {
      add_pairs<C>(q, kMaxHeadDim, keys, acc);
      fetch_step<kStripBytes>(values, i);
      q += 2;
      keys += stride;
      values += kStripBytes;
    }
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* to = scores + r * kAttendSplit + C::kWidth * v;
        const auto now = C::to_float(acc[r][v]);
        C::store(to, begin == 0 ? now : C::add(C::load(to), now));
      }
    }
  }
}

// out [kQ][kMaxHeadDim], kVectors vectors of dimensions from d on: weights times values, times the row's scale.
template <class C, int kQ, int kVectors>
LLMCTL_INLINE void value_pairs(const int16_t* __restrict weights, const float* __restrict weight_scales,
                               const SplitView<int16_t>& view, int d, int head_dim, float* __restrict out) {
  constexpr int kStripBytes = kVectors * C::kWidth * 4;
  for (int s = 0; s < view.count;) {
    typename C::I acc[kQ][kVectors];
    clear<C>(acc);
    const bool first = s == 0;
    const int run = view.segments[s].at / kExactRun;
    for (; s < view.count && view.segments[s].at / kExactRun == run; ++s) {
      const Segment<int16_t>& segment = view.segments[s];
      const int16_t* values = segment.values + 2 * d;
      const int16_t* factors = weights + segment.at;
      const char* next = view.next_keys[s] + 2L * d * segment.count;
      const int count = (segment.count + 1) / 2;
      for (int i = 0; i < count; ++i) {
        add_pairs<C>(factors, kAttendSplit, values, acc);
        fetch_step<kStripBytes>(next, i);
        factors += 2;
        values += 2 * head_dim;
        next += kStripBytes;
      }
    }
    LLMCTL_UNROLL
    for (int r = 0; r < kQ; ++r) {
      const auto scale = C::set1(weight_scales[r]);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* to = out + r * kMaxHeadDim + d + C::kWidth * v;
        const auto sum = C::to_float(acc[r][v]);
        C::store(to, first ? C::mul(sum, scale) : C::fma(sum, scale, C::load(to)));
      }
    }
  }
}

// 2^x for x <= 0 to 2^-18, clamped at -80: no weight then is denormal when it is scaled, and each would take a hundred
// times as long. NaN stays NaN and 0 gives exactly 1.
// A minimax polynomial of degree 4 for the relative error of 2^r, |r| <= 1 / 2.
template <class C>
LLMCTL_INLINE typename C::F power_of_weight(typename C::F x) {
  using F = typename C::F;
  x = C::max(C::set1(-80.0f), x);
  const F n = C::round(x), r = C::sub(x, n);
  F p = C::set1(9.5828150e-3f);
  p = C::fma(p, r, C::set1(5.5906820e-2f));
  p = C::fma(p, r, C::set1(2.4024102e-1f));
  p = C::fma(p, r, C::set1(6.9312420e-1f));
  p = C::fma(p, r, C::set1(1.0f));
  return C::times_power(p, n);
}

// What a row's softmax is made of while it passes over the split, in kSoftLanes lanes.
template <class Isa, class C>
struct SoftLanes {
  static constexpr int kParts = kSoftLanes / C::kWidth;
  typename C::F part[kParts];

  LLMCTL_INLINE SoftLanes of(float v) {
    SoftLanes lanes;
    LLMCTL_UNROLL
    for (int j = 0; j < kParts; ++j) lanes.part[j] = C::set1(v);
    return lanes;
  }
  LLMCTL_INLINE float largest(const SoftLanes& from) {
    alignas(64) float lanes[kSoftLanes];
    LLMCTL_UNROLL
    for (int j = 0; j < kParts; ++j) C::store(lanes + C::kWidth * j, from.part[j]);
    return Isa::max_lane(Isa::max(Isa::load(lanes), Isa::load(lanes + kLanes)));
  }
  LLMCTL_INLINE float sum(const SoftLanes& from) {
    alignas(64) float lanes[kSoftLanes];
    LLMCTL_UNROLL
    for (int j = 0; j < kParts; ++j) C::store(lanes + C::kWidth * j, from.part[j]);
    return Isa::sum(Isa::add(Isa::load(lanes), Isa::load(lanes + kLanes)));
  }
};

// One row's sums of products to codes of weights exp(score - maximum) * value scale, 0 outside [first, end); `from` and
// `to` are multiples of kSoftLanes. Everything is counted from the split's start. kAll: the row sees [from, to).
template <class Isa, bool kAll>
LLMCTL_INLINE void soften_int16(float* __restrict scores, const float* __restrict key_scales,
                                const float* __restrict value_scales, float query_scale, int from, int to, int first,
                                int end, int16_t* __restrict codes, float* maximum, float* sum, float* weight_scale) {
  using C = typename Isa::Columns;
  using F = typename C::F;
  using Lanes = SoftLanes<Isa, C>;
  Lanes top = Lanes::of(-__builtin_inff());
  LLMCTL_UNROLL
  for (int t = from; t < to; t += kSoftLanes) {
    LLMCTL_UNROLL
    for (int j = 0; j < Lanes::kParts; ++j) {
      const int at = t + C::kWidth * j;
      F s = C::mul(C::load(scores + at), C::load(key_scales + at));
      if constexpr (!kAll) {
        if (at < first || at + C::kWidth > end) s = C::keep(s, first - at, end - at, C::set1(-__builtin_inff()));
      }
      C::store(scores + at, s);
      top.part[j] = C::max(top.part[j], s);
    }
  }
  const float largest_score = Lanes::largest(top);
  *maximum = largest_score * query_scale;

  const F m = C::set1(largest_score), factor = C::set1(query_scale * 1.44269504f);
  Lanes total = Lanes::of(0.0f), largest = Lanes::of(1e-33f);
  LLMCTL_UNROLL
  for (int t = from; t < to; t += kSoftLanes) {
    LLMCTL_UNROLL
    for (int j = 0; j < Lanes::kParts; ++j) {
      const int at = t + C::kWidth * j;
      F p = power_of_weight<C>(C::mul(C::sub(C::load(scores + at), m), factor));
      F w = C::mul(p, C::load(value_scales + at));
      if constexpr (!kAll) {
        if (at < first || at + C::kWidth > end) {
          p = C::keep(p, first - at, end - at, C::zero());
          w = C::keep(w, first - at, end - at, C::zero());  // a leftover scale may be NaN
        }
      }
      total.part[j] = C::add(total.part[j], p);
      largest.part[j] = C::max(largest.part[j], w);
      C::store(scores + at, w);
    }
  }
  *sum = Lanes::sum(total);
  const float largest_weight = Lanes::largest(largest);
  *weight_scale = largest_weight * (1.0f / kWeightTop);
  const F inverse = C::set1(kWeightTop / largest_weight);
  LLMCTL_UNROLL
  for (int t = from; t < to; t += C::kWidth) {
    C::store_i16(codes + t, C::to_int(C::mul(C::load(scores + t), inverse)));
  }
}

// The partial results of one split for kQ score rows.
template <class Isa, int kQ>
LLMCTL_INLINE void int16_part(const Kv& kv, const TileQueries<KvInt16>& q, const Visible& visible,
                              const SplitView<int16_t>& view, float* out, float* maximum, float* sum) {
  alignas(64) float scores[kQ * kAttendSplit], key_scales[kAttendSplit], value_scales[kAttendSplit];
  alignas(64) int16_t codes[kQ * kAttendSplit];
  float weight_scales[kQ];
  const int from = view.from / kSoftLanes * kSoftLanes, to = (view.high + kSoftLanes - 1) / kSoftLanes * kSoftLanes;
  const auto clear_edge = [&](int at) {  // 8 positions that no segment has: all that matters is that they are numbers
    Isa::store(key_scales + at, Isa::zero());
    Isa::store(value_scales + at, Isa::zero());
    for (int r = 0; r < kQ; ++r) Isa::store(scores + r * kAttendSplit + at, Isa::zero());
  };
  if (from < view.from) clear_edge(from);
  if (to - kLanes >= view.high) clear_edge(to - kLanes);
  for (int s = 0; s < view.count; ++s) {
    const Segment<int16_t>& segment = view.segments[s];
    for (int t = 0; t < segment.count; t += kLanes) {
      Isa::store(key_scales + segment.at + t, Isa::load_bf16(segment.key_scales + t));
      Isa::store(value_scales + segment.at + t, Isa::load_bf16(segment.value_scales + t));
    }
    each_strip<Isa, kQ>(segment.count, [&]<class C, int kVectors>(int t, C, std::integral_constant<int, kVectors>) {
      score_pairs<C, kQ, kVectors>(q.codes, segment, t, kv, scores + segment.at + t);
    });
  }
  for (int r = 0; r < kQ; ++r) {
    const int first = visible.first[r] - view.origin, end = visible.end[r] - view.origin;
    float* row = scores + r * kAttendSplit;
    int16_t* row_codes = codes + r * kAttendSplit;
    if (first <= 0 && end >= kAttendSplit) {
      soften_int16<Isa, true>(row, key_scales, value_scales, q.scales[r], 0, kAttendSplit, first, end, row_codes,
                              maximum + r, sum + r, weight_scales + r);
    } else {
      soften_int16<Isa, false>(row, key_scales, value_scales, q.scales[r], from, to, first, end, row_codes, maximum + r,
                               sum + r, weight_scales + r);
    }
  }
  each_strip<Isa, kQ>(kv.head_dim, [&]<class C, int kVectors>(int d, C, std::integral_constant<int, kVectors>) {
    value_pairs<C, kQ, kVectors>(codes, weight_scales, view, d, kv.head_dim, out);
  });
}

}  // namespace llmctl::cpu
