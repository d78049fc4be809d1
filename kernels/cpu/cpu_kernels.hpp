// The kernel table of one instruction set, made from the templates.
#pragma once

#include "act_mul.hpp"
#include "attend.hpp"
#include "coarse.hpp"
#include "embed.hpp"
#include "latent.hpp"
#include "latent_attend.hpp"
#include "linear_float.hpp"
#include "linear_int.hpp"
#include "norm.hpp"
#include "norm_add.hpp"
#include "rope_store.hpp"
#include "sample.hpp"
#include "table.hpp"

namespace llmctl::cpu {

template <class Isa, class Format>
LLMCTL_INLINE constexpr void set_attend(Table& t, KvKind kind) {
  t.attend_splits[static_cast<int>(kind)] = attend_splits<Isa, Format>;
  t.attend_whole[static_cast<int>(kind)] = attend_whole<Isa, Format>;
}

template <class Isa, class Format>
LLMCTL_INLINE constexpr void set_latent(Table& t, KvKind kind) {
  t.latent_split[static_cast<int>(kind)] = latent_split<Isa, Format>;
  t.latent_whole[static_cast<int>(kind)] = latent_whole<Isa, Format>;
}

template <class Isa>
LLMCTL_INLINE constexpr Table make_table() {
  Table t{};
  t.isa = Isa::kName;
  t.embed = embed_rows<Isa>;
  t.norm = norm_rows<Isa>;
  t.norm_add = norm_add_rows<Isa>;
  t.linear[static_cast<int>(WeightKind::f32)] = linear<Isa, FloatTile<Isa, WeightKind::f32>>;
  t.linear[static_cast<int>(WeightKind::f16)] = linear<Isa, FloatTile<Isa, WeightKind::f16>>;
  t.linear[static_cast<int>(WeightKind::bf16)] = linear<Isa, FloatTile<Isa, WeightKind::bf16>>;
  t.linear[static_cast<int>(WeightKind::int16)] = linear<Isa, PairsTile<Isa, WeightKind::int16>>;
  t.linear[static_cast<int>(WeightKind::int8)] = linear<Isa, PairsTile<Isa, WeightKind::int8>>;
  t.linear[static_cast<int>(WeightKind::int4)] = linear<Isa, Int4Tile<Isa, WeightKind::int4>>;
  t.linear[static_cast<int>(WeightKind::int4_min)] = linear<Isa, Int4Tile<Isa, WeightKind::int4_min>>;
  t.linear[static_cast<int>(WeightKind::int4_int)] = linear<Isa, Int4Tile<Isa, WeightKind::int4_int>>;
  if constexpr (Isa::Columns::kScreens) {
    t.screen_norms = screen_norms<Isa>;
    t.screen_rows = screen_rows<Isa>;
    t.screen = linear<Isa, ScreenTile<Isa>>;
    t.coarse_panels = coarse_panels<Isa>;
    t.coarse_rows = coarse_rows<Isa>;
    t.coarse = coarse<Isa>;
  }
  t.rope_store = rope_store_tasks<Isa>;
  set_attend<Isa, KvF32>(t, KvKind::f32);
  set_attend<Isa, KvF16>(t, KvKind::f16);
  set_attend<Isa, KvBf16>(t, KvKind::bf16);
  set_attend<Isa, KvE4m3>(t, KvKind::fp8_e4m3);
  set_attend<Isa, KvE5m2>(t, KvKind::fp8_e5m2);
  set_attend<Isa, KvInt8>(t, KvKind::int8);
  set_attend<Isa, KvInt16>(t, KvKind::int16);
  t.attend_merge = attend_merge<Isa>;
  t.latent_store = latent_store<Isa>;
  t.latent_absorb = latent_absorb<Isa>;
  set_latent<Isa, KvF32>(t, KvKind::f32);
  set_latent<Isa, KvF16>(t, KvKind::f16);
  set_latent<Isa, KvBf16>(t, KvKind::bf16);
  t.latent_merge = latent_merge<Isa>;
  t.latent_project = latent_project<Isa>;
  t.latent_finish = latent_finish<Isa>;
  t.act_mul = act_mul_rows<Isa>;
  t.sample = sample_rows<Isa>;
  return t;
}

}  // namespace llmctl::cpu
