// The step's record and every buffer view that kernels take: addresses and sizes, resolved when an op is built.
//
// These mirror the records of kernels/ops.py. All memory is Python's; nothing here owns anything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmctl::cpu {

constexpr int kPanel = 16;             // outputs per packed panel
constexpr int kPrivateRows = 2;        // PRIVATE_ROWS of kernels/ops.py
constexpr int kAttendSplit = 128;      // ATTEND_SPLIT of kernels/ops.py
constexpr int kMaxForms = 6;           // quantized forms of one Act
constexpr int kMaxOrderedGroup = 128;  // largest group of a form with an order
constexpr int kMaxHeadDim = 512;
constexpr int kLatentHeads = 16;       // query heads that are lanes together
constexpr int kMaxLatentRope = 128;
constexpr int kMaxLatentWidth = kMaxHeadDim + kMaxLatentRope;
constexpr int kMaxNope = 256;
constexpr int kMaxInt8Group = 8192;  // 8192 x 128 x 2047 is just below 2^31
constexpr int kInt16Group = 32;      // 32 x 8192 x 8191 too

enum Count : int { kRows = 0, kSeqs = 1, kLogitRows = 2, kLargestOnly = 3 };  // indices into Batch::counts

struct Batch {
  const int32_t* counts;
  const int32_t* token;       // [max_rows]
  const int32_t* position;    // [max_rows]
  const int32_t* slot;        // [max_rows]
  const int32_t* seq_first;   // [max_seqs]
  const int32_t* seq_rows;    // [max_seqs]
  const int32_t* logit_rows;  // [max_logit_rows]
};

// A float32 matrix of `count` row buffers; `stride` floats from one row to the next.
struct Rows {
  float* data;
  long stride;
  long count;
  float* row(long i) const { return data + i * stride; }
};

enum class WeightKind : int { f32, f16, bf16, int16, int8, int4, int4_min, int4_int };
constexpr int kWeightKinds = 8;

// A [n, k] weight in panels of 16 outputs; the layout of a panel is in linear_float.hpp and linear_int.hpp.
struct Weight {
  WeightKind kind;
  int group;  // 0 for the float kinds
  int n;
  int k;
  int panels;
  long panel_bytes;
  const uint8_t* data;
  const uint8_t* panel(long p) const { return data + p * panel_bytes; }
};

// By the bits of a code.
enum class FormKind : int { i8, i12, i14 };

constexpr FormKind form_kind(WeightKind kind) {
  return kind == WeightKind::int16 ? FormKind::i14 : kind == WeightKind::int8 ? FormKind::i12 : FormKind::i8;
}

// Bytes of the scales of an int16 panel, which stand before its codes: whole cache lines.
constexpr long int16_scales(int k) { return (static_cast<long>(k) / kInt16Group * kPanel + 63) / 64 * 64; }

// Activations quantized per row and group: codes [rows, k], scales and sums [rows, k / group].
// Code j is of value order[j] of the row, of value j if `order` is null.
//
// A group of i8 may have one wide quad, four codes of 12 bits that begin at 4 * wide[group]: code = 16 high + low, where
// low in [-8, 7] is among the codes and high is one of four bytes in `high` [rows, k / group]. Sums are of whole codes.
constexpr uint8_t kNoQuad = 255;
constexpr float kWideTop = 2032.0f;  // 16 * 127

struct Form {
  FormKind kind;
  int group;
  const int32_t* order;  // [k]
  const uint8_t* wide;   // [k / group], kNoQuad where a group has none; null if none has
  void* codes;  // int8; of more than 8 bits int16
  float* scales;
  int32_t* sums;
  int32_t* high;
};

struct Act {
  int k;
  int max_rows;
  int private_threads;  // how many threads have private rows behind max_rows
  float* values;        // [max_rows + kPrivateRows * private_threads, k]
  int num_forms;
  Form forms[kMaxForms];
  float* row(long i) const { return values + i * k; }
};

enum class KvKind : int { f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, int16 };
constexpr int kKvKinds = 7;

// Bytes of a value, and of the scale of a token's K or V in one head.
constexpr long kv_value_bytes(KvKind kind) {
  return kind == KvKind::f32 ? 4 : kind == KvKind::f16 || kind == KvKind::bf16 || kind == KvKind::int16 ? 2 : 1;
}
constexpr long kv_scale_bytes(KvKind kind) { return kind == KvKind::int8 || kind == KvKind::int16 ? 2 : 0; }

// One layer of a paged KV arena, and the block table of its group: int32 [max_slots, max_blocks].
// In a block, from layer_offset on, per KV head: K [head_dim][block_size], then V [block_size][head_dim], each followed
// by its scales, bfloat16 [block_size], if the kind has any. int16 has two consecutive dimensions of K and two
// consecutive positions of V side by side: K [head_dim / 2][block_size][2], V [block_size / 2][head_dim][2].
struct Kv {
  KvKind kind;
  uint8_t* arena;
  long block_stride;
  long layer_offset;
  int block_size;
  int num_kv_heads;
  int head_dim;
  const int32_t* table;
  long max_blocks;
  const float* scales;  // [2][num_kv_heads], of K and of V: what is stored is the value divided by it; null: 1

  float key_scale(int head) const { return scales == nullptr ? 1.0f : scales[head]; }
  float value_scale(int head) const { return scales == nullptr ? 1.0f : scales[num_kv_heads + head]; }
  long values_bytes() const { return kv_value_bytes(kind) * block_size * head_dim; }
  // K or V of one head in one block, with its scales
  long half_bytes() const { return values_bytes() + kv_scale_bytes(kind) * block_size; }
  uint8_t* head(long block, int h) const { return arena + block * block_stride + layer_offset + 2 * half_bytes() * h; }
};

// One layer of latents in a paged arena: per block rows [block_size][width] of a float kind, one for each token.
struct Latents {
  KvKind kind;
  uint8_t* arena;
  long block_stride;
  long layer_offset;
  int block_size;
  int width;
  const int32_t* table;
  long max_blocks;

  uint8_t* row(long block, int offset) const {
    return arena + block * block_stride + layer_offset + kv_value_bytes(kind) * offset * width;
  }
};

// KeySteering of kernels/ops.py: null without one. For each KV head the pairs in order of rounding [head_dim / 2], and
// what an error of each does to the pairs behind it [head_dim / 2][4][width]. Also null where there are none: levels of
// the pairs [head_dim / 2] and the centre [head_dim].
struct Steering {
  const int32_t* order;
  const float* follow;
  const float* level;
  const float* centre;

  static constexpr int width(int head_dim) { return (head_dim / 2 + 7) / 8 * 8; }
};

}  // namespace llmctl::cpu
