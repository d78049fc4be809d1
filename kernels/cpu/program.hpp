// A recorded list of ops: all stages in one region of the pool, with barriers only where two stages touch one memory.
//
// With at most kPrivateRows rows the rows of an Act are private: every thread computes them for itself, which costs
// less than the barrier that sharing would need. That holds for a producer and the consumers up to the next producer of
// the same Act, all inside this program; outside it, and for ops run alone, rows are shared.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "stages.hpp"

namespace llmctl::cpu {

class Program {
 public:
  // The stages must outlive the program, and all read one batch.
  explicit Program(std::vector<const Stage*> stages)
      : stages_(std::move(stages)), counters_(std::make_unique<Counter[]>(stages_.size())) {
    plan_for(Pool::instance().threads());
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Computes every op for the rows now in the batch, on all threads of the pool.
  void replay() {
    if (stages_.empty()) return;
    Pool& pool = Pool::instance();
    const Batch& batch = stages_[0]->batch();
    const unsigned now =
        1u << case_of(count_of(batch, kRows) <= kPrivateRows, count_of(batch, kLogitRows) <= kPrivateRows);
    const auto prepare = [&](int threads) {
      if (threads != planned_threads_) plan_for(threads);
      for (std::size_t i = 0; i < stages_.size(); ++i) counters_[i].value.store(0, std::memory_order_relaxed);
    };
    pool.run(prepare, [&](int thread, int threads) {
      for (std::size_t i = 0; i < stages_.size(); ++i) {
        if (steps_[i].barrier_before & now) pool.barrier();
        stages_[i]->run(Share{thread, threads, &counters_[i].value, (steps_[i].private_act & now) != 0});
      }
    });
  }

  // How many barriers a replay has inside, for so few or many rows.
  int barriers(int rows, int logit_rows) const {
    const unsigned now = 1u << case_of(rows <= kPrivateRows, logit_rows <= kPrivateRows);
    int n = 0;
    for (const Step& step : steps_) n += (step.barrier_before & now) != 0;
    return n;
  }

 private:
  // Four cases: few rows or not, few logit rows or not. One bit each.
  static constexpr unsigned kCases = 4;
  static unsigned case_of(bool few_rows, bool few_logit_rows) {
    return (few_rows ? 1u : 0u) + (few_logit_rows ? 2u : 0u);
  }

  struct Step {
    unsigned barrier_before = 0;
    unsigned private_act = 0;
  };
  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };

  void plan_for(int threads) {
    planned_threads_ = threads;
    steps_.assign(stages_.size(), Step{});
    for (unsigned which = 0; which < kCases; ++which) {
      choose_private(which, threads);
      place_barriers(which);
    }
  }

  void choose_private(unsigned which, int threads) {
    std::vector<ActUse> uses;
    for (const Stage* stage : stages_) uses.push_back(stage->act_use());
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (uses[i].act == nullptr || !uses[i].produces) continue;
      const bool few = which & (uses[i].count == kLogitRows ? 2u : 1u);
      bool agreed = few && threads <= uses[i].act->private_threads;
      std::vector<std::size_t> segment{i};
      for (std::size_t j = i + 1; j < uses.size(); ++j) {
        if (uses[j].act == nullptr || uses[j].act->values != uses[i].act->values) continue;
        if (uses[j].produces) break;
        agreed = agreed && uses[j].count == uses[i].count;
        segment.push_back(j);
      }
      if (!agreed) continue;
      for (std::size_t j : segment) steps_[j].private_act |= 1u << which;
    }
  }

  struct Touched {
    Access access;
    bool is_private;
  };

  void place_barriers(unsigned which) {
    std::vector<Touched> since;  // the last barrier
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      std::vector<Touched> mine;
      for (const Access& access : stages_[i]->accesses()) {
        mine.push_back({access, access.act && (steps_[i].private_act >> which & 1u) != 0});
      }
      if (clash(since, mine)) {
        steps_[i].barrier_before |= 1u << which;
        since.clear();
      }
      since.insert(since.end(), mine.begin(), mine.end());
    }
  }

  static bool clash(const std::vector<Touched>& before, const std::vector<Touched>& after) {
    for (const Touched& a : before) {
      for (const Touched& b : after) {
        if (!a.access.write && !b.access.write) continue;
        if (a.is_private && b.is_private) continue;
        const std::less<const void*> less;
        if (less(a.access.begin, b.access.end) && less(b.access.begin, a.access.end)) return true;
      }
    }
    return false;
  }

  std::vector<const Stage*> stages_;
  std::unique_ptr<Counter[]> counters_;
  std::vector<Step> steps_;
  int planned_threads_ = 0;
};

// An op: the stages that compute it, in order, and the program of them alone.
class Op {
 public:
  explicit Op(std::vector<std::unique_ptr<Stage>> stages) : stages_(std::move(stages)), alone_(this->stages()) {}
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  void run() { alone_.replay(); }

  std::vector<const Stage*> stages() const {
    std::vector<const Stage*> all;
    for (const auto& stage : stages_) all.push_back(stage.get());
    return all;
  }

 private:
  std::vector<std::unique_ptr<Stage>> stages_;
  Program alone_;
};

}  // namespace llmctl::cpu
