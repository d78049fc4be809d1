// Linear tiles for int4 and int8 weights with quantized activations: exact integer sums inside a group, then
// acc = fma(float(sum) * x_scale, w_scale, acc) per group, ascending.
//
// int8 panel, per group: 16 f16 scales, then [group / 2][16 columns][2 consecutive k] int8.
// int4 panel, per group: 16 f16 scales, [16 f16 mins or zero points], then for every 8 k two vectors of 32 bytes,
// columns 0-7 and 8-15: byte 4 c + i holds code(k + i) of column c in its low nibble and code(k + 4 + i) in its high
// one.
#pragma once

#include "linear.hpp"

namespace llmctl::cpu {

template <class Isa>
LLMCTL_INLINE void load_halves(const uint8_t* p, typename Isa::F (&v)[2]) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  v[0] = Isa::load_f16(halves);
  v[1] = Isa::load_f16(halves + kLanes);
}

// kKind is one of the three int4 kinds, by how a code becomes a value:
//   int4      (q - 8) s: the integer sum starts at -8 sum(x)
//   int4_int  (q - z) s: z sum(x) is taken off the integer sum
//   int4_min  q s + m:   a second fma with m and sum(x)
// kOneBlock: the group is 32; otherwise it is `blocks` times 32 (int16 running sums hold 32 products at most).
template <class Isa, WeightKind kKind, bool kOneBlock, int kRows>
LLMCTL_NOINLINE void tile_int4(const uint8_t* __restrict w, const int8_t* __restrict x, long x_stride,
                               const float* __restrict x_scale, const int32_t* __restrict x_sum, long groups,
                               int blocks, float* __restrict sums) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  F acc[kRows][2];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = Isa::zero();
  for (long g = 0; g < groups; ++g) {
    const uint8_t* scales = w;
    w += 2 * kPanel * (kKind == WeightKind::int4 ? 1 : 2);
    I total[kRows][2];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int32_t start = kKind == WeightKind::int4 ? -8 * x_sum[i * groups + g] : 0;
      total[i][0] = total[i][1] = Isa::set1_i(start);
    }
    const int count = kOneBlock ? 1 : blocks;
#pragma GCC unroll 1
    for (int b = 0; b < count; ++b) {
      typename Isa::Sum4 part[kRows][2];
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) part[i][0] = part[i][1] = Isa::zero_sum4();
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        typename Isa::Codes4 low[2], high[2];
        Isa::load_codes4(w, low[0], high[0]);
        Isa::load_codes4(w + 32, low[1], high[1]);
        w += 64;
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const auto xi = Isa::broadcast_x4(x + i * x_stride + 8 * step);
          part[i][0] = Isa::dot4(part[i][0], low[0], xi);
          part[i][1] = Isa::dot4(part[i][1], low[1], xi);
        }
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const auto xi = Isa::broadcast_x4(x + i * x_stride + 8 * step + 4);
          part[i][0] = Isa::dot4(part[i][0], high[0], xi);
          part[i][1] = Isa::dot4(part[i][1], high[1], xi);
        }
      }
      x += 32;
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        total[i][0] = Isa::add_i(total[i][0], Isa::sum4_to_int(part[i][0]));
        total[i][1] = Isa::add_i(total[i][1], Isa::sum4_to_int(part[i][1]));
      }
    }
    F scale[2], zero[2];
    load_halves<Isa>(scales, scale);
    if constexpr (kKind != WeightKind::int4) load_halves<Isa>(scales + 2 * kPanel, zero);
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xs = Isa::broadcast(x_scale + i * groups + g);
      LLMCTL_UNROLL
      for (int v = 0; v < 2; ++v) {
        I t = total[i][v];
        if constexpr (kKind == WeightKind::int4_int) {
          t = Isa::sub_i(t, Isa::mul_i(Isa::to_int(zero[v]), Isa::set1_i(x_sum[i * groups + g])));
        }
        acc[i][v] = Isa::fma(Isa::mul(Isa::to_float(t), xs), scale[v], acc[i][v]);
        if constexpr (kKind == WeightKind::int4_min) {
          const F shift = Isa::mul(Isa::to_float(Isa::set1_i(x_sum[i * groups + g])), xs);
          acc[i][v] = Isa::fma(shift, zero[v], acc[i][v]);
        }
      }
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    Isa::store(sums + i * kPanel, acc[i][0]);
    Isa::store(sums + i * kPanel + kLanes, acc[i][1]);
  }
}

template <class Isa, WeightKind kKind>
struct Int4Tile {
  static constexpr int kMaxRows = 4;
  template <int kRows>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, long row, float* sums) {
    const long groups = a.act.k / a.form.group;
    const int blocks = a.form.group / 32;
    const uint8_t* w = a.weight.panel(panel);
    const int8_t* x = static_cast<const int8_t*>(a.form.codes) + row * a.act.k;
    const float* x_scale = a.form.scales + row * groups;
    const int32_t* x_sum = a.form.sums + row * groups;
    if (blocks == 1) {
      tile_int4<Isa, kKind, true, kRows>(w, x, a.act.k, x_scale, x_sum, groups, blocks, sums);
    } else {
      tile_int4<Isa, kKind, false, kRows>(w, x, a.act.k, x_scale, x_sum, groups, blocks, sums);
    }
  }
};

// int16 activations of 12 bits: products and int32 sums are exact up to a group of 8192, and nothing saturates.
template <class Isa, int kRows>
LLMCTL_NOINLINE void tile_int8(const uint8_t* __restrict w, const int16_t* __restrict x, long x_stride,
                               const float* __restrict x_scale, long groups, int group, float* __restrict sums) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  F acc[kRows][2];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = Isa::zero();
  for (long g = 0; g < groups; ++g) {
    F scale[2];
    load_halves<Isa>(w, scale);
    w += 2 * kPanel;
    I total[kRows][2];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) total[i][0] = total[i][1] = Isa::zero_i();
#pragma GCC unroll 1
    for (int k = 0; k < group; k += 2) {
      const auto w0 = Isa::load_codes2(reinterpret_cast<const int8_t*>(w));
      const auto w1 = Isa::load_codes2(reinterpret_cast<const int8_t*>(w) + kPanel);
      w += 2 * kPanel;
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const auto xi = Isa::broadcast_x2(x + i * x_stride + k);
        total[i][0] = Isa::dot2(total[i][0], w0, xi);
        total[i][1] = Isa::dot2(total[i][1], w1, xi);
      }
    }
    x += group;
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xs = Isa::broadcast(x_scale + i * groups + g);
      acc[i][0] = Isa::fma(Isa::mul(Isa::to_float(total[i][0]), xs), scale[0], acc[i][0]);
      acc[i][1] = Isa::fma(Isa::mul(Isa::to_float(total[i][1]), xs), scale[1], acc[i][1]);
    }
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    Isa::store(sums + i * kPanel, acc[i][0]);
    Isa::store(sums + i * kPanel + kLanes, acc[i][1]);
  }
}

template <class Isa>
struct Int8Tile {
  static constexpr int kMaxRows = 4;
  template <int kRows>
  LLMCTL_INLINE void run(const LinearArgs& a, int panel, long row, float* sums) {
    const long groups = a.act.k / a.form.group;
    tile_int8<Isa, kRows>(a.weight.panel(panel), static_cast<const int16_t*>(a.form.codes) + row * a.act.k, a.act.k,
                          a.form.scales + row * groups, groups, a.form.group, sums);
  }
};

}  // namespace llmctl::cpu
