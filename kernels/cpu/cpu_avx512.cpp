// The kernels for x86-64 with AVX-512 F, BW, DQ, VL and VNNI, beside AVX2, FMA and F16C.
#define LLMCTL_ISA_AVX512
#include "isa_avx512.hpp"

#include "cpu_kernels.hpp"

namespace llmctl::cpu {

const Table& avx512_table() {
  static constexpr Table table = make_table<Avx512>();
  return table;
}

}  // namespace llmctl::cpu
