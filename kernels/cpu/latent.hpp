// Attention on latents but for attention itself: the store of a token, queries brought to where latents are, and heads
// brought back from there.
//
// A row's queries lie in chunks of kLatentHeads heads, each [width][kLatentHeads]: a head is a lane of latent_attend.hpp,
// which leaves in the same place what it found, [kLatentHeads][width] with rank values each.
//
// One order for every sum: value `r` of a head's query has 8 lanes, column of `up` % 8, in ascending order of panels, and
// then the tree of Isa::sum; an output is one chain of fmas over `r`, in `up`'s order of inputs. `up` is computed with as
// it is packed: of integers a few inputs at a time become float32, for all rows of a task.
#pragma once

#include <utility>

#include "act.hpp"
#include "kv_format.hpp"
#include "linear_float.hpp"
#include "norm.hpp"
#include "table.hpp"

namespace llmctl::cpu {

constexpr int kMaxNopePanels = kMaxNope / kPanel + 1;  // panels that the columns of a head's key may touch

// Codes of 8 columns and 4 + 4 inputs to float32 rows of `out` [8][16]: nibble i of a column's word is input order i / 2
// + 4 (i % 2).
template <class Isa, int kNibble>
LLMCTL_INLINE void unpack_nibble(typename Isa::I words, typename Isa::F zero, typename Isa::F scale, typename Isa::F min,
                                 float* out) {
  const auto code = Isa::and_i(Isa::template shift_right<4 * kNibble>(words), Isa::set1_i(15));
  const auto value = Isa::sub(Isa::to_float(code), zero);
  Isa::store(out + (kNibble / 2 + 4 * (kNibble % 2)) * kPanel, Isa::fma(value, scale, min));
}

template <class Isa>
LLMCTL_INLINE void unpack_int4(const Weight& w, const uint8_t* group, int from, int count, float* out) {
  const uint8_t* codes = group + (w.kind == WeightKind::int4 ? 2 : 4) * kPanel + from / 8 * 64;
  for (int half = 0; half < 2; ++half) {
    const auto* scales = reinterpret_cast<const uint16_t*>(group) + kLanes * half;
    const auto scale = Isa::load_f16(scales);
    const auto zero = w.kind == WeightKind::int4_int   ? Isa::load_f16(scales + kPanel)
                      : w.kind == WeightKind::int4_min ? Isa::zero()
                                                       : Isa::set1(8.0f);
    const auto min = w.kind == WeightKind::int4_min ? Isa::load_f16(scales + kPanel) : Isa::zero();
    for (int k = 0; k < count; k += 8) {
      int32_t words[kLanes];
      std::memcpy(words, codes + k / 8 * 64 + 32 * half, sizeof(words));
      const auto loaded = Isa::load_i(words);
      float* at = out + k * kPanel + kLanes * half;
      [&]<int... kNibbles>(std::integer_sequence<int, kNibbles...>) {
        (unpack_nibble<Isa, kNibbles>(loaded, zero, scale, min, at), ...);
      }(std::make_integer_sequence<int, 8>{});
    }
  }
}

// Two inputs of a column are neighbours: as a bfloat16 they come with the second in the upper byte.
template <class Isa>
LLMCTL_INLINE void unpack_int8(const uint8_t* group, int from, int count, float* out) {
  const uint8_t* codes = group + 2 * kPanel + from / 2 * 2 * kPanel;
  const auto sign = Isa::set1_i(0x80);
  for (int half = 0; half < 2; ++half) {
    const auto scale = Isa::load_f16(reinterpret_cast<const uint16_t*>(group) + kLanes * half);
    for (int k = 0; k < count; k += 2) {
      const auto* pairs = reinterpret_cast<const uint16_t*>(codes + k * kPanel + kPanel * half);
      const auto both = Isa::bits_i(Isa::load_bf16(pairs));
      const auto first = Isa::template shift_right<24>(Isa::template shift_left<8>(both));
      const auto second = Isa::template shift_right<24>(both);
      float* at = out + k * kPanel + kLanes * half;
      Isa::store(at, Isa::mul(Isa::to_float(Isa::sub_i(Isa::xor_i(first, sign), sign)), scale));
      Isa::store(at + kPanel, Isa::mul(Isa::to_float(Isa::sub_i(Isa::xor_i(second, sign), sign)), scale));
    }
  }
}

template <class Isa>
LLMCTL_INLINE void unpack_int16(const Weight& w, const uint8_t* panel, int from, int count, float* out) {
  const uint8_t* codes = panel + int16_scales(w.k) + from * 2 * kPanel;
  const auto sign = Isa::set1_i(0x8000);
  for (int half = 0; half < 2; ++half) {
    const auto scale = Isa::load_e8m0(panel + from / kInt16Group * kPanel + kLanes * half);
    for (int k = 0; k < count; k += 2) {
      int32_t words[kLanes];
      std::memcpy(words, codes + k * 2 * kPanel + 2 * kPanel * half, sizeof(words));
      const auto both = Isa::load_i(words);
      const auto first = Isa::and_i(both, Isa::set1_i(0xFFFF)), second = Isa::template shift_right<16>(both);
      float* at = out + k * kPanel + kLanes * half;
      Isa::store(at, Isa::mul(Isa::to_float(Isa::sub_i(Isa::xor_i(first, sign), sign)), scale));
      Isa::store(at + kPanel, Isa::mul(Isa::to_float(Isa::sub_i(Isa::xor_i(second, sign), sign)), scale));
    }
  }
}

template <class Isa, WeightKind kKind>
LLMCTL_INLINE void unpack_float(const uint8_t* panel, int from, int count, float* out) {
  constexpr long kRowBytes = kPanel * (kKind == WeightKind::f32 ? 4 : 2);
  for (int k = 0; k < count; ++k) {
    typename Isa::F columns[kPanel / kLanes];
    load_columns<Isa, kKind>(panel + (from + k) * kRowBytes, columns);
    Isa::store(out + k * kPanel, columns[0]);
    Isa::store(out + k * kPanel + kLanes, columns[1]);
  }
}

// Values of a panel as float32 [count][16], inputs from `from` on. Of integers both are multiples of 8, in one group.
template <class Isa>
LLMCTL_INLINE void unpack_inputs(const Weight& w, long panel, int from, int count, float* out) {
  const uint8_t* data = w.panel(panel);
  const int groups = w.group == 0 ? 1 : w.k / w.group;
  const uint8_t* group = data + (w.group == 0 ? 0 : from / w.group * (w.panel_bytes / groups));
  const int inside = w.group == 0 ? from : from % w.group;
  switch (w.kind) {
    case WeightKind::f32: return unpack_float<Isa, WeightKind::f32>(data, inside, count, out);
    case WeightKind::f16: return unpack_float<Isa, WeightKind::f16>(data, inside, count, out);
    case WeightKind::bf16: return unpack_float<Isa, WeightKind::bf16>(data, inside, count, out);
    case WeightKind::int16: return unpack_int16<Isa>(w, data, from, count, out);
    case WeightKind::int8: return unpack_int8<Isa>(group, inside, count, out);
    case WeightKind::int4:
    case WeightKind::int4_min:
    case WeightKind::int4_int: return unpack_int4<Isa>(w, group, inside, count, out);
  }
}

// `dim` values rotated: pairs stand apart afterwards (i and i + dim / 2), however they stood before.
template <class Isa>
LLMCTL_INLINE void turn_pairs(const float* x, int dim, bool interleaved, const float* cos, const float* sin,
                              float* out) {
  using F = typename Isa::F;
  const int half = dim / 2;
  for (int d = 0; d < half; d += kLanes) {
    const int n = least(kLanes, half - d);
    alignas(32) float first[kLanes] = {}, second[kLanes] = {};
    for (int i = 0; i < n; ++i) {
      first[i] = interleaved ? x[2 * (d + i)] : x[d + i];
      second[i] = interleaved ? x[2 * (d + i) + 1] : x[half + d + i];
    }
    const F a = Isa::load(first), b = Isa::load(second);
    const F c = load_some<Isa>(cos + d, n), s = load_some<Isa>(sin + d, n);
    store_some<Isa>(out + d, Isa::fnma(b, s, Isa::mul(a, c)), n);
    store_some<Isa>(out + half + d, Isa::fma(a, s, Isa::mul(b, c)), n);
  }
}

template <class Isa, class Format>
LLMCTL_INLINE void store_latent(const float* values, int width, uint8_t* to) {
  auto* out = reinterpret_cast<typename Format::Elem*>(to);
  for (int d = 0; d < width; d += kLanes) Format::template store<Isa>(out + d, Isa::load(values + d));
}

template <class Isa>
LLMCTL_NOINLINE void latent_store(const LatentArgs& a, int row_begin, int row_end) {
  const int rank = a.up.k, half = a.rope_dim() / 2;
  alignas(32) float values[kMaxLatentWidth];
  for (int i = row_begin; i < row_end; ++i) {
    const float* x = a.latent.row(i);
    const auto scale = Isa::set1(inverse_rms<Isa>(x, rank, a.norm_eps));
    for (int r = 0; r < rank; r += kLanes) {
      Isa::store(values + r, Isa::mul(Isa::mul(Isa::load(x + r), scale), Isa::load(a.kv_norm + r)));
    }
    const int position = a.batch.position[i];
    const long angle = static_cast<long>(position) * half;
    turn_pairs<Isa>(x + rank, 2 * half, a.interleaved, a.cos + angle, a.sin + angle, values + rank);
    const int32_t* table = a.kv.table + a.batch.slot[i] * a.kv.max_blocks;
    uint8_t* to = a.kv.row(table[position / a.kv.block_size], position % a.kv.block_size);
    switch (a.kv.kind) {
      case KvKind::f32: store_latent<Isa, KvF32>(values, a.kv.width, to); break;
      case KvKind::f16: store_latent<Isa, KvF16>(values, a.kv.width, to); break;
      default: store_latent<Isa, KvBf16>(values, a.kv.width, to); break;
    }
  }
}

// The part of queries that meets rotated keys, for the heads of a chunk.
template <class Isa>
LLMCTL_INLINE void absorb_rope(const LatentArgs& a, float* queries, int chunk, int row_begin, int row_end) {
  const int rank = a.up.k, dim = a.rope_dim(), first = chunk * kLatentHeads;
  alignas(32) float turned[kMaxLatentRope];
  for (int i = row_begin; i < row_end; ++i) {
    float* out = latent_chunk(a, queries, i, chunk) + static_cast<long>(rank) * kLatentHeads;
    const long angle = static_cast<long>(a.batch.position[i]) * (dim / 2);
    for (int head = first; head < least(first + kLatentHeads, a.num_heads); ++head) {
      const float* q = a.q.row(i) + static_cast<long>(head) * (a.nope_dim + dim) + a.nope_dim;
      turn_pairs<Isa>(q, dim, a.interleaved, a.cos + angle, a.sin + angle, turned);
      for (int d = 0; d < dim; ++d) out[d * kLatentHeads + head - first] = turned[d] * a.q_scale;
    }
  }
}

// Part `part` of the queries of a chunk's heads: kAbsorbRanks values of rank, or behind those the part of rotated keys.
// Lanes of heads that the model does not have are left as they are: nobody reads what becomes of them.
template <class Isa>
LLMCTL_NOINLINE void latent_absorb(const LatentArgs& a, float* queries, int chunk, int part, int row_begin,
                                   int row_end) {
  using F = typename Isa::F;
  const int from = part * kAbsorbRanks, count = least(kAbsorbRanks, a.up.k - from), first = chunk * kLatentHeads;
  if (count <= 0) return absorb_rope<Isa>(a, queries, chunk, row_begin, row_end);
  alignas(64) float up[kMaxNopePanels * kAbsorbRanks * kPanel];
  alignas(64) float q[kMaxNopePanels * kPanel];
  for (int head = first; head < least(first + kLatentHeads, a.num_heads); ++head) {
    const int begin = head * (a.nope_dim + a.value_dim), inside = begin % kPanel;
    const int panels = (inside + a.nope_dim + kPanel - 1) / kPanel;
    for (int p = 0; p < panels; ++p) {
      unpack_inputs<Isa>(a.up, begin / kPanel + p, from, count, up + p * kAbsorbRanks * kPanel);
    }
    std::memset(q, 0, sizeof(float) * static_cast<std::size_t>(panels * kPanel));  // columns that are not this key's
    for (int i = row_begin; i < row_end; ++i) {
      const float* given = a.q.row(i) + static_cast<long>(head) * (a.nope_dim + a.rope_dim());
      std::memcpy(q + inside, given, sizeof(float) * static_cast<std::size_t>(a.nope_dim));
      float* out = latent_chunk(a, queries, i, chunk) + head - first;
      for (int r = 0; r < count; r += kLanes) {
        F acc[kLanes];
        LLMCTL_UNROLL
        for (int j = 0; j < kLanes; ++j) acc[j] = Isa::zero();
        const float* w = up + r * kPanel;
        for (int p = 0; p < panels; ++p, w += kAbsorbRanks * kPanel) {
          const F low = Isa::load(q + p * kPanel), high = Isa::load(q + p * kPanel + kLanes);
          LLMCTL_UNROLL
          for (int j = 0; j < kLanes; ++j) {
            acc[j] = Isa::fma(low, Isa::load(w + j * kPanel), acc[j]);
            acc[j] = Isa::fma(high, Isa::load(w + j * kPanel + kLanes), acc[j]);
          }
        }
        LLMCTL_UNROLL
        for (int j = 0; j < kLanes; ++j) {
          const int input = a.order == nullptr ? from + r + j : a.order[from + r + j];
          out[static_cast<long>(input) * kLatentHeads] = Isa::sum(acc[j]) * a.q_scale;
        }
      }
    }
  }
}

// `rows` rows, 1..kMost of them, times one panel.
template <class Isa, WeightKind kKind, int kMost>
LLMCTL_INLINE void project_height(int rows, const uint8_t* panel, const float* x, long stride, int rank, float* sums) {
  if constexpr (kMost > 0) {
    if (rows == kMost) {
      const Ahead ahead{panel + Ahead::kBytes, kFloatRowBytes<kKind>};
      tile_float<typename Isa::Columns, kKind, kMost, 1>(panel, 0, ahead, x, stride, rank, sums);
    } else {
      project_height<Isa, kKind, kMost - 1>(rows, panel, x, stride, rank, sums);
    }
  }
}

template <class Isa, WeightKind kKind>
LLMCTL_INLINE void project_panel(const LatentArgs& a, const uint8_t* panel, const float* x, int rows, float* sums) {
  constexpr int kMost = Isa::Columns::kFloatRows;
  project_height<Isa, kKind, kMost>(rows, panel, x, latent_row_floats(a), a.up.k, sums);
}

// Values of one head, from what attention found in the latents, to rows 0.. of the act.
template <class Isa>
LLMCTL_NOINLINE void latent_project(const LatentArgs& a, float* queries, int head, int row_begin, int row_end) {
  constexpr int kMost = Isa::Columns::kFloatRows;
  const int rank = a.up.k, begin = head * (a.nope_dim + a.value_dim) + a.nope_dim, end = begin + a.value_dim;
  const auto found = [&](int row) {
    return latent_chunk(a, queries, row, head / kLatentHeads) + static_cast<long>(head % kLatentHeads) * a.kv.width;
  };
  alignas(64) float sums[kMost * kPanel];
  alignas(64) float unpacked[kMaxHeadDim * kPanel];
  if (a.order != nullptr) {
    for (int i = row_begin; i < row_end; ++i) {
      std::memcpy(unpacked, found(i), sizeof(float) * static_cast<std::size_t>(rank));
      for (int r = 0; r < rank; ++r) found(i)[r] = unpacked[a.order[r]];
    }
  }
  for (int p = begin / kPanel; p * kPanel < end; ++p) {
    const int from = most(begin, p * kPanel), to = least(end, (p + 1) * kPanel);
    if (a.up.group != 0) {
      for (int r = 0; r < rank; r += kAbsorbRanks) unpack_inputs<Isa>(a.up, p, r, kAbsorbRanks, unpacked + r * kPanel);
    }
    for (int i = row_begin; i < row_end; i += kMost) {
      const int rows = least(kMost, row_end - i);
      const float* x = found(i);
      switch (a.up.kind) {
        case WeightKind::f32: project_panel<Isa, WeightKind::f32>(a, a.up.panel(p), x, rows, sums); break;
        case WeightKind::f16: project_panel<Isa, WeightKind::f16>(a, a.up.panel(p), x, rows, sums); break;
        case WeightKind::bf16: project_panel<Isa, WeightKind::bf16>(a, a.up.panel(p), x, rows, sums); break;
        default:
          project_panel<Isa, WeightKind::f32>(a, reinterpret_cast<const uint8_t*>(unpacked), x, rows, sums);
      }
      for (int j = 0; j < rows; ++j) {
        float* values = a.act.row(i + j) + static_cast<long>(head) * a.value_dim + from - begin;
        std::memcpy(values, sums + j * kPanel + from - p * kPanel, sizeof(float) * static_cast<std::size_t>(to - from));
      }
    }
  }
}

// Complete rows of the act to its rows from act_row on, with their forms.
template <class Isa>
LLMCTL_NOINLINE void latent_finish(const Act& act, int row_begin, int row_end, int act_row) {
  for (int i = row_begin; i < row_end; ++i) {
    if (act_row != 0) std::memcpy(act.row(act_row + i), act.row(i), sizeof(float) * static_cast<std::size_t>(act.k));
    quantize_forms<Isa>(act, act_row + i);
  }
}

}  // namespace llmctl::cpu
