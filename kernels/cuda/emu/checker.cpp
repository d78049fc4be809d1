// Every access that the compiler sees in a kernel, held against shadow memory: bounds, alignment, writing to inputs,
// reading what nobody wrote, touching the target of a copy that was not waited for, and races.
//
// A race is two accesses to a byte, one of them a write, that nothing orders: neither __syncthreads (epochs of the
// block) nor __syncwarp (clocks of the lanes) between threads of a block, and nothing at all between blocks. It is found
// whatever the order in which threads happened to run. Without LLMCTL_EMU_CHECK only registration is left.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>

#include "machine.hpp"

namespace llmctl::emu {

#ifdef LLMCTL_EMU_CHECK

namespace {

// Who touched a byte last, and when.
struct Touch {
  uint32_t block = 0, launch = 0, epoch = 0, clock = 0;
  uint16_t thread = 0;
  bool atomic = false;
};

struct Byte {
  Touch write, read, earlier_read;
  bool valid = false, pending = false;
};

struct Region {
  const char *begin, *end;
  std::string name;
  bool read_only;
  std::vector<Byte> bytes;
};

std::vector<Region> regions;
Region* recent = nullptr;
std::vector<Byte> shared_shadow;
const char *module_begin = nullptr, *module_end = nullptr;

std::string place(const void* pc) {
  char text[32];
  std::snprintf(text, sizeof(text), "@%#lx", static_cast<unsigned long>(static_cast<const char*>(pc) - module_begin));
  return text;
}

[[noreturn]] void stray(const std::string& what) {
  report(what);
  abandon();
}

void find_module() {
  Dl_info info;
  dladdr(reinterpret_cast<const void*>(&find_module), &info);
  module_begin = module_end = static_cast<const char*>(info.dli_fbase);
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void*) {
        if (reinterpret_cast<const char*>(object->dlpi_addr) != module_begin) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& header = object->dlpi_phdr[i];
          const char* end = module_begin + header.p_vaddr + header.p_memsz;
          if (header.p_type == PT_LOAD && end > module_end) module_end = end;
        }
        return 1;
      },
      nullptr);
}

bool is_shared(const char* p) {
  const char* begin = reinterpret_cast<const char*>(shared);
  return p >= begin && p < begin + kMaxSharedBytes;
}

Region* region_of(const char* p) {
  if (recent != nullptr && p >= recent->begin && p < recent->end) return recent;
  for (Region& region : regions) {
    if (p >= region.begin && p < region.end) return recent = &region;
  }
  return nullptr;
}

bool happened_before(const Touch& touch, bool in_shared) {
  if (in_shared ? touch.block != block_serial : touch.launch != launch_serial) return true;
  if (touch.block != block_serial) return false;
  if (touch.thread == current->linear || touch.epoch < barrier_epoch) return true;
  return touch.thread / 32 == current->warp && current->known[touch.thread % 32] >= touch.clock;
}

struct Findings {
  bool race = false, unwritten = false, pending = false;
};

void touch(Byte& byte, const Touch& now, Access kind, bool in_shared, Findings& found) {
  if (in_shared && byte.write.block != block_serial) byte.valid = byte.pending = false;
  const bool atomic = kind == Access::kAtomic, reads = kind == Access::kRead || atomic;
  if (byte.pending && kind != Access::kCopyDone) found.pending = true;
  if (reads && !byte.valid && !byte.pending) found.unwritten = true;
  const auto races_with = [&](const Touch& other) {
    return !(atomic && other.atomic) && !happened_before(other, in_shared);
  };
  if (races_with(byte.write)) found.race = true;
  if (kind == Access::kRead) {
    // Two readers are remembered, so that a write is held against another thread's read too.
    if (byte.read.thread != now.thread || byte.read.block != now.block) byte.earlier_read = byte.read;
    byte.read = now;
    return;
  }
  if (races_with(byte.read) || races_with(byte.earlier_read)) found.race = true;
  byte.write = now;
  byte.pending = kind == Access::kCopyIssued;
  byte.valid = kind != Access::kCopyIssued;
}

}  // namespace

void check(const void* pointer, size_t bytes, Access kind, const void* pc) {
  if (!running) return;
  const char* p = static_cast<const char*>(pointer);
  if (p >= current->stack && p < current->stack + kStackBytes) return;
  Byte* shadow = nullptr;
  std::string name = "shared memory";
  const bool in_shared = is_shared(p);
  if (in_shared) {
    const size_t offset = p - reinterpret_cast<const char*>(shared);
    if (offset + bytes > shared_bytes) stray("out of bounds of shared memory " + place(pc));
    shadow = &shared_shadow[offset];
  } else {
    Region* region = region_of(p);
    if (region == nullptr) {
      const char* slots = reinterpret_cast<const char*>(parameters);
      if (p >= slots && p < slots + parameter_bytes) return;
      if (p >= module_begin && p < module_end) return;
      stray("out of bounds of global memory " + place(pc));
    }
    name = region->name;
    if (p + bytes > region->end) stray("out of bounds past the end of " + name + " " + place(pc));
    if (kind != Access::kRead && region->read_only) report("write to read-only " + name + " " + place(pc));
    shadow = &region->bytes[p - region->begin];
  }
  if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    report("misaligned access to " + name + " " + place(pc));
  }
  Touch now;
  now.block = block_serial;
  now.launch = launch_serial;
  now.epoch = barrier_epoch;
  now.clock = current->clock;
  now.thread = static_cast<uint16_t>(current->linear);
  now.atomic = kind == Access::kAtomic;
  Findings found;
  for (size_t i = 0; i < bytes; ++i) touch(shadow[i], now, kind, in_shared, found);
  if (found.pending) report("access to the target of cp.async before its wait, in " + name + " " + place(pc));
  if (found.unwritten) report("uninitialised read of " + name + " " + place(pc));
  if (found.race) report("race on " + name + " " + place(pc));
}

#else

void check(const void*, size_t, Access, const void*) {}

#endif

}  // namespace llmctl::emu

#pragma GCC visibility push(default)
extern "C" {

// Memory that kernels may touch. What is not written by the host counts as uninitialised until a kernel writes it.
void emu_register(const void* p, size_t bytes, const char* name, bool written, bool read_only) {
#ifdef LLMCTL_EMU_CHECK
  using namespace llmctl::emu;
  if (shared_shadow.empty()) {
    shared_shadow.resize(kMaxSharedBytes);
    find_module();
  }
  const char* begin = static_cast<const char*>(p);
  regions.push_back({begin, begin + bytes, name, read_only, std::vector<Byte>(bytes)});
  for (Byte& byte : regions.back().bytes) byte.valid = written;
  recent = nullptr;
#else
  (void)p, (void)bytes, (void)name, (void)written, (void)read_only;
#endif
}

void emu_forget() {
#ifdef LLMCTL_EMU_CHECK
  llmctl::emu::regions.clear();
  llmctl::emu::recent = nullptr;
#endif
}

#ifdef LLMCTL_EMU_CHECK
#define HOOK(NAME, BYTES, KIND) \
  void NAME(void* p) { llmctl::emu::check(p, BYTES, llmctl::emu::Access::KIND, __builtin_return_address(0)); }
#define HOOKS(BYTES)                                  \
  HOOK(__tsan_read##BYTES, BYTES, kRead)              \
  HOOK(__tsan_write##BYTES, BYTES, kWrite)            \
  HOOK(__tsan_unaligned_read##BYTES, BYTES, kRead)    \
  HOOK(__tsan_unaligned_write##BYTES, BYTES, kWrite)  \
  HOOK(__tsan_volatile_read##BYTES, BYTES, kRead)     \
  HOOK(__tsan_volatile_write##BYTES, BYTES, kWrite)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t n) {
  llmctl::emu::check(p, n, llmctl::emu::Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t n) {
  llmctl::emu::check(p, n, llmctl::emu::Access::kWrite, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
#endif

}  // extern "C"
