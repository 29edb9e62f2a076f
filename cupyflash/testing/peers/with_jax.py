"""JAX, and the libraries of layers on it: flax and equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..options import mask_array
from .base import (
    Array,
    Documented,
    Functions,
    Peer,
    all_rounded,
    no_gradient_of_more,
    rounded_weights,
)


def by_vjp(attend: Callable[..., Any]) -> Functions:
    """Make functions of one of JAX's arrays: ``attend(q, k, v, mask=, bias=, scale=)``."""
    import jax

    def options_of(q: Array, k: Array, options: dict[str, Any]) -> dict[str, Any]:
        options = {name: x for name, x in options.items() if name != "return_lse"}
        shape = (*q.shape[:-1], k.shape[-2])
        if options.get("mask") is not None:
            allowed = np.broadcast_to(np.array(mask_array(options["mask"], q, k)), shape)
            options = options | {"mask": allowed}
        if options.get("bias") is not None:
            bias = np.broadcast_to(options["bias"], shape).astype(q.dtype)
            options = options | {"bias": bias}
        return options

    def of_outputs(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attend(q, k, v, **options)

    def of_gradients(do: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        _, vjp = jax.vjp(lambda *x: attend(*x, **options)[0], q, k, v)
        return vjp(do)

    # One compilation for a shape and a scale, instead of one for each step.
    compiled, gradients = (
        jax.jit(each, static_argnames="scale") for each in (of_outputs, of_gradients)
    )

    def forward(q: Array, k: Array, v: Array, **options: Any) -> Any:
        out, lse = compiled(q, k, v, **options_of(q, k, options))
        return np.asarray(out), None if lse is None else np.asarray(lse)

    def backward(do: Array, q: Array, k: Array, v: Array, *_: Any, **options: Any) -> Any:
        made = gradients(do, q, k, v, **options_of(q, k, options))
        return tuple(np.asarray(x) for x in made)

    return Functions(forward, backward)


def dot_product_attention(implementation: str) -> Functions:
    """Return JAX's function by one of its implementations."""
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any, scale: float | None = None, **options: Any) -> Any:
        turned = [jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (q, k, v)]
        if implementation == "cudnn":  # columns are filled up to a multiple of 8
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            turned = [jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % 8)]) for x in turned]
        out, lse = jax.nn.dot_product_attention(
            *turned, scale=scale, implementation=implementation, return_residual=True, **options
        )
        return jnp.swapaxes(out, 1, 2)[..., : v.shape[-1]], jnp.swapaxes(lse, 1, 2)

    return by_vjp(attend)


def _flax() -> Functions:
    import flax.nnx
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        turned = [jnp.swapaxes(jnp.asarray(x), 1, 2) for x in (q, k, v)]
        out = flax.nnx.dot_product_attention(*turned, **options)
        return jnp.swapaxes(out, 1, 2), None

    return by_vjp(attend)


def _equinox() -> Functions:
    """equinox.nn.MultiheadAttention, whose projections are the identity."""
    import equinox
    import jax
    import jax.numpy as jnp

    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        heads, width = q.shape[1], q.shape[3]
        layer = equinox.nn.MultiheadAttention(heads, heads * width, key=jax.random.PRNGKey(0))
        one = jnp.eye(heads * width, dtype=q.dtype)
        names = ("query_proj", "key_proj", "value_proj", "output_proj")
        layer = equinox.tree_at(
            lambda x: [getattr(x, name).weight for name in names], layer, [one] * 4
        )
        flat = [jnp.swapaxes(jnp.asarray(x), 1, 2).reshape(x.shape[0], x.shape[2], -1)
                for x in (q, k, v)]  # fmt: skip
        out = [layer(*(x[b] for x in flat), None if mask is None else mask[b])
               for b in range(q.shape[0])]  # fmt: skip
        made = jnp.stack(out).reshape(q.shape[0], q.shape[2], heads, width)
        return jnp.swapaxes(made, 1, 2), None

    return by_vjp(attend)


PEERS = (
    Peer(
        "jax", "jax", "jax", "pip install jax", lambda: dot_product_attention("xla"), ("float32",),
        ("masks", "bias", "scale", "gqa", "lengths", "strides", "finite", "lse"),
        {"precision": rounded_weights, "serves": no_gradient_of_more, "empty_rows": "mean",
         "shapes": 3},
        Documented("(B, L, H, D)", alignment="is_causal at the first key",
                   lse="natural logarithm, in the type of the query"),
        {"rows_that_see_nothing": "A row whose bias is -inf everywhere is NaN."},
    ),
    Peer(
        "flax", "flax", "flax", "pip install flax", _flax, ("float32",),
        ("masks", "bias", "lengths", "strides", "finite"),
        {"precision": all_rounded, "serves": no_gradient_of_more, "empty_rows": "mean",
         "shapes": 3},
        Documented("(B, L, H, D)", alignment="is_causal at the first key"),
    ),
    Peer(
        "equinox", "equinox", "equinox", "pip install equinox", _equinox, ("float32",),
        ("masks", "lengths", "strides", "finite"),
        {"precision": rounded_weights, "empty_rows": "mean", "shapes": 3},
        Documented("(L, H D), batches by vmap"),
    ),
)  # fmt: skip
