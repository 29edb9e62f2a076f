// The twin of kernels_cu/arch/matrix.cuh in C++: lanes bring their operands to a meeting.
#pragma once

namespace arch {

inline unsigned int shared_address(const void* place_smem) {
  const char* const begin = static_cast<const char*>(emulator::shared_memory());
  return static_cast<unsigned int>(static_cast<const char*>(place_smem) - begin);
}

// Every lane reads the row whose address it gives; 16 bytes that begin elsewhere trap on a GPU, and
// are no row here.
inline void load_row(unsigned int (&row)[4], unsigned int address) {
  const char* const begin = static_cast<const char*>(emulator::shared_memory());
  if (address % 16 != 0) __builtin_trap();
  for (int x = 0; x < 4; ++x) row[x] = reinterpret_cast<const unsigned int*>(begin + address)[x];
}

inline void ldmatrix_x4(unsigned int (&to)[4], unsigned int address, EMULATOR_WHERE) {
  unsigned int row[4];
  load_row(row, address);
  emulator::load_matrices("ldmatrix_x4", {file, line}, row, to, false);
}

inline void ldmatrix_x4_trans(unsigned int (&to)[4], unsigned int address, EMULATOR_WHERE) {
  unsigned int row[4];
  load_row(row, address);
  emulator::load_matrices("ldmatrix_x4_trans", {file, line}, row, to, true);
}

inline void mma_m16n8k16_f16(float& c0, float& c1, float& c2, float& c3,
                             const unsigned int (&a)[4], unsigned int b0, unsigned int b1,
                             EMULATOR_WHERE) {
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

}  // namespace arch
