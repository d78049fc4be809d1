#include "probe.hpp"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pool.hpp"
#include "tile_permit.hpp"
#ifdef LLMCTL_HAVE_AMX
#include "tile_unit.hpp"
#endif

namespace llmctl::cpu {
namespace {

// Results go here, so that no loop can be left out.
std::atomic<float> sink;

constexpr int kSums = 12;      // independent sums: more than latency times throughput of any x86-64
constexpr long kSteps = 4096;  // steps of one round

// One step of a kind: kSums multiply-adds of kOps operations each.
using Loop = void (*)(long rounds);
using Reader = void (*)(const char* data, std::size_t bytes);
struct Loops {
  Loop fma, int16, int8;
  double fma_ops, int16_ops, int8_ops;  // of one multiply-add
  Reader read;
};

#define LLMCTL_PROBE_LOOP(name, target_set, Vector, begin, step, finish)      \
  __attribute__((target(target_set))) void name(long rounds) {                \
    Vector sums[kSums];                                                       \
    _Pragma("GCC unroll 16") for (int i = 0; i < kSums; ++i) sums[i] = begin; \
    for (long n = rounds * kSteps; n > 0; --n) {                              \
      _Pragma("GCC unroll 16") for (int i = 0; i < kSums; ++i) {              \
        step;                                                                 \
        asm volatile("" : "+x"(sums[i]));                                     \
      }                                                                       \
    }                                                                         \
    _Pragma("GCC unroll 16") for (int i = 1; i < kSums; ++i) sums[0] += sums[i]; \
    sink = finish;                                                            \
  }

typedef float PlainFloats __attribute__((vector_size(16)));
typedef int32_t PlainInts __attribute__((vector_size(16)));

void plain_fma(long rounds) {
  PlainFloats sums[kSums] = {};
  for (long n = rounds * kSteps; n > 0; --n) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      sums[i] = sums[i] * 0.5f + 1.0f;
      asm volatile("" : "+m"(sums[i]));
    }
  }
  sink = sums[0][0];
}

void plain_int(long rounds) {
  PlainInts sums[kSums] = {};
  for (long n = rounds * kSteps; n > 0; --n) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      sums[i] = sums[i] + (sums[i] & 15) * 3;
      asm volatile("" : "+m"(sums[i]));
    }
  }
  sink = static_cast<float>(sums[0][0]);
}

void plain_read(const char* data, std::size_t bytes) {
  uint64_t sum = 0;
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, data + at, 8);
    sum ^= word;
  }
  sink = static_cast<float>(sum & 1);
}

#if defined(__x86_64__)

LLMCTL_PROBE_LOOP(avx2_fma, "avx2,fma", __m256, _mm256_setzero_ps(),
                  sums[i] = _mm256_fmadd_ps(sums[i], _mm256_set1_ps(0.5f), _mm256_set1_ps(1.0f)),
                  _mm256_cvtss_f32(sums[0]))
LLMCTL_PROBE_LOOP(avx2_int16, "avx2", __m256i, _mm256_setzero_si256(),
                  sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(sums[i], _mm256_set1_epi16(3))),
                  static_cast<float>(_mm256_cvtsi256_si32(sums[0])))
// As in a real dot product the 16-bit products are widened in the same step.
LLMCTL_PROBE_LOOP(avx2_int8, "avx2", __m256i, _mm256_setzero_si256(),
                  sums[i] = _mm256_add_epi32(
                      sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(sums[i], _mm256_set1_epi8(3)),
                                                 _mm256_set1_epi16(1))),
                  static_cast<float>(_mm256_cvtsi256_si32(sums[0])))

LLMCTL_PROBE_LOOP(avx512_fma, "avx512f", __m512, _mm512_setzero_ps(),
                  sums[i] = _mm512_fmadd_ps(sums[i], _mm512_set1_ps(0.5f), _mm512_set1_ps(1.0f)),
                  _mm512_cvtss_f32(sums[0]))
LLMCTL_PROBE_LOOP(vnni_int16, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(),
                  sums[i] = _mm512_dpwssd_epi32(sums[i], _mm512_set1_epi16(5), _mm512_set1_epi16(3)),
                  static_cast<float>(_mm512_cvtsi512_si32(sums[0])))
LLMCTL_PROBE_LOOP(vnni_int8, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(),
                  sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_set1_epi8(5), _mm512_set1_epi8(3)),
                  static_cast<float>(_mm512_cvtsi512_si32(sums[0])))

#ifdef LLMCTL_HAVE_AMX
constexpr double kTileOps = 2.0 * 16 * 16 * 64;

// Products of whole tiles, into four of them in turn.
void amx_int8(long rounds) {
  static_assert(kSums % 4 == 0);
  alignas(64) static const uint8_t zeros[16 * 64] = {};
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
  tiles_on(shapes);
  tile_load<4>(zeros, 64);
  tile_load<5>(zeros, 64);
  for (long n = rounds * kSteps * (kSums / 4); n > 0; --n) {
    tile_dot4<0, 4, 5>();
    tile_dot4<1, 4, 5>();
    tile_dot4<2, 4, 5>();
    tile_dot4<3, 4, 5>();
  }
  tiles_off();
}
#endif

// Eight streams far apart, which the hardware reads ahead of: asking for what comes next gives less.
__attribute__((target("avx2"))) void avx2_read(const char* data, std::size_t bytes) {
  constexpr int kStreams = 8;
  const std::size_t apart = bytes / kStreams / 64 * 64;
  __m256i sums[kStreams] = {};
  for (std::size_t at = 0; at < apart; at += 64) {
    _Pragma("GCC unroll 8") for (int i = 0; i < kStreams; ++i) {
      const __m256i* p = reinterpret_cast<const __m256i*>(data + i * apart + at);
      sums[i] = _mm256_xor_si256(sums[i], _mm256_xor_si256(_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)));
    }
  }
  _Pragma("GCC unroll 8") for (int i = 1; i < kStreams; ++i) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
  sink = static_cast<float>(_mm256_cvtsi256_si32(sums[0]));
}

#endif

Loops loops() {
  Loops found{plain_fma, plain_int, plain_int, 8, 8, 8, plain_read};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found = {avx2_fma, avx2_int16, avx2_int8, 16, 32, 64, avx2_read};
  }
  if (__builtin_cpu_supports("avx512f")) {
    found.fma = avx512_fma;
    found.fma_ops = 32;
    if (__builtin_cpu_supports("avx512vnni")) {
      found.int16 = vnni_int16;
      found.int8 = vnni_int8;
      found.int16_ops = 64;
      found.int8_ops = 128;
    }
#ifdef LLMCTL_HAVE_AMX
    if (may_use_amx()) found.int8 = amx_int8, found.int8_ops = kTileOps;
#endif
  }
#endif
  return found;
}

}  // namespace

double probe(Probe what, long rounds, const void* data, std::size_t bytes) {
  const Loops best = loops();
  const char* begin = static_cast<const char*>(data);
  int used = 1;
  std::size_t part = 0;
  const auto prepare = [&](int threads) {
    used = threads;
    part = bytes / threads / 128 * 128;
  };
  Pool::instance().run(prepare, [&](int thread, int) {
    switch (what) {
      case Probe::read:
        for (long i = 0; i < rounds; ++i) best.read(begin + thread * part, part);
        break;
      case Probe::fma:
        best.fma(rounds);
        break;
      case Probe::int16:
        best.int16(rounds);
        break;
      case Probe::int8:
        best.int8(rounds);
        break;
    }
  });
  if (what == Probe::read) return static_cast<double>(rounds) * used * part;
  const double ops = what == Probe::fma ? best.fma_ops : what == Probe::int16 ? best.int16_ops : best.int8_ops;
  return ops * kSums * kSteps * rounds * used;
}

}  // namespace llmctl::cpu
