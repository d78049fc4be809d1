// The state of the emulated machine that the scheduler (machine.cpp), warp-wide operations (warp.cpp) and the checker
// (checker.cpp) share. One kernel runs at a time, in one process thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "emulator.hpp"

namespace llmctl::emu {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kMaxSharedBytes = 227 << 10;  // what one block of sm_90 may have

struct AsyncCopy {
  unsigned char* to;
  const unsigned char* from;
  int bytes, valid_bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Dim index{};
  int linear = 0, warp = 0, lane = 0;
  bool done = false;
  Site waits_at{"", 0};
  // Happens-before inside the warp: our own clock, and of every lane the last one that a __syncwarp told us of.
  uint32_t clock = 1;
  uint32_t known[32] = {};
  std::vector<AsyncCopy> open_copies;
  std::vector<std::vector<AsyncCopy>> copy_groups;
};

extern Fiber* current;
extern std::vector<Fiber> fibers;
extern unsigned char* shared;  // kMaxSharedBytes, of which the launch asked for shared_bytes
extern size_t shared_bytes;
extern uint32_t barrier_epoch;  // of the running block
extern uint32_t block_serial;   // of all blocks that ever ran
extern uint32_t launch_serial;
extern const unsigned char* parameters;
extern size_t parameter_bytes;
extern bool running;

void report(const std::string& what);
std::string at(Site);
void wait(Site);        // leaves the current fiber until something wakes it
void wake(Fiber&);
[[noreturn]] void abandon();  // ends the launch: going on would destroy memory that is not the kernel's
void reset_warps(int threads);
void lane_exited(const Fiber&);

// checker.cpp; empty in the values build.
enum class Access { kRead, kWrite, kAtomic, kCopyIssued, kCopyDone };
void check(const void* p, size_t bytes, Access, const void* pc);

}  // namespace llmctl::emu
