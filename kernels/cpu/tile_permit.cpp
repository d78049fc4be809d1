#include "tile_permit.hpp"

#if defined(LLMCTL_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmctl::cpu {

#if defined(LLMCTL_HAVE_AMX)

bool may_use_amx() {
  static const bool may = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxTile) == 0 || (d & kAmxInt8) == 0) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return may;
}

#else

bool may_use_amx() { return false; }

#endif

}  // namespace llmctl::cpu
