// f(gate) * up into an Act, with the forms its consumers read.
#pragma once

#include "act.hpp"
#include "table.hpp"

namespace llmctl::cpu {

// Both activations are g * sigmoid(z): silu has z = g; gelu's tanh form has z = 2 sqrt(2 / pi) (g + 0.044715 g^3),
// since (1 + tanh(u)) / 2 = sigmoid(2 u).
template <class Isa, Activation kActivation>
LLMCTL_INLINE typename Isa::F activate(typename Isa::F g) {
  typename Isa::F z = g;
  if constexpr (kActivation == Activation::gelu_tanh) {
    z = Isa::mul(g, Isa::fma(Isa::mul(g, g), Isa::set1(0.0713548162726f), Isa::set1(1.59576912160573f)));
  }
  return Isa::div(g, Isa::add(Isa::set1(1.0f), exp<Isa>(Isa::sub(Isa::zero(), z))));
}

template <class Isa, Activation kActivation>
LLMCTL_INLINE void act_mul_row(const float* gate, const float* up, float* out, int n) {
  using C = typename Isa::Columns;
  int k = 0;
  for (; k + C::kWidth <= n; k += C::kWidth) {
    C::store(out + k, C::mul(activate<C, kActivation>(C::load(gate + k)), C::load(up + k)));
  }
  for (; k < n; k += kLanes) {
    const int left = least(n - k, kLanes);
    const auto g = activate<Isa, kActivation>(Isa::load_part(gate + k, left));
    Isa::store_part(out + k, Isa::mul(g, Isa::load_part(up + k, left)), left);
  }
}

template <class Isa>
LLMCTL_NOINLINE void act_mul_rows(const ActMulArgs& a, int row_begin, int row_end, int act_row) {
  for (int i = row_begin; i < row_end; ++i) {
    float* out = a.act.row(act_row + i);
    if (a.activation == Activation::silu) {
      act_mul_row<Isa, Activation::silu>(a.gate.row(i), a.up.row(i), out, a.act.k);
    } else {
      act_mul_row<Isa, Activation::gelu_tanh>(a.gate.row(i), a.up.row(i), out, a.act.k);
    }
    quantize_forms<Isa>(a.act, act_row + i);
  }
}

}  // namespace llmctl::cpu
