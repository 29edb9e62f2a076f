// mma.sync, ldmatrix and stmatrix: products of small matrices by the 32 lanes of a warp together,
// since compute capability 8.0: one PTX instruction per function. warp/fragment_rows.cuh says which
// lane holds what.
#pragma once

namespace ptx {

// The address of something in shared memory: 32 bits instead of a pointer's 64.
__device__ __forceinline__ unsigned int shared_address(const void* place_smem) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(place_smem));
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane 8 m + r gives the address of row r of matrix
// m, and gets of every matrix the elements 2 (lane % 4) and the next one of row lane / 4.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&to)[4], unsigned int address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same for transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&to)[4], unsigned int address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements, the inverse of ldmatrix_x4. Since compute
// capability 9.0.
__device__ __forceinline__ void stmatrix_x4(unsigned int address, const unsigned int (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// c += a b for a of 16 x 16, b of 16 x 8 and c of 16 x 8, float16 times float16 in float32.
__device__ __forceinline__ void mma_m16n8k16_f16(float& c0, float& c1, float& c2, float& c3,
                                                 const unsigned int (&a)[4], unsigned int b0,
                                                 unsigned int b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for bfloat16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float& c0, float& c1, float& c2, float& c3,
                                                  const unsigned int (&a)[4], unsigned int b0,
                                                  unsigned int b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b for a of 16 x 8, b of 8 x 8 and c of 16 x 8 in TF32: the last 13 bits of a and b are
// ignored. Sums are float32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float& c0, float& c1, float& c2, float& c3,
                                                 const unsigned int (&a)[4], unsigned int b0,
                                                 unsigned int b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b for a of 8 x 4, b of 4 x 8 and c of 8 x 8 in float64.
__device__ __forceinline__ void mma_m8n8k4_f64(double& c0, double& c1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c0), "+d"(c1)
      : "d"(a), "d"(b));
}

// c += a b for a of 16 x 8, b of 8 x 8 and c of 16 x 8 in float64.
__device__ __forceinline__ void mma_m16n8k8_f64(double& c0, double& c1, double& c2, double& c3,
                                                const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
  mma_m8n8k4_f64(c0, c1, a[0], b0);
  mma_m8n8k4_f64(c2, c3, a[1], b0);
  mma_m8n8k4_f64(c0, c1, a[2], b1);
  mma_m8n8k4_f64(c2, c3, a[3], b1);
#endif
}

}  // namespace ptx
