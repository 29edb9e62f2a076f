// The kernels' parameters: one struct for all kernels of attention, which one of them continues,
// and one each for combine, append, rope, quantize, hadamard, checksum, offsets and backward_sums.
//
// cupyflash/gpu/params.py holds the same layout as a NumPy structured type, field by field in this
// order. Every field is 8 bytes wide or one of a pair of ints, so there is no unnamed padding.
// Sizes in capitals come from the prelude that is put before a kernel's source.
#pragma once

constexpr int MAX_LEAD = 4;     // leading axes, after adjacent ones were merged where possible
constexpr int MAX_AXES = 8;     // axes of a look-up table
constexpr int MAX_PARTS = 16;   // operands of one launch of combine
constexpr int MAX_SUMMED = 16;  // arrays of one launch of checksum
constexpr int MAX_GRADIENTS = 5;
constexpr int REPORTS = 65;     // words of its reports: one for each name, and whether there is any
constexpr int MAX_FACTOR = 36;  // order of the small matrix of hadamard

// Element kinds of look-up tables, sinks and outputs, numbered as KINDS in
// reference/cpu/tables.py.
constexpr int KIND_BOOL = 0, KIND_INT8 = 1, KIND_INT16 = 2, KIND_INT32 = 3, KIND_INT64 = 4;
constexpr int KIND_UINT8 = 5, KIND_UINT16 = 6, KIND_UINT32 = 7;
constexpr int KIND_FLOAT16 = 8, KIND_BFLOAT16 = 9, KIND_FLOAT32 = 10, KIND_FLOAT64 = 11;

// An array (lead..., head, row, column), read in place. Strides count its elements, and are 0 along
// broadcast axes. A packed array has no leading axes: sequence b begins at row offsets[b].
struct Operand {
  char* data;
  long long lead[MAX_LEAD];
  long long head;
  long long row;
  long long col;
};

// An array that masks and scores read. Strides count bytes.
struct Table {
  const char* data;
  long long shape[MAX_AXES];
  long long strides[MAX_AXES];
};

struct Params {
  // (lead..., H, L, D or Dv) of the storage type, unless a kind below says otherwise.
  Operand q;
  Operand k;
  Operand v;
  Operand out;
  Operand d_out;
  Operand dq;
  Operand dk;
  Operand dv;
  Operand dbias;
  // (lead..., H, Lq) of the accumulator's type; col is unused. data is null where there is no dlse,
  // or where lse is not wanted.
  Operand lse;
  Operand dlse;
  Operand delta;
  // float32 sums of dq that several blocks add to, in groups of 8 rows: (lead..., H, rows, columns
  // in units of 16). col is the distance of a thread's elements, 32 or 1: the layouts are those of
  // warp/fragment_product.cuh and sm90/warpgroup_dq.cuh.
  Operand dq_accum;
  // float32 scales of codes, whose own strides count bytes; col is the distance of groups of
  // columns, 0 if there is one (cache_row.cuh). A cache has none of queries.
  Operand k_scale;
  Operand v_scale;
  Operand q_scale;
  // The result over keys before these, in builds that RESUMES: (lead..., H, Lq, Dv) and (lead...,
  // H, Lq) of the accumulator's type. It may be where the result goes.
  Operand out_before;
  Operand lse_before;

  const char* sink;            // (Hq,) contiguous, or null
  char* dsink;                 // (Hq,) contiguous
  const long long* offsets_q;  // packed: (batch + 1,) on the device; else null
  const long long* offsets_k;
  const unsigned long long* seed_gmem;  // the seed on the device; null: `seed` below
  unsigned long long* tiles_visited;    // a counter, in builds with COUNT_TILES

  long long batch;                // product of lead_size; packed: the number of sequences
  long long lead_size[MAX_LEAD];  // broadcast leading axes, first slowest; unused ones are 1
  // The leading axes of the launch's gradient: lead_size, or 1 where its input was broadcast. A
  // block sums over the entries that share its slice. (In the forward: lead_size.)
  long long own_size[MAX_LEAD];
  long long len_q;  // packed: the longest sequence that may come
  long long len_k;
  long long total_q;  // packed: all rows; dense: len_q
  long long total_k;
  long long bias_len_q;  // lengths of dbias: 1 where the bias was broadcast
  long long bias_len_k;
  long long blocks;               // query or key blocks of a head (of a batch entry, if dense)
  unsigned long long seed;        // of dropout
  unsigned long long drop_below;  // a pair is dropped if its random word is smaller
  double keep_scale;              // 1 / (1 - dropout)
  double scale;                   // factor of q k

  int heads;
  int heads_kv;
  int group;       // heads / heads_kv
  int bias_heads;  // heads of dbias: heads or 1
  int kind_sink;
  int kind_dsink;
  int kind_dq;  // element kind of dq: the storage type, or the accumulator's if the host sums it
  int kind_dk;
  int kind_dv;
  int kind_dbias;

  // Of a call over a cache (cache.cuh); decode kernels read the workspace of every call.
  const char* lengths;    // (batch,) of positions that are held; null: len_k everywhere
  const char* table;      // (batch, pages of an entry) of page numbers; null: no pages
  char* workspace;        // of decode kernels and decode_combine: see decode/workspace.cuh
  long long length_step;  // elements between neighbours of lengths, entries and pages of table
  long long table_batch;
  long long table_step;
  long long pages;   // of k and v
  long long k_page;  // elements between pages
  long long v_page;
  long long k_scale_page;
  long long v_scale_page;
  int tasks;  // of a decode kernel: see decode/tasks.cuh; of dk, dv and dbias: parts
  int slots;
  int few_rows;   // of packed queries: an entry with more rows of a key head is a forward kernel's
  int tma_rows;   // rows of a page that a TMA load copies
  int page_size;  // positions of a page
  int kind_lengths;
  int kind_table;
  int held;          // slots of a warp for nodes below its unit
  int shared;        // nodes of level 1 that entries share: see decode/tasks.cuh
  int shared_slots;  // the slot of the first of them

  // A bias that TMA loads, in builds with HAS_BIAS_TILES: strides only, 0 along axes of length 1.
  Operand bias;

  long long ints[NUM_INTS];  // constants of masks and scores
  double floats[NUM_FLOATS];
  Table tables[NUM_TABLES];
};

// Of a forward with tangents. Arrays of a direction have the strides of their own; `data` is null
// for those that it does not have.
struct TangentParams {
  Params call;
  Operand tq;
  Operand tk;
  Operand tv;
  Operand tout;
  Operand tlse;
  const char* tsink;  // (Hq,) contiguous, or null
  int kind_tsink;
  int unused;
};

// Of a backward with tangents: dq, dk, dv, dbias and dsink of the call are their tangents. tlse is
// read, and tout in the type of the kernel that wrote it.
struct SecondParams {
  TangentParams first;
  Operand tdo;  // (lead..., H, Lq, Dv), or null
  Operand tdlse;
  Operand tdelta;
  Operand tout_rounded;  // of the storage type, if tout is not
};

// Of a reduction: what is taken of pairs, and over which of them. `of` and `by` are numbered as in
// simt/pair_values.cuh.
struct ReduceParams {
  Params call;
  Operand found;          // (lead..., Hq, rows, columns) of the accumulator's type, without gaps
  char* keys;             // with TOP: positions of keys as int64, as `found` lies
  long long first_query;  // that takes part, and the one after the last
  long long end_query;
  long long block_q;  // queries and keys of a block of the result
  long long block_k;
  long long keys_of_owner;  // keys of a thread block: of whole blocks of keys
  long long owners_k;       // thread blocks that have a block of queries
  int of;
  int by;
};

struct CombineParams {
  Operand outs[MAX_PARTS];  // (lead..., H, L, Dv)
  Operand lses[MAX_PARTS];  // (lead..., H, L) of the accumulator's type
  Operand out;
  Operand lse;
  long long lead_size[MAX_LEAD];
  long long rows;  // L
  long long columns;
  long long heads;
  int kinds[MAX_PARTS];  // element kinds of outs
  int kind_out;
  int parts;  // at most MAX_PARTS
};

// Of append. lead[MAX_LEAD - 1] of an array is the distance of its batch entries, 0 where rows are
// packed; of k and v that of their pages, or without a table of entries, which are pages then.
struct AppendParams {
  Operand k_new;  // (B, Hkv, rows, D), or packed (Hkv, rows, D)
  Operand v_new;
  Operand q;  // (B, Hq, rows, D), or packed; heads is 0 without
  Operand k;  // (pages, Hkv, page_size, D)
  Operand v;
  Operand out;  // q, rotated
  Operand cos;  // (rotary_rows, pairs) of float32, or float64 for rows of float64
  Operand sin;
  Operand lengths;    // (B,) of integers; data is null where `length` is that of all entries
  Operand table;      // (B, capacity / page_size) of integers along row and col, or null
  Operand positions;  // (B, rows) of integers, or packed; null: where the cache has a row
  Operand k_scale;    // (pages, Hkv, page_size, groups) of float32, if the cache has codes
  Operand v_scale;

  const long long* offsets;  // packed: (batch + 1,); else null
  long long batch;
  long long rows;  // new ones of an entry; packed: of all entries
  long long length;
  long long capacity;  // positions of an entry
  long long pages;
  long long page_size;
  long long rotary_rows;

  int heads;
  int heads_kv;
  int columns;  // of k and q
  int columns_v;
  int pairs;  // that are rotated, of every row of k and q; 0 without rotary
  int interleaved;
  int kind_lengths;
  int kind_table;
  int kind_positions;
  int kind_angles;
};

struct RopeParams {
  Operand x;  // (B, H, rows, D); lead[MAX_LEAD - 1] is the distance of entries
  Operand out;
  Operand cos;  // (rotary_rows, pairs) of float32, or float64 for rows of float64
  Operand sin;
  Operand positions;  // (B, rows) of integers

  long long batch;
  long long rows;
  long long rotary_rows;

  int heads;
  int columns;
  int pairs;
  int interleaved;
  int inverse;
  int kind_positions;
  int kind_angles;
  int unused;
};

// Rows are numbered along the leading axes; of operands only `data`, `lead` and `col` are used.
struct QuantizeParams {
  Operand x;      // (lead..., groups * columns)
  Operand codes;  // (lead..., groups * bytes of a group)
  Operand scale;  // (lead..., groups) of float32

  long long lead_size[MAX_LEAD];
  long long rows;     // groups of all rows
  long long groups;   // of a row
  long long columns;  // of a group

  int lanes;            // that share a group: a power of two, 32 at most
  int format;           // see code.cuh
  int sharing, unused;  // what rows that share a scale do with it: see quantize.cu
};

struct HadamardParams {
  Operand x;  // (lead..., D)
  Operand out;

  long long lead_size[MAX_LEAD];
  long long rows;
  unsigned long long seed;                // of the signs
  unsigned long long factor[MAX_FACTOR];  // rows of the small matrix: bit n: column n is -1
  double scale;                           // 1 / sqrt(D)

  int inverse;
  int unused;
};

// An array whose bytes are summed: units that are `size` bytes long, numbered along axes of which
// the first is the fastest. Axes that are not there have length 1.
struct Summed {
  unsigned char* data;
  long long begin;  // of its memory, in bytes from its first element: 0 or less
  long long size;
  long long shape[MAX_AXES];
  long long strides[MAX_AXES];  // in bytes
  long long end;                // the first block that works on a later array
  long long name;               // which word of the report stands for it
};

// To sum arrays and keep the sums, or to compare them with those that were kept, and to write to
// the gradients if they differ.
struct ChecksumParams {
  Summed arrays[MAX_SUMMED];
  unsigned char* gradients[MAX_GRADIENTS];  // they have no gaps
  long long gradient_bytes[MAX_GRADIENTS];  // 0: there is none
  unsigned long long* kept;                 // a turn, and a sum for each warp
  unsigned long long* report;               // in host memory; null: keep the sums
  unsigned long long turn;                  // of comparisons with these sums: 1, 2, ...
  long long first_block;  // of this launch, among those that keep their sums together
};

// Offsets of queries and of keys, or of one of them.
struct OffsetsParams {
  const char* inputs[2];
  long long* results[2];           // null: they are read in place
  unsigned long long* reports[2];  // in host memory; null: nothing is checked
  long long steps[2];              // in elements
  long long totals[2];             // rows of the packed arrays
  long long limits[2];             // rows of a sequence, at most

  int kinds[2];
  int arrays;
  int count;    // entries of each
  int blocks;   // of each
  int limited;  // whether kernels rely on `limits`; 2: and only longer sequences are reported
};

// Of gradients that are sums of their parts. The leading axes are those of the parts; where the
// gradient has a step of 0, they are summed.
struct SumsParams {
  Operand parts[MAX_GRADIENTS];  // of the accumulator's type; col is 1
  Operand gradients[MAX_GRADIENTS];
  long long lead_sizes[MAX_GRADIENTS][MAX_LEAD];
  long long heads[MAX_GRADIENTS];
  long long rows[MAX_GRADIENTS];
  long long columns[MAX_GRADIENTS];
  long long widths[MAX_GRADIENTS];  // columns of a thread
  long long kinds[MAX_GRADIENTS];   // element kinds of gradients
  long long ends[MAX_GRADIENTS];    // the first block that works on a later gradient
};
