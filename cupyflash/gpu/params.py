"""A kernel's parameters at run time: the twin of kernels_cu/common/params.cuh, field by field."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import DTYPES
from ..arrays.reports import CHANGED_WORDS

MAX_LEAD = 4  # leading axes of a launch
MAX_AXES = 8  # axes of a look-up
MAX_PARTS = 16  # operands of one launch of combine
MAX_FACTOR = 36  # order of the small matrix of hadamard
MAX_SUMMED = 16  # arrays of one launch of checksum
MAX_GRADIENTS = 5
REPORTS = CHANGED_WORDS  # of its reports
MAX_BYTES = 4096  # parameters that every driver takes

# Element kinds, as KINDS in reference/cpu/tables.py.
KINDS = {
    name: number
    for number, name in enumerate("bool int8 int16 int32 int64 uint8 uint16 uint32".split())
}
KINDS |= {dtype.name: dtype.kind for dtype in DTYPES.values()}


class Operand(NamedTuple):
    """An array (lead..., head, row, column) in place; strides count its elements."""

    data: int = 0
    lead: tuple[int, ...] = (0,) * MAX_LEAD
    head: int = 0
    row: int = 0
    col: int = 0


class Table(NamedTuple):
    """An array that masks and scores read; strides count bytes."""

    data: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


OPERAND = [
    ("data", "Q", 1),
    ("lead", "q", MAX_LEAD),
    ("head", "q", 1),
    ("row", "q", 1),
    ("col", "q", 1),
]
TABLE = [
    ("data", "Q", 1),
    ("shape", "q", MAX_AXES), ("strides", "q", MAX_AXES),
]  # fmt: skip


class Summed(NamedTuple):
    """An array whose bytes are summed; strides count bytes."""

    data: int
    begin: int
    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    end: int
    name: int


# (name, type, count): a letter of `struct`, or the fields of a struct.
Fields = list[tuple[str, Any, int]]
_FIXED: Fields = [
    *(
        (name, OPERAND, 1)
        for name in (
            "q k v out d_out dq dk dv dbias lse dlse delta dq_accum k_scale v_scale q_scale "
            "out_before lse_before".split()
        )
    ),
    *((name, "Q", 1) for name in "sink dsink offsets_q offsets_k seed_gmem tiles_visited".split()),
    ("batch", "q", 1),
    ("lead_size", "q", MAX_LEAD),
    ("own_size", "q", MAX_LEAD),
    *(
        (name, "q", 1)
        for name in "len_q len_k total_q total_k bias_len_q bias_len_k blocks".split()
    ),
    ("seed", "Q", 1),
    ("drop_below", "Q", 1),
    ("keep_scale", "d", 1),
    ("scale", "d", 1),
    *((name, "i", 1) for name in "heads heads_kv group bias_heads".split()),
    *((f"kind_{name}", "i", 1) for name in "sink dsink dq dk dv dbias".split()),
    *((name, "Q", 1) for name in "lengths table workspace".split()),
    *((name, "q", 1) for name in "length_step table_batch table_step pages k_page v_page".split()),
    *((name, "q", 1) for name in "k_scale_page v_scale_page".split()),
    *((name, "i", 1) for name in "tasks slots few_rows tma_rows".split()),
    *(
        (name, "i", 1)
        for name in "page_size kind_lengths kind_table held shared shared_slots".split()
    ),
    ("bias", OPERAND, 1),
]
# What follows them in a forward with tangents, behind the constants and tables.
_TANGENTS: Fields = [
    *((name, OPERAND, 1) for name in "tq tk tv tout tlse".split()),
    ("tsink", "Q", 1),
    *((name, "i", 1) for name in "kind_tsink unused".split()),
]
# What follows these in a backward with tangents.
_SECOND: Fields = [(name, OPERAND, 1) for name in "tdo tdlse tdelta tout_rounded".split()]
# What follows the constants and tables of a reduction.
_REDUCTION: Fields = [
    ("found", OPERAND, 1),
    ("keys", "Q", 1),
    *(
        (name, "q", 1)
        for name in "first_query end_query block_q block_k keys_of_owner owners_k".split()
    ),
    *((name, "i", 1) for name in "of by".split()),
]
SUMMED: Fields = [
    *((name, "Q" if name == "data" else "q", 1) for name in "data begin size".split()),
    *((name, "q", MAX_AXES) for name in "shape strides".split()),
    *((name, "q", 1) for name in "end name".split()),
]
# Kernel with a struct of parameters -> the fields of it: that of rope is RopeParams.
ROWWISE: dict[str, Fields] = {
    "combine": [
        ("outs", OPERAND, MAX_PARTS),
        ("lses", OPERAND, MAX_PARTS),
        ("out", OPERAND, 1),
        ("lse", OPERAND, 1),
        ("lead_size", "q", MAX_LEAD),
        *((name, "q", 1) for name in "rows columns heads".split()),
        ("kinds", "i", MAX_PARTS),
        ("kind_out", "i", 1),
        ("parts", "i", 1),
    ],
    "append": [
        *(
            (name, OPERAND, 1)
            for name in (
                "k_new v_new q k v out cos sin lengths table positions k_scale v_scale".split()
            )
        ),
        ("offsets", "Q", 1),
        *(
            (name, "q", 1)
            for name in "batch rows length capacity pages page_size rotary_rows".split()
        ),
        *((name, "i", 1) for name in "heads heads_kv columns columns_v pairs interleaved".split()),
        *((name, "i", 1) for name in "kind_lengths kind_table kind_positions kind_angles".split()),
    ],
    "rope": [
        *((name, OPERAND, 1) for name in "x out cos sin positions".split()),
        *((name, "q", 1) for name in "batch rows rotary_rows".split()),
        *((name, "i", 1) for name in "heads columns pairs interleaved inverse".split()),
        *((name, "i", 1) for name in "kind_positions kind_angles unused".split()),
    ],
    "quantize": [
        *((name, OPERAND, 1) for name in "x codes scale".split()),
        ("lead_size", "q", MAX_LEAD),
        *((name, "q", 1) for name in "rows groups columns".split()),
        *((name, "i", 1) for name in "lanes format sharing unused".split()),
    ],
    "hadamard": [
        *((name, OPERAND, 1) for name in "x out".split()),
        ("lead_size", "q", MAX_LEAD),
        ("rows", "q", 1),
        ("seed", "Q", 1),
        ("factor", "Q", MAX_FACTOR),
        ("scale", "d", 1),
        *((name, "i", 1) for name in "inverse unused".split()),
    ],
    "checksum": [
        ("arrays", SUMMED, MAX_SUMMED),
        ("gradients", "Q", MAX_GRADIENTS),
        ("gradient_bytes", "q", MAX_GRADIENTS),
        *((name, "Q", 1) for name in "kept report turn".split()),
        ("first_block", "q", 1),
    ],
    "sums": [
        *((name, OPERAND, MAX_GRADIENTS) for name in ("parts", "gradients")),
        ("lead_sizes", "q", MAX_GRADIENTS * MAX_LEAD),
        *((name, "q", MAX_GRADIENTS) for name in "heads rows columns widths kinds ends".split()),
    ],
    "offsets": [
        *((name, "Q", 2) for name in "inputs results reports".split()),
        *((name, "q", 2) for name in "steps totals limits".split()),
        ("kinds", "i", 2),
        *((name, "i", 1) for name in "arrays count blocks limited".split()),
    ],
}


class Layout:
    """The fields of one struct: their NumPy type, and a packer for its bytes."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.dtype = _dtype(fields)
        self._fields: Mapping[str, Any] = self.dtype.fields or {}
        self._struct = struct.Struct("=" + _format(fields))
        self.size = self._struct.size
        # For every field: its name, whether it has several entries, whether these are structs, and
        # its default numbers.
        self._rows = [
            (name, count > 1 or _is_array(name), not isinstance(kind, str), (0,) * _width([field]))
            for field in fields
            for name, kind, count in [field]
        ]
        self._names = frozenset(name for name, _, _ in fields)

    def place(self, name: str) -> int:
        """Return the offset of a field, or of one of its entries as in "table 3".

        Raises
        ------
        KeyError
            If there is no such field.
        """
        field, _, entry = name.partition(" ")
        kind, offset = self._fields[f"{field}s" if entry else field][:2]
        return int(offset + int(entry or 0) * kind.base.itemsize)

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Return the bytes of the struct. Fields that `values` does not name are zero.

        Raises
        ------
        KeyError
            If a name is not a field.
        ValueError
            If there are more values than a field has entries.
        """
        if not values.keys() <= self._names:
            raise KeyError(f"no field {sorted(values.keys() - self._names)}")
        numbers: list[Any] = []
        for name, several, structs, zeros in self._rows:
            value = values.get(name)
            if value is None:
                numbers += zeros
                continue
            start = len(numbers)
            if structs:
                for entry in value if several else (value,):
                    numbers += _numbers(entry)
            elif several:
                numbers += value
            else:
                numbers.append(value)
            missing = len(zeros) - len(numbers) + start
            if missing < 0:
                raise ValueError(f"{name}: got {len(value)} entries, which do not fit")
            numbers += zeros[:missing]
        return self._struct.pack(*numbers)


@functools.lru_cache(maxsize=256)
def params(
    ints: int,
    floats: int,
    tables: int,
    tangents: bool = False,
    second: bool = False,
    reduces: bool = False,
) -> Layout:
    """Return the layout of `Params` for so many constants and tables.

    With `tangents` it is that of `TangentParams`, with `second` that of `SecondParams`, and with
    `reduces` that of `ReduceParams`.
    """
    return Layout([
        *_FIXED,
        ("ints", "q", max(ints, 1)),
        ("floats", "d", max(floats, 1)),
        ("tables", TABLE, max(tables, 1)),
        *(_TANGENTS if tangents else []),
        *(_SECOND if second else []),
        *(_REDUCTION if reduces else []),
    ])  # fmt: skip


@functools.cache
def rowwise(name: str) -> Layout:
    """Return the layout of the parameters of a kernel of `ROWWISE`."""
    return Layout(ROWWISE[name])


def _dtype(fields: Fields) -> np.dtype[Any]:
    parts = []
    for name, kind, count in fields:
        own = np.dtype(kind) if isinstance(kind, str) else _dtype(kind)
        parts.append((name, own) if count == 1 and not _is_array(name) else (name, own, (count,)))
    return np.dtype(parts)


def _is_array(name: str) -> bool:
    return name in ("ints", "floats", "tables")


def _format(fields: Fields) -> str:
    return "".join(
        (kind if isinstance(kind, str) else _format(kind)) * count for _, kind, count in fields
    )


def _width(fields: Fields) -> int:
    """Return how many numbers a struct holds."""
    return sum(
        count if isinstance(kind, str) else count * _width(kind) for _, kind, count in fields
    )


def _numbers(entry: Any) -> tuple[Any, ...]:
    """Return the numbers of a struct, in the order of its fields."""
    if isinstance(entry, Summed):
        data, begin, size, shape, strides, end, name = entry
        return (data, begin, size, *shape, *strides, end, name)
    if isinstance(entry, Operand):
        return (entry.data, *entry.lead, entry.head, entry.row, entry.col)
    return (entry.data, *entry.shape, *entry.strides)
