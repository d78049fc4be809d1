// What is done to rows of activations between the large products: embedding, norm with residual, gated activation.
//
// A row's result depends on the row only; sums are taken in one order, by thread, then lane, then warp.
#pragma once

#include "prims.cuh"

namespace llmctl::cuda {

// As many values as 16 bytes hold.
template <class T>
struct Pack {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  float v[kCount];
};

template <class T>
LLMCTL_DEVICE Pack<T> unpack(const Vec4& raw) {
  Pack<T> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out.v[i] = float_of(raw.w[i]);
    } else {
      out.v[2 * i] = low_of<T>(raw.w[i]);
      out.v[2 * i + 1] = high_of<T>(raw.w[i]);
    }
  }
  return out;
}

template <class T>
LLMCTL_DEVICE Pack<T> load_pack(const T* p) {
  return unpack<T>(load_vec<Vec4>(p));
}

template <class T>
LLMCTL_DEVICE Vec4 packed(const Pack<T>& values) {
  Vec4 raw;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      raw.w[i] = bits_of(values.v[i]);
    } else {
      raw.w[i] = pack_pair<T>(values.v[2 * i], values.v[2 * i + 1]);
    }
  }
  return raw;
}

template <class T>
LLMCTL_DEVICE void store_pack(T* p, const Pack<T>& values) {
  store_vec(p, packed(values));
}

// grid: rows that could be, 128 threads. out[row] = table[token[row]] * scale; width a multiple of 16 bytes. A token
// outside of the vocabulary gives zeros.
template <class Act>
__global__ void __launch_bounds__(128) embed(Act* out, const Act* table, const int32_t* token, const int32_t* num_rows,
                                             int width, int vocabulary, float scale) {
  const int row = blockIdx.x;
  if (row >= num_rows[0]) return;
  const int id = token[row];
  const bool known = id >= 0 && id < vocabulary;
  const Act* from = table + static_cast<int64_t>(known ? id : 0) * width;
  for (int i = threadIdx.x * Pack<Act>::kCount; i < width; i += 128 * Pack<Act>::kCount) {
    Pack<Act> x = load_pack(from + i);
#pragma unroll
    for (float& v : x.v) v = known ? v * scale : 0.0f;
    store_pack(out + static_cast<int64_t>(row) * width + i, x);
  }
}

// A row on its way through a norm, whose first kKept vectors a thread keeps in registers; what is wider is read again.
template <class Act, bool kResidual, int kThreads>
struct NormRow {
  static constexpr int kStep = kThreads * Pack<Act>::kCount, kKept = 4;
  Vec4 near[kKept];
  const Act* again;  // the row, or its sum with the residual, as stored
  int begin, width;

  // Adds and stores the residual, and gives 1 / sqrt(mean(x^2) + eps). `sums` has a float for each warp.
  LLMCTL_DEVICE float load(const Act* x, Act* residual, int row_width, float eps, float* sums) {
    width = row_width;
    begin = threadIdx.x * Pack<Act>::kCount;
    again = kResidual ? residual : x;
    float squares = 0;
    const auto add = [&](int i, const Vec4& first, const Vec4& second) {
      Pack<Act> v = unpack<Act>(first);
      if constexpr (kResidual) {
        const Pack<Act> other = unpack<Act>(second);
#pragma unroll
        for (int j = 0; j < Pack<Act>::kCount; ++j) v.v[j] = to_float(from_float<Act>(v.v[j] + other.v[j]));
        store_pack(residual + i, v);
      }
#pragma unroll
      for (const float value : v.v) squares = fmaf(value, value, squares);
      return packed(v);
    };
    // All loads are under way before the first is needed.
    Vec4 other[kKept];
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
      if (begin + n * kStep < width) {
        near[n] = load_vec<Vec4>(x + begin + n * kStep);
        if constexpr (kResidual) other[n] = load_vec<Vec4>(residual + begin + n * kStep);
      }
    }
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
      if (begin + n * kStep < width) near[n] = add(begin + n * kStep, near[n], other[n]);
    }
    for (int i = begin + kKept * kStep; i < width; i += kStep) {
      add(i, load_vec<Vec4>(x + i), kResidual ? load_vec<Vec4>(residual + i) : Vec4{});
    }
    squares = sum_lanes(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) total += sums[w];
    return 1.0f / sqrtf(total / static_cast<float>(width) + eps);
  }

  // Calls `visit(i, values)` for each of this thread's vectors, normed: x * factor * weight.
  template <class Visit>
  LLMCTL_DEVICE void each(const Act* weight, float factor, Visit visit) const {
    const auto normed = [&](int i, const Vec4& raw) {
      Pack<Act> v = unpack<Act>(raw);
      const Pack<Act> w = load_pack(weight + i);
#pragma unroll
      for (int j = 0; j < Pack<Act>::kCount; ++j) v.v[j] = v.v[j] * factor * w.v[j];
      visit(i, v);
    };
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
      if (begin + n * kStep < width) normed(begin + n * kStep, near[n]);
    }
    for (int i = begin + kKept * kStep; i < width; i += kStep) normed(i, load_vec<Vec4>(again + i));
  }
};

// grid: rows that could be, kThreads threads, kThreads / 32 floats of shared memory.
//   out[i] = x / sqrt(mean(x^2) + eps) * weight, with x = in[r], r = rows[i], or i if there are no `rows`
//   kResidual: x = residual[r] + in[r], which also becomes residual[r], rounded as it is stored
//   kAdd: the result is added to out[i] instead of written there
// width a multiple of 16 bytes.
template <class Act, bool kResidual, int kThreads, bool kAdd = false>
__global__ void LLMCTL_THREADS(kThreads)
    rms_norm(Act* out, const Act* in, Act* residual, const Act* weight, const int32_t* rows, const int32_t* num_rows,
             int width, float eps) {
  if (static_cast<int>(blockIdx.x) >= num_rows[0]) return;
  const int64_t r = rows == nullptr ? static_cast<int64_t>(blockIdx.x) : rows[blockIdx.x];
  NormRow<Act, kResidual, kThreads> row;
  const float factor = row.load(in + r * width, kResidual ? residual + r * width : nullptr, width, eps,
                                reinterpret_cast<float*>(dynamic_shared()));
  row.each(weight, factor, [&](int i, Pack<Act>& v) {
    Act* to = out + static_cast<int64_t>(blockIdx.x) * width + i;
    if constexpr (kAdd) {
      const Pack<Act> before = load_pack(to);
#pragma unroll
      for (int j = 0; j < Pack<Act>::kCount; ++j) v.v[j] += before.v[j];
    }
    store_pack(to, v);
  });
}

constexpr int kSilu = 0, kGeluTanh = 1, kRelu2 = 2;

template <int kActivation>
LLMCTL_DEVICE float activate(float x) {
  if constexpr (kActivation == kRelu2) {
    const float y = fmaxf(x, 0.0f);
    return y * y;
  } else {
    // tanh(u) = 1 - 2 / (e^2u + 1), so that both are x times a logistic function.
    const float u = kActivation == kSilu ? x : 1.5957691216057308f * fmaf(0.044715f * x * x, x, x);
    return x / (1.0f + exp2_fast(-1.4426950408889634f * u));
  }
}

// grid: (rows that could be, ceil(width / (128 * values in 16 bytes))), 128 threads. in is [rows, 2 * width], gate then up.
template <class Act, int kActivation>
__global__ void __launch_bounds__(128) act_mul(Act* out, const Act* in, const int32_t* num_rows, int width) {
  const int row = blockIdx.x, i = (blockIdx.y * 128 + threadIdx.x) * Pack<Act>::kCount;
  if (row >= num_rows[0] || i >= width) return;
  const Act* gate = in + static_cast<int64_t>(row) * 2 * width;
  Pack<Act> x = load_pack(gate + i);
  const Pack<Act> up = load_pack(gate + width + i);
#pragma unroll
  for (int j = 0; j < Pack<Act>::kCount; ++j) x.v[j] = activate<kActivation>(x.v[j]) * up.v[j];
  store_pack(out + static_cast<int64_t>(row) * width + i, x);
}

}  // namespace llmctl::cuda
