"""What users pass, turned into a `Call`, or into an error that names the remedy.

Nothing is computed and nothing is written here: a call that is refused leaves every array as it
was.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import numpy as np

from .errors import ArgumentError, ArgumentTypeError
from .expr.nodes import Expr, LookupTable, walk
from .masks import Mask, dense
from .problem import ACCUMULATORS, Array, Call, Gradients, Problem
from .scores import Score, chain

MAX_HEAD_SIZE = 512


def array(value: Any, name: str) -> Array:
    """Return an argument as a NumPy array that shares its memory.

    Raises
    ------
    ArgumentTypeError
        If it is no array, or lives where this version has no kernels.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name}: a masked array came; pass {name}.data, and the mask as mask= (True = attend)."
        )
    if isinstance(value, np.matrix):
        raise ArgumentTypeError(f"{name}: a numpy.matrix came; pass np.asarray({name}).")
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "cupy":
        raise ArgumentTypeError(
            f"{name}: a CuPy array came; this version computes on NumPy arrays only. Pass "
            f"cupy.asnumpy({name}), for every array of the call."
        )
    if not hasattr(value, "__dlpack__"):
        raise ArgumentTypeError(
            f"{name}: {type(value).__name__} came; wanted a NumPy array, or an array that exports "
            "DLPack. Convert it with np.asarray."
        )
    kind = int(value.__dlpack_device__()[0])
    if kind not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise ArgumentTypeError(
            f"{name}: an array in device memory came (DLPack device type {kind}); this version "
            "computes on arrays in host memory only. Copy it to the CPU first."
        )
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return _bfloat16_from_dlpack(value, name)


class _Reexport:
    """A DLPack exporter of one capsule, for NumPy, which knows no bfloat16."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _bfloat16_from_dlpack(value: Any, name: str) -> Array:
    """Take a bfloat16 array by telling NumPy that its elements are 16-bit integers."""
    capsule = value.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = get_pointer(capsule, b"dltensor")
    # DLTensor: data pointer (8 bytes), device (8), ndim (4), then dtype: code, bits, lanes.
    dtype = (ctypes.c_uint8 * 2).from_address(tensor + 20)
    bfloat, unsigned = 4, 1  # DLDataTypeCode
    if tuple(dtype) != (bfloat, 16):
        raise ArgumentTypeError(
            f"{name}: NumPy cannot take this {type(value).__name__} by DLPack (type code {dtype[0]}, "
            f"{dtype[1]} bits). Convert it to float16, bfloat16, float32 or float64 on the CPU."
        )
    import ml_dtypes

    dtype[0] = unsigned
    return np.from_dlpack(_Reexport(capsule)).view(ml_dtypes.bfloat16)


def floats(value: Any, name: str) -> Array:
    """Return an argument as an array of one of the four float dtypes."""
    result = array(value, name)
    if result.dtype.name not in ACCUMULATORS or not result.dtype.isnative:
        raise ArgumentTypeError(
            f"{name}: dtype {result.dtype} came; wanted float16, bfloat16 (ml_dtypes), float32 or "
            f"float64 in native byte order. Convert it with {name}.astype(...)."
        )
    return result


def _same_dtype(arrays: dict[str, Array]) -> np.dtype[Any]:
    if len({x.dtype for x in arrays.values()}) > 1:
        came = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise ArgumentTypeError(f"{came} came; wanted one dtype. Convert with .astype(...).")
    common: np.dtype[Any] = next(iter(arrays.values())).dtype
    return common


def _head_sizes(q: Array, k: Array, v: Array) -> tuple[int, int]:
    d, d_v = q.shape[-1], v.shape[-1]
    if k.shape[-1] != d:
        raise ArgumentError(
            f"k: shape {k.shape} came with q of shape {q.shape}; their last axes (the head size D) "
            f"must be equal, {k.shape[-1]} is not {d}."
        )
    for name, size in (("q", d), ("v", d_v)):
        if not 1 <= size <= MAX_HEAD_SIZE:
            raise ArgumentError(
                f"{name}: its last axis (the head size) has length {size}; wanted 1 to "
                f"{MAX_HEAD_SIZE}."
            )
    if k.shape[-2] != v.shape[-2]:
        raise ArgumentError(
            f"v: shape {v.shape} came with k of shape {k.shape}; there is one value per key, so "
            f"their axes before last (Lk) must be equal, {v.shape[-2]} is not {k.shape[-2]}."
        )
    return d, d_v


def _heads(q: Array, k: Array, v: Array) -> tuple[int, int]:
    heads, heads_kv = q.shape[-3], k.shape[-3]
    if v.shape[-3] != heads_kv:
        raise ArgumentError(
            f"v: {v.shape[-3]} heads came with {heads_kv} heads in k; wanted as many."
        )
    if heads != heads_kv and (not heads_kv or heads % heads_kv or not heads):
        raise ArgumentError(
            f"q has {heads} heads and k {heads_kv}; wanted a multiple of k's heads in q "
            "(grouped-query attention). The head axis is the third from the end: arrays of shape "
            "(B, L, H, D) are passed as x.swapaxes(-3, -2)."
        )
    return heads, heads_kv


def call(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """Validate a call on dense arrays."""
    operands = {name: floats(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    dtype = _same_dtype(operands)
    for name, x in operands.items():
        if x.ndim < 2:
            raise ArgumentError(
                f"{name}: shape {x.shape} came; wanted (..., H, L, D), or (L, D) for one head."
            )
    matrices = tuple(x.ndim == 2 for x in operands.values())
    q, k, v = (x[None] if x.ndim == 2 else x for x in operands.values())
    d, d_v = _head_sizes(q, k, v)
    heads, heads_kv = _heads(q, k, v)
    try:
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ArgumentError(
            f"q, k and v have leading axes {q.shape[:-3]}, {k.shape[:-3]} and {v.shape[:-3]}, which "
            "do not broadcast; wanted equal lengths, or 1."
        ) from None
    problem = Problem(
        lead=lead,
        heads=heads,
        heads_kv=heads_kv,
        len_q=q.shape[-2],
        len_k=k.shape[-2],
        start_q=0,
        start_k=0,
        packed=False,
        d=d,
        d_v=d_v,
        dtype=dtype,
    )
    return _with_options(problem, q, k, v, matrices, **options)


def varlen_call(
    q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, check: bool, **options: Any
) -> Call:
    """Validate a call on packed arrays. Offsets in host memory are always checked."""
    if not isinstance(check, (bool, np.bool_)):
        raise ArgumentTypeError(f"check: {check!r} came; wanted True or False.")
    operands = {name: floats(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    dtype = _same_dtype(operands)
    for name, x in operands.items():
        if x.ndim != 3:
            raise ArgumentError(
                f"{name}: shape {x.shape} came; wanted packed sequences, (H, total, D)."
            )
    q, k, v = operands.values()
    d, d_v = _head_sizes(q, k, v)
    heads, heads_kv = _heads(q, k, v)
    bounds_q = _offsets(offsets_q, "offsets_q", q.shape[1])
    bounds_k = _offsets(offsets_k, "offsets_k", k.shape[1])
    if bounds_q.size != bounds_k.size:
        raise ArgumentError(
            f"offsets_k: {bounds_k.size - 1} sequences came, and {bounds_q.size - 1} in offsets_q; "
            "wanted as many."
        )
    problem = Problem(
        lead=(bounds_q.size - 1,),
        heads=heads,
        heads_kv=heads_kv,
        len_q=np.diff(bounds_q),
        len_k=np.diff(bounds_k),
        start_q=bounds_q[:-1],
        start_k=bounds_k[:-1],
        packed=True,
        d=d,
        d_v=d_v,
        dtype=dtype,
    )
    return _with_options(problem, q, k, v, (False,) * 3, **options)


def _offsets(value: Any, name: str, total: int) -> Array:
    if isinstance(value, (list, tuple)):
        value = np.asarray(value, np.int64) if value else np.zeros(0, np.int64)
    offsets = array(value, name)
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or not offsets.size:
        raise ArgumentTypeError(
            f"{name}: shape {offsets.shape}, dtype {offsets.dtype} came; wanted one axis of "
            "integers, one more than there are sequences."
        )
    offsets = offsets.astype(np.int64)
    bad = np.flatnonzero(np.diff(offsets) < 0)
    if bad.size:
        n = int(bad[0])
        raise ArgumentError(
            f"{name}: entry {n + 1} is {offsets[n + 1]}, smaller than {offsets[n]} before it; wanted "
            "offsets that never decrease."
        )
    if offsets[0] != 0 or offsets[-1] != total:
        raise ArgumentError(
            f"{name}: runs from {offsets[0]} to {offsets[-1]}; wanted 0 to {total}, the packed "
            "array's length."
        )
    return offsets


def _with_options(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    matrices: tuple[bool, ...],
    *,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: Any = None,
    dropout: Any = 0.0,
    seed: Any = None,
    **unknown: Any,
) -> Call:
    if unknown:
        name = next(iter(unknown))
        remedy = {
            "causal": "say mask=masks.causal()",
            "is_causal": "say mask=masks.causal()",
            "attn_mask": "say mask=array (bool), or bias=array (added to the scores)",
            "dropout_p": "say dropout=p, seed=number",
            "softmax_scale": "say scale=number",
            "window_size": "say mask=masks.window(left, right)",
            "alibi_slopes": "say score_mod=scores.alibi(slopes)",
            "softcap": "say score_mod=scores.softcap(c)",
            "enable_gqa": "leave it out: grouped-query attention is read from the shapes",
        }.get(
            name,
            "the options are mask, score_mod, bias, sink, scale, dropout, seed (and return_lse, out, "
            "lse_out; deterministic, grads_out, workspace, dlse of the backward)",
        )
        raise ArgumentTypeError(f"{name} is no argument of this function; {remedy}.")
    problem = replace(
        problem,
        scale=_scale(scale, problem.d, problem.accumulator),
        dropout=_dropout(dropout, seed),
        seed=_seed(seed),
    )
    return Call(
        problem,
        q,
        k,
        v,
        mask=_mask(mask),
        score_mod=_score_mod(score_mod),
        bias=None if bias is None else _bias(bias, problem),
        sink=None if sink is None else _sink(sink, problem),
        were_matrices=(matrices[0], matrices[1], matrices[2]),
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise ArgumentTypeError(f"{name}: {type(value).__name__} came; wanted a number.")
    return float(value)


def _scale(value: Any, d: int, accumulator: np.dtype[Any]) -> float:
    if value is None:
        return 1.0 / math.sqrt(d)
    scale = _number(value, "scale")
    if not abs(scale) <= float(np.finfo(accumulator).max):
        raise ArgumentError(
            f"scale: {scale} came; wanted a finite number within the range of {accumulator}."
        )
    return scale


def _dropout(value: Any, seed: Any) -> float:
    p = _number(value, "dropout")
    if not 0 <= p < 1:
        raise ArgumentError(f"dropout: {p} came; wanted a probability in [0, 1).")
    if round(p * 2**32) == 2**32:
        raise ArgumentError(f"dropout: {p} rounds to 1 in 32 bits; wanted less than 1 - 2**-33.")
    if p and seed is None:
        raise ArgumentError(
            f"dropout: {p} came without a seed; pass seed=number. The same seed gives the same "
            "dropped pairs, in the backward too."
        )
    return p


def _seed(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(
            f"seed: {type(value).__name__} came; wanted an integer, or a 0-d uint64 array."
        )
    if not 0 <= int(value) < 2**64:
        raise ArgumentError(f"seed: {value} came; wanted 0 to 2**64 - 1.")
    return int(value)


def _mask(value: Any) -> Mask | None:
    if value is None:
        return None
    result: Mask
    if isinstance(value, Mask):
        result = value
    else:
        if callable(value) or isinstance(value, (Expr, LookupTable, str, bool, list, tuple, Score)):
            raise ArgumentTypeError(
                f"mask: {type(value).__name__} came; wanted a mask of cupyflash.masks or a boolean "
                "array. A function is wrapped by masks.mask(function), a list by np.asarray."
            )
        result = dense(array(value, "mask"))
    _check_home(result.expr, "mask")
    return result


def _score_mod(value: Any) -> Score | None:
    result = chain(value)
    if result is not None:
        _check_home(result.expr, "score_mod")
    return result


def _check_home(expr: Expr, name: str) -> None:
    for node in walk(expr):
        if node.op in ("lookup", "aligned"):
            held = node.value[0] if node.op == "lookup" else node.value.array
            if not isinstance(held, np.ndarray):
                raise ArgumentTypeError(
                    f"{name}: it looks up a {type(held).__name__} of "
                    f"{type(held).__module__.split('.')[0]}; wanted a NumPy array, where q lives."
                )


def _bias(value: Any, problem: Problem) -> Array:
    bias = floats(value, "bias")
    wanted = (*problem.lead, problem.heads, *_longest(problem))
    shape = (1,) * (len(wanted) - bias.ndim) + bias.shape
    if len(shape) != len(wanted) or any(
        own not in (1, want) for own, want in zip(shape, wanted, strict=True)
    ):
        raise ArgumentError(
            f"bias: shape {bias.shape} came; wanted one that broadcasts to {wanted} (leading axes, "
            "Hq, Lq, Lk)."
        )
    return bias


def _longest(problem: Problem) -> tuple[int, int]:
    return tuple(  # type: ignore[return-value]
        int(np.max(lengths, initial=0)) for lengths in (problem.len_q, problem.len_k)
    )


def _sink(value: Any, problem: Problem) -> Array:
    sink = floats(value, "sink")
    if sink.shape != (problem.heads,):
        raise ArgumentError(
            f"sink: shape {sink.shape} came; wanted ({problem.heads},), one logit per query head."
        )
    return sink


def read_arrays(request: Call) -> dict[str, Array]:
    """Return every array that a call reads, by name."""
    arrays = {"q": request.q, "k": request.k, "v": request.v}
    for name, option in (("bias", request.bias), ("sink", request.sink)):
        if option is not None:
            arrays[name] = option
    for name, made in (("mask", request.mask), ("score_mod", request.score_mod)):
        for node in walk(made.expr) if made is not None else ():
            if node.op in ("lookup", "aligned"):
                held = node.value[0] if node.op == "lookup" else node.value.array
                arrays[f"{name} (array {len(arrays)})"] = held
    return arrays


def given(value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an input whose shape and dtype follow from the others (do, out, lse, dlse)."""
    result = array(value, name)
    if result.shape != shape or result.dtype != dtype:
        raise ArgumentError(
            f"{name}: shape {result.shape}, dtype {result.dtype} came; wanted {shape}, {dtype}."
        )
    return result


def outputs(targets: dict[str, tuple[Any, tuple[int, ...], Any]], inputs: dict[str, Array]) -> None:
    """Check arrays that a call is to write: kind, shape, dtype, and that no element is shared.

    `targets` maps a name to (array, wanted shape, wanted dtype).
    """
    for name, (target, shape, dtype) in targets.items():
        if not isinstance(target, np.ndarray) or isinstance(target, (np.ma.MaskedArray, np.matrix)):
            raise ArgumentTypeError(
                f"{name}: {type(target).__name__} came; wanted a NumPy array to write to."
            )
        if target.shape != shape or target.dtype != dtype:
            raise ArgumentError(
                f"{name}: shape {target.shape}, dtype {target.dtype} came; wanted {shape}, {dtype}."
            )
        if not target.flags.writeable:
            raise ArgumentError(f"{name}: a read-only array came; wanted one that can be written.")
        if repeats_an_address(target):
            raise ArgumentError(
                f"{name}: several of its elements share one address (strides {target.strides}, a "
                "broadcast view?); wanted an array with an address per element, as np.empty makes."
            )
    names = list(targets)
    for place, name in enumerate(names):
        others = {other: targets[other][0] for other in names[:place]} | inputs
        for other, held in others.items():
            if share_memory(targets[name][0], held):
                raise ArgumentError(
                    f"{name} and {other} share memory; wanted an output that overlaps no input and "
                    "no other output. Pass a fresh array, or none."
                )


def gradients(value: Any, request: Call, inputs: dict[str, Array]) -> Gradients:
    """Check ``grads_out``: None, or arrays (or None) for dq, dk, dv, dbias, dsink in this order."""
    if value is None:
        return Gradients(None, None, None)
    if not isinstance(value, (tuple, list)) or not 3 <= len(value) <= 5:
        raise ArgumentTypeError(
            f"grads_out: {type(value).__name__} came; wanted Gradients, or a tuple of arrays (or "
            "None) for dq, dk, dv[, dbias[, dsink]]."
        )
    result = Gradients(*value)
    owners = (request.q, request.k, request.v, request.bias, request.sink)
    matrices = (*request.were_matrices, False, False)
    targets = {}
    for name, target, owner, matrix in zip(result._fields, result, owners, matrices, strict=True):
        if target is None:
            continue
        if owner is None:
            raise ArgumentError(
                f"grads_out.{name}: an array came, but the call has no {name[1:]}; pass None."
            )
        targets[f"grads_out.{name}"] = (
            target,
            owner.shape[1:] if matrix else owner.shape,
            owner.dtype,
        )
    outputs(targets, inputs)
    return result


def parts(value: Any) -> list[tuple[Array, Array]]:
    """Check the (out, lse) pairs that `combine` joins."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ArgumentTypeError(
            f"combine: {type(value).__name__ if value != [] else 'an empty list'} came; wanted a "
            "non-empty list of (out, lse)."
        )
    pairs: list[tuple[Array, Array]] = []
    for n, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ArgumentTypeError(
                f"combine: entry {n} is {type(pair).__name__}; wanted a pair (out, lse)."
            )
        out = floats(pair[0], f"combine: out of entry {n}")
        if out.ndim < 1:
            raise ArgumentError(f"combine: out of entry {n} has no axis; wanted (..., Lq, Dv).")
        first = pairs[0][0] if pairs else out
        if out.shape != first.shape or out.dtype != first.dtype:
            raise ArgumentError(
                f"combine: out of entry {n} has shape {out.shape}, dtype {out.dtype}; wanted "
                f"{first.shape}, {first.dtype}, as entry 0."
            )
        accumulator = ACCUMULATORS[out.dtype.name]
        pairs.append(
            (out, given(pair[1], f"combine: lse of entry {n}", out.shape[:-1], accumulator))
        )
    return pairs


def share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays share an element. What cannot be decided soon counts as shared."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def repeats_an_address(x: Array) -> bool:
    """Whether two elements of an array lie at one address (or cannot soon be told apart)."""
    if not x.size:
        return False
    reach = x.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if length == 1:
            continue
        if stride < reach:
            break
        reach += stride * (length - 1)
    else:
        return False
    if x.size > 100_000 or not all(x.strides[axis] for axis in range(x.ndim) if x.shape[axis] > 1):
        return True
    places = np.zeros(x.shape, np.int64)
    for axis, (stride, length) in enumerate(zip(x.strides, x.shape, strict=True)):
        places += (np.arange(length) * stride).reshape((-1,) + (1,) * (x.ndim - axis - 1))
    sorted_places = np.sort(places, axis=None)
    return bool((np.diff(sorted_places) < x.itemsize).any())


def workspace(value: Any, size: int, inputs: dict[str, Array]) -> Array | None:
    """Check a workspace: bytes, enough of them, apart from every other array."""
    if value is None:
        return None
    if (
        not isinstance(value, np.ndarray)
        or value.dtype != np.uint8
        or value.ndim != 1
        or not value.flags.c_contiguous
    ):
        raise ArgumentTypeError(
            f"workspace: {type(value).__name__} came; wanted a contiguous one-dimensional array of "
            f"uint8, np.empty({size}, np.uint8)."
        )
    if value.size < size:
        raise ArgumentError(
            f"workspace: {value.size} bytes came; this call needs {size} (see workspace_size)."
        )
    outputs({"workspace": (value, value.shape, value.dtype)}, inputs)
    return value
