// The instruction sets: one struct of 8-lane primitives each, the `Isa` parameter of every kernel template.
//
// A kernel is written once against these names. `Avx2` is intrinsics only, and so is `Avx512` (isa_avx512.hpp), which
// is `Avx2` with wider columns for linear tiles; `Generic` is plain C++ on gcc/clang vector types and compiles for any
// CPU. Each is defined only in its own translation unit (which is compiled with that
// instruction set's flags), and every free function of the kernel headers is `LLMCTL_INLINE`: an out-of-line copy
// compiled for AVX2 must never be the one that the linker keeps for the generic unit.
//
// Bits: inside one Isa all results are a fixed function of the operands. `Avx2::fma` rounds once, `Generic::fma` is a
// product and a sum, so the two are different bit classes.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef LLMCTL_ISA_AVX512  // isa_avx512.hpp builds on Avx2
#define LLMCTL_ISA_AVX2
#endif
#if !defined(LLMCTL_ISA_AVX2) && !defined(LLMCTL_ISA_GENERIC)
#error "define LLMCTL_ISA_AVX512, LLMCTL_ISA_AVX2 or LLMCTL_ISA_GENERIC before including isa.hpp"
#endif

#define LLMCTL_INLINE static inline __attribute__((always_inline))
#define LLMCTL_NOINLINE static __attribute__((noinline))
// Every loop that indexes an array of accumulators needs this: gcc 12 keeps the array in memory if one stays rolled.
#define LLMCTL_UNROLL _Pragma("GCC unroll 16")

#ifdef LLMCTL_ISA_AVX2
#include <immintrin.h>
#endif

namespace llmctl::cpu {

constexpr int kLanes = 8;

enum class Fold { largest, sum };  // what becomes of two lanes where vectors are folded

LLMCTL_INLINE constexpr int least(int a, int b) { return a < b ? a : b; }
LLMCTL_INLINE constexpr int most(int a, int b) { return a > b ? a : b; }

template <class To, class From>
LLMCTL_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

#ifdef LLMCTL_ISA_AVX2

struct Avx2 {
  using F = __m256;   // 8 float32
  using I = __m256i;  // 8 int32
  static constexpr const char* kName = "avx2";

  // What linear tiles compute columns of a panel with, and attention its strips; how many lanes a vector of it has, and
  // the rows of a linear tile.
  using Columns = Avx2;
  static constexpr int kWidth = kLanes;
  static constexpr int kIntRows = 4, kIntPanels = 1, kFloatRows = 6;
  static constexpr int kIntStreams = 2, kFloatStreams = 4, kFewStreams = 1;

  // ---- float32
  LLMCTL_INLINE F zero() { return _mm256_setzero_ps(); }
  LLMCTL_INLINE F set1(float v) { return _mm256_set1_ps(v); }
  LLMCTL_INLINE F broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  LLMCTL_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  LLMCTL_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  // The first n lanes (0..8), the others 0; nothing behind them is touched.
  LLMCTL_INLINE F load_part(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
  LLMCTL_INLINE void store_part(float* p, F v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
  LLMCTL_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  LLMCTL_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  LLMCTL_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  LLMCTL_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  // The second operand wins if either is NaN: put the constant first to let NaN through.
  LLMCTL_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  LLMCTL_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  LLMCTL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
  LLMCTL_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
  LLMCTL_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for an integer -126 <= n <= 127.
  LLMCTL_INLINE F times_power(F a, F n) {
    return mul(a, bits_f(shift_left<23>(add_i(to_int(n), set1_i(127)))));
  }
  LLMCTL_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  // Sum and maximum of the lanes, in one fixed tree: (i, i + 4), then (i, i + 2), then (0, 1).
  LLMCTL_INLINE float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  LLMCTL_INLINE float max_lane(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
  }

  // ---- masks: all bits of a lane set or none
  LLMCTL_INLINE F greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  LLMCTL_INLINE F equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  LLMCTL_INLINE F select(F mask, F yes, F no) { return _mm256_blendv_ps(no, yes, mask); }
  LLMCTL_INLINE unsigned mask_bits(F mask) { return static_cast<unsigned>(_mm256_movemask_ps(mask)); }
  // Lanes begin <= i < end of `in`, the others of `out`.
  LLMCTL_INLINE F keep(F in, int begin, int end, F out) { return select(lanes(begin, end), in, out); }
  // Mask of the lanes begin <= i < end (any ints).
  LLMCTL_INLINE F lanes(int begin, int end) {
    const __m256i i = lane_index();
    const __m256i from = _mm256_cmpgt_epi32(i, _mm256_set1_epi32(begin - 1));
    return _mm256_castsi256_ps(_mm256_and_si256(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i)));
  }

  // ---- int32
  LLMCTL_INLINE I zero_i() { return _mm256_setzero_si256(); }
  LLMCTL_INLINE I set1_i(int32_t v) { return _mm256_set1_epi32(v); }
  LLMCTL_INLINE I lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  LLMCTL_INLINE I load_i(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  LLMCTL_INLINE void store_i(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  LLMCTL_INLINE I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
  LLMCTL_INLINE I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
  LLMCTL_INLINE I mul_i(I a, I b) { return _mm256_mullo_epi32(a, b); }
  LLMCTL_INLINE I and_i(I a, I b) { return _mm256_and_si256(a, b); }
  LLMCTL_INLINE I or_i(I a, I b) { return _mm256_or_si256(a, b); }
  LLMCTL_INLINE I xor_i(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int kBits>
  LLMCTL_INLINE I shift_left(I a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  LLMCTL_INLINE I shift_right(I a) {  // zeros come in
    return _mm256_srli_epi32(a, kBits);
  }
  LLMCTL_INLINE I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
  // High 32 bits of the unsigned product.
  LLMCTL_INLINE I mul_high_u32(I a, I b) {
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xAA);
  }
  LLMCTL_INLINE F bits_f(I a) { return _mm256_castsi256_ps(a); }
  LLMCTL_INLINE I bits_i(F a) { return _mm256_castps_si256(a); }
  LLMCTL_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  LLMCTL_INLINE I to_int(F a) { return _mm256_cvtps_epi32(a); }  // half to even; |a| < 2^22
  // Lanes as int8 or int16, saturated.
  LLMCTL_INLINE void store_i16(int16_t* p, I v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack_16(v)); }
  LLMCTL_INLINE void store_i8(int8_t* p, I v) {
    const __m128i words = pack_16(v);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  LLMCTL_INLINE int32_t sum_i(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
  }
  LLMCTL_INLINE int32_t max_lane_i(I a) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
  }

  // ---- 16-bit floats in memory; stores round to nearest even
  LLMCTL_INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_128(p)); }
  LLMCTL_INLINE void store_f16(uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  LLMCTL_INLINE F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  }
  LLMCTL_INLINE void store_bf16(uint16_t* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
  }
  // 16 bf16 stored in pairs (column j, column j + 8): v[0] gets columns 0-7, v[1] gets 8-15.
  LLMCTL_INLINE void load_bf16_pairs(const uint16_t* p, F (&v)[2]) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    v[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  // ---- 8-bit values in memory
  LLMCTL_INLINE F load_i8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p))); }
  // The value / 256: the exponent keeps its bias when its field is put into a half's. NaN becomes 480 / 256.
  LLMCTL_INLINE F load_e4m3(const uint8_t* p) {
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(load_64(p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xBFFF))));
  }
  LLMCTL_INLINE F load_e5m2(const uint8_t* p) {  // the upper half of a half
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_64(p)));
  }
  // Powers of two by their exponents; the largest byte, NaN there, becomes infinity.
  LLMCTL_INLINE F load_e8m0(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(load_64(p)), 23));
  }

  // ---- integer dot products over 8 columns
  static constexpr bool kLongSums = false;  // whether a Sum4 is as good as an I for any number of k
  static constexpr bool kFused = true;      // whether fma rounds once
  static constexpr bool kFolds = false;     // whether vectors can be folded to one
  static constexpr bool kScreens = false;   // whether dot4 has codes of int8
  using Codes4 = __m256i;  // 8 columns x 4 consecutive k, one byte each
  using Sum4 = __m256i;    // running sum of int4 products: int16 pairs, good for 32 k (16 x 15 x 127 = 30480)
  using X4 = __m256i;      // 4 int8 activations, repeated
  LLMCTL_INLINE void load_codes4(const uint8_t* p, Codes4& low, Codes4& high) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i nibble = _mm256_set1_epi8(15);
    low = _mm256_and_si256(bytes, nibble);
    high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
  }
  LLMCTL_INLINE Sum4 zero_sum4() { return _mm256_setzero_si256(); }
  LLMCTL_INLINE X4 broadcast_x4(const int8_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
  }
  LLMCTL_INLINE Sum4 dot4(Sum4 sum, Codes4 w, X4 x) {
    return settled(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)));
  }
  LLMCTL_INLINE I sum4_to_int(Sum4 sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

  using Codes2 = __m256i;  // 8 columns x 2 consecutive k, int16
  using X2 = __m256i;      // 2 int16 activations, repeated
  LLMCTL_INLINE Codes2 load_codes2(const int8_t* p) { return _mm256_cvtepi8_epi16(load_128(p)); }
  LLMCTL_INLINE Codes2 load_pairs(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  LLMCTL_INLINE X2 broadcast_x2(const int16_t* x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
  }
  LLMCTL_INLINE I dot2(I sum, Codes2 w, X2 x) { return settled(_mm256_add_epi32(sum, _mm256_madd_epi16(w, x))); }

  LLMCTL_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  LLMCTL_INLINE void prefetch_to_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

 private:
  // Keeps the compiler from computing the products of a whole unrolled tile before their sums, and spilling them.
  LLMCTL_INLINE __m256i settled(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
  }
  template <class T>
  LLMCTL_INLINE __m128i load_128(const T* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  template <class T>
  LLMCTL_INLINE __m128i load_64(const T* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  }
  LLMCTL_INLINE __m128i pack_16(I v) {
    return _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  }
  LLMCTL_INLINE __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index()); }
};

#endif  // LLMCTL_ISA_AVX2

#ifdef LLMCTL_ISA_GENERIC

struct Generic {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  static constexpr const char* kName = "generic";

  using Columns = Generic;
  static constexpr int kWidth = kLanes;
  static constexpr int kIntRows = 4, kIntPanels = 1, kFloatRows = 6;
  static constexpr int kIntStreams = 2, kFloatStreams = 4, kFewStreams = 1;

  LLMCTL_INLINE F zero() { return F{}; }
  LLMCTL_INLINE F set1(float v) { return F{v, v, v, v, v, v, v, v}; }
  LLMCTL_INLINE F broadcast(const float* p) { return set1(*p); }
  LLMCTL_INLINE F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  LLMCTL_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  LLMCTL_INLINE F load_part(const float* p, int n) {
    F v{};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
  }
  LLMCTL_INLINE void store_part(float* p, F v, int n) {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
  LLMCTL_INLINE F add(F a, F b) { return a + b; }
  LLMCTL_INLINE F sub(F a, F b) { return a - b; }
  LLMCTL_INLINE F mul(F a, F b) { return a * b; }
  LLMCTL_INLINE F div(F a, F b) { return a / b; }
  LLMCTL_INLINE F max(F a, F b) { return a > b ? a : b; }
  LLMCTL_INLINE F min(F a, F b) { return a < b ? a : b; }
  // Two roundings: a libm call per lane would be the other way.
  LLMCTL_INLINE F fma(F a, F b, F c) { return a * b + c; }
  LLMCTL_INLINE F fnma(F a, F b, F c) { return c - a * b; }
  LLMCTL_INLINE F round(F a) { return to_float(to_int(a)); }
  LLMCTL_INLINE F times_power(F a, F n) { return a * bits_f(I((U(to_int(n)) + 127u) << 23)); }
  LLMCTL_INLINE F abs(F a) { return bits_f(bits_i(a) & 0x7FFFFFFF); }
  LLMCTL_INLINE float sum(F a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
  LLMCTL_INLINE float max_lane(F a) {
    float m = a[0];
    for (int i = 1; i < kLanes; ++i) m = m > a[i] ? m : a[i];
    return m;
  }

  LLMCTL_INLINE F greater(F a, F b) { return bits_f(I(a > b)); }
  LLMCTL_INLINE F equal(F a, F b) { return bits_f(I(a == b)); }
  LLMCTL_INLINE F select(F mask, F yes, F no) {
    const I m = bits_i(mask);
    return bits_f((m & bits_i(yes)) | (~m & bits_i(no)));
  }
  LLMCTL_INLINE unsigned mask_bits(F mask) {
    const I m = bits_i(mask);
    unsigned bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= (m[i] < 0 ? 1u : 0u) << i;
    return bits;
  }
  LLMCTL_INLINE F keep(F in, int begin, int end, F out) { return select(lanes(begin, end), in, out); }
  LLMCTL_INLINE F lanes(int begin, int end) {
    const I i = lane_index();
    return bits_f(I(i >= set1_i(begin)) & I(i < set1_i(end)));
  }

  LLMCTL_INLINE I zero_i() { return I{}; }
  LLMCTL_INLINE I set1_i(int32_t v) { return I{v, v, v, v, v, v, v, v}; }
  LLMCTL_INLINE I lane_index() { return I{0, 1, 2, 3, 4, 5, 6, 7}; }
  LLMCTL_INLINE I load_i(const int32_t* p) {
    I v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  LLMCTL_INLINE void store_i(int32_t* p, I v) { std::memcpy(p, &v, sizeof(v)); }
  LLMCTL_INLINE I add_i(I a, I b) { return I(U(a) + U(b)); }
  LLMCTL_INLINE I sub_i(I a, I b) { return I(U(a) - U(b)); }
  LLMCTL_INLINE I mul_i(I a, I b) { return I(U(a) * U(b)); }
  LLMCTL_INLINE I and_i(I a, I b) { return a & b; }
  LLMCTL_INLINE I or_i(I a, I b) { return a | b; }
  LLMCTL_INLINE I xor_i(I a, I b) { return a ^ b; }
  template <int kBits>
  LLMCTL_INLINE I shift_left(I a) {
    return I(U(a) << kBits);
  }
  template <int kBits>
  LLMCTL_INLINE I shift_right(I a) {
    return I(U(a) >> kBits);
  }
  LLMCTL_INLINE I max_i(I a, I b) { return a > b ? a : b; }
  LLMCTL_INLINE I mul_high_u32(I a, I b) {
    I high;
    for (int i = 0; i < kLanes; ++i) {
      high[i] = static_cast<int32_t>((uint64_t{static_cast<uint32_t>(a[i])} * static_cast<uint32_t>(b[i])) >> 32);
    }
    return high;
  }
  LLMCTL_INLINE F bits_f(I a) { return bits_as<F>(a); }
  LLMCTL_INLINE I bits_i(F a) { return bits_as<I>(a); }
  LLMCTL_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
  // Adding 1.5 * 2^23 leaves the integer, rounded half to even, in the low bits of the sum.
  LLMCTL_INLINE I to_int(F a) { return I(U(bits_i(a + 12582912.0f)) - 0x4B400000u); }
  LLMCTL_INLINE void store_i16(int16_t* p, I v) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(least(most(v[i], -32768), 32767));
  }
  LLMCTL_INLINE void store_i8(int8_t* p, I v) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(least(most(v[i], -128), 127));
  }
  LLMCTL_INLINE int32_t sum_i(I a) {
    uint32_t s = 0;
    for (int i = 0; i < kLanes; ++i) s += static_cast<uint32_t>(a[i]);
    return static_cast<int32_t>(s);
  }
  LLMCTL_INLINE int32_t max_lane_i(I a) {
    int32_t m = a[0];
    for (int i = 1; i < kLanes; ++i) m = most(m, a[i]);
    return m;
  }

  LLMCTL_INLINE F load_f16(const uint16_t* p) { return half_to_float(load_words(p)); }
  LLMCTL_INLINE void store_f16(uint16_t* p, F v) { store_words(p, float_to_half(v)); }
  LLMCTL_INLINE F load_bf16(const uint16_t* p) { return bits_as<F>(load_words(p) << 16); }
  LLMCTL_INLINE void store_bf16(uint16_t* p, F v) {
    const U bits = bits_as<U>(v);
    const U rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits | 0x400000u) >> 16;
    store_words(p, (bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
  }
  LLMCTL_INLINE void load_bf16_pairs(const uint16_t* p, F (&v)[2]) {
    const U pairs = load_u(p);
    v[0] = bits_as<F>(pairs << 16);
    v[1] = bits_as<F>(pairs & 0xFFFF0000u);
  }

  LLMCTL_INLINE F load_i8(const int8_t* p) { return to_float(load_signed_bytes(p)); }
  LLMCTL_INLINE F load_e4m3(const uint8_t* p) {
    return half_to_float((U(load_signed_bytes(p)) << 7) & 0xBFFFu);
  }
  LLMCTL_INLINE F load_e5m2(const uint8_t* p) { return half_to_float((U(load_signed_bytes(p)) << 8) & 0xFFFFu); }
  LLMCTL_INLINE F load_e8m0(const uint8_t* p) { return bits_as<F>((U(load_signed_bytes(p)) & 0xFFu) << 23); }

  // Bytes of a little-endian word are taken apart by shifts, so that one lane is one column throughout.
  struct Codes4 {
    I k[4];
  };
  using Sum4 = I;
  static constexpr bool kLongSums = true;
  static constexpr bool kFused = false;
  static constexpr bool kFolds = false;
  static constexpr bool kScreens = false;
  struct X4 {
    I k[4];
  };
  LLMCTL_INLINE void load_codes4(const uint8_t* p, Codes4& low, Codes4& high) {
    const U words = load_u(p);
    low = Codes4{{I(words & 15u), I((words >> 8) & 15u), I((words >> 16) & 15u), I((words >> 24) & 15u)}};
    high = Codes4{{I((words >> 4) & 15u), I((words >> 12) & 15u), I((words >> 20) & 15u), I(words >> 28)}};
  }
  LLMCTL_INLINE Codes4 load_codes4_times16(const uint8_t* p, int upper) {
    Codes4 low, high;
    load_codes4(p, low, high);
    const Codes4& w = upper != 0 ? high : low;
    return Codes4{{w.k[0] * 16, w.k[1] * 16, w.k[2] * 16, w.k[3] * 16}};
  }
  LLMCTL_INLINE Sum4 zero_sum4() { return I{}; }
  LLMCTL_INLINE X4 broadcast_x4(const int8_t* x) {
    return X4{{set1_i(x[0]), set1_i(x[1]), set1_i(x[2]), set1_i(x[3])}};
  }
  LLMCTL_INLINE Sum4 dot4(Sum4 sum, const Codes4& w, const X4& x) {
    return sum + w.k[0] * x.k[0] + w.k[1] * x.k[1] + w.k[2] * x.k[2] + w.k[3] * x.k[3];
  }
  LLMCTL_INLINE I sum4_to_int(Sum4 sum) { return sum; }

  struct Codes2 {
    I k[2];
  };
  struct X2 {
    I k[2];
  };
  LLMCTL_INLINE Codes2 load_codes2(const int8_t* p) {
    const I words = I(load_words(p));
    return Codes2{{words << 24 >> 24, words << 16 >> 24}};
  }
  LLMCTL_INLINE Codes2 load_pairs(const int16_t* p) {
    const I words = I(load_u(p));
    return Codes2{{words << 16 >> 16, words >> 16}};
  }
  LLMCTL_INLINE X2 broadcast_x2(const int16_t* x) { return X2{{set1_i(x[0]), set1_i(x[1])}}; }
  LLMCTL_INLINE I dot2(I sum, const Codes2& w, const X2& x) { return sum + w.k[0] * x.k[0] + w.k[1] * x.k[1]; }

  LLMCTL_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
  LLMCTL_INLINE void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

 private:
  typedef uint16_t Words __attribute__((vector_size(16)));
  LLMCTL_INLINE U load_u(const void* p) {
    U v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  LLMCTL_INLINE I load_signed_bytes(const void* p) {
    typedef int8_t Bytes __attribute__((vector_size(8)));
    Bytes v;
    std::memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, I);
  }
  LLMCTL_INLINE U load_words(const void* p) {
    Words v;
    std::memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, U);
  }
  LLMCTL_INLINE void store_words(uint16_t* p, U v) {
    const Words words = __builtin_convertvector(v, Words);
    std::memcpy(p, &words, sizeof(words));
  }
  // Exponent and mantissa moved into place and scaled by 2^112 make normal and subnormal halves right at once.
  LLMCTL_INLINE F half_to_float(U h) {
    const U sign = (h & 0x8000u) << 16;
    const U shifted = (h & 0x7FFFu) << 13;
    const U scaled = bits_as<U>(bits_as<F>(shifted) * 0x1p112f);
    const U special = shifted | 0x7F800000u;
    return bits_as<F>(((h & 0x7C00u) == 0x7C00u ? special : scaled) | sign);
  }
  LLMCTL_INLINE U float_to_half(F v) {
    const U bits = bits_as<U>(v);
    const U size = bits & 0x7FFFFFFFu;
    const U normal = (size - (112u << 23) + 0xFFFu + ((size >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5 aligns the mantissa to steps of 2^-24 and rounds it there.
    const U tiny = bits_as<U>(bits_as<F>(size) + 0.5f) - 0x3F000000u;
    const U huge = size > 0x7F800000u ? ((size >> 13) & 0x3FFu) | 0x7E00u : U{} + 0x7C00u;
    const U half = size >= 0x47800000u ? huge : (size < 0x38800000u ? tiny : normal);
    return half | ((bits >> 16) & 0x8000u);
  }
};

#endif  // LLMCTL_ISA_GENERIC

// The first n lanes (1..8): the masked forms are slow, and n is nearly always 8.
template <class Isa>
LLMCTL_INLINE typename Isa::F load_some(const float* p, int n) {
  return n == kLanes ? Isa::load(p) : Isa::load_part(p, n);
}
template <class Isa>
LLMCTL_INLINE void store_some(float* p, typename Isa::F v, int n) {
  if (n == kLanes) {
    Isa::store(p, v);
  } else {
    Isa::store_part(p, v, n);
  }
}

// e^x to about 1 ulp for -87 <= x <= 88, clamped outside; NaN stays NaN and exp(0) is exactly 1.
// Two-step reduction by ln 2 and a degree-5 polynomial with the coefficients of Cephes' expf.
template <class Isa>
LLMCTL_INLINE typename Isa::F exp(typename Isa::F x) {
  using F = typename Isa::F;
  x = Isa::min(Isa::set1(88.0f), Isa::max(Isa::set1(-87.0f), x));
  const typename Isa::I n = Isa::to_int(Isa::mul(x, Isa::set1(1.44269504f)));
  const F nf = Isa::to_float(n);
  F r = Isa::fnma(nf, Isa::set1(0.693359375f), x);
  r = Isa::fnma(nf, Isa::set1(-2.12194440e-4f), r);
  F p = Isa::set1(1.9875691500e-4f);
  p = Isa::fma(p, r, Isa::set1(1.3981999507e-3f));
  p = Isa::fma(p, r, Isa::set1(8.3334519073e-3f));
  p = Isa::fma(p, r, Isa::set1(4.1665795894e-2f));
  p = Isa::fma(p, r, Isa::set1(1.6666665459e-1f));
  p = Isa::fma(p, r, Isa::set1(5.0000001201e-1f));
  p = Isa::fma(Isa::mul(p, r), r, Isa::add(r, Isa::set1(1.0f)));
  const F power = Isa::bits_f(Isa::template shift_left<23>(Isa::add_i(n, Isa::set1_i(127))));
  return Isa::mul(p, power);
}

// e ln 2 + ln(1 + m) for m in [sqrt(1/2) - 1, sqrt(2) - 1), with the relative precision of m where e is 0.
// The polynomial has the coefficients of Cephes' logf.
template <class Isa>
LLMCTL_INLINE typename Isa::F log_reduced(typename Isa::F m, typename Isa::F e) {
  using F = typename Isa::F;
  const F z = Isa::mul(m, m);
  F p = Isa::set1(7.0376836292e-2f);
  p = Isa::fma(p, m, Isa::set1(-1.1514610310e-1f));
  p = Isa::fma(p, m, Isa::set1(1.1676998740e-1f));
  p = Isa::fma(p, m, Isa::set1(-1.2420140846e-1f));
  p = Isa::fma(p, m, Isa::set1(1.4249322787e-1f));
  p = Isa::fma(p, m, Isa::set1(-1.6668057665e-1f));
  p = Isa::fma(p, m, Isa::set1(2.0000714765e-1f));
  p = Isa::fma(p, m, Isa::set1(-2.4999993993e-1f));
  p = Isa::fma(p, m, Isa::set1(3.3333331174e-1f));
  F y = Isa::mul(Isa::mul(p, m), z);
  y = Isa::fma(e, Isa::set1(-2.12194440e-4f), y);
  y = Isa::fnma(Isa::set1(0.5f), z, y);
  return Isa::fma(e, Isa::set1(0.693359375f), Isa::add(m, y));
}

// Split positive normal x into (1 + m) * 2^e with 1 + m in [sqrt(1/2), sqrt(2)).
template <class Isa>
LLMCTL_INLINE void split_log(typename Isa::F x, typename Isa::F& m, typename Isa::F& e) {
  using F = typename Isa::F;
  using I = typename Isa::I;
  const I bits = Isa::bits_i(x);
  const I exponent = Isa::sub_i(Isa::template shift_right<23>(bits), Isa::set1_i(126));
  m = Isa::bits_f(Isa::or_i(Isa::and_i(bits, Isa::set1_i(0x007FFFFF)), Isa::set1_i(0x3F000000)));  // [0.5, 1)
  const F small = Isa::greater(Isa::set1(0.70710678f), m);
  e = Isa::to_float(Isa::add_i(exponent, Isa::bits_i(small)));  // the mask is -1
  m = Isa::sub(Isa::add(m, Isa::bits_f(Isa::and_i(Isa::bits_i(small), Isa::bits_i(m)))), Isa::set1(1.0f));
}

// ln x to about 1 ulp for positive normal x; anything else is the caller's business.
template <class Isa>
LLMCTL_INLINE typename Isa::F log(typename Isa::F x) {
  typename Isa::F m, e;
  split_log<Isa>(x, m, e);
  return log_reduced<Isa>(m, e);
}

}  // namespace llmctl::cpu
