"""Attention on JAX arrays on the CPU, under jit, grad and vmap.

XLA calls the kernels for NumPy arrays by `jax.pure_callback`. Arrays on a GPU are an error, because
CuPy can take them by DLPack, outside jit, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from . import api
from .errors import ArgumentError, ArgumentTypeError
from .expr.nodes import walk
from .masks import Mask
from .problem import validate
from .problem.keywords import explained
from .problem.options import Options
from .scores import Score

__all__ = ["attention"]


def __dir__() -> list[str]:
    return sorted(__all__)


_ON_A_GPU = (
    "got an array on a GPU; expected one on the CPU. On a GPU, call cupyflash.attention on "
    "cupy.from_dlpack(x), which copies nothing, outside jax.jit."
)


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
    """Compute exact attention on JAX arrays, under jit, grad and vmap.

    The options are those of `cupyflash.attention`. Under vmap, the mapped axis becomes a leading
    axis of a single call. With dropout or a sink, or if a mask or a score depends on the batch
    index b, calls are made one by one.

    Parameters
    ----------
    q : jax.Array, shape (..., Hq, Lq, D)
        Queries, of float16, bfloat16, float32 or float64, on the CPU.
    k : jax.Array, shape (..., Hkv, Lk, D)
        Keys.
    v : jax.Array, shape (..., Hkv, Lk, Dv)
        Values.
    mask : Mask or jax.Array of bool, optional
        True where a query attends to a key. Arrays in a `Mask` are constants, which are not traced
        and have no gradient.
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
    seed : int or 0-d jax.Array of integers, optional
        The same seed drops the same pairs everywhere. An array may be traced.
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
    if type(return_lse) is not bool:
        raise ArgumentTypeError(f"return_lse: got {return_lse!r}; expected True or False.")
    named = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    arrays = {name: None if x is None else _array(name, x) for name, x in named.items()}
    traced_mask = isinstance(mask, jax.Array)
    _check(arrays, None if traced_mask else mask, score_mod, scale, dropout, seed, precision)
    q, k, v, bias, sink = arrays.values()
    are_matrices = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    axes = max(q.ndim, k.ndim, v.ndim)
    # All arrays get the same number of axes, so that those of vmap come before the call's own.
    q, k, v, bias = (x if x is None else _with_axes(x, axes) for x in (q, k, v, bias))
    options: dict[str, Any] = {
        "score_mod": score_mod,
        "scale": scale,
        "dropout": dropout,
        "precision": precision,
    }
    if not traced_mask:
        options["mask"] = mask
    operands: dict[str, Any] = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    if isinstance(mask, jax.Array):
        if mask.dtype != bool:
            raise ArgumentTypeError(
                f"mask: got an array of {mask.dtype}; expected bool, True meaning attend. Additive "
                "masks go to bias=."
            )
        operands["mask"] = _with_axes(mask, axes)
    if isinstance(seed, jax.Array):
        operands["seed"] = seed
    else:
        options["seed"] = seed
    operands = {name: x for name, x in operands.items() if x is not None}
    out, lse = _call(options, operands)
    if are_matrices:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _array(name: str, x: Any) -> jax.Array:
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__}; expected a JAX array. Convert it by jnp.asarray."
        )
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        _refuse_gpu(name, x)
    return jnp.asarray(x)


def _check(
    arrays: dict[str, Any],
    mask: Any,
    score_mod: Any,
    scale: Any,
    dropout: Any,
    seed: Any,
    precision: Any,
) -> None:
    """Check arguments while they are traced, by arrays of the same shapes and dtypes."""
    alike = {
        name: None if x is None else np.broadcast_to(np.zeros((), x.dtype), x.shape)
        for name, x in arrays.items()
    }
    q, k, v, bias, sink = alike.values()
    options = Options.of(
        mask=mask,
        score_mod=score_mod,
        bias=bias,
        sink=sink,
        scale=scale,
        dropout=dropout,
        seed=0 if isinstance(seed, jax.Array) else seed,
        precision=precision,
    )
    validate.call(q, k, v, options)


def _refuse_gpu(name: str, x: jax.Array) -> None:
    if any(device.platform != "cpu" for device in x.devices()):
        raise ArgumentTypeError(f"{name}: {_ON_A_GPU}")


def _with_axes(x: jax.Array, axes: int) -> jax.Array:
    return x.reshape((1,) * (axes - x.ndim) + x.shape)


def _call(options: dict[str, Any], operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return out and lse for named operands, which have the same number of leading axes."""
    alone = "sink" in operands or options["dropout"] != 0 or _reads_the_batch(options)

    @jax.custom_vjp
    def forward(operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        q, v = operands["q"], operands["v"]
        lead = jnp.broadcast_shapes(*(operands[name].shape[:-3] for name in "qkv"))
        rows = (*lead, *q.shape[-3:-1])
        lse_dtype = jnp.promote_types(q.dtype, jnp.float32)
        results = (
            jax.ShapeDtypeStruct((*rows, v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct(rows, lse_dtype),
        )

        def run(operands: dict[str, Any]) -> tuple[Any, Any]:
            return api.attention(**_numpy(operands), **options, return_lse=True)

        method = "sequential" if alone else "expand_dims"
        out, lse = _callback(run, results, method, operands)
        return out, lse

    def with_residuals(operands: dict[str, Any]) -> tuple[Any, Any]:
        out, lse = forward(operands)
        return (out, lse), (operands, out, lse)

    def backward(residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
        operands, out, lse = residuals
        do, dlse = cotangents
        inputs = [name for name in ("q", "k", "v", "bias", "sink") if name in operands]
        results = [jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in inputs]

        def run(do: Any, dlse: Any, out: Any, lse: Any, operands: dict[str, Any]) -> list[Any]:
            do, dlse, out, lse = (np.asarray(x) for x in (do, dlse, out, lse))
            made = api.attention_backward(
                do, out=out, lse=lse, dlse=dlse, **_numpy(operands), **options
            )
            return [x for x in made if x is not None]

        @jax.custom_jvp
        def gradients(*args: Any) -> list[Any]:
            method = "sequential" if alone else "broadcast_all"
            made: list[Any] = _callback(run, results, method, *args)
            return made

        gradients.defjvp(_no_second)
        made = dict(zip(inputs, gradients(do, dlse, out, lse, operands), strict=True))
        for name in operands:  # masks and seeds have none
            if name not in made:
                made[name] = np.zeros(operands[name].shape, jax.dtypes.float0)
        return (made,)

    forward.defvjp(with_residuals, backward)
    out, lse = forward(operands)
    return out, lse


def _no_second(*_: Any) -> NoReturn:
    raise ArgumentError(
        "attention: got a request for a second derivative; expected only first ones. Compute it "
        "through jax.nn.dot_product_attention, which has it."
    )


def _numpy(operands: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: np.asarray(x) for name, x in operands.items()}
    if "seed" in made:
        made["seed"] = int(made["seed"]) % 2**64
    return made


def _callback(run: Callable[..., Any], results: Any, method: str, *args: Any) -> Any:
    def on_cpu(*args: Any) -> Any:
        return jax.pure_callback(run, results, *args, vmap_method=method)

    def elsewhere(*args: Any) -> Any:
        def refuse(*_: Any) -> NoReturn:
            raise ArgumentTypeError(f"attention: {_ON_A_GPU}")

        return jax.pure_callback(refuse, results, *args, vmap_method=method)

    return jax.lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


def _reads_the_batch(options: dict[str, Any]) -> bool:
    """Whether a mask or score change depends on batch entries, of which vmap adds more."""
    changes = options["score_mod"]
    made = [options.get("mask"), *(changes if isinstance(changes, (list, tuple)) else [changes])]
    return any(
        (node.op == "symbol" and node.value == "b")
        or (node.op == "aligned" and node.value.array.ndim > len(node.value.axes))
        for each in made
        if isinstance(each, (Mask, Score))
        for node in walk(each.expr)
    )
