// The kernels for x86-64 with AVX2, FMA and F16C.
#define LLMCTL_ISA_AVX2
#include "cpu_kernels.hpp"

namespace llmctl::cpu {

const Table& avx2_table() {
  static constexpr Table table = make_table<Avx2>();
  return table;
}

}  // namespace llmctl::cpu
