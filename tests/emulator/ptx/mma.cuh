// The twin of kernels_cu/ptx/mma.cuh in C++: lanes bring their operands to a meeting.
#pragma once

namespace ptx {

inline unsigned int shared_address(const void* place_smem) {
  const char* const begin = static_cast<const char*>(emulator::shared_memory());
  return static_cast<unsigned int>(static_cast<const char*>(place_smem) - begin);
}

// Every lane reads the row whose address it gives.
inline void ldmatrix_x4(unsigned int (&to)[4], unsigned int address, EMULATOR_WHERE) {
  const unsigned int* const from = emulator::matrix_row("ldmatrix_x4", {file, line}, address);
  const unsigned int row[4] = {from[0], from[1], from[2], from[3]};
  emulator::load_matrices("ldmatrix_x4", {file, line}, row, to, false);
}

inline void ldmatrix_x4_trans(unsigned int (&to)[4], unsigned int address, EMULATOR_WHERE) {
  const unsigned int* const from = emulator::matrix_row("ldmatrix_x4_trans", {file, line}, address);
  const unsigned int row[4] = {from[0], from[1], from[2], from[3]};
  emulator::load_matrices("ldmatrix_x4_trans", {file, line}, row, to, true);
}

// Every lane writes the row whose address it gives.
inline void stmatrix_x4(unsigned int address, const unsigned int (&from)[4], EMULATOR_WHERE) {
  unsigned int row[4];
  emulator::store_matrices("stmatrix_x4", {file, line}, from, row);
  const unsigned int* const to = emulator::matrix_row("stmatrix_x4", {file, line}, address);
  for (int n = 0; n < 4; ++n) const_cast<unsigned int*>(to)[n] = row[n];
}

inline void mma_m16n8k16_f16(float& c0, float& c1, float& c2, float& c3, const unsigned int (&a)[4],
                             unsigned int b0, unsigned int b1, EMULATOR_WHERE) {
  float c[4] = {c0, c1, c2, c3};
  const unsigned int b[2] = {b0, b1};
  emulator::multiply_matrices("mma_m16n8k16_f16", {file, line}, c, a, b, false);
  c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}

inline void mma_m16n8k16_bf16(float& c0, float& c1, float& c2, float& c3,
                              const unsigned int (&a)[4], unsigned int b0, unsigned int b1,
                              EMULATOR_WHERE) {
  float c[4] = {c0, c1, c2, c3};
  const unsigned int b[2] = {b0, b1};
  emulator::multiply_matrices("mma_m16n8k16_bf16", {file, line}, c, a, b, true);
  c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}

inline void mma_m16n8k8_tf32(float& c0, float& c1, float& c2, float& c3, const unsigned int (&a)[4],
                             unsigned int b0, unsigned int b1, EMULATOR_WHERE) {
  float c[4] = {c0, c1, c2, c3};
  const unsigned int b[2] = {b0, b1};
  emulator::multiply_floats("mma_m16n8k8_tf32", {file, line}, c, a, b);
  c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
}

inline void mma_m8n8k4_f64(double& c0, double& c1, double a, double b, EMULATOR_WHERE) {
  double c[2] = {c0, c1};
  emulator::multiply_doubles("mma_m8n8k4_f64", {file, line}, c, a, b);
  c0 = c[0], c1 = c[1];
}

inline void mma_m16n8k8_f64(double& c0, double& c1, double& c2, double& c3, const double (&a)[4],
                            double b0, double b1, EMULATOR_WHERE) {
  mma_m8n8k4_f64(c0, c1, a[0], b0, file, line);
  mma_m8n8k4_f64(c2, c3, a[1], b0, file, line);
  mma_m8n8k4_f64(c0, c1, a[2], b1, file, line);
  mma_m8n8k4_f64(c2, c3, a[3], b1, file, line);
}

}  // namespace ptx
