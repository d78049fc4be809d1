// Attention over a paged KV cache: prefill, decode and everything between are one kernel, `attend`, and `attend_merge`
// joins the parts of a context that was split.
//
// The query heads that share a KV head are packed with the queries into the rows of a tile (row = query * group + head),
// so that K and V are read once for all of them. Warps divide a tile's rows (kWarpsM) and the tokens of each step
// (kWarpsN): prefill takes 4 x 1, decode 1 x 4, and twice as many where they divide dimensions too (kWarpsOverDims).
// Online softmax as in FlashAttention-2 (Dao, 2023), split context as in Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
//
// Bits: tokens are taken in steps whose ends are fixed multiples of kTile, parts end at fixed positions and are merged in
// order, and a row never looks at another. So for one instantiation and one split the result depends neither on how
// many queries, rows or sequences there are nor on the block size.
//
// What costs nothing as an argument is one, so that there are few specializations: the type of queries and outputs, the
// size of blocks, window and sinks.
//
// Layout of the cache: a block of `block_stride` bytes holds, `layer_offset` bytes in, for each KV head K [tokens]
// [kHeadDim], the scales of K, V likewise, and its scales (bfloat16 [tokens], int8 only). 16 bytes aligned.
#pragma once

#include "fragments.cuh"

namespace llmctl::cuda {

constexpr int kUnit = 16;  // tokens of the smallest block; all have a power of two of them
constexpr int kFloatAct = 0, kHalfAct = 1;  // what queries and outputs are; 2: Bf16

// What one block of threads computes: rows tile * kRows ... of the sequence's packed rows, over tokens begin ... end.
// `begin` is a multiple of kTile.
struct alignas(16) AttendWork {
  int32_t slot;            // which block table
  int32_t first_row;       // of q and out: the sequence's first query
  int32_t queries;         // how many it has
  int32_t first_position;  // of its first query
  int32_t tile;
  int32_t begin, end;
  int32_t partial;  // where the part goes, -1: it is the whole, and goes to out
};

// A tile whose context was split: parts first ... first + count.
struct alignas(16) MergeWork {
  int32_t first_row, queries, tile, first, count, reserved[3];
};

constexpr float kLowest = -1e30f;  // below every score; finite, so that it can be subtracted from itself
constexpr float kLog2e = 1.4426950408889634f;

// 2^x as the rest of the arithmetic deserves.
template <bool kExact>
LLMCTL_DEVICE float exp2_of(float x) {
  if constexpr (kExact) return exp2_exact(x);
  return exp2_fast(x);
}

// tanh to about an ulp of 1, and of x where x is small.
template <bool kExact>
LLMCTL_DEVICE float tanh_of(float x) {
  const float a = fabsf(x) > 20.0f ? 20.0f : fabsf(x);
  if (a < 0.5f) {
    // An odd polynomial through the series' terms up to x^13.
    const float s = x * x;
    float p = 3.5921280365724810e-3f;
    p = fmaf(p, s, -8.8632355299021970e-3f);
    p = fmaf(p, s, 2.1869488536155203e-2f);
    p = fmaf(p, s, -5.3968253968253970e-2f);
    p = fmaf(p, s, 1.3333333333333333e-1f);
    p = fmaf(p, s, -3.3333333333333333e-1f);
    return fmaf(p * s, x, x);
  }
  const float e = exp2_of<kExact>(2.0f * kLog2e * a);
  const float y = 1.0f - 2.0f / (e + 1.0f);
  return x < 0 ? -y : y;
}

// Float32 is multiplied in parts, with which the sums of wide heads would not stay in registers: two warps have the same
// rows and tokens, both make the weights, and each sums half of the dimensions.
template <class Mma, int kHeadDim>
constexpr int kWarpsOverDims = kSame<Mma, Fp32> && kHeadDim > 160 ? 2 : 1;

template <class Mma, class Kv, int kHeadDim, int kWarpsM, int kWarpsN, int kTile, int kStages, bool kFineWeights,
          bool kSoftCap>
struct AttendShape {
  static constexpr bool kExact = kSame<Mma, Fp32>;
  static constexpr int kWarpsD = kWarpsOverDims<Mma, kHeadDim>;
  static constexpr int kWarpDims = kHeadDim / kWarpsD;
  static constexpr int kRows = 16 * kWarpsM;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kWarpsD;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Kv));
  static constexpr int kChunks = kRowBytes / 16;  // of 16 bytes, per row of K or V
  // K is read 4 lanes to a row and 16 bytes a lane where the row divides so; V by ldmatrix, eight rows at once.
  static constexpr int kLaneBytes = kRowBytes % 64 == 0 ? 16 : kRowBytes % 32 == 0 ? 8 : 4;
  static constexpr int kLaneSteps = kLaneBytes / static_cast<int>(sizeof(Kv)) / 4;
  static constexpr bool kSwizzle = kChunks % 8 == 0;  // else rows differ in their banks anyway
  static constexpr int kVStride = kRowBytes + (kChunks % 2 == 0 ? 16 : 0);
  static constexpr bool kScaled = kSame<Kv, Int8>;
  // Weights to twice the bits of what the tensor cores multiply, in two products.
  static constexpr bool kFine = kFineWeights && kIs16<Mma>;
  static constexpr int kScaleBytes = kScaled ? kTile * 2 : 0;
  static constexpr int kStageBytes = kTile * (kRowBytes + kVStride) + 2 * kScaleBytes;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kWarpTokens = kTile / kWarpsN;
  // The parts of float32 would be kept with what is in registers.
  static constexpr bool kQueriesShared = kSteps * static_cast<int>(sizeof(OperandA<Mma>)) > (kExact ? 64 : 128);
  static constexpr int kQueryBytes = kQueriesShared ? kWarpsM * kSteps * 32 * static_cast<int>(sizeof(OperandA<Mma>)) : 0;
  // Rounded weights are summed as the tensor cores multiply with them, and by them, so that their errors largely cancel.
  static constexpr bool kSumsByMma = kIs16<Mma> && !kScaled && !kFine;
  // Queries of another type need a scale of their own to stay within the range of Half.
  static constexpr bool kQueryUnit = kSame<Mma, Half>;
  // Copies of one step that a thread starts. In a regular shape they are kRowsAtOnce rows apart, so that all but the block
  // is known when compiling.
  static constexpr int kPasses = (kTile * kChunks + kThreads - 1) / kThreads;
  static constexpr int kRowsAtOnce = kThreads >= kChunks ? kThreads / kChunks : 1;
  static constexpr bool kRegular = kThreads % kChunks == 0 && kTile % kRowsAtOnce == 0 &&
                                   (kUnit % kRowsAtOnce == 0 || kRowsAtOnce % kUnit == 0);
  // Their blocks are known a step ahead, one for so many rows.
  static constexpr int kIdRows = kRegular && kRowsAtOnce > kUnit ? kRowsAtOnce : kUnit;
  static constexpr int kIds = kTile / kIdRows;
  static constexpr int kIdsAhead = kStages - 1;
  static constexpr int kOutStride = kHeadDim + 8;
  static constexpr int kTokenBytes = kRowBytes + (kScaled ? 2 : 0);
  static_assert(kHeadDim % 32 == 0 && kRowBytes % 16 == 0 && kChunks % (2 * kWarpsD) == 0);
  static_assert(kWarpTokens % 16 == 0 && kTile % 16 == 0);
  static_assert(kStages >= 2);
};

// Which blocks a thread's copies of one step come from: one of every kIdRows rows.
template <class S>
struct StepBlocks {
  int32_t id[S::kIds];

  LLMCTL_DEVICE int32_t of_row(int row) const {
    int32_t found = id[0];
#pragma unroll
    for (int i = 1; i < S::kIds; ++i) found = row >= i * S::kIdRows ? id[i] : found;
    return found;
  }
};

// Of the step from token `first` on. Where no token lies in begin ... end there is no block.
template <class S>
LLMCTL_DEVICE void find_step(StepBlocks<S>& blocks, const int32_t* table, int block_bits, int first, int begin,
                             int end) {
  // A unit of tokens lies in one block. Where more rows are copied at once, a thread's are as many units apart.
  const int unit = S::kIdRows > kUnit ? static_cast<int>(threadIdx.x) / S::kChunks / kUnit * kUnit : 0;
#pragma unroll
  for (int i = 0; i < S::kIds; ++i) {
    const int token = first + unit + i * S::kIdRows;
    blocks.id[i] = token + kUnit > begin && token < end ? table[token >> block_bits] : 0;
  }
}

// Starts copying one step's K, V and scales. What is not of begin ... end becomes zeros, so that a weight of 0 can be
// multiplied with them.
template <class S, int kTile>
LLMCTL_DEVICE void load_step(unsigned char* stage, const uint8_t* head, uint32_t block_stride,
                             const StepBlocks<S>& blocks, const int32_t* table, int block_bits, int first, int begin,
                             int end) {
  const int within = (1 << block_bits) - 1, half_bytes = S::kTokenBytes << block_bits;
  if constexpr (S::kScaled) {
    unsigned char* scales = stage + kTile * (S::kRowBytes + S::kVStride);
    for (int i = threadIdx.x; i < kTile; i += S::kThreads) {
      // Two tokens at once; a pair is never in two blocks, and one beyond the end is masked by its score.
      const int row = i / 2 * 2, half = i % 2, token = first + row;
      const bool valid = token + 1 >= begin && token < end;
      const uint8_t* k = head;
      if (valid) {
        k += static_cast<uint64_t>(static_cast<uint32_t>(table[token >> block_bits])) * block_stride +
             ((token & within) * 2 + (S::kRowBytes << block_bits));
      }
      copy_4(scales + half * S::kScaleBytes + row * 2, k + (valid ? half * half_bytes : 0), valid);
    }
  }
  if (S::kRegular && first >= begin && first + kTile <= end) {
    const int row = threadIdx.x / S::kChunks, chunk = threadIdx.x % S::kChunks;
    const uint8_t* from = head + (row % kUnit * S::kRowBytes + chunk * 16);
    const int unit = first + (S::kRowsAtOnce > kUnit ? row / kUnit * kUnit : 0);
    unsigned char* k_to = stage + row * S::kRowBytes + (S::kSwizzle ? chunk ^ (row & 1) << 2 : chunk) * 16;
    unsigned char* v_to = stage + kTile * S::kRowBytes + row * S::kVStride + chunk * 16;
#pragma unroll
    for (int pass = 0; pass < S::kPasses; ++pass) {
      const int ahead = pass * S::kRowsAtOnce;
      const uint32_t id = static_cast<uint32_t>(blocks.id[ahead / S::kIdRows]);
      const uint8_t* k = from + static_cast<uint64_t>(id) * block_stride +
                         ((unit + ahead / kUnit * kUnit) & within) * S::kRowBytes;
      const int flipped = S::kSwizzle && ahead % 2 == 1 ? 1 : 0;  // the row's parity is not that of the first pass
      unsigned char* to = flipped ? stage + row * S::kRowBytes + (chunk ^ (~row & 1) << 2) * 16 : k_to;
      copy_16(to + ahead * S::kRowBytes, k + ahead % kUnit * S::kRowBytes);
      copy_16(v_to + ahead * S::kVStride, k + half_bytes + ahead % kUnit * S::kRowBytes);
    }
    return;
  }
  // Not unrolled far: every copy's places would be kept in registers from step to step.
#pragma unroll S::kRegular ? 1 : 4
  for (int i = threadIdx.x; i < kTile * S::kChunks; i += S::kThreads) {
    const int row = i / S::kChunks, chunk = i % S::kChunks, token = first + row;
    const bool valid = token >= begin && token < end;
    const uint8_t* k = head;
    if (valid) {
      k += static_cast<uint64_t>(static_cast<uint32_t>(blocks.of_row(row))) * block_stride +
           ((token & within) * S::kRowBytes + chunk * 16);
    }
    const int placed = S::kSwizzle ? chunk ^ (row & 1) << 2 : chunk;
    copy_16(stage + row * S::kRowBytes + placed * 16, k, valid);
    copy_16(stage + kTile * S::kRowBytes + row * S::kVStride + chunk * 16, k + (valid ? half_bytes : 0), valid);
  }
}

// Values over weights of four dimensions of one row, to which a sink, if there are any, adds its own, times what V was
// divided by.
template <bool kExact>
LLMCTL_DEVICE void finish_values(float (&v)[4], float top, float weights, const float* sinks, int head,
                                 float value_scale) {
  if (sinks != nullptr) {
    const float sink = sinks[head] * kLog2e, most = fmaxf(top, sink);
    const float share = exp2_of<kExact>(top - most);
    weights = fmaf(weights, share, exp2_of<kExact>(sink - most));
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= share;
  }
  const float inverse = 1.0f / weights;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = v[i] * inverse * value_scale;
}

template <class Act>
LLMCTL_DEVICE void store_four(Act* to, const float (&v)[4]) {
  if constexpr (sizeof(Act) == 4) {
    store_vec(to, Vec4{{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])}});
  } else {
    store_vec(to, Vec2{{pack_pair<Act>(v[0], v[1]), pack_pair<Act>(v[2], v[3])}});
  }
}

// Writes four finished values at place `at` of `out`.
LLMCTL_DEVICE void finish_row(void* out, int act, int64_t at, float (&v)[4], float top, float weights,
                              const float* sinks, int head, float value_scale) {
  if (act == kFloatAct) {
    finish_values<true>(v, top, weights, sinks, head, value_scale);
    store_four(static_cast<float*>(out) + at, v);
    return;
  }
  finish_values<false>(v, top, weights, sinks, head, value_scale);
  if (act == kHalfAct) store_four(static_cast<Half*>(out) + at, v);
  if constexpr (kHasBf16) {
    if (act != kHalfAct) store_four(static_cast<Bf16*>(out) + at, v);
  }
}

// Weights of 16 rows and 16 tokens, and if kFine what rounding them to Mma has left over.
template <class Mma, bool kFine>
struct Weights {
  OperandA<Mma> whole, rest;

  LLMCTL_DEVICE Weights(const float (&row_g)[4], const float (&row_g8)[4]) {
    whole = operand_a<Mma>(row_g, row_g8);
    if constexpr (kFine) {
      float rest_g[4], rest_g8[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Registers 0 and 2 are of row g, 1 and 3 of row g + 8, two values in each.
        const uint32_t g = whole.r[i / 2 * 2], g8 = whole.r[i / 2 * 2 + 1];
        rest_g[i] = row_g[i] - (i % 2 ? high_of<Mma>(g) : low_of<Mma>(g));
        rest_g8[i] = row_g8[i] - (i % 2 ? high_of<Mma>(g8) : low_of<Mma>(g8));
      }
      rest = operand_a<Mma>(rest_g, rest_g8);
    }
  }

  LLMCTL_DEVICE void multiply_add(float (&d)[4], const OperandB<Mma>& values) const {
    if constexpr (kFine) cuda::multiply_add<Mma>(d, rest, values);
    cuda::multiply_add<Mma>(d, whole, values);
  }
};

// grid: (work items that could be, KV heads). Blocks beyond *num_work do nothing, so that a recorded grid serves any step.
//   out, q       [rows, heads * kHeadDim] of `act` (kFloatAct ...), strides in elements
//   part_values  float32 [parts, KV heads, kRows, kHeadDim]: sums of weight * V
//   part_scales  float32 [parts, KV heads, kRows, 2]: largest score (in log2) and sum of weights
//   sinks        float32 [heads]: one more score for every row, whose value is 0; null: none
//   block_bits   a block has 1 << block_bits tokens, at least kUnit
//   window       tokens that a query sees, itself included; 0: all
//   soft_cap     of kSoftCap: scores become soft_cap * tanh(score / soft_cap)
//   value_scales float32 [KV heads]: what V was divided by before it was stored; null: 1
template <class Mma, class Kv, int kHeadDim, int kWarpsM, int kWarpsN, int kTile, int kStages, bool kFineWeights,
          bool kSoftCap>
__global__ void LLMCTL_THREADS((32 * kWarpsM * kWarpsN * kWarpsOverDims<Mma, kHeadDim>))
    attend(void* out, float* part_values, float* part_scales, const void* q, const uint8_t* arena,
           const int32_t* tables, const AttendWork* work, const int32_t* num_work, const float* sinks,
           int64_t block_stride, int64_t layer_offset, int max_blocks, int q_stride, int out_stride, int group,
           int window, float scale, float soft_cap, const float* value_scales, int act, int block_bits) {
  using S = AttendShape<Mma, Kv, kHeadDim, kWarpsM, kWarpsN, kTile, kStages, kFineWeights, kSoftCap>;
  if (static_cast<int>(blockIdx.x) >= num_work[0]) return;
  const AttendWork item = work[blockIdx.x];
  const int kv_head = blockIdx.y, kv_heads = gridDim.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp % kWarpsM, warp_n = warp / kWarpsM % kWarpsN;
  const int first_dim = warp / (kWarpsM * kWarpsN) * S::kWarpDims;  // of those that this warp sums
  unsigned char* stages = dynamic_shared() + S::kQueryBytes;
  auto* shared_queries = reinterpret_cast<OperandA<Mma>*>(dynamic_shared());

  // This lane's two rows: g and g + 8 of its warp's 16. One that does not exist has a query of zeros, and sees what the
  // next query would.
  int position[2];
  bool exists[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = item.tile * S::kRows + warp_m * 16 + g + 8 * half;
    exists[half] = row < item.queries * group;
    position[half] = item.first_position + row / group;
  }
  const int first_query = item.tile * S::kRows / group;
  // The first token that a query sees is this far behind it, or before all of them.
  const int behind = window > 0 ? window - 1 : 0x3fffffff;
  // Tokens that every row of the tile sees.
  const int seen_by_all = item.first_position + (item.tile * S::kRows + S::kRows - 1) / group - behind;
  const int seen_by_all_end = min(item.end, item.first_position + first_query + 1);
  const int first_needed = max(0, item.first_position + first_query - behind);
  const uint8_t* head = arena + layer_offset + (static_cast<int64_t>(kv_head) * (2 * S::kTokenBytes) << block_bits);
  const int32_t* table = tables + static_cast<int64_t>(item.slot) * max_blocks;
  StepBlocks<S> blocks[S::kIdsAhead];
  const auto find = [&](StepBlocks<S>& to, int step) {
    find_step<S>(to, table, block_bits, item.begin + step * kTile, first_needed, item.end);
  };
  const auto start_step = [&](const StepBlocks<S>& from, int step, int slot) {
    const int first = item.begin + step * kTile;
    if (first < item.end) {
      load_step<S, kTile>(stages + slot * S::kStageBytes, head, static_cast<uint32_t>(block_stride), from, table,
                          block_bits, first, first_needed, item.end);
    }
    copy_commit();
  };
  // All blocks are looked up before the first copy: a load behind a copy would wait for the one before.
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < S::kIdsAhead) find(blocks[step < S::kIdsAhead ? step : 0], step);
  }
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step >= S::kIdsAhead) find(blocks[0], step);
    start_step(blocks[step < S::kIdsAhead ? step : 0], step, step);
  }
  find(blocks[0], kStages - 1);

  const auto load_query = [&](float (&values)[2][4], int step) {
    // Step (chunk, u) takes values u of lane t's share of the chunk, as K's loads below do.
    const int dim = step / S::kLaneSteps * S::kLaneSteps * 16 + t * S::kLaneSteps * 4 + step % S::kLaneSteps * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.tile * S::kRows + warp_m * 16 + g + 8 * half;
      const int64_t at = static_cast<int64_t>(item.first_row + row / group) * q_stride +
                         (kv_head * group + row % group) * kHeadDim + dim;
      if (act == kFloatAct) {
        const Vec4 raw = exists[half] ? load_vec<Vec4>(static_cast<const float*>(q) + at) : Vec4{};
#pragma unroll
        for (int i = 0; i < 4; ++i) values[half][i] = float_of(raw.w[i]);
      } else {
        const Vec2 raw = exists[half] ? load_vec<Vec2>(static_cast<const uint16_t*>(q) + at) : Vec2{};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values[half][2 * i] = act == kHalfAct ? low_of<Half>(raw.w[i]) : low_of<Bf16>(raw.w[i]);
          values[half][2 * i + 1] = act == kHalfAct ? high_of<Half>(raw.w[i]) : high_of<Bf16>(raw.w[i]);
        }
      }
    }
  };
  // What a row's scores are multiplied with; its query is divided by the power of two below its largest value if that
  // is needed to hold it.
  float unit_of_query[2] = {1, 1}, query_factor[2] = {1, 1};
  if (S::kQueryUnit && act != kHalfAct) {
    float most[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      float values[2][4];
      load_query(values, step);
#pragma unroll
      for (int i = 0; i < 8; ++i) most[i / 4] = fmaxf(most[i / 4], fabsf(values[i / 4][i % 4]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t power = bits_of(max_lanes<4>(most[half])) & 0x7f800000u;
      unit_of_query[half] = float_of(min(max(power, 0x00800000u), 0x7e800000u));
      query_factor[half] = 1.0f / unit_of_query[half];
    }
  }
  float per_score[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    per_score[half] = unit_of_query[half] * scale;
    per_score[half] = kSoftCap ? per_score[half] / soft_cap : per_score[half] * kLog2e;
  }
  OperandA<Mma> queries[S::kQueriesShared ? 1 : S::kSteps];
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    float values[2][4];
    load_query(values, step);
    if constexpr (S::kQueryUnit) {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i / 4][i % 4] *= query_factor[i / 4];
    }
    const OperandA<Mma> a = operand_a<Mma>(values[0], values[1]);
    if constexpr (S::kQueriesShared) {
      if (warp_n == 0 && first_dim == 0) shared_queries[(warp_m * S::kSteps + step) * 32 + lane] = a;
    } else {
      queries[step] = a;
    }
  }

  float acc[S::kWarpDims / 8][4];
#pragma unroll
  for (int n = 0; n < S::kWarpDims / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
  }
  float largest[2] = {kLowest, kLowest}, sum[2] = {0, 0};
  float sum_by_mma[4] = {0, 0, 0, 0};  // of rows g, g, g + 8, g + 8: columns are alike
  // int8: weights are divided by the largest scale of V that the row has seen, a power of two, to stay within float16.
  float unit[2] = {1.17549435e-38f, 1.17549435e-38f};

  const int steps = (item.end - item.begin + kTile - 1) / kTile;
  int slot = 0;
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    start_step(blocks[0], step + kStages - 1, slot == 0 ? kStages - 1 : slot - 1);
    find(blocks[0], step + kStages);
    const unsigned char* stage = stages + slot * S::kStageBytes;
    slot = slot == kStages - 1 ? 0 : slot + 1;
    const unsigned char* values = stage + kTile * S::kRowBytes;
    const Bf16* key_scales = reinterpret_cast<const Bf16*>(values + kTile * S::kVStride);
    const int warp_first = warp_n * S::kWarpTokens;
    constexpr int kColumns = S::kWarpTokens / 8;

    float score[kColumns][4];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
    }
    const auto query = [&](int index) {
      return S::kQueriesShared ? shared_queries[(warp_m * S::kSteps + index) * 32 + lane]
                               : queries[S::kQueriesShared ? 0 : index];
    };
    const auto load_keys = [&](uint32_t (&words)[S::kLaneBytes / 4], int chunk, int n) {
      const int row = warp_first + n * 8 + g;
      int offset = chunk * 4 * S::kLaneBytes + t * S::kLaneBytes;
      if constexpr (S::kSwizzle) offset ^= (row & 1) << 6;
      const unsigned char* from = stage + row * S::kRowBytes + offset;
      if constexpr (S::kLaneBytes == 16) {
        const Vec4 raw = load_vec<Vec4>(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = raw.w[i];
      } else if constexpr (S::kLaneBytes == 8) {
        const Vec2 raw = load_vec<Vec2>(from);
        words[0] = raw.w[0];
        words[1] = raw.w[1];
      } else {
        words[0] = load_vec<uint32_t>(from);
      }
    };
    const auto add_product = [&](int chunk, int n, int u, const OperandA<Mma>& a,
                                 const uint32_t (&words)[S::kLaneBytes / 4]) {
      OperandB<Mma> b = expand_words<Mma, Kv>(words + u * sizeof(Kv));
      if (chunk == 0 && u == 0 && t == 0) show_mark<Mma, Kv>(b, words[0]);
      multiply_add<Mma>(score[n], a, b);
    };
#pragma unroll
    for (int chunk = 0; chunk < S::kSteps / S::kLaneSteps; ++chunk) {
      if constexpr (S::kExact) {
        // An operand of float32 takes 16 registers, twice those of its step's keys: so one at a time.
        uint32_t words[kColumns][S::kLaneBytes / 4];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) load_keys(words[n], chunk, n);
#pragma unroll
        for (int u = 0; u < S::kLaneSteps; ++u) {
          const OperandA<Mma> a = query(chunk * S::kLaneSteps + u);
#pragma unroll
          for (int n = 0; n < kColumns; ++n) add_product(chunk, n, u, a, words[n]);
        }
      } else {
        OperandA<Mma> a[S::kLaneSteps];
#pragma unroll
        for (int u = 0; u < S::kLaneSteps; ++u) a[u] = query(chunk * S::kLaneSteps + u);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          uint32_t words[S::kLaneBytes / 4];
          load_keys(words, chunk, n);
#pragma unroll
          for (int u = 0; u < S::kLaneSteps; ++u) add_product(chunk, n, u, a[u], words);
        }
      }
    }

    // Scores, masked ones -inf, and the row's largest. Element i is of row i / 2 and token 2t + i % 2. Times `per` they
    // are in log2.
    const int first = item.begin + step * kTile + warp_first;
    float per[2], most[2] = {-infinity(), -infinity()}, most_unit[2] = {unit[0], unit[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) per[half] = kSoftCap ? kLog2e : per_score[half];
    if constexpr (S::kScaled || kSoftCap) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = score[n][i];
          if constexpr (S::kScaled) x *= to_float(key_scales[warp_first + n * 8 + 2 * t + i % 2]);
          if constexpr (kSoftCap) x = soft_cap * tanh_of<S::kExact>(x * per_score[i / 2]);
          score[n][i] = x;
        }
      }
    }
    const bool all_visible = first >= seen_by_all && first + S::kWarpTokens <= seen_by_all_end;
    if (!all_visible) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i / 2, token = first + n * 8 + 2 * t + i % 2;
          const bool visible = token <= position[half] && token < item.end && token >= position[half] - behind;
          score[n][i] = visible ? score[n][i] : -infinity();
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        most[i / 2] = fmaxf(most[i / 2], score[n][i]);
        if constexpr (S::kScaled) {
          const float v = to_float(key_scales[kTile + warp_first + n * 8 + 2 * t + i % 2]);
          most_unit[i / 2] = score[n][i] == -infinity() ? most_unit[i / 2] : fmaxf(most_unit[i / 2], v);
        }
      }
    }
    float shrink[2], per_unit[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = fmaxf(largest[half], max_lanes<4>(most[half]) * per[half]);
      shrink[half] = exp2_of<S::kExact>(largest[half] - top);
      largest[half] = top;
      sum[half] *= shrink[half];
      per_unit[half] = 1;
      if constexpr (S::kScaled) {
        // Up to the next power of two.
        const float up = float_of((bits_of(max_lanes<4>(most_unit[half])) + 0x7fffffu) & 0xff800000u);
        shrink[half] *= unit[half] / up;
        unit[half] = up;
        per_unit[half] = 1.0f / up;
      }
    }
    // A product with 1 changes nothing, so whether it is left out does not either.
    if (__any_sync(kAllLanes, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < S::kWarpDims / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= shrink[i / 2];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum_by_mma[i] *= shrink[i / 2];
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        float weight = exp2_of<S::kExact>(fmaf(score[n][i], per[half], -largest[half]));
        if constexpr (!S::kSumsByMma) sum[half] += weight;
        if constexpr (S::kScaled) {
          // A masked token's scale may be anything.
          const float v = to_float(key_scales[kTile + warp_first + n * 8 + 2 * t + i % 2]) * per_unit[half];
          weight = weight == 0 ? 0 : weight * v;
        }
        score[n][i] = weight;
      }
    }

    // Sums of weight * V, 16 tokens at a time.
#pragma unroll
    for (int j = 0; j < S::kWarpTokens / 16; ++j) {
      const float(&even)[4] = score[2 * j];
      const float(&odd)[4] = score[2 * j + 1];
      const float row_g[4] = {even[0], even[1], odd[0], odd[1]}, row_g8[4] = {even[2], even[3], odd[2], odd[3]};
      const Weights<Mma, S::kFine> a(row_g, row_g8);
      if constexpr (S::kSumsByMma) {
        constexpr uint32_t kOnes[2] = {kOnePair<Mma>, kOnePair<Mma>};
        mma_16<Mma>(sum_by_mma, a.whole.r, kOnes);
      }
      const unsigned char* tokens =
          values + (warp_first + 16 * j) * S::kVStride + first_dim * static_cast<int>(sizeof(Kv));
      if constexpr (sizeof(Kv) == 4) {
#pragma unroll
        for (int n = 0; n < S::kWarpDims / 8; ++n) {
          OperandB<Mma> b;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            b.r[i] = load_vec<uint32_t>(tokens + (2 * t + i % 2 + i / 2 * 8) * S::kVStride + (n * 8 + g) * 4);
          }
          a.multiply_add(acc[n], b);
        }
      } else {
#pragma unroll
        for (int pair = 0; pair < S::kChunks / S::kWarpsD / 2; ++pair) {
          // Two columns of 16 bytes, and of each the first 8 tokens, then the last 8.
          uint32_t raw[4];
          load_matrices<true>(raw, tokens + (lane / 8 % 2 * 8 + lane % 8) * S::kVStride + (2 * pair + lane / 16) * 16);
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            const uint32_t low = raw[2 * column], high = raw[2 * column + 1];
            if constexpr (sizeof(Kv) == 2) {
              OperandB<Mma> b;
              b.r[0] = low;
              b.r[1] = high;
              a.multiply_add(acc[2 * pair + column], b);
            } else {
              // Two dimensions lie side by side in what ldmatrix takes for one: they make two tiles of columns.
              const int n = 4 * pair + 2 * column;
              a.multiply_add(acc[n], expand<Mma, Kv>(pick_bytes(low, high, 0x6420)));
              a.multiply_add(acc[n + 1], expand<Mma, Kv>(pick_bytes(low, high, 0x7531)));
            }
          }
        }
      }
    }
  }
  copy_wait<0>();
  __syncthreads();

  // The warps' parts to shared memory, in place of the stages, and from there in order to where they go.
  float* parts = reinterpret_cast<float*>(stages);
  float* scales = parts + kWarpsN * S::kRows * S::kOutStride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_n * S::kRows + warp_m * 16 + g + 8 * half;
    const float total = S::kSumsByMma ? sum_by_mma[2 * half] : sum_lanes<4>(sum[half]);
    if (t == 0 && first_dim == 0) {
      scales[2 * row] = largest[half];
      scales[2 * row + 1] = total;
    }
    const float factor = S::kScaled ? unit[half] : 1.0f;
    float* to = parts + row * S::kOutStride + first_dim;
    if constexpr (sizeof(Kv) == 1) {
#pragma unroll
      for (int n = 0; n < S::kWarpDims / 8; n += 2) {
        Vec4 four;
#pragma unroll
        for (int i = 0; i < 4; ++i) four.w[i] = bits_of(acc[n + i % 2][2 * half + i / 2] * factor);
        store_vec(to + n * 8 + 4 * t, four);
      }
    } else {
#pragma unroll
      for (int n = 0; n < S::kWarpDims / 8; ++n) {
        Vec2 two;
#pragma unroll
        for (int i = 0; i < 2; ++i) two.w[i] = bits_of(acc[n][2 * half + i] * factor);
        store_vec(to + n * 8 + 2 * t, two);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < S::kRows * kHeadDim / 4; i += S::kThreads) {
    const int r = i / (kHeadDim / 4), dim = i % (kHeadDim / 4) * 4, row = item.tile * S::kRows + r;
    if (row >= item.queries * group) continue;
    float top = kLowest, weights = 0, v[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarpsN; ++w) top = fmaxf(top, scales[2 * (w * S::kRows + r)]);
#pragma unroll
    for (int w = 0; w < kWarpsN; ++w) {
      const float share = exp2_of<S::kExact>(scales[2 * (w * S::kRows + r)] - top);
      weights = fmaf(share, scales[2 * (w * S::kRows + r) + 1], weights);
      const Vec4 four = load_vec<Vec4>(parts + (w * S::kRows + r) * S::kOutStride + dim);
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = fmaf(share, float_of(four.w[k]), v[k]);
    }
    if (item.partial >= 0) {
      const int64_t place = (static_cast<int64_t>(item.partial) * kv_heads + kv_head) * S::kRows + r;
      store_vec(part_values + place * kHeadDim + dim,
                Vec4{{bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])}});
      if (dim == 0) {
        part_scales[2 * place] = top;
        part_scales[2 * place + 1] = weights;
      }
    } else {
      const int h = kv_head * group + row % group;
      finish_row(out, act, static_cast<int64_t>(item.first_row + row / group) * out_stride + h * kHeadDim + dim, v, top,
                 weights, sinks, h, value_scales == nullptr ? 1.0f : value_scales[kv_head]);
    }
  }
}

// grid: (merge items that could be, KV heads, kMergeRows), 256 threads: each block joins every fourth of a tile's rows.
// Lanes take the row's dimensions, warps every eighth part, in an order that depends on the number of parts alone.
constexpr int kMergeRows = 4, kMergeWarps = 8;
template <class Act, int kHeadDim, int kRows>
__global__ void __launch_bounds__(32 * kMergeWarps)
    attend_merge(Act* out, const float* part_values, const float* part_scales, const MergeWork* work,
                 const int32_t* num_work, const float* sinks, int out_stride, int group, const float* value_scales) {
  if (static_cast<int>(blockIdx.x) >= num_work[0]) return;
  const MergeWork item = work[blockIdx.x];
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr bool kExact = kSame<Act, float>;
  constexpr int kVecs = (kHeadDim + 127) / 128;  // of four dimensions, a lane
  constexpr int kAtOnce = kVecs > 2 ? 2 : 4;     // parts under way; more of a wide one would not stay in registers
  float* shared = reinterpret_cast<float*>(dynamic_shared());  // [kMergeWarps][kHeadDim], then each warp's top and weights
  float* warp_scales = shared + kMergeWarps * kHeadDim;
  for (int r = blockIdx.z; r < kRows; r += kMergeRows) {
    const int row = item.tile * kRows + r;
    if (row >= item.queries * group) return;
    const int64_t first = (static_cast<int64_t>(item.first) * kv_heads + kv_head) * kRows + r;
    const int64_t stride = static_cast<int64_t>(kv_heads) * kRows;
    float top = kLowest;
    for (int p = lane; p < item.count; p += 32) top = fmaxf(top, part_scales[2 * (first + p * stride)]);
    top = max_lanes(top);
    float weights = 0, v[kVecs][4] = {};
#pragma unroll kAtOnce
    for (int p = warp; p < item.count; p += kMergeWarps) {
      const int64_t place = first + p * stride;
      const float share = exp2_of<kExact>(part_scales[2 * place] - top);
      weights = fmaf(share, part_scales[2 * place + 1], weights);
#pragma unroll
      for (int n = 0; n < kVecs; ++n) {
        const int dim = (n * 32 + lane) * 4;
        if (kHeadDim % 128 != 0 && dim >= kHeadDim) break;
        const Vec4 four = load_vec<Vec4>(part_values + place * kHeadDim + dim);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[n][k] = fmaf(share, float_of(four.w[k]), v[n][k]);
      }
    }
#pragma unroll
    for (int n = 0; n < kVecs; ++n) {
      const int dim = (n * 32 + lane) * 4;
      if (kHeadDim % 128 != 0 && dim >= kHeadDim) break;
      store_vec(shared + warp * kHeadDim + dim,
                Vec4{{bits_of(v[n][0]), bits_of(v[n][1]), bits_of(v[n][2]), bits_of(v[n][3])}});
    }
    if (lane == 0) warp_scales[warp] = weights;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < kHeadDim / 4) {
      const int dim = threadIdx.x * 4, h = kv_head * group + row % group;
      float all[4] = {0, 0, 0, 0}, of_all = 0;
#pragma unroll
      for (int w = 0; w < kMergeWarps; ++w) {
        const Vec4 four = load_vec<Vec4>(shared + w * kHeadDim + dim);
#pragma unroll
        for (int k = 0; k < 4; ++k) all[k] += float_of(four.w[k]);
        of_all += warp_scales[w];
      }
      finish_values<kExact>(all, top, of_all, sinks, h, value_scales == nullptr ? 1.0f : value_scales[kv_head]);
      store_four(out + static_cast<int64_t>(item.first_row + row / group) * out_stride + h * kHeadDim + dim, all);
    }
    __syncthreads();
  }
}

}  // namespace llmctl::cuda
