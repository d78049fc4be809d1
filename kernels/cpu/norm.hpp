// RMS norm of rows into an Act, with the forms its consumers read.
#pragma once

#include "act.hpp"
#include "table.hpp"

namespace llmctl::cpu {

// 1 / sqrt(mean(x^2) + eps) over n values: four accumulators of 8 lanes, vector j of the row goes to accumulator j % 4.
template <class Isa>
LLMCTL_INLINE float inverse_rms(const float* x, int n, float eps) {
  using F = typename Isa::F;
  F acc[4] = {Isa::zero(), Isa::zero(), Isa::zero(), Isa::zero()};
  int k = 0;
  for (; k + 4 * kLanes <= n; k += 4 * kLanes) {
    LLMCTL_UNROLL
    for (int j = 0; j < 4; ++j) {
      const F v = Isa::load(x + k + kLanes * j);
      acc[j] = Isa::fma(v, v, acc[j]);
    }
  }
  LLMCTL_UNROLL
  for (int j = 0; j < 4; ++j) {
    const int left = n - k - kLanes * j;
    if (left > 0) {
      const F v = Isa::load_part(x + k + kLanes * j, least(left, kLanes));
      acc[j] = Isa::fma(v, v, acc[j]);
    }
  }
  const float squares = Isa::sum(Isa::add(Isa::add(acc[0], acc[1]), Isa::add(acc[2], acc[3])));
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

template <class Isa>
LLMCTL_NOINLINE void norm_rows(const NormArgs& a, int row_begin, int row_end, int act_row) {
  using F = typename Isa::F;
  const int n = a.act.k;
  for (int i = row_begin; i < row_end; ++i) {
    const float* x = a.x.row(a.logit_rows_only ? a.batch.logit_rows[i] : i);
    float* out = a.act.row(act_row + i);
    const F scale = Isa::set1(inverse_rms<Isa>(x, n, a.eps));
    int k = 0;
    for (; k + kLanes <= n; k += kLanes) {
      Isa::store(out + k, Isa::mul(Isa::mul(Isa::load(x + k), scale), Isa::load(a.weight + k)));
    }
    if (k < n) {
      const F w = Isa::load_part(a.weight + k, n - k);
      Isa::store_part(out + k, Isa::mul(Isa::mul(Isa::load_part(x + k, n - k), scale), w), n - k);
    }
    quantize_forms<Isa>(a.act, act_row + i);
  }
}

}  // namespace llmctl::cpu
