// How a KV value is stored: element type, and conversion of 8 values from and to float32.
//
// A format also says what its loads leave to be done:
//   kFactor  what a loaded value is to be multiplied by; a power of two, so that it can be done anywhere without a trace
//   kScaled  a value is code * scale, with a scale per token: stores take values divided by it
//   kMarked  loads do not show the NaN that marks a token (formats.py): it has to be looked for
//   kPairs   the layout of batch.hpp with pairs: attention computes with the codes themselves
#pragma once

#include "batch.hpp"
#include "isa.hpp"

namespace llmctl::cpu {

// Where K or V of one head in one block begins, and its scales.
struct KvHalf {
  uint8_t* values;
  uint16_t* scales;
};
LLMCTL_INLINE KvHalf half_of(const Kv& kv, long block, int kv_head, int half) {
  uint8_t* begin = kv.head(block, kv_head) + half * kv.half_bytes();
  return {begin, reinterpret_cast<uint16_t*>(begin + kv.values_bytes())};
}

struct KvF32 {
  using Elem = float;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kScaled = false, kMarked = false, kPairs = false;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    Isa::store(p, v);
  }
};

struct KvF16 {
  using Elem = uint16_t;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kScaled = false, kMarked = false, kPairs = false;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_f16(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    Isa::store_f16(p, v);
  }
};

struct KvBf16 {
  using Elem = uint16_t;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kScaled = false, kMarked = false, kPairs = false;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_bf16(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    Isa::store_bf16(p, v);
  }
};

// Float32 to a float of 8 bits with so many bits of mantissa, rounded to nearest even; too large becomes `largest`.
template <class Isa, int kMantissa>
LLMCTL_INLINE void store_fp8(uint8_t* p, typename Isa::F v, float largest) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  constexpr int kDropped = 23 - kMantissa, kBias = kMantissa == 3 ? 7 : 15;
  constexpr float kLeastNormal = kMantissa == 3 ? 0x1p-6f : 0x1p-14f;
  const F size = Isa::min(Isa::abs(v), Isa::set1(largest));
  const I bits = Isa::bits_i(size);
  const I odd = Isa::and_i(Isa::template shift_right<kDropped>(bits), Isa::set1_i(1));
  const I rounded = Isa::add_i(Isa::add_i(bits, Isa::set1_i((1 << (kDropped - 1)) - 1)), odd);
  const I normal = Isa::sub_i(Isa::template shift_right<kDropped>(rounded), Isa::set1_i((127 - kBias) << kMantissa));
  const I tiny = Isa::to_int(Isa::mul(size, Isa::set1((1 << kMantissa) / kLeastNormal)));
  const F is_tiny = Isa::greater(Isa::set1(kLeastNormal), size);
  const I code = Isa::bits_i(Isa::select(is_tiny, Isa::bits_f(tiny), Isa::bits_f(normal)));
  const I sign = Isa::and_i(Isa::template shift_right<24>(Isa::bits_i(v)), Isa::set1_i(0x80));
  const I flipped = Isa::xor_i(Isa::or_i(code, sign), Isa::set1_i(0x80));  // 0..255, to -128..127 as a signed byte
  Isa::store_i8(reinterpret_cast<int8_t*>(p), Isa::sub_i(flipped, Isa::set1_i(0x80)));
}

constexpr uint8_t kFp8Nan = 0x7F;  // in both formats

struct KvE4m3 {
  using Elem = uint8_t;
  static constexpr float kFactor = 256.0f;
  static constexpr bool kScaled = false, kMarked = true, kPairs = false;
  static constexpr float kLargest = 448.0f;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_e4m3(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    store_fp8<Isa, 3>(p, v, kLargest);
  }
  // Of loaded values: which are the mark, a code above the largest.
  template <class Isa>
  LLMCTL_INLINE typename Isa::F marked(typename Isa::F loaded) {
    return Isa::greater(loaded, Isa::set1(kLargest / kFactor));
  }
};

struct KvE5m2 {
  using Elem = uint8_t;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kScaled = false, kMarked = false, kPairs = false;
  static constexpr float kLargest = 57344.0f;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_e5m2(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    store_fp8<Isa, 2>(p, v, kLargest);
  }
};

struct KvInt8 {
  using Elem = int8_t;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kScaled = true, kMarked = false, kPairs = false;
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_i8(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    Isa::store_i8(p, Isa::to_int(Isa::max(Isa::set1(-127.0f), Isa::min(Isa::set1(127.0f), v))));
  }
};

// The largest codes are such that integer sums over kExactRun products are exact (attend_int16.hpp).
struct KvInt16 {
  using Elem = int16_t;
  static constexpr bool kScaled = true, kMarked = false, kPairs = true;
  static constexpr float kKeyTop = 8191.0f, kValueTop = 2047.0f;
};

}  // namespace llmctl::cpu
