// Gumbel noise for a token: a pure function of seed, position and token id, bit for bit that of kernels/cpu/noise.hpp in
// its AVX2 and AVX-512 builds.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

// Four random words for counter (counter, position, 0, 0); word w is for token 4 * counter + w.
// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
LLMCTL_DEVICE void philox(uint32_t counter, uint32_t position, uint64_t seed, uint32_t (&words)[4]) {
  uint32_t c0 = counter, c1 = position, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// ln((1 + m) * 2^e), with the polynomial and the order of kernels/cpu/isa.hpp.
LLMCTL_DEVICE float log_reduced(float m, float e) {
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = fmaf(p, m, -1.1514610310e-1f);
  p = fmaf(p, m, 1.1676998740e-1f);
  p = fmaf(p, m, -1.2420140846e-1f);
  p = fmaf(p, m, 1.4249322787e-1f);
  p = fmaf(p, m, -1.6668057665e-1f);
  p = fmaf(p, m, 2.0000714765e-1f);
  p = fmaf(p, m, -2.4999993993e-1f);
  p = fmaf(p, m, 3.3333331174e-1f);
  float y = p * m * z;
  y = fmaf(e, -2.12194440e-4f, y);
  y = fmaf(-0.5f, z, y);
  return fmaf(e, 0.693359375f, m + y);
}

// Positive normal x as (1 + m) * 2^e with 1 + m in [sqrt(1/2), sqrt(2)).
LLMCTL_DEVICE void split_log(float x, float& m, float& e) {
  const uint32_t bits = bits_of(x);
  const int exponent = static_cast<int>(bits >> 23) - 126;
  m = float_of((bits & 0x007fffffu) | 0x3f000000u);
  const bool small = m < 0.70710678f;
  e = static_cast<float>(small ? exponent - 1 : exponent);
  m = (small ? m + m : m) - 1.0f;
}

// -ln(-ln(u)) with u = (word + 1/2) / 2^32. Near 1, where the largest values come from, -ln(u) is taken from 1 - u.
LLMCTL_DEVICE float gumbel(uint32_t word) {
  const bool upper = word >> 31;
  const float v = (static_cast<float>(static_cast<int>(upper ? ~word : word)) + 0.5f) * 2.3283064365386963e-10f;
  const float u = upper ? 1.0f - v : v;
  float m, e;
  split_log(u, m, e);
  m = 0.70710678f > u ? m : 0.0f - v;  // from sqrt(1/2) on the split is u = 1 + m, and 1 - u is v exactly
  const float minus_log = 0.0f - log_reduced(m, e);
  split_log(minus_log, m, e);
  return 0.0f - log_reduced(m, e);
}

// grid: ceil(count / 4 / 128), 128 threads: the noise of tokens 0 ... count, for tests.
__global__ void __launch_bounds__(128) noise_of(float* out, uint64_t seed, int position, int count) {
  const int counter = blockIdx.x * 128 + threadIdx.x;
  uint32_t words[4];
  philox(static_cast<uint32_t>(counter), static_cast<uint32_t>(position), seed, words);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (4 * counter + w < count) out[4 * counter + w] = gumbel(words[w]);
  }
}

}  // namespace llmctl::cuda
