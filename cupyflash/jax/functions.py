"""Attention on JAX arrays, dense and packed: signatures and documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from ..execute import check_flag
from ..masks import Mask
from ..problem.keywords import explained
from ..problem.options import Options
from ..scores import Score
from . import arguments, compute


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute exact attention on JAX arrays, under jit, grad, jvp and vmap.

    Derivatives of second order are those of reverse mode over any mode, and of forward mode over
    reverse mode, such as `jax.hessian`.

    The options are those of `cupyflash.attention`. Under vmap, the mapped axis becomes a leading
    axis of a single call. With dropout or a sink, or if a mask or a score depends on the batch
    index b, calls are made one by one. The results are those of a loop in any case.

    Parameters
    ----------
    q : jax.Array, shape (..., Hq, Lq, D)
        Queries, of float16, bfloat16, float32 or float64, on the CPU or an NVIDIA GPU.
    k : jax.Array, shape (..., Hkv, Lk, D)
        Keys.
    v : jax.Array, shape (..., Hkv, Lk, Dv)
        Values.
    mask : Mask or jax.Array of bool, optional
        True where a query attends to a key. Arrays in a `Mask` are constants, which are not traced
        and have no gradient. They may be in any memory.
    score_mod : Score or sequence of Score, optional
        Changes of the scores. Arrays in them are constants, too.
    bias : jax.Array, optional
        It is added to the scores, and broadcasts to (..., Hq, Lq, Lk).
    sink : jax.Array, shape (Hq,), optional
        Logit of one extra key of value 0 per head.
    scale : float, optional
        Any finite number. Default: 1 / sqrt(D).
    dropout : float
        Probability in [0, 1) of dropping a pair, after the softmax; needs `seed`.
    seed : int, 0-d jax.Array of integers or key of jax.random, optional
        The same seed drops the same pairs everywhere. An array or a key may be traced, and under
        vmap mapped: each call then has its own. A key, new or of ``jax.random.PRNGKey``, gives the
        number that its two words of 32 bits form, so that ``jax.random.key(n)`` and n drop the same
        pairs; the four words of other generators are hashed. Negative integers in an array count
        from 2**64 on.
    precision : {None, "tf32x3"}
        As in `cupyflash.attention`. It has no effect on the CPU.
    return_lse : bool
        Return (out, lse) instead of out. Gradients flow through both.

    Returns
    -------
    out : jax.Array, shape (..., Hq, Lq, Dv)
        In the dtype of `q`.
    lse : jax.Array, shape (..., Hq, Lq)
        Only with `return_lse`: float32, or float64.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is wrong. The message names it, what it got and expected, and the remedy.
        In a function that is traced, this happens while it is traced.

    Examples
    --------
    >>> import jax
    >>> from cupyflash import masks
    >>> from cupyflash.jax import attention
    >>> x = jax.numpy.ones((2, 4, 100, 32))
    >>> causal = masks.causal()
    >>> loss = jax.jit(lambda x: attention(x, x, x, mask=causal).sum())
    >>> jax.grad(loss)(x).shape
    (2, 4, 100, 32)
    """
    check_flag(return_lse, "return_lse")
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=dropout,
        seed=seed,
        precision=precision,
    )
    given = compute.taken(q, k, v, options)
    call = compute.checked(given)
    out, lse = compute.computed(compute.DENSE, given, call, compute.padded(given.operands))
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    offsets_q: jax.Array | Sequence[int],
    offsets_k: jax.Array | Sequence[int],
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...


@overload
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    offsets_q: jax.Array | Sequence[int],
    offsets_k: jax.Array | Sequence[int],
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    offsets_q: jax.Array | Sequence[int],
    offsets_k: jax.Array | Sequence[int],
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    offsets_q: jax.Array | Sequence[int],
    offsets_k: jax.Array | Sequence[int],
    *,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    precision: Literal["tf32x3"] | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention within each of several sequences that lie one after the other.

    The options are those of `cupyflash.attention_varlen`. Under vmap, calls are made one by one.

    Parameters
    ----------
    q : jax.Array, shape (Hq, total_q, D)
        Queries of all sequences.
    k : jax.Array, shape (Hkv, total_k, D)
        Keys of all sequences.
    v : jax.Array, shape (Hkv, total_k, Dv)
        Values of all sequences.
    offsets_q, offsets_k : jax.Array of int32 or sequence of int, shape (n + 1,)
        Sequence b has the rows from ``offsets[b]`` to ``offsets[b + 1]``. They may be traced.
    mask, score_mod, bias, sink, scale, dropout, seed, precision
        As in `attention`. In masks and scores, b is the sequence, i and j count within it, and the
        default offset of `masks.causal` is that sequence's Lk - Lq. `bias` and a mask array
        broadcast to (n, Hq, max Lq, max Lk).
    return_lse : bool
        Return (out, lse) instead of out. Gradients flow through both.

    Returns
    -------
    out : jax.Array, shape (Hq, total_q, Dv)
        In the dtype of `q`.
    lse : jax.Array, shape (Hq, total_q)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`. What traced offsets hold, and what depends on it, is checked when the
        program runs; then JAX raises its JaxRuntimeError with the same message.

    Examples
    --------
    >>> import jax
    >>> from cupyflash import masks
    >>> from cupyflash.jax import attention_varlen
    >>> x = jax.numpy.ones((4, 100, 32))
    >>> attention_varlen(x, x, x, [0, 30, 100], [0, 30, 100], mask=masks.causal()).shape
    (4, 100, 32)
    """
    check_flag(return_lse, "return_lse")
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=dropout,
        seed=seed,
        precision=precision,
    )
    given = compute.taken(q, k, v, options)
    named = {"offsets_q": offsets_q, "offsets_k": offsets_k}
    named = {name: arguments.integers(name, x) for name, x in named.items()}
    are_known = all(map(arguments.is_known, named.values()))
    if are_known:
        offsets = tuple(map(arguments.known, named.values()))
    else:
        offsets = compute.standing_for(given, *map(jnp.asarray, named.values()))
    call = compute.checked(given, offsets, bound=are_known)
    operands = given.operands | {name: jnp.asarray(x) for name, x in named.items()}
    out, lse = compute.computed(compute.PACKED, given, call, operands)
    return (out, lse) if return_lse else out
