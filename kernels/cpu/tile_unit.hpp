// AMX: eight tile registers of 16 rows of 64 bytes, and products of two of them. The assembler knows the instructions;
// the compiler need not, and is told that they read and write memory.
#pragma once

#include <cstdint>

#ifndef LLMCTL_INLINE
#define LLMCTL_INLINE static inline __attribute__((always_inline))
#endif

namespace llmctl::cpu {

// What a thread's tiles look like from `tiles_on` to `tiles_off`.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int height, int bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

LLMCTL_INLINE void tiles_on(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
LLMCTL_INLINE void tiles_off() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
LLMCTL_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
}
template <int kTile>
LLMCTL_INLINE void tile_load(const void* from, long stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
LLMCTL_INLINE void tile_store(void* to, long stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
}
// int32 sum[m][n] += the products of int8 a[m][4 j + i] and b[j][4 n + i].
template <int kSum, int kA, int kB>
LLMCTL_INLINE void tile_dot4() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB) : "memory");
}

}  // namespace llmctl::cpu
