#pragma once

// Kernels with one planted defect each, which the emulator must name, and clean ones beside them, at which it must be
// silent. test_emulator.py says what each must report.
#include "../prims.cuh"

namespace llmctl::cuda::selftest {

LLMCTL_DEVICE float* memory() { return reinterpret_cast<float*>(dynamic_shared()); }

template <bool kBarrier>
__global__ void reduce(float* out, const float* in) {
  float* s = memory();
  const int i = threadIdx.x;
  s[i] = in[i];
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (i < half) s[i] += s[i + half];
    if (kBarrier) __syncthreads();
  }
  if (i == 0) out[blockIdx.x] = s[0];
}

template <bool kSync>
__global__ void neighbours(float* out, const float* in) {
  float* s = memory();
  const int i = threadIdx.x;
  s[i] = in[i];
  if (kSync) __syncwarp();
  out[i] = s[i ^ 1];
}

__global__ void shuffle_as_fence(float* out, const float* in) {
  float* s = memory();
  const int i = threadIdx.x;
  s[i] = in[i];
  const float other = __shfl_xor_sync(kAllLanes, in[i], 1);
  out[i] = s[i ^ 1] + other;
}

__global__ void barrier_in_branch(float* out) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void lane_not_in_mask(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xffu, 1.0f, 1); }

__global__ void diverged_shuffle(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
}

__global__ void shared_overrun(float* out) {
  memory()[threadIdx.x] = 1;
  out[threadIdx.x] = 1;
}

__global__ void global_overrun(float* out) { out[threadIdx.x] = 1; }

__global__ void write_to_input(float* in) { in[0] = 0; }

__global__ void misaligned_load(float* out, const float* in) { out[0] = float_of(load_stream(in + 1).w[0]); }

__global__ void unwritten_shared(float* out) {
  float* s = memory();
  const int i = threadIdx.x;
  if (i < 31) s[i] = 1;
  __syncthreads();
  out[i] = s[i];
}

__global__ void unwritten_global(float* out, const float* scratch) { out[threadIdx.x] = scratch[threadIdx.x]; }

__global__ void blocks_write_one_place(float* out) { out[0] = static_cast<float>(blockIdx.x); }

__global__ void atomics(int* out) { atomicAdd(out, 1); }

__global__ void atomic_and_store(int* out) {
  if (blockIdx.x == 0) {
    atomicAdd(out, 1);
  } else {
    out[0] = 1;
  }
}

// kWait: 0 never, 1 too late, 2 in time.
template <int kWait, bool kBarrier>
__global__ void copied(float* out, const float* in) {
  float* s = memory();
  const int i = threadIdx.x;
  copy_16(s + 4 * i, in + 4 * i, true);
  copy_commit();
  if (kWait == 2) copy_wait<0>();
  if (kBarrier) __syncthreads();
  out[i] = s[(4 * i + (kBarrier ? 8 : 0)) % (4 * static_cast<int>(blockDim.x))];
  if (kWait == 1) copy_wait<0>();
}

// The last group is reused while another thread may still read from it.
template <bool kSecondBarrier>
__global__ void ring(float* out, const float* in) {
  float* s = memory();
  const int i = threadIdx.x;
  float sum = 0;
  for (int step = 0; step < 3; ++step) {
    copy_16(s + 4 * i, in + 4 * i, true);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    sum += s[(4 * i + 128) % (4 * static_cast<int>(blockDim.x))];
    if (kSecondBarrier) __syncthreads();
  }
  out[i] = sum;
}

// out[16, 8] = a[16, 16] b[8, 16]^T, through ldmatrix and one tensor-core instruction.
template <class T>
__global__ void multiply(float* out, const T* a, const T* b) {
  unsigned char* s = dynamic_shared();
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  copy_16(s + 16 * lane, a + 8 * lane, true);
  if (lane < 16) copy_16(s + 512 + 16 * lane, b + 8 * lane, true);
  copy_commit();
  copy_wait<0>();
  __syncwarp();
  uint32_t fa[4], fb[4];
  load_matrices(fa, s + (lane % 16) * 32 + lane / 16 * 16);
  load_matrices(fb, s + 512 + (lane % 8) * 32 + lane / 8 % 2 * 16);
  float d[4] = {0, 0, 0, 0};
  const uint32_t two[2] = {fb[0], fb[1]};
  mma_16<T>(d, fa, two);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

}  // namespace llmctl::cuda::selftest
