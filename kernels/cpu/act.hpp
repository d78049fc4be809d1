// Quantized forms of an activation row.
//
// Per row and group of k: scale = absmax / Q, code = round-half-even(x / scale) with Q = 127 (int8) or 2047 (int16 of
// 12 bits), and the sum of the codes. A true division, not a product with 1 / scale: that is the meaning of the op. A
// NaN or Inf anywhere in a group makes its scale NaN or Inf, so it reaches every output that reads the group. A form may
// have its values in another order: that of a weight whose groups are not of consecutive inputs.
#pragma once

#include "batch.hpp"
#include "isa.hpp"

namespace llmctl::cpu {

LLMCTL_INLINE float top_code(FormKind kind) { return kind == FormKind::i8 ? 127.0f : 2047.0f; }

// Codes of one group; `group` is a multiple of 32. Returns their sum.
template <class Isa, class Code>
LLMCTL_INLINE int32_t quantize_group(const float* x, int group, float top, Code* codes, float* scale) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  // Absolute values compare as integers, and NaN is above Inf there: no NaN is lost in the maximum.
  I largest = Isa::zero_i();
  for (int k = 0; k < group; k += kLanes) largest = Isa::max_i(largest, Isa::bits_i(Isa::abs(Isa::load(x + k))));
  *scale = bits_as<float>(Isa::max_lane_i(largest)) / top;
  if (*scale == 0.0f) {
    std::memset(codes, 0, sizeof(Code) * static_cast<std::size_t>(group));
    return 0;
  }
  const F s = Isa::set1(*scale), high = Isa::set1(top), low = Isa::set1(-top);
  I sum = Isa::zero_i();
  for (int k = 0; k < group; k += kLanes) {
    const F v = Isa::max(Isa::min(Isa::div(Isa::load(x + k), s), high), low);
    const I code = Isa::to_int(v);
    sum = Isa::add_i(sum, code);
    if constexpr (sizeof(Code) == 1) {
      Isa::store_i8(codes + k, code);
    } else {
      Isa::store_i16(codes + k, code);
    }
  }
  return Isa::sum_i(sum);
}

template <class Isa, class Code>
LLMCTL_INLINE void quantize_row(const Act& act, const Form& form, long row) {
  const float* x = act.row(row);
  const int groups = act.k / form.group;
  Code* codes = static_cast<Code*>(form.codes) + row * act.k;
  alignas(32) float gathered[kMaxOrderedGroup];
  for (int g = 0; g < groups; ++g) {
    const long at = static_cast<long>(g) * form.group;
    const float* from = x + at;
    if (form.order != nullptr) {
      for (int j = 0; j < form.group; ++j) gathered[j] = x[form.order[at + j]];
      from = gathered;
    }
    form.sums[row * groups + g] =
        quantize_group<Isa, Code>(from, form.group, top_code(form.kind), codes + at, form.scales + row * groups + g);
  }
}

// Every form of a row whose values are complete.
template <class Isa>
LLMCTL_INLINE void quantize_forms(const Act& act, long row) {
  for (int i = 0; i < act.num_forms; ++i) {
    if (act.forms[i].kind == FormKind::i8) {
      quantize_row<Isa, int8_t>(act, act.forms[i], row);
    } else {
      quantize_row<Isa, int16_t>(act, act.forms[i], row);
    }
  }
}

}  // namespace llmctl::cpu
