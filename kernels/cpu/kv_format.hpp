// How a KV value is stored: element type, and conversion of 8 values from and to float32.
#pragma once

#include "isa.hpp"

namespace llmctl::cpu {

struct KvF32 {
  using Elem = float;
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
  template <class Isa>
  LLMCTL_INLINE typename Isa::F load(const Elem* p) {
    return Isa::load_bf16(p);
  }
  template <class Isa>
  LLMCTL_INLINE void store(Elem* p, typename Isa::F v) {
    Isa::store_bf16(p, v);
  }
};

}  // namespace llmctl::cpu
