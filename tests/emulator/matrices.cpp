// Matrix instructions: what the lanes of a warp bring, and what each of them gets.
#include "runtime.h"

#include "numbers.h"
#include "races.h"

namespace emulator {

const unsigned int* matrix_row(const char* what, Where where, unsigned int address) {
  if (address % 16 != 0) {
    races::fault(0, "gives %s (%s:%d) the address %u, which is no multiple of 16", what, where.file,
                 where.line, address);
  }
  const char* const row = static_cast<const char*>(shared_memory()) + address;
  return reinterpret_cast<const unsigned int*>(row);
}

void load_matrices(const char* what, Where where, const unsigned int (&row)[4],
                   unsigned int (&got)[4], bool transposed) {
  struct Brought {
    const unsigned int* row;
    unsigned int* got;
    bool transposed;
  } mine = {row, got, transposed};
  meet_lanes(what, where, &mine, [](void* const* all) {
    const auto element = [&](unsigned int matrix, unsigned int r, unsigned int c) {
      const auto& from = *static_cast<Brought*>(all[8 * matrix + r]);
      return from.row[c / 2] >> c % 2 * 16 & 0xffffu;
    };
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      const auto& to = *static_cast<Brought*>(all[lane]);
      const unsigned int r = lane / 4, c = lane % 4 * 2;
      for (unsigned int m = 0; m < 4; ++m) {
        to.got[m] = to.transposed ? element(m, c, r) | element(m, c + 1, r) << 16
                                  : element(m, r, c) | element(m, r, c + 1) << 16;
      }
    }
  });
}

void store_matrices(const char* what, Where where, const unsigned int (&from)[4],
                    unsigned int (&row)[4]) {
  struct Brought {
    const unsigned int* from;
    unsigned int* row;
  } mine = {from, row};
  meet_lanes(what, where, &mine, [](void* const* all) {
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      for (unsigned int n = 0; n < 4; ++n) {
        const auto& has = *static_cast<Brought*>(all[lane % 8 * 4 + n]);
        static_cast<Brought*>(all[lane])->row[n] = has.from[lane / 8];
      }
    }
  });
}

// The products are exact. Sums of 8 of them and what was there before are cut off behind the 24
// bits of a float: tensor cores do not round to nearest, and the order of their sums is not told.
void multiply_matrices(const char* what, Where where, float (&c)[4], const unsigned int (&a)[4],
                       const unsigned int (&b)[2], bool brain) {
  struct Brought {
    float* c;
    const unsigned int* a;
    const unsigned int* b;
    bool brain;
  } mine = {c, a, b, brain};
  meet_lanes(what, where, &mine, [](void* const* all) {
    const auto of = [&](unsigned int lane) { return *static_cast<Brought*>(all[lane]); };
    double left[16][16], right[16][8];
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      const Brought from = of(lane);
      const unsigned int r = lane / 4, k = lane % 4 * 2;
      for (unsigned int n = 0; n < 8; ++n) {
        const unsigned int half = n % 2;
        left[r + n / 2 % 2 * 8][k + n / 4 * 8 + half] = widened(from.a[n / 2], half, from.brain);
        if (n < 4) right[k + n / 2 * 8 + half][r] = widened(from.b[n / 2], half, from.brain);
      }
    }
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      for (unsigned int n = 0; n < 4; ++n) {
        float& sum = of(lane).c[n];
        for (unsigned int k = 0; k < 16; k += 8) {
          double exact = static_cast<double>(sum);
          for (unsigned int x = k; x < k + 8; ++x) {
            exact += left[lane / 4 + n / 2 * 8][x] * right[x][lane % 4 * 2 + n % 2];
          }
          sum = cut_off(exact);
        }
      }
    }
  });
}

// Products of numbers of 11 bits are exact, too. Sums of 4 of them are cut off as above.
void multiply_floats(const char* what, Where where, float (&c)[4], const unsigned int (&a)[4],
                     const unsigned int (&b)[2]) {
  struct Brought {
    float* c;
    const unsigned int* a;
    const unsigned int* b;
  } mine = {c, a, b};
  meet_lanes(what, where, &mine, [](void* const* all) {
    const auto of = [&](unsigned int lane) { return *static_cast<Brought*>(all[lane]); };
    const auto number = [](unsigned int bits) {
      const unsigned int kept = bits & 0xffffe000u;
      float value;
      __builtin_memcpy(&value, &kept, sizeof(value));
      return static_cast<double>(value);
    };
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      for (unsigned int n = 0; n < 4; ++n) {
        float& sum = of(lane).c[n];
        const unsigned int row = lane / 4 * 4, column = (lane % 4 * 2 + n % 2) * 4;
        for (unsigned int half = 0; half < 2; ++half) {
          double exact = static_cast<double>(sum);
          for (unsigned int x = 0; x < 4; ++x) {
            exact += number(of(row + x).a[2 * half + n / 2]) * number(of(column + x).b[half]);
          }
          sum = cut_off(exact);
        }
      }
    }
  });
}

// Every product and sum is rounded once, in the order of the elements.
void multiply_doubles(const char* what, Where where, double (&c)[2], double a, double b) {
  struct Brought {
    double* c;
    double a, b;
  } mine = {c, a, b};
  meet_lanes(what, where, &mine, [](void* const* all) {
    const auto of = [&](unsigned int lane) { return *static_cast<Brought*>(all[lane]); };
    for (unsigned int lane = 0; lane < WARP; ++lane) {
      for (unsigned int n = 0; n < 2; ++n) {
        double& sum = of(lane).c[n];
        for (unsigned int x = 0; x < 4; ++x) {
          sum = std::fma(of(lane / 4 * 4 + x).a, of((lane % 4 * 2 + n) * 4 + x).b, sum);
        }
      }
    }
  });
}

}  // namespace emulator
