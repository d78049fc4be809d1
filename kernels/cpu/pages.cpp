#include "pages.hpp"

#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#endif

namespace llmctl::cpu {

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

constexpr std::size_t kPiece = 16 * kLargePage;

std::size_t up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

// Address space for `size` bytes that begins at the same place within a large page as `like`.
struct Room {
  Room(std::size_t size, const char* like) : whole(size + kLargePage), used(size) {
    base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return;
    const auto wanted = reinterpret_cast<std::uintptr_t>(like) % kLargePage;
    const auto found = reinterpret_cast<std::uintptr_t>(base) % kLargePage;
    start = static_cast<char*>(base) + (wanted + kLargePage - found) % kLargePage;
  }
  ~Room() {
    if (base == MAP_FAILED) return;
    char* first = static_cast<char*>(base);
    if (!moved) {
      munmap(first, whole);
      return;
    }
    if (start > first) munmap(first, start - first);
    if (start + used < first + whole) munmap(start + used, first + whole - start - used);
  }
  Room(const Room&) = delete;

  std::size_t whole, used;
  void* base;
  char* start = nullptr;
  bool moved = false;
};

}  // namespace

bool ask_for_large_pages(char* data, std::size_t bytes) { return madvise(data, bytes, MADV_HUGEPAGE) == 0; }

int move_to_large_pages(char* data, std::size_t bytes, const std::function<bool()>& go_on) {
  const std::size_t size = up(bytes, sysconf(_SC_PAGESIZE));
  Room room(size, data);
  if (room.base == MAP_FAILED) return errno;
  if (madvise(room.start, size, MADV_HUGEPAGE) != 0) return errno;

  std::atomic<std::size_t> next{0};
  std::atomic<bool> stopped{false};
  const auto copy = [&](const std::function<bool()>& allowed) {
    for (std::size_t from; !stopped && (from = next.fetch_add(kPiece)) < size;) {
      const std::size_t part = std::min(kPiece, size - from);
      std::memcpy(room.start + from, data + from, std::min(part, bytes - from));
      madvise(data + from, part, MADV_DONTNEED);
      if (!allowed()) stopped = true;
    }
  };
  {
    std::jthread other([&] { copy([] { return true; }); });
    copy(go_on);
  }
  if (stopped) return ECANCELED;
  if (mprotect(room.start, size, PROT_READ) != 0) return errno;
  if (mremap(room.start, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, data) == MAP_FAILED) return errno;
  room.moved = true;
  return 0;
}

#else

bool ask_for_large_pages(char*, std::size_t) { return false; }

int move_to_large_pages(char*, std::size_t, const std::function<bool()>&) { return ENOSYS; }

#endif

}  // namespace llmctl::cpu
