"""Turns what users pass into a `Call`, or into an error that names the remedy.

Nothing is computed or written here: a call that is refused leaves every array as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..arrays import dtypes
from ..arrays.device_arrays import is_device_array
from ..arrays.interop import array, floats, one_home, outputs
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.nodes import LOOKUPS, Expr, LookupTable, walk
from ..expr.sharded import HeldArray, check_whole
from ..masks import Mask, dense
from ..scores import Score, chain
from . import coded, codes, device_args, scalars
from .call import Array, Call, Gradients, Problem
from .options import DEFAULTS, NAMES, Options
from .rows import DenseRows, PackedRows

MAX_HEAD_SIZE = 512


def head_sizes(q: Any, k: Any, v: Any, most: int = MAX_HEAD_SIZE) -> tuple[int, int]:
    """Return the head sizes of q and k and of v, which are at most `most`."""
    d, d_v = q.shape[-1], v.shape[-1]
    if k.shape[-1] != d:
        raise ArgumentError(
            f"k: got shape {k.shape} with q of shape {q.shape}; expected equal last axes (the "
            f"head size D), but {k.shape[-1]} is not {d}."
        )
    for name, size in (("q", d), ("v", d_v)):
        if not 1 <= size <= most:
            raise ArgumentError(
                f"{name}: its last axis (the head size) has length {size}; expected 1 to {most}."
            )
    if k.shape[-2] != v.shape[-2]:
        raise ArgumentError(
            f"v: got shape {v.shape} with k of shape {k.shape}; expected one value per key, that "
            f"is, equal axes before the last (Lk), but {v.shape[-2]} is not {k.shape[-2]}."
        )
    return d, d_v


def heads_of(q: Any, k: Any, v: Any) -> tuple[int, int]:
    """Return the heads of q, and of k and v; a matrix is one head."""
    heads, heads_kv, heads_v = (x.shape[-3] if len(x.shape) > 2 else 1 for x in (q, k, v))
    if heads_v != heads_kv:
        raise ArgumentError(
            f"v: got shape {v.shape} with k of shape {k.shape}; expected the same heads, that is, "
            f"equal axes third from the end, but {heads_v} is not {heads_kv}."
        )
    if heads != heads_kv and (not heads_kv or heads % heads_kv or not heads):
        remedy = "pass an array of shape (B, L, H, D) as x.swapaxes(-3, -2)"
        if len(q.shape) == 2:
            remedy = "a matrix is one head"
        raise ArgumentError(
            f"q: got shape {q.shape} with k of shape {k.shape}, that is, {heads} query heads for "
            f"{heads_kv} key-value heads; expected a multiple of {heads_kv} (grouped-query "
            f"attention). The head axis is the third from the end: {remedy}."
        )
    return heads, heads_kv


def call(
    q: Any,
    k: Any,
    v: Any,
    options: Options = DEFAULTS,
    in_one_place: bool = True,
    given: coded.Fp8 | codes.NoCodes = codes.NONE,
) -> Call:
    """Validate a call on dense arrays. Those of streamed calls need not be in one place."""
    operands, dtype, encoding = given.operands(q, k, v)
    for name, x in operands.items():
        if x.ndim < 2:
            raise ArgumentError(
                f"{name}: got shape {x.shape}; expected (..., H, L, D), or (L, D) for one head."
            )
    q, k, v = operands.values()
    d, d_v = head_sizes(q, k, v)
    heads, heads_kv = heads_of(q, k, v)
    matrices = (q.ndim == 2, k.ndim == 2, v.ndim == 2)
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    try:
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ArgumentError(
            f"q, k, v: got leading axes {q.shape[:-3]}, {k.shape[:-3]} and {v.shape[:-3]}, which "
            "do not broadcast; expected equal lengths, or 1."
        ) from None
    problem = Problem(
        lead=lead,
        heads=heads,
        heads_kv=heads_kv,
        rows=DenseRows(q.shape[-2], k.shape[-2]),
        d=d,
        d_v=d_v,
        dtype=dtype,
    )
    return with_options(problem, q, k, v, matrices, options, in_one_place, encoding=encoding)


def varlen_call(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    check: bool | None,
    options: Options = DEFAULTS,
    totals: tuple[int, int] | None = None,
    given: coded.Fp8 | codes.NoCodes = codes.NONE,
    longest: tuple[int, int] | None = None,
) -> Call:
    """Validate a call on packed arrays. Offsets in host memory are always checked.

    Those in device memory are read if `check` is True, and checked by kernels if it is None. The
    arrays may have some of the packed rows, of which there are `totals` queries and keys. On a
    GPU, no sequence has more than the `longest` queries and keys.
    """
    if check is not None and not isinstance(check, (bool, np.bool_)):
        raise ArgumentTypeError(f"check: got {check!r}; expected None, True or False.")
    operands, dtype, encoding = given.operands(q, k, v)
    for name, x in operands.items():
        if x.ndim != 3:
            raise ArgumentError(
                f"{name}: got shape {x.shape}; expected packed sequences, (H, total, D)."
            )
    q, k, v = operands.values()
    d, d_v = head_sizes(q, k, v)
    heads, heads_kv = heads_of(q, k, v)
    named = {"offsets_q": offsets_q, "offsets_k": offsets_k}
    held = {name: offsets_array(value, name) for name, value in named.items()}
    ends: dict[str, Any] = {}
    unread = False
    totals = totals or (q.shape[1], k.shape[1])
    for size, total, most in zip("qk", totals, longest or totals, strict=True):
        name = f"offsets_{size}"
        held[name], read = device_args.offsets_to_check(held[name], name, q, bool(check))
        if read is None:
            unread = True
            fitting = device_args.longest(
                f"len_{size}", min(most, total), *_position_arrays(options)
            )
            ends[f"len_{size}"], ends[f"start_{size}"] = device_args.unread(total, fitting)
        else:
            bounds = checked_offsets(read, name, total)
            if longest is not None and is_device_array(q):
                device_args.refuse_longer(name, bounds, most)
            ends[f"len_{size}"], ends[f"start_{size}"] = np.diff(bounds), bounds[:-1]
    if held["offsets_q"].size != held["offsets_k"].size:
        raise ArgumentError(
            f"offsets_k: got {held['offsets_k'].size - 1} sequences, but there are "
            f"{held['offsets_q'].size - 1} in offsets_q; expected equal numbers."
        )
    problem = Problem(
        lead=(held["offsets_q"].size - 1,),
        heads=heads,
        heads_kv=heads_kv,
        rows=PackedRows(
            **ends,
            offsets=held,
            unread=unread,
            reports=check is None,
            bounded=longest is not None,
        ),
        d=d,
        d_v=d_v,
        dtype=dtype,
    )
    return with_options(problem, q, k, v, (False, False, False), options, encoding=encoding)


def _position_arrays(options: Options) -> tuple[list[Array], list[Expr]]:
    """Return the arrays (..., Lq, Lk) and the expressions among the options of a call."""
    arrays: tuple[Any, ...] = (options.bias, options.mask)
    expressions = (options.mask, chain(options.score_mod))
    return (
        [x for x in arrays if x is not None and hasattr(x, "shape")],
        [x.expr for x in expressions if isinstance(x, (Mask, Score))],
    )


def offsets_array(value: Any, name: str) -> Array:
    """Return offsets as an array, whose elements are not looked at."""
    wanted = "one axis of integers, one more than there are sequences, from 0 to the packed length"
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ArgumentTypeError(
                f"{name}: got a {type(value).__name__} that NumPy cannot make an array of; "
                f"expected {wanted}."
            ) from None
    offsets = array(value, name)
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or not offsets.size:
        raise ArgumentTypeError(
            f"{name}: got shape {offsets.shape}, dtype {offsets.dtype}; expected {wanted}."
        )
    return offsets


def checked_offsets(offsets: Array, name: str, total: int) -> Array:
    """Return offsets in host memory as int64, if they run from 0 to `total`."""
    bad = np.flatnonzero(offsets[1:] < offsets[:-1])  # their difference may leave 64 bits
    if bad.size:
        n = int(bad[0])
        raise ArgumentError(
            f"{name}: entry {n + 1} is {offsets[n + 1]}, smaller than {offsets[n]} before it; "
            "expected offsets that never decrease."
        )
    if offsets[0] != 0 or offsets[-1] != total:
        raise ArgumentError(
            f"{name}: runs from {offsets[0]} to {offsets[-1]}; expected 0 to {total}, the packed "
            "array's length."
        )
    return offsets.astype(np.int64)


# Field of `Options` -> its check, a function of all options and of the problem without options.
_CHECKS: dict[str, Callable[[Options, Problem], Any]] = {
    "mask": lambda options, _: mask(options.mask),
    "score_mod": lambda options, _: chain(options.score_mod),
    "bias": lambda options, problem: _bias(options.bias, problem),
    "sink": lambda options, problem: _sink(options.sink, problem),
    "scale": lambda options, problem: scalars.scale(options.scale, problem.d, problem.accumulator),
    "dropout": lambda options, _: scalars.dropout(options.dropout, options.seed),
    "seed": lambda options, _: scalars.seed(options.seed),
    "precision": lambda options, problem: scalars.precision(options.precision, problem.dtype),
}
_OF_PROBLEM = {field.name for field in fields(Problem)}


def with_options(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    matrices: tuple[bool, bool, bool],
    options: Options,
    in_one_place: bool = True,
    **rest: Any,
) -> Call:
    """Check every option, and put it where the problem or the call has it.

    `rest` are the other fields of the call.
    """
    checked = {name: _CHECKS[name](options, problem) for name in NAMES}
    of_problem = {name: checked.pop(name) for name in NAMES if name in _OF_PROBLEM}
    problem = replace(problem, **of_problem)
    call = Call(problem, q, k, v, **checked, were_matrices=matrices, **rest)
    return replace(call, device=one_home(read_arrays(call))) if in_one_place else call


def mask(value: Any) -> Mask | None:
    """Return a mask, also of a boolean array."""
    if value is None:
        return None
    result: Mask
    if isinstance(value, Mask):
        result = value
    else:
        if callable(value) or isinstance(value, (Expr, LookupTable, str, bool, list, tuple, Score)):
            raise ArgumentTypeError(
                f"mask: got {type(value).__name__}; expected a mask of cupyflash.masks or a "
                "boolean array. Call a constructor, as in masks.causal(); wrap a function of "
                "your own with masks.mask(function); convert a list with np.asarray(list)."
            )
        result = dense(array(value, "mask"))
    if result.learned_tables:
        raise ArgumentError(
            f"mask: got one that reads a learned look-up, {result}; expected none, because a "
            "condition has no derivative. Make the look-up without learned=True."
        )
    return result


def _bias(value: Any, problem: Problem) -> Array | None:
    if value is None:
        return None
    bias = floats(value, "bias")
    wanted = (*problem.lead, problem.heads, *_longest(problem))
    shape = (1,) * (len(wanted) - bias.ndim) + bias.shape
    if len(shape) != len(wanted) or any(
        own not in (1, want) for own, want in zip(shape, wanted, strict=True)
    ):
        raise ArgumentError(
            f"bias: got shape {bias.shape}; expected a shape that broadcasts to {wanted} (leading "
            "axes, Hq, Lq, Lk)."
        )
    return bias


def _longest(problem: Problem) -> tuple[int, int]:
    return tuple(  # type: ignore[return-value]
        int(np.max(lengths, initial=0)) for lengths in (problem.len_q, problem.len_k)
    )


def _sink(value: Any, problem: Problem) -> Array | None:
    if value is None:
        return None
    sink = floats(value, "sink")
    if sink.shape != (problem.heads,):
        raise ArgumentError(
            f"sink: got shape {sink.shape}; expected ({problem.heads},), one logit per query head."
        )
    return sink


def read_arrays(request: Call) -> dict[str, Array]:
    """Return every array that a call reads, by name."""
    named = {"q": request.q, "k": request.k, "v": request.v}
    options = {"bias": request.bias, "sink": request.sink}
    named |= {name: option for name, option in options.items() if option is not None}
    if is_device_array(request.problem.seed):
        named["seed"] = request.problem.seed
    named |= request.encoding.scales
    named |= request.rows.arrays
    for name, made in (("mask", request.mask), ("score_mod", request.score_mod)):
        if made is not None:
            named |= looked_up(made.expr, name)
    return named


def looked_up(expr: Expr, name: str) -> dict[str, Array]:
    """Return the arrays that an expression reads, with words that begin with its name."""
    found = [x for node in walk(expr) for x in _looked_up(node, name)]
    return {f"array {n} of {name}": x for n, x in enumerate(found)}


def _looked_up(node: Expr, name: str) -> tuple[Any, ...]:
    """Return the array that a node reads, if it reads one."""
    if node.op not in (*LOOKUPS, "aligned"):
        return ()
    array = node.value.array if node.op == "aligned" else node.value[0]
    check_whole(array, name)
    return (array.own if isinstance(array, HeldArray) else array,)


_ORIGINS = {
    "do": "the shape and dtype of out",
    "dlse": "the shape and dtype of lse",
    "tdo": "those of do",
    "tdlse": "those of lse",
    "tq": "those of q",
    "tk": "those of k",
    "tv": "those of v",
    "tbias": "those of bias",
    "tsink": "those of sink",
    "out": "the out that the forward returned, for the same q, k, v",
    "lse": "the lse that the forward returned (return_lse=True), for the same q, k, v",
}


def given(value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an input whose shape and dtype follow from the others (do, out, lse, dlse)."""
    result = array(value, name)
    if result.shape != shape or result.dtype != dtype:
        raise ArgumentError(
            f"{name}: got shape {result.shape}, dtype {result.dtype}; expected shape {shape}, "
            f"dtype {dtype}{', ' + _ORIGINS[name] if name in _ORIGINS else ''}."
        )
    return result


def gradients(
    value: Any,
    request: Call,
    inputs: dict[str, Array],
    bias_gradient: bool,
    check: Callable[[dict[str, Any], dict[str, Array]], None],
) -> Gradients:
    """Check ``grads_out``: None, or arrays (or None) for dq, dk, dv, dbias, dsink in this order.

    `check` is as `interop.outputs`.
    """
    if value is None:
        return Gradients(None, None, None)
    if not isinstance(value, (tuple, list)) or not 3 <= len(value) <= 5:
        came = type(value).__name__
        if isinstance(value, (tuple, list)):
            came += f" of length {len(value)}"
        raise ArgumentTypeError(
            f"grads_out: got {came}; expected Gradients, or a tuple of arrays (or None) for dq, "
            "dk, dv[, dbias[, dsink]]."
        )
    result: Gradients[Any, Any] = Gradients(*value)
    bias = request.bias if bias_gradient else None
    owners = (request.q, request.k, request.v, bias, request.sink)
    matrices = (*request.were_matrices, False, False)
    targets = {}
    for name, target, owner, matrix in zip(result._fields, result, owners, matrices, strict=True):
        if target is None:
            continue
        if owner is None:
            if name == "dbias" and not bias_gradient:
                raise ArgumentError(
                    "grads_out.dbias: got an array with bias_gradient=False; expected None."
                )
            raise ArgumentError(
                f"grads_out.{name}: got an array, but the call has no {name[1:]}; expected None."
            )
        targets[f"grads_out.{name}"] = (
            target,
            owner.shape[1:] if matrix else owner.shape,
            owner.dtype,
        )
    check(targets, inputs)
    return result


def parts(value: Any) -> list[tuple[Array, Array]]:
    """Check the (out, lse) pairs that `combine` joins."""
    if not isinstance(value, (list, tuple)) or not value:
        came = type(value).__name__
        if isinstance(value, (list, tuple)):
            came = f"an empty {came}"
        raise ArgumentTypeError(f"combine: got {came}; expected a non-empty list of (out, lse).")
    pairs: list[tuple[Array, Array]] = []
    for n, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ArgumentTypeError(
                f"combine: entry {n} is {type(pair).__name__}; expected a pair (out, lse)."
            )
        out = floats(pair[0], f"combine: out of entry {n}")
        if out.ndim < 1:
            raise ArgumentError(f"combine: out of entry {n} has no axis; expected (..., Lq, Dv).")
        first = pairs[0][0] if pairs else out
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ArgumentError(
                f"combine: out of entry {n} has shape {out.shape}, dtype {out.dtype}; expected "
                f"{first.shape}, {first.dtype}, as in entry 0."
            )
        accumulator = dtypes.accumulator(out.dtype)
        pairs.append(
            (out, given(pair[1], f"combine: lse of entry {n}", out.shape[:-1], accumulator))
        )
    names = ("out", "lse")
    one_home({f"{names[x]} of entry {n}": pairs[n][x] for n in range(len(pairs)) for x in (0, 1)})
    return pairs


def workspace(
    value: Any, size: int, inputs: dict[str, Array], function: str = "workspace_size"
) -> Array | None:
    """Check a workspace: bytes, enough of them (as `function` says), apart from other arrays."""
    if value is None:
        return None
    is_array = isinstance(value, np.ndarray) or is_device_array(value)
    if not is_array or value.dtype != np.uint8 or value.ndim != 1 or not value.flags.c_contiguous:
        came = type(value).__name__
        if is_array:
            came = f"shape {value.shape}, dtype {value.dtype}, strides {value.strides}"
        raise ArgumentTypeError(
            f"workspace: got {came}; expected a contiguous one-dimensional array of uint8, "
            f"np.empty({size}, np.uint8)."
        )
    if value.size < size:
        raise ArgumentError(
            f"workspace: got {value.size} bytes; expected at least {size}, as {function} says: "
            f"np.empty({size}, np.uint8)."
        )
    outputs({"workspace": (value, value.shape, value.dtype)}, inputs)
    result: Array = value
    return result
