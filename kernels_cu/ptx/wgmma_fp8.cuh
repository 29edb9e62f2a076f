// wgmma of codes of 8 bits: products of matrices of float8 by the four warps of a warpgroup
// together: one PTX instruction per function, on compute capability 9.0 only.
//
// As wgmma.cuh says, but 32 deep, and every operand in shared memory is K-major: rows contiguous
// along the depth. A lane has of a in registers the rows lane / 4 and lane / 4 + 8, four columns to
// a word: those from 4 (lane % 4) on, in the first two words, and the same 16 further. Sums keep
// fewer bits than float32: `Precision.of_codes` in cupyflash/testing/precision.py says how many.
#pragma once
#include "wgmma.cuh"

namespace ptx {

#define WGMMA_FP8_SS(SHAPE, TYPE, NAMES, A, B, ADD)                                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1;\n}"
#define WGMMA_FP8_RS(SHAPE, TYPES, NAMES, A, B, ADD)                                  \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE \
  ".f32." TYPES " {" NAMES "}, {" A "}, " B ", p, 1, 1;\n}"

// d = a b^T, or d += where `add`, of one format.
__device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_FP8_SS("m64n128k32", "e4m3", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_e5m2(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_FP8_SS("m64n128k32", "e5m2", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same for a of e4m3 in registers, and b of the format that the name says.
__device__ __forceinline__ void wgmma_rs_e4m3(float (&d)[2][16], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(
      WGMMA_FP8_RS("m64n64k32", "e4m3.e4m3", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")
      : WGMMA_32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_e4m3(float (&d)[2][32], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(
      WGMMA_FP8_RS("m64n128k32", "e4m3.e4m3", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
      : WGMMA_32(0), WGMMA_32(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_e5m2(float (&d)[2][16], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(
      WGMMA_FP8_RS("m64n64k32", "e4m3.e5m2", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")
      : WGMMA_32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_e5m2(float (&d)[2][32], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(
      WGMMA_FP8_RS("m64n128k32", "e4m3.e5m2", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
      : WGMMA_32(0), WGMMA_32(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

}  // namespace ptx
