// Linear tiles for integer weights with quantized activations: exact integer sums inside a group, times the weight's
// scale, plus its minimum; then acc = fma(that, x_scale, acc) per group, ascending.
//
// int16 panel: [group][16] exponents of scales, int16_scales bytes in all, then [k / 2][16 columns][2 consecutive k].
// int8 panel, per group: 16 f16 scales, then [group / 2][16 columns][2 consecutive k] int8.
// int4 panel, per group: 16 f16 scales, [16 f16 mins or zero points], then for every 8 k 64 bytes: byte 4 c + i holds
// code(k + i) of column c in its low nibble and code(k + 4 + i) in its high one.
#pragma once

#include "linear.hpp"

namespace llmctl::cpu {

// Scaling a group of 32 is spared a conversion: sums start at bits that are, read as a float, 1.5 * 2^23, and are then
// that much larger. Sums are below 2^22, so that is exact, and so is taking it off again from a product with a scale,
// which is finite and has 11 bits: one fma rounds as one product does.
constexpr float kSumBias = 12582912.0f;
constexpr int32_t kSumBiasBits = 0x4B400000;
template <class C, WeightKind kKind>
constexpr bool is_biased = C::kFused && kKind == WeightKind::int4;

// Of a vector among those of some panels side by side: its place, where each has `bytes` of a panel's row and the next
// panel is `next` away.
template <class C>
LLMCTL_INLINE const uint8_t* at_vector(const uint8_t* w, long next, int v, int bytes) {
  constexpr int kAcross = kPanel / C::kWidth;
  return w + v / kAcross * next + v % kAcross * bytes;
}

template <class C, int kVectors>
LLMCTL_INLINE void load_halves(const uint8_t* w, long next, typename C::F (&v)[kVectors]) {
  LLMCTL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    v[j] = C::load_f16(reinterpret_cast<const uint16_t*>(at_vector<C>(w, next, j, 2 * C::kWidth)));
  }
}

// What a tile needs of its rows besides their codes, group after group: scales, sums, multiplied already, and the high
// parts of wide codes. Those of a group lie side by side: with a pointer for each row a tile runs out of registers.
template <int kRows>
struct RowFacts {
  static constexpr bool kMultiplied = true;
  const int32_t* at;  // [groups][3][kRows]

  const float* scale(int row) const { return reinterpret_cast<const float*>(at) + row; }
  int32_t sum(int row) const { return at[kRows + row]; }
  const int32_t* high() const { return at + 2 * kRows; }
  void next() { at += 3 * kRows; }

  LLMCTL_INLINE void gather(const Form& form, long row, long groups, int times, int plus, int32_t* __restrict to) {
    const int32_t* scales = reinterpret_cast<const int32_t*>(form.scales) + row * groups;
    const int32_t* sums = form.sums + row * groups;
    const int32_t* high = form.wide != nullptr ? form.high + row * groups : sums;
    for (long g = 0; g < groups; ++g, to += 3 * kRows) {
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        to[i] = scales[i * groups + g];
        to[kRows + i] = times * sums[i * groups + g] + plus;
        to[2 * kRows + i] = high[i * groups + g];
      }
    }
  }
  LLMCTL_INLINE RowFacts gathered(const Form&, long, long, const int32_t* from) { return {from}; }
};

// Those of one row lie so in the act.
template <>
struct RowFacts<1> {
  static constexpr bool kMultiplied = false;
  const float* scales;
  const int32_t* sums;
  const int32_t* highs;

  const float* scale(int) const { return scales; }
  int32_t sum(int) const { return *sums; }
  const int32_t* high() const { return highs; }
  void next() { ++scales, ++sums, ++highs; }

  LLMCTL_INLINE void gather(const Form&, long, long, int, int, int32_t*) {}
  LLMCTL_INLINE RowFacts gathered(const Form& form, long row, long groups, const int32_t*) {
    return {form.scales + row * groups, form.sums + row * groups, form.high + row * groups};
  }
};

// sums[row][v] += the products of 32 consecutive k.
template <class C, int kRows, int kVectors, class Sum>
LLMCTL_INLINE void add_block_int4(const uint8_t* __restrict w, long next, Ahead& ahead, const int8_t* __restrict x,
                                  long x_stride, Sum (&sums)[kRows][kVectors]) {
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
    typename C::Codes4 low[kVectors], high[kVectors];
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      C::load_codes4(at_vector<C>(w + 64 * step, next, v, 4 * C::kWidth), low[v], high[v]);
    }
    ask_for<C, kVectors * C::kWidth / kPanel>(ahead, next);
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const auto xi = C::broadcast_x4(x + i * x_stride + 8 * step);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[i][v] = C::dot4(sums[i][v], low[v], xi);
    }
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const auto xi = C::broadcast_x4(x + i * x_stride + 8 * step + 4);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[i][v] = C::dot4(sums[i][v], high[v], xi);
    }
  }
}

// total[row][v] += 16 times the products of the four wide codes' high parts; `codes` are the group's.
template <class C, int kRows, int kVectors>
LLMCTL_INLINE void add_wide_quad(const uint8_t* __restrict codes, long next, int quad, const int32_t* __restrict high,
                                 typename C::I (&total)[kRows][kVectors]) {
  const uint8_t* from = codes + 32 * (quad & ~1);
  typename C::Codes4 w[kVectors];
  LLMCTL_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (C::kLongSums) {
      w[v] = C::load_codes4_times16(at_vector<C>(from, next, v, 4 * C::kWidth), quad & 1);
    } else {
      typename C::Codes4 low, upper;
      C::load_codes4(at_vector<C>(from, next, v, 4 * C::kWidth), low, upper);
      w[v] = (quad & 1) != 0 ? upper : low;
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const auto xi = C::broadcast_x4(reinterpret_cast<const int8_t*>(high + i));
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (C::kLongSums) {
        total[i][v] = C::dot4(total[i][v], w[v], xi);
      } else {  // 16 times a code would overflow the products' 16 bits
        const auto products = C::sum4_to_int(C::dot4(C::zero_sum4(), w[v], xi));
        total[i][v] = C::add_i(total[i][v], C::template shift_left<4>(products));
      }
    }
  }
}

// kKind is one of the three int4 kinds, by how a code becomes a value:
//   int4      (q - 8) s: the integer sum starts at -8 sum(x)
//   int4_int  (q - z) s: z sum(x) is taken off the integer sum
//   int4_min  q s + m:   m sum(x) is added to the scaled sum
// kOneBlock: the group is 32; otherwise it is `blocks` times 32.
template <class C, WeightKind kKind, bool kOneBlock, int kRows, int kPanels>
LLMCTL_NOINLINE void tile_int4(const uint8_t* __restrict w, long next, Ahead ahead, const int8_t* __restrict x,
                               long x_stride, RowFacts<kRows> facts, const uint8_t* __restrict wide, long groups,
                               int blocks, float* __restrict sums) {
  using F = typename C::F;
  using I = typename C::I;
  constexpr int kVectors = kPanels * kPanel / C::kWidth;
  constexpr bool kBiased = kOneBlock && is_biased<C, kKind>;
  F acc[kRows][kVectors];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[i][v] = C::zero();
  }
  for (long g = 0; g < groups; ++g) {
    const uint8_t* scales = w;
    w += 2 * kPanel * (kKind == WeightKind::int4 ? 1 : 2);
    I total[kRows][kVectors];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      I start = C::zero_i();
      if constexpr (kKind == WeightKind::int4) {
        const I sum = C::set1_i(facts.sum(i));
        if constexpr (kBiased) start = C::set1_i(kSumBiasBits);
        start = facts.kMultiplied ? sum : C::sub_i(start, C::template shift_left<3>(sum));
      }
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) total[i][v] = start;
    }
    if (wide != nullptr && wide[g] != kNoQuad) add_wide_quad<C, kRows, kVectors>(w, next, wide[g], facts.high(), total);
    const int count = kOneBlock ? 1 : blocks;
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      if constexpr (C::kLongSums) {
        add_block_int4<C, kRows, kVectors>(w, next, ahead, x, x_stride, total);
      } else {
        typename C::Sum4 part[kRows][kVectors];
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          LLMCTL_UNROLL
          for (int v = 0; v < kVectors; ++v) part[i][v] = C::zero_sum4();
        }
        add_block_int4<C, kRows, kVectors>(w, next, ahead, x, x_stride, part);
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          LLMCTL_UNROLL
          for (int v = 0; v < kVectors; ++v) total[i][v] = C::add_i(total[i][v], C::sum4_to_int(part[i][v]));
        }
      }
      w += 256;
      x += 32;
    }
    F scale[kVectors], zero[kVectors], unbias[kVectors];
    load_halves<C, kVectors>(scales, next, scale);
    if constexpr (kBiased) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) unbias[v] = C::mul(scale[v], C::set1(-kSumBias));
    }
    if constexpr (kKind != WeightKind::int4) load_halves<C, kVectors>(scales + 2 * kPanel, next, zero);
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xs = C::broadcast(facts.scale(i));
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        I t = total[i][v];
        if constexpr (kKind == WeightKind::int4_int) {
          t = C::sub_i(t, C::mul_i(C::to_int(zero[v]), C::set1_i(facts.sum(i))));
        }
        F value;
        if constexpr (kBiased) {
          value = C::fma(C::bits_f(t), scale[v], unbias[v]);
        } else if constexpr (kKind == WeightKind::int4_min) {
          value = C::to_float(t);
          value = C::fma(value, scale[v], C::mul(C::to_float(C::set1_i(facts.sum(i))), zero[v]));
        } else {
          value = C::mul(C::to_float(t), scale[v]);
        }
        acc[i][v] = C::fma(value, xs, acc[i][v]);
      }
    }
    facts.next();
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) C::store(at_sum<C, kRows>(sums, i, v), acc[i][v]);
  }
}

template <class Isa, WeightKind kKind>
struct Int4Tile {
  using Args = LinearArgs;
  using C = typename Isa::Columns;
  static constexpr int kMaxRows = C::kIntRows, kPanels = C::kIntPanels, kStep = 8;
  static constexpr int kStreams = C::kIntStreams, kFewStreams = C::kFewStreams;
  static constexpr int kTogether = (16 + kMaxRows - 1) / kMaxRows;
  static constexpr int kTimes = kKind == WeightKind::int4 ? -8 : 1;
  static constexpr int kBiasOf32 = is_biased<C, kKind> ? kSumBiasBits : 0;

  static long groups(const LinearArgs& a) { return a.act.k / a.form.group; }
  static long room_for_row(const LinearArgs& a) { return 3 * groups(a); }

  template <int kRows>
  LLMCTL_INLINE void prepare(const LinearArgs& a, long row, int32_t* room) {
    RowFacts<kRows>::gather(a.form, row, groups(a), kTimes, a.form.group == 32 ? kBiasOf32 : 0, room);
  }

  template <int kRows, int kPanels>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, const TileRows& rows, float* sums) {
    const auto facts = RowFacts<kRows>::gathered(a.form, rows.act_row, groups(a), rows.room);
    const int blocks = a.form.group / 32;
    const uint8_t* w = a.weight.panel(panel);
    const long next = rows.apart * a.weight.panel_bytes, in_row = groups(a);
    const int8_t* x = static_cast<const int8_t*>(a.form.codes) + rows.act_row * a.act.k;
    if (blocks == 1) {
      tile_int4<C, kKind, true, kRows, kPanels>(w, next, rows.ahead, x, a.act.k, facts, a.form.wide, in_row, blocks,
                                                sums);
    } else {
      tile_int4<C, kKind, false, kRows, kPanels>(w, next, rows.ahead, x, a.act.k, facts, a.form.wide, in_row, blocks,
                                                sums);
    }
  }
};

// int8 with activations of 12 bits, int16 with those of 14: products and int32 sums are exact up to the largest group
// of each, and nothing saturates.
template <class C, WeightKind kKind, int kRows, int kPanels>
LLMCTL_NOINLINE void tile_pairs(const uint8_t* __restrict w, long next, Ahead ahead, const int16_t* __restrict x,
                                long x_stride, const float* __restrict x_scale, long groups, int group,
                                float* __restrict sums) {
  using F = typename C::F;
  using I = typename C::I;
  constexpr bool kWide = kKind == WeightKind::int16;
  constexpr int kVectors = kPanels * kPanel / C::kWidth, kPair = kWide ? 4 : 2;
  const uint8_t* exponents = w;
  if constexpr (kWide) w += int16_scales(static_cast<int>(groups) * group);
  F acc[kRows][kVectors];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[i][v] = C::zero();
  }
  for (long g = 0; g < groups; ++g) {
    F scale[kVectors];
    if constexpr (kWide) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) scale[v] = C::load_e8m0(at_vector<C>(exponents, next, v, C::kWidth));
      exponents += kPanel;
    } else {
      load_halves<C, kVectors>(w, next, scale);
      w += 2 * kPanel;
    }
    I total[kRows][kVectors];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) total[i][v] = C::zero_i();
    }
#pragma GCC unroll 1
    for (int k = 0; k < group; k += 2) {
      typename C::Codes2 codes[kVectors];
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* at = at_vector<C>(w, next, v, kPair * C::kWidth);
        if constexpr (kWide) {
          codes[v] = C::load_pairs(reinterpret_cast<const int16_t*>(at));
        } else {
          codes[v] = C::load_codes2(reinterpret_cast<const int8_t*>(at));
        }
      }
      ask_for<C, kPanels>(ahead, next);
      w += kPair * kPanel;
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const auto xi = C::broadcast_x2(x + i * x_stride + k);
        LLMCTL_UNROLL
        for (int v = 0; v < kVectors; ++v) total[i][v] = C::dot2(total[i][v], codes[v], xi);
      }
    }
    x += group;
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xs = C::broadcast(x_scale + i * groups + g);
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        acc[i][v] = C::fma(C::mul(C::to_float(total[i][v]), scale[v]), xs, acc[i][v]);
      }
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) C::store(at_sum<C, kRows>(sums, i, v), acc[i][v]);
  }
}

template <class Isa, WeightKind kKind>
struct PairsTile : NothingPrepared {
  using C = typename Isa::Columns;
  static constexpr int kMaxRows = C::kIntRows, kPanels = C::kIntPanels, kStep = 2;
  static constexpr int kStreams = C::kIntStreams, kFewStreams = C::kFewStreams;
  template <int kRows, int kPanels>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, const TileRows& rows, float* sums) {
    const long groups = a.act.k / a.form.group;
    tile_pairs<C, kKind, kRows, kPanels>(a.weight.panel(panel), rows.apart * a.weight.panel_bytes, rows.ahead,
                                         static_cast<const int16_t*>(a.form.codes) + rows.act_row * a.act.k, a.act.k,
                                         a.form.scales + rows.act_row * groups, groups, a.form.group, sums);
  }
};

}  // namespace llmctl::cpu
