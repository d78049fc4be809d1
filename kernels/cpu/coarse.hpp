// The largest output of an int8 linear for few rows, which wait for its weights: bounds from a copy of the weights that
// has the upper 5 of a code's 8 bits, and is two thirds as large.
//
// With code + 128 = 8 upper + lower, where lower is 0..7, a group's part in an output is what it would be with 3.5 in
// lower's place, and an error of at most 3.5 times the sum of the activations' magnitudes. Both sums are exact, and so
// an output has bounds that need no norms. What is done with bounds is in screen.hpp.
//
// Coarse panel, per group: 16 f16 scales; then for every 32 k 64 bytes of uppermost bits and 256 of the 4 bits below, as
// int4 panels have them. Of every 8 k there are 16 bytes of uppermost bits: bit 4 c + i of the first 8 is that of k + i
// of column c, of the second 8 that of k + 4 + i.
#pragma once

#include "screen.hpp"

namespace llmctl::cpu {

template <class Isa>
LLMCTL_NOINLINE void coarse_panels(const ScreenArgs& a, int panel_begin, int panel_end) {
  using C = typename Isa::Columns;
  static_assert(C::kWidth == kPanel);
  for (int panel = panel_begin; panel < panel_end; ++panel) {
    const uint8_t* w = a.weight.panel(panel);
    uint8_t* to = a.coarse + panel * coarse_panel_bytes(a.weight.k, a.weight.group);
    for (int g = 0; g < a.weight.k / a.weight.group; ++g) {
      std::memcpy(to, w, 2 * kPanel);
      w += 2 * kPanel, to += 2 * kPanel;
      for (int k = 0; k < a.weight.group; k += 32, to += 320) {
        for (int step = 0; step < 4; ++step, w += 8 * kPanel) {
          C::store_codes5(to + 64 + 64 * step, to + 16 * step, C::load_two_pairs(w), C::load_two_pairs(w + 4 * kPanel));
        }
      }
    }
  }
}

// The activations of some of `rows` rows as tiles want them: [k / 4][rows][4 high parts, 4 low parts] of their codes,
// and facts, [groups][kCoarseFacts][rows].
template <class Isa>
LLMCTL_NOINLINE void coarse_rows(const ScreenArgs& a, int rows, int row_begin, int row_end, int act_row) {
  const int group = a.exact.group, groups = a.act.k / group;
  // Of both ways to compute an output: an error of 2^-24 for each group's addition, and for each step within a group.
  const float slack = 1.0f + 0x1p-24f * (256.0f + 96.0f * static_cast<float>(groups));
  for (int row = row_begin; row < row_end; ++row) {
    const int16_t* codes = static_cast<const int16_t*>(a.exact.codes) + static_cast<long>(act_row + row) * a.act.k;
    const float* scales = a.exact.scales + static_cast<long>(act_row + row) * groups;
    float whole = 0.0f;
    for (int g = 0; g < groups; ++g, codes += group) {
      int32_t sum = 0, size = 0;
      int64_t squares = 0;
      for (int k = 0; k < group; ++k) {
        const int32_t code = codes[k], high = least((code + 8) >> 4, 127);
        int8_t* to = a.coarse_codes + ((g * group + k) / 4 * rows + row) * 8L + k % 4;
        to[0] = static_cast<int8_t>(high);
        to[4] = static_cast<int8_t>(code - 16 * high);
        sum += code;
        size += code < 0 ? -code : code;
        squares += code * code;
      }
      float* facts = a.coarse_facts + static_cast<long>(g) * kCoarseFacts * rows + row;
      facts[0] = scales[g];
      facts[rows] = (3.5f - 128.0f) * static_cast<float>(sum);
      facts[2 * rows] = slack * 3.5f * scales[g] * static_cast<float>(size);
      whole += scales[g] * scales[g] * static_cast<float>(squares);
    }
    if (!(whole > kScreenAbove && whole < kScreenBelow)) {
      a.coarse_facts[2 * rows + row] = std::numeric_limits<float>::infinity();
    }
    a.best[row].store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
  }
}

// What the outputs are at most off from `middle`: kScreenLeast where a bound would come too near to zero.
template <class C, int kRows>
LLMCTL_NOINLINE void tile_coarse(const uint8_t* __restrict w, const int8_t* __restrict x,
                                 const float* __restrict facts, int groups, int blocks, float* __restrict middles,
                                 float* __restrict offs) {
  using F = typename C::F;
  using I = typename C::I;
  F middle[kRows], off[kRows];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) middle[i] = C::zero(), off[i] = C::set1(kCoarseLeast);
  for (int g = 0; g < groups; ++g) {
    const F scale = C::load_f16(reinterpret_cast<const uint16_t*>(w));
    w += 2 * kPanel;
    I high[kRows], low[kRows];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) high[i] = C::zero_i(), low[i] = C::zero_i();
#pragma GCC unroll 1
    for (int block = 0; block < blocks; ++block, w += 320) {
      C::prefetch(w + Ahead::kBytes);
      C::prefetch(w + Ahead::kBytes + 320);
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step, x += 16 * kRows) {
        typename C::Codes4 first, second;
        C::load_codes5(w + 64 + 64 * step, w + 16 * step, first, second);
        C::prefetch(w + Ahead::kBytes + 64 + 64 * step);
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          high[i] = C::dot4(high[i], first, C::broadcast_x4(x + 8 * i));
          low[i] = C::dot4(low[i], first, C::broadcast_x4(x + 8 * i + 4));
        }
        LLMCTL_UNROLL
        for (int i = 0; i < kRows; ++i) {
          high[i] = C::dot4(high[i], second, C::broadcast_x4(x + 8 * (kRows + i)));
          low[i] = C::dot4(low[i], second, C::broadcast_x4(x + 8 * (kRows + i) + 4));
        }
      }
    }
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F total = C::to_float(C::add_i(C::template shift_left<4>(high[i]), low[i]));
      const F value = C::fma(total, C::set1(8.0f), C::broadcast(facts + kRows + i));
      middle[i] = C::fma(C::mul(value, scale), C::broadcast(facts + i), middle[i]);
      off[i] = C::fma(scale, C::broadcast(facts + 2 * kRows + i), off[i]);
    }
    facts += kCoarseFacts * kRows;
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    C::store(middles + i * kPanel, middle[i]);
    C::store(offs + i * kPanel, off[i]);
  }
}

template <class Isa>
LLMCTL_NOINLINE void coarse(const ScreenArgs& a, int rows, int panel_begin, int panel_end) {
  const int groups = a.act.k / a.weight.group, blocks = a.weight.group / 32;
  const long bytes = coarse_panel_bytes(a.weight.k, a.weight.group);
  with_height<kCoarseRows>(rows, [&]<int kRows>() {
    alignas(64) float middles[kRows * kPanel], offs[kRows * kPanel];
    for (int panel = panel_begin; panel < panel_end; ++panel) {
      tile_coarse<typename Isa::Columns, kRows>(a.coarse + panel * bytes, a.coarse_codes, a.coarse_facts, groups, blocks,
                                                middles, offs);
      for (int i = 0; i < kRows; ++i) {
        using F = typename Isa::F;
        const float *middle = middles + i * kPanel, *off = offs + i * kPanel;
        const F value[2] = {Isa::load(middle), Isa::load(middle + kLanes)};
        keep_bounds<Isa>(a, i, panel, value, {Isa::load(off), Isa::load(off + kLanes)});
      }
    }
  });
}

}  // namespace llmctl::cpu
