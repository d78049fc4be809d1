// Arithmetic on 16-bit floats as a GPU rounds it. gcc's _Float16 converts to nearest even; bfloat16 is done on bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace llmctl::emu {

inline float float_of(uint32_t bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t bits_of(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}

inline float from_f16(uint16_t bits) {
  _Float16 h;
  __builtin_memcpy(&h, &bits, 2);
  return static_cast<float>(h);
}
inline uint16_t to_f16(float v) {
  const _Float16 h = static_cast<_Float16>(v);
  uint16_t bits;
  __builtin_memcpy(&bits, &h, 2);
  return v != v ? 0x7fff : bits;
}
inline float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
inline uint16_t to_bf16(float v) {
  const uint32_t bits = bits_of(v);
  if (v != v) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 2^x off by as much as ex2.approx may be, to a side that the argument's bits decide; exact where the hardware is.
inline float exp2_approximate(float x) {
  const float exact = std::exp2(x);
  if (x == std::floor(x) || !(std::fabs(x) < 126)) return x < -126 ? 0 : exact;
  const uint32_t mixed = bits_of(x) * 2654435761u;
  return exact * (1.0f + ((mixed >> 31) ? 1.0f : -1.0f) * 0x1p-22f);
}

// One operation on two 16-bit floats side by side, each result rounded once. A float holds the product of two exactly,
// and their sum to more than twice their precision plus two bits, so rounding twice rounds as once.
template <bool kBf16, class F>
inline uint32_t on_pairs(uint32_t a, uint32_t b, uint32_t c, F op) {
  uint32_t out = 0;
  for (int half = 0; half < 2; ++half) {
    const int shift = 16 * half;
    const uint16_t x = static_cast<uint16_t>(a >> shift), y = static_cast<uint16_t>(b >> shift);
    const uint16_t z = static_cast<uint16_t>(c >> shift);
    uint16_t r;
    if constexpr (kBf16) {
      r = to_bf16(static_cast<float>(op(from_bf16(x), from_bf16(y), from_bf16(z))));
    } else {
      r = to_f16(static_cast<float>(op(from_f16(x), from_f16(y), from_f16(z))));
    }
    out |= static_cast<uint32_t>(r) << shift;
  }
  return out;
}

}  // namespace llmctl::emu
