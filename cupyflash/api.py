"""The public functions: signatures, documentation, and the order of steps. No algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import config, dispatch, validate
from .errors import ArgumentError, ArgumentTypeError
from .expr.nodes import LookupTable, array_type
from .problem import Array, Call, Gradients, Plan

Vjp = Callable[..., Gradients]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    **unknown: Any,
) -> Any:
    """Compute exact attention, softmax(scale q kᵀ) v, without storing the scores.

    Shapes follow `numpy.matmul`. The logits are score_mod(scale * q.k) + bias, -inf where `mask` is
    False; the sink is one more key.

    Parameters
    ----------
    q : array, shape (..., Hq, Lq, D)
        Queries, of float16, bfloat16 (ml_dtypes), float32 or float64; any strides. Leading axes
        broadcast against those of `k` and `v`; a two-dimensional array is one head.
    k : array, shape (..., Hkv, Lk, D)
        Keys, of the dtype of `q`. Hq must be a multiple of Hkv: query head h reads key-value head
        ``h // (Hq // Hkv)``.
    v : array, shape (..., Hkv, Lk, Dv)
        Values, of the dtype of `q`.
    mask : Mask or array of bool, optional
        Which pairs attend (True), see `cupyflash.masks`; an array broadcasts to (..., Hq, Lq, Lk).
    score_mod : Score or sequence of Score, optional
        Changes of the scores, applied in order, see `cupyflash.scores`.
    bias : array, optional
        Added to the scores, after `score_mod`; broadcasts to (..., Hq, Lq, Lk), any of the four
        dtypes. -inf hides a pair.
    sink : array, shape (Hq,), optional
        Logit of one extra key of value 0 per head.
    scale : float, optional
        Any finite number. Default: 1 / sqrt(D).
    dropout : float
        Probability in [0, 1) of dropping a pair, after the softmax; needs `seed`.
    seed : int or 0-d array of uint64, optional
        Key of the Philox generator: the same seed drops the same pairs everywhere.
    return_lse : bool
        Return (out, lse) instead of out.
    out : array, optional
        Where to write the output.
    lse_out : array, optional
        Where to write the LSE.

    Returns
    -------
    out : numpy.ndarray, shape (..., Hq, Lq, Dv)
        In the dtype and memory order of `q`. A query that sees no key gets 0.
    lse : numpy.ndarray, shape (..., Hq, Lq)
        Only with `return_lse`: natural logarithm of the sum of exp(logits), with the sink and
        before dropout; float32 (float64 for float64 input); -inf for a query that sees no key.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument does not fit; the message names it, what came, what was wanted and the remedy.
        Every array is left as it was.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention, masks
    >>> x = np.random.default_rng(0).standard_normal((2, 4, 100, 32), dtype=np.float32)
    >>> attention(x, x, x, mask=masks.causal()).shape
    (2, 4, 100, 32)
    """
    options = _options(mask, score_mod, bias, sink, scale, dropout, seed, unknown)
    return _forward(validate.call(q, k, v, **options), return_lse, out, lse_out)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    check: bool = True,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    **unknown: Any,
) -> Any:
    """Compute attention within each of several sequences that lie one after the other.

    Parameters
    ----------
    q : array, shape (Hq, total_q, D)
        Queries of all sequences.
    k : array, shape (Hkv, total_k, D)
        Keys of all sequences.
    v : array, shape (Hkv, total_k, Dv)
        Values of all sequences.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        Sequence b has the rows from ``offsets[b]`` to ``offsets[b + 1]``: from 0 to the total,
        never decreasing.
    check : bool
        Offsets in host memory are always checked, which costs nothing to speak of.
    mask, score_mod, bias, sink, scale, dropout, seed, return_lse, out, lse_out
        As in `attention`. In masks and scores b is the sequence, i and j count within it, and the
        default offset of `masks.causal` is that sequence's Lk - Lq. `bias` and a mask array
        broadcast to (n, Hq, max Lq, max Lk); `masks.segments` takes packed arrays.

    Returns
    -------
    out : numpy.ndarray, shape (Hq, total_q, Dv)
        As of `attention` on every sequence alone.
    lse : numpy.ndarray, shape (Hq, total_q)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 1.
    """
    options = _options(mask, score_mod, bias, sink, scale, dropout, seed, unknown)
    call = validate.varlen_call(q, k, v, offsets_q, offsets_k, check, **options)
    return _forward(call, return_lse, out, lse_out)


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    grads_out: Any = None,
    workspace: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    **unknown: Any,
) -> Gradients:
    """Compute the gradients of `attention` from its output and LSE.

    Parameters
    ----------
    do : array, shape of out
        Gradient of the output, in the dtype of `q`.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        As returned by `attention` with the same options and ``return_lse=True``.
    dlse : array, shape of lse, optional
        Gradient of the LSE, in its dtype.
    deterministic : bool
        Ask for bitwise equal gradients in every run. On the CPU they always are.
    grads_out : Gradients or tuple, optional
        Arrays for dq, dk, dv and, where there are such inputs, dbias and dsink; None for a fresh
        one. Views are fine: three views of one packed QKV gradient take the gradients without a
        copy.
    workspace : numpy.ndarray of uint8, optional
        Scratch memory of at least `workspace_size` bytes.
    mask, score_mod, bias, sink, scale, dropout, seed
        As given to `attention`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each of its input's shape and dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 2.
    """
    options = _options(mask, score_mod, bias, sink, scale, dropout, seed, unknown)
    call = validate.call(q, k, v, **options)
    return _backward(call, do, out, lse, dlse, deterministic, grads_out, workspace)


def attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    check: bool = True,
    dlse: Any = None,
    deterministic: bool = False,
    grads_out: Any = None,
    workspace: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    bias: Any = None,
    sink: Any = None,
    scale: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    **unknown: Any,
) -> Gradients:
    """Compute the gradients of `attention_varlen`.

    Parameters
    ----------
    do, q, k, v, out, lse : array
        As in `attention_backward`, packed.
    offsets_q, offsets_k : array of int, shape (n + 1,)
        As in `attention_varlen`.
    check : bool
        As in `attention_varlen`.
    dlse, deterministic, grads_out, workspace
        As in `attention_backward`.
    mask, score_mod, bias, sink, scale, dropout, seed
        As given to `attention_varlen`.

    Returns
    -------
    Gradients
        dq, dk, dv, dbias, dsink, each of its input's shape and dtype.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithm 2.
    """
    options = _options(mask, score_mod, bias, sink, scale, dropout, seed, unknown)
    call = validate.varlen_call(q, k, v, offsets_q, offsets_k, check, **options)
    return _backward(call, do, out, lse, dlse, deterministic, grads_out, workspace)


def attention_vjp(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
    """Compute attention, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v : array
        As in `attention`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    **options
        The options of `attention` but out and lse_out.

    Returns
    -------
    out : numpy.ndarray
        As of `attention`.
    lse : numpy.ndarray
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `Gradients`. It keeps q, k, v, out and lse, and no more: do
        not change them in between.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention_vjp
    >>> x = np.ones((1, 8, 4), np.float32)
    >>> out, vjp = attention_vjp(x, x, x)
    >>> vjp(np.ones_like(out)).dv[0, :, 0]
    array([1., 1., 1., 1., 1., 1., 1., 1.], dtype=float32)
    """
    return _vjp(validate.call(q, k, v, **options), return_lse)


def attention_varlen_vjp(
    q: Any,
    k: Any,
    v: Any,
    offsets_q: Any,
    offsets_k: Any,
    *,
    check: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute `attention_varlen`, and return it with a function that computes its gradients.

    Parameters
    ----------
    q, k, v, offsets_q, offsets_k, check
        As in `attention_varlen`.
    return_lse : bool
        Return (out, lse, vjp) instead of (out, vjp).
    **options
        The options of `attention_varlen` but out and lse_out.

    Returns
    -------
    out : numpy.ndarray
        As of `attention_varlen`.
    lse : numpy.ndarray
        Only with `return_lse`.
    vjp : callable
        ``vjp(do, dlse=None)`` returns `Gradients`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, Algorithms 1 and 2.
    """
    call = validate.varlen_call(q, k, v, offsets_q, offsets_k, check, **options)
    return _vjp(call, return_lse)


def combine(parts: Sequence[tuple[Any, Any]]) -> tuple[Array, Array]:
    """Join attention over disjoint sets of keys into attention over all of them.

    Associative and commutative up to rounding; (0, -inf) is its unit. Calls with dropout cannot be
    combined; where there is a sink, one of the calls gets it.

    Parameters
    ----------
    parts : sequence of (out, lse)
        Results of calls over different keys with the same queries: out of shape (..., Lq, Dv), lse
        (natural logarithm) of shape (..., Lq).

    Returns
    -------
    out : numpy.ndarray
        In the dtype of the parts.
    lse : numpy.ndarray
        float32, or float64.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The parts differ in shape or dtype, or there is none.

    References
    ----------
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, equation 4.
    """
    pairs = validate.parts(parts)
    out = np.empty_like(pairs[0][0], subok=False)
    lse = np.empty(pairs[0][1].shape, pairs[0][1].dtype)
    dispatch.combine(pairs, out, lse)
    return out, lse


def plan(
    q: Any, k: Any, v: Any, *, offsets_q: Any = None, offsets_k: Any = None, **options: Any
) -> Plan:
    """Say which kernel would serve a call, with which tiles, and why; nothing is computed.

    Parameters
    ----------
    q, k, v : array
        As in `attention`, or in `attention_varlen` with the offsets.
    offsets_q, offsets_k : array of int, optional
        As in `attention_varlen`.
    **options
        The options of `attention`.

    Returns
    -------
    Plan
        kernel, block_q, block_kv, reason.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    return config.choose(_either(q, k, v, offsets_q, offsets_k, options).problem)


def workspace_size(
    q: Any, k: Any, v: Any, *, offsets_q: Any = None, offsets_k: Any = None, **options: Any
) -> int:
    """Return how many bytes of workspace `attention_backward` needs at most; linear in Lq and Lk.

    Parameters
    ----------
    q, k, v : array
        As in `attention`, or in `attention_varlen` with the offsets.
    offsets_q, offsets_k : array of int, optional
        As in `attention_varlen`.
    **options
        The options of `attention`.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`.
    """
    return dispatch.workspace_size(_either(q, k, v, offsets_q, offsets_k, options))


def lookup(array: Any) -> LookupTable:
    """Make an array readable inside a mask or score.

    Parameters
    ----------
    array : array
        Of bool, integers or floats, living where q will live. It is read in place at every call.

    Returns
    -------
    LookupTable
        Index it with one integer expression per axis. Every index must be provably in range; hold
        it with `cupyflash.expr.clip` otherwise.

    Raises
    ------
    ArgumentTypeError
        If it is no array, or of a dtype that expressions do not know.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import lookup, masks
    >>> document = lookup(np.array([0, 0, 1, 1]))
    >>> masks.mask(lambda b, h, i, j: document[i] == document[j])
    <mask (lookup(<(4,)>)[i] == lookup(<(4,)>)[j])>
    """
    held = (
        np.asarray(array) if isinstance(array, (list, tuple)) else validate.array(array, "lookup")
    )
    array_type(held)
    return LookupTable(held)


def _options(
    mask: Any,
    score_mod: Any,
    bias: Any,
    sink: Any,
    scale: Any,
    dropout: Any,
    seed: Any,
    unknown: dict[str, Any],
) -> dict[str, Any]:
    return {
        "mask": mask,
        "score_mod": score_mod,
        "bias": bias,
        "sink": sink,
        "scale": scale,
        "dropout": dropout,
        "seed": seed,
        **unknown,
    }


def _either(
    q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, options: dict[str, Any]
) -> Call:
    if (offsets_q is None) != (offsets_k is None):
        raise ArgumentError("offsets_q and offsets_k belong together; one came without the other.")
    if offsets_q is None:
        return validate.call(q, k, v, **options)
    return validate.varlen_call(q, k, v, offsets_q, offsets_k, True, **options)


def _shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes that users see of out and lse."""
    problem = call.problem
    rows = call.q.shape[-2]
    lse = (rows,) if call.matrices else (problem.heads, rows)
    if not problem.packed and not call.matrices:
        lse = (*problem.lead, *lse)
    return (*lse, problem.d_v), lse


def _forward(call: Call, return_lse: bool, out: Any, lse_out: Any) -> Any:
    if not isinstance(return_lse, (bool, np.bool_)):
        raise ArgumentTypeError(f"return_lse: {return_lse!r} came; wanted True or False.")
    out_shape, lse_shape = _shapes(call)
    wanted = {
        "out": (out, out_shape, call.problem.dtype),
        "lse_out": (lse_out, lse_shape, call.problem.accumulator),
    }
    named = {name: entry for name, entry in wanted.items() if entry[0] is not None}
    validate.outputs(named, validate.read_arrays(call))
    out_full, lse_full = dispatch.empty_output(call)
    if out is not None:
        out_full = out[None] if call.matrices else out
    if lse_out is not None:
        lse_full = lse_out[None] if call.matrices else lse_out
    dispatch.forward(call, out_full, lse_full)
    if call.matrices:
        out_full, lse_full = out_full[0], lse_full[0]
    result = out_full if out is None else out
    lse = lse_full if lse_out is None else lse_out
    return (result, lse) if return_lse else result


def _backward(
    call: Call,
    do: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    deterministic: bool,
    grads_out: Any,
    workspace: Any,
) -> Gradients:
    if not isinstance(deterministic, (bool, np.bool_)):
        raise ArgumentTypeError(f"deterministic: {deterministic!r} came; wanted True or False.")
    out_shape, lse_shape = _shapes(call)
    problem = call.problem
    rows = {
        "do": validate.given(do, "do", out_shape, problem.dtype),
        "out": validate.given(out, "out", out_shape, problem.dtype),
        "lse": validate.given(lse, "lse", lse_shape, problem.accumulator),
    }
    if dlse is not None:
        rows["dlse"] = validate.given(dlse, "dlse", lse_shape, problem.accumulator)
    inputs = validate.read_arrays(call) | rows
    owners = (call.q, call.k, call.v, call.bias, call.sink)
    targets = validate.gradients(grads_out, call, inputs)
    named = {f"grads_out.{name}": x for name, x in targets._asdict().items() if x is not None}
    needed = dispatch.workspace_size(call) if workspace is not None else 0
    scratch = validate.workspace(workspace, needed, inputs | named)
    if call.matrices:
        rows = {name: array[None] for name, array in rows.items()}
    made: list[Array | None] = []
    results: list[Array | None] = []
    for owner, target, matrix in zip(
        owners, targets, (*call.were_matrices, False, False), strict=True
    ):
        if owner is None:
            made.append(None)
            results.append(None)
            continue
        full = np.empty_like(owner, subok=False) if target is None else target
        if target is not None and matrix:
            full = target[None]
        made.append(full)
        results.append(target if target is not None else full[0] if matrix else full)
    dispatch.backward(
        call, rows["do"], rows["out"], rows["lse"], rows.get("dlse"), Gradients(*made), scratch
    )
    return Gradients(*results)


def _vjp(call: Call, return_lse: bool) -> Any:
    out, lse = _forward(call, True, None, None)

    def vjp(do: Any, dlse: Any = None) -> Gradients:
        return _backward(call, do, out, lse, dlse, False, None, None)

    return (out, lse, vjp) if return_lse else (out, vjp)
