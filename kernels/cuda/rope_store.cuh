// Norm of query and key heads, rotation, and storing K and V into the paged cache with conversion: what lies between a
// layer's projections and attention.
//
// One warp per head of a row: a query head is rotated in place, a KV head is rotated and stored with its V. Each lane
// has pairs of dimensions that rotate together. Layout of the cache: attend.cuh; what is stored: KVFormat (formats.py).
//
// V is kept finite whatever comes: attention multiplies masked tokens with 0, and a NaN or an infinity would show where
// nobody attends to it. K of that token becomes NaN in its place, which reaches exactly those who do.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

constexpr int kNoRope = 0, kHalves = 1, kInterleaved = 2;  // dimension i rotates with i + rotary / 2, or 2i with 2i + 1

// Float32 to a float of 8 bits with kMantissa bits of mantissa, to nearest even, at most `largest`. Not for NaN.
template <int kMantissa>
LLMCTL_DEVICE uint8_t to_fp8(float v, float largest) {
  constexpr int kDropped = 23 - kMantissa, kBias = kMantissa == 3 ? 7 : 15;
  constexpr float kLeastNormal = kMantissa == 3 ? 0.015625f : 6.103515625e-05f;
  const float size = fminf(fabsf(v), largest);
  const uint32_t bits = bits_of(size);
  const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  const uint32_t normal = (rounded >> kDropped) - ((127 - kBias) << kMantissa);
  const uint32_t tiny = static_cast<uint32_t>(rintf(size * ((1 << kMantissa) / kLeastNormal)));
  return static_cast<uint8_t>((size < kLeastNormal ? tiny : normal) | (bits_of(v) >> 24 & 0x80u));
}

template <class Kv>
LLMCTL_DEVICE Kv to_stored(float v) {
  if constexpr (kSame<Kv, E4m3>) {
    return Kv{to_fp8<3>(v, 448.0f)};
  } else if constexpr (kSame<Kv, E5m2>) {
    return Kv{to_fp8<2>(v, 57344.0f)};
  } else if constexpr (kSame<Kv, Int8>) {
    return static_cast<Int8>(fminf(fmaxf(rintf(v), -127.0f), 127.0f));
  } else {
    return from_float<Kv>(v);
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
//   q_norm, k_norm  Act [kHeadDim] (kNorm);  cos, sin  float32 [positions, rotary / 2]
//   slot, position  int32 [rows];  tables  int32 [slots, max_blocks]
template <class Act, class Kv, int kHeadDim, int kBlock, int kRope, bool kNorm>
__global__ void __launch_bounds__(128)
    rope_store(Act* q, const Act* k, const Act* v, uint8_t* arena, const int32_t* tables, const int32_t* slot,
               const int32_t* position, const int32_t* num_rows, const Act* q_norm, const Act* k_norm, const float* cos,
               const float* sin, int64_t block_stride, int64_t layer_offset, int max_blocks, int heads, int kv_heads,
               int q_stride, int kv_stride, int rotary, float eps) {
  constexpr int kPairs = (kHeadDim / 2 + 31) / 32;
  constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Kv));
  constexpr int kHalfBytes = kBlock * (kRowBytes + (kSame<Kv, Int8> ? 2 : 0));
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  const int head = blockIdx.y * 4 + static_cast<int>(threadIdx.x) / 32;
  if (row >= num_rows[0] || head >= heads + kv_heads) return;
  const bool is_key = head >= heads;
  const int kv_head = head - heads;
  const Act* from = is_key ? k + static_cast<int64_t>(row) * kv_stride + kv_head * kHeadDim
                           : q + static_cast<int64_t>(row) * q_stride + head * kHeadDim;
  const int where = position[row];

  int dim_a[kPairs], dim_b[kPairs];
  float a[kPairs], b[kPairs];
  bool exists[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + 32 * i;
    exists[i] = pair < kHeadDim / 2;
    const bool apart = kRope == kHalves && pair < rotary / 2;
    const int beyond = kRope == kHalves ? rotary : 0;  // what does not rotate is paired with its neighbour
    dim_a[i] = apart ? pair : beyond + 2 * (pair - beyond / 2);
    dim_b[i] = apart ? pair + rotary / 2 : dim_a[i] + 1;
    a[i] = exists[i] ? to_float(from[dim_a[i]]) : 0.0f;
    b[i] = exists[i] ? to_float(from[dim_b[i]]) : 0.0f;
  }
  if constexpr (kNorm) {
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
  if constexpr (kRope != kNoRope) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= rotary / 2) continue;
      const int64_t at = static_cast<int64_t>(where) * (rotary / 2) + pair;
      const float c = cos[at], s = sin[at], x = a[i], y = b[i];
      a[i] = fmaf(x, c, -(y * s));
      b[i] = fmaf(y, c, x * s);
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

  const int block = tables[static_cast<int64_t>(slot[row]) * max_blocks + where / kBlock], inside = where % kBlock;
  uint8_t* to = arena + block * block_stride + layer_offset + static_cast<int64_t>(kv_head) * 2 * kHalfBytes;
  Kv* keys = reinterpret_cast<Kv*>(to) + inside * kHeadDim;
  Kv* values = reinterpret_cast<Kv*>(to + kHalfBytes) + inside * kHeadDim;
  const Act* value = v + static_cast<int64_t>(row) * kv_stride + kv_head * kHeadDim;
  float va[kPairs], vb[kPairs];
  bool broken = false;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    va[i] = exists[i] ? to_float(value[dim_a[i]]) : 0.0f;
    vb[i] = exists[i] ? to_float(value[dim_b[i]]) : 0.0f;
    if constexpr (sizeof(Kv) == 1) {
      // Infinities become the largest value; NaN is taken out and marked.
      broken = broken || a[i] != a[i] || b[i] != b[i] || va[i] != va[i] || vb[i] != vb[i];
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
  if constexpr (kSame<Kv, Int8>) {
    float most[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      most[0] = fmaxf(most[0], fmaxf(fabsf(a[i]), fabsf(b[i])));
      most[1] = fmaxf(most[1], fmaxf(fabsf(va[i]), fabsf(vb[i])));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float size = fminf(fmaxf(max_lanes(most[half]), 1e-30f), 3.402823466e38f);
      const uint32_t scale = (bits_of(size / 127.0f) + 0xffffu) >> 16;  // the smallest bfloat16 not below
      const float by = float_of(scale << 16);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float& x = half == 0 ? a[i] : va[i];
        float& y = half == 0 ? b[i] : vb[i];
        x = fminf(fmaxf(x, -3.402823466e38f), 3.402823466e38f) / by;
        y = fminf(fmaxf(y, -3.402823466e38f), 3.402823466e38f) / by;
      }
      if (lane == 0) {
        auto* scales = reinterpret_cast<uint16_t*>(to + half * kHalfBytes + kBlock * kRowBytes);
        scales[inside] = static_cast<uint16_t>(half == 0 && broken ? 0x7fffu : scale);
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
