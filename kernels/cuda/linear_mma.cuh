// y[m, n] = x[m, k] weight[n, k]^T on tensor cores, for every way a weight is stored: x and y are Half or Bf16.
//
// A block computes kBlockM rows of kPanels panels over one split of the inputs; grid (panels, rows, splits). Per step of
// 64 inputs a ring of kStages in shared memory gets the rows of x [kBlockM][128 bytes, 16-byte chunks XORed with the row],
// the panels' units and, where groups are smaller than the whole, their scales and zero points, all by cp.async. One
// barrier per step. Operands of x come by ldmatrix; those of the weight are decoded in registers.
//
// The bits: an output is, per group of inputs in ascending order, a float32 sum over steps of 16 on tensor cores,
// multiplied with the scale and added in float32. That depends on the splits of the inputs but on no other size of the
// tile, so tiles may be chosen by the number of rows. "min" zeros take the sum of x per group from one more
// multiplication, with ones.
//
// Grouped (MoE): a tile of rows belongs to one expert. row_ids [tiles][kBlockM] names the output row of each row, -1 for
// none, and is read from row id / row_divisor of x; tile_expert [tiles] is -1 behind the last. The weight's parts of
// expert e begin e strides of bytes further on, its bias e rows. Without row_ids the layer is batched: of each of `rows`
// rows every expert has one, row * row_divisor + expert of both x and y, and row_divisor experts take tiles in turn.
#pragma once

#include "linear_end.cuh"

namespace llmctl::cuda {

template <class W, int kGroup, Zero kZero, class Scale, int kPanels>
struct StageLayout {
  static constexpr bool kByGroup = kScaled<W> && kGroup > 0;
  static constexpr int kGroups = kByGroup && kGroup < kUnitInputs ? kUnitInputs / kGroup : 1;  // of one step
  static constexpr int kCodeBytes = kPanels * kUnitBytes<W>;
  static constexpr int kScaleRow = kGroups * kPanelOutputs * static_cast<int>(sizeof(Scale));
  static constexpr int kZeroRow = kZero == Zero::kMin ? kScaleRow : kZero == Zero::kInt ? kGroups * kPanelOutputs : 0;
  static constexpr int kMetaBytes = kByGroup ? kPanels * (kScaleRow + kZeroRow) : 0;
};

// The four scales of a lane's sums, [half][column].
template <class Scale>
LLMCTL_DEVICE void load_scales(float (&out)[2][2], const Scale* p) {
  if constexpr (kSame<Scale, float>) {
    const Vec4 v = load_vec<Vec4>(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i / 2][i % 2] = float_of(v.w[i]);
  } else {
    const Vec2 v = load_vec<Vec2>(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      out[half][0] = low_of<Scale>(v.w[half]);
      out[half][1] = high_of<Scale>(v.w[half]);
    }
  }
}

template <class T, class W, int kGroup, Zero kZero, class Scale, int kTilesM, int kTilesN, int kWarpsM, int kWarpsN,
          int kStages, End kEnd, bool kGrouped>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN, 1)
    linear_mma(T* y, float* sums, const T* x, const unsigned char* codes, const Scale* scales, const void* zeros,
               const T* bias, const T* residual, int rows, int outputs, int inputs, int width, int steps_per_split,
               const int* row_ids, const int* tile_expert, int row_divisor, long code_stride, long scale_stride,
               long zero_stride) {
  static_assert(kGroup == 0 || kGroup == 32 || kGroup == 64 || kGroup == 128);
  static_assert(kScaled<W> || (kGroup == 0 && kZero == Zero::kNone));
  static_assert(kZero == Zero::kNone || kSame<W, WeightInt4>);
  constexpr int kPanels = kTilesN * kWarpsN, kBlockM = 16 * kTilesM * kWarpsM, kThreads = 32 * kWarpsM * kWarpsN;
  constexpr int kRowBytes = kUnitInputs * 2, kRowBytesAll = kBlockM * kRowBytes;
  using Stage = StageLayout<W, kGroup, kZero, Scale, kPanels>;
  constexpr int kStageBytes = kRowBytesAll + Stage::kCodeBytes + Stage::kMetaBytes;
  constexpr bool kByGroup = Stage::kByGroup, kMin = kZero == Zero::kMin;

  unsigned char* shared = dynamic_shared();
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp / kWarpsN, warp_n = warp % kWarpsN;
  const int first_row = static_cast<int>(blockIdx.y) * kBlockM, first_panel = static_cast<int>(blockIdx.x) * kPanels;
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
  const int steps = (inputs + kUnitInputs - 1) / kUnitInputs;
  const int first_step = static_cast<int>(blockIdx.z) * steps_per_split;
  const int last_step = min(steps, first_step + steps_per_split);
  const int groups = kByGroup ? steps * kUnitInputs / (kByGroup ? kGroup : 1) : 1;

  int* ids = reinterpret_cast<int*>(shared + kStages * kStageBytes);
  if constexpr (kGrouped) {
    const bool batched = row_ids == nullptr;
    const int tile = static_cast<int>(blockIdx.y);
    const int expert = batched ? tile % row_divisor : tile_expert[tile];
    if (expert < 0) return;
    codes += expert * code_stride;
    scales = reinterpret_cast<const Scale*>(reinterpret_cast<const unsigned char*>(scales) + expert * scale_stride);
    zeros = static_cast<const unsigned char*>(zeros) + expert * zero_stride;
    if (bias != nullptr) bias += static_cast<long>(expert) * (outputs + outputs % 2);
    for (int i = tid; i < kBlockM; i += kThreads) {
      const int row = tile / row_divisor * kBlockM + i;
      ids[i] = !batched ? row_ids[first_row + i] : row < rows ? row * row_divisor + expert : -1;
    }
    if (batched) row_divisor = 1;
    __syncthreads();
  }
  // Row of y, -1 for none.
  const auto row_of = [&](int r) {
    if constexpr (kGrouped) return ids[r];
    return first_row + r < rows ? first_row + r : -1;
  };

  const auto load = [&](int step, int slot) {
    unsigned char* stage = shared + slot * kStageBytes;
    for (int i = tid; i < kBlockM * 8; i += kThreads) {
      const int r = i / 8, chunk = i % 8, column = step * kUnitInputs + chunk * 8, row = row_of(r);
      const bool valid = row >= 0 && column < inputs;
      const long source = valid ? static_cast<long>(kGrouped ? row / row_divisor : row) * inputs + column : 0;
      copy_16(stage + r * kRowBytes + (chunk ^ (r & 7)) * 16, x + source, valid);
    }
    unsigned char* to = stage + kRowBytesAll;
    for (int i = tid; i < Stage::kCodeBytes / 16; i += kThreads) {
      const int p = i / (kUnitBytes<W> / 16), panel = first_panel + p, rest = i % (kUnitBytes<W> / 16) * 16;
      const bool valid = panel < panels;
      const long source = valid ? (static_cast<long>(panel) * steps + step) * kUnitBytes<W> + rest : 0;
      copy_16(to + i * 16, codes + source, valid);
    }
    if constexpr (kByGroup) {
      to += Stage::kCodeBytes;
      const int group = step * kUnitInputs / kGroup;
      constexpr int kRow = Stage::kScaleRow, kZeros = Stage::kZeroRow;
      const auto copy = [&](const void* from, int row_bytes, int group_bytes) {
        for (int i = tid; i < kPanels * row_bytes / 16; i += kThreads) {
          const int p = i / (row_bytes / 16), panel = first_panel + p, rest = i % (row_bytes / 16) * 16;
          const bool valid = panel < panels;
          const long source = valid ? (static_cast<long>(panel) * groups + group) * group_bytes + rest : 0;
          copy_16(to + i * 16, static_cast<const unsigned char*>(from) + source, valid);
        }
        to += kPanels * row_bytes;
      };
      copy(scales, kRow, kRow / Stage::kGroups);
      if constexpr (kZeros > 0) copy(zeros, kZeros, kZeros / Stage::kGroups);
    }
  };

  float part[kTilesM][kTilesN][2][4] = {};  // sums of the group
  float total[kByGroup ? kTilesM : 1][kByGroup ? kTilesN : 1][2][4] = {};
  float row_sums[kMin ? kTilesM : 1][4] = {};  // columns are alike

  ZeroPair zero[kTilesN][2];
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) zero[n][half] = zero_pair<T>(kZero == Zero::kNone ? 8 : 0);
  }
  // `p`: the zero points of a panel and group.
  const auto load_zero = [&](ZeroPair (&out)[2], const unsigned char* p) {
    const uint32_t both = load_vec<uint16_t>(p + 2 * g);
    out[0] = zero_pair<T>(both & 0xff);
    out[1] = zero_pair<T>(both >> 8);
  };
  if constexpr (kZero == Zero::kInt && !kByGroup) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      const int panel = min(first_panel + warp_n * kTilesN + n, panels - 1);
      load_zero(zero[n], static_cast<const unsigned char*>(zeros) + panel * kPanelOutputs);
    }
  }
  // Adds what a tile's sums of a group are worth to `into`.
  const auto weigh = [&](float (&into)[4], const float (&from)[4], const float (&scale)[2], const float (&low)[2],
                         const float (&of_rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      into[i] = fmaf(from[i], scale[i % 2], into[i]);
      if constexpr (kMin) into[i] = fmaf(of_rows[i], low[i % 2], into[i]);
    }
  };

#pragma unroll
  for (int slot = 0; slot < kStages - 1; ++slot) {
    if (first_step + slot < last_step) load(first_step + slot, slot);
    copy_commit();
  }
  for (int step = first_step; step < last_step; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    const int ahead = step + kStages - 1;
    if (ahead < last_step) load(ahead, (ahead - first_step) % kStages);
    copy_commit();

    const unsigned char* stage = shared + (step - first_step) % kStages * kStageBytes;
    const unsigned char* units = stage + kRowBytesAll + warp_n * kTilesN * kUnitBytes<W> + lane * 16;
    const unsigned char* meta = stage + kRowBytesAll + Stage::kCodeBytes;
    const auto scale_row = [&](int n, int group) {
      return meta + (warp_n * kTilesN + n) * Stage::kScaleRow + group * (Stage::kScaleRow / Stage::kGroups);
    };
    const auto zero_row = [&](int n, int group) {
      return meta + kPanels * Stage::kScaleRow + (warp_n * kTilesN + n) * Stage::kZeroRow +
             group * (Stage::kZeroRow / Stage::kGroups);
    };
    Vec4 unit[kTilesN][kUnitVectors<W>];
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int v = 0; v < kUnitVectors<W>; ++v) {
        unit[n][v] = load_vec<Vec4>(units + n * kUnitBytes<W> + v * 512);
      }
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      constexpr int kStepsOfGroup = 4 / Stage::kGroups;
      if constexpr (kByGroup && kZero == Zero::kInt) {
        if (s % kStepsOfGroup == 0) {
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) load_zero(zero[n], zero_row(n, s / kStepsOfGroup));
        }
      }
      uint32_t a[kTilesM][4];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const int r = (warp_m * kTilesM + m) * 16 + lane % 16, chunk = 2 * s + lane / 16;
        load_matrices(a[m], stage + r * kRowBytes + (chunk ^ (r & 7)) * 16);
      }
      if constexpr (kMin) {
        const uint32_t ones[2] = {kOnePair<T>, kOnePair<T>};
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) mma_16<T>(row_sums[m], a[m], ones);
      }
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t b[2];
          fragment<T, W>(b, unit[n], s, half, zero[n][half]);
#pragma unroll
          for (int m = 0; m < kTilesM; ++m) mma_16<T>(part[m][n][half], a[m], b);
        }
      }
      if constexpr (kByGroup) {
        // Whole groups lie in one split, so the last step of a split ends one.
        const bool ends = kGroup > kUnitInputs ? s == 3 && (step + 1) % (kGroup / kUnitInputs) == 0
                                               : (s + 1) % kStepsOfGroup == 0;
        if (ends) {
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) {
            float scale[2][2], low[2][2] = {};
            load_scales(scale, reinterpret_cast<const Scale*>(scale_row(n, s / kStepsOfGroup)) + 4 * t);
            if constexpr (kMin) {
              load_scales(low, reinterpret_cast<const Scale*>(zero_row(n, s / kStepsOfGroup)) + 4 * t);
            }
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                weigh(total[m][n][half], part[m][n][half], scale[half], low[half], row_sums[kMin ? m : 0]);
#pragma unroll
                for (int i = 0; i < 4; ++i) part[m][n][half][i] = 0;
              }
            }
          }
          if constexpr (kMin) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) row_sums[m][i] = 0;
            }
          }
        }
      }
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int n = 0; n < kTilesN; ++n) {
    const int panel = first_panel + warp_n * kTilesN + n;
    if (panel >= panels) continue;
    float scale[2][2] = {}, low[2][2] = {};
    if constexpr (kScaled<W> && !kByGroup) {
      load_scales(scale, scales + panel * kPanelOutputs + 4 * t);
      if constexpr (kMin) load_scales(low, static_cast<const Scale*>(zeros) + panel * kPanelOutputs + 4 * t);
    }
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      float ended[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ended[half][i] = kByGroup ? total[kByGroup ? m : 0][kByGroup ? n : 0][half][i] : part[m][n][half][i];
        if constexpr (kScaled<W> && !kByGroup) {
          float weighed[4] = {};
          weigh(weighed, ended[half], scale[half], low[half], row_sums[kMin ? m : 0]);
#pragma unroll
          for (int i = 0; i < 4; ++i) ended[half][i] = weighed[i];
        }
      }
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = row_of((warp_m * kTilesM + m) * 16 + g + 8 * upper);
        if (row < 0) continue;
        float two[2][2] = {{ended[0][2 * upper], ended[0][2 * upper + 1]}, {ended[1][2 * upper], ended[1][2 * upper + 1]}};
        if (gridDim.z == 1) {
          end_panel<T, kEnd>(y, bias, residual, row, panel, t, outputs, width, two);
        } else {
          float* to = sums + ((static_cast<long>(blockIdx.z) * rows + row) * panels + panel) * kPanelOutputs + 2 * t;
          store_pair(to, two[0][0], two[0][1]);
          store_pair(to + 8, two[1][0], two[1][1]);
        }
      }
    }
  }
}

}  // namespace llmctl::cuda
