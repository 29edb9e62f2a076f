"""Dense and packed attention under grad and vmap: what XLA is told, and what the host computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import api, outputs, varlen
from ..errors import ArgumentError
from ..expr.nodes import walk
from ..masks import Mask
from ..problem import lookups
from ..problem.arguments import Dense, Packed
from ..problem.bound_exprs import trees
from ..problem.call import Call
from ..problem.options import NAMES, Options
from ..request import Request
from ..scores import Score
from . import arguments, host, target
from .seeds import number_of, seed_of, words_of


class Functions(NamedTuple):
    """The functions of NumPy arrays for dense or for packed arrays."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


DENSE = Functions(api.attention, api.attention_backward)
PACKED = Functions(varlen.attention_varlen, varlen.attention_varlen_backward)
_WITH_GRADIENTS = "q", "k", "v", "bias", "sink"  # in the order of `Gradients`


class Taken(NamedTuple):
    """The arguments of a call.

    Attributes
    ----------
    operands : dict
        Arrays by name, traced or not.
    constants : dict
        The other options, by name.
    alike : Options
        Options for checks, with zeros instead of arrays.
    """

    operands: dict[str, jax.Array]
    constants: dict[str, Any]
    alike: Options

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        """Zeros of the shapes of q, k and v, for checks."""
        q, k, v = (arguments.like(self.operands[name]) for name in "qkv")
        return q, k, v


def taken(q: Any, k: Any, v: Any, options: Options) -> Taken:
    """Return arguments, divided into arrays and constants."""
    operands: dict[str, Any] = {}
    for name, x in {"q": q, "k": k, "v": v, "bias": options.bias, "sink": options.sink}.items():
        operands[name] = arguments.optional(name, x)
    operands["mask"] = arguments.mask_array(options.mask)
    seed = seed_of(options.seed)
    if isinstance(seed, jax.Array):
        seed = words_of(seed)
    operands["seed"] = seed if isinstance(seed, jax.Array) else None
    operands = {name: x for name, x in operands.items() if x is not None}
    constants = {
        "mask": options.mask,
        "score_mod": options.score_mod,
        "scale": arguments.number("scale", options.scale, ", or multiply q by it and pass scale=1"),
        "dropout": arguments.number("dropout", options.dropout),
        "seed": seed,
        "precision": options.precision,
    }
    alike = dict.fromkeys(NAMES) | constants
    alike |= {name: arguments.like(operands[name]) for name in NAMES if name in operands}
    if "seed" in operands:
        alike["seed"] = 0
    constants = {name: value for name, value in constants.items() if name not in operands}
    return Taken(operands, constants, Options.of(**alike))


def checked(given: Taken, offsets: tuple[Any, ...] | None = None, bound: bool = True) -> Call:
    """Check a call. Masks and scores are bound to its shape unless its offsets are not known."""
    rows = Dense() if offsets is None else Packed(*offsets)
    call = Request(*given.qkv, rows, options=given.alike).call
    lookups.refuse(call, "for arrays of JAX")
    if bound:
        trees(call)
    return call


def standing_for(given: Taken, *offsets: jax.Array) -> tuple[Any, ...]:
    """Return offsets that stand for traced ones of queries and of keys, for checks."""
    aligned = given.alike.bias, given.operands.get("mask")
    sizes = ("len_q", "len_k")
    return tuple(
        arguments.offsets_like(x, size, rows, aligned)
        for x, size, rows in zip(offsets, sizes, given.qkv, strict=False)
    )


def computed(
    functions: Functions, given: Taken, call: Call, operands: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse. Arrays of dense calls have the same number of axes."""
    constants = given.constants
    names = list(operands)
    # Before the gradients, which are summed over the axes of a mesh that an array does not have.
    operands = dict(zip(names, target.varying_alike(list(operands.values())), strict=True))
    if not call.problem.dropout:
        operands = {name: x for name, x in operands.items() if name != "seed"}
    one_by_one = functions is PACKED or "sink" in operands or bool(call.problem.dropout)
    method = "sequential" if one_by_one or _reads_the_batch(constants) else "expand_dims"
    axes = operands["q"].ndim
    shapes = outputs.result_shapes(call)
    if call.matrices:
        shapes = (1, *shapes[0]), (1, *shapes[1])
    dtypes = call.problem.dtype, call.problem.accumulator
    out_and_lse = tuple(map(jax.ShapeDtypeStruct, shapes, dtypes))

    @jax.custom_vjp
    def forward(operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        def run(arrays: dict[str, Any], into: tuple[Any, ...]) -> Any:
            extra = arrays["q"].ndim - axes
            mapped = host.mapped_axes(arrays, extra) if extra else ()
            if extra and mapped != host.mapped_axes({n: arrays[n] for n in "qkv"}, extra):
                # A bias or a mask is mapped, and leading axes of a call are those of q, k and v.
                arrays["q"] = host.with_axes(arrays["q"], mapped)
            arrays = _with_seed(arrays)
            rows = dict(zip(("out", "lse_out"), into, strict=False))
            return functions.forward(**arrays, **rows, **constants, return_lse=True)

        out, lse = host.call(run, out_and_lse, method, operands)
        return out, lse

    def with_residuals(primals: dict[str, Any]) -> tuple[Any, Any]:
        operands = {name: x.value for name, x in primals.items()}
        # Names without an array: a program's constants.
        unwanted = {
            name: () for name in ("bias",) if name in primals and not primals[name].perturbed
        }
        out, lse = forward(operands)
        return (out, lse), (operands, out, lse, unwanted)

    def backward(residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
        operands, out, lse, unwanted = residuals
        cotangents = [
            jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents
        ]
        how = {**constants, "bias_gradient": False} if unwanted else constants
        rows = dict(zip(("do", "dlse", "out", "lse"), (*cotangents, out, lse), strict=True))
        inputs = [name for name in _WITH_GRADIENTS if name in operands and name not in unwanted]
        results = [jax.ShapeDtypeStruct(operands[n].shape, operands[n].dtype) for n in inputs]

        def run(arrays: dict[str, Any], rows: dict[str, Any], into: tuple[Any, ...]) -> list[Any]:
            extra = arrays["q"].ndim - axes
            if extra:  # every gradient has the mapped axes, so every array needs them
                mapped = host.mapped_axes(arrays | rows, extra)
                arrays = {name: host.with_axes(x, mapped) for name, x in arrays.items()}
                rows = {name: host.with_axes(x, mapped) for name, x in rows.items()}
            if into:
                given = dict(zip(inputs, into, strict=True))
                rows = rows | {"grads_out": tuple(map(given.get, _WITH_GRADIENTS))}
            made = functions.backward(**rows, **_with_seed(arrays), **how)
            return [x for x in made if x is not None]

        @jax.custom_jvp
        def gradients(operands: dict[str, Any], rows: dict[str, Any]) -> list[Any]:
            made: list[Any] = host.call(run, results, method, operands, rows)
            return made

        gradients.defjvp(_no_second)
        made = dict(zip(inputs, gradients(operands, rows), strict=True))
        for name in unwanted:
            made[name] = jnp.zeros(operands[name].shape, operands[name].dtype)
        for name in operands:  # masks, seeds and offsets have none
            if name not in made:
                made[name] = np.zeros(operands[name].shape, jax.dtypes.float0)
        return (made,)

    forward.defvjp(with_residuals, backward, symbolic_zeros=True)
    out, lse = forward(operands)
    return (out[0], lse[0]) if call.matrices else (out, lse)


def _no_second(*_: Any) -> NoReturn:
    raise ArgumentError(
        "attention: got a request for a second derivative; expected only first ones. Compute it "
        "through jax.nn.dot_product_attention, which has it."
    )


def _with_seed(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays with the number that a seed is, or its array on a GPU."""
    return arrays | ({"seed": number_of(arrays["seed"])} if "seed" in arrays else {})


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


def padded(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays of a dense call with equally many axes, so that those of vmap come first.

    Matrices get an axis of heads.
    """
    matrices = {name: x[None] for name in "qkv" if (x := operands[name]).ndim == 2}
    operands = operands | matrices
    axes = max(operands[name].ndim for name in "qkv")
    return {
        name: x if name in ("sink", "seed") else _with_rank(x, axes) for name, x in operands.items()
    }


def _with_rank(x: jax.Array, axes: int) -> jax.Array:
    return x if x.ndim >= axes else jnp.reshape(x, (1,) * (axes - x.ndim) + x.shape)
