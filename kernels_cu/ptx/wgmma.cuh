// Products of matrices by the four warps of a warpgroup together, which go on meanwhile: one PTX
// instruction per function, on compute capability 9.0 only.
//
// A product adds to d, of 64 rows and N columns, in float32: a warp has 16 neighbouring rows, and a
// thread's element (r, n) lies at row 8 r + lane / 4 of them, column 8 (n / 2) + 2 (lane % 4) + n
// % 2. The right operand, 16 deep, is described by where it lies in shared memory, and so is the
// left one of 64 x 16 in `ss`, where rows of both are as deep as the product, and in `tt`, where
// rows of both are as wide as the result. In `rs` the left one lies in registers, and the right
// one's rows are as wide as the result. Between the instruction and the end of waiting for its
// group nobody may touch what it reads and writes.
#pragma once

namespace ptx {

using SmemDesc = unsigned long long;

// The registers of a result, as the text of an instruction names them.
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18" \
  ", %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_56                                                            \
  WGMMA_NAMES_40                                                                  \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_88                                                                    \
  WGMMA_NAMES_64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80" \
  ", %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_128                                                                    \
  WGMMA_NAMES_96                                                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110" \
  ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124"   \
  ", %125, %126, %127"
// The same as its operands: of d's rows the columns from n on, 4 or 16 registers.
#define WGMMA_4(n) "+f"(d[0][n]), "+f"(d[0][n + 1]), "+f"(d[1][n]), "+f"(d[1][n + 1])
#define WGMMA_16(n) WGMMA_4(n), WGMMA_4(n + 2), WGMMA_4(n + 4), WGMMA_4(n + 6)
#define WGMMA_32(n) WGMMA_16(n), WGMMA_16(n + 8)
// The texts of the instructions. A, B and ADD name what is multiplied, and whether d counts.
#define WGMMA_SS(SHAPE, TYPE, NAMES, A, B, ADD)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1, 0, 0;\n}"
#define WGMMA_ST(SHAPE, TYPE, NAMES, A, B, ADD)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1, 0, 1;\n}"
#define WGMMA_TT(SHAPE, TYPE, NAMES, A, B, ADD)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1, 1, 1;\n}"
#define WGMMA_RD(SHAPE, TYPE, NAMES, A, B, ADD)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1;\n}"
#define WGMMA_RS(SHAPE, TYPE, NAMES, A, B)                                                   \
  "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1, 1;\n}"

// Orders the products that follow behind what this warp did to registers before.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes a group of the products since the last one.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for the warpgroup's groups but the last `PENDING`.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: the compiler learns that a result changed while it was waited for.
template <int COLUMNS>
__device__ __forceinline__ void fence_accumulator(float (&d)[2][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) asm volatile("" : "+f"(d[r][n])::"memory");
  }
}

// d = a b^T, or d += where `add`.
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n32k16", "f16", WGMMA_NAMES_16, "%16", "%17", "%18")
               : WGMMA_16(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n64k16", "f16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][20], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n80k16", "f16", WGMMA_NAMES_40, "%40", "%41", "%42")
               : WGMMA_32(0), WGMMA_4(16), WGMMA_4(18)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][28], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n112k16", "f16", WGMMA_NAMES_56, "%56", "%57", "%58")
               : WGMMA_32(0), WGMMA_16(16), WGMMA_4(24), WGMMA_4(26)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n128k16", "f16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n176k16", "f16", WGMMA_NAMES_88, "%88", "%89", "%90")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32), WGMMA_4(40), WGMMA_4(42)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n32k16", "bf16", WGMMA_NAMES_16, "%16", "%17", "%18")
               : WGMMA_16(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n64k16", "bf16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][20], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n80k16", "bf16", WGMMA_NAMES_40, "%40", "%41", "%42")
               : WGMMA_32(0), WGMMA_4(16), WGMMA_4(18)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][28], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n112k16", "bf16", WGMMA_NAMES_56, "%56", "%57", "%58")
               : WGMMA_32(0), WGMMA_16(16), WGMMA_4(24), WGMMA_4(26)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n128k16", "bf16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n176k16", "bf16", WGMMA_NAMES_88, "%88", "%89", "%90")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32), WGMMA_4(40), WGMMA_4(42)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d = a b, or d += where `add`.
__device__ __forceinline__ void wgmma_st_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n64k16", "f16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_st_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n128k16", "f16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_st_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n64k16", "bf16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_st_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n128k16", "bf16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d = a^T b, or d += where `add`.
__device__ __forceinline__ void wgmma_tt_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_TT("m64n64k16", "f16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_tt_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_TT("m64n64k16", "bf16", WGMMA_NAMES_32, "%32", "%33", "%34")
               : WGMMA_32(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_tt_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_TT("m64n128k16", "f16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_tt_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_TT("m64n128k16", "bf16", WGMMA_NAMES_64, "%64", "%65", "%66")
               : WGMMA_32(0), WGMMA_32(16)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d = a b^T, or d += where `add`, 8 deep in float32: of a and b the last 13 bits are passed over. A
// lane has of a rows lane / 4 and 8 more, columns lane % 4 and 4 more.
__device__ __forceinline__ void wgmma_rs_tf32(float (&d)[2][16], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RD("m64n64k8", "tf32", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")
               : WGMMA_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_tf32(float (&d)[2][32], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RD("m64n128k8", "tf32", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
               : WGMMA_32(0), WGMMA_32(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// d += a b.
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][16], const unsigned int (&a)[4],
                                             SmemDesc b) {
  asm volatile(WGMMA_RS("m64n64k16", "f16", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36")
               : WGMMA_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][32], const unsigned int (&a)[4],
                                             SmemDesc b) {
  asm volatile(WGMMA_RS("m64n128k16", "f16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68")
               : WGMMA_32(0), WGMMA_32(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][48], const unsigned int (&a)[4],
                                             SmemDesc b) {
  asm volatile(WGMMA_RS("m64n192k16", "f16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][64], const unsigned int (&a)[4],
                                             SmemDesc b) {
  asm volatile(WGMMA_RS("m64n256k16", "f16", WGMMA_NAMES_128, "%128, %129, %130, %131", "%132")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][16], const unsigned int (&a)[4],
                                              SmemDesc b) {
  asm volatile(WGMMA_RS("m64n64k16", "bf16", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36")
               : WGMMA_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][32], const unsigned int (&a)[4],
                                              SmemDesc b) {
  asm volatile(WGMMA_RS("m64n128k16", "bf16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68")
               : WGMMA_32(0), WGMMA_32(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][48], const unsigned int (&a)[4],
                                              SmemDesc b) {
  asm volatile(WGMMA_RS("m64n192k16", "bf16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][64], const unsigned int (&a)[4],
                                              SmemDesc b) {
  asm volatile(WGMMA_RS("m64n256k16", "bf16", WGMMA_NAMES_128, "%128, %129, %130, %131", "%132")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace ptx
