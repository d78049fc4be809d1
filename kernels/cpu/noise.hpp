// Gumbel noise for every token of a vocabulary: a pure function of seed, position and token id.
//
// Noise is -log(-log(u)) with u = (word + 1/2) / 2^32 and one Philox4x32-10 word per token. The largest values, which
// decide, come from u near 1, where u itself has lost them: there -log(u) is taken from 1 - u.
#pragma once

#include <cstdint>

#include "isa.hpp"

namespace llmctl::cpu {

// Four random words for each of 8 counters (first + lane, position, 0, 0): word w of lane c is for token
// 4 (first + c) + w.
// Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
template <class Isa>
LLMCTL_INLINE void philox(uint32_t first, uint32_t position, uint64_t seed, typename Isa::I words[4]) {
  using I = typename Isa::I;
  const auto set = [](uint32_t v) { return Isa::set1_i(static_cast<int32_t>(v)); };
  I c0 = Isa::add_i(set(first), Isa::lane_index());
  I c1 = set(position);
  I c2 = Isa::zero_i();
  I c3 = Isa::zero_i();
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  const I m0 = set(0xD2511F53u);
  const I m1 = set(0xCD9E8D57u);
  LLMCTL_UNROLL
  for (int round = 0; round < 10; ++round) {
    const I high0 = Isa::mul_high_u32(m0, c0);
    const I high1 = Isa::mul_high_u32(m1, c2);
    const I low0 = Isa::mul_i(m0, c0);
    const I low1 = Isa::mul_i(m1, c2);
    c0 = Isa::xor_i(Isa::xor_i(high1, c1), set(k0));
    c1 = low1;
    c2 = Isa::xor_i(Isa::xor_i(high0, c3), set(k1));
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// -log(-log(u)) with u = (word + 1/2) / 2^32.
template <class Isa>
LLMCTL_INLINE typename Isa::F gumbel(typename Isa::I word) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  const I upper = Isa::sub_i(Isa::zero_i(), Isa::template shift_right<31>(word));  // -1 where u > 1/2
  // v = u, or 1 - u where u > 1/2, from an integer below 2^31.
  const F v = Isa::mul(Isa::add(Isa::to_float(Isa::xor_i(word, upper)), Isa::set1(0.5f)), Isa::set1(0x1p-32f));
  const F u = Isa::select(Isa::bits_f(upper), Isa::sub(Isa::set1(1.0f), v), v);
  F m, e;
  split_log<Isa>(u, m, e);
  // From sqrt(1/2) on the split is u = 1 + m: there m = -v, exactly.
  m = Isa::select(Isa::greater(Isa::set1(0.70710678f), u), m, Isa::sub(Isa::zero(), v));
  const F minus_log = Isa::sub(Isa::zero(), log_reduced<Isa>(m, e));
  return Isa::sub(Isa::zero(), log<Isa>(minus_log));
}

}  // namespace llmctl::cpu
