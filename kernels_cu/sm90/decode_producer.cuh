// The producers of decode_sm90.cu: warps that find the tiles of a block's units, and copy queries
// and keys. The twin of reference/cpu/cache.py for this kernel.
#pragma once
#include "decode_storage.cuh"

namespace decode_producer {

using namespace decode_storage;

// Copies a warp's 32 rows of a tile to shared memory, as wgmma reads them. Lane n has the address
// of row n; rows that do not exist become 0 and are not read.
__device__ __forceinline__ void copy_rows(char* rows_smem, const storage_t* own, bool exists,
                                          long long column_step, bool vectors) {
  const int lane = ptx::lane_index();
  const long long own_address = reinterpret_cast<long long>(own);
  if (vectors) {
    constexpr int PIECES = warpgroup::SLAB_COLUMNS / STORED_VECTOR;
    constexpr int ROWS_AT_ONCE = ptx::WARP_SIZE / PIECES;
    const int piece = lane % PIECES;
    const unsigned int address = ptx::shared_address(rows_smem);
#pragma unroll 1
    for (int first = 0; first < ptx::WARP_SIZE; first += ROWS_AT_ONCE) {
      const int row = first + lane / PIECES;
      const storage_t* const source =
          reinterpret_cast<const storage_t*>(ptx::shuffle(own_address, row)) +
          piece * STORED_VECTOR;
      const int bytes = ptx::shuffle(exists ? 16 : 0, row);
      const unsigned int to = address + row * warpgroup::SLAB_ROW_BYTES + ((piece ^ row % 8) << 4);
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        ptx::cp_async_partial(to + slab * SLAB_BYTES, source + slab * warpgroup::SLAB_COLUMNS,
                              bytes);
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = 0; row < ptx::WARP_SIZE; ++row) {
    const storage_t* const source =
        reinterpret_cast<const storage_t*>(ptx::shuffle(own_address, row));
    const bool is_read = ptx::shuffle(exists ? 1 : 0, row) != 0;
#pragma unroll 1
    for (int column = lane; column < D; column += ptx::WARP_SIZE) {
      const int inside = column % warpgroup::SLAB_COLUMNS;
      char* const piece_smem = rows_smem + column / warpgroup::SLAB_COLUMNS * SLAB_BYTES +
                               row * warpgroup::SLAB_ROW_BYTES +
                               ((inside / STORED_VECTOR ^ row % 8) << 4);
      reinterpret_cast<storage_t*>(piece_smem)[inside % STORED_VECTOR] =
          is_read ? source[column * column_step] : storage_t(0);
    }
  }
}

// Row `row` of a task's queries; the first one where there is none.
__device__ __forceinline__ const storage_t* query_row(const Params& p, const decode::Task& task,
                                                      int row) {
  const int held = row < task.rows ? row : 0;
  return reinterpret_cast<const storage_t*>(p.q.data) +
         layout::offset(p.q, task.entry(), task.head_of(held), false) +
         task.query_of(held) * p.q.row;
}

// Whether 16-byte copies are possible: rows are contiguous and begin at 16 bytes. `steps` is the
// bitwise or of all distances of rows.
__device__ __forceinline__ bool in_vectors(const storage_t* first, long long steps,
                                           long long column_step) {
  return column_step == 1 && steps % STORED_VECTOR == 0 &&
         reinterpret_cast<unsigned long long>(first) % sizeof(StoredVector) == 0;
}

// The queries of a task, as many rows as the warp copies from row `first` on.
__device__ __forceinline__ void copy_queries(const Params& p, const decode::Task& task,
                                             char* q_smem, int first) {
  const int row = first + ptx::lane_index();
  copy_rows(q_smem + first * warpgroup::SLAB_ROW_BYTES, query_row(p, task, row), row < task.rows,
            p.q.col, in_vectors(query_row(p, task, 0), p.q.row | p.q.head, p.q.col));
}

// The keys of a leaf, in the same way.
__device__ __forceinline__ void copy_keys(const Params& p, const decode::Task& task,
                                          const decode::Leaf& leaf, char* stage_smem, int first) {
  const int key = first + ptx::lane_index();
  const bool exists = key < leaf.keys;
  const cache::Place at =
      exists ? cache::place(p, task.b, leaf.first_key() + key) : cache::Place{0, 0};
  copy_rows(stage_smem + first * warpgroup::SLAB_ROW_BYTES, task.k + at.offset(p.k_page, p.k.row),
            exists, p.k.col, in_vectors(task.k, p.k.row | (PAGED ? p.k_page : 0), p.k.col));
}

// The TMA loads of a whole leaf, by the lanes of one warp: one box for each tma_rows keys, which in
// a cache with pages are in one page, and 64 columns. What the lanes need to know is found before
// the stage is free, because a product keeps its warps from shared memory for long.
struct Boxes {
  unsigned int to;
  int row, head, slow, slower;
  bool is_mine;

  __device__ __forceinline__ Boxes(const Params& p, const decode::Task& task,
                                   const decode::Leaf& leaf, char* stage_smem, bool issues) {
    const int key = ptx::lane_index() * p.tma_rows;
    is_mine = issues && key < LEAF;
    if (!is_mine) return;
    const warpgroup::TmaHead at(p.k, task.entry(), task.head / p.group);
    const cache::Place place = cache::place(p, task.b, leaf.first_key() + key);
    to = ptx::shared_address(stage_smem) + key * warpgroup::SLAB_ROW_BYTES;
    row = static_cast<int>(place.row);
    head = at.head;
    slow = PAGED ? static_cast<int>(place.page) : at.slow;
    slower = at.slower;
  }
  // Issues the loads of slabs FIRST to END; where blocks have parts of the columns, of those that
  // consumers keep until they have multiplied values, or of the others.
  template <int FIRST, int END>
  __device__ __forceinline__ void load(const ptx::TensorMap& map, const SharedStorage& shared,
                                       int n, bool kept = true) const {
    if (!is_mine) return;
#pragma unroll
    for (int slab = FIRST; slab < END; ++slab) {
      if (V_PARTS > 1) {
        const int place = slab - first_slab(0);
        const bool is_kept = slab >= SLABS_V || (place >= 0 && place < CONSUMERS * OWN_SLABS);
        if (is_kept != kept) continue;
      }
      ptx::tma_load_once(to + slab * SLAB_BYTES, map, shared.part_barrier(n, slab / PART_SLABS),
                         slab * warpgroup::SLAB_COLUMNS, row, head, slow, slower);
    }
  }
};

// A warp: finds all tiles of the block by itself, and copies half of those of one stage. Where TMA
// can load keys, one of the two warps issues the loads of whole leaves.
__device__ __forceinline__ void producer(const Params& p, const SharedMemory& smem,
                                         const decode::Schedule& schedule,
                                         const ptx::TensorMap& k_map) {
  SharedStorage& shared = *smem.storage;
  const int warp = threadIdx.x % warpgroup::WARPGROUP_SIZE / ptx::WARP_SIZE;
  const int stage = warp / WARPS_OF_STAGE, first_row = warp % WARPS_OF_STAGE * ptx::WARP_SIZE;
  const decode::Workspace workspace(p);
  decode::WarpTasks& tasks_smem = shared.tasks[warp];
  decode::Cursor cursor(p, workspace, tasks_smem, 0, 1, warp == 0 && decode::part_of_team() == 0);
  // The first keys are asked for as soon as their place is known, before what else is to be found.
  cursor.begin_unrecorded(schedule);
  decode::Leaf now = cursor.next();
  int starts = TileFacts::BEGINS | TileFacts::OPENS;  // of the tile
  int loaded = -1;                                    // the number of the task of the tile before
#pragma unroll 1
  for (int n = 0;; ++n) {
    const decode::Task& task = tasks_smem.task[now.place];
    const bool is_mine = n % STAGES == stage;
    const bool by_tma = p.tma_rows > 0 && now.exists && now.keys == LEAF;
    const bool issues = by_tma && first_row == 0;
    const bool takes_queries = now.exists && loaded != task.number;
    if (is_mine) {
      const Boxes boxes(p, task, now, smem.stage(n), issues);
      // The consumers let go of their values at different times.
      constexpr int HALF = SLABS_V / CONSUMERS;
      if constexpr (V_PARTS > 1) {  // slabs without their columns earlier still
        shared.wait_scored_before(n);
        boxes.load<0, SLABS_V>(k_map, shared, n, false);
      }
      shared.wait_half(n, 0);
      if constexpr (V_PARTS == 1) boxes.load<0, HALF>(k_map, shared, n);
      shared.wait_half(n, 1);
      if constexpr (V_PARTS == 1) {
        boxes.load<HALF, SLABS>(k_map, shared, n);
      } else {
        boxes.load<0, SLABS>(k_map, shared, n, true);
      }
      // 1 load q
      if (takes_queries) {
        // The queries before were multiplied with every tile before this one.
        if (n > 0) shared.wait_scored(n - 1);
        copy_queries(p, task, smem.q.begin, first_row);
      }
      if (!by_tma && now.exists) copy_keys(p, task, now, smem.stage(n), first_row);
    }
    if (n == 0) cursor.record_first();
    const decode::Leaf next = now.exists ? cursor.next() : now;
    const bool ends = !now.shares_node(next, 1);
    if (is_mine) {
      if (first_row == 0 && ptx::lane_index() == 0) {
        StagedTile& tile_smem = shared.tile(n);
        if (now.exists) tile_smem.task = task;
        tile_smem.leaf = now;
        const bool masked = now.tile_class == PARTIAL || now.keys < LEAF;
        const int flags = (now.exists ? TileFacts::EXISTS : 0) | (ends ? TileFacts::ENDS : 0) |
                          (masked ? TileFacts::MASKED : 0) | starts;
        tile_smem.facts = TileFacts{flags, now.unit, now.exists ? task.rows : 0};
      }
      if (takes_queries || !by_tma) {
        ptx::cp_async_wait_all();
        ptx::fence_proxy_async();
      }
      __syncwarp();  // the tile, and what all lanes have copied
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const unsigned int barrier = shared.part_barrier(n, part);
        if (issues && ptx::lane_index() == 0) {
          // Some of the bytes may have come before they are expected.
          ptx::mbarrier_arrive_expect_tx(barrier, PART_SLABS * SLAB_BYTES);
        } else {
          warpgroup::arrive_synchronised(barrier);
        }
      }
      if (!now.exists) return;
    }
    if (!now.exists) continue;
    loaded = task.number;
    starts &= ~TileFacts::BEGINS;
    if (ends) starts = TileFacts::BEGINS | (next.unit != now.unit ? TileFacts::OPENS : 0);
    now = next;
  }
}

}  // namespace decode_producer
