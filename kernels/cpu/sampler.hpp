// The sample op: rows of logits over the threads, each with scratch memory of its own.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "pool.hpp"
#include "table.hpp"

namespace llmctl::cpu {

class Sampler {
 public:
  Sampler(const Table& table, const SampleArgs& args)
      : kernel_(table.sample),
        args_(args),
        threads_(Pool::instance().threads()),
        stride_((sample_scratch_bytes(args.vocab_size) + 63) / 64 * 64),
        scratch_(static_cast<std::byte*>(std::calloc(static_cast<std::size_t>(threads_) + 1, stride_))) {
    if (scratch_ == nullptr) throw std::bad_alloc();
  }

  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // Samples the first `rows` rows.
  void run(int rows) {
    std::atomic<int> next{0};
    std::byte* first = scratch_.get() + (64 - reinterpret_cast<std::uintptr_t>(scratch_.get()) % 64);
    Pool::instance().run([](int) {},
                         [&](int thread, int) {
                           if (thread >= threads_) return;  // the pool grew since: no scratch for this one
                           for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
                             kernel_(args_, row, row + 1, first + static_cast<std::size_t>(thread) * stride_);
                           }
                         });
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  decltype(Table::sample) kernel_;
  SampleArgs args_;
  int threads_;
  std::size_t stride_;
  std::unique_ptr<std::byte, Free> scratch_;
};

}  // namespace llmctl::cpu
