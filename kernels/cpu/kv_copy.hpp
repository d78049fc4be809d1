// Copy of the first tokens of one KV block to another, in all layers and heads of the group.
#pragma once

#include <cstring>
#include <initializer_list>

#include "batch.hpp"

namespace llmctl::cpu {

struct KvCopyArgs {
  uint8_t* arena;
  long block_stride;
  int num_layers;
  int block_size;
  int num_kv_heads;
  int head_dim;
  long value_bytes;
  long scale_bytes;
  bool pairs;  // the layout of int16
};

// K is [head_dim][block_size]: `tokens` values at the head of each of its rows; V is [block_size][head_dim]: one run.
// With pairs K has half as many rows of pairs, and an odd token ends in the first values of a row of V's pairs. Each
// has its scales [block_size] behind it.
inline void kv_copy(const KvCopyArgs& a, long source, long target, long tokens) {
  if (source == target) return;
  const long row_bytes = a.block_size * a.value_bytes;
  const long values_bytes = row_bytes * a.head_dim;
  const long half_bytes = values_bytes + a.block_size * a.scale_bytes;
  const uint8_t* from = a.arena + source * a.block_stride;
  uint8_t* to = a.arena + target * a.block_stride;
  const long units = static_cast<long>(a.num_layers) * a.num_kv_heads;
  if (tokens == a.block_size) {
    std::memcpy(to, from, static_cast<std::size_t>(2 * half_bytes * units));
    return;
  }
  for (long unit = 0; unit < units; ++unit, from += 2 * half_bytes, to += 2 * half_bytes) {
    const long together = a.pairs ? 2 : 1, key_row = together * row_bytes, whole = tokens / together * together;
    for (long d = 0; d < a.head_dim / together; ++d) {
      std::memcpy(to + d * key_row, from + d * key_row, static_cast<std::size_t>(tokens * together * a.value_bytes));
    }
    const long whole_bytes = whole * a.head_dim * a.value_bytes;
    std::memcpy(to + half_bytes, from + half_bytes, static_cast<std::size_t>(whole_bytes));
    for (long d = 0; whole < tokens && d < a.head_dim; ++d) {
      const long at = half_bytes + whole_bytes + d * together * a.value_bytes;
      std::memcpy(to + at, from + at, static_cast<std::size_t>(a.value_bytes));
    }
    for (const long scales : {values_bytes, half_bytes + values_bytes}) {
      std::memcpy(to + scales, from + scales, static_cast<std::size_t>(tokens * a.scale_bytes));
    }
  }
}

}  // namespace llmctl::cpu
