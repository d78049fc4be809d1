// Moving what the KV cache holds: the first tokens of a block to another, and whole blocks between two arenas.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

// One copy: the first `tokens` positions of block `source` to block `target`.
struct BlockCopy {
  int32_t source, target, tokens;
};

// grid: (copies, layers * KV heads * 2), 128 threads: K or V of one head of one layer. Layout: attend.cuh. row_bytes a
// multiple of 16; scale_bytes is 2 if every token has a scale, else 0.
__global__ void __launch_bounds__(128)
    copy_tokens(uint8_t* arena, const BlockCopy* copies, int64_t block_stride, int block_size, int row_bytes,
                int scale_bytes) {
  const BlockCopy copy = copies[blockIdx.x];
  const int64_t half = static_cast<int64_t>(blockIdx.y) * block_size * (row_bytes + scale_bytes);
  const uint8_t* from = arena + copy.source * block_stride + half;
  uint8_t* to = arena + copy.target * block_stride + half;
  const int bytes = copy.tokens * row_bytes;
  for (int i = threadIdx.x * 16; i < bytes; i += 128 * 16) store_vec(to + i, load_vec<Vec4>(from + i));
  const int scales = block_size * row_bytes;
  for (int i = threadIdx.x * 2; i < copy.tokens * scale_bytes; i += 128 * 2) {
    store_vec(to + scales + i, load_vec<uint16_t>(from + scales + i));
  }
}

// grid: (blocks to move, ceil(block_stride / 2048)), 128 threads, 16 bytes each. Block target_ids[i] of `to` becomes
// block source_ids[i] of `from`; without ids it is block i. For swapping through a buffer that the host copies at once.
__global__ void __launch_bounds__(128) move_blocks(uint8_t* to, const uint8_t* from, const int32_t* target_ids,
                                                   const int32_t* source_ids, int64_t block_stride) {
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * 128 + threadIdx.x) * 16;
  if (i >= block_stride) return;
  const int64_t target = target_ids == nullptr ? static_cast<int64_t>(blockIdx.x) : target_ids[blockIdx.x];
  const int64_t source = source_ids == nullptr ? static_cast<int64_t>(blockIdx.x) : source_ids[blockIdx.x];
  store_vec(to + target * block_stride + i, load_vec<Vec4>(from + source * block_stride + i));
}

}  // namespace llmctl::cuda
