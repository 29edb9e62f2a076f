"""Calls of every kind, drawn around the sizes at which another kernel serves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from strategies import DTYPES

import cupyflash
from cupyflash import masks, scores
from cupyflash.costs.explanation.occupancy import LIMITS
from cupyflash.problem import cached, coded, codes, validate
from cupyflash.problem.codes import CacheCodes
from cupyflash.problem.options import Options

KINDS = ("dense", "packed", "cached", "codes")
CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
LEN_Q = (0, 1, 1, 2, 3, 16, 65, 511, 512, 600)
LEN_K = (0, 1, 64, 511, 512, 600, 1100)
HEADS = (64, 64, 128, 16, 40, 3, 96, 256)
MASKS = (None, None, masks.causal(), masks.window(100, 3), masks.causal() & masks.window(64, 0))
SCORES = (None, None, None, scores.softcap(30.0))
WORDS = ("q_scale", "k_scale", "v_scale", "qkv_dtype", "out_dtype", "kv_dtype", "shared")


def properties(capability):
    """Return what CUDA would say of a GPU of this compute capability."""
    has = LIMITS[capability]
    return {
        "name": b"a GPU", "major": capability[0], "minor": capability[1],
        "multiProcessorCount": 20, "sharedMemPerBlockOptin": has.shared_memory - has.reserved,
    }  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call of a public function on arrays of NumPy or of a device."""

    kind: str
    arrays: tuple[Any, ...]  # q, k, v, and what follows them by position
    options: dict[str, Any]

    def __repr__(self):
        arrays = [f"{x.dtype}{list(x.shape)}{list(x.strides)}" for x in self.arrays]
        return f"{self.kind}: {', '.join(arrays)}, {self.options}"

    def _repr_pretty_(self, printer, _):
        printer.text(repr(self))  # hypothesis would print every element

    def on(self, cupy):
        """Return the call on a device, whose arrays lie in memory as these do."""

        def copy(x):
            if not isinstance(x, np.ndarray):
                return x
            order = sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], x.shape[axis] == 1))
            held = cupy.asarray(np.ascontiguousarray(x.transpose(order)))
            return held.transpose(*(order.index(axis) for axis in range(x.ndim)))

        options = {name: copy(x) for name, x in self.options.items()}
        return Call(self.kind, tuple(map(copy, self.arrays)), options)

    def run(self, **more):
        functions = {"packed": cupyflash.attention_varlen, "cached": cupyflash.attention_cached}
        function = functions.get(self.kind, cupyflash.attention)
        return function(*self.arrays, **self.options, **more)

    def plan(self):
        if self.kind == "cached":
            return cupyflash.plan_cached(*self.arrays, **self.options)
        names = "q", "k", "v", "offsets_q", "offsets_k"
        return cupyflash.plan(**dict(zip(names, self.arrays, strict=False)), **self.options)

    def workspace_size(self):
        if self.kind == "cached":
            names = ("table", "offsets_q", "k_scale", "v_scale", "kv_dtype", "shared")
            options = {name: x for name, x in self.options.items() if name in names}
            return cupyflash.workspace_size_cached(*self.arrays[:3], **options)
        names = "q", "k", "v", "offsets_q", "offsets_k"
        arrays = dict(zip(names, self.arrays, strict=False))
        return cupyflash.workspace_size(**arrays, **self.options)

    def validated(self):
        """Return the call as the package has it after its checks."""
        more = {name: self.options[name] for name in WORDS if name in self.options}
        table, offsets = (self.options.get(name) for name in ("table", "offsets_q"))
        rest = {"table", "offsets_q", *more}
        options = Options(**{name: x for name, x in self.options.items() if name not in rest})
        if self.kind == "packed":
            return validate.varlen_call(*self.arrays, None, options)
        if self.kind == "cached":
            shared = more.pop("shared", 0)
            names = ("k_scale", "v_scale", "kv_dtype")
            given = CacheCodes(*(more.get(name) for name in names))
            return cached.call(*self.arrays, table, offsets, options, given, shared)
        given = coded.Fp8(**more) if self.kind == "codes" else codes.NONE
        return validate.call(*self.arrays, options, given=given)


def _array(draw, shape, dtype):
    """Return an array of zeros, perhaps with rows outside of heads."""
    if len(shape) < 3 or draw(st.booleans()):
        return np.zeros(shape, dtype)
    *lead, heads, rows, columns = shape
    return np.zeros((*lead, rows, heads, columns), dtype).swapaxes(-3, -2)


def _options(draw, heads):
    options = {"mask": draw(st.sampled_from(MASKS)), "score_mod": draw(st.sampled_from(SCORES))}
    if draw(st.sampled_from([False, False, True])):
        options["sink"] = np.zeros(heads, np.float32)
    return {name: x for name, x in options.items() if x is not None}


@st.composite
def calls(draw, kinds=KINDS):
    """Draw a call of one of these kinds on NumPy arrays, whose elements are zeros."""
    kind, dtype = draw(st.sampled_from(kinds)), np.dtype(draw(st.sampled_from(DTYPES)))
    heads_kv, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 4, 16]))
    heads, d = heads_kv * group, draw(st.sampled_from(HEADS))
    d_v = draw(st.sampled_from([d, d, 64, 72]))
    options = _options(draw, heads)
    if kind == "cached":
        return _over_cache(draw, dtype, (heads, heads_kv), (d, d_v), options)
    if kind != "codes" and dtype == np.float32 and draw(st.booleans()):
        options["precision"] = "tf32x3"
    if kind == "packed":
        lengths = st.lists(
            st.tuples(st.sampled_from(LEN_Q), st.sampled_from(LEN_K)), min_size=1, max_size=3
        )
        kinds = st.sampled_from([np.int64, np.int32])
        offsets = [
            np.cumsum([0, *each]).astype(draw(kinds)) for each in zip(*draw(lengths), strict=True)
        ]
        shapes = (heads, offsets[0][-1], d), *((heads_kv, offsets[1][-1], n) for n in (d, d_v))
        arrays = [_array(draw, tuple(map(int, shape)), dtype) for shape in shapes]
        return Call(kind, (*arrays, *offsets), options)
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    len_q, len_k = draw(st.sampled_from(LEN_Q)), draw(st.sampled_from(LEN_K))
    shapes = (*lead, heads, len_q, d), (*lead, heads_kv, len_k, d), (*lead, heads_kv, len_k, d_v)
    if kind == "dense":
        if draw(st.sampled_from([False, False, True])):
            options |= {"dropout": 0.5, "seed": 1}
        return Call(kind, tuple(_array(draw, shape, dtype) for shape in shapes), options)
    for name, shape in zip("qkv", shapes, strict=True):
        options[f"{name}_scale"] = np.ones((*shape[:-1], 1), np.float32)
    options["qkv_dtype"] = draw(st.sampled_from(coded.FORMS))
    options["out_dtype"] = draw(st.sampled_from(coded.RESULTS))
    return Call(kind, tuple(_array(draw, shape, np.uint8) for shape in shapes), options)


def _over_cache(draw, dtype, heads, columns, options):
    batch, room = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([64, 600, 1024]))
    page = draw(st.sampled_from([None, 16, 64, 5]))
    shared = draw(st.sampled_from([0, 0, 512])) if room >= 512 else 0
    lead, rows = (batch, room)
    if page is not None:
        each = -(-room // page)
        lead, rows = batch * each, page
        table = np.arange(lead, dtype=np.int32).reshape(batch, each)
        table[:, : -(-shared // page)] = table[0, : -(-shared // page)]
        options["table"] = table
    codes = draw(st.sampled_from([None, None, "int8"]))
    held = dtype if codes is None or dtype.itemsize == 8 else np.dtype(np.int8)
    made = [_array(draw, (lead, heads[1], rows, n), held) for n in columns]
    if held != dtype:
        for name, x in zip("kv", made, strict=True):
            options[f"{name}_scale"] = np.ones((*x.shape[:3], 1), np.float32)
        options["kv_dtype"] = codes
    lengths = np.full(batch, draw(st.sampled_from([room, max(shared, 1)])), np.int32)
    if draw(st.sampled_from([False, False, True])):
        of_entries = [draw(st.sampled_from([0, 1, 3, 70, 600])) for _ in range(batch)]
        offsets = np.cumsum([0, *of_entries])
        options["offsets_q"] = offsets
        q = _array(draw, (heads[0], int(offsets[-1]), columns[0]), dtype)
    else:
        len_q = draw(st.sampled_from([1, 1, 2, 70, 600]))
        q = _array(draw, (batch, heads[0], len_q, columns[0]), dtype)
        options |= {"shared": shared} if shared else {}
    return Call("cached", (q, *made, lengths), options)
