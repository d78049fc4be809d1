// The thread pool: one region at a time, in which every thread runs the same function and meets the others at barriers.
//
// The caller is thread 0. Workers are made on first use, each pinned to a CPU of its own within the affinity mask; the
// caller stays free, and the CPU on which it makes the workers is left to it: an unpinned worker that sleeps is woken
// on the caller's CPU, where the caller spins, and waits for milliseconds. Whoever waits spins first, because waking a
// sleeper costs 25-110 us: workers for 6 ms, which covers sampling and Python between two steps; everybody else for 50
// us, since a CPU may have other users. Then it sleeps on a futex. With more threads than CPUs nobody spins for long.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace llmctl::cpu {

// A counter that threads wait on until it changes: spin, then sleep.
class Gate {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, address(), FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, nullptr, nullptr, 0);
    }
  }

  void wait_past(uint32_t seen, std::chrono::microseconds spin) {
    for (int i = 0; i < 64; ++i) {
      if (now() != seen) return;
      pause();
    }
    const auto give_up = std::chrono::steady_clock::now() + spin;
    while (std::chrono::steady_clock::now() < give_up) {
      for (int i = 0; i < 64; ++i) {
        if (now() != seen) return;
        pause();
      }
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == seen) {
      syscall(SYS_futex, address(), FUTEX_WAIT | FUTEX_PRIVATE_FLAG, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&value_); }

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

class Pool {
 public:
  // The process's pool. It is never destroyed: at exit its workers are spinning or asleep. A forked child, which has
  // none of its parent's threads, gets a pool of its own.
  static Pool& instance() { return *current(); }

  int threads() {
    std::lock_guard lock(mutex_);
    return threads_;
  }

  // Takes effect at the next region.
  void set_threads(int threads) {
    std::lock_guard lock(mutex_);
    if (threads == threads_) return;
    stop_workers();
    threads_ = threads;
  }

  // Runs prepare(threads) on the caller, then function(thread, threads) on every thread; returns when all have
  // finished. Regions of different callers follow one another. The function must not throw, nor start a region.
  template <class Prepare, class Function>
  void run(Prepare&& prepare, Function&& function) {
    std::lock_guard lock(mutex_);
    prepare(threads_);
    if (threads_ == 1) {
      function(0, 1);
      return;
    }
    if (workers_.empty()) start_workers();
    using Callee = std::remove_reference_t<Function>;
    call_ = [](void* callee, int thread, int threads) { (*static_cast<Callee*>(callee))(thread, threads); };
    callee_ = &function;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    const uint32_t finished = finished_.now();
    started_.advance();
    function(0, threads_);
    finished_.wait_past(finished, short_spin_);
  }

  // Runs function() on the caller while no region runs.
  template <class Function>
  void while_idle(Function&& function) {
    std::lock_guard lock(mutex_);
    function();
  }

  // Inside a region: returns when every thread has arrived.
  void barrier() {
    if (threads_ == 1) return;
    const uint32_t generation = met_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      met_.advance();
    } else {
      met_.wait_past(generation, short_spin_);
    }
  }

 private:
  static Pool*& current() {
    static Pool* pool = [] {
      pthread_atfork(nullptr, nullptr, [] {
        Pool* fresh = new Pool;
        fresh->threads_ = current()->threads_;
        current() = fresh;
      });
      return new Pool;
    }();
    return pool;
  }

  void start_workers() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof(allowed), &allowed);
    const int here = sched_getcpu();
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed) && cpu != here) cpus.push_back(cpu);
    }
    const bool crowded = threads_ > static_cast<int>(cpus.size()) + 1;
    short_spin_ = std::chrono::microseconds(crowded ? 2 : 50);
    idle_spin_ = std::chrono::microseconds(crowded ? 2 : 6000);
    stop_ = false;
    try {
      for (int thread = 1; thread < threads_; ++thread) {
        workers_.emplace_back([this, thread, seen = started_.now()] { work(thread, seen); });
        if (thread <= static_cast<int>(cpus.size())) pin(workers_.back(), cpus[static_cast<std::size_t>(thread) - 1]);
      }
    } catch (...) {  // the system has no more threads: a region with fewer would wait for ever
      stop_workers();
      throw;
    }
  }

  static void pin(std::thread& worker, int cpu) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    pthread_setaffinity_np(worker.native_handle(), sizeof(own), &own);
  }

  void stop_workers() {
    if (workers_.empty()) return;
    stop_ = true;
    started_.advance();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  void work(int thread, uint32_t seen) {
    for (;;) {
      started_.wait_past(seen, idle_spin_);
      ++seen;
      if (stop_) return;
      call_(callee_, thread, threads_);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) finished_.advance();
    }
  }

  std::mutex mutex_;  // held during a region
  int threads_ = 1;
  std::vector<std::thread> workers_;
  std::chrono::microseconds short_spin_{50}, idle_spin_{6000};
  bool stop_ = false;
  void (*call_)(void*, int, int) = nullptr;
  void* callee_ = nullptr;
  Gate started_, finished_, met_;
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace llmctl::cpu
