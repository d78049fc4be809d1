// Operations that the lanes of a warp do together: each lane brings its operands, and the last to arrive computes.
//
// Lanes find each other by (mask, operation), as the hardware's convergence barriers do, so that lanes that took
// different branches still meet at equal calls. None of them orders memory except __syncwarp.
#include <algorithm>
#include <memory>

#include "machine.hpp"
#include "numeric.hpp"

namespace llmctl::emu {

namespace {

enum Operation { kSync = 1, kBallot, kShuffle = 16, kMma = 32, kLoadMatrix = 64 };

struct Meeting {
  unsigned mask = 0, arrived = 0;
  int operation = 0, to_leave = 0;
  bool complete = false;
  uint32_t in[32][12];
  uint32_t out[32][4];
};

struct Warp {
  std::vector<Meeting*> meetings;
  unsigned present = 0, exited = 0;
};

std::vector<Warp> warps;
std::vector<std::unique_ptr<Meeting>> meetings;
std::vector<Meeting*> unused;
long conflicts = 0, mmas = 0;

Meeting* open_meeting(unsigned mask, int operation) {
  if (unused.empty()) {
    meetings.push_back(std::make_unique<Meeting>());
    unused.push_back(meetings.back().get());
  }
  Meeting* meeting = unused.back();
  unused.pop_back();
  meeting->mask = mask;
  meeting->arrived = 0;
  meeting->operation = operation;
  meeting->to_leave = __builtin_popcount(mask);
  meeting->complete = false;
  return meeting;
}

// Blocks until all lanes of the mask have come with the same operation; `finish` runs once, in the last of them.
template <class Finish>
Meeting* meet(unsigned mask, int operation, const void* operands, size_t bytes, Site site, Finish finish) {
  Warp& warp = warps[current->warp];
  const unsigned me = 1u << current->lane;
  mask &= warp.present;
  if (!(mask & me)) report("calling lane is not in the mask: " + at(site));
  if (mask & warp.exited) report("mask names a lane that has exited: " + at(site));
  mask |= me;
  Meeting* meeting = nullptr;
  for (Meeting* open : warp.meetings) {
    if (!open->complete && open->mask == mask && open->operation == operation && !(open->arrived & me)) {
      meeting = open;
      break;
    }
  }
  if (meeting == nullptr) {
    meeting = open_meeting(mask, operation);
    warp.meetings.push_back(meeting);
  }
  meeting->arrived |= me;
  std::memcpy(meeting->in[current->lane], operands, bytes);
  if (meeting->arrived != mask) {
    wait(site);
    return meeting;
  }
  meeting->complete = true;
  finish(*meeting);
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) && lane != current->lane) wake(fibers[current->warp * 32 + lane]);
  }
  return meeting;
}

void part(Meeting* meeting) {
  if (--meeting->to_leave > 0) return;
  std::vector<Meeting*>& open = warps[current->warp].meetings;
  open.erase(std::find(open.begin(), open.end(), meeting));
  unused.push_back(meeting);
}

struct Matrices {
  float a[16][16], b[8][16];
};

// m16n8k16 of 16-bit floats: a register holds columns k and k + 1.
template <float (*kConvert)(uint16_t)>
void spread_16(const Meeting& meeting, Matrices& m) {
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t* in = meeting.in[lane];
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 6; ++i) {
      float* row = i < 4 ? m.a[g + (i & 1) * 8] : m.b[g];
      const int k = t * 2 + (i < 4 ? i >> 1 : i - 4) * 8;
      row[k] = kConvert(static_cast<uint16_t>(in[i]));
      row[k + 1] = kConvert(static_cast<uint16_t>(in[i] >> 16));
    }
  }
}

// m16n8k8 of float32, of which tensor cores read the upper 19 bits.
void spread_tf32(const Meeting& meeting, Matrices& m) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 6; ++i) {
      float* row = i < 4 ? m.a[g + (i & 1) * 8] : m.b[g];
      row[t + (i < 4 ? i >> 1 : i - 4) * 4] = float_of(meeting.in[lane][i] & 0xffffe000u);
    }
  }
}

// c + row * column as tensor cores sum it: products are exact, all addends are aligned to the largest and cut below
// kKeptBits of it, and the sum is cut to a float, towards zero throughout (Fasi, Higham, Mikaitis, Pranesh, 2021). A long
// chain of sums so loses half of a last bit at each, always to the same side.
float sum_cut(float c, const float* row, const float* column, int depth) {
  constexpr int kKeptBits = 25;
  double addends[17] = {c};
  double largest = std::fabs(addends[0]);
  for (int k = 0; k < depth; ++k) {
    addends[k + 1] = static_cast<double>(row[k]) * column[k];
    largest = std::max(largest, std::fabs(addends[k + 1]));
  }
  double all = 0;
  for (int k = 0; k <= depth; ++k) all += addends[k];
  if (!std::isfinite(all) || largest == 0) return static_cast<float>(all);
  uint64_t bits;
  std::memcpy(&bits, &largest, 8);
  const int shift = kKeptBits - 1 - (static_cast<int>(bits >> 52) - 1023);
  const double to_units = std::ldexp(1.0, shift);
  int64_t sum = 0;
  for (int k = 0; k <= depth; ++k) sum += static_cast<int64_t>(addends[k] * to_units);
  const uint64_t size = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const int spare = size == 0 ? 0 : std::max(0, 40 - __builtin_clzll(size));
  const double kept = std::ldexp(static_cast<double>(size >> spare << spare), -shift);
  return static_cast<float>(sum < 0 ? -kept : kept);
}

}  // namespace

void reset_warps(int threads) {
  warps.resize((threads + 31) / 32);
  for (Warp& warp : warps) {
    for (Meeting* meeting : warp.meetings) unused.push_back(meeting);
    warp.meetings.clear();
    warp.present = warp.exited = 0;
  }
  for (int i = 0; i < threads; ++i) warps[i / 32].present |= 1u << (i % 32);
}

void lane_exited(const Fiber& fiber) { warps[fiber.warp].exited |= 1u << fiber.lane; }

void sync_warp(unsigned mask, Site site) {
  const uint32_t nothing = 0;
  part(meet(mask, kSync, &nothing, 4, site, [](Meeting& meeting) {
    uint32_t newest[32] = {};
    Fiber* lanes = &fibers[current->warp * 32];
    for (int i = 0; i < 32; ++i) {
      if (!(meeting.mask >> i & 1)) continue;
      lanes[i].known[i] = lanes[i].clock++;
      for (int k = 0; k < 32; ++k) newest[k] = std::max(newest[k], lanes[i].known[k]);
    }
    for (int i = 0; i < 32; ++i) {
      if (meeting.mask >> i & 1) std::copy(newest, newest + 32, lanes[i].known);
    }
  }));
}

uint64_t shuffle(unsigned mask, uint64_t value, int argument, Shuffle kind, Site site) {
  Meeting* meeting = meet(mask, kShuffle + static_cast<int>(kind), &value, 8, site, [](Meeting&) {});
  const int lane = current->lane;
  int source = lane;
  switch (kind) {
    case Shuffle::kIndex: source = argument & 31; break;
    case Shuffle::kUp: source = lane - argument < 0 ? lane : lane - argument; break;
    case Shuffle::kDown: source = lane + argument > 31 ? lane : lane + argument; break;
    case Shuffle::kXor: source = lane ^ argument; break;
  }
  if (source > 31 || !(meeting->mask >> source & 1)) {
    report("shuffle from a lane that takes no part: " + at(site));
    source = lane;
  }
  uint64_t result;
  std::memcpy(&result, meeting->in[source], 8);
  part(meeting);
  return result;
}

unsigned ballot(unsigned mask, bool predicate, Site site) {
  const uint32_t mine = predicate;
  Meeting* meeting = meet(mask, kBallot, &mine, 4, site, [](Meeting& m) {
    m.out[0][0] = 0;
    for (int i = 0; i < 32; ++i) {
      if ((m.mask >> i & 1) && m.in[i][0]) m.out[0][0] |= 1u << i;
    }
  });
  const unsigned votes = meeting->out[0][0];
  part(meeting);
  return votes;
}

void mma(float* d, const uint32_t* a, const uint32_t* b, Operand operand, Site site) {
  uint32_t in[10];
  std::memcpy(in, a, 16);
  std::memcpy(in + 4, b, 8);
  std::memcpy(in + 6, d, 16);
  Meeting* meeting = meet(~0u, kMma + static_cast<int>(operand), in, sizeof(in), site, [operand](Meeting& m) {
    ++mmas;
    Matrices x;
    if (operand == Operand::kF16) spread_16<from_f16>(m, x);
    if (operand == Operand::kBf16) spread_16<from_bf16>(m, x);
    if (operand == Operand::kTf32) spread_tf32(m, x);
    const int depth = operand == Operand::kTf32 ? 8 : 16;
    for (int lane = 0; lane < 32; ++lane) {
      float c[4];
      std::memcpy(c, m.in[lane] + 6, 16);
      for (int i = 0; i < 4; ++i) {
        const float* row = x.a[lane / 4 + (i >> 1) * 8];
        const float* column = x.b[lane % 4 * 2 + (i & 1)];
        c[i] = sum_cut(c[i], row, column, depth);
      }
      std::memcpy(m.out[lane], c, 16);
    }
  });
  std::memcpy(d, meeting->out[current->lane], 16);
  part(meeting);
}

void load_matrix(uint32_t* out, const void* row, int matrices, bool transposed, Site site) {
  Meeting* meeting = meet(~0u, kLoadMatrix + 2 * matrices + transposed, &row, 8, site, [matrices, site](Meeting& m) {
    for (int matrix = 0; matrix < matrices; ++matrix) {
      int uses[8] = {};
      for (int r = 0; r < 8; ++r) {
        uint64_t address;
        std::memcpy(&address, m.in[matrix * 8 + r], 8);
        if (address % 16 != 0) report("row of ldmatrix is not aligned to 16 bytes: " + at(site));
        ++uses[address / 16 % 8];
      }
      conflicts += *std::max_element(uses, uses + 8) - 1;
    }
  });
  const void* pc = __builtin_return_address(0);
  const auto element = [&](int matrix, int r, int column) {
    const unsigned char* p;
    std::memcpy(&p, meeting->in[matrix * 8 + r], 8);
    p += 2 * column;
    check(p, 2, Access::kRead, pc);
    uint16_t v = 0;
    if (p >= shared && p + 2 <= shared + shared_bytes) {
      std::memcpy(&v, p, 2);
    } else {
      report("ldmatrix outside of shared memory: " + at(site));
    }
    return static_cast<uint32_t>(v);
  };
  const int g = current->lane / 4, t = current->lane % 4;
  for (int i = 0; i < matrices; ++i) {
    out[i] = transposed ? element(i, 2 * t, g) | element(i, 2 * t + 1, g) << 16
                        : element(i, g, 2 * t) | element(i, g, 2 * t + 1) << 16;
  }
  part(meeting);
}

void copy_async(void* to, const void* from, int bytes, int valid_bytes, Site site) {
  const void* pc = __builtin_return_address(0);
  unsigned char* target = static_cast<unsigned char*>(to);
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) {
    report("cp.async is not aligned to " + std::to_string(bytes) + " bytes: " + at(site));
  }
  if (target < shared || target + bytes > shared + shared_bytes) {
    report("cp.async writes outside of shared memory: " + at(site));
    return;
  }
  check(to, bytes, Access::kCopyIssued, pc);
  if (valid_bytes > 0) check(from, valid_bytes, Access::kRead, pc);
  current->open_copies.push_back({target, static_cast<const unsigned char*>(from), bytes, valid_bytes});
}

void copy_commit() {
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

void copy_wait(int groups_left_open) {
  auto& groups = current->copy_groups;
  if (static_cast<int>(groups.size()) <= groups_left_open) return;
  const auto end = groups.end() - groups_left_open;
  for (auto group = groups.begin(); group != end; ++group) {
    for (const AsyncCopy& copy : *group) {
      std::memcpy(copy.to, copy.from, copy.valid_bytes);
      std::memset(copy.to + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
      check(copy.to, copy.bytes, Access::kCopyDone, __builtin_return_address(0));
    }
  }
  groups.erase(groups.begin(), end);
}

void check_aligned(const void* p, int bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    report("access is not aligned to " + std::to_string(bytes) + " bytes: " + at(site));
  }
}

namespace {

template <class T>
T add(T* p, T value, const void* pc) {
  check(p, sizeof(*p), Access::kAtomic, pc);
  const T old = *p;
  *p = old + value;
  return old;
}

}  // namespace

int atomic_add(int* p, int value) { return add(p, value, __builtin_return_address(0)); }
float atomic_add(float* p, float value) { return add(p, value, __builtin_return_address(0)); }
unsigned long long atomic_add(unsigned long long* p, unsigned long long value) {
  return add(p, value, __builtin_return_address(0));
}

}  // namespace llmctl::emu

// Since the last call: tensor-core instructions, and passes that ldmatrix took beyond the first because of bank
// conflicts.
extern "C" __attribute__((visibility("default"))) void emu_counts(long* out) {
  out[0] = llmctl::emu::mmas;
  out[1] = llmctl::emu::conflicts;
  llmctl::emu::mmas = llmctl::emu::conflicts = 0;
}
