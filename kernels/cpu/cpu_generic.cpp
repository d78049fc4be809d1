// The kernels for any CPU: plain C++ on vector types that the compiler lowers to what the baseline has.
#define LLMCTL_ISA_GENERIC
#include "cpu_kernels.hpp"

namespace llmctl::cpu {

const Table& generic_table() {
  static constexpr Table table = make_table<Generic>();
  return table;
}

}  // namespace llmctl::cpu
