// A head that computes whole only what may be a row's largest output, where the step looks for nothing else: the stages
// around screen.hpp.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "pages.hpp"
#include "stages.hpp"

namespace llmctl::cpu {

// What the stages of a screened head share. What bounds need of the weights is made beside the first steps that want it,
// which are computed as ever: norms at once, the coarse copy piece by piece. Memory is there for the rows that a step
// may have, and real where it was touched.
class Screen {
 public:
  static constexpr int kLeastRows = 7, kMostRows = 128;  // of which 8 bits are read; fewer wait for the weights
  static constexpr int kPieces = 32;  // of the coarse copy: a step of few rows may take a third longer by one

  // How a step computes the head.
  enum class Way { whole, whole_and_norms, whole_and_piece, few, many };

  Screen(const Table& table, const LinearArgs& args)
      : table(table), rows_(std::min(static_cast<int>(args.out.count), kMostRows)) {
    const std::size_t rows = static_cast<std::size_t>(rows_), k = static_cast<std::size_t>(args.act.k);
    const std::size_t groups = k / static_cast<std::size_t>(args.form.group);
    const std::size_t panels = static_cast<std::size_t>(args.weight.panels);
    codes_ = room<float>(rows * k / sizeof(float));
    scales_ = room<float>(rows * groups);
    sums_ = room<float>(rows * groups);
    norms_ = room<float>(panels * kPanel);
    reach_ = room<float>(rows);
    upper_ = room<float>(panels * rows);
    best_ = std::make_unique<std::atomic<float>[]>(rows);
    if (args.weight.group % 32 == 0) {
      const std::size_t bytes = panels * static_cast<std::size_t>(coarse_panel_bytes(args.weight.k, args.weight.group));
      coarse_ = room<uint8_t>(bytes, kLargePage);
      ask_for_large_pages(reinterpret_cast<char*>(coarse_.get()), bytes);
      coarse_codes_ = room<int8_t>(2 * kCoarseRows * k);
      coarse_facts_ = room<float>(kCoarseFacts * kCoarseRows * groups);
    }
    LinearArgs screened = args;
    screened.form = {FormKind::i8,    args.form.group, nullptr, nullptr, codes_.get(), scales_.get(),
                     reinterpret_cast<int32_t*>(sums_.get()), nullptr};
    this->args = {screened, args.form, norms_.get(), reach_.get(), upper_.get(), best_.get(), rows_,
                  coarse_.get(), coarse_codes_.get(), coarse_facts_.get()};
    exact = args;
  }

  int logit_rows() const { return count_of(exact.batch, kLogitRows); }
  Way way() const {
    const int rows = logit_rows();
    if (exact.batch.counts[kLargestOnly] == 0 || rows > rows_) return Way::whole;
    if (rows >= kLeastRows) return has_norms_.load(std::memory_order_relaxed) ? Way::many : Way::whole_and_norms;
    if (rows == 0 || rows > kCoarseRows || args.coarse == nullptr) return Way::whole;
    return next_piece().begin == args.weight.panels ? Way::few : Way::whole_and_piece;
  }
  // The panels that a step copies.
  Range next_piece() const {
    const int panels = args.weight.panels, begin = copied_.load(std::memory_order_relaxed);
    return {begin, std::min(panels, begin + (panels + kPieces - 1) / kPieces)};
  }
  void keep_norms() { has_norms_.store(true, std::memory_order_relaxed); }
  void keep_piece() { copied_.store(next_piece().end, std::memory_order_relaxed); }
  Access bounds(bool write) const { return {this, this + 1, write, false}; }

  const Table& table;
  LinearArgs exact;
  ScreenArgs args;

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  template <class T>
  using Room = std::unique_ptr<T, Free>;
  template <class T>
  static Room<T> room(std::size_t count, std::size_t alignment = 64) {
    void* p = std::aligned_alloc(alignment, (count * sizeof(T) + alignment - 1) / alignment * alignment);
    if (p == nullptr) throw std::bad_alloc();
    return Room<T>(static_cast<T*>(p));
  }

  int rows_;
  Room<float> codes_, scales_, sums_, norms_, reach_, upper_, coarse_facts_;
  Room<uint8_t> coarse_;
  Room<int8_t> coarse_codes_;
  std::unique_ptr<std::atomic<float>[]> best_;
  std::atomic<bool> has_norms_{false};
  std::atomic<int> copied_{0};  // panels
};

class ScreenRowsStage final : public Stage {
 public:
  explicit ScreenRowsStage(std::shared_ptr<Screen> screen) : screen_(std::move(screen)) {}
  void run(const Share& share) const override {
    const ScreenArgs& args = screen_->args;
    const int rows = screen_->logit_rows();
    const Range own = share.cut(rows);
    const Screen::Way way = screen_->way();
    if (way == Screen::Way::many) screen_->table.screen_rows(args, own.begin, own.end);
    if (way == Screen::Way::few) {
      screen_->table.coarse_rows(args, rows, own.begin, own.end, share.act_row(args.act));
    }
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
      : screen_(std::move(screen)),
        exact_(screen_->table.linear[static_cast<int>(screen_->exact.weight.kind)]),
        chunk_(screen_->table.chunk[static_cast<int>(screen_->exact.weight.kind)]) {}
  void run(const Share& share) const override {
    const Table& table = screen_->table;
    const ScreenArgs& args = screen_->args;
    const int rows = screen_->logit_rows();
    const Range panels = share.cut(args.weight.panels);
    switch (screen_->way()) {
      case Screen::Way::few:
        table.coarse(args, rows, panels.begin, panels.end);
        return;
      case Screen::Way::many:
        spread_linear(share, args, rows, LinearChunk{}, table.screen);
        return;
      case Screen::Way::whole_and_norms:
        table.screen_norms(args, panels.begin, panels.end);
        break;
      case Screen::Way::whole_and_piece: {
        const Range piece = screen_->next_piece(), own = share.cut(piece.end - piece.begin);
        table.coarse_panels(args, piece.begin + own.begin, piece.begin + own.end);
        break;
      }
      case Screen::Way::whole:
        break;
    }
    spread_linear(share, screen_->exact, rows, chunk_, exact_);
  }
  const Batch& batch() const override { return screen_->exact.batch; }
  std::vector<Access> accesses() const override {
    return {Access::of(screen_->exact.act, false), screen_->bounds(true), Access::write_to(screen_->exact.out)};
  }
  ActUse act_use() const override { return {&screen_->exact.act, kLogitRows, false}; }

 private:
  std::shared_ptr<Screen> screen_;
  void (*exact_)(const LinearArgs&, int, int, int, int, int);
  LinearChunk chunk_;
};

class ScreenedStage final : public Stage {
 public:
  explicit ScreenedStage(std::shared_ptr<Screen> screen)
      : screen_(std::move(screen)), exact_(screen_->table.linear[static_cast<int>(screen_->exact.weight.kind)]) {}
  void run(const Share& share) const override {
    const Screen::Way way = screen_->way();
    if (way == Screen::Way::whole) return;
    if (way == Screen::Way::whole_and_norms || way == Screen::Way::whole_and_piece) {
      if (share.take() < share.threads - 1) return;  // others have yet to look
      way == Screen::Way::whole_and_norms ? screen_->keep_norms() : screen_->keep_piece();
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
