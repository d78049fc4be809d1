// Weights as tensor cores want them: what a lane reads of a unit, and how codes become operands.
//
// A [n, k] weight is cut into panels of 16 outputs, and a panel into units of 64 inputs (pack.py). A unit is a few
// vectors of 16 bytes per lane, one after another for all lanes, so that a warp reads it in whole cache lines and finds
// in its registers the operands b of four mma_16 for each half of the panel. Lane (g, t) = (lane / 4, lane % 4) owns of
// step s = 0..3 and half h = 0..1 the inputs 16 s + {2t, 2t+1, 2t+8, 2t+9} of output 8 h + g.
//
// Codes become small integers (or values of the type) exactly; a group's scale is applied to its sum in float32.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

// How a weight is stored. Half, Bf16 and float mean themselves.
struct WeightInt4 {};  // codes 0..15; word s of the lane's vector has step s, its registers 2h + {0, 1} in nibbles j, j + 4
struct WeightNf4 {};   // likewise, with register j in nibbles 2j, 2j + 1
struct WeightInt8 {};  // code + 128; word 2 s + h has step s and half h
struct WeightE4m3 {};  // likewise, and no NaN

enum class Zero { kNone, kInt, kMin };  // as in formats.py

constexpr int kUnitInputs = 64;
constexpr int kPanelOutputs = 16;

template <class W>
constexpr int kWeightBits = kSame<W, WeightInt4> || kSame<W, WeightNf4>    ? 4
                            : kSame<W, WeightInt8> || kSame<W, WeightE4m3> ? 8
                            : kSame<W, float>                              ? 32
                                                                           : 16;
template <class W>
constexpr int kUnitVectors = kWeightBits<W> / 4;
template <class W>
constexpr int kUnitBytes = kUnitVectors<W> * 512;
template <class W>
constexpr bool kScaled = kWeightBits<W> < 16;

// In which type codes become values on their way to float32.
template <class W>
struct DecodedOf {
  using Type = Half;
};
template <>
struct DecodedOf<Bf16> {
  using Type = Bf16;
};
template <class W>
using Decoded = typename DecodedOf<W>::Type;

// What is subtracted from a code, in the two forms that Int4's arithmetic wants.
struct ZeroPair {
  uint32_t even, odd;
};

constexpr uint32_t twice(uint32_t v) { return v * 0x10001u; }

// Of a zero point 0..15. A float16 of 1024 + z is 0x6400 + z, of 64 + z is 0x5400 + 16 z; a bfloat16 of 128 + z is
// 0x4300 + z.
template <class T>
LLMCTL_DEVICE ZeroPair zero_pair(uint32_t zero) {
  if constexpr (kSame<T, Half>) return {twice(0x6400u + zero), twice(0xd400u + (zero << 4))};
  return {twice(0x4300u + zero), 0};
}

template <class T>
LLMCTL_DEVICE void int4_fragment(uint32_t (&b)[2], uint32_t word, int half, const ZeroPair& zero) {
  constexpr uint32_t kNibble = 0x000f000fu;
  if constexpr (kSame<T, Half>) {
    const uint32_t pairs = word >> 8 * half;
    b[0] = sub_pair<Half>((pairs & kNibble) | twice(0x6400), zero.even);
    // 1024 + 16 q, so that the shift is left to the multiplication.
    b[1] = fma_pair<Half>((pairs & kNibble << 4) | twice(0x6400), twice(0x2c00), zero.odd);
  } else {
    b[0] = sub_pair<Bf16>((word >> 8 * half & kNibble) | twice(0x4300), zero.even);
    b[1] = sub_pair<Bf16>((word >> (8 * half + 4) & kNibble) | twice(0x4300), zero.even);
  }
}

// The sixteen values of NF4 (QLoRA, arXiv 2305.14314, appendix E) rounded to T: row p has their bytes p, the lowest first.
template <class T>
struct Nf4Table;
template <>
struct Nf4Table<Half> {
  static constexpr uint32_t kBytes[2][4] = {{0x52339200u, 0x00d4ea8du, 0x68e02618u, 0x00c9800du},
                                            {0xb6b8b9bcu, 0x00adb1b4u, 0x3533312du, 0x3c393837u}};
};
template <>
struct Nf4Table<Bf16> {
  static constexpr uint32_t kBytes[2][4] = {{0xca063280u, 0x00ba3d92u, 0xad7c25a3u, 0x803910e2u},
                                            {0xbebfbfbfu, 0x00bdbebeu, 0x3e3e3e3du, 0x3f3f3f3eu}};
};
template <>
struct Nf4Table<float> {
  static constexpr uint32_t kBytes[4][4] = {
      {0xa030b100u, 0x00713f4du, 0x3adde3ffu, 0x00b3abb8u},
      {0x326b3900u, 0x007835a2u, 0x0304cafau, 0x001307a4u},
      {0xca063280u, 0x00ba3d91u, 0xad7c24a2u, 0x803910e1u},
      {0xbebfbfbfu, 0x00bdbebeu, 0x3e3e3e3du, 0x3f3f3f3eu}};
};

// Byte kByte of the values that four nibbles name.
template <class T, int kByte>
LLMCTL_DEVICE uint32_t nf4_bytes(uint32_t nibbles) {
  constexpr uint32_t kA = Nf4Table<T>::kBytes[kByte][0], kB = Nf4Table<T>::kBytes[kByte][1];
  constexpr uint32_t kC = Nf4Table<T>::kBytes[kByte][2], kD = Nf4Table<T>::kBytes[kByte][3];
  const uint32_t within = nibbles & 0x7777u;
  return pick_bytes(pick_bytes(kA, kB, within), pick_bytes(kC, kD, within), 0x3210u | (nibbles & 0x8888u) >> 1);
}

template <class T>
LLMCTL_DEVICE void nf4_fragment(uint32_t (&b)[2], uint32_t word, int half) {
  const uint32_t nibbles = word >> 16 * half & 0xffffu;
  const uint32_t low = nf4_bytes<T, 0>(nibbles), high = nf4_bytes<T, 1>(nibbles);
  b[0] = pick_bytes(low, high, 0x5140);
  b[1] = pick_bytes(low, high, 0x7362);
}

template <class T>
LLMCTL_DEVICE void int8_fragment(uint32_t (&b)[2], uint32_t word) {
  if constexpr (kSame<T, Half>) {
    b[0] = sub_pair<Half>(pick_bytes(word, twice(0x6464), 0x4140), twice(0x6480));
    b[1] = sub_pair<Half>(pick_bytes(word, twice(0x6464), 0x4342), twice(0x6480));
  } else {
    // A bfloat16 has too few bits for the trick: through floats of 2^23 + code, whose lower half is then zero.
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = float_of(pick_bytes(word, 0x4b000000u, 0x7540u + i)) - 8388736.0f;
    b[0] = pick_bytes(bits_of(v[0]), bits_of(v[1]), 0x7632);
    b[1] = pick_bytes(bits_of(v[2]), bits_of(v[3]), 0x7632);
  }
}

// A float8's exponent and mantissa moved to their place in T, and the difference of the biases multiplied in.
template <class T>
LLMCTL_DEVICE uint32_t e4m3_pair(uint32_t upper_bytes) {
  constexpr bool kHalf = kSame<T, Half>;
  const uint32_t sign = upper_bytes & 0x80008000u, rest = (upper_bytes & 0x7f007f00u) >> (kHalf ? 1 : 4);
  return mul_pair<T>(sign | rest, twice(kHalf ? 0x5c00 : 0x7b80));
}
template <class T>
LLMCTL_DEVICE void e4m3_fragment(uint32_t (&b)[2], uint32_t word) {
  b[0] = e4m3_pair<T>(pick_bytes(word, 0, 0x1404));
  b[1] = e4m3_pair<T>(pick_bytes(word, 0, 0x3424));
}

// The operand b of mma_16 for one step and half of a unit; `zero` is looked at by Int4 alone.
template <class T, class W>
LLMCTL_DEVICE void fragment(uint32_t (&b)[2], const Vec4 (&unit)[kUnitVectors<W>], int step, int half,
                            const ZeroPair& zero) {
  if constexpr (kSame<W, WeightInt4>) {
    int4_fragment<T>(b, unit[0].w[step], half, zero);
  } else if constexpr (kSame<W, WeightNf4>) {
    nf4_fragment<T>(b, unit[0].w[step], half);
  } else if constexpr (kSame<W, WeightInt8>) {
    int8_fragment<T>(b, unit[step / 2].w[step % 2 * 2 + half]);
  } else if constexpr (kSame<W, WeightE4m3>) {
    e4m3_fragment<T>(b, unit[step / 2].w[step % 2 * 2 + half]);
  } else {
    static_assert(kSame<T, W>);
    b[0] = unit[step].w[2 * half];
    b[1] = unit[step].w[2 * half + 1];
  }
}

// The same four inputs as float32 values: of codes before they are scaled, exactly.
template <class W>
LLMCTL_DEVICE void values(float (&v)[4], const Vec4 (&unit)[kUnitVectors<W>], int step, int half, const ZeroPair& zero) {
  if constexpr (kSame<W, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = float_of(unit[2 * step + half].w[i]);
  } else if constexpr (kSame<W, WeightNf4>) {
    const uint32_t nibbles = unit[0].w[step] >> 16 * half & 0xffffu;
    const uint32_t b0 = nf4_bytes<float, 0>(nibbles), b1 = nf4_bytes<float, 1>(nibbles);
    const uint32_t b2 = nf4_bytes<float, 2>(nibbles), b3 = nf4_bytes<float, 3>(nibbles);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = pick_bytes(b0, b1, 0x40u + 0x11u * i), high = pick_bytes(b2, b3, 0x40u + 0x11u * i);
      v[i] = float_of(pick_bytes(low, high, 0x5410));
    }
  } else {
    using T = Decoded<W>;
    uint32_t b[2];
    fragment<T, W>(b, unit, step, half, zero);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[2 * i] = low_of<T>(b[i]);
      v[2 * i + 1] = high_of<T>(b[i]);
    }
  }
}

// Where the scale of an output lies among its panel's sixteen: a lane reads the four of the sums it holds at once.
LLMCTL_DEVICE int scale_place(int output) { return output % 8 / 2 * 4 + output / 8 * 2 + output % 2; }
// Zero points: a lane reads the two of the outputs whose codes it holds.
LLMCTL_DEVICE int zero_place(int output) { return output % 8 * 2 + output / 8; }

}  // namespace llmctl::cuda
