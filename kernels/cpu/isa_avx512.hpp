// AVX-512 F, BW, DQ, VL with VNNI: the 8-lane primitives of `Avx2` on 32 registers, and columns of 16 lanes.
//
// Sums of floats over lanes keep 8 lanes: the bits are then those of `Avx2`. What uses columns (linear tiles, attention's
// strips, activations and their quantized forms) has them too, since integer sums and maxima are exact and a lane is a
// column, a position or a dimension whatever the width.
#pragma once

#include "isa.hpp"

namespace llmctl::cpu {

struct Avx512 : Avx2 {
  static constexpr const char* kName = "avx512";

  // A whole panel row is one vector, and int4 products go into int32 sums at once. 8 rows of floats keep the
  // multipliers busy; more would fit the registers but not one set of an 8-way L1, where rows of a multiple of 4 KB all
  // meet. Of integers 6 rows of two panels do, with half as many loads for a product.
  struct Columns {
    using F = __m512;
    using I = __m512i;
    static constexpr int kWidth = 16;
    static constexpr int kIntRows = 6, kIntPanels = 2, kFloatRows = 8;
    static constexpr int kIntStreams = 8, kFloatStreams = 8, kFewStreams = 2;  // of one row, of a few

    LLMCTL_INLINE F zero() { return _mm512_setzero_ps(); }
    LLMCTL_INLINE F set1(float v) { return _mm512_set1_ps(v); }
    LLMCTL_INLINE F broadcast(const float* p) { return _mm512_set1_ps(*p); }
    LLMCTL_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
    LLMCTL_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    // Past the caches, to whole cache lines; end_stream() before others may read them.
    LLMCTL_INLINE void stream(float* p, F v) { _mm512_stream_ps(p, v); }
    LLMCTL_INLINE void end_stream() { _mm_sfence(); }
    LLMCTL_INLINE void store_i(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
    LLMCTL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    LLMCTL_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    LLMCTL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    LLMCTL_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
    LLMCTL_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
    LLMCTL_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
    LLMCTL_INLINE F abs(F a) { return _mm512_abs_ps(a); }
    LLMCTL_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    LLMCTL_INLINE F times_power(F a, F n) { return _mm512_scalef_ps(a, n); }
    LLMCTL_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    LLMCTL_INLINE F keep(F in, int begin, int end, F out) {
      const __m512i i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __mmask16 from = _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(begin));
      return _mm512_mask_blend_ps(_mm512_mask_cmplt_epi32_mask(from, i, _mm512_set1_epi32(end)), out, in);
    }
    LLMCTL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    LLMCTL_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_256(p)); }
    LLMCTL_INLINE F load_bf16(const uint16_t* p) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
    }
    LLMCTL_INLINE F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p))); }
    LLMCTL_INLINE F load_e4m3(const uint8_t* p) {
      const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_128(p)), 7);
      return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF))));
    }
    LLMCTL_INLINE F load_e5m2(const uint8_t* p) {
      return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load_128(p)), 8));
    }
    LLMCTL_INLINE F load_e8m0(const uint8_t* p) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(load_128(p)), 23));
    }
    LLMCTL_INLINE I zero_i() { return _mm512_setzero_si512(); }
    LLMCTL_INLINE I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
    LLMCTL_INLINE I set1_i(int32_t v) { return _mm512_set1_epi32(v); }
    LLMCTL_INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
    LLMCTL_INLINE I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
    LLMCTL_INLINE I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
    LLMCTL_INLINE I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
    LLMCTL_INLINE int32_t max_lane_i(I a) { return _mm512_reduce_max_epi32(a); }
    LLMCTL_INLINE int32_t sum_i(I a) { return _mm512_reduce_add_epi32(a); }
    LLMCTL_INLINE F bits_f(I a) { return _mm512_castsi512_ps(a); }
    LLMCTL_INLINE I bits_i(F a) { return _mm512_castps_si512(a); }
    template <int kBits>
    LLMCTL_INLINE I shift_left(I a) {
      return _mm512_slli_epi32(a, kBits);
    }
    template <int kBits>
    LLMCTL_INLINE I shift_right(I a) {
      return _mm512_srli_epi32(a, kBits);
    }
    LLMCTL_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    LLMCTL_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }

    template <Fold kFold>
    LLMCTL_INLINE I fold_two(I a, I b) {
      return kFold == Fold::sum ? add_i(a, b) : max_i(a, b);
    }
    // Lane 4 l + j is the sum, or the largest, of the four lanes in 128 bits l of vector j.
    template <Fold kFold>
    LLMCTL_INLINE I fold_quads(const I (&v)[4]) {
      const I a = fold_two<kFold>(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
      const I b = fold_two<kFold>(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
      return fold_two<kFold>(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    // Lane 4 i + j is that of the four lanes j of the 128-bit parts of vector i.
    template <Fold kFold>
    LLMCTL_INLINE I fold_folded(const I (&v)[4]) {
      const I a = fold_two<kFold>(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xDD));
      const I b = fold_two<kFold>(_mm512_shuffle_i32x4(v[2], v[3], 0x88), _mm512_shuffle_i32x4(v[2], v[3], 0xDD));
      return fold_two<kFold>(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    }
    LLMCTL_INLINE F load_quads(const float* const (&p)[4]) {
      __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p[0]));
      v = _mm512_insertf32x4(v, _mm_loadu_ps(p[1]), 1);
      v = _mm512_insertf32x4(v, _mm_loadu_ps(p[2]), 2);
      return _mm512_insertf32x4(v, _mm_loadu_ps(p[3]), 3);
    }
    template <int kLane>
    LLMCTL_INLINE F repeat_in_quads(F v) {  // in each 128 bits their lane
      return _mm512_permute_ps(v, 0x55 * kLane);
    }
    LLMCTL_INLINE I bytes_of_quads(const I (&v)[4]) {  // dword 4 l + j: the 128 bits l of vector j, saturated
      return _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    }
    LLMCTL_INLINE I without_quad(I v, int quad) {  // lanes 4 quad to 4 quad + 3 are 0; none if there are no such
      const unsigned gone = static_cast<unsigned>(quad) < 4 ? 0xFu << 4 * quad : 0u;
      return _mm512_maskz_mov_epi32(static_cast<__mmask16>(~gone), v);
    }
    LLMCTL_INLINE F greater_or_nan(F a, F b) {  // a if it is greater than b or NaN
      const __mmask16 greater = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
      return _mm512_mask_blend_ps(greater, b, a);
    }
    LLMCTL_INLINE bool are_between(F v, float low, float high, int lanes) {
      const __mmask16 some = static_cast<__mmask16>((1u << lanes) - 1);
      const __mmask16 in = _mm512_mask_cmp_ps_mask(some, v, _mm512_set1_ps(low), _CMP_GE_OQ);
      return _mm512_mask_cmp_ps_mask(in, v, _mm512_set1_ps(high), _CMP_LE_OQ) == some;
    }
    LLMCTL_INLINE void store_first(float* p, F v, int lanes) {
      _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << lanes) - 1), v);
    }
    LLMCTL_INLINE void store_first_i(int32_t* p, I v, int lanes) {
      _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << lanes) - 1), v);
    }

    // Pairs (column j, column j + 8): the lower 8 lanes take the first of each, the upper 8 the second.
    LLMCTL_INLINE void load_bf16_pairs(const uint16_t* p, F (&v)[1]) {
      const __m512i both = _mm512_broadcast_i64x4(load_256(p));
      const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi32(16), _mm256_setzero_si256(), 1);
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
      v[0] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_sllv_epi32(both, shifts), high));
    }

    using Codes4 = __m512i;
    using Sum4 = __m512i;
    using X4 = __m512i;
    static constexpr bool kLongSums = true;
    static constexpr bool kFused = true;
    static constexpr bool kFolds = true;
    static constexpr bool kScreens = true;
    LLMCTL_INLINE void load_codes4(const uint8_t* p, Codes4& low, Codes4& high) {
      const __m512i bytes = _mm512_loadu_si512(p);
      const __m512i nibble = _mm512_set1_epi8(15);
      low = _mm512_and_si512(bytes, nibble);
      high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
    }
    LLMCTL_INLINE Codes4 load_codes4_times16(const uint8_t* p, int upper) {  // the low or the high ones
      const __m128i left = _mm_cvtsi32_si128(upper != 0 ? 0 : 4);
      const __m512i bytes = _mm512_sll_epi16(_mm512_loadu_si512(p), left);
      return _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0)));
    }
    // int8 in pairs of k, two of them behind one another: each column's four codes, 128 larger.
    LLMCTL_INLINE Codes4 load_two_pairs(const uint8_t* p) {
      const __m512i evens = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                                              0x170007, 0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D,
                                              0x1E000E, 0x1F000F);
      const __m512i in_columns = _mm512_permutexvar_epi16(evens, _mm512_loadu_si512(p));
      return _mm512_xor_si512(in_columns, _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    // The upper 5 of each code's 8 bits: 4 as above, and the uppermost apart, 64 for `first` and 64 for `second`.
    LLMCTL_INLINE void store_codes5(uint8_t* nibbles, uint8_t* uppermost, Codes4 first, Codes4 second) {
      const __m512i nibble = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(_mm512_srli_epi16(first, 3), nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(second, 3), nibble);
      _mm512_storeu_si512(nibbles, _mm512_or_si512(low, _mm512_slli_epi16(high, 4)));
      const uint64_t bits[2] = {_mm512_movepi8_mask(first), _mm512_movepi8_mask(second)};
      std::memcpy(uppermost, bits, sizeof(bits));
    }
    LLMCTL_INLINE void load_codes5(const uint8_t* nibbles, const uint8_t* uppermost, Codes4& first, Codes4& second) {
      load_codes4(nibbles, first, second);
      uint64_t bits[2];
      std::memcpy(bits, uppermost, sizeof(bits));
      const __m512i sixteen = _mm512_set1_epi8(16);
      first = _mm512_mask_add_epi8(first, bits[0], first, sixteen);
      second = _mm512_mask_add_epi8(second, bits[1], second, sixteen);
    }
    LLMCTL_INLINE Codes4 load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    LLMCTL_INLINE void store_bytes(uint8_t* p, Codes4 v) { _mm512_storeu_si512(p, v); }
    LLMCTL_INLINE Codes4 sub_bytes(Codes4 a, I b) { return _mm512_sub_epi8(a, b); }
    LLMCTL_INLINE Codes4 bytes_times8(Codes4 a) {  // -16 to 15
      return _mm512_and_si512(_mm512_slli_epi16(a, 3), _mm512_set1_epi8(static_cast<char>(0xF8)));
    }
    LLMCTL_INLINE Sum4 zero_sum4() { return _mm512_setzero_si512(); }
    LLMCTL_INLINE X4 broadcast_x4(const int8_t* x) { return broadcast_word(x); }
    LLMCTL_INLINE Sum4 dot4(Sum4 sum, Codes4 w, X4 x) { return _mm512_dpbusd_epi32(sum, w, x); }
    LLMCTL_INLINE I sum4_to_int(Sum4 sum) { return sum; }

    using Codes2 = __m512i;
    using X2 = __m512i;
    LLMCTL_INLINE Codes2 load_codes2(const int8_t* p) { return _mm512_cvtepi8_epi16(load_256(p)); }
    LLMCTL_INLINE Codes2 load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
    LLMCTL_INLINE void store_i16(int16_t* p, I v) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(v));
    }
    LLMCTL_INLINE void store_i8(int8_t* p, I v) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(v));
    }
    LLMCTL_INLINE X2 broadcast_x2(const int16_t* x) { return broadcast_word(x); }
    // Settled: gcc 12 else copies every sum of a tile before and after its product.
    LLMCTL_INLINE I dot2(I sum, Codes2 w, X2 x) {
      sum = _mm512_dpwssd_epi32(sum, w, x);
      asm("" : "+v"(sum));
      return sum;
    }

    LLMCTL_INLINE void prefetch(const void* p) { Avx2::prefetch(p); }
    LLMCTL_INLINE void prefetch_to_l2(const void* p) { Avx2::prefetch_to_l2(p); }

   private:
    template <class T>
    LLMCTL_INLINE __m128i load_128(const T* p) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    template <class T>
    LLMCTL_INLINE __m256i load_256(const T* p) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    template <class T>
    LLMCTL_INLINE __m512i broadcast_word(const T* x) {
      int32_t word;
      std::memcpy(&word, x, 4);
      return _mm512_set1_epi32(word);
    }
  };
};

}  // namespace llmctl::cpu
