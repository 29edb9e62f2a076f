// Tiled attention, forward, in 16-bit types by the tensor cores of compute capability 9.0: the twin
// of reference/forward.py.
//
// The last warpgroup of a block copies, by one thread, and the others compute: each has 64 queries
// of the block. Keys and values of one tile after the other, the last first, pass through STAGES
// places each. While a warpgroup turns scores into weights, the tensor cores multiply the weights
// of its tile before by their values, and then the next warpgroup's scores: the warpgroups take
// turns to begin their products (FlashAttention-3: Shah et al. 2024).
//
// Grid: any number of blocks, which share the work: block n does number n, n + gridDim.x and so on
// of prod(own_size) * heads * blocks pieces, with own_size = lead_size. While the output of one is
// written, the next one's queries and keys are on their way. Shared memory: the queries, keys,
// values, what a block knows. BLOCK_Q is 64 times the warpgroups that compute, BLOCK_KV one of the
// widths in arch/wgmma.cuh. Behind the parameters come the maps of q, k and v.
#include "params.cuh"
#include "primitives/fragment_softmax.cuh"
#include "primitives/fragment_tile.cuh"
#include "primitives/warpgroup.cuh"

namespace {

constexpr int COLUMNS = BLOCK_KV / 4;
constexpr int COLUMNS_V = matmul::round_up(D_V, warpgroup::LINE_COLUMNS) / 4;
constexpr int Q_BYTES = fragment::row_bytes(D), V_BYTES = fragment::row_bytes(D_V);
constexpr int CONSUMERS = BLOCK_Q / warpgroup::ROWS_OF;
constexpr int HELD_BYTES = warpgroup::ROWS_OF * Q_BYTES;  // a warpgroup's queries
constexpr int KEYS_BYTES = BLOCK_KV * Q_BYTES, VALUES_BYTES = BLOCK_KV * V_BYTES;
constexpr int STAGES = 2;
// Narrow output is multiplied sooner than it is found out that no maximum grew.
constexpr bool RESCALES_ALWAYS = D_V <= 64;

// A tile that passes: how many of its keys exist, and whether it is its queries' last.
struct Tile {
  int rows;
  bool last;
};
// What the copying thread tells the others: a piece of work when its queries come, and again when
// the next ones' do; a tile when its keys come.
struct Known {
  layout::Entry entry[2];
  long long head[2], first[2];
  Tile tile[STAGES];
  // Barriers of the places that things pass through: what is there has come, and has been read.
  unsigned long long full_q, empty_q;
  unsigned long long full_k[STAGES], empty_k[STAGES], full_v[STAGES], empty_v[STAGES];
};
constexpr int KNOWN_BYTES = static_cast<int>(sizeof(Known));

struct alignas(1024) Swizzled {
  char x[1024];
};

static_assert(STORAGE < 2, "16-bit types");
static_assert(!PACKED && !HAS_MASK && !HAS_DROPOUT, "forward_sm80 serves such calls");
static_assert(THREADS == (CONSUMERS + 1) * warpgroup::THREADS_OF && fragment::WARP_ROWS == 16,
              "BLOCK_Q, THREADS");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "BLOCK_Q");
static_assert(SHARED_BYTES ==
                  CONSUMERS * HELD_BYTES + STAGES * (KEYS_BYTES + VALUES_BYTES) + KNOWN_BYTES,
              "SHARED_BYTES");

// Of the number n of what passes through places in turn: its place, and the parity of its phase.
__device__ __forceinline__ int stage_of(int n) { return n % STAGES; }
__device__ __forceinline__ int parity_of(int n) { return n / STAGES % 2; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    KERNEL_NAME(const __grid_constant__ Params p, const __grid_constant__ arch::TensorMap q_map,
                const __grid_constant__ arch::TensorMap k_map,
                const __grid_constant__ arch::TensorMap v_map) {
  extern __shared__ Swizzled shared_smem[];
  char* const q_smem = shared_smem[0].x;
  char* const keys_smem = q_smem + CONSUMERS * HELD_BYTES;
  char* const values_smem = keys_smem + STAGES * KEYS_BYTES;
  Known& known = *reinterpret_cast<Known*>(values_smem + STAGES * VALUES_BYTES);
  const unsigned int q_address = arch::shared_address(q_smem);
  const unsigned int keys_address = arch::shared_address(keys_smem);
  const unsigned int values_address = arch::shared_address(values_smem);
  const unsigned int full_q = arch::shared_address(&known.full_q);
  const unsigned int empty_q = arch::shared_address(&known.empty_q);
  const unsigned int full_k = arch::shared_address(known.full_k);
  const unsigned int empty_k = arch::shared_address(known.empty_k);
  const unsigned int full_v = arch::shared_address(known.full_v);
  const unsigned int empty_v = arch::shared_address(known.empty_v);
  const unsigned int pieces = static_cast<unsigned int>(p.blocks * p.heads * p.batch);

  if (threadIdx.x == 0) {
    arch::init_barrier(full_q, 1);
    arch::init_barrier(empty_q, CONSUMERS);
#pragma unroll
    for (int n = 0; n < STAGES; ++n) {
      arch::init_barrier(full_k + 8 * n, 1);
      arch::init_barrier(full_v + 8 * n, 1);
      arch::init_barrier(empty_k + 8 * n, CONSUMERS);
      arch::init_barrier(empty_v + 8 * n, CONSUMERS);
    }
    arch::publish_barriers();
  } else if (threadIdx.x == CONSUMERS * warpgroup::THREADS_OF) {
    arch::prefetch_map(q_map);
    arch::prefetch_map(k_map);
    arch::prefetch_map(v_map);
  }
  __syncthreads();  // the barriers

  if (warpgroup::index() == CONSUMERS) {
    arch::shed_registers<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x % warpgroup::THREADS_OF != 0) return;
    int n = 0;  // tiles that passed
#pragma unroll 1
    for (unsigned int piece = blockIdx.x, w = 0; piece < pieces; piece += gridDim.x, w ^= 1) {
      const layout::Work work = layout::work_of(p, piece, p.heads, false, BLOCK_Q, true);
      const long long i0 = work.block * BLOCK_Q;
      const long long h_kv = layout::divide(work.head, p.group).quotient;
      const warpgroup::Head k(p.k, work.entry, h_kv), v(p.v, work.entry, h_kv);
      int rows = static_cast<int>((p.len_k - 1) % BLOCK_KV + 1);
#pragma unroll 1
      for (long long first = p.len_k - rows; first >= 0; first -= BLOCK_KV, rows = BLOCK_KV, ++n) {
        const int at = stage_of(n), before = parity_of(n) ^ 1;
        warpgroup::wait(empty_k + 8 * at, before);
        known.tile[at] = Tile{rows, first == 0};
        arch::arrive_expecting(full_k + 8 * at, KEYS_BYTES);
        warpgroup::begin_tile<BLOCK_KV, D>(keys_address + at * KEYS_BYTES, k_map, k, first,
                                           full_k + 8 * at);
        if (rows == p.len_k - first) {
          // 1 load q
          const warpgroup::Head q(p.q, work.entry, work.head);
          warpgroup::wait(empty_q, w ^ 1);
          known.entry[w] = work.entry;
          known.head[w] = work.head;
          known.first[w] = i0;
          arch::arrive_expecting(full_q, BLOCK_Q * Q_BYTES);
#pragma unroll
          for (int x = 0; x < CONSUMERS; ++x) {
            warpgroup::begin_tile<warpgroup::ROWS_OF, D>(q_address + x * HELD_BYTES, q_map, q,
                                                         i0 + x * warpgroup::ROWS_OF, full_q);
          }
        }
        warpgroup::wait(empty_v + 8 * at, before);
        arch::arrive_expecting(full_v + 8 * at, VALUES_BYTES);
        warpgroup::begin_tile<BLOCK_KV, D_V>(values_address + at * VALUES_BYTES, v_map, v, first,
                                             full_v + 8 * at);
      }
    }
    return;
  }

  arch::take_registers<CONSUMERS == 2 ? 240 : 160>();
  const int own = warpgroup::index();
  const float scale = static_cast<float>(p.scale);
  const float c = fmin(scale * tile::LOG2_E, number::largest_float());
  const arch::Described q = warpgroup::describe(q_address + own * HELD_BYTES, 0);
  const arch::Described k = warpgroup::describe(keys_address, 0);
  const arch::Described v = warpgroup::describe(values_address, BLOCK_KV * warpgroup::LINE_BYTES);
  // Turns to begin products are barriers 1 and on, at which the warpgroup before arrives.
  constexpr int BOTH = 2 * warpgroup::THREADS_OF;
  const int own_turn = 1 + own, next_turn = own + 1 < CONSUMERS ? own + 2 : 1;
  if (next_turn == 1) arch::arrive_at(1, BOTH);

  unsigned int visited = 0;
  int n = 0;  // tiles that passed
#pragma unroll 1
  for (unsigned int piece = blockIdx.x, w = 0; piece < pieces; piece += gridDim.x, w ^= 1) {
    float m[2], m_new[2], l[2], alpha[2], acc[2][COLUMNS_V], s[2][COLUMNS];
    unsigned int weights[2][COLUMNS / 2];
    fragment_softmax::init_state(m, l, acc);
    const auto begin_scores = [&] {
      warpgroup::multiply<D, BLOCK_KV>(s, q, k + stage_of(n) * (KEYS_BYTES / 16));
      arch::commit_products();
    };
    const auto begin_output = [&](int of) {
      warpgroup::multiply_add<BLOCK_KV>(acc, weights, v + stage_of(of) * (VALUES_BYTES / 16));
      arch::commit_products();
    };

    // 2 scores
    warpgroup::wait(full_q, w);
    warpgroup::wait(full_k + 8 * stage_of(n), parity_of(n));
    Tile now = known.tile[stage_of(n)];
    arch::fence_products();
    begin_scores();
    arch::wait_products<0>();
    arch::take_product(s);
    warpgroup::release(empty_k + 8 * stage_of(n));
    // 3 score mod
    static_assert(!HAS_SCORE, "forward_sm80 changes scores");
    // 4 mask
    const bool masked = now.rows < BLOCK_KV;
    if (masked) fragment_tile::hide_beyond(s, now.rows);
    // 5 row max
    fragment_softmax::row_max(s, m, m_new);
    // 6 rescale
    fragment_softmax::raise_max(m, m_new, l, alpha, c);
    fragment_softmax::exponentiate(s, m, l, c, masked);
    fragment::narrow(s, weights);
    ++visited;

#pragma unroll 1
    while (!now.last) {
      ++n;
      warpgroup::wait(full_k + 8 * stage_of(n), parity_of(n));
      now = known.tile[stage_of(n)];
      arch::meet_at(own_turn, BOTH);  // the warpgroup before has begun its products
      arch::fence_products();
      begin_scores();
      // 7 accumulate p v
      warpgroup::wait(full_v + 8 * stage_of(n - 1), parity_of(n - 1));
      begin_output(n - 1);
      arch::arrive_at(next_turn, BOTH);  // the next one's turn
      arch::wait_products<1>();
      arch::take_product(s);
      warpgroup::release(empty_k + 8 * stage_of(n));
      const bool grew = fragment_softmax::row_max(s, m, m_new);
      fragment_softmax::raise_max(m, m_new, l, alpha, c);
      fragment_softmax::exponentiate(s, m, l, c, false);
      arch::wait_products<0>();
      arch::take_product(acc);
      warpgroup::release(empty_v + 8 * stage_of(n - 1));
      fragment::narrow(s, weights);
      if (RESCALES_ALWAYS || grew) fragment_softmax::scale_rows(acc, alpha);
      ++visited;
    }
    warpgroup::release(empty_q);
    warpgroup::wait(full_v + 8 * stage_of(n), parity_of(n));
    arch::fence_products();
    begin_output(n);
    arch::wait_products<0>();
    arch::take_product(acc);
    warpgroup::release(empty_v + 8 * stage_of(n));
    ++n;

    const layout::Entry& entry = known.entry[w];
    const long long h = known.head[w], i0 = known.first[w];
    fragment_softmax::row_sum(l);
    float weight[2];
    fragment_softmax::join_sink(
        m, l, weight, scale,
        p.sink == nullptr ? -number::infinity() : number::load<float>(p.sink, p.kind_sink, h));
    // 8 normalise
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = l[r] == 0.0f ? 0.0f : weight[r] / l[r];
    const int ni = tile::rows_from(i0, p.len_q, BLOCK_Q);
    warpgroup::store_rows<D_V>(acc, p.out, layout::offset(p.out, entry, h, false), i0, ni, weight);
    // 9 store lse
    const memory::Numbers lse = memory::numbers(p.lse, entry, h);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = fragment::warp_row() + 8 * r + fragment::lane_row();
      if (p.lse.data != nullptr && arch::lane_index() % 4 == 0 && row < ni) {
        lse.data[(i0 + row) * lse.row] = l[r] == 0.0f ? -number::infinity() : m[r] + log(l[r]);
      }
    }
  }
  if (own_turn == 1) arch::meet_at(1, BOTH);  // the turn that nobody takes
  tile::count_tiles(p, visited);
}
