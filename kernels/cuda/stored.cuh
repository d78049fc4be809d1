// From float32 to what is stored: floats of 8 bits, codes, and the 16-bit types.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

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

LLMCTL_DEVICE uint8_t code_bits(E4m3 code) { return code.bits; }
LLMCTL_DEVICE uint8_t code_bits(Int8 code) { return static_cast<uint8_t>(code); }

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

}  // namespace llmctl::cuda
