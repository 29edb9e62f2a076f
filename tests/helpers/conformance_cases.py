"""A case for every function of kernels_cu/ptx/: conformance.py says what one is made of."""

from __future__ import annotations

from typing import Any

import conformance_codes
import conformance_halves
import conformance_matrices
import conformance_warpgroups
import numpy as np
from conformance import (
    C_TYPES,
    TENSOR_CORES,
    THREADS,
    Array,
    Case,
    blocks_of,
    equal,
)

# -- 2^x ------------------------------------------------------------------------------------------


def _exponents() -> Array:
    rng = np.random.default_rng(0)
    upper = np.arange(512, dtype=np.uint32)[:, None] << 23  # every sign and exponent
    fractions = np.concatenate([[0, 1, 2**22, 2**23 - 1], rng.integers(0, 2**23, 28)])
    edges = np.array([-150, -149, -127, -126, -1, 0, 1, 24, 127, 128], np.float32)
    return np.concatenate(
        [
            (upper | fractions.astype(np.uint32)).view(np.float32).ravel(),
            np.arange(-200, 200, dtype=np.float32),
            np.nextafter(edges, np.float32(-np.inf)),
            np.nextafter(edges, np.float32(np.inf)),
            rng.uniform(-130, 130, 40_000).astype(np.float32),
            rng.uniform(-1, 1, 20_000).astype(np.float32),
        ]
    )[:, None]


def _power(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        true = np.exp2(x.astype(np.float64))
        return np.where(true < 2.0**-126, 0, true).astype(np.float32)


def _powers(given: Array, one: Array, other: Array) -> Array:
    """Whether both are within 2^-22 of 2^x; of whole x, exact; below 2^-126, 0; for NaN, a NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = given.astype(np.float64)
        true, nearest = np.exp2(x), _power(given)
    exactly = (x == np.floor(x)) | (nearest == 0) | np.isinf(nearest)

    def right(found: Array) -> Array:
        with np.errstate(invalid="ignore"):
            near = np.abs(found.astype(np.float64) - true) <= 2.0**-22 * true
        same = equal(given, found, nearest)
        return np.where(np.isnan(x), np.isnan(found), np.where(exactly, same, near))

    return right(one) & right(other)


def _integers() -> Array:
    """Every two of what lies around 0, the ends and the middle of 32 bits, and any bits."""
    ends = [-(2**31), -(2**16), 0, 2**16, 2**31 - 1]
    near = np.array([x + n for x in ends for n in (-1, 0, 1) if -(2**31) <= x + n < 2**31])
    each = np.stack(np.meshgrid(near, near), axis=-1).reshape(-1, 2)
    any_bits = np.random.default_rng(0).integers(-(2**31), 2**31, (40_000, 2))
    return np.concatenate([each, any_bits]).astype(np.int32)


def _reciprocal(x: Array) -> Array:
    with np.errstate(all="ignore"):
        nearest = (1 / x.astype(np.float64)).astype(np.float32)
        small = np.abs(nearest) < 2.0**-126
        nearest = np.where(small, np.copysign(np.float32(0), nearest), nearest)
        flushed = np.abs(x) < 2.0**-126
        return np.where(flushed, np.copysign(np.float32(np.inf), x), nearest).astype(np.float32)


def _reciprocals(given: Array, one: Array, other: Array) -> Array:
    """Whether both are within 2^-23 of 1/x; below 2^-126 or of such x, 0 or infinite; or NaN."""
    nearest = _reciprocal(given)
    with np.errstate(all="ignore"):
        true = 1 / given.astype(np.float64)
    smallest = np.copysign(np.float32(2.0**-126), given)
    either = np.abs(np.abs(true) - 2.0**-126) <= 2.0**-148  # it, or 0

    def right(found: Array) -> Array:
        with np.errstate(invalid="ignore"):
            near = np.abs(found.astype(np.float64) - true) <= 2.0**-23 * np.abs(true)
        normal = (nearest != 0) & np.isfinite(nearest) & (np.abs(found) >= 2.0**-126)
        same = equal(given, found, nearest) | (either & equal(given, found, smallest))
        return np.where(np.isnan(given), np.isnan(found), same | (normal & near))

    return right(one) & right(other)


# -- lanes together -------------------------------------------------------------------------------


def _to_copy() -> Array:
    """Two times 16 bytes, whether each is wanted, what was there before; rows of 48 bytes."""
    blocks = 6
    given = blocks_of(12, blocks)
    n = np.arange(blocks * THREADS)
    block, t = n // THREADS, n % THREADS
    patterns = [t >= 0, t < 0, t % 2 == 0, t == 70, t < 32, given[:, 8] % 2 == 0]
    first = np.select([block == b for b in range(blocks)], patterns)
    given[:, 8], given[:, 9] = first, first[::-1]
    return given


def _copied(given: Array) -> Array:
    """What the lane 37 further on has copied."""
    landed = np.concatenate([given[:, :4] * given[:, 8:9], given[:, 4:8] * given[:, 9:10]], 1)
    return np.roll(landed.reshape(-1, THREADS, 8), -37, 1).reshape(-1, 8)


def _to_copy_parts() -> Array:
    """Two times 16 bytes, how many of each are wanted, what was there before; rows of 48 bytes."""
    given = _to_copy()
    given[:, 8:10] = np.random.default_rng(1).integers(0, 17, (len(given), 2))
    return given


def _copied_parts(given: Array) -> Array:
    """What the lane 37 further on has copied."""
    parts = []
    for n in range(2):
        landed = np.ascontiguousarray(given[:, 4 * n : 4 * n + 4]).view(np.uint8)
        kept = np.where(np.arange(16) < given[:, 8 + n : 9 + n], landed, 0).astype(np.uint8)
        parts.append(kept.view(np.uint32))
    return np.roll(np.concatenate(parts, 1).reshape(-1, THREADS, 8), -37, 1).reshape(-1, 8)


def _votes() -> Array:
    """Two conditions and a number: none, all, each lane alone, and drawn ones."""
    alone = np.eye(THREADS, dtype=np.uint32) << 8  # not only the lowest byte counts
    votes = np.concatenate([np.zeros_like(alone[:1]), np.ones_like(alone[:1]), alone])
    given = blocks_of(3, 2 * len(votes))
    given[:, 0] = np.concatenate([votes, votes]).ravel()
    given[:, 1] = np.concatenate([votes, votes[::-1]]).ravel()
    return given


def _voted(given: Array) -> Array:
    blocks = given.reshape(-1, THREADS, 3)
    wanted = np.empty_like(blocks)
    wanted[..., :2] = blocks[..., :2].any(axis=1, keepdims=True)
    wanted[..., 2] = np.roll(blocks[..., 2], -33, 1)
    return wanted.reshape(-1, 3)


def _voted_by_warps(given: Array) -> Array:
    votes = given[:, :2].reshape(-1, 32, 2) != 0
    ballots = (votes * (1 << np.arange(32, dtype=np.uint64))[:, None]).sum(axis=1)
    wanted = np.stack([ballots != 0, ballots], -1).reshape(-1, 1, 4)
    return np.broadcast_to(wanted, (len(wanted), 32, 4)).reshape(-1, 4).astype(np.uint32)


def _to_swap() -> Array:
    """What is there, what is expected and what is desired: any bits; equal, or but for one."""
    given = blocks_of(3, 2, np.uint64)
    same = np.arange(len(given)) % 3 > 0
    given[same, 1] = given[same, 0]
    given[:64, 1] = given[:64, 0] ^ (np.uint64(1) << np.arange(64, dtype=np.uint64))
    return given


def _to_exchange() -> Array:
    """A number, and a count of blocks that begins and ends as 0."""
    given = blocks_of(2, 40, np.uint64)
    given[0, 1] = 0
    return given


def _shuffle_from(kind: Any) -> Case:
    def chosen(given: Array) -> Array:
        lanes = np.arange(len(given))[:, None]
        n = np.arange(32)
        return given[:, 0][lanes // 32 * 32 + (lanes * n + 5) % 32]

    body = "for (int n = 0; n < 32; ++n) out[n] = ptx::shuffle(in[0], (t * n + 5) % 32);"
    name = f"shuffle: {C_TYPES[np.dtype(kind)]}"
    return Case(name, body, lambda: blocks_of(1, 3, kind), chosen)


def _shuffle(kind: Any) -> Case:
    def partners(given: Array) -> Array:
        lanes = np.arange(len(given))[:, None]
        return given[:, 0][lanes ^ np.arange(1, 32)]

    body = "for (int n = 1; n < 32; ++n) out[n - 1] = ptx::shuffle_xor(in[0], n);"
    name = f"shuffle_xor: {C_TYPES[np.dtype(kind)]}"
    return Case(name, body, lambda: blocks_of(1, 3, kind), partners)


CASES = [
    *conformance_halves.CASES,
    Case(
        "multiply_wide",
        "out[0] = ptx::multiply_wide(in[0], in[1]);",
        _integers,
        lambda x: np.prod(x, axis=1, keepdims=True, dtype=np.int64),
    ),
    # The instruction may be wrong, and the emulator is so on purpose, in another way.
    Case("exp2", "out[0] = ptx::exp2(in[0]);", _exponents, _power, _powers),
    Case(
        "reciprocal",
        "out[0] = ptx::reciprocal(in[0]);",
        conformance_halves.around_bfloats,
        _reciprocal,
        _reciprocals,
    ),
    Case(
        "cp_async cp_async_wait_all",
        """
          for (int n = 0; n < 2; ++n) {
            for (int k = 0; k < 4; ++k) smem[2 * t + n].x[k] = in[10];
          }
          __syncthreads();  // what was there before is written
          ptx::cp_async(smem + 2 * t, in, in[8]);
          ptx::cp_async(smem + 2 * t + 1, in + 4, in[9]);
          ptx::cp_async_wait_all();
          __syncthreads();  // others see the copies
          const int from = (t + 37) % THREADS;
          for (int k = 0; k < 8; ++k) out[k] = smem[2 * from + k / 4].x[k % 4];
        """,
        _to_copy,
        _copied,
    ),
    Case(
        "cp_async_partial cp_async_once cp_async_commit cp_async_wait",
        """
          for (int n = 0; n < 2; ++n) {
            for (int k = 0; k < 4; ++k) smem[2 * t + n].x[k] = in[10];
          }
          __syncthreads();  // what was there before is written
          const unsigned int to = ptx::shared_address(smem + 2 * t);
          ptx::cp_async_partial(to, in, in[8]);
          ptx::cp_async_commit();
          ptx::cp_async_once(to + 16, in + 4, in[9]);
          ptx::cp_async_commit();
          const int from = (t + 37) % THREADS;
          ptx::cp_async_wait<1>();
          __syncthreads();  // others see the first copies
          for (int k = 0; k < 4; ++k) out[k] = smem[2 * from].x[k];
          ptx::cp_async_wait<0>();
          __syncthreads();  // and the second
          for (int k = 0; k < 4; ++k) out[4 + k] = smem[2 * from + 1].x[k];
        """,
        _to_copy_parts,
        _copied_parts,
        equal,
        TENSOR_CORES,
    ),
    Case(
        "store",
        """
          ptx::Bytes16 bytes;
          for (int k = 0; k < 4; ++k) bytes.x[k] = in[k ^ 1];
          ptx::store(out, bytes);
        """,
        lambda: np.random.default_rng(0).integers(0, 2**32, (2 * THREADS, 4), np.uint32),
        lambda x: np.ascontiguousarray(x[:, [1, 0, 3, 2]]),
    ),
    Case(
        "red_add",
        """
          for (int k = 0; k < 4; ++k) out[k] = in[k];
          ptx::red_add(out + 1, in[4]);
        """,
        lambda: np.random.default_rng(0).standard_normal((2 * THREADS, 8)).astype(np.float32),
        lambda x: x[:, :4] + x[:, [7, 4, 7, 7]] * np.array([0, 1, 0, 0], np.float32),
    ),
    Case(
        "red_add_v4",
        """
          for (int k = 0; k < 4; ++k) out[k] = in[k];
          ptx::red_add_v4(out, in[4], in[5], in[6], in[7]);
        """,
        lambda: np.random.default_rng(0).standard_normal((2 * THREADS, 8)).astype(np.float32),
        lambda x: x[:, :4] + x[:, 4:],
    ),
    Case(
        "red_add",
        """
          out[0] = in[0];
          ptx::red_add(out, in[1]);
        """,
        lambda: np.random.default_rng(0).standard_normal((2 * THREADS, 2)),
        lambda x: x[:, :1] + x[:, 1:],
    ),
    Case(
        "red_max",
        """
          out[0] = in[0];
          ptx::red_max(out, in[1]);
        """,
        lambda: np.random.default_rng(0).integers(0, 2**32, (2 * THREADS, 2), np.uint32),
        lambda x: x.max(axis=1, keepdims=True),
    ),
    Case(
        "compare_and_swap",
        """
          out[0] = in[0];
          out[1] = ptx::compare_and_swap(out, in[1], in[2]);
        """,
        _to_swap,
        lambda x: np.stack([np.where(x[:, 0] == x[:, 1], x[:, 2], x[:, 0]), x[:, 0]], 1),
    ),
    Case(
        "fetch_add",
        """
          out[0] = in[0];
          out[1] = ptx::fetch_add(out, in[1]);
        """,
        lambda: np.random.default_rng(0).integers(0, 2**62, (2 * THREADS, 2), np.uint64),
        lambda x: np.stack([x[:, 0] + x[:, 1], x[:, 0]], 1),
    ),
    Case(
        "tell_host fence_system",
        """
          ptx::tell_host(out, in[1]);
          ptx::fence_system();
          ptx::tell_host(out + 1, in[0]);
        """,
        lambda: np.random.default_rng(0).integers(0, 2**62, (2 * THREADS, 2), np.uint64),
        lambda x: x[:, ::-1].copy(),
    ),
    Case(
        "fence_device: the block that is last reads what the others wrote",
        """
          out[0] = in[0];
          ptx::fence_device();
          __syncthreads();  // all have written
          if (t == 0) {
            unsigned long long* const count = static_cast<unsigned long long*>(p.in) + 1;
            unsigned long long expected, seen = 0;
            do {
              expected = seen;
              seen = ptx::compare_and_swap(count, expected, (expected + 1) % gridDim.x);
            } while (seen != expected);
            smem[0].x[0] = seen + 1 == gridDim.x;
          }
          __syncthreads();  // whether it is the last
          if (smem[0].x[0]) {
            ptx::fence_device();
            unsigned long long* const first = static_cast<unsigned long long*>(p.out) + 2 * t;
            for (int block = 0; block < gridDim.x; ++block) {
              const int next = (block + 1) % gridDim.x;
              first[2 * THREADS * block + 1] = first[2 * THREADS * next];
            }
          }
        """,
        _to_exchange,
        lambda x: np.stack([x[:, 0], np.roll(x[:, 0], -THREADS)], 1),
    ),
    Case(
        "lane_index",
        "out[0] = ptx::lane_index();\nout[1] = ptx::WARP_SIZE;",
        lambda: blocks_of(1, 2),
        lambda x: np.stack([np.arange(len(x)) % 32, np.full(len(x), 32)], 1).astype(np.int32),
    ),
    *(_shuffle(kind) for kind in (np.int32, np.float32, np.float64, np.int64)),
    *(_shuffle_from(kind) for kind in (np.uint32, np.float32, np.float64, np.int64)),
    Case(
        "any_lane ballot",
        """
          for (int n = 0; n < 2; ++n) {
            out[2 * n] = ptx::any_lane(in[n]);
            out[2 * n + 1] = ptx::ballot(in[n]);
          }
        """,
        _votes,
        _voted_by_warps,
    ),
    Case(
        "barrier_or",
        """
          smem[t].x[0] = in[2];
          out[0] = ptx::barrier_or(in[0]);
          out[1] = ptx::barrier_or(in[1]);
          out[2] = smem[(t + 33) % THREADS].x[0];  // the votes are barriers too
        """,
        _votes,
        _voted,
    ),
    *conformance_matrices.CASES,
    *conformance_warpgroups.CASES,
    *conformance_codes.CASES,
]
