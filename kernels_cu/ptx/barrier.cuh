// mbarriers, named barriers and proxy fences, since compute capability 9.0: one PTX instruction per
// function.
//
// An mbarrier is 8 bytes of shared memory and counts in phases. A phase is complete when the
// expected number of threads have arrived and the expected number of bytes have been copied. Phases
// have parity 0 and 1 in turn, from 0 on.
#pragma once

namespace ptx {

__device__ __forceinline__ void mbarrier_init(unsigned int barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Ends an mbarrier, so that another one may be initialised in its place.
__device__ __forceinline__ void mbarrier_inval(unsigned int barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised mbarriers visible to the TMA copies that will complete their phases.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned int barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds to the bytes that must have been copied before the phase is complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned int barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of a parity is complete; it may wait a while before the answer is no.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned int barrier, int parity) {
  unsigned int over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Arrives at one of the 16 named barriers, and waits until `threads` threads have arrived, those of
// named_barrier_arrive included. Whole warps call this and the next two.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, and returns to each of these threads whether the condition holds for any of them.
__device__ __forceinline__ bool named_barrier_or(int number, int threads, bool condition) {
  unsigned int any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(condition ? 1u : 0u), "r"(number), "r"(threads)
      : "memory");
  return any != 0;
}

// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Makes what this thread wrote to shared memory visible to the async proxy: to wgmma and TMA, which
// read it by themselves.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
