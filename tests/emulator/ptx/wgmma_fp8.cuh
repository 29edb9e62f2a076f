// The twin of kernels_cu/ptx/wgmma_fp8.cuh in C++: products are computed when they are waited
// for.
#pragma once
#include "wgmma.cuh"

namespace ptx {

inline void wgmma_ss_e4m3(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_ss_e4m3", {file, line}, d[0], 128, nullptr, a, b, add,
                                   emulator::E4M3, emulator::E4M3);
}
inline void wgmma_ss_e5m2(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_ss_e5m2", {file, line}, d[0], 128, nullptr, a, b, add,
                                   emulator::E5M2, emulator::E5M2);
}
inline void wgmma_rs_e4m3(float (&d)[2][16], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_rs_e4m3", {file, line}, d[0], 64, a, 0, b, add,
                                   emulator::E4M3, emulator::E4M3);
}
inline void wgmma_rs_e4m3(float (&d)[2][32], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_rs_e4m3", {file, line}, d[0], 128, a, 0, b, add,
                                   emulator::E4M3, emulator::E4M3);
}
inline void wgmma_rs_e5m2(float (&d)[2][16], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_rs_e5m2", {file, line}, d[0], 64, a, 0, b, add,
                                   emulator::E4M3, emulator::E5M2);
}
inline void wgmma_rs_e5m2(float (&d)[2][32], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_codes("wgmma_rs_e5m2", {file, line}, d[0], 128, a, 0, b, add,
                                   emulator::E4M3, emulator::E5M2);
}

}  // namespace ptx
