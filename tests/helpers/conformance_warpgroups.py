"""Cases of conformance for what GPUs of compute capability 9.0 have: conformance.py says how.

A block of 128 threads is one warpgroup.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from conformance import HOPPER, THREADS, Array, Case, equal

from cupyflash.gpu.tma import TensorMap

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": BFLOAT16}
# The first address of shared memory where eight rows of 128 bytes begin, and there.
ALIGNED = """
  const unsigned int begin = (ptx::shared_address(smem) + 1023) / 1024 * 1024;
  unsigned int* const words = smem[(begin - ptx::shared_address(smem)) / 16].x;
"""


def _any_words(words: int, blocks: int) -> Array:
    return np.random.default_rng(0).integers(0, 2**32, (blocks * THREADS, words), np.uint32)


def _turned(given: Array, lanes: int) -> Array:
    """What the lane so much further on in the block has."""
    return np.roll(given.reshape(-1, THREADS, given.shape[1]), -lanes, 1).reshape(given.shape)


def _voted(conditions: Array, threads: int) -> Array:
    """For every thread whether one among so many neighbours found it."""
    any_of = conditions.reshape(-1, threads, conditions.shape[1]).any(1)
    assert 0 < any_of.mean() < 1
    return np.repeat(any_of, threads, 0).astype(np.uint32)


# -- barriers -------------------------------------------------------------------------------------

PHASES = Case(
    "mbarrier_init fence_mbarrier_init mbarrier_arrive mbarrier_try_wait mbarrier_inval",
    """
      const unsigned int barrier = ptx::shared_address(smem + THREADS);
      if (t == 0) {
        ptx::mbarrier_init(barrier, THREADS);
        ptx::fence_mbarrier_init();
      }
      __syncthreads();  // the barrier
      for (int n = 0; n < 4; ++n) {
        smem[t].x[n] = in[n];
        ptx::mbarrier_arrive(barrier);
        while (!ptx::mbarrier_try_wait(barrier, n % 2)) {
        }
        out[n] = smem[(t + 37) % THREADS].x[n];
      }
      __syncthreads();  // nobody waits any more
      if (t == 0) ptx::mbarrier_inval(barrier);
    """,
    lambda: _any_words(4, 3),
    lambda given: _turned(given, 37),
    since=HOPPER,
)
NUMBERED = Case(
    "named_barrier_sync named_barrier_arrive",
    """
      if (t < 64) {
        smem[t].x[0] = in[0];
        ptx::named_barrier_arrive(1, THREADS);
        ptx::named_barrier_sync(2, THREADS);
        out[0] = smem[t + 64].x[0];
      } else {
        ptx::named_barrier_sync(1, THREADS);
        out[0] = smem[t - 64].x[0];
        smem[t].x[0] = in[0];
        ptx::named_barrier_arrive(2, THREADS);
      }
    """,
    lambda: _any_words(1, 3),
    lambda given: _turned(given, 64),
)
VOTES = Case(
    "named_barrier_or",
    """
      for (int n = 0; n < 4; ++n) {
        out[n] = ptx::named_barrier_or(1 + t / 64, 64, in[n] % 64 == 0);
      }
    """,
    lambda: _any_words(4, 4),
    lambda given: _voted(given % 64 == 0, 64),
)

# -- copies of boxes ------------------------------------------------------------------------------

# Of each block an array of 2 heads of 50 rows of 40 columns, with gaps.
_ROW, _HEAD, _BLOCK = 96, 50 * 96, 128 * 80
BOXES = TensorMap("in", "float16", (40, 50, 2, 1, 2), (_ROW, _HEAD, 16, _BLOCK), 64)


def _boxed(given: Array) -> Array:
    """Rows 20 and on of the second head of each block: 64 x 64, pieces swizzled by 16 bytes."""
    blocks = given.reshape(-1, _BLOCK // 4)
    halves = np.ascontiguousarray(blocks).view(np.uint16)
    boxes = np.zeros((len(blocks), 64, 64), np.uint16)
    for row in range(20, 50):
        first = (_HEAD + row * _ROW) // 2
        boxes[:, row - 20, :40] = halves[:, first : first + 40]
    rows, pieces = np.arange(64)[:, None], np.arange(8)
    swizzled = boxes.reshape(-1, 64, 8, 8)[:, rows, pieces ^ rows % 8]
    return np.ascontiguousarray(swizzled).view(np.uint32).reshape(-1, 16)


COPY = Case(
    "tma_load mbarrier_arrive_expect_tx prefetch_map",
    ALIGNED
    + """
      const unsigned int barrier = begin + 8192;
      if (t == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
      }
      __syncthreads();  // the barrier
      if (t == 0) {
        ptx::prefetch_map(&map);
        ptx::mbarrier_arrive_expect_tx(barrier, 8192);
        ptx::tma_load(begin, map, barrier, 0, 20, 1, 0, blockIdx.x);
      }
      while (!ptx::mbarrier_try_wait(barrier, 0)) {
      }
      for (int k = 0; k < 16; ++k) out[k] = words[16 * t + k];
    """,
    lambda: _any_words(_BLOCK // 4 // THREADS, 2),
    _boxed,
    since=HOPPER,
    shared=(8192 + 1024 + 16) // 16,
    map=BOXES,
)

COPY_ONCE = dataclasses.replace(
    COPY,
    name=COPY.name.replace("tma_load", "tma_load_once"),
    body=COPY.body.replace("tma_load(", "tma_load_once("),
)

# Of each block an array of 50 rows of 40 columns, with gaps, in 64 rows of 128 bytes.
STORED = TensorMap("out", "float16", (40, 50, 1, 1, 2), (128, 16, 16, 8192), 64)


def _stored(given: Array) -> Array:
    """A box of 64 x 64 whose rows go to 20 and on, and first words around it."""
    blocks = given.reshape(-1, THREADS, 16)
    rows, pieces = np.arange(64)[:, None], np.arange(8)
    boxes = blocks.reshape(-1, 64, 8, 4)[:, rows, pieces ^ rows % 8].reshape(-1, 64, 32)
    wanted = np.repeat(blocks[:, :, :1], 16, 2).reshape(-1, 64, 32)
    wanted[:, 20:50, :20] = boxes[:, :30, :20]
    return wanted.reshape(-1, 16)


STORE = Case(
    "tma_store tma_store_commit tma_store_wait_read",
    ALIGNED
    + """
      for (int k = 0; k < 16; ++k) {
        words[16 * t + k] = in[k];
        const int row = t / 2, word = t % 2 * 16 + k;
        if (row < 20 || row >= 50 || word >= 20) out[k] = in[0];
      }
      ptx::fence_proxy_async();
      __syncthreads();  // the box
      if (t == 0) {
        ptx::tma_store(map, begin, 0, 20, 0, 0, blockIdx.x);
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
      }
    """,
    lambda: _any_words(16, 2),
    _stored,
    since=HOPPER,
    shared=(8192 + 1024) // 16,
    map=STORED,
)

# -- registers ------------------------------------------------------------------------------------

REGISTERS = Case(
    "setmaxnreg_dec setmaxnreg_inc",
    """
      ptx::setmaxnreg_dec<40>();
      const unsigned int sum = in[0] + in[1];
      ptx::setmaxnreg_inc<64>();
      out[0] = sum * in[1];
    """,
    lambda: _any_words(2, 2),
    lambda given: (given[:, :1] + given[:, 1:]) * given[:, 1:],
    since=HOPPER,
    only=HOPPER,
)

# -- grids ----------------------------------------------------------------------------------------

# On a GPU the launch does not ask for an early begin, and the two let everything be as it is.
GRIDS = Case(
    "wait_for_grids launch_dependents",
    """
      const unsigned int sum = in[0] + in[1];
      ptx::wait_for_grids();
      ptx::launch_dependents();
      out[0] = sum * in[1];
    """,
    lambda: _any_words(2, 2),
    lambda given: (given[:, :1] + given[:, 1:]) * given[:, 1:],
)

# A prefetch changes nothing that can be read.
PREFETCH = Case(
    "prefetch_once",
    """
      ptx::prefetch_once(in, 16);
      out[0] = in[0] + in[1];
    """,
    lambda: _any_words(4, 4),
    lambda given: given[:, :1] + given[:, 1:2],
)

# -- products -------------------------------------------------------------------------------------

LANES = np.arange(THREADS)
LANE_ROWS, LANE_COLUMNS = LANES // 32 * 16 + LANES % 32 // 4, LANES % 4 * 2


def _operands(given: Array, columns: int, kind: Any, form: str) -> tuple[Array, ...]:
    """Return a (64 x 16), b (16 x columns) and d of every block, in float64."""
    blocks = given.reshape(-1, THREADS, given.shape[1])
    depth = 4 + columns // 16
    left = np.ascontiguousarray(blocks[..., :4]).view(kind).astype(np.float64)
    right = np.ascontiguousarray(blocks[..., 4:depth]).view(kind).astype(np.float64)
    sums = np.ascontiguousarray(blocks[..., depth:]).view(np.float32).astype(np.float64)
    n = len(blocks)
    a, d = np.zeros((n, 64, 16)), np.zeros((n, 64, columns))
    if form == "rs":
        for x in range(8):
            column = LANE_COLUMNS + x // 4 * 8 + x % 2
            a[:, LANE_ROWS + x // 2 % 2 * 8, column] = left[..., x]
    else:
        a = left.reshape(n, 16, 64).swapaxes(1, 2) if form == "tt" else left.reshape(n, 64, 16)
    b = right.reshape(n, columns, 16).swapaxes(1, 2) if form == "ss" else right
    b = b.reshape(n, 16, columns)
    for x in range(columns // 2):
        r, column = x // (columns // 4), x % (columns // 4)
        d[:, LANE_ROWS + 8 * r, column // 2 * 8 + LANE_COLUMNS + column % 2] = sums[..., x]
    return a, b, d


def of_lanes(d: Array) -> Array:
    columns = d.shape[-1]
    held = [
        d[:, LANE_ROWS + x // (columns // 4) * 8, n // 2 * 8 + LANE_COLUMNS + n % 2]
        for x in range(columns // 2)
        for n in [x % (columns // 4)]
    ]
    return np.stack(held, -1).reshape(-1, columns // 2)


# A row of a's is 128 bytes, of which a product's 16 columns are 32 from byte 32 on; so are b's,
# from byte 64 on. Where rows are as wide as the result, 64 columns of 16 rows are a slab.
LEFT = {
    "rs": "",
    "ss": """
  for (int k = 0; k < 4; ++k) {
    const unsigned int at = t / 2 * 128 + ((t % 2 + 2 ^ t / 2 % 8) << 4) + 4 * k;
    words[at / 4] = in[k];
  }
""",
    "tt": """
  for (int k = 0; k < 4; ++k) words[t / 8 * 32 + (t % 8 ^ t / 8 % 8) * 4 + k] = in[k];
""",
}
RIGHT = {
    False: "const unsigned int row = n / 8, at = row * 128 + ((n % 8 * 4 + 64) ^ row % 8 << 4);",
    True: """const unsigned int row = n / (COLUMNS / 2), pair = n % (COLUMNS / 2);
      const unsigned int at = pair / 32 * 2048 + row * 128 + (pair % 32 * 4 ^ row % 8 << 4);""",
}
DESCRIBED = {
    "ss": """
  const unsigned long long kind = 1ull << 62 | 64ull << 32;
  const unsigned long long a = kind | (begin + 32) / 16, b = kind | (begin + 8192 + 64) / 16;
""",
    "st": """
  const unsigned long long kind = 1ull << 62 | 64ull << 32 | 128 << 16;
  const unsigned long long a = kind | (begin + 32) / 16, b = kind | (begin + 8192) / 16;
""",
    "tt": """
  const unsigned long long kind = 1ull << 62 | 64ull << 32 | 128 << 16;
  const unsigned long long a = kind | begin / 16, b = kind | (begin + 8192) / 16;
""",
}


def product(
    form: str, name: str, columns: int, whole: bool, others: str = "", part: str = ""
) -> Case:
    """Return the case of one width: of whole numbers every sum is exact.

    `part` is "_first" or "_last" if these columns are those of a result of 320.
    """
    first, width = 192 if part == "_last" else 0, 320 if part else columns
    kind, of_registers = TYPES[name], form == "rs"
    body = (
        ALIGNED
        + f"constexpr int COLUMNS = {columns}, FIRST = {first // 4}, WIDTH = {width // 4};\n"
        + LEFT.get(form, LEFT["ss"])
        + f"""
      for (int k = 0; k < COLUMNS / 16; ++k) {{
        const int n = t * (COLUMNS / 16) + k;
        {RIGHT[form != "ss"]}
        words[2048 + at / 4] = in[4 + k];
      }}
      float d[2][WIDTH] = {{}};
      for (int x = 0; x < COLUMNS / 2; ++x) {{
        d[x / (COLUMNS / 4)][FIRST + x % (COLUMNS / 4)] =
            __uint_as_float(in[4 + COLUMNS / 16 + x]);
      }}
      ptx::fence_proxy_async();
      __syncthreads();  // the operands
      ptx::wgmma_fence();
      """
        + (
            """
      const unsigned int a[4] = {in[0], in[1], in[2], in[3]};
      const unsigned long long b = 1ull << 62 | 64ull << 32 | 128 << 16 | (begin + 8192) / 16;
      """
            if of_registers
            else DESCRIBED[form]
        )
        + f"""
      ptx::wgmma_{form}_{name}{part}(d, a, b, blockIdx.x % 2 == 0);
      """
        + """
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(d);
      float others = 0;  // columns that the product must not touch
      for (int n = 0; n < WIDTH; ++n) {
        if (n < FIRST || n >= FIRST + COLUMNS / 4) others += fabs(d[0][n]) + fabs(d[1][n]);
      }
      for (int x = 0; x < COLUMNS / 2; ++x) {
        out[x] = d[x / (COLUMNS / 4)][FIRST + x % (COLUMNS / 4)] + others;
      }
    """
    )

    def given() -> Array:
        rng = np.random.default_rng(columns)
        lanes = 4 * THREADS
        pairs = rng.standard_normal((lanes, 8 + columns // 8))
        sums = rng.standard_normal((lanes, columns // 2))
        if whole:
            pairs, sums = np.round(4 * pairs), np.round(100 * sums)
            # One element of each operand only, in the first block.
            pairs[:THREADS], sums[:THREADS] = 0, 0
            pairs[13, 1], pairs[21, 9] = 3, 5
            if of_registers:
                pairs[40, 6], pairs[99, 10] = 7, 11
        words = np.ascontiguousarray(pairs.astype(kind)).view(np.uint32)
        return np.concatenate([words, sums.astype(np.float32).view(np.uint32)], 1)

    def exact(given: Array, of: Any) -> Array:
        a, b, d = (of(x) for x in _operands(given, columns, kind, form))
        d[1::2] = 0  # not added
        return of_lanes(d + a @ b)

    def wanted(given: Array) -> Array:
        return exact(given, np.positive).astype(np.float32)

    def near(given: Array, one: Array, other: Array) -> Array:
        true, terms = exact(given, np.positive), exact(given, np.abs)
        # 17 terms, each sum rounded or cut off at the last place of the largest.
        with np.errstate(invalid="ignore"):  # infinities differ
            right = [np.abs(x - true) <= 17 * 2.0**-23 * terms for x in (one, other)]
        return np.logical_and(*right)

    return Case(
        f"wgmma_{form}_{name}{part} {others}".strip()
        + f": {columns} columns, {'whole numbers' if whole else 'rounded'}",
        body,
        given,
        wanted,
        equal if whole else near,
        since=HOPPER,
        only=HOPPER,
        shared=(1024 + 8192 + 256 * 128) // 16,
    )


def product_of_floats(columns: int, whole: bool) -> Case:
    """Return the case of float32, whose left operand is in registers and whose rows are deep."""
    depth = 4 + columns // 16
    body = (
        ALIGNED
        + f"constexpr int COLUMNS = {columns};\n"
        + f"""
      for (int k = 0; k < COLUMNS / 16; ++k) {{
        const int n = t * (COLUMNS / 16) + k;
        {RIGHT[False]}
        words[2048 + at / 4] = in[4 + k];
      }}"""
        + """
      float d[2][COLUMNS / 4];
      for (int x = 0; x < COLUMNS / 2; ++x) {
        d[x / (COLUMNS / 4)][x % (COLUMNS / 4)] = __uint_as_float(in[4 + COLUMNS / 16 + x]);
      }
      ptx::fence_proxy_async();
      __syncthreads();  // the right operand
      ptx::wgmma_fence();
      const unsigned int a[4] = {in[0], in[1], in[2], in[3]};
      const unsigned long long b = 1ull << 62 | 64ull << 32 | (begin + 8192 + 64) / 16;
      ptx::wgmma_rs_tf32(d, a, b, blockIdx.x % 2 == 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::fence_accumulator(d);
      for (int x = 0; x < COLUMNS / 2; ++x) out[x] = d[x / (COLUMNS / 4)][x % (COLUMNS / 4)];
    """
    )

    def given() -> Array:
        rng = np.random.default_rng(columns)
        numbers = rng.standard_normal((4 * THREADS, depth + columns // 2))
        if whole:
            numbers = np.round(4 * numbers)
        return numbers.astype(np.float32).view(np.uint32)

    def exact(given: Array, of: Any) -> Array:
        blocks = given.reshape(-1, THREADS, given.shape[1])
        cut = (blocks & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        n = len(blocks)
        a, d = np.zeros((n, 64, 8)), np.zeros((n, 64, columns))
        for x in range(4):
            a[:, LANE_ROWS + x % 2 * 8, LANES % 4 + x // 2 * 4] = cut[..., x]
        b = cut[..., 4:depth].reshape(n, columns, 8).swapaxes(1, 2)
        sums = blocks[..., depth:].view(np.float32).astype(np.float64)
        for x in range(columns // 2):
            r, column = x // (columns // 4), x % (columns // 4)
            d[:, LANE_ROWS + 8 * r, column // 2 * 8 + LANE_COLUMNS + column % 2] = sums[..., x]
        d[1::2] = 0  # not added
        return of_lanes(of(d) + of(a) @ of(b))

    def wanted(given: Array) -> Array:
        return exact(given, np.positive).astype(np.float32)

    def near(given: Array, one: Array, other: Array) -> Array:
        true, terms = exact(given, np.positive), exact(given, np.abs)
        # 9 terms, each cut off at the last place of the largest.
        with np.errstate(invalid="ignore"):  # infinities differ
            right = [np.abs(x - true) <= 9 * 2.0**-23 * terms for x in (one, other)]
        return np.logical_and(*right)

    return Case(
        f"wgmma_rs_tf32: {columns} columns, {'whole numbers' if whole else 'rounded'}",
        body,
        given,
        wanted,
        equal if whole else near,
        since=HOPPER,
        only=HOPPER,
        shared=(1024 + 8192 + 256 * 128) // 16,
    )


_AROUND = "fence_proxy_async wgmma_fence wgmma_commit wgmma_wait fence_accumulator"
WIDTHS = {
    "ss": (32, 48, 64, 80, 112, 128, 144, 176, 208), "st": (64, 128, 256), "tt": (64, 128),
    "rs": (32, 48, 64, 80, 96, 128, 160, 192, 256),
}  # fmt: skip
PRODUCTS = [
    product(form, name, columns, True, _AROUND if columns == 64 else "")
    for form, widths in WIDTHS.items()
    for name in TYPES
    for columns in widths
]
PRODUCTS += [product(form, name, 128, False) for form in WIDTHS for name in TYPES]
PRODUCTS += [
    product("rs", name, columns, True, part=part)
    for name in TYPES
    for part, columns in (("_first", 192), ("_last", 128))
]
PRODUCTS += [product_of_floats(columns, whole) for columns in (64, 128) for whole in (True, False)]

CASES = [PHASES, NUMBERED, VOTES, COPY, COPY_ONCE, STORE, REGISTERS, GRIDS, PREFETCH, *PRODUCTS]
