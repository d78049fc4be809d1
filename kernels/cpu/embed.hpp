// Embedding rows read out of a packed [vocab, hidden] weight: one column of a panel, dequantized.
//
// Codes and scales are gathered eight at a time; each value is exact in float32 (11-bit scale times at most 8-bit
// code, or a power of two times a 14-bit one) and rounded once where the rows are scaled, so the result does not depend on the instruction set.
#pragma once

#include "isa.hpp"
#include "table.hpp"

namespace llmctl::cpu {

template <class Isa>
LLMCTL_INLINE float half_at(const uint8_t* halves, int index) {
  alignas(32) float values[kLanes];
  Isa::store(values, Isa::load_f16(reinterpret_cast<const uint16_t*>(halves) + index / kLanes * kLanes));
  return values[index % kLanes];
}

template <class Isa>
LLMCTL_INLINE void embed_float(const Weight& w, const uint8_t* panel, int column, float* out) {
  for (int k = 0; k < w.k; k += kLanes) {
    const int n = least(kLanes, w.k - k);
    alignas(32) float floats[kLanes] = {};
    uint16_t words[kLanes] = {};
    for (int i = 0; i < n; ++i) {
      const long at = static_cast<long>(k + i) * kPanel;
      if (w.kind == WeightKind::f32) {
        std::memcpy(&floats[i], panel + 4 * (at + column), 4);
      } else {  // bf16: column j and j + 8 are neighbours
        const int lane = w.kind == WeightKind::f16 ? column : 2 * (column % 8) + column / 8;
        std::memcpy(&words[i], panel + 2 * (at + lane), 2);
      }
    }
    if (w.kind == WeightKind::f16) Isa::store(floats, Isa::load_f16(words));
    if (w.kind == WeightKind::bf16) Isa::store(floats, Isa::load_bf16(words));
    std::memcpy(out + k, floats, 4 * static_cast<std::size_t>(n));
  }
}

template <class Isa>
LLMCTL_INLINE void embed_int8(const Weight& w, const uint8_t* panel, int column, float* out) {
  for (int g = 0; g < w.k / w.group; ++g) {
    const auto scale = Isa::set1(half_at<Isa>(panel, column));
    const int8_t* codes = reinterpret_cast<const int8_t*>(panel + 2 * kPanel);
    for (int k = 0; k < w.group; k += kLanes) {
      int32_t q[kLanes];
      for (int i = 0; i < kLanes; ++i) q[i] = codes[(k + i) / 2 * 2 * kPanel + 2 * column + i % 2];
      Isa::store(out, Isa::mul(Isa::to_float(Isa::load_i(q)), scale));
      out += kLanes;
    }
    panel += 2 * kPanel + static_cast<long>(w.group) * kPanel;
  }
}

template <class Isa>
LLMCTL_INLINE void embed_int16(const Weight& w, const uint8_t* panel, int column, float* out) {
  const auto* codes = reinterpret_cast<const int16_t*>(panel + int16_scales(w.k));
  for (int k = 0; k < w.k; k += kLanes) {
    const uint8_t exponents[kLanes] = {panel[k / kInt16Group * kPanel + column]};
    int32_t q[kLanes];
    for (int i = 0; i < kLanes; ++i) q[i] = codes[(k + i) / 2 * 2 * kPanel + 2 * column + i % 2];
    alignas(32) float scales[kLanes];
    Isa::store(scales, Isa::load_e8m0(exponents));
    Isa::store(out + k, Isa::mul(Isa::to_float(Isa::load_i(q)), Isa::set1(scales[0])));
  }
}

template <class Isa>
LLMCTL_INLINE void embed_int4(const Weight& w, const uint8_t* panel, int column, float* out) {
  for (int g = 0; g < w.k / w.group; ++g) {
    const auto scale = Isa::set1(half_at<Isa>(panel, column));
    panel += 2 * kPanel;
    float zero = 8.0f, min = 0.0f;
    if (w.kind != WeightKind::int4) {
      (w.kind == WeightKind::int4_min ? min : zero) = half_at<Isa>(panel, column);
      if (w.kind == WeightKind::int4_min) zero = 0.0f;
      panel += 2 * kPanel;
    }
    for (int k = 0; k < w.group; k += kLanes) {
      const uint8_t* bytes = panel + column / 8 * 32 + column % 8 * 4;
      int32_t q[kLanes];
      for (int i = 0; i < 4; ++i) {
        q[i] = bytes[i] & 15;
        q[i + 4] = bytes[i] >> 4;
      }
      const auto value = Isa::sub(Isa::to_float(Isa::load_i(q)), Isa::set1(zero));
      Isa::store(out, Isa::fma(value, scale, Isa::set1(min)));
      out += kLanes;
      panel += 4 * kPanel;
    }
  }
}

template <class Isa>
LLMCTL_NOINLINE void embed_rows(const EmbedArgs& a, int row_begin, int row_end) {
  for (int i = row_begin; i < row_end; ++i) {
    const int token = a.batch.token[i];
    const uint8_t* panel = a.weight.panel(token / kPanel);
    const int column = token % kPanel;
    float* out = a.out.row(i);
    switch (a.weight.kind) {
      case WeightKind::f32:
      case WeightKind::f16:
      case WeightKind::bf16: embed_float<Isa>(a.weight, panel, column, out); break;
      case WeightKind::int16: embed_int16<Isa>(a.weight, panel, column, out); break;
      case WeightKind::int8: embed_int8<Isa>(a.weight, panel, column, out); break;
      case WeightKind::int4:
      case WeightKind::int4_min:
      case WeightKind::int4_int: embed_int4<Isa>(a.weight, panel, column, out); break;
    }
    if (a.scale == 1.0f) continue;
    for (int k = 0; k < a.weight.k; k += kLanes) {
      const int n = least(kLanes, a.weight.k - k);
      store_some<Isa>(out + k, Isa::mul(load_some<Isa>(out + k, n), Isa::set1(a.scale)), n);
    }
  }
}

}  // namespace llmctl::cpu
