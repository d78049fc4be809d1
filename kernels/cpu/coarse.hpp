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

constexpr float kCoarseLeast = 1e-35f;  // of a bound, for products that vanish

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

// A line of each panel.
template <class C, int kPanels>
LLMCTL_INLINE void ask_ahead(const uint8_t* w, long next) {
  Ahead ahead{w + Ahead::kBytes, 0};
  ask_for<C, kPanels>(ahead, next);
}

// What outputs are about, and how far off they are at most.
template <class C, int kRows, int kPanels>
LLMCTL_NOINLINE void tile_coarse(const uint8_t* __restrict w, long next, const int8_t* __restrict x,
                                 const float* __restrict facts, int groups, int blocks, float* __restrict middles,
                                 float* __restrict offs) {
  using F = typename C::F;
  using I = typename C::I;
  F middle[kRows][kPanels], off[kRows][kPanels];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int p = 0; p < kPanels; ++p) middle[i][p] = C::zero(), off[i][p] = C::set1(kCoarseLeast);
  }
  for (int g = 0; g < groups; ++g) {
    const uint8_t* scales = w;
    w += 2 * kPanel;
    I high[kRows][kPanels], low[kRows][kPanels];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      LLMCTL_UNROLL
      for (int p = 0; p < kPanels; ++p) high[i][p] = C::zero_i(), low[i][p] = C::zero_i();
    }
#pragma GCC unroll 1
    for (int block = 0; block < blocks; ++block, w += 320) {
      ask_ahead<C, kPanels>(w, next);
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step, x += 16 * kRows) {
        ask_ahead<C, kPanels>(w + 64 + 64 * step, next);
        typename C::Codes4 codes[kPanels][2];
        LLMCTL_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          const uint8_t* from = w + p * next;
          C::load_codes5(from + 64 + 64 * step, from + 16 * step, codes[p][0], codes[p][1]);
        }
        LLMCTL_UNROLL
        for (int half = 0; half < 2; ++half) {
          LLMCTL_UNROLL
          for (int i = 0; i < kRows; ++i) {
            const int8_t* parts = x + 8 * (half * kRows + i);
            const auto x_high = C::broadcast_x4(parts), x_low = C::broadcast_x4(parts + 4);
            LLMCTL_UNROLL
            for (int p = 0; p < kPanels; ++p) {
              high[i][p] = C::dot4(high[i][p], codes[p][half], x_high);
              low[i][p] = C::dot4(low[i][p], codes[p][half], x_low);
            }
          }
        }
      }
    }
    F scale[kPanels];
    load_halves<C, kPanels>(scales, next, scale);
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      LLMCTL_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        const F total = C::to_float(C::add_i(C::template shift_left<4>(high[i][p]), low[i][p]));
        const F value = C::fma(total, C::set1(8.0f), C::broadcast(facts + kRows + i));
        middle[i][p] = C::fma(C::mul(value, scale[p]), C::broadcast(facts + i), middle[i][p]);
        off[i][p] = C::fma(C::abs(scale[p]), C::broadcast(facts + 2 * kRows + i), off[i][p]);
      }
    }
    facts += kCoarseFacts * kRows;
  }
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      C::store(at_sum<C, kRows>(middles, i, p), middle[i][p]);
      C::store(at_sum<C, kRows>(offs, i, p), off[i][p]);
    }
  }
}

// Panels that are `apart` from each other.
template <class Isa, int kRows, int kPanels>
LLMCTL_INLINE void run_coarse(const ScreenArgs& a, int panel, int apart) {
  using F = typename Isa::F;
  const long bytes = coarse_panel_bytes(a.weight.k, a.weight.group);
  alignas(64) float middles[kPanels * kRows * kPanel], offs[kPanels * kRows * kPanel];
  tile_coarse<typename Isa::Columns, kRows, kPanels>(a.coarse + panel * bytes, apart * bytes, a.coarse_codes,
                                                     a.coarse_facts, a.act.k / a.weight.group, a.weight.group / 32,
                                                     middles, offs);
  for (int p = 0; p < kPanels; ++p) {
    for (int i = 0; i < kRows; ++i) {
      const int at = (p * kRows + i) * kPanel;
      const F values[2] = {Isa::load(middles + at), Isa::load(middles + at + kLanes)};
      keep_bounds<Isa>(a, i, panel + p * apart, values, {Isa::load(offs + at), Isa::load(offs + at + kLanes)});
    }
  }
}

template <class Isa>
LLMCTL_NOINLINE void coarse(const ScreenArgs& a, int rows, int panel_begin, int panel_end) {
  with_height<kCoarseRows>(rows, [&]<int kRows>() {
    int panel = panel_begin;
    if constexpr (kRows == 1) {  // as run_streams of linear.hpp does
      constexpr int kStreams = 4;
      const int apart = (panel_end - panel_begin) / kStreams;
      for (; panel < panel_begin + apart; ++panel) run_coarse<Isa, kRows, kStreams>(a, panel, apart);
      panel = panel_begin + apart * kStreams;
    }
    for (; panel < panel_end; ++panel) run_coarse<Isa, kRows, 1>(a, panel, 1);
  });
}

}  // namespace llmctl::cpu
