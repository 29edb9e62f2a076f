"""A kernel under test: how to call it, what it supports, and what its arithmetic is.

Every property calls a kernel through a `Subject`. It copies each call's arrays, with their strides,
into poisoned memory on the host or on a GPU, and checks them afterwards. So every property finds
inputs that change and writes outside outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from cupyflash.problem.call import Gradients
from cupyflash.problem.codes import types_said
from cupyflash.problem.formats import FORMATS
from cupyflash.problem.rotary import Rotary

from .bound import (
    BackwardBound,
    ForwardBound,
    backward_bound,
    backward_bound_varlen,
    forward_bound,
    forward_bound_varlen,
)
from .cases import Problem
from .copies import Copies, HostMemory, Memory
from .features import features_of
from .judge import Judge, NotClaimedError, expect
from .precision import Precision, Rounding

Array = np.ndarray[Any, Any]
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
EmptyRows = Literal["zero", "mean", "nan", "any"]


class Rows(NamedTuple):
    """What a forward call returned.

    Attributes
    ----------
    out : ndarray
        O.
    lse : ndarray or None
        None if the kernel lacks the feature "lse".
    """

    out: Array
    lse: Any


class Angles(NamedTuple):
    """The parts of a `cupyflash.Rotary`.

    Attributes
    ----------
    cos, sin : ndarray of float32, shape (S, R / 2)
        Cosines and sines of each position.
    interleaved : bool
        Whether the columns of a pair are neighbours.
    """

    cos: Array
    sin: Array
    interleaved: bool


class Appended(NamedTuple):
    """The results of a call of append.

    Attributes
    ----------
    k, v : ndarray
        The cache after the call.
    q : ndarray or None
        The rotated queries.
    k_scale, v_scale : ndarray or None
        The scales after the call, of a cache of codes.
    """

    k: Array
    v: Array
    q: Array | None
    k_scale: Array | None = None
    v_scale: Array | None = None


class Call(NamedTuple):
    """A call that a property is about to make.

    Attributes
    ----------
    q, k, v : ndarray
        Queries, keys and values.
    options : dict
        The options by name: mask, scale, bias and so on.
    gradients : bool
        Whether gradients will be asked for.
    """

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    gradients: bool


class Subject(Judge):
    """A kernel, and how to judge it.

    Parameters
    ----------
    forward : callable
        It has the signature of `cupyflash.attention` and returns (out, lse).
    backward : callable, optional
        It has the signature of `cupyflash.attention_backward`.
    varlen, varlen_backward : callable, optional
        They have the signatures of `cupyflash.attention_varlen` and `attention_varlen_backward`.
    combine : callable, optional
        It has the signature of `cupyflash.combine`.
    cached, append, rope : callable, optional
        They have the signatures of `cupyflash.attention_cached`, `append` and `rope`.
    jvp, varlen_jvp, backward_jvp : callable, optional
        They have the signatures of `cupyflash.attention_jvp`, `attention_varlen_jvp` and
        `attention_backward_jvp`.
    features : iterable of str, optional
        What the kernel supports, among `cupyflash.testing.FEATURES`; by default everything.
    precision : Precision or callable, optional
        Its arithmetic, or a function of the dtype. Default: `Precision.of`.
    tiles : tuple of 2 int
        Rows and keys of its tiles.
    float8 : {"float32", "out_dtype", "codes"}
        What it multiplies for codes of float8: see `Precision.of_codes`.
    memory : Memory, optional
        Where its arrays are; by default in host memory.
    empty_rows : {"zero", "mean", "nan", "any"}
        What a row without keys gives: 0, the mean of all values, NaN, or nothing in particular.
    serves : callable, optional
        ``serves(call) -> bool``: whether the kernel serves a `Call`; others are not tried.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        varlen: Callable[..., Any] | None = None,
        varlen_backward: Callable[..., Any] | None = None,
        combine: Callable[..., Any] | None = None,
        cached: Callable[..., Any] | None = None,
        append: Callable[..., Any] | None = None,
        rope: Callable[..., Any] | None = None,
        jvp: Callable[..., Any] | None = None,
        varlen_jvp: Callable[..., Any] | None = None,
        backward_jvp: Callable[..., Any] | None = None,
        features: Iterable[str] | None = None,
        precision: Precision | Callable[[np.dtype[Any]], Precision] | None = None,
        tiles: tuple[int, int] = (64, 64),
        float8: Literal["float32", "out_dtype", "codes"] = "float32",
        memory: Memory | None = None,
        empty_rows: EmptyRows = "zero",
        serves: Callable[[Call], bool] | None = None,
    ) -> None:
        self._serves = serves
        if empty_rows not in get_args(EmptyRows):
            known = ", ".join(get_args(EmptyRows))
            raise ValueError(f"empty_rows: got {empty_rows!r}; expected one of {known}")
        self.empty_rows = empty_rows
        self._forward, self._backward = forward, backward
        self._varlen, self._varlen_backward = varlen, varlen_backward
        self._combine, self._precision = combine, precision
        self._cached, self._append, self._rope = cached, append, rope
        self.jvp, self.varlen_jvp, self.backward_jvp = jvp, varlen_jvp, backward_jvp
        self.tiles, self.memory, self.float8 = tiles, memory or HostMemory(), float8
        super().__init__(features_of(features))
        parts = {"backward": backward, "varlen": varlen, "varlen_backward": varlen_backward,
                 "combine": combine, "cached": cached, "append": append,
                 "rope": rope, "jvp": jvp, "varlen_jvp": varlen_jvp,
                 "backward_jvp": backward_jvp}  # fmt: skip
        self.knows = self.features | {name for name, part in parts.items() if part is not None}

    def precision(self, dtype: Any) -> Precision:
        """Return the arithmetic for a type of q, k and v."""
        dtype = np.dtype(dtype)
        if self._precision is None:
            return Precision.of(dtype)
        if isinstance(self._precision, Precision):
            return dataclasses.replace(self._precision, output=Rounding.to(dtype))
        return self._precision(dtype)

    def float8_precision(self, out_dtype: Any) -> Precision:
        """Return the arithmetic for queries, keys and values of float8."""
        return Precision.of_codes(out_dtype, self.float8)

    # Calls

    def claim(self, call: Call) -> None:
        """Stop if the kernel does not serve a call."""
        if self._serves is not None and not self._serves(call):
            raise NotClaimedError

    def laid(self, array: Array | None) -> Array | None:
        """Return an array as the kernel takes it: contiguous, unless it takes any strides."""
        if array is None or "strides" in self.features:
            return array
        return np.array(array, order="C")

    def copied(self, copies: Copies, options: dict[str, Any]) -> dict[str, Any]:
        """Return options with copies of arrays, and without those that are None."""
        laid = {
            name: self.laid(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
        }
        return copies.options({name: x for name, x in laid.items() if x is not None})

    def result(self, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a result in host memory, of the shape and dtype that it must have."""
        host = self.memory.result(array)
        expect(host.shape == shape, f"{name} has the shape {host.shape}; expected {shape}")
        if dtype is not None:
            expect(host.dtype == dtype, f"{name} has the dtype {host.dtype}; expected {dtype}")
        return host

    def attend(self, q: Array, k: Array, v: Array, *, offsets: Any = None, **options: Any) -> Rows:
        """Run the forward kernel on copies, and check shapes, types and surroundings.

        Of a kernel that gives something else in rows without keys, these rows are made 0 and -inf,
        so that properties are about the others.
        """
        rows = self.attend_as_is(q, k, v, offsets=offsets, **options)
        if self.empty_rows == "zero":
            return rows
        empty = self.rows_without_keys(q, k, v, offsets=offsets, **options)
        out = np.where(empty[..., None], rows.out.dtype.type(0), rows.out)
        return Rows(out, None if rows.lse is None else np.where(empty, -np.inf, rows.lse))

    def rows_without_keys(
        self, q: Array, k: Array, v: Array, *, offsets: Any = None, **options: Any
    ) -> Array:
        """Return which rows see no key and no sink."""
        if not {"mask", "bias", "score_mod"} & options.keys() and k.shape[-2] and offsets is None:
            return np.zeros(out_shape(q, k, v)[:-1], bool)
        return np.isneginf(self.bound(q, k, v, offsets=offsets, **options).lse.exact)

    def attend_as_is(
        self, q: Array, k: Array, v: Array, *, offsets: Any = None, **options: Any
    ) -> Rows:
        """Do the same, with rows without keys as they come."""
        self.claim(Call(q, k, v, options, gradients=False))
        dtype = np.dtype(options.get("out_dtype", q.dtype))
        copies, self.dtype = Copies(self.memory), dtype.name
        arrays = [copies.array(self.laid(x)) for x in (q, k, v)]
        given = self.copied(copies, options)
        function = self._forward if offsets is None else self._varlen
        assert function is not None, "a property that needs it asks for varlen"
        returned = function(*arrays, *(offsets or ()), **given, return_lse=True)
        copies.check()
        expect(isinstance(returned, tuple) and len(returned) == 2, "expected (out, lse)")
        shape = out_shape(q, k, v)
        out = self.result("out", returned[0], shape, dtype)
        if "lse" not in self.features:
            return Rows(out, None)
        return Rows(out, self.result("lse", returned[1], shape[:-1], None))

    def gradients(
        self, do: Array, q: Array, k: Array, v: Array, *,
        dlse: Array | None = None, offsets: Any = None, rows: Rows | None = None, **options: Any,
    ) -> Gradients:  # fmt: skip
        """Run the backward kernel on copies, after the forward unless its `rows` are given."""
        self.claim(Call(q, k, v, options, gradients=True))
        if rows is None:
            rows = self.attend(q, k, v, offsets=offsets, **options)
        if self.empty_rows != "zero":
            empty = self.rows_without_keys(q, k, v, offsets=offsets, **options)
            if empty.any() and self.empty_rows != "mean":
                raise NotClaimedError
            do = np.where(empty[..., None], do.dtype.type(0), do)
            dlse = None if dlse is None else np.where(empty, dlse.dtype.type(0), dlse)
        copies = Copies(self.memory)
        arrays = [copies.array(self.laid(x)) for x in (do, q, k, v, *rows)]
        given = self.copied(copies, options | {"dlse": dlse})
        function = self._backward if offsets is None else self._varlen_backward
        assert function is not None, "a property that needs it asks for a backward"
        returned = [*function(*arrays, *(offsets or ()), **given), None, None][:5]
        copies.check()
        owners = (q, k, v, options.get("bias"), options.get("sink"))
        made: list[Any] = []
        for name, x, owner in zip(GRADIENTS, returned, owners, strict=True):
            if owner is None:
                made.append(None)
                continue
            expect(x is not None, f"{name} is missing")
            made.append(self.result(name, x, owner.shape, owner.dtype))
        return Gradients(*made)

    def attend_problem(self, p: Problem) -> Rows:
        """Run the forward kernel on a problem as it is."""
        return self.attend(p.q, p.k, p.v, offsets=p.offsets, **p.options)

    def gradients_problem(self, p: Problem, rows: Rows | None = None) -> Gradients:
        """Run the backward kernel on a problem as it is."""
        arrays = p.do, p.q, p.k, p.v
        return self.gradients(*arrays, dlse=p.dlse, offsets=p.offsets, rows=rows, **p.options)

    def combine(self, parts: list[Rows]) -> Rows:
        """Join results over parts of the keys."""
        copies = Copies(self.memory)
        assert self._combine is not None, "a property that needs it asks for combine"
        given = [(copies.array(part.out), copies.array(part.lse)) for part in parts]
        out, lse = self._combine(given)
        copies.check()
        return Rows(
            self.result("out", out, parts[0].out.shape, parts[0].out.dtype),
            self.result("lse", lse, parts[0].lse.shape, parts[0].lse.dtype),
        )

    def attend_cached(
        self, q: Array, k: Array, v: Array | int, lengths: Array | int, *,
        table: Array | None = None, offsets: Any = None, **options: Any,
    ) -> Rows:  # fmt: skip
        """Attend to a cache. An integer `v` makes the first `v` columns of the keys the values."""
        copies, self.dtype = Copies(self.memory), q.dtype.name
        given = self.copied(copies, options | {"table": table})
        if offsets is not None:
            given["offsets_q"] = offsets
        queries, keys = (copies.array(self.laid(x)) for x in (q, k))
        values = keys[..., :v] if isinstance(v, int) else copies.array(self.laid(v))
        counted = lengths if isinstance(lengths, int) else copies.array(lengths)
        assert self._cached is not None, "a property that needs it asks for cached"
        returned = self._cached(queries, keys, values, counted, **given, return_lse=True)
        copies.check()
        expect(isinstance(returned, tuple) and len(returned) == 2, "expected (out, lse)")
        form = types_said(options.get("kv_dtype"))[1]
        packed = 1 if form is None else FORMATS[form].packed
        shape = (*q.shape[:-1], v if isinstance(v, int) else v.shape[-1] * packed)
        out = self.result("out", returned[0], shape, q.dtype)
        if "lse" not in self.features:
            return Rows(out, None)
        return Rows(out, self.result("lse", returned[1], shape[:-1], None))

    def append(
        self, k_new: Array, v_new: Array, k: Array, v: Array, lengths: Array, *,
        offsets: Any = None, q: Array | None = None, rotary: Angles | None = None, **options: Any,
    ) -> Appended:  # fmt: skip
        """Write rows to copies of a cache, and check that no memory beside it changes."""
        copies, scales = Copies(self.memory), ("k_scale", "v_scale")
        # Scales that have the strides of the given ones are written.
        written = {name: np.array(self.laid(options.pop(name))) for name in scales
                   if name in options}  # fmt: skip
        given = self.copied(copies, options | {"q": q})
        for name, x in written.items():
            given[name] = copies.array(x, output=True, filled=True)
        if offsets is not None:
            given["offsets"] = offsets
        if rotary is not None:
            given["rotary"] = self._rotary(copies, rotary)
        new = [copies.array(self.laid(x)) for x in (k_new, v_new)]
        laid = [np.array(self.laid(x)) for x in (k, v)]
        held = [copies.array(x, output=True, filled=True) for x in laid]
        assert self._append is not None, "a property that needs it asks for append"
        returned = self._append(*new, *held, copies.array(lengths), **given)
        copies.check()
        after = copies.value(laid[0]), copies.value(laid[1])
        of_codes = {name: copies.value(x) for name, x in written.items()}
        if q is None:
            expect(returned is None, "expected None without q")
            return Appended(*after, None, **of_codes)
        return Appended(*after, self.result("q", returned, q.shape, q.dtype), **of_codes)

    def rope(self, x: Array, positions: Array, rotary: Angles, **options: Any) -> Array:
        """Rotate rows."""
        copies, self.dtype = Copies(self.memory), x.dtype.name
        angles = self._rotary(copies, rotary)
        assert self._rope is not None, "a property that needs it asks for rope"
        returned = self._rope(
            copies.array(self.laid(x)), copies.array(positions), angles, **options
        )
        copies.check()
        return self.result("out", returned, x.shape, x.dtype)

    def _rotary(self, copies: Copies, angles: Angles) -> Rotary:
        cos, sin = (copies.array(self.laid(x)) for x in angles[:2])
        return Rotary(cos, sin, angles.interleaved)

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Call the forward function itself, for properties of its signature."""
        return self._forward(*arguments, **options)

    def call_backward(self, *arguments: Any, **options: Any) -> Any:
        """Call the backward function itself, for properties of its signature."""
        assert self._backward is not None, "a property that needs it asks for a backward"
        return self._backward(*arguments, **options)

    # Bounds

    def bound(
        self, q: Array, k: Array, v: Array, *, offsets: Any = None, **options: Any
    ) -> ForwardBound:
        """Return exact values and bounds of what `attend` returns."""
        options = options | {"precision": self.precision(q.dtype), "block_kv": self.tiles[1]}
        if offsets is None:
            return forward_bound(q, k, v, **options)
        return forward_bound_varlen(q, k, v, *offsets, **options)

    def bound_of_codes(
        self, numbers: tuple[Array, ...], precision: Precision, **options: Any
    ) -> ForwardBound:
        """Return exact values and bounds over the numbers of q, k and v that codes mean."""
        return forward_bound(*numbers, precision=precision, block_kv=self.tiles[1], **options)

    def backward_bound(
        self, do: Array, q: Array, k: Array, v: Array, *, offsets: Any = None, **options: Any
    ) -> BackwardBound:
        """Return exact values and bounds of what `gradients` returns."""
        options = options | {"precision": self.precision(q.dtype), "block_kv": self.tiles[1]}
        if offsets is None:
            return backward_bound(do, q, k, v, **options)
        return backward_bound_varlen(do, q, k, v, *offsets, **options)

    # Judgements of several outputs

    def same_rows(self, a: Rows, b: Rows, bound: Callable[[], ForwardBound]) -> None:
        """Apply ``same`` to out and lse."""
        self.same("out", a.out, b.out, lambda: bound().out.bound)
        if a.lse is not None:
            self.same("lse", a.lse, b.lse, lambda: bound().lse.bound)

    def same_gradients(
        self, a: Gradients, b: Gradients, bound: Callable[[], BackwardBound]
    ) -> None:
        """Apply ``same`` to every gradient that there is on both sides."""
        for name, x, y in zip(GRADIENTS, a, b, strict=True):
            if x is not None and y is not None:
                self.same(name, x, y, functools.partial(_limit, bound, name))

    def near_rows(self, a: Rows, b: Rows, *bounds: ForwardBound) -> None:
        """Apply ``near`` to out and lse."""
        self.near("out", a.out, b.out, *(x.out.bound for x in bounds))
        if a.lse is not None:
            self.near("lse", a.lse, b.lse, *(x.lse.bound for x in bounds))


def _limit(bound: Callable[[], BackwardBound], name: str) -> Any:
    return getattr(bound(), name).bound


def out_shape(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """Return the shape of the output, as by numpy.matmul; packed arrays have it too."""
    if q.ndim == k.ndim == v.ndim == 2:
        return (q.shape[0], v.shape[1])
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    return (*lead, *q.shape[-3:-1], v.shape[-1])
