// Quantized forms of an activation row.
//
// Per row and group of k: scale = absmax / Q, code = round-half-even(x / scale) with Q = 127, 2047 or 8191 (codes of 8, 12
// or 14 bits), and the sum of the codes. The bits of a division, not of a product with 1 / scale: that is the op's meaning. A
// NaN or Inf anywhere in a group makes its scale NaN or Inf and its codes 0: every output that reads it is NaN. A form may
// have its values in another order: that of a weight whose groups are not of consecutive inputs.
//
// A wide quad does not count for the scale until it is 16 times larger than the rest: an outlier no longer costs its
// neighbours their precision.
#pragma once

#include "act_blocks.hpp"
#include "batch.hpp"
#include "isa.hpp"

namespace llmctl::cpu {

LLMCTL_INLINE float top_code(FormKind kind) { 
  return kind == FormKind::i8 ? 127.0f : kind == FormKind::i12 ? 2047.0f : 8191.0f;
}

template <class C, class Code>
LLMCTL_INLINE int32_t quantize_without_division(const float* x, int group, float scale, Code* codes) {
  const auto s = C::set1(scale), r = C::set1(1.0f / scale);
  auto sum = C::zero_i();
  for (int k = 0; k < group; k += C::kWidth) {
    const auto code = C::to_int(quotient<C>(C::load(x + k), s, r));
    sum = C::add_i(sum, code);
    if constexpr (sizeof(Code) == 1) {
      C::store_i8(codes + k, code);
    } else {
      C::store_i16(codes + k, code);
    }
  }
  return C::sum_i(sum);
}

// Codes of one group, a multiple of C's lanes. Returns their sum.
template <class C, class Code>
LLMCTL_INLINE int32_t quantize_lanes(const float* x, int group, float top, Code* codes, float* scale) {
  using F = typename C::F;
  using I = typename C::I;
  // Absolute values compare as integers, and NaN is above Inf there: no NaN is lost in the maximum.
  I largest = C::zero_i();
  for (int k = 0; k < group; k += C::kWidth) largest = C::max_i(largest, C::bits_i(C::abs(C::load(x + k))));
  *scale = bits_as<float>(C::max_lane_i(largest)) / top;
  if (*scale == 0.0f) {
    std::memset(codes, 0, sizeof(Code) * static_cast<std::size_t>(group));
    return 0;
  }
  if constexpr (C::kFolds) {
    if (*scale >= kLeastBlockScale && *scale <= kMostBlockScale) {
      return quantize_without_division<C>(x, group, *scale, codes);
    }
  }
  const F s = C::set1(*scale), high = C::set1(top), low = C::set1(-top);
  I sum = C::zero_i();
  for (int k = 0; k < group; k += C::kWidth) {
    const F v = C::max(C::min(C::div(C::load(x + k), s), high), low);
    const I code = C::to_int(v);
    sum = C::add_i(sum, code);
    if constexpr (sizeof(Code) == 1) {
      C::store_i8(codes + k, code);
    } else {
      C::store_i16(codes + k, code);
    }
  }
  return C::sum_i(sum);
}

// The same for any multiple of 8: heads of a KV cache may be no multiple of 16.
template <class Isa, class Code>
LLMCTL_INLINE int32_t quantize_group(const float* x, int group, float top, Code* codes, float* scale) {
  if (group % Isa::Columns::kWidth != 0) return quantize_lanes<Isa>(x, group, top, codes, scale);
  return quantize_lanes<typename Isa::Columns>(x, group, top, codes, scale);
}

// The same for a group of int8 whose four codes from 4 * quad on are wide; their high parts go to `high`.
template <class Isa>
LLMCTL_INLINE int32_t quantize_wide_group(const float* x, int group, int quad, int8_t* codes, float* scale,
                                          int32_t* high) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  const int at = 4 * quad / kLanes * kLanes, first = 4 * quad - at;
  const F wide = Isa::lanes(first, first + 4), none = Isa::set1(0.0f);
  I largest = Isa::zero_i();
  for (int k = 0; k < group; k += kLanes) {
    const F size = Isa::abs(Isa::load(x + k));
    largest = Isa::max_i(largest, Isa::bits_i(k == at ? Isa::select(wide, none, size) : size));
  }
  const I widest = Isa::bits_i(Isa::select(wide, Isa::abs(Isa::load(x + at)), none));
  const float narrow = bits_as<float>(Isa::max_lane_i(largest)) / top_code(FormKind::i8);
  const float broad = bits_as<float>(Isa::max_lane_i(widest)) / kWideTop;
  *scale = narrow > broad || narrow != narrow ? narrow : broad;  // a NaN of either is kept
  *high = 0;
  if (*scale == 0.0f) {
    std::memset(codes, 0, static_cast<std::size_t>(group));
    return 0;
  }
  const F s = Isa::set1(*scale), top = Isa::set1(top_code(FormKind::i8));
  I sum = Isa::zero_i();
  for (int k = 0; k < group; k += kLanes) {
    const F most = k == at ? Isa::select(wide, Isa::set1(kWideTop), top) : top;
    I code = Isa::to_int(Isa::max(Isa::min(Isa::div(Isa::load(x + k), s), most), Isa::sub(none, most)));
    sum = Isa::add_i(sum, code);
    if (k == at) {
      const I shifted = Isa::add_i(code, Isa::set1_i(8 + (1 << 16)));
      const I upper = Isa::sub_i(Isa::template shift_right<4>(shifted), Isa::set1_i(1 << 12));
      int8_t bytes[kLanes], parts[kLanes];
      Isa::store_i8(bytes, upper);
      Isa::store_i8(codes + k, code);
      Isa::store_i8(parts, Isa::sub_i(code, Isa::template shift_left<4>(upper)));
      std::memcpy(high, bytes + first, 4);
      std::memcpy(codes + 4 * quad, parts + first, 4);
      continue;
    }
    Isa::store_i8(codes + k, code);
  }
  return Isa::sum_i(sum);
}

// Codes of a group whose scale is NaN or Inf mean nothing: all become 0, on every instruction set.
template <class Code>
LLMCTL_INLINE void drop_codes_without_scale(const Form& form, long at, Code* codes) {
  const float scale = form.scales[at];
  if (scale - scale == 0.0f) return;
  std::memset(codes, 0, sizeof(Code) * static_cast<std::size_t>(form.group));
  form.sums[at] = 0;
  if (form.wide != nullptr) form.high[at] = 0;
}

// Groups [begin, end) of a row, one by one.
template <class Isa, class Code>
LLMCTL_INLINE void quantize_groups(const Act& act, const Form& form, long row, int begin, int end) {
  const float* x = act.row(row);
  Code* codes = static_cast<Code*>(form.codes) + row * act.k;
  alignas(32) float gathered[kMaxOrderedGroup];
  for (int g = begin; g < end; ++g) {
    const long at = static_cast<long>(g) * form.group, i = row * (act.k / form.group) + g;
    const float* from = x + at;
    if (form.order != nullptr) {
      for (int j = 0; j < form.group; ++j) gathered[j] = x[form.order[at + j]];
      from = gathered;
    }
    if constexpr (sizeof(Code) == 1) {
      if (form.wide != nullptr && form.wide[g] != kNoQuad) {
        form.sums[i] = quantize_wide_group<Isa>(from, form.group, form.wide[g], codes + at, form.scales + i, form.high + i);
        drop_codes_without_scale(form, i, codes + at);
        continue;
      }
    }
    form.sums[i] = quantize_group<Isa, Code>(from, form.group, top_code(form.kind), codes + at, form.scales + i);
    drop_codes_without_scale(form, i, codes + at);
  }
}

// The same of a whole row, in blocks.
template <class Isa, class Code>
LLMCTL_INLINE void quantize_in_blocks(const Act& act, const Form& form, long row) {
  using C = typename Isa::Columns;
  const int groups = act.k / form.group;
  const float top = top_code(form.kind);
  const bool is_wide = sizeof(Code) == 1 && form.wide != nullptr;
  Code* codes = static_cast<Code*>(form.codes) + row * act.k;
  auto run = form.group == 32 ? quantize_block<C, Code, false, 32> : quantize_block<C, Code, false, 0>;
  if constexpr (sizeof(Code) == 1) {
    if (is_wide) run = form.group == 32 ? quantize_block<C, Code, true, 32> : quantize_block<C, Code, true, 0>;
  }
  for (int first = 0; first < groups; first += kBlockGroups) {
    const int count = least(kBlockGroups, groups - first);
    const long at = static_cast<long>(first) * form.group, i = row * groups + first;
    const bool done = run(act.row(row) + at, form.group, count, top, is_wide ? form.wide + first : nullptr, codes + at,
                          form.scales + i, form.sums + i, is_wide ? form.high + i : nullptr);
    if (!done) quantize_groups<Isa, Code>(act, form, row, first, first + count);
  }
}

template <class Isa, class Code>
LLMCTL_INLINE void quantize_row(const Act& act, const Form& form, long row) {
  if constexpr (Isa::Columns::kFolds) {
    if (form.order == nullptr && form.group % Isa::Columns::kWidth == 0) {
      quantize_in_blocks<Isa, Code>(act, form, row);
      return;
    }
  }
  quantize_groups<Isa, Code>(act, form, row, 0, act.k / form.group);
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
