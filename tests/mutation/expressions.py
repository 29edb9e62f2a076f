"""Generated code of masks and scores, and what it calls, run on the emulator against NumPy.

The kernels of tests/mutation/problems.py use a few masks and scores. Here every operation of an
expression is compiled, and the functions behind it get the numbers at the ends of their types.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cuda_on_cpu import CORNERS
from cuda_on_cpu import POSITIONS as SITE
from emulator import build
from emulator.machine import Machine
from expressions import by_numpy, exactly, tile_symbols

from cupyflash import lookup
from cupyflash.expr import (
    absolute,
    clip,
    cos,
    erf,
    exp,
    exp2,
    floor,
    len_k,
    len_q,
    log,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)
from cupyflash.expr.bind import Alignment, Axis, aligned, bind
from cupyflash.expr.cuda import generate
from cupyflash.expr.cuda_functions import Functions, Generated
from cupyflash.expr.derivative import derivative
from cupyflash.expr.functions import POSITIONS, SCORE
from cupyflash.expr.interval import PARTIAL, tile_class
from cupyflash.expr.nodes import Expr, convert
from cupyflash.gpu import params, source, strides
from cupyflash.gpu.kernels.simt import FORWARD
from cupyflash.gpu.kernels.spec import Tiles
from cupyflash.gpu.specialisation import Specialisation
from cupyflash.masks import flat_sizes
from cupyflash.reference.spec.naive import Sizes

Array = np.ndarray[Any, Any]
Read = Callable[[str], str]
Make = Callable[..., Generated]

HEADERS = ("common/params.cuh", "common/tile.cuh", "common/expression.cuh")
B, H, I, J = POSITIONS
SIZES = Sizes((2,), 2, 40, 50)
TILES = ((0, 0, 0, 8, 0, 8), (1, 1, 3, 20, 7, 30), (0, 1, 30, 10, 40, 10), (1, 0, 2, 2, 30, 20))

_RNG = np.random.default_rng(0)
_INTS = {
    name: np.resize(np.array([3, -1, 4, 9, -5], np.int64).astype(name), 50)[::-1]
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}
_FLOATS = {
    kind: _RNG.standard_normal((40, 50)).astype(kind)
    for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
}
_COLUMN = _RNG.standard_normal((1, 40, 1)).astype(np.float32)
_NANS = np.array([0.5, -2.0, np.nan, np.inf, -np.inf, 0.25], np.float16)
_BITS = np.asarray(_RNG.random((2, 40, 50)) < 0.5)
_BITS[:, :10, 10:30] = False
_BITS[:, 20:, 5:45] = True
_WIDE = np.asarray(_RNG.integers(-9, 9, (40, 50)))
_LARGE = np.ones((40, 50), np.float64)
_MANY = np.ones(1025, np.int32)  # one element more than is looked at
_BYTES = (np.arange(50, dtype=np.uint8) % 3).view(np.bool_)  # 2 is true as well

_UNSEEN = lookup(_WIDE)[clip(3 * I - J, 0, 39), J]  # of more elements than are looked at

MASKS: dict[str, Expr] = {
    "causal": I + len_k - len_q >= J,
    "division": (I - J) // 7 - (J - I) % -5 > 1,
    "of negative numbers": ((J - 30) // -4 <= I % 3) | ((I - 25) % 7 < J // -9),
    "equal": ((I + 2 * J) % 3 == 1) ^ (I * J != 6),
    "counted conditions": (I > J) + (J > 5) * 2 >= H + 1,
    "not": ~((I - J < -3) & (J >= 5)),
    "extremes": minimum(I, J - 4) + maximum(-I, J) - absolute(I - J) < absolute(J - 30),
    "products": (I - 20) * (J - 25) > -40,
    "chosen": where((I < J) & (J < 30), I - 5, where(I > 20, J, 3 * I)) > 11,
    "chosen conditions": where(J > 3, I > 10, False) | where(I == 4, True, J == 9),
    "by head and batch": (I + H * 3 - B >= J) & (len_q > I + B),
    "bits": lookup(_BITS)[B, I, J],
    "other bits": lookup(_BYTES)[J] & ~lookup(_BITS)[1, minimum(J, 39), I],
    "one row of bits": lookup(_BITS[:1, :1])[B * 0, I * 0, J],
    "two axes": lookup(_WIDE)[I, J] - lookup(_WIDE)[clip(J - 3, 0, 39), clip(I, 2, 49)] > 2,
    "backwards": lookup(_WIDE[::-1, ::-2])[I, J // 2] > 0,
    "as many as are looked at": lookup(_MANY)[clip(J * 200 + I, 0, 1023)] > 0,
    "one too many": lookup(_MANY)[clip(J * 200 + I, 0, 1024)] > 0,
    "one bit too many": lookup(_MANY > 0)[clip(J * 200 + I, 0, 1024)],
    **{
        f"ends of 64 bits {n}": x
        for n, x in enumerate(
            [
                _UNSEEN * 2 + 5 > -30,
                _UNSEEN + 5 > -30,
                10 - _UNSEEN > -30,
                -_UNSEEN > -30,
                _UNSEEN - 5 > -30,
            ]
        )
    },
    "negated": -J > -7,
    "absolute of one number": absolute(B * 5 - H * 3 - 1) * 10 < J,
    "too many to look at": _UNSEEN > -20,
    "too many floats": lookup(_LARGE)[clip(3 * I - J, 0, 39), J] > 0,
    **{name: (lookup(array)[J] > 3) | (lookup(array)[I] + 1 == 5) for name, array in _INTS.items()},
    **{
        f"reals {np.dtype(kind)}": lookup(array)[I, J] * 0.1 + J * 0.3 < lookup(array)[I, 3] + 4.0
        for kind, array in _FLOATS.items()
    },
    "floor": floor(I / 3.0) + floor(J * -0.4) >= J // 3 - 9,
    "NaN": maximum(lookup(_NANS)[J % 6], 0.25) >= minimum(lookup(_NANS)[I % 6], 0.5),
    "arithmetic": absolute(I * 0.7 - J / (I + 1.5)) - (-(J * 0.1)) <= 9.5,
    "functions": exp(I * -0.1) + tanh(J * 0.2 - 3) > log(J * 1.0 + 1.0) * 0.3,
    "to float": (I + J) * 1.0 == J + 7.0,
    "shifts": (((I - J) >> (J % 5)) << (I % 3)) + ((I - J) >> (J + 50)) < (J >> 1) - 4,
    "roots": sqrt(I - 3) * 2.0 < sqrt(J + 0.5),
    "infinite": where(I > 3, float("-inf"), J * 1.0) < where(J > 30, float("nan"), 5.5),
    "huge": (I + 2**40) * (J + 2**18) // 2**40 - 2**62 // 2**60 > 2**18 + 20,
}
# Where more elements lie below a tile than kernels look at.
UNKNOWN = {
    "one too many": TILES[:1],
    "one bit too many": TILES[:1],
    **{f"ends of 64 bits {n}": TILES[1:2] for n in range(5)},
    "too many to look at": TILES[1:2],
    "too many floats": TILES[1:2],
}
AXES = (Axis(H, "heads"), Axis(I, "len_q"), Axis(J, "len_k"))
SCORES: dict[str, Expr] = {
    "softcap": 3.0 * tanh(SCORE / 3.0),
    "alibi": SCORE - 0.25 * absolute(I + len_k - len_q - J),
    "all": where(SCORE > 0.5, exp(-SCORE), log(maximum(SCORE * SCORE, 0.125))),
    "hidden": where(J % 3 == 0, float("-inf"), SCORE),
    "bias": SCORE * lookup(_FLOATS[np.float16])[I, J] + lookup(_FLOATS[np.float64])[I, J],
    "broadcast": SCORE + aligned(Alignment(_COLUMN, "bias", AXES)),
    "compared": where(minimum(SCORE, 0.2) >= SCORE * 3.0 + 0.1, SCORE + 1.0, -SCORE / 2.5),
    "waves": sin(erf(sqrt(1.5 + SCORE))) * (2.0 + cos(I * 0.125)),  # no sum that may cancel
    "powers": (exp2(SCORE) + 0.25) ** (I * 0.125) + exp2(SCORE) * sigmoid(SCORE * 3.0),
    "floors": SCORE + floor(SCORE * 10.0) * 0.125 + absolute(SCORE - 0.5),
}


def tiles_of() -> Tiles:
    """Return what a kernel of one warp needs to be told."""
    return Tiles(block_q=16, block_kv=16, threads=32, shared_memory=0)


class Check:
    """Compiles a text, runs it, and compares what it writes.

    Attributes
    ----------
    name : str
        What is checked.
    """

    name = "check"

    def compose(self, read: Read) -> str:
        """Return the complete text, of these files."""
        raise AssertionError("a part of every check")

    def judge(self, machine: Machine) -> str | None:
        """Run a compiled text; return what is wrong, or None."""
        raise AssertionError("a part of every check")


def _text(
    read: Read, dtype: str, sizes: tuple[int, int, int], rest: str, num_given: int = 0
) -> str:
    has = dict.fromkeys(("has_mask", "has_score", "has_dscore"), True)
    functions = Functions("", *sizes, **has, num_given=num_given)
    special = Specialisation(FORWARD, dtype, 8, 8, tiles_of(), functions=functions)
    prelude = source.prelude(special) + "#define FLUSH_SUBNORMALS false\n"
    flat = source.flatten_with(HEADERS, lambda path: build._with_lines(read(path), path))
    return build.complete(f'{prelude}{flat}#line 1 "check.cu"\n{rest}')


_KERNEL = """
struct Checks {{
  const Params* params;
  const char* given;
  char* out;
  char* more;
}};
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Checks c) {{
  const int t = threadIdx.x;
  {body}
}}
"""
_MASK = """
  if (blockIdx.x == {n}) {{
    for (int n = t; n < {sites}; n += THREADS) {{
      reinterpret_cast<short*>(c.out)[{n} * {sites} + n] =
          n{n}::mask_allows(c.params[{n}], sites[n]);
    }}
    for (int n = 0; n < {boxes}; ++n) {{
      reinterpret_cast<short*>(c.more)[({n} * {boxes} + n) * THREADS + t] =
          n{n}::tile_class(c.params[{n}], boxes[n]);
    }}
  }}
"""
_SCORE = """
  if (blockIdx.x == {n}) {{
    for (int n = t; n < {sites}; n += THREADS) {{
      const accum_t score = scores[n];
      const HeadConstants given = n{n}::score_head_constants(c.params[{n}], sites[n]);
      changed[{n} * {sites} + n] = n{n}::score_mod(c.params[{n}], given, score, sites[n]);
      slopes[{n} * {sites} + n] = {slope};
    }}
  }}
"""


def _sites() -> Array:
    rows = []
    for where_ in TILES:
        symbols, _ = tile_symbols(SIZES, where_)
        shape = where_[3], where_[5]
        columns = [np.broadcast_to(np.asarray(symbols[x], np.int64), shape) for x in SITE]
        i, j = columns[SITE.index("i")], columns[SITE.index("j")]
        columns.append((i % 3) | (j % 5) << 32)  # step_i, step_j: any part of the place will do
        rows.append(np.stack(columns, axis=-1).reshape(-1, len(columns)))
    return np.ascontiguousarray(np.concatenate(rows))


def _boxes() -> Array:
    corners = [tile_symbols(SIZES, where_)[1] for where_ in TILES]
    return np.array([[each[name] for name in CORNERS] for each in corners], np.int64)


class _Generated(Check):
    """What is common to masks and scores: functions in namespaces, and their numbers."""

    def __init__(self, made: list[Generated], dtype: str) -> None:
        self.made, self.dtype = made, dtype
        counts = [[len(x) for x in (each.ints, each.floats, each.arrays)] for each in made]
        self.counts: Any = tuple(max(1, *column) for column in zip(*counts, strict=True))
        layout = params.params(*self.counts)
        packed = [
            layout.pack({
                "ints": each.ints,
                "floats": each.floats,
                "tables": [
                    strides.table(x)._replace(data=x.__array_interface__["data"][0])
                    for x in each.arrays
                ],
            })
            for each in made
        ]  # fmt: skip
        self.params = np.frombuffer(b"".join(packed), np.uint8).copy()

    def functions(self) -> str:
        return "".join(
            f"namespace n{n} {{\n{each.functions.source}}}\n" for n, each in enumerate(self.made)
        )

    def launch(self, machine: Machine, given: Array, *outs: Array) -> None:
        places = [x.ctypes.data for x in (self.params, given, *outs)]
        machine.launch(len(self.made), bytearray(struct.pack("=4Q", *places)))


class MaskCheck(_Generated):
    """Masks and tile classes, pair by pair and tile by tile."""

    name = "masks"

    def __init__(self, make: Make = generate) -> None:
        self.roots = {name: bind(x, flat_sizes(SIZES)) for name, x in MASKS.items()}
        self.classes = {name: tile_class(x) for name, x in self.roots.items()}
        made = [make(x, self.classes[name]) for name, x in self.roots.items()]
        super().__init__(made, "float32")
        self.sites, self.boxes = _sites(), _boxes()
        self.wanted = np.concatenate(
            [by_numpy(x, SIZES, each).reshape(-1) for x in self.roots.values() for each in TILES]
        )
        self.wanted_classes = np.array(
            [
                PARTIAL if name in UNKNOWN and each in UNKNOWN[name] else exactly(x, SIZES, each)
                for name, x in self.classes.items()
                for each in TILES
            ]
        )

    def compose(self, read: Read) -> str:
        body = (
            "const Site* const sites = reinterpret_cast<const Site*>(c.given);\n"
            "  const TileBox* const boxes =\n"
            f"      reinterpret_cast<const TileBox*>(c.given + {self.sites.nbytes});\n"
        )
        counts = {"sites": len(self.sites), "boxes": len(self.boxes)}
        body += "".join(_MASK.format(n=n, **counts) for n in range(len(self.made)))
        rest = self.functions() + _KERNEL.format(body=body)
        return _text(read, self.dtype, self.counts, rest)

    def judge(self, machine: Machine) -> str | None:
        given = np.concatenate([self.sites.reshape(-1), self.boxes.reshape(-1)])
        found = np.full(self.wanted.shape, 7, np.int16)
        classes = np.full((len(self.wanted_classes), 32), 7, np.int16)
        self.launch(machine, given, found, classes)
        if not np.array_equal(found, self.wanted):
            n = int(np.argmax(found != self.wanted)) // len(self.sites)
            return f"mask {list(self.roots)[n]!r}"
        if not (classes == self.wanted_classes[:, None]).all():
            n = int(np.argmax((classes != self.wanted_classes[:, None]).any(1))) // len(TILES)
            return f"tile class of {list(self.roots)[n]!r}"
        return None


class ScoreCheck(_Generated):
    """Changed scores and their slopes."""

    def __init__(self, dtype: str, make: Make = generate) -> None:
        self.name = f"scores in {dtype}"
        self.kind = np.dtype(dtype)
        self.roots = {name: bind(x, flat_sizes(SIZES)) for name, x in SCORES.items()}
        self.slopes = {name: convert(derivative(x), "float") for name, x in self.roots.items()}
        made = [
            make(changed=x, slope=self.slopes[name], short=n % 2 == 0)
            for n, (name, x) in enumerate(self.roots.items())
        ]
        super().__init__(made, dtype)
        self.sites = _sites()
        self.scores = np.random.default_rng(1).standard_normal(len(self.sites)).astype(self.kind)
        self.scores[5] = np.nan
        self.wanted = [self._by_numpy(x) for x in (self.roots, self.slopes)]

    def _by_numpy(self, roots: dict[str, Expr]) -> Array:
        rows, first = [], 0
        pieces = []
        for where_ in TILES:
            size = where_[3] * where_[5]
            pieces.append(self.scores[first : first + size].reshape(where_[3], where_[5]))
            first += size
        for root in roots.values():
            for where_, score in zip(TILES, pieces, strict=True):
                rows.append(by_numpy(root, SIZES, where_, score, self.kind.type).reshape(-1))
        return np.concatenate(rows)

    def compose(self, read: Read) -> str:
        body = (
            "const Site* const sites = reinterpret_cast<const Site*>(c.given);\n"
            "  const accum_t* const scores =\n"
            f"      reinterpret_cast<const accum_t*>(c.given + {self.sites.nbytes});\n"
            "  accum_t* const changed = reinterpret_cast<accum_t*>(c.out);\n"
            "  accum_t* const slopes = reinterpret_cast<accum_t*>(c.more);\n"
        )
        for n, each in enumerate(self.made):
            read_slope = f"n{n}::score_mod_derivative(c.params[{n}], given, score, sites[n])"
            slope = read_slope if each.functions.has_dscore else "1"
            body += _SCORE.format(n=n, sites=len(self.sites), slope=slope)
        rest = self.functions() + _KERNEL.format(body=body)
        num_given = max(each.functions.num_given for each in self.made)
        return _text(read, self.dtype, self.counts, rest, num_given)

    def judge(self, machine: Machine) -> str | None:
        given = np.frombuffer(self.sites.tobytes() + self.scores.tobytes(), np.uint8).copy()
        found = [np.zeros(x.shape, self.kind) for x in self.wanted]
        self.launch(machine, given, *found)
        for a, b in zip(found, self.wanted, strict=True):
            near = np.isclose(a, b, rtol=8 * np.finfo(self.kind).eps, atol=0, equal_nan=True)
            if not near.all():
                return f"score {list(self.roots)[int(np.argmin(near)) // len(self.sites)]!r}"
        return None
