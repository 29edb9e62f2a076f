"""Attention on JAX arrays over a cache of keys and values, for inference, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from .. import cached, execute, outputs
from ..masks import Mask
from ..problem.arguments import Cached
from ..problem.bound_exprs import trees
from ..problem.codes import CacheCodes
from ..problem.keywords import explained
from ..problem.options import Options
from ..request import Request
from ..scores import Score
from . import arguments, host
from .constants import Constants
from .constants import alike as constants_alike

_NO_GRADIENT = (
    "attention_cached: got a request for a gradient; expected none, because none flows through a "
    "cache. Pass jax.lax.stop_gradient(x), or compute gradients by cupyflash.jax.attention."
)


@overload
def attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: int | jax.Array | Sequence[int],
    *,
    table: jax.Array | None = None,
    offsets_q: jax.Array | Sequence[int] | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...


@overload
def attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: int | jax.Array | Sequence[int],
    *,
    table: jax.Array | None = None,
    offsets_q: jax.Array | Sequence[int] | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: int | jax.Array | Sequence[int],
    *,
    table: jax.Array | None = None,
    offsets_q: jax.Array | Sequence[int] | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@explained
def attention_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: int | jax.Array | Sequence[int],
    *,
    table: jax.Array | None = None,
    offsets_q: jax.Array | Sequence[int] | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Mask | jax.Array | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    bias: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of new queries over a cache of keys and values.

    The arguments are those of `cupyflash.attention_cached`. No gradient is computed. Under vmap,
    calls are made one by one.

    Parameters
    ----------
    q : jax.Array, shape (B, Hq, Lq, D)
        Queries. With `offsets_q` they are packed: (Hq, total, D).
    k : jax.Array, shape (B, Hkv, S, D)
        Keys, with room for S positions: numbers in the dtype of `q`, or codes with `k_scale`. With
        `table` they are in pages: (P, Hkv, page, D).
    v : jax.Array, shape (B, Hkv, S, Dv)
        Values. With `table` they are in pages: (P, Hkv, page, Dv).
    lengths : int or jax.Array of integers, shape (B,)
        How many positions are in use, including those of the queries.
    table : jax.Array of integers, shape (B, N), optional
        The page numbers of each entry.
    offsets_q : jax.Array of integers, shape (B + 1,), optional
        Entry b has the packed queries from ``offsets_q[b]`` to ``offsets_q[b + 1]``.
    k_scale, v_scale : jax.Array of float32, optional
        The scales of a cache of codes of 8 or 4 bits.
    kv_dtype : str or dtype_like, optional
        What the bytes of `k` and `v` are if they are uint8.
    shared, mask, score_mod, bias, sink, scale
        As in `cupyflash.attention_cached`. A mask array and the bias may be traced.
    return_lse : bool
        Return (out, lse) instead of out.

    Returns
    -------
    out : jax.Array, shape (B, Hq, Lq, Dv), or (Hq, total, Dv)
        In the dtype of `q`.
    lse : jax.Array, shape (B, Hq, Lq), or (Hq, total)
        Only with `return_lse`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `attention`, and for a request for a gradient. What traced lengths, offsets and tables
        hold is checked when the program runs; then JAX raises its JaxRuntimeError with the same
        message.

    Examples
    --------
    >>> import jax
    >>> from cupyflash import masks
    >>> from cupyflash.jax import attention_cached
    >>> k = v = jax.numpy.ones((1, 2, 1000, 32))
    >>> q = jax.numpy.ones((1, 8, 3, 32))
    >>> attention_cached(q, k, v, 700, mask=masks.causal()).shape
    (1, 8, 3, 32)
    """
    execute.check_flag(return_lse, "return_lse")
    named = {"q": q, "k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    named |= {"bias": bias, "sink": sink}
    operands: dict[str, Any] = {name: arguments.optional(name, x) for name, x in named.items()}
    operands["mask"] = arguments.mask_array(mask)
    alike = {name: arguments.like(x) for name, x in operands.items()}
    integers = {"lengths": lengths, "table": table, "offsets_q": offsets_q}
    integers = {name: arguments.integers(name, x) for name, x in integers.items()}
    constants: dict[str, Any] = {
        "score_mod": score_mod,
        "scale": arguments.number("scale", scale, ", or multiply q by it and pass scale=1"),
    }
    options = Options(
        mask=constants_alike(mask) if alike["mask"] is None else alike["mask"],
        bias=alike["bias"],
        sink=alike["sink"],
        **{name: constants_alike(x) for name, x in constants.items()},
    )
    constants["shared"] = arguments.number("shared", shared)
    constants["kv_dtype"] = kv_dtype
    lengths, table, offsets_q = _known_or_alike(
        alike["q"], integers, (alike["bias"], alike["mask"])
    )
    call = Request(
        alike["q"],
        alike["k"],
        alike["v"],
        Cached(lengths, table, offsets_q, constants["shared"]),
        CacheCodes(alike["k_scale"], alike["v_scale"], kv_dtype),
        options,
    ).call
    if arguments.is_known(integers["offsets_q"]):
        trees(call)
    if operands["mask"] is None:
        constants["mask"] = mask
    operands |= {name: None if x is None else jnp.asarray(x) for name, x in integers.items()}
    dtypes = call.problem.dtype, call.problem.accumulator
    results = list(map(jax.ShapeDtypeStruct, outputs.result_shapes(call), dtypes))

    options_of_call = Constants({**constants, "return_lse": return_lse})
    bytes_are = {"kv_dtype": alike["k"].dtype.name}  # on a GPU, where codes come as bytes

    def run(arrays: dict[str, Any], into: tuple[Any, ...]) -> list[Any]:
        rows = dict(zip(("out", "lse_out"), into, strict=False))
        options = options_of_call.beside(arrays["q"])
        if options["kv_dtype"] is None and arrays["k"].dtype != alike["k"].dtype:
            options = {**options, **bytes_are}
        made: Any = cached.attention_cached(**arrays, **rows, **options)
        return list(made) if return_lse else [made]

    present = {name: x for name, x in operands.items() if x is not None}
    made = host.call(
        run, results[: 1 + return_lse], present, no_gradient=_NO_GRADIENT, like=[present["q"]]
    )
    return tuple(made) if return_lse else made[0]


def _known_or_alike(q: Any, integers: dict[str, Any], aligned: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return lengths, table and offsets for a check: what they are, or what stands for them.

    Zeros stand for lengths and page numbers that are traced or on a GPU. No page of an empty cache
    is looked at.
    """
    lengths, table, offsets = (
        arguments.known(x) if arguments.is_known(x) else arguments.like(x)
        for x in integers.values()
    )
    if not arguments.is_known(integers["offsets_q"]):
        offsets = arguments.offsets_like(integers["offsets_q"], "len_q", q, aligned)
    return lengths, table, offsets
