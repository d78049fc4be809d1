// What the kernels are written with: number types, vector loads, asynchronous copies, tensor-core fragments.
//
// Everything that is PTX on a device and something else in the emulator is in this file, so that the kernels themselves
// are one text. The number types are our own because a kernel only stores, loads and converts them: no header of a CUDA
// toolkit is needed, neither by NVRTC nor by the CPU's compiler. Nothing is fused unless it says fmaf: both compilers
// are told so (jit.py, emulate.py).
#pragma once

#ifdef __CUDACC__
#define LLMCTL_GPU 1
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;
#else
#include "emu/emulator.hpp"
#include "emu/numeric.hpp"
#endif

#define LLMCTL_DEVICE __device__ __forceinline__

// Threads of a block. The compiler gives each so many registers that several blocks run at once; where a thread would
// have to keep values in memory for that, it is asked again to care for one block only (jit.py).
#ifdef LLMCTL_ONE_BLOCK
#define LLMCTL_THREADS(count) __launch_bounds__(count, 1)
#else
#define LLMCTL_THREADS(count) __launch_bounds__(count)
#endif

namespace llmctl::cuda {

// Before sm_80 there are neither asynchronous copies, which are made at once then, nor bfloat16 nor tf32, and tensor cores
// take half as long a step.
#if defined(LLMCTL_GPU) && __CUDA_ARCH__ < 800
#define LLMCTL_TURING 1
constexpr bool kHasBf16 = false;
#else
constexpr bool kHasBf16 = true;
#endif

// ---- numbers

struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
struct E4m3 {  // no infinity, largest 448; a NaN is 0x7f
  uint8_t bits;
};
struct E5m2 {  // the upper half of a Half
  uint8_t bits;
};
using Int8 = int8_t;

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

LLMCTL_DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
LLMCTL_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

LLMCTL_DEVICE float to_float(float v) { return v; }
LLMCTL_DEVICE float to_float(Bf16 v) { return float_of(static_cast<uint32_t>(v.bits) << 16); }
LLMCTL_DEVICE float to_float(Half v) {
#ifdef LLMCTL_GPU
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v.bits));
  return out;
#else
  return emu::from_f16(v.bits);
#endif
}

LLMCTL_DEVICE float infinity() { return float_of(0x7f800000u); }

// Two floats rounded to nearest even, `low` in the lower half.
template <class T>
LLMCTL_DEVICE uint32_t pack_pair(float low, float high) {
  static_assert(kSame<T, Half> || kSame<T, Bf16>);
#ifndef LLMCTL_GPU
  if constexpr (kSame<T, Half>) return emu::to_f16(low) | static_cast<uint32_t>(emu::to_f16(high)) << 16;
  return emu::to_bf16(low) | static_cast<uint32_t>(emu::to_bf16(high)) << 16;
#elif __CUDA_ARCH__ >= 800
  uint32_t out;
  if constexpr (kSame<T, Half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
#else
  static_assert(kSame<T, Half>, "bfloat16 needs sm_80");
  uint16_t a, b;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
  return a | static_cast<uint32_t>(b) << 16;
#endif
}

template <class T>
LLMCTL_DEVICE T from_float(float v) {
  if constexpr (kSame<T, float>) {
    return v;
  } else {
    return T{static_cast<uint16_t>(pack_pair<T>(v, 0.0f))};
  }
}

template <class T>
LLMCTL_DEVICE float low_of(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair)});
}
template <class T>
LLMCTL_DEVICE float high_of(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair >> 16)});
}

// a * b + c on pairs, rounded once.
template <class T>
LLMCTL_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(kSame<T, Half> || (kSame<T, Bf16> && kHasBf16));
#ifdef LLMCTL_GPU
  uint32_t out;
  if constexpr (kSame<T, Half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  }
  return out;
#else
  return emu::on_pairs<kSame<T, Bf16>>(a, b, c, [](float x, float y, float z) {
    return static_cast<double>(x) * y + z;
  });
#endif
}
constexpr uint32_t kMinusZeroPair = 0x80008000u;
template <class T>
constexpr uint32_t kOnePair = kSame<T, Half> ? 0x3c003c00u : 0x3f803f80u;
template <class T>
LLMCTL_DEVICE uint32_t mul_pair(uint32_t a, uint32_t b) {
  return fma_pair<T>(a, b, kMinusZeroPair);
}
template <class T>
LLMCTL_DEVICE uint32_t add_pair(uint32_t a, uint32_t b) {
  return fma_pair<T>(a, kOnePair<T>, b);
}
template <class T>
LLMCTL_DEVICE uint32_t sub_pair(uint32_t a, uint32_t b) {
  return fma_pair<T>(b, kOnePair<T> | kMinusZeroPair, a);
}

// The bytes of (high, low) that the four nibbles of `selector` name, the lowest first; as PTX's prmt.
LLMCTL_DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef LLMCTL_GPU
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
#endif
}

// Four codes as Halfs, two and two: exactly, but that E4m3's NaN becomes a number before sm_89.
template <class Stored>
LLMCTL_DEVICE void halfs_of(uint32_t (&out)[2], uint32_t codes) {
  if constexpr (kSame<Stored, E5m2>) {
    out[0] = pick_bytes(codes, 0, 0x1404);
    out[1] = pick_bytes(codes, 0, 0x3424);
  } else {
    static_assert(kSame<Stored, E4m3>);
#if defined(LLMCTL_GPU) && __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(out[0]), "=r"(out[1])
        : "r"(codes));
#else
    // All but the sign one place down, where the exponent's bias is eight more; the product mends it, for denormals too.
    for (int i = 0; i < 2; ++i) {
      const uint32_t high = pick_bytes(codes, 0, i == 0 ? 0x1404 : 0x3424);
      out[i] = mul_pair<Half>((high & 0x80008000u) | (high & 0x7f007f00u) >> 1, 0x5c005c00u);
    }
#endif
  }
}

// 2^x with an error of 2^-22 of it; 0 for very negative x.
LLMCTL_DEVICE float exp2_fast(float x) {
#ifdef LLMCTL_GPU
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return emu::exp2_approximate(x);
#endif
}

// 2^x to an ulp; 0 for very negative x. Not for x above 126.
LLMCTL_DEVICE float exp2_exact(float x) {
  if (x != x) return x;
  const float shifted = fmaxf(x, -126.0f) + 12582912.0f;  // 1.5 * 2^23: the nearest integer in the lowest bits
  const float f = fmaxf(x, -126.0f) - (shifted - 12582912.0f);
  float p = 1.5252734e-5f;  // the series ln(2)^k / k!
  p = fmaf(p, f, 1.5403530e-4f);
  p = fmaf(p, f, 1.3333558e-3f);
  p = fmaf(p, f, 9.6181291e-3f);
  p = fmaf(p, f, 5.5504109e-2f);
  p = fmaf(p, f, 2.4022651e-1f);
  p = fmaf(p, f, 6.9314718e-1f);
  p = fmaf(p, f, 1.0f);
  return x < -126.0f ? 0.0f : float_of(bits_of(p) + (bits_of(shifted) << 23));
}

// ---- memory

struct alignas(16) Vec4 {
  uint32_t w[4];
};
struct alignas(8) Vec2 {
  uint32_t w[2];
};

#ifdef LLMCTL_GPU
#define LLMCTL_CHECK_ALIGNED(p, bytes)
#else
#define LLMCTL_CHECK_ALIGNED(p, bytes) emu::check_aligned(p, bytes, LLMCTL_SITE)
#endif

// 16 bytes that nobody writes during the launch and that nobody reads twice.
LLMCTL_DEVICE Vec4 load_stream(const void* p) {
#ifdef LLMCTL_GPU
  Vec4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
#else
  LLMCTL_CHECK_ALIGNED(p, 16);
  return *static_cast<const Vec4*>(p);
#endif
}

template <class V>
LLMCTL_DEVICE V load_vec(const void* p) {
  LLMCTL_CHECK_ALIGNED(p, sizeof(V));
  return *static_cast<const V*>(p);
}
template <class V>
LLMCTL_DEVICE void store_vec(void* p, V v) {
  LLMCTL_CHECK_ALIGNED(p, sizeof(V));
  *static_cast<V*>(p) = v;
}

// The launch's dynamic shared memory, the only kind that the kernels use.
LLMCTL_DEVICE unsigned char* dynamic_shared() {
#ifdef LLMCTL_GPU
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
#else
  return emu::shared_memory();
#endif
}

#ifdef LLMCTL_GPU
LLMCTL_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
#endif

// 16 bytes to shared memory, zeros if not `valid` (`from` must then still be an address that could be read). They are
// there for this thread after copy_wait, and for others after a barrier too.
LLMCTL_DEVICE void copy_16(void* to, const void* from, bool valid) {
#ifdef LLMCTL_TURING
  Vec4 v{};
  if (valid) v = load_vec<Vec4>(from);
  store_vec(to, v);
#elif defined(LLMCTL_GPU)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  emu::copy_async(to, from, 16, valid ? 16 : 0, LLMCTL_SITE);
#endif
}
LLMCTL_DEVICE void copy_16(void* to, const void* from) {
#ifdef LLMCTL_TURING
  store_vec(to, load_vec<Vec4>(from));
#elif defined(LLMCTL_GPU)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  emu::copy_async(to, from, 16, 16, LLMCTL_SITE);
#endif
}
// 4 bytes, likewise.
LLMCTL_DEVICE void copy_4(void* to, const void* from, bool valid) {
#ifdef LLMCTL_TURING
  uint32_t v = 0;
  if (valid) v = load_vec<uint32_t>(from);
  store_vec(to, v);
#elif defined(LLMCTL_GPU)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
#else
  emu::copy_async(to, from, 4, valid ? 4 : 0, LLMCTL_SITE);
#endif
}
// Closes a group of copies.
LLMCTL_DEVICE void copy_commit() {
#ifdef LLMCTL_TURING
#elif defined(LLMCTL_GPU)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emu::copy_commit();
#endif
}
// Waits until at most kOpen of this thread's groups are still under way.
template <int kOpen>
LLMCTL_DEVICE void copy_wait() {
#ifdef LLMCTL_TURING
#elif defined(LLMCTL_GPU)
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
#else
  emu::copy_wait(kOpen);
#endif
}

// ---- warps

constexpr unsigned kAllLanes = 0xffffffffu;

// Over the kLanes (a power of two) lanes that differ in their lowest bits; every one of them gets the result.
template <int kLanes = 32>
LLMCTL_DEVICE float sum_lanes(float v) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) v += __shfl_xor_sync(kAllLanes, v, bit);
  return v;
}
template <int kLanes = 32>
LLMCTL_DEVICE float max_lanes(float v) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, bit));
  return v;
}

// ---- tensor cores

// Four 8x8 matrices of 16-bit elements from shared memory. Lane 8i + r names row r (16 bytes) of matrix i; lane (g, t) =
// (lane / 4, lane % 4) gets elements 2t and 2t+1 of row g of each, or, transposed, elements g of rows 2t and 2t+1.
template <bool kTransposed = false>
LLMCTL_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
#ifdef LLMCTL_GPU
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
#else
  emu::load_matrix(out, row, 4, kTransposed, LLMCTL_SITE);
#endif
}

// d[16, 8] += a[16, 16] b[16, 8] in 16-bit floats with float32 sums. Lane (g, t) holds of a: a[0] = (g, 2t..2t+1),
// a[1] = (g + 8, same), a[2] = (g, 2t+8..2t+9), a[3] = (g + 8, same); of b: b[0] = (2t..2t+1, g), b[1] = (2t+8..2t+9,
// g); of d: (g, 2t), (g, 2t+1), (g + 8, 2t), (g + 8, 2t+1).
template <class T>
LLMCTL_DEVICE void mma_16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(kSame<T, Half> || (kSame<T, Bf16> && kHasBf16));
#ifdef LLMCTL_TURING
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  }
#elif defined(LLMCTL_GPU)
  if constexpr (kSame<T, Half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  emu::mma(d, a, b, kSame<T, Half> ? emu::Operand::kF16 : emu::Operand::kBf16, LLMCTL_SITE);
#endif
}

// d[16, 8] += a[16, 8] b[8, 8] in tf32: the lower 13 bits of an operand are not looked at. Lane (g, t) holds of a:
// (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); of b: (t, g), (t + 4, g); of d as above.
LLMCTL_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef LLMCTL_TURING
  __trap();  // attention in these types is refused before it is compiled
#elif defined(LLMCTL_GPU)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma(d, a, b, emu::Operand::kTf32, LLMCTL_SITE);
#endif
}

}  // namespace llmctl::cuda
