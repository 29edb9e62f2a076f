// The twin of kernels_cu/ptx/wgmma.cuh in C++: products are computed when they are waited for.
#pragma once

namespace ptx {

using SmemDesc = unsigned long long;

inline void wgmma_fence() { emulator::wgmma_fence(); }

inline void wgmma_commit() { emulator::wgmma_commit(); }

template <int PENDING>
inline void wgmma_wait(EMULATOR_WHERE) {
  emulator::wgmma_wait("wgmma_wait", {file, line}, PENDING);
}

template <int COLUMNS>
inline void fence_accumulator(float (&)[2][COLUMNS]) {}
template <int FIRST, int SECOND>
inline void fence_accumulator(float (&)[2][FIRST], float (&)[2][SECOND]) {}

inline void wgmma_ss_f16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 32, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][12], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 48, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 64, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][20], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 80, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][28], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 112, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 128, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][36], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 144, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 176, nullptr, a, b, add, false);
}
inline void wgmma_ss_f16(float (&d)[2][52], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_f16", {file, line}, d[0], 208, nullptr, a, b, add, false);
}
inline void wgmma_ss_bf16(float (&d)[2][8], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 32, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][12], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 48, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 64, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][20], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 80, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][28], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 112, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 128, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][36], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 144, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][44], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 176, nullptr, a, b, add, true);
}
inline void wgmma_ss_bf16(float (&d)[2][52], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_ss_bf16", {file, line}, d[0], 208, nullptr, a, b, add, true);
}

inline void wgmma_st_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_f16", {file, line}, d[0], 64, nullptr, a, b, add, false,
                          emulator::RIGHT_WIDE);
}
inline void wgmma_st_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_f16", {file, line}, d[0], 128, nullptr, a, b, add, false,
                          emulator::RIGHT_WIDE);
}
inline void wgmma_st_f16(float (&d)[2][64], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_f16", {file, line}, d[0], 256, nullptr, a, b, add, false,
                          emulator::RIGHT_WIDE);
}
inline void wgmma_st_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_bf16", {file, line}, d[0], 64, nullptr, a, b, add, true,
                          emulator::RIGHT_WIDE);
}
inline void wgmma_st_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_bf16", {file, line}, d[0], 128, nullptr, a, b, add, true,
                          emulator::RIGHT_WIDE);
}
inline void wgmma_st_bf16(float (&d)[2][64], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_st_bf16", {file, line}, d[0], 256, nullptr, a, b, add, true,
                          emulator::RIGHT_WIDE);
}

inline void wgmma_tt_f16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_tt_f16", {file, line}, d[0], 64, nullptr, a, b, add, false,
                          emulator::BOTH_WIDE);
}
inline void wgmma_tt_bf16(float (&d)[2][16], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_tt_bf16", {file, line}, d[0], 64, nullptr, a, b, add, true,
                          emulator::BOTH_WIDE);
}

inline void wgmma_tt_f16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_tt_f16", {file, line}, d[0], 128, nullptr, a, b, add, false,
                          emulator::BOTH_WIDE);
}
inline void wgmma_tt_bf16(float (&d)[2][32], SmemDesc a, SmemDesc b, bool add, EMULATOR_WHERE) {
  emulator::begin_product("wgmma_tt_bf16", {file, line}, d[0], 128, nullptr, a, b, add, true,
                          emulator::BOTH_WIDE);
}

inline void wgmma_rs_tf32(float (&d)[2][16], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_floats("wgmma_rs_tf32", {file, line}, d[0], 64, a, b, add);
}
inline void wgmma_rs_tf32(float (&d)[2][32], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product_of_floats("wgmma_rs_tf32", {file, line}, d[0], 128, a, b, add);
}

inline void wgmma_rs_f16(float (&d)[2][8], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 32, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][12], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 48, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][16], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 64, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][20], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 80, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][24], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 96, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][32], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 128, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][40], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 160, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][48], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 192, a, 0, b, add, false);
}
inline void wgmma_rs_f16(float (&d)[2][64], const unsigned int (&a)[4], SmemDesc b, bool add,
                         EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16", {file, line}, d[0], 256, a, 0, b, add, false);
}
inline void wgmma_rs_bf16(float (&d)[2][8], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 32, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][12], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 48, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][16], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 64, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][20], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 80, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][24], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 96, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][32], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 128, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][40], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 160, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][48], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 192, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_bf16(float (&d)[2][64], const unsigned int (&a)[4], SmemDesc b, bool add,
                          EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16", {file, line}, d[0], 256, a, 0, b, add,
                          emulator::BOTH_WIDE);
}
inline void wgmma_rs_f16_first(float (&d)[2][80], const unsigned int (&a)[4], SmemDesc b, bool add,
                               EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16_first", {file, line}, d[0], 192, a, 0, b, add, false,
                          emulator::NONE_WIDE, {0, 320});
}
inline void wgmma_rs_f16_last(float (&d)[2][80], const unsigned int (&a)[4], SmemDesc b, bool add,
                              EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_f16_last", {file, line}, d[0], 128, a, 0, b, add, false,
                          emulator::NONE_WIDE, {192, 320});
}
inline void wgmma_rs_bf16_first(float (&d)[2][80], const unsigned int (&a)[4], SmemDesc b, bool add,
                                EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16_first", {file, line}, d[0], 192, a, 0, b, add, true,
                          emulator::NONE_WIDE, {0, 320});
}
inline void wgmma_rs_bf16_last(float (&d)[2][80], const unsigned int (&a)[4], SmemDesc b, bool add,
                               EMULATOR_WHERE) {
  emulator::begin_product("wgmma_rs_bf16_last", {file, line}, d[0], 128, a, 0, b, add, true,
                          emulator::NONE_WIDE, {192, 320});
}

}  // namespace ptx
