// Fibers, barriers and launches: runs the blocks of a grid one after another, each with one fiber per CUDA thread.
#include "machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <map>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace llmctl::emu {

Fiber* current = nullptr;
std::vector<Fiber> fibers;
unsigned char* shared = nullptr;
size_t shared_bytes = 0;
uint32_t barrier_epoch = 1, block_serial = 0, launch_serial = 0;
const unsigned char* parameters = nullptr;
size_t parameter_bytes = 0;
bool running = false;

namespace {

enum class Order { kAscending, kDescending, kRandom };

Order order = Order::kAscending;
uint64_t random_state = 1;
std::map<std::string, long> reports;
std::vector<Fiber*> ready;
std::vector<Fiber*> at_barrier;
Site barrier_site{"", 0};
int alive = 0;
bool abandoned = false;
Dim block_now{}, block_shape{}, grid_shape{};
void (*kernel_entry)(const unsigned char*) = nullptr;

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void fiber_main();

#ifdef __x86_64__
// Saves what the calling convention lets a callee expect, and continues on the other stack. ucontext would make two
// system calls per switch.
extern "C" void llmctl_emu_switch(void** save, void* to);
asm(R"(
.text
.hidden llmctl_emu_switch
.globl llmctl_emu_switch
llmctl_emu_switch:
  push %rbx
  push %rbp
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbp
  pop %rbx
  ret
)");
void* scheduler_stack = nullptr;
void enter(Fiber& fiber) { llmctl_emu_switch(&scheduler_stack, fiber.stack_pointer); }
void leave(Fiber& fiber) { llmctl_emu_switch(&fiber.stack_pointer, scheduler_stack); }
void prepare(Fiber& fiber) {
  // As if fiber_main had been called: six registers to pop, then its address, then a return address it never uses.
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}
#else
ucontext_t scheduler_context;
std::map<Fiber*, ucontext_t> contexts;
void enter(Fiber& fiber) { swapcontext(&scheduler_context, &contexts[&fiber]); }
void leave(Fiber& fiber) { swapcontext(&contexts[&fiber], &scheduler_context); }
void prepare(Fiber& fiber) {
  ucontext_t& context = contexts[&fiber];
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
}
#endif

void release_barrier() {
  ++barrier_epoch;
  for (Fiber* fiber : at_barrier) wake(*fiber);
  at_barrier.clear();
}

void fiber_main() {
  kernel_entry(parameters);
  if (!current->open_copies.empty() || !current->copy_groups.empty()) report("cp.async never waited for");
  current->done = true;
  --alive;
  lane_exited(*current);
  for (;;) leave(*current);
}

void report_deadlock(int threads) {
  std::map<std::string, int> waiting;
  for (int i = 0; i < threads; ++i) {
    if (!fibers[i].done) ++waiting[at(fibers[i].waits_at)];
  }
  std::string what = "deadlock:";
  for (const auto& [site, count] : waiting) what += " " + std::to_string(count) + " threads wait at " + site + ",";
  report(what + " " + std::to_string(threads - alive) + " have exited");
}

// Runs one block to its end; false if it cannot come to one.
bool run_block(int threads) {
  ++block_serial;
  barrier_epoch = 1;
  alive = threads;
  at_barrier.clear();
  ready.clear();
  std::memset(shared, 0xff, shared_bytes);  // NaN in every float type
  reset_warps(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    const unsigned t = static_cast<unsigned>(i);
    fiber.linear = i;
    fiber.warp = i / 32;
    fiber.lane = i % 32;
    fiber.index = {t % block_shape.x, t / block_shape.x % block_shape.y, t / (block_shape.x * block_shape.y)};
    fiber.done = false;
    fiber.clock = 1;
    std::fill(std::begin(fiber.known), std::end(fiber.known), 0u);
    fiber.open_copies.clear();
    fiber.copy_groups.clear();
    prepare(fiber);
    ready.push_back(&fiber);
  }
  for (size_t head = 0; head < ready.size();) {
    if (order == Order::kDescending) std::swap(ready[head], ready.back());
    if (order == Order::kRandom) std::swap(ready[head], ready[head + next_random() % (ready.size() - head)]);
    current = ready[head++];
    if (head == 4096) {
      ready.erase(ready.begin(), ready.begin() + 4096);
      head = 0;
    }
    enter(*current);
    if (abandoned) return false;
  }
  if (alive > 0) report_deadlock(threads);
  return alive == 0;
}

}  // namespace

void report(const std::string& what) { ++reports[what]; }

std::string at(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

void wait(Site site) {
  current->waits_at = site;
  leave(*current);
}

void abandon() {
  abandoned = true;
  for (;;) leave(*current);
}

void wake(Fiber& fiber) { ready.push_back(&fiber); }

Dim thread_index() { return current->index; }
Dim block_index() { return block_now; }
Dim block_dim() { return block_shape; }
Dim grid_dim() { return grid_shape; }
unsigned char* shared_memory() { return shared; }

// Threads that have exited are not counted in: on a device they would be waited for.
void sync_threads(Site site) {
  if (at_barrier.empty()) {
    barrier_site = site;
  } else if (barrier_site.line != site.line || std::strcmp(barrier_site.file, site.file) != 0) {
    report("different barriers: " + at(barrier_site) + " and " + at(site));
  }
  if (at_barrier.size() + 1 == block_shape.x * block_shape.y * block_shape.z) {
    release_barrier();
    return;
  }
  at_barrier.push_back(current);
  wait(site);
}

}  // namespace llmctl::emu

using namespace llmctl::emu;

#pragma GCC visibility push(default)
extern "C" {

// Runs `entry` for every thread of every block. `slots` are `count` parameters of kSlot bytes. False on a launch that a
// device would refuse, or when a block did not come to its end; `emu_reports` says why.
bool emu_launch(void (*entry)(const unsigned char*), const unsigned* grid, const unsigned* block, size_t dynamic_shared,
                const unsigned char* slots, size_t count) {
  const size_t threads = static_cast<size_t>(block[0]) * block[1] * block[2];
  if (threads == 0 || threads > 1024 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 ||
      grid[2] > 65535) {
    report("launch of " + std::to_string(threads) + " threads in a grid of " + std::to_string(grid[0]) + " x " +
           std::to_string(grid[1]) + " x " + std::to_string(grid[2]));
    return false;
  }
  if (dynamic_shared > kMaxSharedBytes) {
    report("launch with " + std::to_string(dynamic_shared) + " bytes of shared memory");
    return false;
  }
  if (shared == nullptr) {
    shared = static_cast<unsigned char*>(
        mmap(nullptr, kMaxSharedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  while (fibers.size() < threads) fibers.emplace_back();
  for (size_t i = 0; i < threads; ++i) {
    if (fibers[i].stack == nullptr) {
      fibers[i].stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    }
  }
  kernel_entry = entry;
  parameters = slots;
  parameter_bytes = count * kSlot;
  block_shape = {block[0], block[1], block[2]};
  grid_shape = {grid[0], grid[1], grid[2]};
  shared_bytes = dynamic_shared;
  ++launch_serial;
  running = true;
  abandoned = false;
  const uint64_t blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
  const uint64_t first = order == Order::kRandom ? next_random() % blocks : 0;
  bool finished = true;
  for (uint64_t i = 0; i < blocks && finished; ++i) {
    const uint64_t b = order == Order::kDescending ? blocks - 1 - i : (i + first) % blocks;
    block_now = {static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                 static_cast<unsigned>(b / grid[0] / grid[1])};
    finished = run_block(static_cast<int>(threads));
  }
  running = false;
  return finished;
}

// 0: threads and blocks in ascending order, 1: descending, 2: random.
void emu_order(int which, uint64_t seed) {
  order = static_cast<Order>(which);
  random_state = seed * 0x9E3779B97F4A7C15u + 1;
}

// Writes "count TAB report" lines since the last call and forgets them; returns how many bytes they have.
size_t emu_reports(char* out, size_t capacity) {
  std::string text;
  for (const auto& [what, count] : reports) text += std::to_string(count) + "\t" + what + "\n";
  if (text.size() < capacity) {
    std::memcpy(out, text.c_str(), text.size() + 1);
    reports.clear();
  }
  return text.size();
}

}  // extern "C"
