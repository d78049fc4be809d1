// What one instruction set's translation unit offers: arguments of every kernel, and a table of function pointers.
//
// Kernels compute a given range of rows, panels, tiles or tasks on the calling thread and know nothing of threads; who
// computes which range is program.hpp's business. No output depends on how the ranges were cut.
// `act_row` arguments say which row of the Act stands for row 0: 0, or the first private row of the calling thread.
#pragma once

#include <atomic>

#include "batch.hpp"

namespace llmctl::cpu {

struct EmbedArgs {
  Batch batch;
  Weight weight;
  Rows out;
  float scale;
};

struct NormArgs {
  Batch batch;
  Rows x;
  const float* weight;  // [act.k]
  float eps;
  Act act;
  bool logit_rows_only;
};

struct NormAddArgs {
  Batch batch;
  Rows x;
  const float* weight;  // [width]
  int width;
  float eps;
  Rows out;
};

struct LinearArgs {
  Batch batch;
  Act act;
  Form form;  // the act's form this weight is multiplied with; unused for float kinds
  Weight weight;
  const float* bias;  // [panels * 16] or null
  Rows out;
  bool add;
  bool logit_rows_only;
};

// A linear whose readers look for each row's largest output alone. On rows of 8 bits, what they leave open of an output
// is at most norms[output] * reach[row]; few rows read less of the weights instead.
struct ScreenArgs : LinearArgs {  // its form is that of the 8 bits
  Form exact;                     // i12
  float* norms;                   // [panels * 16], of each output's weights
  float* reach;                   // [rows]
  float* upper;                   // [panels][rows]: none of the panel's outputs is above it
  std::atomic<float>* best;       // [rows]: the largest output is not below it
  int rows;                       // room for so many
  uint8_t* coarse;                // the weights' upper bits, coarse.hpp, for kCoarseRows rows at most
  int8_t* coarse_codes;
  float* coarse_facts;
};
constexpr int kCoarseRows = 4;  // more wait for their products
constexpr int kCoarseFacts = 3;  // of a group and row: the activations' scale, and what the middle and the bounds add
static inline long coarse_panel_bytes(int k, int group) {
  return static_cast<long>(k / group) * (2 * kPanel + group / 32 * 320);
}

struct RopeStoreArgs {
  Batch batch;
  Rows q, k, v;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float norm_eps;
  const float* cos;  // [max_positions, head_dim / 2], or both null: no rotation
  const float* sin;
  int num_heads;
  float q_scale;
  Kv kv;
  Steering steer;
};

struct AttendArgs {
  Batch batch;
  Rows q;
  int num_heads;
  Kv kv;
  int window;      // 0: full
  int max_splits;  // splits of the longest context
  Act act;
};

// LatentArgs of kernels/ops.py; `order` is of the inputs of `up`, or null.
struct LatentArgs {
  Batch batch;
  Rows q, latent;
  const float* kv_norm;  // [up.k]
  float norm_eps;
  Weight up;
  const int32_t* order;  // [up.k]
  const float* cos;      // [max_positions, rope_dim / 2]
  const float* sin;
  bool interleaved;
  int num_heads;
  int nope_dim;
  int value_dim;
  float q_scale;
  Latents kv;
  int max_splits;  // splits of the longest context
  Act act;

  int rope_dim() const { return kv.width - up.k; }
  int chunks() const { return (num_heads + kLatentHeads - 1) / kLatentHeads; }
};

enum class Activation : int { silu, gelu_tanh };

struct ActMulArgs {
  Batch batch;
  Rows gate, up;
  Activation activation;
  Act act;
};

// SAMPLE_ROW of kernels/ops.py, field by field.
struct SampleRow {
  uint64_t seed;
  const int32_t* tokens;
  const int32_t* bias_ids;
  const float* bias_values;
  int32_t length;
  int32_t prompt_len;
  int32_t num_bias;
  int32_t top_k;
  int32_t logprobs;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t reserved;
};
static_assert(sizeof(SampleRow) == 80);

constexpr int kMaxTop = 20;

struct SampleArgs {
  Rows logits;  // [max_rows, padded vocab]
  int vocab_size;
  const SampleRow* rows;
  int32_t* token;
  float* logprob;
  int32_t* top_ids;  // [max_rows, kMaxTop]
  float* top_logprobs;
  uint8_t* finite;
};

// Bytes of scratch that one thread needs to sample, 64-byte aligned: three arrays of `vocab_size` rounded up to 16.
constexpr std::size_t sample_scratch_bytes(int vocab_size) {
  return static_cast<std::size_t>((vocab_size + 15) / 16) * 16 * 4 * 3;
}

constexpr int kTileRows = 6;      // score rows of a query tile: 6 rows x 2 vectors fill the registers
constexpr int kPartialExtra = 8;  // floats of a partial behind its output: maximum, sum, number of splits, padding

constexpr int kWholeTiles = 8;    // tiles that pass over the context together, so that they share what comes from memory

// One query tile of attention: queries of one sequence times query heads of one KV head, at most kTileRows together.
struct AttendTile {
  int first_row;  // of the batch
  int queries;    // consecutive rows
  int kv_head;
  int first_head;  // query head
  int heads;
};

struct Range {
  int begin;
  int end;
};

// Positions that a query sees, splits that hold them, splits of a whole tile.
static inline Range visible_range(int position, int window) {
  return {window > 0 && position + 1 > window ? position + 1 - window : 0, position + 1};
}
static inline Range split_range(Range seen) { return {seen.begin / kAttendSplit, (seen.end - 1) / kAttendSplit + 1}; }
static inline Range tile_splits(const AttendArgs& a, const AttendTile& tile) {
  const int first = a.batch.position[tile.first_row], last = a.batch.position[tile.first_row + tile.queries - 1];
  return split_range({visible_range(first, a.window).begin, last + 1});
}

// Where the partial of a row, query head and split begins in the workspace, in floats.
static inline long partial_index(const AttendArgs& a, long row, long head, long split) {
  return ((row * a.num_heads + head) * a.max_splits + split) * (a.kv.head_dim + kPartialExtra);
}

constexpr int kLatentTiles = 4;   // rows of a sequence that pass over the context together
constexpr int kAbsorbRanks = 32;  // values of a query's part on latents that a task computes

// Rows of one sequence times a chunk of kLatentHeads heads; at most kLatentTiles rows.
struct LatentTile {
  int first_row;  // of the batch
  int rows;
  int chunk;
};

// Where the queries of a row and chunk of heads are in the workspace, [width][kLatentHeads], which attention replaces by
// [kLatentHeads][width]; heads of a chunk; and where a partial begins, in floats.
static inline long latent_row_floats(const LatentArgs& a) {
  return static_cast<long>(a.chunks()) * kLatentHeads * a.kv.width;
}
template <class Float>
static inline Float* latent_chunk(const LatentArgs& a, Float* queries, long row, int chunk) {
  return queries + row * latent_row_floats(a) + static_cast<long>(chunk) * kLatentHeads * a.kv.width;
}
static inline int latent_heads(const LatentArgs& a, int chunk) {
  const int left = a.num_heads - chunk * kLatentHeads;
  return left < kLatentHeads ? left : kLatentHeads;
}
static inline long latent_partial(const LatentArgs& a, long row, long head, long split) {
  return ((row * a.num_heads + head) * a.max_splits + split) * (a.up.k + kPartialExtra);
}

// What a thread takes of a linear at a time when there are many rows: so many of them, and the panels that fit in so many
// bytes, from the least to the most.
struct LinearChunk {
  int rows = 64, min_panels = 4, max_panels = 16;
  int bytes = 256 << 10;  // they should stay in L2
};

struct Table {
  const char* isa;
  void (*embed)(const EmbedArgs&, int row_begin, int row_end);
  void (*norm)(const NormArgs&, int row_begin, int row_end, int act_row);
  void (*norm_add)(const NormAddArgs&, int row_begin, int row_end);
  void (*linear[kWeightKinds])(const LinearArgs&, int panel_begin, int panel_end, int row_begin, int row_end,
                               int act_row);
  LinearChunk chunk[kWeightKinds];
  // Null where an instruction set gains nothing by it: norms of panels, the form of 8 bits and the reach of rows, outputs.
  void (*screen_norms)(const ScreenArgs&, int panel_begin, int panel_end);
  void (*screen_rows)(const ScreenArgs&, int row_begin, int row_end);
  void (*screen)(const ScreenArgs&, int panel_begin, int panel_end, int row_begin, int row_end, int act_row);
  // The same for `rows` rows, of which some may be made ready: the upper bits of panels, rows, outputs.
  void (*coarse_panels)(const ScreenArgs&, int panel_begin, int panel_end);
  void (*coarse_rows)(const ScreenArgs&, int rows, int row_begin, int row_end, int act_row);
  void (*coarse)(const ScreenArgs&, int rows, int panel_begin, int panel_end);
  // Tasks are row * num_kv_heads + kv_head: that KV head and the query heads that read it.
  void (*rope_store)(const RopeStoreArgs&, int task_begin, int task_end);
  // Some splits of a tile to `partials` (layout: attend.hpp).
  void (*attend_splits[kKvKinds])(const AttendArgs&, const AttendTile&, int begin, int end, float* partials);
  // All splits of up to kWholeTiles tiles of one sequence and KV head, merged, to rows 0.. of the act's values.
  void (*attend_whole[kKvKinds])(const AttendArgs&, const AttendTile* tiles, int count);
  // Merge `partials` (null: values are already in rows 0.. of the act) to the act's rows from act_row, with their
  // forms.
  void (*attend_merge)(const AttendArgs&, const float* partials, int row_begin, int row_end, int act_row);
  void (*latent_store)(const LatentArgs&, int row_begin, int row_end);
  // Queries of a chunk of heads to the workspace; parts are of kAbsorbRanks values, the last is of rotated ones.
  void (*latent_absorb)(const LatentArgs&, float* queries, int chunk, int part, int row_begin, int row_end);
  // One split of a row to `partials`, or all splits of a tile in place of its queries.
  void (*latent_split[kKvKinds])(const LatentArgs&, const float* queries, int row, int chunk, int split,
                                 float* partials);
  void (*latent_whole[kKvKinds])(const LatentArgs&, float* queries, const LatentTile&);
  void (*latent_merge)(const LatentArgs&, float* queries, const float* partials, int head, int row_begin, int row_end);
  // One head's values to rows 0.. of the act.
  void (*latent_project)(const LatentArgs&, float* queries, int head, int row_begin, int row_end);
  // Rows 0.. of the act to its rows from act_row, with their forms.
  void (*latent_finish)(const Act&, int row_begin, int row_end, int act_row);
  void (*act_mul)(const ActMulArgs&, int row_begin, int row_end, int act_row);
  // `scratch` has sample_scratch_bytes and belongs to the calling thread.
  void (*sample)(const SampleArgs&, int row_begin, int row_end, std::byte* scratch);
};

const Table& generic_table();
#ifdef LLMCTL_HAVE_AVX2
const Table& avx2_table();
#endif
#ifdef LLMCTL_HAVE_AVX512
const Table& avx512_table();
#endif
#ifdef LLMCTL_HAVE_AMX
const Table& amx_table();  // of a CPU with AMX whose kernel lets this process use it
#endif

}  // namespace llmctl::cpu
