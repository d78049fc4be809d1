// The largest output of an int8 linear for less than all outputs: bounds from the upper 8 of an activation's 12 bits.
//
// With code = 16 high + low, an output is what the high parts give and an error of at most |weights| |scale low|, both
// lengths of vectors. The first is had by products of bytes, twice as many at once as of int16. Only panels in which an
// output may come up to the largest are then computed as ever. Every other output is below the row's largest and stays
// as it is, near its value: a reader that looks for the largest finds the same one, with the same bits, and ties too.
//
// NaN and what nears an end of float32's range have no bounds: they are computed as ever.
#pragma once

#include <cmath>
#include <limits>

#include "linear_int.hpp"

namespace llmctl::cpu {

constexpr float kScreenAbove = 1e-20f, kScreenBelow = 1e30f;  // sums of squares of a row that has bounds
constexpr float kScreenSlack = 1.001f;       // for the rounding of the bounds themselves
constexpr float kScreenRounding = 0x1p-22f;  // of each group's part in an output, of both ways to compute it

// The length of each output's weights.
template <class Isa>
LLMCTL_NOINLINE void screen_norms(const ScreenArgs& a, int panel_begin, int panel_end) {
  using C = typename Isa::Columns;
  constexpr int kVectors = kPanel / C::kWidth;
  for (int panel = panel_begin; panel < panel_end; ++panel) {
    const uint8_t* w = a.weight.panel(panel);
    typename C::F squares[kVectors];
    for (auto& v : squares) v = C::zero();
    for (int g = 0; g < a.weight.k / a.weight.group; ++g) {
      typename C::F scale[kVectors];
      load_halves<C, kVectors>(w, 0, scale);
      w += 2 * kPanel;
      typename C::I total[kVectors];
      for (auto& v : total) v = C::zero_i();
      for (int k = 0; k < a.weight.group; k += 2, w += 2 * kPanel) {
        for (int v = 0; v < kVectors; ++v) {
          const auto codes = C::load_codes2(reinterpret_cast<const int8_t*>(at_vector<C>(w, 0, v, 2 * C::kWidth)));
          total[v] = C::dot2(total[v], codes, codes);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        squares[v] = C::fma(C::mul(C::to_float(total[v]), scale[v]), scale[v], squares[v]);
      }
    }
    float* norms = a.norms + static_cast<long>(panel) * kPanel;
    for (int v = 0; v < kVectors; ++v) C::store(norms + v * C::kWidth, squares[v]);
    for (int i = 0; i < kPanel; ++i) norms[i] = kScreenSlack * std::sqrt(norms[i]);
  }
}

// The form of 8 bits of some rows, and how far an output may be from what it gives, for weights of length 1.
template <class Isa>
LLMCTL_NOINLINE void screen_rows(const ScreenArgs& a, int row_begin, int row_end) {
  const int group = a.form.group, groups = a.act.k / group;
  for (long row = row_begin; row < row_end; ++row) {
    const int16_t* codes = static_cast<const int16_t*>(a.exact.codes) + row * a.act.k;
    int8_t* highs = static_cast<int8_t*>(a.form.codes) + row * a.act.k;
    float left = 0.0f, whole = 0.0f;
    for (int g = 0; g < groups; ++g, codes += group, highs += group) {
      int32_t sum = 0, squares_left = 0;
      int64_t squares = 0;
      for (int k = 0; k < group; ++k) {
        const int32_t code = codes[k], high = least((code + 8) >> 4, 127), low = code - 16 * high;
        highs[k] = static_cast<int8_t>(high);
        sum += high;
        squares_left += low * low;
        squares += code * code;
      }
      const float scale = a.exact.scales[row * groups + g];
      a.form.scales[row * groups + g] = 16.0f * scale;
      a.form.sums[row * groups + g] = sum;
      left += scale * scale * static_cast<float>(squares_left);
      whole += scale * scale * static_cast<float>(squares);
    }
    const float rounding = kScreenRounding * static_cast<float>(groups + 4);
    const float reach = kScreenSlack * (std::sqrt(left) + rounding * std::sqrt(whole));
    a.reach[row] = whole > kScreenAbove && whole < kScreenBelow ? reach : std::numeric_limits<float>::infinity();
    a.best[row].store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
  }
}

// Products of bytes: codes of the weight are 128 larger, and 128 times the sum of the row's is taken off.
template <class C, int kRows, int kPanels>
LLMCTL_NOINLINE void tile_screen(const uint8_t* __restrict w, long next, Ahead ahead, const int8_t* __restrict x,
                                 long x_stride, RowFacts<kRows> facts, long groups, int group,
                                 float* __restrict sums) {
  using F = typename C::F;
  using I = typename C::I;
  constexpr int kVectors = kPanels * kPanel / C::kWidth;
  F acc[kRows][kVectors];
  LLMCTL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    LLMCTL_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[i][v] = C::zero();
  }
  for (long g = 0; g < groups; ++g) {
    F scale[kVectors];
    load_halves<C, kVectors>(w, next, scale);
    w += 2 * kPanel;
    I total[kRows][kVectors];
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const I sum = C::set1_i(facts.sum(i));
      const I start = facts.kMultiplied ? sum : C::sub_i(C::zero_i(), C::template shift_left<7>(sum));
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) total[i][v] = start;
    }
#pragma GCC unroll 1
    for (int k = 0; k < group; k += 4) {
      typename C::Codes4 codes[kVectors];
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) codes[v] = C::load_two_pairs(at_vector<C>(w, next, v, 4 * C::kWidth));
      ask_for<C, kPanels>(ahead, next);
      w += 4 * kPanel;
      LLMCTL_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const auto xi = C::broadcast_x4(x + i * x_stride + k);
        LLMCTL_UNROLL
        for (int v = 0; v < kVectors; ++v) total[i][v] = C::dot4(total[i][v], codes[v], xi);
      }
    }
    x += group;
    LLMCTL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const F xs = C::broadcast(facts.scale(i));
      LLMCTL_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        acc[i][v] = C::fma(C::mul(C::to_float(total[i][v]), scale[v]), xs, acc[i][v]);
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

template <class Isa>
struct ScreenTile {
  using Args = ScreenArgs;
  using C = typename Isa::Columns;
  static constexpr int kMaxRows = C::kIntRows, kPanels = C::kIntPanels, kStreams = 1, kFewStreams = 1, kStep = 4;
  static constexpr int kTogether = (16 + kMaxRows - 1) / kMaxRows;

  static long groups(const ScreenArgs& a) { return a.act.k / a.form.group; }
  static long room_for_row(const ScreenArgs& a) { return 3 * groups(a); }

  template <int kRows>
  LLMCTL_INLINE void prepare(const ScreenArgs& a, long row, int32_t* room) {
    RowFacts<kRows>::gather(a.form, row, groups(a), -128, 0, room);
  }

  template <int kRows, int kPanels>
  LLMCTL_INLINE void run(const ScreenArgs& a, int panel, const TileRows& rows, float* sums) {
    const auto facts = RowFacts<kRows>::gathered(a.form, rows.act_row, groups(a), rows.room);
    tile_screen<C, kRows, kPanels>(a.weight.panel(panel), rows.apart * a.weight.panel_bytes, rows.ahead,
                                   static_cast<const int8_t*>(a.form.codes) + rows.act_row * a.act.k, a.act.k, facts,
                                   groups(a), a.form.group, sums);
  }
};

// Stores outputs that may be `off` from what they are, and keeps what they say of the panel and the row.
template <class Isa>
LLMCTL_INLINE void keep_bounds(const ScreenArgs& a, int row, int panel, const typename Isa::F (&values)[2],
                               const typename Isa::F (&off)[2]) {
  using F = typename Isa::F;
  const long column = static_cast<long>(panel) * kPanel;
  const F minus_inf = Isa::set1(-std::numeric_limits<float>::infinity());
  const int real = least(kPanel, a.weight.n - static_cast<int>(column));
  F upper = minus_inf, lower = minus_inf;
  unsigned ordered = 0xFF;
  for (int half = 0; half < 2; ++half) {
    Isa::store(a.out.row(row) + column + half * kLanes, values[half]);
    const F above = Isa::add(values[half], off[half]), below = Isa::sub(values[half], off[half]);
    ordered &= Isa::mask_bits(Isa::equal(above, above));
    upper = Isa::max(above, upper);
    lower = Isa::max(Isa::keep(below, 0, real - half * kLanes, minus_inf), lower);
  }
  a.upper[static_cast<long>(panel) * a.rows + row] =
      ordered == 0xFF ? Isa::max_lane(upper) : std::numeric_limits<float>::infinity();
  const float least_largest = Isa::max_lane(lower);
  std::atomic<float>& best = a.best[row];
  float seen = best.load(std::memory_order_relaxed);
  while (least_largest > seen && !best.compare_exchange_weak(seen, least_largest, std::memory_order_relaxed)) {
  }
}

template <class Isa>
LLMCTL_NOINLINE void finish_tile(const ScreenArgs& a, const float* sums, int rows, int row, int panel) {
  using F = typename Isa::F;
  const float* norms = a.norms + static_cast<long>(panel) * kPanel;
  for (int i = 0; i < rows; ++i) {
    const F reach = Isa::set1(a.reach[row + i]);
    const F values[2] = {Isa::load(sums + i * kPanel), Isa::load(sums + i * kPanel + kLanes)};
    keep_bounds<Isa>(a, row + i, panel, values,
                     {Isa::mul(Isa::load(norms), reach), Isa::mul(Isa::load(norms + kLanes), reach)});
  }
}

}  // namespace llmctl::cpu
