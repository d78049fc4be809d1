// Norm of query and key heads, rotation, and storing K and V into the paged cache with conversion: what lies between a
// layer's projections and attention.
//
// One warp per head of a row: a query head is rotated in place, a KV head is rotated and stored with its V. Each lane
// has pairs of dimensions that rotate together. Layout of the cache: attend.cuh; what is stored: KVFormat (formats.py).
//
// Products and sums of the rotation and of steering are rounded one by one and in the order of the CPU's kernels, so that
// the same K in float32 is stored as the same codes.
//
// V is kept finite whatever comes: attention multiplies masked tokens with 0, and a NaN or an infinity would show where
// nobody attends to it. K of that token becomes NaN in its place, which reaches exactly those who do.
#pragma once

#include "stored.cuh"

namespace llmctl::cuda {


// What an 8-bit format makes of a value without NaN; `scale` is the token's, of Int8 alone.
template <class Kv>
LLMCTL_DEVICE float rounded(float v, float scale) {
  static_assert(sizeof(Kv) == 1);
  if constexpr (kSame<Kv, Int8>) {
    return static_cast<float>(to_stored<Int8>(v / scale)) * scale;
  } else {
    // Exponent and mantissa in their places, with an exponent's bias that the product mends, for denormals too.
    constexpr bool k5 = kSame<Kv, E5m2>;
    const uint32_t code = to_stored<Kv>(v).bits;
    return float_of((code & 0x80u) << 24 | (code & 0x7fu) << (k5 ? 21 : 20)) * float_of(k5 ? 0x77800000u : 0x7b800000u);
  }
}

template <class Kv>
constexpr float kLargestFp8 = kSame<Kv, E4m3> ? 448.0f : 57344.0f;
constexpr float kSteerBelow = 1e18f;  // no sum of steering can overflow below it

// K of one token, a and b, replaced by values of an 8-bit format near it whose errors cancel each other as far as queries
// can see: KeySteering of ops.py. Lane l has the pairs at places l, l + 32 ..., with their turns c and s; `follow` is the
// head's. Every lane rounds a pair at each place, and that of the place tells the others its error.
template <class Kv, int kHalf, int kPairs>
LLMCTL_DEVICE void steer_key(float (&a)[kPairs], float (&b)[kPairs], const float (&c)[kPairs], const float (&s)[kPairs],
                             float scale, const float* follow) {
  const int lane = threadIdx.x % 32;
  float first[kPairs] = {}, second[kPairs] = {};  // what pairs are to make good
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    constexpr int kUnroll = 8;
    static_assert(kHalf % kUnroll == 0);
    float chosen_a = 0, chosen_b = 0;
#pragma unroll kUnroll
    for (int from = 0; from < 32; ++from) {
      if (kHalf % 32 != 0 && 32 * i + from >= kHalf) break;
      const float near_a = rounded<Kv>(a[i] - (first[i] * c[i] - second[i] * s[i]), scale);
      const float near_b = rounded<Kv>(b[i] - (second[i] * c[i] + first[i] * s[i]), scale);
      const float off_a = near_a - a[i], off_b = near_b - b[i];
      const float x = __shfl_sync(kAllLanes, off_a * c[i] + off_b * s[i], from);  // turned back
      const float y = __shfl_sync(kAllLanes, off_b * c[i] - off_a * s[i], from);
      if (lane == from) {
        chosen_a = near_a;
        chosen_b = near_b;
      }
      const float* row = follow + (32 * i + from) * 4 * kHalf + lane;
#pragma unroll
      for (int j = i; j < kPairs; ++j) {
        if (kHalf % 32 != 0 && lane + 32 * j >= kHalf) continue;
        first[j] += x * row[32 * j] + y * row[kHalf + 32 * j];
        second[j] += x * row[2 * kHalf + 32 * j] + y * row[3 * kHalf + 32 * j];
      }
    }
    a[i] = chosen_a;
    b[i] = chosen_b;
  }
}

template <class Kv>
LLMCTL_DEVICE Kv stored_nan() {
  if constexpr (sizeof(Kv) == 1) {
    return Kv{0x7f};  // not for Int8, whose NaN is in the scale
  } else {
    return from_float<Kv>(float_of(0x7fffffffu));
  }
}

LLMCTL_DEVICE bool is_finite(float v) { return (bits_of(v) & 0x7f800000u) != 0x7f800000u; }

// grid: (rows that could be, ceil((heads + KV heads) / 4)), 128 threads. KV heads come behind the query heads.
//   q      [rows, heads * kHeadDim], in place;  k, v  [rows, KV heads * kHeadDim];  strides in elements
//   q_norm, k_norm  Act [kHeadDim], or null: no norm
//   rotary          dimensions that rotate, 0: none;  cos, sin  float32 [positions, rotary / 2]
//   interleaved     dimension 2i rotates with 2i + 1; 0: i with i + rotary / 2
//   block_bits      a block has 1 << block_bits tokens
//   slot, position  int32 [rows];  tables  int32 [slots, max_blocks]
//   kv_scales       float32 [2, KV heads] of an fp8 layer, or null: K and V are divided by them, queries multiplied
//   order, follow   KeySteering's (kSteered: of an 8-bit format, whole heads rotated in halves or not at all, so
//                   `interleaved` is 0)
//   level, centre   KeySteering's, or null; for a steered layer alone
//   q_scale         queries are multiplied with it
template <class Act, class Kv, int kHeadDim, bool kSteered>
__global__ void LLMCTL_THREADS(128)
    rope_store(Act* q, const Act* k, const Act* v, uint8_t* arena, const int32_t* tables, const int32_t* slot,
               const int32_t* position, const int32_t* num_rows, const Act* q_norm, const Act* k_norm, const float* cos,
               const float* sin, const float* kv_scales, const int32_t* order, const float* follow,
               const float* level, const float* centre,
               int64_t block_stride, int64_t layer_offset, int max_blocks, int heads, int kv_heads, int q_stride,
               int kv_stride, int rotary, int interleaved, float eps, float q_scale, int block_bits) {
  static_assert(!kSteered || sizeof(Kv) == 1);
  constexpr int kPairs = (kHeadDim / 2 + 31) / 32;
  constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Kv));
  const int half_bytes = (kRowBytes + (kSame<Kv, Int8> ? 2 : 0)) << block_bits;
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  const int head = blockIdx.y * 4 + static_cast<int>(threadIdx.x) / 32;
  if (row >= num_rows[0] || head >= heads + kv_heads) return;
  const bool is_key = head >= heads;
  const int kv_head = head - heads;
  const Act* from = is_key ? k + static_cast<int64_t>(row) * kv_stride + kv_head * kHeadDim
                           : q + static_cast<int64_t>(row) * q_stride + head * kHeadDim;
  const int where = position[row];
  const int of_scales = is_key ? kv_head : head / (heads / kv_heads);
  const float key_scale = kv_scales == nullptr ? 1.0f : kv_scales[of_scales];

  int dim_a[kPairs], dim_b[kPairs];
  float a[kPairs], b[kPairs];
  bool exists[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + 32 * i;
    exists[i] = pair < kHeadDim / 2;
    if constexpr (kSteered) {
      // In the order in which they are rounded.
      dim_a[i] = is_key && exists[i] ? order[kv_head * (kHeadDim / 2) + pair] : pair;
      dim_b[i] = dim_a[i] + kHeadDim / 2;
    } else {
      const bool apart = interleaved == 0 && pair < rotary / 2;
      const int beyond = interleaved == 0 ? rotary : 0;  // what does not rotate is paired with its neighbour
      dim_a[i] = apart ? pair : beyond + 2 * (pair - beyond / 2);
      dim_b[i] = apart ? pair + rotary / 2 : dim_a[i] + 1;
    }
    a[i] = exists[i] ? to_float(from[dim_a[i]]) : 0.0f;
    b[i] = exists[i] ? to_float(from[dim_b[i]]) : 0.0f;
  }
  if (q_norm != nullptr) {
    const Act* weight = is_key ? k_norm : q_norm;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) squares = fmaf(b[i], b[i], fmaf(a[i], a[i], squares));
    const float factor = 1.0f / sqrtf(sum_lanes(squares) / kHeadDim + eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!exists[i]) continue;
      a[i] = a[i] * factor * to_float(weight[dim_a[i]]);
      b[i] = b[i] * factor * to_float(weight[dim_b[i]]);
    }
  }
  float c[kPairs], s[kPairs];
  const float factor = is_key ? 1.0f / key_scale : q_scale * key_scale;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    c[i] = 1;
    s[i] = 0;
    const int pair = lane + 32 * i;
    if (pair < rotary / 2) {
      const int64_t at = static_cast<int64_t>(where) * (rotary / 2) + (kSteered ? dim_a[i] : pair);
      c[i] = cos[at];
      s[i] = sin[at];
      const float x = a[i], y = b[i];
      a[i] = fmaf(-y, s[i], x * c[i]);
      b[i] = fmaf(x, s[i], y * c[i]);
    }
    a[i] *= factor;
    b[i] *= factor;
    if constexpr (kSteered) {
      if (!exists[i]) continue;
      if (is_key && centre != nullptr) {
        a[i] -= centre[kv_head * kHeadDim + dim_a[i]];
        b[i] -= centre[kv_head * kHeadDim + dim_b[i]];
      }
      const uint32_t l = bits_of(level == nullptr ? 1.0f : level[of_scales * (kHeadDim / 2) + dim_a[i]]);
      const float by = float_of(is_key ? 0x7f000000u - l : l);  // one over a power of two
      a[i] *= by;
      b[i] *= by;
    }
  }
  if (!is_key) {
    Act* to = q + static_cast<int64_t>(row) * q_stride + head * kHeadDim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (!exists[i]) continue;
      to[dim_a[i]] = from_float<Act>(a[i]);
      to[dim_b[i]] = from_float<Act>(b[i]);
    }
    return;
  }

  const int block = tables[static_cast<int64_t>(slot[row]) * max_blocks + (where >> block_bits)];
  const int inside = where & ((1 << block_bits) - 1);
  uint8_t* to = arena + block * block_stride + layer_offset + static_cast<int64_t>(kv_head) * 2 * half_bytes;
  Kv* keys = reinterpret_cast<Kv*>(to) + inside * kHeadDim;
  Kv* values = reinterpret_cast<Kv*>(to + half_bytes) + inside * kHeadDim;
  const Act* value = v + static_cast<int64_t>(row) * kv_stride + kv_head * kHeadDim;
  const float value_factor = kv_scales == nullptr ? 1.0f : 1.0f / kv_scales[kv_heads + kv_head];
  float va[kPairs], vb[kPairs];
  bool broken = false, broken_key = false;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    va[i] = exists[i] ? to_float(value[dim_a[i]]) * value_factor : 0.0f;
    vb[i] = exists[i] ? to_float(value[dim_b[i]]) * value_factor : 0.0f;
    if constexpr (sizeof(Kv) == 1) {
      // Infinities become the largest value; NaN is taken out and marked.
      broken_key = broken_key || a[i] != a[i] || b[i] != b[i];
      broken = broken || broken_key || va[i] != va[i] || vb[i] != vb[i];
      a[i] = a[i] != a[i] ? 0.0f : a[i];
      b[i] = b[i] != b[i] ? 0.0f : b[i];
      va[i] = va[i] != va[i] ? 0.0f : va[i];
      vb[i] = vb[i] != vb[i] ? 0.0f : vb[i];
    } else {
      const bool fine_a = is_finite(to_float(to_stored<Kv>(va[i]))), fine_b = is_finite(to_float(to_stored<Kv>(vb[i])));
      broken = broken || !fine_a || !fine_b;
      va[i] = fine_a ? va[i] : 0.0f;
      vb[i] = fine_b ? vb[i] : 0.0f;
    }
  }
  broken = __any_sync(kAllLanes, broken);
  float most[2] = {0, 0};
  if constexpr (sizeof(Kv) == 1) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (!kSame<Kv, Int8>) {
        a[i] = fminf(fmaxf(a[i], -kLargestFp8<Kv>), kLargestFp8<Kv>);
        b[i] = fminf(fmaxf(b[i], -kLargestFp8<Kv>), kLargestFp8<Kv>);
      }
      most[0] = fmaxf(most[0], fmaxf(fabsf(a[i]), fabsf(b[i])));
      most[1] = fmaxf(most[1], fmaxf(fabsf(va[i]), fabsf(vb[i])));
    }
    most[0] = max_lanes(most[0]);
    most[1] = max_lanes(most[1]);
  }
  uint32_t scale[2] = {0, 0};  // the smallest bfloat16 not below what Int8 needs
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float size = fminf(fmaxf(most[half], 1e-30f), 3.402823466e38f);
    scale[half] = (bits_of(size / 127.0f) + 0xffffu) >> 16;
  }
  if constexpr (kSteered) {
    if (!__any_sync(kAllLanes, broken_key) && most[0] < kSteerBelow) {
      const float* of_head = follow + static_cast<int64_t>(kv_head) * (kHeadDim / 2 * 4) * (kHeadDim / 2);
      steer_key<Kv, kHeadDim / 2, kPairs>(a, b, c, s, float_of(scale[0] << 16), of_head);
    }
  }
  if constexpr (kSame<Kv, Int8>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float by = float_of(scale[half] << 16);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        (half == 0 ? a[i] : va[i]) /= by;
        (half == 0 ? b[i] : vb[i]) /= by;
      }
      if (lane == 0) {
        auto* scales = reinterpret_cast<uint16_t*>(to + half * half_bytes + (kRowBytes << block_bits));
        scales[inside] = static_cast<uint16_t>(half == 0 && broken ? 0x7fffu : scale[half]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (!exists[i]) continue;
    const bool mark = !kSame<Kv, Int8> && broken && dim_a[i] == 0;
    keys[dim_a[i]] = mark ? stored_nan<Kv>() : to_stored<Kv>(a[i]);
    keys[dim_b[i]] = to_stored<Kv>(b[i]);
    values[dim_a[i]] = to_stored<Kv>(va[i]);
    values[dim_b[i]] = to_stored<Kv>(vb[i]);
  }
}

}  // namespace llmctl::cuda
