// Attention on latents as stages: store and queries, attention, heads, forms.
//
// Each takes its tasks from a counter. The workspace has the queries of all rows, which attention replaces by what it
// found, and behind them partial results where few tiles leave their splits to many threads.
#pragma once

#include "stages.hpp"

namespace llmctl::cpu {

struct LatentPlan {
  static constexpr int kRowChunk = 64;  // rows for which a part of `up` is unpacked once
  static constexpr int kTasksPerThread = 4;
  static constexpr std::size_t kMostPartials = std::size_t{4} << 20;  // floats, where one row does not need more

  static int row_chunks(int rows) { return (rows + kRowChunk - 1) / kRowChunk; }

  // Calls visit(tile) for each run of at most kLatentTiles rows of a sequence, times each chunk of heads.
  template <class Visit>
  static void each_tile(const LatentArgs& a, Visit&& visit) {
    for (int chunk = 0; chunk < a.chunks(); ++chunk) {
      for (int s = 0; s < count_of(a.batch, kSeqs); ++s) {
        const int first = a.batch.seq_first[s], rows = a.batch.seq_rows[s];
        for (int i = 0; i < rows; i += kLatentTiles) {
          visit(LatentTile{first + i, std::min(kLatentTiles, rows - i), chunk});
        }
      }
    }
  }

  static std::size_t query_floats(const LatentArgs& a) {
    return static_cast<std::size_t>(a.act.max_rows * latent_row_floats(a));
  }
  static std::size_t partial_floats(const LatentArgs& a, int rows) {
    return static_cast<std::size_t>(latent_partial(a, rows, 0, 0));
  }

  // Few tiles: a task is one split of a row.
  static bool splits_are_tasks(const LatentArgs& a, int threads) {
    int tiles = 0;
    for (int s = 0; s < count_of(a.batch, kSeqs); ++s) tiles += (a.batch.seq_rows[s] + kLatentTiles - 1) / kLatentTiles;
    return tiles * a.chunks() < kTasksPerThread * threads &&
           query_floats(a) + partial_floats(a, count_of(a.batch, kRows)) <= Workspace::instance().floats();
  }

  static std::size_t workspace_floats(const LatentArgs& a, int threads) {
    const int rows = std::min(a.act.max_rows, kTasksPerThread * threads * kLatentTiles / a.chunks() + 1);
    return query_floats(a) + std::min(partial_floats(a, rows), std::max(partial_floats(a, 1), kMostPartials));
  }

  static float* queries() { return Workspace::instance().data(); }
  static float* partials(const LatentArgs& a) { return queries() + query_floats(a); }
};

class LatentQueryStage final : public Stage {
 public:
  LatentQueryStage(const Table& table, const LatentArgs& args)
      : store_(table.latent_store), absorb_(table.latent_absorb), args_(args) {}

  void run(const Share& share) const override {
    const int rows = count_of(args_.batch, kRows);
    const Range own = share.cut(rows);
    store_(args_, own.begin, own.end);
    const int parts = (args_.up.k + kAbsorbRanks - 1) / kAbsorbRanks + 1, each = args_.chunks() * parts;
    for (int task; (task = share.take()) < each * LatentPlan::row_chunks(rows);) {
      const int row = task / each * LatentPlan::kRowChunk;
      absorb_(args_, LatentPlan::queries(), task % each / parts, task % parts, row,
              std::min(row + LatentPlan::kRowChunk, rows));
    }
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override {
    return {Access::read(args_.q), Access::read(args_.latent), Access::layer(args_.kv, true), Access::workspace(true)};
  }

 private:
  decltype(Table::latent_store) store_;
  decltype(Table::latent_absorb) absorb_;
  LatentArgs args_;
};

class LatentAttendStage final : public Stage {
 public:
  LatentAttendStage(const Table& table, const LatentArgs& args)
      : split_(table.latent_split[static_cast<int>(args.kv.kind)]),
        whole_(table.latent_whole[static_cast<int>(args.kv.kind)]),
        args_(args) {}

  void run(const Share& share) const override {
    const bool by_split = LatentPlan::splits_are_tasks(args_, share.threads);
    int mine = share.take(), task = 0;
    LatentPlan::each_tile(args_, [&](const LatentTile& tile) {
      if (!by_split) {
        if (mine == task++) {
          whole_(args_, LatentPlan::queries(), tile);
          mine = share.take();
        }
        return;
      }
      for (int row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
        const int first = task;
        task += args_.batch.position[row] / kAttendSplit + 1;
        for (; mine < task; mine = share.take()) {
          split_(args_, LatentPlan::queries(), row, tile.chunk, mine - first, LatentPlan::partials(args_));
        }
      }
    });
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::layer(args_.kv, false), Access::workspace(true)}; }

 private:
  void (*split_)(const LatentArgs&, const float*, int, int, int, float*);
  void (*whole_)(const LatentArgs&, float*, const LatentTile&);
  LatentArgs args_;
};

class LatentProjectStage final : public Stage {
 public:
  LatentProjectStage(const Table& table, const LatentArgs& args)
      : merge_(table.latent_merge), project_(table.latent_project), args_(args) {}

  void run(const Share& share) const override {
    const bool by_split = LatentPlan::splits_are_tasks(args_, share.threads);
    const int rows = count_of(args_.batch, kRows), tasks = args_.num_heads * LatentPlan::row_chunks(rows);
    for (int task; (task = share.take()) < tasks;) {
      const int head = task % args_.num_heads, row = task / args_.num_heads * LatentPlan::kRowChunk;
      const int end = std::min(row + LatentPlan::kRowChunk, rows);
      if (by_split) merge_(args_, LatentPlan::queries(), LatentPlan::partials(args_), head, row, end);
      project_(args_, LatentPlan::queries(), head, row, end);
    }
  }

  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override {
    Access values = Access::of(args_.act, true);
    values.act = false;  // rows that all threads read
    return {Access::workspace(true), values};
  }

 private:
  decltype(Table::latent_merge) merge_;
  decltype(Table::latent_project) project_;
  LatentArgs args_;
};

class LatentFinishStage final : public Stage {
 public:
  LatentFinishStage(const Table& table, const LatentArgs& args) : kernel_(table.latent_finish), args_(args) {}
  void run(const Share& share) const override {
    const Range rows = share.act_rows(count_of(args_.batch, kRows));
    kernel_(args_.act, rows.begin, rows.end, share.act_row(args_.act));
  }
  const Batch& batch() const override { return args_.batch; }
  std::vector<Access> accesses() const override { return {Access::of(args_.act, true)}; }
  ActUse act_use() const override { return {&args_.act, kRows, true}; }

 private:
  decltype(Table::latent_finish) kernel_;
  LatentArgs args_;
};

}  // namespace llmctl::cpu
