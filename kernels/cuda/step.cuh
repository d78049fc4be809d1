// What a step does besides computing: it takes what the host sent, feeds itself the tokens that earlier steps sampled,
// and keeps its own.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

// `words` of 4 bytes from word `from` of what was sent, to address `to`.
struct alignas(16) Run {
  uint64_t to;
  int32_t from, words;
};

// grid: runs, 128 threads. No two runs of a launch write to the same place.
__global__ void __launch_bounds__(128) scatter_runs(const Run* runs, const int32_t* sent) {
  const Run run = runs[blockIdx.x];
  int32_t* to = reinterpret_cast<int32_t*>(run.to);
  for (int i = threadIdx.x; i < run.words; i += 128) to[i] = sent[run.from + i];
}

// grid: ceil(rows that could be / 128), 128 threads. token[i] = tokens[slot[i], position[i]]; tokens [slots, stride].
__global__ void __launch_bounds__(128)
    gather_tokens(int32_t* token, const int32_t* tokens, const int32_t* slot, const int32_t* position,
                  const int32_t* num_rows, int64_t stride) {
  const int i = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  if (i < num_rows[0]) token[i] = tokens[slot[i] * stride + position[i]];
}

// grid: ceil(rows with logits that could be / 128), 128 threads. What was sampled for row logit_rows[i] is kept behind the
// row's own position, 0 where nothing was.
__global__ void __launch_bounds__(128)
    keep_tokens(int32_t* tokens, const int32_t* sampled, const int32_t* logit_rows, const int32_t* slot,
                const int32_t* position, const int32_t* num_logit_rows, int64_t stride) {
  const int i = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  if (i >= num_logit_rows[0]) return;
  const int row = logit_rows[i];
  tokens[slot[row] * stride + position[row] + 1] = max(sampled[i], 0);
}

// grid: (rows that could be, ceil(width / 128)), 128 threads. out [rows, width] in float32, from [rows, stride].
template <class Act>
__global__ void __launch_bounds__(128)
    widen(float* out, const Act* from, const int32_t* num_rows, int width, int64_t stride) {
  const int row = blockIdx.x, i = static_cast<int>(blockIdx.y * 128 + threadIdx.x);
  if (row >= num_rows[0] || i >= width) return;
  out[static_cast<int64_t>(row) * width + i] = to_float(from[row * stride + i]);
}

}  // namespace llmctl::cuda
