// Rotary embedding of query and key heads in place (after an optional RMS norm per head), and the store of K and V.
//
// A task is one row and one KV head with the query heads that read it. K goes to column `position % block_size` of the
// block's [head_dim][block_size], V to row `position % block_size` of [block_size][head_dim], rounded to nearest even.
// What becomes of values that a format cannot hold is said in formats.py.
#pragma once

#include "kv_format.hpp"
#include "norm.hpp"

namespace llmctl::cpu {

// head[0 .. 2 half): dimension i is rotated with i + half. Without a norm `weight` is null, without a rotation `cos`.
template <class Isa>
LLMCTL_INLINE void rotate_head(float* head, int half, const float* weight, float eps, const float* cos,
                               const float* sin, float factor) {
  using F = typename Isa::F;
  const F scale = Isa::set1(weight == nullptr ? 1.0f : inverse_rms<Isa>(head, 2 * half, eps));
  const F f = Isa::set1(factor);
  for (int d = 0; d < half; d += kLanes) {
    const int n = least(kLanes, half - d);
    F a = load_some<Isa>(head + d, n), b = load_some<Isa>(head + half + d, n);
    if (weight != nullptr) {
      a = Isa::mul(Isa::mul(a, scale), load_some<Isa>(weight + d, n));
      b = Isa::mul(Isa::mul(b, scale), load_some<Isa>(weight + half + d, n));
    }
    if (cos != nullptr) {
      const F c = load_some<Isa>(cos + d, n), s = load_some<Isa>(sin + d, n);
      const F turned = Isa::fnma(b, s, Isa::mul(a, c));
      b = Isa::fma(a, s, Isa::mul(b, c));
      a = turned;
    }
    store_some<Isa>(head + d, Isa::mul(a, f), n);
    store_some<Isa>(head + half + d, Isa::mul(b, f), n);
  }
}

// The centre off one head of K, and its pairs divided by their levels. Levels are powers of two: they round nothing.
template <class Isa>
LLMCTL_INLINE void level_key(float* key, int half, const float* centre, const float* level) {
  for (int d = 0; d < 2 * half; d += kLanes) {
    if (centre != nullptr) Isa::store(key + d, Isa::sub(Isa::load(key + d), Isa::load(centre + d)));
  }
  for (int d = 0; level != nullptr && d < half; d += kLanes) {
    const int n = least(kLanes, half - d);
    const auto l = load_some<Isa>(level + d, n);
    store_some<Isa>(key + d, Isa::div(load_some<Isa>(key + d, n), l), n);
    store_some<Isa>(key + half + d, Isa::div(load_some<Isa>(key + half + d, n), l), n);
  }
}

// One query head for keys with these levels.
template <class Isa>
LLMCTL_INLINE void level_query(float* head, int half, const float* level) {
  for (int d = 0; d < half; d += kLanes) {
    const int n = least(kLanes, half - d);
    const auto l = load_some<Isa>(level + d, n);
    store_some<Isa>(head + d, Isa::mul(load_some<Isa>(head + d, n), l), n);
    store_some<Isa>(head + half + d, Isa::mul(load_some<Isa>(head + half + d, n), l), n);
  }
}

constexpr float kSteerBelow = 1e18f;  // no sum of steering can overflow below it

template <class Isa>
LLMCTL_INLINE typename Isa::F nan_to_zero(typename Isa::F v) {
  return Isa::select(Isa::equal(v, v), v, Isa::zero());
}

template <class Isa>
LLMCTL_INLINE bool has_nan(const float* x, int count) {
  unsigned fine = 0xFF;
  for (int d = 0; d < count; d += kLanes) fine &= Isa::mask_bits(Isa::equal(Isa::load(x + d), Isa::load(x + d)));
  return fine != 0xFF;
}

// absmax / top, rounded up to bfloat16 so that no code is above `top`; never 0, and finite also for infinity.
template <class Isa>
LLMCTL_INLINE uint16_t scale_of(const float* x, int count, float top_code) {
  using F = typename Isa::F;
  F top = Isa::set1(1e-30f);
  for (int d = 0; d < count; d += kLanes) top = Isa::max(Isa::abs(nan_to_zero<Isa>(Isa::load(x + d))), top);
  const float largest = Isa::max_lane(Isa::min(top, Isa::set1(__FLT_MAX__)));
  return static_cast<uint16_t>((bits_as<uint32_t>(largest / top_code) + 0xFFFF) >> 16);
}

// What an 8-bit format makes of 8 values, in place; `scale` is the token's.
template <class Isa, class Format>
LLMCTL_INLINE void round_lanes(float* values, float scale) {
  typename Format::Elem codes[kLanes];
  auto v = Isa::load(values);
  if constexpr (Format::kScaled) v = Isa::div(v, Isa::set1(scale));
  Format::template store<Isa>(codes, v);
  v = Isa::mul(Format::template load<Isa>(codes), Isa::set1(Format::kScaled ? scale : Format::kFactor));
  Isa::store(values, v);
}

// K of one token, `key`, to `chosen`: values of the format near it whose differences from it cancel each other as far
// as queries can see (KeySteering of kernels/ops.py). Products and sums are rounded one by one, so that all instruction
// sets and the reference choose alike.
template <class Isa, class Format>
LLMCTL_NOINLINE void steer_key(const Steering& steer, int head_dim, int kv_head, const float* key, float scale,
                               const float* cos, const float* sin, float* chosen) {
  using F = typename Isa::F;
  const int half = head_dim / 2, width = Steering::width(head_dim);
  const int32_t* order = steer.order + static_cast<long>(kv_head) * half;
  const float* follow = steer.follow + static_cast<long>(kv_head) * half * 4 * width;
  alignas(32) float first[kMaxHeadDim / 2] = {}, second[kMaxHeadDim / 2] = {};  // what later pairs are to make good
  alignas(32) float pair[kLanes] = {};
  for (int i = 0; i < half; ++i, follow += 4 * width) {
    const int d = order[i];
    const float c = cos == nullptr ? 1.0f : cos[d], s = cos == nullptr ? 0.0f : sin[d];
    const float a = key[d], b = key[d + half];
    pair[0] = a - (first[i] * c - second[i] * s);
    pair[1] = b - (second[i] * c + first[i] * s);
    round_lanes<Isa, Format>(pair, scale);
    chosen[d] = pair[0];
    chosen[d + half] = pair[1];
    const float off_a = pair[0] - a, off_b = pair[1] - b;
    const F x = Isa::set1(off_a * c + off_b * s), y = Isa::set1(off_b * c - off_a * s);  // turned back
    for (int j = (i + 1) / kLanes * kLanes; j < half; j += kLanes) {
      const float* f = follow + j;
      const F on_first = Isa::add(Isa::mul(x, Isa::load(f)), Isa::mul(y, Isa::load(f + width)));
      const F on_second = Isa::add(Isa::mul(x, Isa::load(f + 2 * width)), Isa::mul(y, Isa::load(f + 3 * width)));
      Isa::store(first + j, Isa::add(Isa::load(first + j), on_first));
      Isa::store(second + j, Isa::add(Isa::load(second + j), on_second));
    }
  }
}

// K as it is to be stored: without NaN, in fp8 cut off at the largest value, and steered where that is asked and safe.
template <class Isa, class Format>
LLMCTL_INLINE const float* ready_key(const RopeStoreArgs& a, int kv_head, const float* key, float scale,
                                     const float* cos, const float* sin, float* clean, float* chosen) {
  using F = typename Isa::F;
  F top = Isa::zero();
  for (int d = 0; d < a.kv.head_dim; d += kLanes) {
    F v = nan_to_zero<Isa>(Isa::load(key + d));
    if constexpr (!Format::kScaled) {
      v = Isa::max(Isa::set1(-Format::kLargest), Isa::min(Isa::set1(Format::kLargest), v));
    }
    top = Isa::max(top, Isa::abs(v));
    Isa::store(clean + d, v);
  }
  if (a.steer.order == nullptr || Isa::max_lane(top) >= kSteerBelow || has_nan<Isa>(key, a.kv.head_dim)) return clean;
  steer_key<Isa, Format>(a.steer, a.kv.head_dim, kv_head, clean, scale, cos, sin, chosen);
  return chosen;
}

template <class Isa, class Format>
LLMCTL_INLINE void store_bytes(const RopeStoreArgs& a, const float* k, const float* v, long block, int kv_head,
                               int offset, const float* cos, const float* sin) {
  const Kv& kv = a.kv;
  using F = typename Isa::F;
  using Elem = typename Format::Elem;
  constexpr uint16_t kBf16Nan = 0x7FC0;
  const KvHalf keys = half_of(kv, block, kv_head, 0), values = half_of(kv, block, kv_head, 1);
  Elem* column_of_k = reinterpret_cast<Elem*>(keys.values) + offset;
  Elem* row_of_v = reinterpret_cast<Elem*>(values.values) + static_cast<long>(offset) * kv.head_dim;
  F k_scale = Isa::set1(1.0f), v_scale = k_scale;
  if constexpr (Format::kScaled) {
    keys.scales[offset] = scale_of<Isa>(k, kv.head_dim, 127.0f);
    values.scales[offset] = scale_of<Isa>(v, kv.head_dim, 127.0f);
    k_scale = Isa::set1(bits_as<float>(uint32_t{keys.scales[offset]} << 16));
    v_scale = Isa::set1(bits_as<float>(uint32_t{values.scales[offset]} << 16));
  }
  const F v_factor = Isa::set1(1.0f / kv.value_scale(kv_head));
  alignas(32) float clean[kMaxHeadDim], chosen[kMaxHeadDim];
  const float* ready = ready_key<Isa, Format>(a, kv_head, k, Isa::max_lane(k_scale), cos, sin, clean, chosen);
  for (int d = 0; d < kv.head_dim; d += kLanes) {
    Elem column[kLanes];
    F key = Isa::load(ready + d), value = nan_to_zero<Isa>(Isa::mul(Isa::load(v + d), v_factor));
    if constexpr (Format::kScaled) {
      key = Isa::div(key, k_scale);
      value = Isa::div(value, v_scale);
    }
    Format::template store<Isa>(column, key);
    for (int i = 0; i < kLanes; ++i) column_of_k[static_cast<long>(d + i) * kv.block_size] = column[i];
    Format::template store<Isa>(row_of_v + d, value);
  }
  if (has_nan<Isa>(k, kv.head_dim) || has_nan<Isa>(v, kv.head_dim)) {
    if constexpr (Format::kScaled) {
      keys.scales[offset] = kBf16Nan;
    } else {
      *column_of_k = kFp8Nan;
    }
  }
}

// Calls put(d, codes) for each 8 codes of one head's K or V from d on; returns its scale.
template <class Isa, class Put>
LLMCTL_INLINE uint16_t int16_codes(const float* x, int head_dim, float top, const Put& put) {
  using F = typename Isa::F;
  const uint16_t scale = scale_of<Isa>(x, head_dim, top);
  const F s = Isa::set1(bits_as<float>(uint32_t{scale} << 16)), high = Isa::set1(top), low = Isa::set1(-top);
  for (int d = 0; d < head_dim; d += kLanes) {
    int16_t eight[kLanes];
    const F code = Isa::div(nan_to_zero<Isa>(Isa::load(x + d)), s);
    Isa::store_i16(eight, Isa::to_int(Isa::max(low, Isa::min(high, code))));
    put(d, eight);
  }
  return scale;
}

template <class Isa>
LLMCTL_INLINE void store_pairs(const Kv& kv, const float* k, const float* v, long block, int kv_head, int offset) {
  constexpr uint16_t kBf16Nan = 0x7FC0;
  const KvHalf keys = half_of(kv, block, kv_head, 0), values = half_of(kv, block, kv_head, 1);
  const long pair = 2L * kv.block_size;  // from one pair of dimensions of K to the next
  int16_t* k_codes = reinterpret_cast<int16_t*>(keys.values) + 2 * offset;
  int16_t* v_codes =
      reinterpret_cast<int16_t*>(values.values) + static_cast<long>(offset / 2) * 2 * kv.head_dim + offset % 2;
  keys.scales[offset] = int16_codes<Isa>(k, kv.head_dim, KvInt16::kKeyTop, [&](int d, const int16_t* codes) {
    LLMCTL_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) std::memcpy(k_codes + (d / 2 + i) * pair, codes + 2 * i, 2 * sizeof(int16_t));
  });
  values.scales[offset] = int16_codes<Isa>(v, kv.head_dim, KvInt16::kValueTop, [&](int d, const int16_t* codes) {
    LLMCTL_UNROLL
    for (int i = 0; i < kLanes; ++i) v_codes[2 * (d + i)] = codes[i];
  });
  if (has_nan<Isa>(k, kv.head_dim) || has_nan<Isa>(v, kv.head_dim)) keys.scales[offset] = kBf16Nan;
}

template <class Isa, class Format>
LLMCTL_INLINE void store_floats(const Kv& kv, const float* k, const float* v, long block, int kv_head, int offset) {
  using Elem = typename Format::Elem;
  Elem* keys = reinterpret_cast<Elem*>(half_of(kv, block, kv_head, 0).values) + offset;
  Elem* values = reinterpret_cast<Elem*>(half_of(kv, block, kv_head, 1).values) + static_cast<long>(offset) * kv.head_dim;
  for (int d = 0; d < kv.head_dim; d += kLanes) {
    Elem column[kLanes];
    Format::template store<Isa>(column, Isa::load(k + d));
    for (int i = 0; i < kLanes; ++i) keys[static_cast<long>(d + i) * kv.block_size] = column[i];
    Format::template store<Isa>(values + d, Isa::load(v + d));
  }
}

template <class Isa>
LLMCTL_NOINLINE void rope_store_tasks(const RopeStoreArgs& a, int task_begin, int task_end) {
  const int dim = a.kv.head_dim, half = dim / 2, heads_per_kv = a.num_heads / a.kv.num_kv_heads;
  for (int task = task_begin; task < task_end; ++task) {
    const int row = task / a.kv.num_kv_heads, kv_head = task % a.kv.num_kv_heads;
    const int position = a.batch.position[row];
    const float* cos = a.cos == nullptr ? nullptr : a.cos + static_cast<long>(position) * half;
    const float* sin = a.cos == nullptr ? nullptr : a.sin + static_cast<long>(position) * half;
    const float* level = a.steer.level == nullptr ? nullptr : a.steer.level + static_cast<long>(kv_head) * half;
    const float* centre = a.steer.centre == nullptr ? nullptr : a.steer.centre + static_cast<long>(kv_head) * dim;
    for (int j = 0; j < heads_per_kv; ++j) {
      float* q = a.q.row(row) + static_cast<long>(kv_head * heads_per_kv + j) * dim;
      rotate_head<Isa>(q, half, a.q_norm, a.norm_eps, cos, sin, a.q_scale * a.kv.key_scale(kv_head));
      if (level != nullptr) level_query<Isa>(q, half, level);
    }
    float* k = a.k.row(row) + static_cast<long>(kv_head) * dim;
    const float* v = a.v.row(row) + static_cast<long>(kv_head) * dim;
    rotate_head<Isa>(k, half, a.k_norm, a.norm_eps, cos, sin, 1.0f / a.kv.key_scale(kv_head));
    level_key<Isa>(k, half, centre, level);
    const int32_t* table = a.kv.table + a.batch.slot[row] * a.kv.max_blocks;
    const long block = table[position / a.kv.block_size];
    const int offset = position % a.kv.block_size;
    switch (a.kv.kind) {
      case KvKind::f32: store_floats<Isa, KvF32>(a.kv, k, v, block, kv_head, offset); break;
      case KvKind::f16: store_floats<Isa, KvF16>(a.kv, k, v, block, kv_head, offset); break;
      case KvKind::bf16: store_floats<Isa, KvBf16>(a.kv, k, v, block, kv_head, offset); break;
      case KvKind::fp8_e4m3: store_bytes<Isa, KvE4m3>(a, k, v, block, kv_head, offset, cos, sin); break;
      case KvKind::fp8_e5m2: store_bytes<Isa, KvE5m2>(a, k, v, block, kv_head, offset, cos, sin); break;
      case KvKind::int8: store_bytes<Isa, KvInt8>(a, k, v, block, kv_head, offset, cos, sin); break;
      case KvKind::int16: store_pairs<Isa>(a.kv, k, v, block, kv_head, offset); break;
    }
  }
}

}  // namespace llmctl::cpu
