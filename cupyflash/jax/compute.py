"""Dense and packed attention: its arguments, as checks need them and as XLA is told them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import api, forward_mode, outputs, second_order, varlen
from ..expr.nodes import walk
from ..masks import Mask
from ..problem import lookups
from ..problem.arguments import Dense, Packed
from ..problem.bound_exprs import trees
from ..problem.call import Call
from ..problem.options import NAMES, Options
from ..request import Request
from ..scores import Score
from . import arguments, target
from .constants import Constants
from .constants import alike as constants_alike
from .derivatives import Functions, Part, Setting
from .seeds import seed_of, words_of

DENSE = Functions(
    api.attention,
    api.attention_backward,
    forward_mode.attention_jvp,
    second_order.attention_backward_jvp,
)
PACKED = Functions(
    varlen.attention_varlen,
    varlen.attention_varlen_backward,
    forward_mode.attention_varlen_jvp,
    second_order.attention_varlen_backward_jvp,
)


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
    alike = dict.fromkeys(NAMES) | {name: constants_alike(x) for name, x in constants.items()}
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

    setting = Setting(functions, Constants(constants), tuple(operands), axes, method, dtypes[1])
    made = Part(setting, setting.names, ("out", "lse")).bind(operands, out_and_lse)
    out, lse = made["out"], made["lse"]
    return (out[0], lse[0]) if call.matrices else (out, lse)


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
