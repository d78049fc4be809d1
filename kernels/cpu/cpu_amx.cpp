// AVX-512's kernels, with int4 weights in the tile registers of AMX.
#define LLMCTL_ISA_AVX512
#include "isa_avx512.hpp"

#include "linear_tiles.hpp"

namespace llmctl::cpu {

const Table& amx_table() {
  static const Table table = [] {
    Table t = avx512_table();
    t.isa = "amx";
    t.linear[static_cast<int>(WeightKind::int4)] = linear_tiles<Avx512, WeightKind::int4>;
    t.linear[static_cast<int>(WeightKind::int4_min)] = linear_tiles<Avx512, WeightKind::int4_min>;
    t.linear[static_cast<int>(WeightKind::int4_int)] = linear_tiles<Avx512, WeightKind::int4_int>;
    for (const WeightKind kind : {WeightKind::int4, WeightKind::int4_min, WeightKind::int4_int}) {
      t.chunk[static_cast<int>(kind)] = kTilesChunk;
    }
    return t;
  }();
  return table;
}

}  // namespace llmctl::cpu
