// Forms 16 groups at a time: their scales are the lanes of one vector, and quotients come without divisions.
// For instruction sets that can fold 16 vectors to one; the bits are those of act.hpp.
#pragma once

#include "batch.hpp"
#include "isa.hpp"

namespace llmctl::cpu {

constexpr int kBlockGroups = 16;
// Scales for which no step of `quotient` leaves the range of float32 where it matters.
constexpr float kLeastBlockScale = 0x1p-60f, kMostBlockScale = 0x1p60f;

// x / s as a division rounds it, from r = 1 / s as a division rounds it. The first correction leaves one of the two floats
// beside the quotient, and then a correction with an exact remainder rounds as the division does (Markstein, 1990).
template <class C>
LLMCTL_INLINE typename C::F quotient(typename C::F x, typename C::F s, typename C::F r) {
  typename C::F q = C::mul(x, r);
  q = C::fma(C::fnma(q, s, x), r, q);
  return C::fma(C::fnma(q, s, x), r, q);
}

// Quads of up to 16 groups, wide or zeros where a group has none: lane 4 l + i of vector j is value i of group 4 l + j.
template <class C>
LLMCTL_INLINE void load_wide(const float* x, int group, int count, const uint8_t* wide, typename C::F (&quads)[4]) {
  static constexpr float kNone[4] = {};
  LLMCTL_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float* from[4];
    LLMCTL_UNROLL
    for (int l = 0; l < 4; ++l) {
      const int g = 4 * l + j;
      from[l] = g < count && wide[g] != kNoQuad ? x + g * group + 4 * wide[g] : kNone;
    }
    quads[j] = C::load_quads(from);
  }
}

// Calls visit(group) for group 4 four + 0..3, of which there are `left`.
template <class Visit>
LLMCTL_INLINE void each_of_four(int four, int left, const Visit& visit) {
  if (left >= 4) {
    LLMCTL_UNROLL
    for (int i = 0; i < 4; ++i) visit(4 * four + i, i);
  } else {
    for (int i = 0; i < left; ++i) visit(4 * four + i, i);
  }
}

// Codes, scales, sums and wide codes' high parts of `count` groups, up to kBlockGroups. False, and nothing of use done, if
// a scale is none that it can do: 0, very small or large, or not finite. kGroup is the group's size, or 0.
template <class C, class Code, bool kWide, int kGroup>
LLMCTL_NOINLINE bool quantize_block(const float* __restrict x, int any_group, int count, float top,
                                    const uint8_t* wide, Code* __restrict codes, float* __restrict scales,
                                    int32_t* __restrict sums, int32_t* __restrict high) {
  using F = typename C::F;
  using I = typename C::I;
  const int group = kGroup != 0 ? kGroup : any_group;
  I folded[4] = {C::zero_i(), C::zero_i(), C::zero_i(), C::zero_i()};
  for (int four = 0; 4 * four < count; ++four) {
    I largest[4] = {C::zero_i(), C::zero_i(), C::zero_i(), C::zero_i()};
    each_of_four(four, count - 4 * four, [&](int g, int i) {
      const float* from = x + g * group;
      LLMCTL_UNROLL
      for (int k = 0; k < group; k += C::kWidth) {
        I size = C::bits_i(C::abs(C::load(from + k)));
        if constexpr (kWide) size = C::without_quad(size, wide[g] - k / 4);
        largest[i] = C::max_i(largest[i], size);
      }
    });
    folded[four] = C::template fold_quads<Fold::largest>(largest);
  }
  F scale = C::div(C::bits_f(C::template fold_folded<Fold::largest>(folded)), C::set1(top)), quads[4];
  if constexpr (kWide) {
    load_wide<C>(x, group, count, wide, quads);
    I sizes[4];
    LLMCTL_UNROLL
    for (int j = 0; j < 4; ++j) sizes[j] = C::bits_i(C::abs(quads[j]));
    const F broad = C::div(C::bits_f(C::template fold_quads<Fold::largest>(sizes)), C::set1(kWideTop));
    scale = C::greater_or_nan(scale, broad);
  }
  if (!C::are_between(scale, kLeastBlockScale, kMostBlockScale, count)) return false;
  const F inverse = C::div(C::set1(1.0f), scale);
  alignas(64) float scale_of[kBlockGroups], inverse_of[kBlockGroups];
  C::store(scale_of, scale);
  C::store(inverse_of, inverse);
  C::store_first(scales, scale, count);
  for (int four = 0; 4 * four < count; ++four) {
    I sum[4] = {C::zero_i(), C::zero_i(), C::zero_i(), C::zero_i()};
    each_of_four(four, count - 4 * four, [&](int g, int i) {
      const F s = C::broadcast(scale_of + g), r = C::broadcast(inverse_of + g);
      const float* from = x + g * group;
      Code* to = codes + g * group;
      LLMCTL_UNROLL
      for (int k = 0; k < group; k += C::kWidth) {
        const I code = C::to_int(quotient<C>(C::load(from + k), s, r));
        sum[i] = C::add_i(sum[i], code);
        if constexpr (sizeof(Code) == 1) {
          C::store_i8(to + k, code);
        } else {
          C::store_i16(to + k, code);
        }
      }
    });
    folded[four] = C::template fold_quads<Fold::sum>(sum);
  }
  C::store_first_i(sums, C::template fold_folded<Fold::sum>(folded), count);
  if constexpr (kWide) {
    I upper[4], lower[4];
    const auto split = [&]<int j>() {
      const F s = C::template repeat_in_quads<j>(scale), r = C::template repeat_in_quads<j>(inverse);
      const I code = C::to_int(quotient<C>(quads[j], s, r)), shifted = C::add_i(code, C::set1_i(8 + (1 << 16)));
      upper[j] = C::sub_i(C::template shift_right<4>(shifted), C::set1_i(1 << 12));
      lower[j] = C::sub_i(code, C::template shift_left<4>(upper[j]));
    };
    split.template operator()<0>();
    split.template operator()<1>();
    split.template operator()<2>();
    split.template operator()<3>();
    C::store_first_i(high, C::bytes_of_quads(upper), count);
    alignas(64) int32_t parts[kBlockGroups];
    C::store_i(parts, C::bytes_of_quads(lower));
    for (int g = 0; g < count; ++g) {
      if (wide[g] != kNoQuad) std::memcpy(codes + g * group + 4 * wide[g], parts + g, 4);
    }
  }
  return true;
}

}  // namespace llmctl::cpu
