// A head that computes whole only what may be a row's largest output, where the step looks for nothing else: the stages
// around screen.hpp.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "stages.hpp"

namespace llmctl::cpu {

// What the stages of a screened head share. The norms of its weights are found beside the first step that wants them,
// which is computed as ever. Memory is there for the rows that a step may have, and real where it was touched.
class Screen {
 public:
  static constexpr int kLeastRows = 7;  // fewer wait for the weights, whichever way they are multiplied
  static constexpr int kMostRows = 128;

  Screen(const Table& table, const LinearArgs& args)
      : table(table), rows_(std::min(static_cast<int>(args.out.count), kMostRows)) {
    const std::size_t rows = static_cast<std::size_t>(rows_), k = static_cast<std::size_t>(args.act.k);
    const std::size_t groups = k / static_cast<std::size_t>(args.form.group);
    const std::size_t panels = static_cast<std::size_t>(args.weight.panels);
    codes_ = floats(rows * k / sizeof(float));
    scales_ = floats(rows * groups);
    sums_ = floats(rows * groups);
    norms_ = floats(panels * kPanel);
    reach_ = floats(rows);
    upper_ = floats(panels * rows);
    best_ = std::make_unique<std::atomic<float>[]>(rows);
    LinearArgs screened = args;
    screened.form = {FormKind::i8,    args.form.group, nullptr, nullptr, codes_.get(), scales_.get(),
                     reinterpret_cast<int32_t*>(sums_.get()), nullptr};
    this->args = {screened, args.form, norms_.get(), reach_.get(), upper_.get(), best_.get(), rows_};
    exact = args;
  }

  int logit_rows() const { return count_of(exact.batch, kLogitRows); }
  bool wanted() const {
    return exact.batch.counts[kLargestOnly] != 0 && logit_rows() >= kLeastRows && logit_rows() <= rows_;
  }
  bool has_norms() const { return has_norms_.load(std::memory_order_relaxed); }
  void keep_norms() { has_norms_.store(true, std::memory_order_relaxed); }
  Access bounds(bool write) const { return {this, this + 1, write, false}; }

  const Table& table;
  LinearArgs exact;
  ScreenArgs args;

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  using Floats = std::unique_ptr<float, Free>;
  static Floats floats(std::size_t count) {
    float* p = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
    if (p == nullptr) throw std::bad_alloc();
    return Floats(p);
  }

  int rows_;
  Floats codes_, scales_, sums_, norms_, reach_, upper_;
  std::unique_ptr<std::atomic<float>[]> best_;
  std::atomic<bool> has_norms_{false};
};

class ScreenRowsStage final : public Stage {
 public:
  explicit ScreenRowsStage(std::shared_ptr<Screen> screen) : screen_(std::move(screen)) {}
  void run(const Share& share) const override {
    if (!screen_->wanted() || !screen_->has_norms()) return;
    const Range rows = share.cut(screen_->logit_rows());
    screen_->table.screen_rows(screen_->args, rows.begin, rows.end);
  }
  const Batch& batch() const override { return screen_->exact.batch; }
  std::vector<Access> accesses() const override {
    return {Access::of(screen_->exact.act, false), screen_->bounds(true)};
  }
  ActUse act_use() const override { return {&screen_->exact.act, kLogitRows, false}; }

 private:
  std::shared_ptr<Screen> screen_;
};

class ScreenStage final : public Stage {
 public:
  explicit ScreenStage(std::shared_ptr<Screen> screen)
      : screen_(std::move(screen)), exact_(screen_->table.linear[static_cast<int>(screen_->exact.weight.kind)]) {}
  void run(const Share& share) const override {
    const int rows = screen_->logit_rows();
    if (screen_->wanted() && screen_->has_norms()) {
      spread_linear(share, screen_->args, rows, screen_->table.screen);
      return;
    }
    if (screen_->wanted()) {
      const Range panels = share.cut(screen_->exact.weight.panels);
      screen_->table.screen_norms(screen_->args, panels.begin, panels.end);
    }
    spread_linear(share, screen_->exact, rows, exact_);
  }
  const Batch& batch() const override { return screen_->exact.batch; }
  std::vector<Access> accesses() const override {
    return {Access::of(screen_->exact.act, false), screen_->bounds(true), Access::write_to(screen_->exact.out)};
  }
  ActUse act_use() const override { return {&screen_->exact.act, kLogitRows, false}; }

 private:
  std::shared_ptr<Screen> screen_;
  void (*exact_)(const LinearArgs&, int, int, int, int, int);
};

class ScreenedStage final : public Stage {
 public:
  explicit ScreenedStage(std::shared_ptr<Screen> screen)
      : screen_(std::move(screen)), exact_(screen_->table.linear[static_cast<int>(screen_->exact.weight.kind)]) {}
  void run(const Share& share) const override {
    if (!screen_->wanted()) return;
    if (!screen_->has_norms()) {
      if (share.take() == share.threads - 1) screen_->keep_norms();  // the last to look
      return;
    }
    const ScreenArgs& args = screen_->args;
    const int rows = screen_->logit_rows();
    const Range panels = share.cut(args.weight.panels);
    for (int panel = panels.begin; panel < panels.end; ++panel) {
      const float* upper = args.upper + static_cast<long>(panel) * args.rows;
      const auto is_below = [&](int row) { return upper[row] < args.best[row].load(std::memory_order_relaxed); };
      for (int row = 0; row < rows; ++row) {
        if (is_below(row)) continue;
        const int first = row;
        while (row + 1 < rows && !is_below(row + 1)) ++row;
        exact_(screen_->exact, panel, panel + 1, first, row + 1, share.act_row(args.act));
      }
    }
  }
  const Batch& batch() const override { return screen_->exact.batch; }
  std::vector<Access> accesses() const override {
    return {Access::of(screen_->exact.act, false), screen_->bounds(false), Access::write_to(screen_->exact.out)};
  }
  ActUse act_use() const override { return {&screen_->exact.act, kLogitRows, false}; }

 private:
  std::shared_ptr<Screen> screen_;
  void (*exact_)(const LinearArgs&, int, int, int, int, int);
};

}  // namespace llmctl::cpu
