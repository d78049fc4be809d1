// What a kernel sees when it is compiled as C++ for the CPU: CUDA's keywords and builtins, and the warp-wide operations
// that prims.cuh wraps. machine.cpp runs it, one fiber per CUDA thread and one block after another.
//
// Two builds of the same kernel text. The values build is optimized. The checked build is compiled with
// -fsanitize=thread but not linked with its runtime: the compiler then calls a hook before every access to memory, and
// these hooks are ours (checker.cpp).
//
// Not modelled: time, weak memory between blocks, named barriers, mbarrier, TMA, wgmma, clusters.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace llmctl::emu {

struct Dim {
  unsigned x, y, z;
};

// Where in the kernel's text something was called.
struct Site {
  const char* file;
  int line;
};

enum class Shuffle { kIndex, kUp, kDown, kXor };

Dim thread_index() __attribute__((pure));
Dim block_index() __attribute__((pure));
Dim block_dim() __attribute__((pure));
Dim grid_dim() __attribute__((pure));
unsigned char* shared_memory() __attribute__((pure));

void sync_threads(Site);
void sync_warp(unsigned mask, Site);
uint64_t shuffle(unsigned mask, uint64_t value, int argument, Shuffle kind, Site);
unsigned ballot(unsigned mask, bool predicate, Site);

// Fragments as the PTX manual lays them out over the lanes of a warp.
enum class Operand { kF16, kBf16, kTf32 };
void mma(float* d, const uint32_t* a, const uint32_t* b, Operand, Site);
void load_matrix(uint32_t* out, const void* row, int matrices, bool transposed, Site);

// The copy takes place when it is waited for, so that reading too early reads poison.
void copy_async(void* shared, const void* global, int bytes, int valid_bytes, Site);
void copy_commit();
void copy_wait(int groups_left_open);

void check_aligned(const void* p, int bytes, Site);
int atomic_add(int* p, int value);
float atomic_add(float* p, float value);
unsigned long long atomic_add(unsigned long long* p, unsigned long long value);

template <class T>
inline T shuffle_as(unsigned mask, T value, int argument, Shuffle kind, Site site) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, argument, kind, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// Calls a kernel with parameters that lie one after another in slots of kSlot bytes.
constexpr int kSlot = 16;
template <class... P, size_t... I>
inline void call_indexed(void (*kernel)(P...), const unsigned char* slots, std::index_sequence<I...>) {
  static_assert(((sizeof(P) <= kSlot) && ...));
  kernel(*reinterpret_cast<const P*>(slots + I * kSlot)...);
}
template <class... P>
inline void call(void (*kernel)(P...), const unsigned char* slots) {
  call_indexed(kernel, slots, std::index_sequence_for<P...>());
}

}  // namespace llmctl::emu

#define __global__ inline
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define LLMCTL_SITE (llmctl::emu::Site{__FILE__, __LINE__})
#define threadIdx (llmctl::emu::thread_index())
#define blockIdx (llmctl::emu::block_index())
#define blockDim (llmctl::emu::block_dim())
#define gridDim (llmctl::emu::grid_dim())
#define __syncthreads() llmctl::emu::sync_threads(LLMCTL_SITE)
#define __syncwarp() llmctl::emu::sync_warp(0xffffffffu, LLMCTL_SITE)
#define __shfl_sync(mask, v, lane) llmctl::emu::shuffle_as(mask, v, lane, llmctl::emu::Shuffle::kIndex, LLMCTL_SITE)
#define __shfl_up_sync(mask, v, by) llmctl::emu::shuffle_as(mask, v, by, llmctl::emu::Shuffle::kUp, LLMCTL_SITE)
#define __shfl_down_sync(mask, v, by) llmctl::emu::shuffle_as(mask, v, by, llmctl::emu::Shuffle::kDown, LLMCTL_SITE)
#define __shfl_xor_sync(mask, v, bits) llmctl::emu::shuffle_as(mask, v, bits, llmctl::emu::Shuffle::kXor, LLMCTL_SITE)
#define __ballot_sync(mask, p) llmctl::emu::ballot(mask, p, LLMCTL_SITE)
#define __any_sync(mask, p) (llmctl::emu::ballot(mask, p, LLMCTL_SITE) != 0)
#define __all_sync(mask, p) (llmctl::emu::ballot(mask, !(p), LLMCTL_SITE) == 0)
#define atomicAdd(p, v) llmctl::emu::atomic_add(p, v)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline unsigned __float_as_uint(float v) {
  unsigned bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
