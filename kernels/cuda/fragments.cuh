// Tensor-core operands in one form for every type: four values of the contraction per lane make a sixteenth of a step.
//
// The order of the contraction is free as long as both operands have it, so it is chosen for the loads: lane (g, t)
// brings values 4t..4t+3 of whatever the caller calls one step of 16, and no shuffle is needed to spread stored bytes
// over lanes. For 16-bit operands one step is one m16n8k16; for float32 it is two m16n8k8 in tf32.
//
//   Half, Bf16   operands in that type
//   Tf32         float32 of which the tensor core reads 19 bits
//   Fp32         float32 as the sum of two tf32, three products: error 2^-22 of |a b|
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

struct Tf32 {};
struct Fp32 {};

template <class Mma>
constexpr bool kIs16 = kSame<Mma, Half> || kSame<Mma, Bf16>;

// Rows g and g + 8, four values each.
template <class Mma, bool k16 = kIs16<Mma>>
struct OperandA {
  uint32_t r[k16 ? 4 : 8];
};
// Column g, four values.
template <class Mma, bool k16 = kIs16<Mma>>
struct OperandB {
  uint32_t r[k16 ? 2 : 4];
};

template <class Mma>
LLMCTL_DEVICE OperandA<Mma> operand_a(const float (&row_g)[4], const float (&row_g8)[4]) {
  OperandA<Mma> a;
  if constexpr (kIs16<Mma>) {
    a.r[0] = pack_pair<Mma>(row_g[0], row_g[1]);
    a.r[1] = pack_pair<Mma>(row_g8[0], row_g8[1]);
    a.r[2] = pack_pair<Mma>(row_g[2], row_g[3]);
    a.r[3] = pack_pair<Mma>(row_g8[2], row_g8[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.r[2 * i] = bits_of(row_g[i]);
      a.r[2 * i + 1] = bits_of(row_g8[i]);
    }
  }
  return a;
}

// The nearest tf32; what is left of the value is then exact in float32.
LLMCTL_DEVICE uint32_t nearest_tf32(uint32_t bits) { return (bits + 0x1000u) & 0xffffe000u; }

// d += a b. Tensor cores cut their sums towards zero, which adds up over a long chain; so for float32 every step has a
// sum of its own, the small products first, and is added to d rounded to nearest.
template <class Mma>
LLMCTL_DEVICE void multiply_add(float (&d)[4], const OperandA<Mma>& a, const OperandB<Mma>& b) {
  if constexpr (kIs16<Mma>) {
    mma_16<Mma>(d, a.r, b.r);
  } else {
    uint32_t big_a[2][4], big_b[2][2];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) big_a[step][i] = nearest_tf32(a.r[4 * step + i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) big_b[step][i] = nearest_tf32(b.r[2 * step + i]);
    }
    if constexpr (kSame<Mma, Fp32>) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t small_a[4], small_b[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) small_a[i] = bits_of(float_of(a.r[4 * step + i]) - float_of(big_a[step][i]));
#pragma unroll
        for (int i = 0; i < 2; ++i) small_b[i] = bits_of(float_of(b.r[2 * step + i]) - float_of(big_b[step][i]));
        mma_tf32(sum, small_a, big_b[step]);
        mma_tf32(sum, big_a[step], small_b);
      }
      mma_tf32(sum, big_a[0], big_b[0]);
      mma_tf32(sum, big_a[1], big_b[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] += sum[i];
    } else {
      mma_tf32(d, big_a[0], big_b[0]);
      mma_tf32(d, big_a[1], big_b[1]);
    }
  }
}

// ---- stored values as operands

// Four 8-bit codes, the first in the lowest byte.
template <class Mma, class Stored>
LLMCTL_DEVICE OperandB<Mma> expand(uint32_t codes) {
  static_assert(sizeof(Stored) == 1);
  OperandB<Mma> b;
  if constexpr (kSame<Stored, Int8> && kSame<Mma, Half>) {
    // 0x6400 | u is 1024 + u in float16; u = code + 128.
    const uint32_t u = codes ^ 0x80808080u;
    b.r[0] = sub_pair<Half>(pick_bytes(u, 0x64646464u, 0x4140), 0x64806480u);
    b.r[1] = sub_pair<Half>(pick_bytes(u, 0x64646464u, 0x4342), 0x64806480u);
  } else if constexpr (kSame<Stored, Int8>) {
    // 0x4b000000 | u is 2^23 + u in float32.
    const uint32_t u = codes ^ 0x80808080u;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = float_of(pick_bytes(u, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
    if constexpr (kIs16<Mma>) {
      b.r[0] = pack_pair<Mma>(v[0], v[1]);
      b.r[1] = pack_pair<Mma>(v[2], v[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b.r[i] = bits_of(v[i]);
    }
  } else if constexpr (kSame<Mma, Half>) {
    halfs_of<Stored>(b.r, codes);
  } else if constexpr (kSame<Mma, Bf16>) {
    // The code's sign to the sign, its other bits to the lowest ones of exponent and highest of mantissa; a product with
    // a power of two then mends the exponent's bias, for denormals too.
    constexpr bool k5 = kSame<Stored, E5m2>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t high = pick_bytes(codes, 0, i == 0 ? 0x1404 : 0x3424);
      const uint32_t rest = high & 0x7f007f00u, sign = high & 0x80008000u;
      b.r[i] = mul_pair<Bf16>(sign | rest >> (k5 ? 3 : 4), k5 ? 0x77807780u : 0x7b807b80u);
    }
  } else {
    constexpr bool k5 = kSame<Stored, E5m2>;
    const float bias = float_of(k5 ? 0x77800000u : 0x7b800000u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = codes >> 8 * i & 0xffu;
      b.r[i] = bits_of(float_of((code & 0x80u) << 24 | (code & 0x7fu) << (k5 ? 21 : 20)) * bias);
    }
  }
  return b;
}

// The same of stored values of any size: four of them, as they lie in memory.
template <class Mma, class Stored>
LLMCTL_DEVICE OperandB<Mma> expand_words(const uint32_t* words) {
  if constexpr (sizeof(Stored) == 1) {
    return expand<Mma, Stored>(words[0]);
  } else {
    static_assert(kSame<Stored, Mma> || (kSame<Stored, float> && !kIs16<Mma>));
    OperandB<Mma> b;
#pragma unroll
    for (unsigned i = 0; i < sizeof(b.r) / 4; ++i) b.r[i] = words[i];
    return b;
  }
}

// fp8 marks a token whose K holds a NaN by a NaN in the first value, which `expand` need not show.
template <class Mma, class Stored>
LLMCTL_DEVICE void show_mark(OperandB<Mma>& b, uint32_t codes) {
#if defined(LLMCTL_GPU) && __CUDA_ARCH__ >= 890
  constexpr bool kShown = kSame<Mma, Half>;
#else
  constexpr bool kShown = kSame<Mma, Half> && kSame<Stored, E5m2>;
#endif
  if constexpr (!kShown && (kSame<Stored, E4m3> || kSame<Stored, E5m2>)) {
    const bool marked = (codes & 0x7fu) == 0x7fu;
    if constexpr (kIs16<Mma>) {
      b.r[0] = marked ? (b.r[0] & 0xffff0000u) | 0x7fffu : b.r[0];
    } else {
      b.r[0] = marked ? 0x7fffffffu : b.r[0];
    }
  }
}

}  // namespace llmctl::cuda
