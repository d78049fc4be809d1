// llmctl.kernels._cpu: the ops for Python, in addresses and sizes.
//
// Addresses come from numpy arrays that the caller keeps alive (kernels/cpu/ops.py does). What can be checked without
// reading memory is checked here, once, when an op is built; a step checks nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "kv_copy.hpp"
#include "latent_stages.hpp"
#include "pages.hpp"
#include "probe.hpp"
#include "program.hpp"
#include "sampler.hpp"
#include "screen_stages.hpp"
#include "table.hpp"
#include "tile_permit.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmctl::cpu {
namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void require(bool fine, const std::string& what) {
  if (!fine) refuse(what);
}

std::string text(long value) { return std::to_string(value); }

// ---- instruction sets

std::vector<const Table*> tables() {
  std::vector<const Table*> found{&generic_table()};
#ifdef LLMCTL_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found.push_back(&avx2_table());
#ifdef LLMCTL_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
      found.push_back(&avx512_table());
#ifdef LLMCTL_HAVE_AMX
      if (may_use_amx()) found.push_back(&amx_table());
#endif
    }
#endif
  }
#endif
  return found;
}

const Table*& chosen() {
  static const Table* table = tables().back();
  return table;
}

void set_isa(const std::string& name) {
  std::string known;
  for (const Table* table : tables()) {
    if (name == table->isa) {
      chosen() = table;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(table->isa);
  }
  refuse("no kernels for instruction set `" + name + "` on this CPU: " + known);
}

// ---- memory

int move_pages(Address data, long bytes) {
  const auto go_on = [] {
    nb::gil_scoped_acquire held;
    return PyErr_CheckSignals() == 0;
  };
  int error = 0;
  {
    nb::gil_scoped_release released;
    error = move_to_large_pages(at<char>(data), bytes, go_on);
  }
  if (PyErr_Occurred()) throw nb::python_error();  // Ctrl-C: everything is as before
  return error;
}

// ---- views

Batch make_batch(Address counts, Address token, Address position, Address slot, Address seq_first, Address seq_rows,
                 Address logit_rows) {
  return {at<const int32_t>(counts),    at<const int32_t>(token),     at<const int32_t>(position),
          at<const int32_t>(slot),      at<const int32_t>(seq_first), at<const int32_t>(seq_rows),
          at<const int32_t>(logit_rows)};
}

WeightKind weight_kind(const std::string& kind, const std::string& zero) {
  if (zero == "none") {
    if (kind == "f32") return WeightKind::f32;
    if (kind == "f16") return WeightKind::f16;
    if (kind == "bf16") return WeightKind::bf16;
    if (kind == "int16") return WeightKind::int16;
    if (kind == "int8") return WeightKind::int8;
    if (kind == "int4") return WeightKind::int4;
  }
  if (kind == "int4" && zero == "min") return WeightKind::int4_min;
  if (kind == "int4" && zero == "int") return WeightKind::int4_int;
  refuse("unknown weight kind `" + kind + "` with zero `" + zero + "`");
}

Weight make_weight(const std::string& kind_name, int group, const std::string& zero, int n, int k, Address data,
                   long bytes) {
  const WeightKind kind = weight_kind(kind_name, zero);
  require(n > 0 && k > 0, "weight of " + text(n) + " x " + text(k));
  const int panels = (n + kPanel - 1) / kPanel;
  long panel_bytes = 0;
  if (kind == WeightKind::f32 || kind == WeightKind::f16 || kind == WeightKind::bf16) {
    group = 0;
    panel_bytes = static_cast<long>(k) * kPanel * (kind == WeightKind::f32 ? 4 : 2);
  } else {
    require(group > 0 && group % 32 == 0 && k % group == 0,
            "weight group " + text(group) + " is not a multiple of 32 that divides " + text(k) + " inputs");
    require(kind != WeightKind::int8 || group <= kMaxInt8Group,
            "int8 group " + text(group) + " over " + text(kMaxInt8Group) + ": int32 sums would overflow");
    require(kind != WeightKind::int16 || group == kInt16Group,
            "int16 group " + text(group) + ", not " + text(kInt16Group));
    const long columns = kind == WeightKind::int8 ? 2 : kind == WeightKind::int4 ? 2 : 4;  // bytes of scales and zeros
    const long codes = kind == WeightKind::int8 ? group * 16L : group * 8L;
    panel_bytes = kind == WeightKind::int16 ? int16_scales(k) + 2L * kPanel * k
                                            : (columns * kPanel + codes) * (k / group);
  }
  require(bytes == panels * panel_bytes, "packed weight " + text(n) + " x " + text(k) + " has " + text(bytes) +
                                             " bytes, its layout needs " + text(panels * panel_bytes));
  return {kind, group, n, k, panels, panel_bytes, at<const uint8_t>(data)};
}

const char* form_name(FormKind kind) {
  return kind == FormKind::i8 ? "i8" : kind == FormKind::i12 ? "i12" : "i14";
}

Form make_form(const std::string& kind, int group, Address codes, Address scales, Address sums, Address order,
               Address wide, Address high) {
  const FormKind form = kind == "i8" ? FormKind::i8 : kind == "i12" ? FormKind::i12 : FormKind::i14;
  require(kind == form_name(form), "unknown activation form `" + kind + "`");
  require(group > 0 && group % 32 == 0, "activation group " + text(group) + " is not a multiple of 32");
  require(order == 0 || group <= kMaxOrderedGroup,
          "activation group " + text(group) + " with an order, at most " + text(kMaxOrderedGroup));
  require(wide == 0 || (kind == "i8" && group / 4 <= kNoQuad && high != 0),
          "activation form " + kind + " of group " + text(group) + " with wide quads");
  return {form,
          group,
          at<const int32_t>(order),
          at<const uint8_t>(wide),
          at<void>(codes),
          at<float>(scales),
          at<int32_t>(sums),
          at<int32_t>(high)};
}

Act make_act(int k, int max_rows, int rows, Address values, const std::vector<Form>& forms) {
  require(k > 0 && rows >= max_rows && max_rows >= 0,
          "act of width " + text(k) + " with " + text(rows) + " rows for at most " + text(max_rows));
  require(forms.size() <= kMaxForms,
          text(static_cast<long>(forms.size())) + " quantized forms, at most " + text(kMaxForms));
  Act act{k, max_rows, (rows - max_rows) / kPrivateRows, at<float>(values), static_cast<int>(forms.size()), {}};
  for (std::size_t i = 0; i < forms.size(); ++i) {
    require(k % forms[i].group == 0, "activation group " + text(forms[i].group) + " does not divide width " + text(k));
    act.forms[i] = forms[i];
  }
  return act;
}

KvKind kv_kind(const std::string& kind) {
  if (kind == "f32") return KvKind::f32;
  if (kind == "f16") return KvKind::f16;
  if (kind == "bf16") return KvKind::bf16;
  if (kind == "fp8_e4m3") return KvKind::fp8_e4m3;
  if (kind == "fp8_e5m2") return KvKind::fp8_e5m2;
  if (kind == "int8") return KvKind::int8;
  if (kind == "int16") return KvKind::int16;
  refuse("unknown KV format `" + kind + "`");
}

Kv make_kv(const std::string& kind, Address arena, long block_stride, long layer_offset, int block_size,
           int num_kv_heads, int head_dim, Address table, long max_blocks, Address scales) {
  require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
          "head_dim " + text(head_dim) + " is not a multiple of 8 up to " + text(kMaxHeadDim));
  require(block_size > 0 && block_size % 8 == 0, "block size " + text(block_size) + " is not a multiple of 8");
  require(num_kv_heads > 0, text(num_kv_heads) + " KV heads");
  Kv kv{kv_kind(kind), at<uint8_t>(arena), block_stride, layer_offset, block_size, num_kv_heads, head_dim,
        at<const int32_t>(table), max_blocks, at<const float>(scales)};
  const long layer_bytes = 2 * kv.half_bytes() * num_kv_heads;
  require(layer_offset >= 0 && layer_offset + layer_bytes <= block_stride,
          "layer at byte " + text(layer_offset) + " with " + text(layer_bytes) + " bytes leaves a block of " +
              text(block_stride));
  return kv;
}

Latents make_latents(const std::string& kind_name, Address arena, long block_stride, long layer_offset, int block_size,
                     int width, Address table, long max_blocks) {
  const KvKind kind = kv_kind(kind_name);
  require(kind == KvKind::f32 || kind == KvKind::f16 || kind == KvKind::bf16, "latents in format `" + kind_name + "`");
  require(width > 0 && width % 8 == 0, "latents of width " + text(width) + ", not a multiple of 8");
  require(block_size > 0, "block size " + text(block_size));
  const long layer_bytes = kv_value_bytes(kind) * block_size * width;
  require(layer_offset >= 0 && layer_offset + layer_bytes <= block_stride,
          "layer at byte " + text(layer_offset) + " with " + text(layer_bytes) + " bytes leaves a block of " +
              text(block_stride));
  return {kind, at<uint8_t>(arena), block_stride, layer_offset, block_size, width, at<const int32_t>(table),
          max_blocks};
}

void require_width(const char* what, const Rows& rows, long width) {
  require(rows.stride >= width,
          std::string(what) + " rows are " + text(rows.stride) + " wide, " + text(width) + " needed");
}

void require_heads(int num_heads, const Kv& kv) {
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0,
          text(num_heads) + " heads are not a multiple of " + text(kv.num_kv_heads) + " KV heads");
}

// ---- ops

template <class... Stages>
std::shared_ptr<Op> make_op(std::unique_ptr<Stages>... stages) {
  std::vector<std::unique_ptr<Stage>> all;
  (all.push_back(std::move(stages)), ...);
  return std::make_shared<Op>(std::move(all));
}

std::shared_ptr<Op> embed(const Batch& batch, const Weight& weight, const Rows& out, float scale, nb::handle) {
  require_width("embedding", out, weight.k);
  return make_op(std::make_unique<EmbedStage>(*chosen(), EmbedArgs{batch, weight, out, scale}));
}

std::shared_ptr<Op> norm(const Batch& batch, const Rows& x, Address weight, float eps, const Act& act,
                         bool logit_rows_only, nb::handle) {
  require_width("norm input", x, act.k);
  return make_op(
      std::make_unique<NormStage>(*chosen(), NormArgs{batch, x, at<const float>(weight), eps, act, logit_rows_only}));
}

std::shared_ptr<Op> norm_add(const Batch& batch, const Rows& x, Address weight, int width, float eps, const Rows& out,
                             nb::handle) {
  require(width > 0, "norm of width " + text(width));
  require_width("norm input", x, width);
  require_width("norm output", out, width);
  const NormAddArgs args{batch, x, at<const float>(weight), width, eps, out};
  return make_op(std::make_unique<NormAddStage>(*chosen(), args));
}

std::shared_ptr<Op> linear(const Batch& batch, const Act& act, const Weight& weight, Address order, Address bias,
                           const Rows& out, bool add, bool logit_rows_only, bool may_screen, nb::handle) {
  require(act.k == weight.k, "activations of width " + text(act.k) + " for a weight of " + text(weight.k) + " inputs");
  require_width("linear output", out, static_cast<long>(weight.panels) * kPanel);
  Form form{};
  if (weight.group != 0) {
    const FormKind kind = form_kind(weight.kind);
    for (int i = 0; i < act.num_forms; ++i) {
      const Form& found = act.forms[i];
      if (found.kind == kind && found.group == weight.group && found.order == at<const int32_t>(order)) form = found;
    }
    require(form.codes != nullptr, std::string("the activations have no ") + form_name(kind) +
                                       " form of group " + text(weight.group) + (order != 0 ? " in its order" : ""));
  }
  const LinearArgs args{batch, act, form, weight, at<const float>(bias), out, add, logit_rows_only};
  if (may_screen && chosen()->screen != nullptr && weight.kind == WeightKind::int8 && logit_rows_only && bias == 0 &&
      !add) {
    const auto screen = std::make_shared<Screen>(*chosen(), args);
    return make_op(std::make_unique<ScreenRowsStage>(screen), std::make_unique<ScreenStage>(screen),
                   std::make_unique<ScreenedStage>(screen));
  }
  return make_op(std::make_unique<LinearStage>(*chosen(), args));
}

std::shared_ptr<Op> rope_store(const Batch& batch, const Rows& q, const Rows& k, const Rows& v, Address q_norm,
                               Address k_norm, float norm_eps, Address cos, Address sin, int num_heads, float q_scale,
                               const Kv& kv, Address steer_order, Address steer_follow, Address steer_level,
                               Address steer_centre, nb::handle) {
  require_heads(num_heads, kv);
  require_width("query", q, static_cast<long>(num_heads) * kv.head_dim);
  require_width("key", k, static_cast<long>(kv.num_kv_heads) * kv.head_dim);
  require_width("value", v, static_cast<long>(kv.num_kv_heads) * kv.head_dim);
  const RopeStoreArgs args{batch,
                           q,
                           k,
                           v,
                           at<const float>(q_norm),
                           at<const float>(k_norm),
                           norm_eps,
                           at<const float>(cos),
                           at<const float>(sin),
                           num_heads,
                           q_scale,
                           kv,
                           {at<const int32_t>(steer_order), at<const float>(steer_follow),
                            at<const float>(steer_level), at<const float>(steer_centre)}};
  return make_op(std::make_unique<RopeStoreStage>(*chosen(), args));
}

std::shared_ptr<Op> attend(const Batch& batch, const Rows& q, int num_heads, const Kv& kv, int window,
                           int max_positions, const Act& act, nb::handle) {
  require_heads(num_heads, kv);
  require(window >= 0 && max_positions > 0, "window " + text(window) + ", " + text(max_positions) + " positions");
  const long width = static_cast<long>(num_heads) * kv.head_dim;
  require_width("query", q, width);
  require(act.k == width, "attention gives " + text(width) + " values, its act has " + text(act.k));
  const AttendArgs args{batch, q, num_heads, kv, window, (max_positions + kAttendSplit - 1) / kAttendSplit, act};
  Pool& pool = Pool::instance();
  const std::size_t floats = AttendPlan::workspace_floats(args, pool.threads(), act.max_rows);
  {
    nb::gil_scoped_release released;  // a region of another thread may be running
    pool.while_idle([&] { Workspace::instance().reserve(floats); });
  }
  return make_op(std::make_unique<AttendStage>(*chosen(), args), std::make_unique<AttendMergeStage>(*chosen(), args));
}

std::shared_ptr<Op> latent(const Batch& batch, const Rows& q, const Rows& latents, Address kv_norm, float norm_eps,
                           const Weight& up, Address order, Address cos, Address sin, bool interleaved, int num_heads,
                           int nope_dim, int value_dim, float q_scale, const Latents& kv, int max_positions,
                           const Act& act, nb::handle) {
  const int rope_dim = kv.width - up.k;
  require(up.k % 8 == 0 && up.k <= kMaxHeadDim, "latents of rank " + text(up.k) + ", not a multiple of 8 up to " +
                                                    text(kMaxHeadDim));
  require(rope_dim >= 8 && rope_dim % 8 == 0 && rope_dim <= kMaxLatentRope,
          "rotated keys of " + text(rope_dim) + " values, not a multiple of 8 up to " + text(kMaxLatentRope));
  require(num_heads > 0 && value_dim > 0 && max_positions > 0 && nope_dim > 0 && nope_dim <= kMaxNope,
          text(num_heads) + " heads with keys of " + text(nope_dim) + " and values of " + text(value_dim) + " for " +
              text(max_positions) + " positions");
  require(up.n == num_heads * (nope_dim + value_dim),
          text(num_heads) + " heads need " + text(num_heads * (nope_dim + value_dim)) + " outputs of `up`, it has " +
              text(up.n));
  require_width("query", q, static_cast<long>(num_heads) * (nope_dim + rope_dim));
  require_width("latent", latents, kv.width);
  require(act.k == num_heads * value_dim,
          "attention gives " + text(num_heads * value_dim) + " values, its act has " + text(act.k));
  const LatentArgs args{batch,
                        q,
                        latents,
                        at<const float>(kv_norm),
                        norm_eps,
                        up,
                        at<const int32_t>(order),
                        at<const float>(cos),
                        at<const float>(sin),
                        interleaved,
                        num_heads,
                        nope_dim,
                        value_dim,
                        q_scale,
                        kv,
                        (max_positions + kAttendSplit - 1) / kAttendSplit,
                        act};
  Pool& pool = Pool::instance();
  const std::size_t floats = LatentPlan::workspace_floats(args, pool.threads());
  {
    nb::gil_scoped_release released;  // a region of another thread may be running
    pool.while_idle([&] { Workspace::instance().reserve(floats); });
  }
  const Table& table = *chosen();
  return make_op(std::make_unique<LatentQueryStage>(table, args), std::make_unique<LatentAttendStage>(table, args),
                 std::make_unique<LatentProjectStage>(table, args), std::make_unique<LatentFinishStage>(table, args));
}

std::shared_ptr<Op> act_mul(const Batch& batch, const Rows& gate, const Rows& up, const std::string& activation,
                            const Act& act, nb::handle) {
  require(activation == "silu" || activation == "gelu_tanh", "unknown activation `" + activation + "`");
  require_width("gate", gate, act.k);
  require_width("up", up, act.k);
  const Activation kind = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
  return make_op(std::make_unique<ActMulStage>(*chosen(), ActMulArgs{batch, gate, up, kind, act}));
}

SampleArgs sample_args(const Rows& logits, int vocab_size, Address rows, Address token, Address logprob,
                       Address top_ids, Address top_logprobs, Address finite) {
  require(chosen()->sample != nullptr, std::string("no sampling kernel for ") + chosen()->isa);
  require(vocab_size > 0, "vocabulary of " + text(vocab_size));
  require_width("logits", logits, vocab_size);
  return {logits,
          vocab_size,
          at<const SampleRow>(rows),
          at<int32_t>(token),
          at<float>(logprob),
          at<int32_t>(top_ids),
          at<float>(top_logprobs),
          at<uint8_t>(finite)};
}

double run_probe(const std::string& what, long rounds, Address data, std::size_t bytes) {
  constexpr std::pair<const char*, Probe> known[] = {
      {"read", Probe::read}, {"fma", Probe::fma}, {"int16", Probe::int16}, {"int8", Probe::int8}};
  for (const auto& [name, kind] : known) {
    if (what == name) return probe(kind, rounds, at<const void>(data), bytes);
  }
  refuse("unknown probe `" + what + "`");
}

void set_threads(int threads) {
  require(threads >= 1 && threads <= CPU_SETSIZE, text(threads) + " threads, 1 to " + text(CPU_SETSIZE));
  Pool::instance().set_threads(threads);
}

}  // namespace
}  // namespace llmctl::cpu

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // an engine that lives until the process ends is no leak
  using namespace llmctl::cpu;
  using Released = nb::call_guard<nb::gil_scoped_release>;

  m.def("isa", [] { return std::string(chosen()->isa); });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Table* table : tables()) names.emplace_back(table->isa);
    return names;
  });
  m.def("set_isa", &set_isa, "name"_a);
  m.def("threads", [] { return Pool::instance().threads(); }, Released());
  m.def("set_threads", &set_threads, "threads"_a, Released());
  m.def("probe", &run_probe, "what"_a, "rounds"_a, "data"_a, "bytes"_a, Released());
  m.def(
      "ask_for_large_pages", [](Address data, long bytes) { return ask_for_large_pages(at<char>(data), bytes); },
      "data"_a, "bytes"_a);
  m.def("move_to_large_pages", &move_pages, "data"_a, "bytes"_a);
  m.def("workspace_bytes", [] { return Workspace::instance().floats() * sizeof(float); });

  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch* self, Address counts, Address token, Address position, Address slot, Address seq_first,
             Address seq_rows, Address logit_rows) {
            new (self) Batch(make_batch(counts, token, position, slot, seq_first, seq_rows, logit_rows));
          },
          "counts"_a, "token"_a, "position"_a, "slot"_a, "seq_first"_a, "seq_rows"_a, "logit_rows"_a);
  nb::class_<Rows>(m, "Rows").def(
      "__init__",
      [](Rows* self, Address data, long stride, long count) { new (self) Rows{at<float>(data), stride, count}; },
      "data"_a, "stride"_a, "count"_a);
  nb::class_<Weight>(m, "Weight")
      .def(
          "__init__",
          [](Weight* self, const std::string& kind, int group, const std::string& zero, int n, int k, Address data,
             long bytes) { new (self) Weight(make_weight(kind, group, zero, n, k, data, bytes)); },
          "kind"_a, "group"_a, "zero"_a, "n"_a, "k"_a, "data"_a, "bytes"_a);
  nb::class_<Form>(m, "Form").def(
      "__init__",
      [](Form* self, const std::string& kind, int group, Address codes, Address scales, Address sums, Address order,
         Address wide, Address high) {
        new (self) Form(make_form(kind, group, codes, scales, sums, order, wide, high));
      },
      "kind"_a, "group"_a, "codes"_a, "scales"_a, "sums"_a, "order"_a, "wide"_a, "high"_a);
  nb::class_<Act>(m, "Act").def(
      "__init__",
      [](Act* self, int k, int max_rows, int rows, Address values, const std::vector<Form>& forms) {
        new (self) Act(make_act(k, max_rows, rows, values, forms));
      },
      "k"_a, "max_rows"_a, "rows"_a, "values"_a, "forms"_a);
  nb::class_<Kv>(m, "Kv").def(
      "__init__",
      [](Kv* self, const std::string& kind, Address arena, long block_stride, long layer_offset, int block_size,
         int num_kv_heads, int head_dim, Address table, long max_blocks, Address scales) {
        new (self) Kv(make_kv(kind, arena, block_stride, layer_offset, block_size, num_kv_heads, head_dim, table,
                              max_blocks, scales));
      },
      "kind"_a, "arena"_a, "block_stride"_a, "layer_offset"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a,
      "table"_a, "max_blocks"_a, "scales"_a);
  nb::class_<Latents>(m, "Latents").def(
      "__init__",
      [](Latents* self, const std::string& kind, Address arena, long block_stride, long layer_offset, int block_size,
         int width, Address table, long max_blocks) {
        new (self)
            Latents(make_latents(kind, arena, block_stride, layer_offset, block_size, width, table, max_blocks));
      },
      "kind"_a, "arena"_a, "block_stride"_a, "layer_offset"_a, "block_size"_a, "width"_a, "table"_a, "max_blocks"_a);

  // An op keeps its last argument alive: the record whose arrays its addresses point into.
  nb::class_<Op>(m, "Op").def("run", &Op::run, Released());
  m.def("embed", &embed, "batch"_a, "weight"_a, "out"_a, "scale"_a, "owner"_a, nb::keep_alive<0, 5>());
  m.def("norm", &norm, "batch"_a, "x"_a, "weight"_a, "eps"_a, "act"_a, "logit_rows_only"_a, "owner"_a,
        nb::keep_alive<0, 7>());
  m.def("norm_add", &norm_add, "batch"_a, "x"_a, "weight"_a, "width"_a, "eps"_a, "out"_a, "owner"_a,
        nb::keep_alive<0, 7>());
  m.def("linear", &linear, "batch"_a, "act"_a, "weight"_a, "order"_a, "bias"_a, "out"_a, "add"_a, "logit_rows_only"_a,
        "may_screen"_a, "owner"_a, nb::keep_alive<0, 10>());
  m.def("rope_store", &rope_store, "batch"_a, "q"_a, "k"_a, "v"_a, "q_norm"_a, "k_norm"_a, "norm_eps"_a, "cos"_a,
        "sin"_a, "num_heads"_a, "q_scale"_a, "kv"_a, "steer_order"_a, "steer_follow"_a, "steer_level"_a,
        "steer_centre"_a, "owner"_a, nb::keep_alive<0, 17>());
  m.def("attend", &attend, "batch"_a, "q"_a, "num_heads"_a, "kv"_a, "window"_a, "max_positions"_a, "act"_a, "owner"_a,
        nb::keep_alive<0, 8>());
  m.def("latent", &latent, "batch"_a, "q"_a, "latents"_a, "kv_norm"_a, "norm_eps"_a, "up"_a, "order"_a, "cos"_a,
        "sin"_a, "interleaved"_a, "num_heads"_a, "nope_dim"_a, "value_dim"_a, "q_scale"_a, "kv"_a, "max_positions"_a,
        "act"_a, "owner"_a, nb::keep_alive<0, 18>());
  m.def("act_mul", &act_mul, "batch"_a, "gate"_a, "up"_a, "activation"_a, "act"_a, "owner"_a, nb::keep_alive<0, 6>());

  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, const std::vector<std::shared_ptr<Op>>& ops, const Batch& batch) {
            std::vector<const Stage*> stages;
            for (const auto& op : ops) {
              for (const Stage* stage : op->stages()) stages.push_back(stage);
            }
            for (const Stage* stage : stages) {
              require(stage->batch().counts == batch.counts, "an op of the program reads another batch");
            }
            new (self) Program(std::move(stages));
          },
          "ops"_a, "batch"_a, nb::keep_alive<1, 2>())
      .def("replay", &Program::replay, Released())
      .def("barriers", &Program::barriers, "rows"_a, "logit_rows"_a);

  nb::class_<KvCopyArgs>(m, "KvCopy")
      .def(
          "__init__",
          [](KvCopyArgs* self, Address arena, long block_stride, int num_layers, int block_size, int num_kv_heads,
             int head_dim, long value_bytes, long scale_bytes, bool pairs) {
            new (self) KvCopyArgs{at<uint8_t>(arena), block_stride, num_layers,  block_size, num_kv_heads,
                                  head_dim,           value_bytes,  scale_bytes, pairs};
          },
          "arena"_a, "block_stride"_a, "num_layers"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "value_bytes"_a,
          "scale_bytes"_a, "pairs"_a)
      .def("__call__", &kv_copy, "source"_a, "target"_a, "tokens"_a, Released());

  nb::class_<Sampler>(m, "Sampler")
      .def(
          "__init__",
          [](Sampler* self, const Rows& logits, int vocab_size, Address rows, Address token, Address logprob,
             Address top_ids, Address top_logprobs, Address finite) {
            const SampleArgs args =
                sample_args(logits, vocab_size, rows, token, logprob, top_ids, top_logprobs, finite);
            new (self) Sampler(*chosen(), args);
          },
          "logits"_a, "vocab_size"_a, "rows"_a, "token"_a, "logprob"_a, "top_ids"_a, "top_logprobs"_a, "finite"_a)
      .def("__call__", &Sampler::run, "rows"_a, Released());
}
