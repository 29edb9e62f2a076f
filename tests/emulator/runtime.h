// What emulated kernels ask of the runtime: a thread's place, shared memory, and meetings, where
// threads wait for each other. runtime.cpp implements it; language.h builds CUDA's words on it.
//
// No header is included here or in language.h: most of the time to compile a kernel would go there.
#pragma once

// Seen from outside of the library; nothing else is.
#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

struct Index {
  unsigned int x, y, z;
};

// A line of a kernel's source: where its threads wait, as faults report it.
struct Where {
  const char* file;
  int line;
};

// What the runtime knows of a kernel that was compiled.
struct Kernel {
  void (*run)(const void* params);
  unsigned int threads;
  unsigned int shared_bytes;
  unsigned int params_bytes;
  bool flush_subnormals;
  unsigned int grain;  // bytes of global memory that threads may share
};

constexpr unsigned int WARP = 32;
constexpr unsigned int WHOLE_WARP = 0xffffffffu;

// The block's shared memory, aligned as the hardware's.
void* shared_memory();

// Waits until all threads of the block are here, and orders their accesses to memory. `what` is the
// name of the function that threads call together. Whether `condition` holds for any of them.
bool meet_block(const char* what, Where where, bool condition);

// Waits until the lanes of `mask` are here; `orders` says whether that orders accesses to memory.
// Lane l gets what lane `source` gave, if that is a lane of the mask.
unsigned long long meet_warp(const char* what, Where where, unsigned int mask, bool orders,
                             unsigned long long given, unsigned int source);

// Waits until the whole warp is here; the lane that comes last computes what all get from what all
// brought.
void meet_lanes(const char* what, Where where, void* brought, void (*compute)(void* const* all));

// The lanes of `mask` for which the condition holds.
unsigned int vote(const char* what, Where where, unsigned int mask, bool condition);

// Begins to copy to shared memory, or to write zeros where `from` is null. Of 16 bytes only the
// first `wanted` may come from there, and the others are zeros. It lands at once or when it is
// waited for, as the schedule says; until then nobody may touch its place.
void begin_copy(void* to, const void* from, unsigned int bytes, unsigned int wanted);

// Ends the grids ahead of this one: what they write late is in memory now.
void end_grids();

// Makes a group of the copies that this thread began since the last one.
void cp_async_commit();

// Waits for this thread's groups of copies but the last `pending`.
void cp_async_wait(unsigned int pending);

// Waits for all copies that this thread began.
void cp_async_wait_all();

// The 16 bytes of shared memory at an address: a row of a matrix.
const unsigned int* matrix_row(const char* what, Where where, unsigned int address);

// Four 8 x 8 matrices of 16-bit elements. Lane 8 m + r brings row r of matrix m, and gets of every
// matrix the elements 2 (lane % 4) and the next one of row lane / 4; of the matrix transposed where
// `transposed`.
void load_matrices(const char* what, Where where, const unsigned int (&row)[4],
                   unsigned int (&got)[4], bool transposed);

// The other way round: a lane gets the row that it is to store.
void store_matrices(const char* what, Where where, const unsigned int (&from)[4],
                    unsigned int (&row)[4]);

// c += a b, as mma.sync.m16n8k16 has them in its lanes: a is 16 x 16, b is 16 x 8. Elements of a
// and b are float16, or bfloat16 where `brain`.
void multiply_matrices(const char* what, Where where, float (&c)[4], const unsigned int (&a)[4],
                       const unsigned int (&b)[2], bool brain);

// The same of mma.sync.m16n8k8: a is 16 x 8, b is 8 x 8, both of float32 without its last 13 bits.
void multiply_floats(const char* what, Where where, float (&c)[4], const unsigned int (&a)[4],
                     const unsigned int (&b)[2]);

// The same of mma.sync.m8n8k4: a is 8 x 4, b is 4 x 8, all of float64.
void multiply_doubles(const char* what, Where where, double (&c)[2], double a, double b);
// -- what GPUs of compute capability 9.0 have: warpgroups.cpp -------------------------------------

// Barriers in shared memory. What arrives expects `bytes` more, if any, to be copied.
void mbarrier_init(const char* what, Where where, unsigned int address, int arrivals);
void mbarrier_inval(const char* what, Where where, unsigned int address);
void fence_mbarrier_init();
void arrive(const char* what, Where where, unsigned int address, int bytes);
void wait_phase(const char* what, Where where, unsigned int address, int parity);

// Barriers with a number: counts the running thread in, and waits for the others where `stays`.
void named_barrier_sync(const char* what, Where where, int number, int threads, bool stays);

// Such a barrier at which all wait, and vote: whether the condition holds for any of them.
bool named_barrier_or(const char* what, Where where, int number, int threads, bool condition);

// What this thread wrote to shared memory is what matrix instructions of a warpgroup find there.
void fence_proxy_async();

// Begins to copy a box of 16-bit elements, 64 columns wide, with pieces of 16 bytes at c ^ (r % 8).
// It lands at once or when nobody can go on without it, as the schedule says.
void tma_load(const char* what, Where where, unsigned int to, const unsigned long long* map,
              unsigned int barrier, const int (&first)[5]);

// Begins to copy a box to an array: stores.cpp. It is read at once, or when the thread that began
// it waits for its groups, as the schedule says.
void tma_store(const char* what, Where where, const unsigned long long* map, unsigned int from,
               const int (&first)[5]);
void tma_store_commit();
void tma_store_wait_read(const char* what, Where where);

// d += a b, or d = without `add`, of 64 rows and `columns` columns, of which the running thread has
// 2 by `columns` / 4. A left operand is described, or `a` is this thread's part of it; a described
// right operand's rows are as deep as the product without a left one in registers, else as wide;
// `wide` says of which described operands they are as wide, too.
enum Wide { NONE_WIDE, RIGHT_WIDE, BOTH_WIDE };
// Of a result of `of` columns, those from `first` on; of 0, the result is the product's.
struct Part {
  int first = 0, of = 0;
};
void begin_product(const char* what, Where where, float* d, int columns, const unsigned int* a,
                   unsigned long long a_described, unsigned long long b_described, bool add,
                   bool brain, Wide wide = NONE_WIDE, Part part = {});
// The same of float32, 8 deep, with a in registers and b of rows that are as deep as the product.
void begin_product_of_floats(const char* what, Where where, float* d, int columns,
                             const unsigned int* a, unsigned long long b_described, bool add);
// The same of codes of 8 bits, 32 deep; both operands in shared memory are as deep as the product.
enum Codes { NO_CODES, E4M3, E5M2 };
void begin_product_of_codes(const char* what, Where where, float* d, int columns,
                            const unsigned int* a, unsigned long long a_described,
                            unsigned long long b_described, bool add, Codes a_codes, Codes b_codes);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(const char* what, Where where, unsigned int pending);

// Adds to memory in one step, whatever other threads do.
unsigned long long add_at_once(unsigned long long* place, unsigned long long value);
void add_at_once(float* place, float value);
void add_at_once(double* place, double value);

// Raises what lies in memory to a value that is larger, in one step.
void raise_at_once(unsigned int* place, unsigned int value);

// Orders what this thread knows before the swaps behind it, and what its swaps have read before
// what comes next.
void fence_device();

// Writes `desired` where `expected` lies, in one step; what was there.
unsigned long long compare_and_swap(unsigned long long* place, unsigned long long expected,
                                    unsigned long long desired);

}  // namespace emulator

extern emulator::Index threadIdx;
extern emulator::Index blockIdx;
extern emulator::Index gridDim;
