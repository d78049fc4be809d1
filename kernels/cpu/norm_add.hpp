// RMS norm of rows, added to other rows: out += norm(x).
#pragma once

#include "norm.hpp"

namespace llmctl::cpu {

template <class Isa>
LLMCTL_NOINLINE void norm_add_rows(const NormAddArgs& a, int row_begin, int row_end) {
  using F = typename Isa::F;
  for (int i = row_begin; i < row_end; ++i) {
    const float* x = a.x.row(i);
    float* out = a.out.row(i);
    const F scale = Isa::set1(inverse_rms<Isa>(x, a.width, a.eps));
    for (int k = 0; k < a.width; k += kLanes) {
      const int n = least(kLanes, a.width - k);
      const F normed = Isa::mul(Isa::mul(load_some<Isa>(x + k, n), scale), load_some<Isa>(a.weight + k, n));
      store_some<Isa>(out + k, Isa::add(load_some<Isa>(out + k, n), normed), n);
    }
  }
}

}  // namespace llmctl::cpu
