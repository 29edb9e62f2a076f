"""What every function of kernels_cu/arch/ does, lane by lane: on the emulator, on a GPU, by NumPy.

A case is a kernel of a few lines, what its lanes read, and what NumPy says that they write.
tests/test_conformance.py runs it in both places. A function without a case fails a test there; to
add one, write an entry of CASES, or for matrices of MATRICES in tests/conformance_matrices.py:

- its name, and with several cases of one function, what this one is about;
- statements that apply it. They know `in` and `out`, this lane's own numbers, `smem`, an array of
  SHARED `Words` of 16 bytes, `t`, the thread's number, and THREADS;
- what is given: an array with a row of numbers per lane; whole blocks are filled up by repetition;
- what NumPy wants of that: a row of numbers per lane.

Types are those of the two arrays. Results agree if their bits do, unless the case says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from emulator import probe
from emulator.machine import FORWARD, Schedule

import cupyflash.kernels_cu
from cupyflash import compile as compiler
from cupyflash import source
from cupyflash.source import STORAGE
from cupyflash.target import OLDEST_CAPABILITY
from cupyflash.testing.copies import Copies, HostMemory

Array = np.ndarray[Any, Any]

ARCH = Path(cupyflash.kernels_cu.__file__).parent / "arch"
THREADS = 128  # of a block: four warps
SHARED = 2 * THREADS

_FUNCTION = re.compile(
    r"^(?:__device__ __forceinline__|inline)? ?(?!struct)(\w[\w ]*?) (\w+)\(", re.MULTILINE
)
_TYPES = {
    np.dtype(kind): name
    for kind, name in (
        (np.uint16, "unsigned short"),
        (np.int32, "int"),
        (np.uint32, "unsigned int"),
        (np.int64, "long long"),
        (np.float32, "float"),
        (np.float64, "double"),
    )
}
_LANE = """
const long long lane = 1LL * THREADS * blockIdx.x + t;
const {given}* const in = static_cast<const {given}*>(p.in) + lane * {inputs};
{made}* const out = static_cast<{made}*>(p.out) + lane * {outputs};
"""


def functions(text: str) -> list[tuple[str, str]]:
    """Return types and names of the functions that a file of `arch/`, or its twin, defines."""
    return sorted(_FUNCTION.findall(text))


def defined() -> list[tuple[str, str]]:
    """Return file and name of every function of `arch/`."""
    return [
        (f"arch/{path.name}", name)
        for path in sorted(ARCH.iterdir())
        for _, name in functions(path.read_text())
    ]


def bits(x: Array) -> Array:
    """Return the bits of numbers."""
    return x.view(f"u{x.itemsize}")


def equal(given: Array, one: Array, other: Array) -> Array:
    """Whether bits are the same."""
    return bits(one) == bits(other)


def equal_but_for_nan(kind: Any) -> Callable[[Array, Array, Array], Array]:
    """Return whether bits are the same, where any two NaN of a type are: which one is open."""

    def agree(given: Array, one: Array, other: Array) -> Array:
        both_nan = np.isnan(one.view(kind)) & np.isnan(other.view(kind))
        return both_nan | equal(given, one, other)

    return agree


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes
    ----------
    name : str
        The functions of `arch/` that it is about; behind a colon, what of them.
    body : str
        Its statements.
    given : callable
        Returns what lanes read.
    wanted : callable
        Returns what NumPy says that they write.
    agree : callable
        Whether two results for what was given are both right: given, one, other -> per number.
    since : tuple of int
        Compute capability of the first GPU that has the instruction.
    """

    name: str
    body: str
    given: Callable[[], Array]
    wanted: Callable[[Array], Array]
    agree: Callable[[Array, Array, Array], Array] = equal
    since: tuple[int, int] = OLDEST_CAPABILITY

    @property
    def functions(self) -> list[str]:
        """Names of the functions that it is about."""
        return self.name.partition(":")[0].split()

    @property
    def headers(self) -> tuple[str, ...]:
        """The files that define them."""
        return tuple(dict.fromkeys(file for file, name in defined() if name in self.functions))

    def inputs(self) -> Array:
        """Return what lanes read, for whole blocks."""
        rows = self.given()
        blocks = -(-len(rows) // THREADS)
        return np.ascontiguousarray(np.resize(rows, (blocks * THREADS, rows.shape[1])))

    def kernel(self, given: Array, made: Array) -> dict[str, Any]:
        """Return what `probe.text` makes a kernel of."""
        lane = _LANE.format(
            given=_TYPES[given.dtype],
            made=_TYPES[made.dtype],
            inputs=given.shape[1],
            outputs=made.shape[1],
        )
        return {
            "body": lane + self.body,
            "kind": "Words",
            "elements": SHARED,
            "threads": THREADS,
            "headers": self.headers,
            "before": f"constexpr int SHARED = {SHARED};\n",
        }

    def cuda(self) -> str:
        """Return the kernel's text for a GPU."""
        given = self.inputs()
        return probe.text(**self.kernel(given, self.wanted(given)), read=source.read)

    def on_emulator(self, schedule: Schedule = FORWARD, subnormal: bool = False) -> Array:
        """Return what the lanes of the emulator write; `subnormal`: such numbers are kept."""

        def launch(given: Array, out: Array) -> None:
            storage = STORAGE["float64" if subnormal else "float32"]
            machine = probe.Probe(**self.kernel(given, out), storage=storage)
            machine.run(out, given, len(given) // THREADS, schedule)

        return self._run(HostMemory(), launch)

    def on_gpu(self, memory: Any) -> Array:
        """Return what the lanes of a GPU write: compiled and launched as the package does it."""

        def launch(given: Any, out: Any) -> None:
            shared_memory = SHARED * probe.SIZES["Words"]
            kernel = compiler._compiled("probe", self.cuda(), shared_memory)
            argument = np.frombuffer(probe.packed(given, out), np.dtype("V16"))
            grid, block = (len(given) // THREADS,), (THREADS,)
            kernel(grid, block, (argument,), shared_mem=shared_memory)

        return self._run(memory, launch)

    def _run(self, memory: Any, launch: Callable[[Any, Any], None]) -> Array:
        """Launch between guards, into poisoned memory, and read back."""
        given = self.inputs()
        out = np.empty_like(self.wanted(given))
        copies = Copies(memory)
        launch(copies.array(given), copies.array(out, True))
        copies.check()
        return copies.value(out)

    def check(self, one: str, found: Array, other: str, wanted: Array) -> None:
        """Raise AssertionError if results differ, and name the lanes and the bits."""
        given = self.inputs()
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        wrong = np.argwhere(~self.agree(given, found, wanted))
        if not len(wrong):
            return
        lines = [f"{self.name}: {len(wrong)} of {found.size} numbers differ"]
        for lane, n in wrong[:8]:
            thread = lane % THREADS
            lines.append(
                f"block {lane // THREADS}, thread {thread} (warp {thread // 32}, lane "
                f"{thread % 32}), out[{n}]: in {_hex(given[lane])}; {one} "
                f"{_hex(found[lane, n : n + 1])}, {other} {_hex(wanted[lane, n : n + 1])}"
            )
        raise AssertionError("\n".join(lines))


def _hex(x: Array) -> str:
    return " ".join(f"{int(each):#0{2 + 2 * x.itemsize}x}" for each in bits(x))


# -- conversions ----------------------------------------------------------------------------------


def _every_half() -> Array:
    return np.arange(65536, dtype=np.uint16)[:, None]


def _around_halves(kind: Any) -> Array:
    """Every half, what lies halfway between two, the neighbours of both, and any bits."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    finite = np.unique(halves[np.isfinite(halves)])
    ends = [-65536.0, *finite, 65536.0]  # what comes next would be infinite
    edges = np.concatenate([finite, np.add(ends[1:], ends[:-1]) / 2]).astype(kind)
    below, above = (np.nextafter(edges, kind(end)) for end in (-np.inf, np.inf))
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 256, (40_000, np.dtype(kind).itemsize), np.uint8).view(kind).ravel()
    tiny = np.finfo(kind).smallest_subnormal
    special = np.array([0, np.inf, np.nan, tiny, 3 * tiny, np.finfo(kind).max], kind)
    with np.errstate(invalid="ignore"):  # some of the bits are NaN that signal
        every_half = halves.astype(kind)
    return np.concatenate([special, -special, every_half, edges, below, above, any_bits])[:, None]


def _to_half(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(np.float16).view(np.uint16)


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


# -- lanes together -------------------------------------------------------------------------------


def blocks_of(words: int, blocks: int, kind: Any = np.uint32) -> Array:
    """Any bits, for some blocks."""
    size = words * np.dtype(kind).itemsize
    drawn = np.random.default_rng(0).integers(0, 256, (blocks * THREADS, size), np.uint8)
    return drawn.view(kind)


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


def _shuffle(kind: Any) -> Case:
    def partners(given: Array) -> Array:
        lanes = np.arange(len(given))[:, None]
        return given[:, 0][lanes ^ np.arange(1, 32)]

    body = "for (int n = 1; n < 32; ++n) out[n - 1] = arch::shuffle_xor(in[0], n);"
    name = f"shuffle_xor: {_TYPES[np.dtype(kind)]}"
    return Case(name, body, lambda: blocks_of(1, 3, kind), partners)


def _part_copies() -> Array:
    """16 bytes for each of two groups, and how many of the first ones are wanted; rows of 48."""
    given = blocks_of(12, 2)
    given[:, 8] = np.arange(len(given)) * 5 % 17
    return given


def _parts_copied(given: Array) -> Array:
    """What the lane 37 further on has copied: zeros behind what was wanted."""
    first = np.ascontiguousarray(given[:, :4]).view(np.uint8)
    first = first * (np.arange(16) < given[:, 8:9])
    landed = np.concatenate([first.astype(np.uint8).view(np.uint32), given[:, 4:8]], 1)
    return np.roll(landed.reshape(-1, THREADS, 8), -37, 1).reshape(-1, 8)


def _pair(name: str, kind: np.dtype[Any]) -> Case:
    def pairs() -> Array:
        numbers = _around_halves(np.float32).ravel()
        return numbers[: len(numbers) // 2 * 2].reshape(-1, 2)

    def rounded(x: Array) -> Array:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return np.ascontiguousarray(x.astype(kind)).view(np.uint16)

    body = f"const unsigned int both = arch::{name}(in[0], in[1]);\nout[0] = both;\n"
    body += "out[1] = both >> 16;"
    return Case(name, body, pairs, rounded, equal_but_for_nan(kind), since=(8, 0))


# -------------------------------------------------------------------------------------------------

CASES = [
    Case(
        "half_to_float",
        "out[0] = arch::half_to_float(in[0]);",
        _every_half,
        lambda x: x.view(np.float16).astype(np.float32),
        equal_but_for_nan(np.float32),
    ),
    Case(
        "float_to_half",
        "out[0] = arch::float_to_half(in[0]);",
        lambda: _around_halves(np.float32),
        _to_half,
        equal_but_for_nan(np.float16),
    ),
    Case(
        "double_to_half",
        "out[0] = arch::double_to_half(in[0]);",
        lambda: _around_halves(np.float64),
        _to_half,
        equal_but_for_nan(np.float16),
    ),
    # The instruction may be wrong, and the emulator is so on purpose, in another way.
    Case("exp2", "out[0] = arch::exp2(in[0]);", _exponents, _power, _powers),
    Case(
        "begin_copy finish_copies",
        """
          for (int n = 0; n < 2; ++n) {
            for (int k = 0; k < 4; ++k) smem[2 * t + n].x[k] = in[10];
          }
          __syncthreads();  // what was there before is written
          arch::begin_copy(smem + 2 * t, in, in[8]);
          arch::begin_copy(smem + 2 * t + 1, in + 4, in[9]);
          arch::finish_copies();
          __syncthreads();  // others see the copies
          const int from = (t + 37) % THREADS;
          for (int k = 0; k < 8; ++k) out[k] = smem[2 * from + k / 4].x[k % 4];
        """,
        _to_copy,
        _copied,
    ),
    Case(
        "lane_index",
        "out[0] = arch::lane_index();\nout[1] = arch::WARP_SIZE;",
        lambda: blocks_of(1, 2),
        lambda x: np.stack([np.arange(len(x)) % 32, np.full(len(x), 32)], 1).astype(np.int32),
    ),
    *(_shuffle(kind) for kind in (np.int32, np.float32, np.float64, np.int64)),
    Case(
        "barrier_or",
        """
          smem[t].x[0] = in[2];
          out[0] = arch::barrier_or(in[0]);
          out[1] = arch::barrier_or(in[1]);
          out[2] = smem[(t + 33) % THREADS].x[0];  // the votes are barriers too
        """,
        _votes,
        _voted,
    ),
    Case(
        "begin_part_copy commit_copies wait_copies",
        """
          for (int k = 0; k < 4; ++k) smem[2 * t].x[k] = smem[2 * t + 1].x[k] = in[10];
          __syncthreads();  // what was there before is written
          const unsigned int place = 32 * t;
          arch::begin_part_copy(place, in, in[8]);
          arch::commit_copies();
          arch::begin_part_copy(place + 16, in + 4, 16);
          arch::commit_copies();
          const int from = (t + 37) % THREADS;
          arch::wait_copies<1>();
          __syncthreads();  // others see the first copies
          for (int k = 0; k < 4; ++k) out[k] = smem[2 * from].x[k];
          arch::wait_copies<0>();
          __syncthreads();  // others see the second copies
          for (int k = 0; k < 4; ++k) out[4 + k] = smem[2 * from + 1].x[k];
        """,
        _part_copies,
        _parts_copied,
        since=(8, 0),
    ),
    _pair("floats_to_halves", np.dtype(np.float16)),
    _pair("floats_to_bfloats", np.dtype(ml_dtypes.bfloat16)),
    Case(
        "shuffle",
        "out[0] = arch::shuffle(in[0], in[1] % 32);",
        lambda: blocks_of(2, 3),
        lambda x: x[np.arange(len(x)) // 32 * 32 + x[:, 1] % 32, :1],
    ),
    Case(
        "any_lane ballot",
        "out[0] = arch::any_lane(in[0]);\nout[1] = arch::ballot(in[0]);",
        _votes,
        lambda x: np.stack(
            [
                np.repeat((x[:, 0].reshape(-1, 32) != 0).any(1), 32),
                np.repeat(((x[:, 0].reshape(-1, 32) != 0) @ 2.0 ** np.arange(32)), 32),
            ],
            1,
        ).astype(np.uint32),
    ),
    Case(
        "add add_pair",
        """
          for (int n = 0; n < 4; ++n) out[n] = in[n];
          arch::add(out, in[4]);
          arch::add(out, in[5]);
          arch::add_pair(out + 2, in[6], in[7]);
        """,
        lambda: blocks_of(8, 2, np.int16).astype(np.float32),  # whose sums are exact
        lambda x: np.stack(
            [x[:, 0] + x[:, 4] + x[:, 5], x[:, 1], x[:, 2] + x[:, 6], x[:, 3] + x[:, 7]], 1
        ),
    ),
]
