// Boxes of an array, as the copies of compute capability 9.0 know them.
#pragma once

namespace emulator {

// A map as emulator/calls.py writes it: an array of 16-bit elements, and how many rows a box has.
struct Map {
  unsigned long long address, shape[5], strides[4], rows;

  // Calls `visit` with where each element of the box lies in shared memory, from its beginning on,
  // and in the array: 0 outside of it. Pieces of 16 bytes lie at c ^ (r % 8).
  template <class Visit>
  void visit_box(const int (&first)[5], const Visit& visit) const {
    for (unsigned int row = 0; row < rows; ++row) {
      for (unsigned int column = 0; column < 64; ++column) {
        const long long at[5] = {first[0] + static_cast<long long>(column),
                                 first[1] + static_cast<long long>(row), first[2], first[3],
                                 first[4]};
        unsigned long long place = address + static_cast<unsigned long long>(at[0]) * 2;
        bool inside = true;
        for (unsigned int axis = 0; axis < 5; ++axis) {
          inside &= at[axis] >= 0 && at[axis] < static_cast<long long>(shape[axis]);
          if (axis) place += static_cast<unsigned long long>(at[axis]) * strides[axis - 1];
        }
        visit((row * 128 + column * 2) ^ (row & 7) << 4, inside ? place : 0);
      }
    }
  }
};

}  // namespace emulator
