// Ops as stages: what each thread does of a kernel, and which memory a stage touches.
//
// A stage is a part of an op that needs no barrier inside. It says which memory it reads and writes, from which
// program.hpp derives where threads must meet. No file here computes a value: kernels get ranges, and the bits do not
// depend on them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "pool.hpp"
#include "table.hpp"

namespace llmctl::cpu {

// One thread's part in a stage.
struct Share {
  int thread;
  int threads;
  std::atomic<int>* counter;  // 0 when the stage starts, shared by its threads
  bool private_act;           // every thread computes, or reads, rows of the act of its own

  Range cut(int n) const {
    return {static_cast<int>(static_cast<long>(n) * thread / threads),
            static_cast<int>(static_cast<long>(n) * (thread + 1) / threads)};
  }
  int take() const { return counter->fetch_add(1, std::memory_order_relaxed); }
  // The private rows of thread 0 are the ordinary ones: what a program leaves in an act is always found there.
  int act_row(const Act& act) const { return private_act && thread > 0 ? act.max_rows + kPrivateRows * thread : 0; }
  // Rows of the act to produce: all of them into its own rows, or this thread's cut.
  Range act_rows(int n) const { return private_act ? Range{0, n} : cut(n); }
};

// Memory for the partial results of attention, one for the process: programs run one after another, and a program's
// stages meet at barriers around it. It grows when an op is built, never in a step; only touched pages are real.
class Workspace {
 public:
  static Workspace& instance() {
    static Workspace* workspace = new Workspace;
    return *workspace;
  }

  void reserve(std::size_t floats) {
    if (floats <= floats_) return;
    const std::size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
    float* grown = static_cast<float*>(std::aligned_alloc(4096, bytes));
    if (grown == nullptr) throw std::bad_alloc();
    std::free(data_);
    data_ = grown;
    floats_ = bytes / sizeof(float);
  }

  float* data() const { return data_; }
  std::size_t floats() const { return floats_; }

 private:
  float* data_ = nullptr;
  std::size_t floats_ = 0;
};

// Memory that a stage reads or writes.
struct Access {
  const void* begin;
  const void* end;
  bool write;
  bool act;  // rows of the stage's Act, which may be private to the thread

  static Access read(const Rows& rows) { return {rows.data, rows.row(rows.count), false, false}; }
  static Access write_to(const Rows& rows) { return {rows.data, rows.row(rows.count), true, false}; }
  static Access of(const Act& act, bool write) { return {act.values, act.row(act.max_rows), write, true}; }
  static Access layer(const Kv& kv, bool write) {  // layers of one arena do not overlap
    return {kv.arena + kv.layer_offset, kv.arena + kv.layer_offset + 1, write, false};
  }
  static Access layer(const Latents& kv, bool write) {
    return {kv.arena + kv.layer_offset, kv.arena + kv.layer_offset + 1, write, false};
  }
  static Access workspace(bool write) {
    const Workspace* w = &Workspace::instance();
    return {w, w + 1, write, false};
  }
};

// How a stage uses an Act whose rows may be private.
struct ActUse {
  const Act* act;  // null: none
  Count count;     // what its rows are
  bool produces;
};

class Stage {
 public:
  virtual ~Stage() = default;
  virtual void run(const Share& share) const = 0;
  virtual std::vector<Access> accesses() const = 0;
  virtual const Batch& batch() const = 0;
  virtual ActUse act_use() const { return {nullptr, kRows, false}; }
};

inline int count_of(const Batch& batch, Count count) { return batch.counts[count]; }

class EmbedStage final : public Stage {
 public:
  EmbedStage(const Table& table, const EmbedArgs& args) : kernel_(table.embed), args_(args) {}
  void run(const Share& share) const override {
    const Range rows = share.cut(count_of(args_.batch, kRows));
    kernel_(args_, rows.begin, rows.end);
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::write_to(args_.out)}; }

 private:
  decltype(Table::embed) kernel_;
  EmbedArgs args_;
};

class NormStage final : public Stage {
 public:
  NormStage(const Table& table, const NormArgs& args) : kernel_(table.norm), args_(args) {}
  void run(const Share& share) const override {
    const Range rows = share.act_rows(count_of(args_.batch, count()));
    kernel_(args_, rows.begin, rows.end, share.act_row(args_.act));
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::read(args_.x), Access::of(args_.act, true)}; }
  ActUse act_use() const override { return {&args_.act, count(), true}; }

 private:
  Count count() const { return args_.logit_rows_only ? kLogitRows : kRows; }
  decltype(Table::norm) kernel_;
  NormArgs args_;
};

class NormAddStage final : public Stage {
 public:
  NormAddStage(const Table& table, const NormAddArgs& args) : kernel_(table.norm_add), args_(args) {}
  void run(const Share& share) const override {
    const Range rows = share.cut(count_of(args_.batch, kRows));
    kernel_(args_, rows.begin, rows.end);
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::read(args_.x), Access::write_to(args_.out)}; }

 private:
  decltype(Table::norm_add) kernel_;
  NormAddArgs args_;
};

// Panels and rows of a linear over the threads. Few rows: every thread has a fixed part of the panels. With more than 16,
// chunks are taken from the counter, since a static cut waits for the slowest thread; all rows pass by a few panels
// before the next ones are read, because weights are the larger part and activations are read by all threads at once.
template <class Args>
void spread_linear(const Share& share, const Args& args, int rows, const LinearChunk& chunk_of,
                   void (*kernel)(const Args&, int, int, int, int, int)) {
  constexpr int kDynamicRows = 17, kChunksPerThread = 4, kLeastTall = 64, kFairPanels = 40;
  const int panels = args.weight.panels, act_row = share.act_row(args.act);
  if (rows < kDynamicRows) {
    const Range own = share.cut(panels);
    kernel(args, own.begin, own.end, 0, rows, act_row);
    return;
  }
  int tall = chunk_of.rows, row_chunks = 0, fair = 0;
  for (;; tall /= 2) {  // where so tall ones would leave a thread few panels, more of them
    row_chunks = (rows + tall - 1) / tall;
    fair = std::max(1, panels * row_chunks / (kChunksPerThread * share.threads));
    if (tall <= kLeastTall || fair >= kFairPanels) break;
  }
  const int most = std::clamp(chunk_of.bytes / static_cast<int>(args.weight.panel_bytes), chunk_of.min_panels,
                              chunk_of.max_panels);
  const int about = (panels + std::min(most, fair) - 1) / std::min(most, fair);
  const int panel_chunk = (panels + 2 * about - 1) / (2 * about) * 2;  // even, as tiles read two at once
  const int chunks = row_chunks * ((panels + panel_chunk - 1) / panel_chunk);
  for (int chunk; (chunk = share.take()) < chunks;) {
    const int row = chunk % row_chunks * tall, panel = chunk / row_chunks * panel_chunk;
    kernel(args, panel, std::min(panel + panel_chunk, panels), row, std::min(row + tall, rows), act_row);
  }
}

class LinearStage final : public Stage {
 public:
  LinearStage(const Table& table, const LinearArgs& args)
      : kernel_(table.linear[static_cast<int>(args.weight.kind)]),
        chunk_(table.chunk[static_cast<int>(args.weight.kind)]),
        args_(args) {}

  void run(const Share& share) const override {
    spread_linear(share, args_, count_of(args_.batch, count()), chunk_, kernel_);
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::of(args_.act, false), Access::write_to(args_.out)}; }
  ActUse act_use() const override { return {&args_.act, count(), false}; }

 private:
  Count count() const { return args_.logit_rows_only ? kLogitRows : kRows; }
  void (*kernel_)(const LinearArgs&, int, int, int, int, int);
  LinearChunk chunk_;
  LinearArgs args_;
};

class RopeStoreStage final : public Stage {
 public:
  RopeStoreStage(const Table& table, const RopeStoreArgs& args) : kernel_(table.rope_store), args_(args) {}
  void run(const Share& share) const override {
    const Range tasks = share.cut(count_of(args_.batch, kRows) * args_.kv.num_kv_heads);
    kernel_(args_, tasks.begin, tasks.end);
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override {
    return {Access::write_to(args_.q), Access::write_to(args_.k), Access::read(args_.v), Access::layer(args_.kv, true)};
  }

 private:
  decltype(Table::rope_store) kernel_;
  RopeStoreArgs args_;
};

// How the query rows of a batch are cut into tiles.
struct Tiling {
  int heads_per_kv;
  int head_chunks;  // tiles that share a KV head's query heads
  int chunk_heads;  // query heads of a tile, at most
  int queries;      // rows of a tile, at most

  explicit Tiling(const AttendArgs& a) {
    heads_per_kv = a.num_heads / a.kv.num_kv_heads;
    head_chunks = (heads_per_kv + kTileRows - 1) / kTileRows;
    chunk_heads = (heads_per_kv + head_chunks - 1) / head_chunks;
    queries = kTileRows / chunk_heads;
  }

  // Calls visit(tiles, count) for every run of at most `together` tiles of one sequence and KV head, KV heads outside:
  // the tiles of one head follow one another and share its keys.
  template <class Visit>
  void each(const AttendArgs& a, int together, Visit&& visit) const {
    AttendTile tiles[kWholeTiles];
    const int seqs = count_of(a.batch, kSeqs);
    for (int kv_head = 0; kv_head < a.kv.num_kv_heads; ++kv_head) {
      for (int chunk = 0; chunk < head_chunks; ++chunk) {
        const int first_head = chunk * chunk_heads;
        const int heads = std::min(chunk_heads, heads_per_kv - first_head);
        for (int s = 0; s < seqs; ++s) {
          const int first = a.batch.seq_first[s], rows = a.batch.seq_rows[s];
          for (int i = 0; i < rows;) {
            int count = 0;
            for (; count < together && i < rows; i += queries) {
              tiles[count++] = {first + i, std::min(queries, rows - i), kv_head, kv_head * heads_per_kv + first_head,
                                heads};
            }
            visit(tiles, count);
          }
        }
      }
    }
  }

  int tiles(const AttendArgs& a) const {
    int n = 0;
    for (int s = 0; s < count_of(a.batch, kSeqs); ++s) n += (a.batch.seq_rows[s] + queries - 1) / queries;
    return n * a.kv.num_kv_heads * head_chunks;
  }
};

// Few tiles: their splits are cut among the threads, to the workspace. Many: a task is a run of whole tiles, to the
// act's values.
struct AttendPlan {
  static constexpr int kTilesPerThread = 16;

  static bool splits_are_tasks(const AttendArgs& a, const Tiling& tiling, int threads) {
    const std::size_t needed = static_cast<std::size_t>(partial_index(a, count_of(a.batch, kRows), 0, 0));
    return tiling.tiles(a) < kTilesPerThread * threads && needed <= Workspace::instance().floats();
  }

  // Floats of workspace for any batch with few tiles on so many threads.
  static std::size_t workspace_floats(const AttendArgs& a, int threads, int max_rows) {
    const Tiling tiling(a);
    const int tiles_per_row_tile = a.kv.num_kv_heads * tiling.head_chunks;
    const int rows = kTilesPerThread * threads / tiles_per_row_tile * tiling.queries;
    return static_cast<std::size_t>(partial_index(a, std::min(rows, max_rows), 0, 0));
  }
};

class AttendStage final : public Stage {
 public:
  AttendStage(const Table& table, const AttendArgs& args)
      : splits_(table.attend_splits[static_cast<int>(args.kv.kind)]),
        whole_(table.attend_whole[static_cast<int>(args.kv.kind)]),
        args_(args),
        tiling_(args) {}

  void run(const Share& share) const override {
    if (AttendPlan::splits_are_tasks(args_, tiling_, share.threads)) {
      run_splits(share);
      return;
    }
    int mine = share.take(), task = 0;
    tiling_.each(args_, kWholeTiles, [&](const AttendTile* tiles, int count) {
      if (mine == task++) {
        whole_(args_, tiles, count);
        mine = share.take();
      }
    });
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override {
    Access values = Access::of(args_.act, true);
    values.act = false;  // whole tiles go to rows that all threads read
    return {Access::read(args_.q), Access::layer(args_.kv, false), Access::workspace(true), values};
  }

 private:
  // Every thread has a fixed run of splits: most of a tile's are then merged where they were computed.
  void run_splits(const Share& share) const {
    int all = 0, before = 0;
    tiling_.each(args_, 1, [&](const AttendTile* tile, int) {
      const Range splits = tile_splits(args_, *tile);
      all += splits.end - splits.begin;
    });
    const Range mine = share.cut(all);
    tiling_.each(args_, 1, [&](const AttendTile* tile, int) {
      const Range splits = tile_splits(args_, *tile);
      const int begin = std::max(mine.begin - before, 0), end = std::min(mine.end - before, splits.end - splits.begin);
      if (begin < end) splits_(args_, *tile, splits.begin + begin, splits.begin + end, Workspace::instance().data());
      before += splits.end - splits.begin;
    });
  }

  void (*splits_)(const AttendArgs&, const AttendTile&, int, int, float*);
  void (*whole_)(const AttendArgs&, const AttendTile*, int);
  AttendArgs args_;
  Tiling tiling_;
};

class AttendMergeStage final : public Stage {
 public:
  AttendMergeStage(const Table& table, const AttendArgs& args)
      : kernel_(table.attend_merge), args_(args), tiling_(args) {}

  void run(const Share& share) const override {
    const bool by_split = AttendPlan::splits_are_tasks(args_, tiling_, share.threads);
    const Range rows = share.act_rows(count_of(args_.batch, kRows));
    kernel_(args_, by_split ? Workspace::instance().data() : nullptr, rows.begin, rows.end, share.act_row(args_.act));
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::workspace(false), Access::of(args_.act, true)}; }
  ActUse act_use() const override { return {&args_.act, kRows, true}; }

 private:
  decltype(Table::attend_merge) kernel_;
  AttendArgs args_;
  Tiling tiling_;
};

class ActMulStage final : public Stage {
 public:
  ActMulStage(const Table& table, const ActMulArgs& args) : kernel_(table.act_mul), args_(args) {}
  void run(const Share& share) const override {
    const Range rows = share.act_rows(count_of(args_.batch, kRows));
    kernel_(args_, rows.begin, rows.end, share.act_row(args_.act));
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override {
    return {Access::read(args_.gate), Access::read(args_.up), Access::of(args_.act, true)};
  }
  ActUse act_use() const override { return {&args_.act, kRows, true}; }

 private:
  decltype(Table::act_mul) kernel_;
  ActMulArgs args_;
};

}  // namespace llmctl::cpu
