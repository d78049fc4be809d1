// The norm of a row, rounded to 8 bits with a scale of the row: what multiplies float8 or int8 weights without decoding.
#pragma once

#include "rows.cuh"
#include "stored.cuh"

namespace llmctl::cuda {

// grid: rows that could be, kThreads threads, kThreads / 16 floats of shared memory.
//   codes [rows, width], scales float32 [rows]: code * scale is the norm as of `rms_norm`, before it is rounded to Act;
//   the scale is the row's largest value over that of Code (448 for E4m3, 127 for Int8), at least 1e-30
//   kResidual, in, residual, weight, num_rows, width, eps: as of `rms_norm`
// A row with a NaN has a scale of NaN, and one with an infinity a scale of infinity.
template <class Act, class Code, bool kResidual, int kThreads>
__global__ void LLMCTL_THREADS(kThreads)
    rms_norm_quantize(Code* codes, float* scales, const Act* in, Act* residual, const Act* weight,
                      const int32_t* num_rows, int width, float eps) {
  static_assert(kSame<Code, E4m3> || kSame<Code, Int8>);
  if (static_cast<int>(blockIdx.x) >= num_rows[0]) return;
  constexpr int kCount = Pack<Act>::kCount;
  const int64_t r = blockIdx.x;
  float* sums = reinterpret_cast<float*>(dynamic_shared());
  NormRow<Act, kResidual, kThreads> row;
  const float factor = row.load(in + r * width, kResidual ? residual + r * width : nullptr, width, eps, sums);
  float most = 1e-30f;
  bool broken = false;
  row.each(weight, factor, [&](int, const Pack<Act>& v) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      most = fmaxf(most, fabsf(v.v[j]));  // which passes over NaN
      broken = broken || v.v[j] != v.v[j];
    }
  });
  most = max_lanes(most);
  if (__any_sync(kAllLanes, broken)) most = float_of(0x7fc00000u);
  float* tops = sums + kThreads / 32;
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = most;
  __syncthreads();
  float top = tops[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) {
    top = top != top || tops[w] != tops[w] ? float_of(0x7fc00000u) : fmaxf(top, tops[w]);
  }
  const float scale = top / (kSame<Code, E4m3> ? 448.0f : 127.0f);
  if (threadIdx.x == 0) scales[r] = scale;
  const bool plain = top <= 3.402823466e38f;
  row.each(weight, factor, [&](int i, const Pack<Act>& v) {
    Code out[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = to_stored<Code>(plain ? v.v[j] / scale : 1.0f);
    uint32_t words[kCount / 4];
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      words[j] = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) words[j] |= static_cast<uint32_t>(code_bits(out[4 * j + b])) << 8 * b;
    }
    Code* to = codes + r * width + i;
    if constexpr (kCount == 8) {
      store_vec(to, Vec2{{words[0], words[1]}});
    } else {
      store_vec(to, words[0]);
    }
  });
}

}  // namespace llmctl::cuda
