// wgmma: asynchronous products of matrices by the four warps of a warpgroup together: one PTX
// instruction per function, on compute capability 9.0 only.
//
// The accumulator d has 64 rows and N columns in float32. A warp has 16 adjacent rows of it;
// element (r, n) of a thread is at row 8 r + lane / 4 of these, column 8 (n / 2) + 2 (lane % 4) + n
// % 2. The product is 16 deep (TF32: 8). The names say how the operands come:
//   ss  a and b in shared memory, both K-major (rows contiguous along the depth)
//   st  a in shared memory, K-major; b there, MN-major (rows contiguous along d's columns)
//   tt  a and b in shared memory, both MN-major
//   rs  a in registers, b in shared memory, MN-major; TF32: K-major
// Until wgmma_wait has waited for its group, nothing may touch the registers and the shared memory
// that an instruction reads or writes.
#pragma once

namespace ptx {

using SmemDesc = unsigned long long;

// The registers of an accumulator, as the text of an instruction names them.
#define WGMMA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_32                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18" \
  ", %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_56                                                            \
  WGMMA_NAMES_40                                                                  \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_88                                                                    \
  WGMMA_NAMES_64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80" \
  ", %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_128                                                                    \
  WGMMA_NAMES_96                                                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110" \
  ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124"   \
  ", %125, %126, %127"
// The same registers as operands of the asm statement: 4, 16 or 32 of d, from column n on.
#define WGMMA_4(n) "+f"(d[0][n]), "+f"(d[0][n + 1]), "+f"(d[1][n]), "+f"(d[1][n + 1])
#define WGMMA_16(n) WGMMA_4(n), WGMMA_4(n + 2), WGMMA_4(n + 4), WGMMA_4(n + 6)
#define WGMMA_32(n) WGMMA_16(n), WGMMA_16(n + 8)
// The texts of the instructions. A and B name the operands, ADD the predicate whether d is added.
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
#define WGMMA_RA(SHAPE, TYPE, NAMES, A, B, ADD)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE \
  "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1, 1;\n}"

// Orders the wgmmas that follow after this warp's earlier accesses to their registers.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes a group of the wgmmas since the last group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the last `PENDING` groups are pending.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: tells the compiler that an accumulator has changed during wgmma_wait.
template <int COLUMNS>
__device__ __forceinline__ void fence_accumulator(float (&d)[2][COLUMNS]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) asm volatile("" : "+f"(d[r][n])::"memory");
  }
}

template <int FIRST, int SECOND>
__device__ __forceinline__ void fence_accumulator(float (&first)[2][FIRST],
                                                  float (&second)[2][SECOND]) {
  fence_accumulator(first);
  fence_accumulator(second);
}

// d = a b^T, or d += where `add`.
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n32k16", "f16", WGMMA_NAMES_16, "%16", "%17", "%18")
               : WGMMA_16(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][12], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n48k16", "f16", WGMMA_NAMES_24, "%24", "%25", "%26")
               : WGMMA_16(0), WGMMA_4(8), WGMMA_4(10)
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
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][36], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n144k16", "f16", WGMMA_NAMES_72, "%72", "%73", "%74")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_4(32), WGMMA_4(34)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n176k16", "f16", WGMMA_NAMES_88, "%88", "%89", "%90")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32), WGMMA_4(40), WGMMA_4(42)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_f16(float (&d)[2][52], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n208k16", "f16", WGMMA_NAMES_104, "%104", "%105", "%106")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_4(48), WGMMA_4(50)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n32k16", "bf16", WGMMA_NAMES_16, "%16", "%17", "%18")
               : WGMMA_16(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][12], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n48k16", "bf16", WGMMA_NAMES_24, "%24", "%25", "%26")
               : WGMMA_16(0), WGMMA_4(8), WGMMA_4(10)
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
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][36], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n144k16", "bf16", WGMMA_NAMES_72, "%72", "%73", "%74")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_4(32), WGMMA_4(34)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n176k16", "bf16", WGMMA_NAMES_88, "%88", "%89", "%90")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32), WGMMA_4(40), WGMMA_4(42)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_ss_bf16(float (&d)[2][52], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_SS("m64n208k16", "bf16", WGMMA_NAMES_104, "%104", "%105", "%106")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_4(48), WGMMA_4(50)
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
__device__ __forceinline__ void wgmma_st_f16(float (&d)[2][64], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n256k16", "f16", WGMMA_NAMES_128, "%128", "%129", "%130")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
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
__device__ __forceinline__ void wgmma_st_bf16(float (&d)[2][64], SmemDesc a, SmemDesc b, bool add) {
  asm volatile(WGMMA_ST("m64n256k16", "bf16", WGMMA_NAMES_128, "%128", "%129", "%130")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
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

// d = a b^T, or d += where `add`, 8 deep, in TF32: the last 13 bits of a and b are ignored. A lane
// has of a the rows lane / 4 and lane / 4 + 8, and the columns lane % 4 and lane % 4 + 4.
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

// d = a b, or d += where `add`.
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][8], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n32k16", "f16", WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21")
               : WGMMA_16(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][12], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n48k16", "f16", WGMMA_NAMES_24, "%24, %25, %26, %27", "%28", "%29")
               : WGMMA_16(0), WGMMA_4(8), WGMMA_4(10)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][16], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n64k16", "f16", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")
               : WGMMA_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][20], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n80k16", "f16", WGMMA_NAMES_40, "%40, %41, %42, %43", "%44", "%45")
               : WGMMA_32(0), WGMMA_4(16), WGMMA_4(18)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][24], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n96k16", "f16", WGMMA_NAMES_48, "%48, %49, %50, %51", "%52", "%53")
               : WGMMA_32(0), WGMMA_16(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][32], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n128k16", "f16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
               : WGMMA_32(0), WGMMA_32(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][40], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n160k16", "f16", WGMMA_NAMES_80, "%80, %81, %82, %83", "%84", "%85")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][48], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n192k16", "f16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100", "%101")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16(float (&d)[2][64], const unsigned int (&a)[4],
                                             SmemDesc b, bool add) {
  asm volatile(
      WGMMA_RA("m64n256k16", "f16", WGMMA_NAMES_128, "%128, %129, %130, %131", "%132", "%133")
      : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][8], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n32k16", "bf16", WGMMA_NAMES_16, "%16, %17, %18, %19", "%20", "%21")
               : WGMMA_16(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][12], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n48k16", "bf16", WGMMA_NAMES_24, "%24, %25, %26, %27", "%28", "%29")
               : WGMMA_16(0), WGMMA_4(8), WGMMA_4(10)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][16], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n64k16", "bf16", WGMMA_NAMES_32, "%32, %33, %34, %35", "%36", "%37")
               : WGMMA_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][20], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n80k16", "bf16", WGMMA_NAMES_40, "%40, %41, %42, %43", "%44", "%45")
               : WGMMA_32(0), WGMMA_4(16), WGMMA_4(18)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][24], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n96k16", "bf16", WGMMA_NAMES_48, "%48, %49, %50, %51", "%52", "%53")
               : WGMMA_32(0), WGMMA_16(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][32], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n128k16", "bf16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
               : WGMMA_32(0), WGMMA_32(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][40], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n160k16", "bf16", WGMMA_NAMES_80, "%80, %81, %82, %83", "%84", "%85")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_16(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][48], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n192k16", "bf16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100", "%101")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[2][64], const unsigned int (&a)[4],
                                              SmemDesc b, bool add) {
  asm volatile(
      WGMMA_RA("m64n256k16", "bf16", WGMMA_NAMES_128, "%128, %129, %130, %131", "%132", "%133")
      : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32), WGMMA_32(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// The same for the first 192 and the last 128 of 320 columns, more than an instruction has.
__device__ __forceinline__ void wgmma_rs_f16_first(float (&d)[2][80], const unsigned int (&a)[4],
                                                   SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n192k16", "f16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100", "%101")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_f16_last(float (&d)[2][80], const unsigned int (&a)[4],
                                                  SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n128k16", "f16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
               : WGMMA_32(48), WGMMA_32(64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16_first(float (&d)[2][80], const unsigned int (&a)[4],
                                                    SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n192k16", "bf16", WGMMA_NAMES_96, "%96, %97, %98, %99", "%100", "%101")
               : WGMMA_32(0), WGMMA_32(16), WGMMA_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma_rs_bf16_last(float (&d)[2][80], const unsigned int (&a)[4],
                                                   SmemDesc b, bool add) {
  asm volatile(WGMMA_RA("m64n128k16", "bf16", WGMMA_NAMES_64, "%64, %65, %66, %67", "%68", "%69")
               : WGMMA_32(48), WGMMA_32(64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

}  // namespace ptx
