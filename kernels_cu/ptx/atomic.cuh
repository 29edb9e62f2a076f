// What blocks of a launch need to read what others wrote: one PTX instruction per function.
//
// A thread that has written executes fence_device and then swaps a counter; a thread that swaps it
// later executes fence_device and then reads. Barriers pass both on to the other threads of a
// block.
#pragma once

namespace ptx {

// Orders this thread's accesses to memory before the fence, and what they come after, before those
// after it, as all threads of the GPU see them.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The same for all threads of the system: what was written before is seen by the host before what
// is written after.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Writes to memory of the host, in one step. It orders no other accesses.
__device__ __forceinline__ void tell_host(unsigned long long* place, unsigned long long value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(place)), "l"(value)
               : "memory");
}

// Replaces what lies at an 8-byte boundary of global memory, if that is what is expected, in one
// step; returns what was there. It orders no other accesses.
__device__ __forceinline__ unsigned long long compare_and_swap(unsigned long long* place_gmem,
                                                               unsigned long long expected,
                                                               unsigned long long desired) {
  unsigned long long before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(place_gmem)), "l"(expected), "l"(desired)
               : "memory");
  return before;
}

// Adds to what lies at an 8-byte boundary of global memory, in one step; returns what was there. It
// orders no other accesses.
__device__ __forceinline__ unsigned long long fetch_add(unsigned long long* place_gmem,
                                                        unsigned long long value) {
  unsigned long long before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(place_gmem)), "l"(value)
               : "memory");
  return before;
}

}  // namespace ptx
