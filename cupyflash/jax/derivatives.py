"""Derivatives of attention as JAX asks for them: rules, by the names of what a function takes.

With x for q, k, v, the bias and the sink, there are four functions: results (out and lse); their
tangents along tx; gradients dx, which are the transpose of tangents; and tangents of gradients,
which are their own transpose, because second derivatives are symmetric. Tangents of tangents can
only be transposed: no kernel computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from ..errors import ArgumentError
from . import host, target
from .arguments import is_traced
from .constants import Constants
from .seeds import number_of

MOVING = "q", "k", "v", "bias", "sink"  # in the order of `Gradients`
_ROWS = "out", "lse", "do", "dlse", "tdo", "tdlse"
_ALL = "out", "tout", "lse", "tlse"
_TARGETS = {"out": "out", "tout": "tout_out", "lse": "lse_out", "tlse": "tlse_out"}
_GRADIENTS = tuple("d" + name for name in MOVING)
_ELSEWHERE = (
    "Compute this derivative through jax.nn.dot_product_attention, which takes arrays of shape "
    "(B, L, H, D)."
)
_THIRD = f"attention: got a request for a third derivative; expected second ones. {_ELSEWHERE}"
_FORWARD_TWICE = (
    "attention: got a request for two derivatives in forward mode; expected one, over or under "
    f"reverse mode, as in jax.hessian. {_ELSEWHERE}"
)
Arrays = dict[str, Any]


class Functions(NamedTuple):
    """The functions of NumPy arrays for dense or for packed arrays."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    jvp: Callable[..., Any]
    backward_jvp: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Setting:
    """What the functions of a call have in common.

    Attributes
    ----------
    functions : Functions
        They compute.
    constants : Constants
        The options that are no operands.
    names : tuple of str
        The operands that are arrays.
    axes : int
        Axes of q without those of vmap.
    method : "sequential" or "expand_dims"
        What vmap does, as in `jax.pure_callback`.
    accumulator : dtype
        What sums are computed in.
    """

    functions: Functions
    constants: Constants
    names: tuple[str, ...]
    axes: int
    method: str
    accumulator: np.dtype[Any]


class Part:
    """One of the functions of a call, as a function of arrays with derivatives.

    The names of what it takes are those of operands, "t" before one of these for its tangent, "u"
    for a second tangent, and rows: out, lse, their gradients do and dlse, and tangents of these.
    Gradients by an operand have "d" before its name.
    """

    def __init__(self, setting: Setting, takes: Sequence[str], gives: Sequence[str]) -> None:
        self.setting, self.takes, self.gives = setting, tuple(takes), tuple(gives)
        self._has = set(takes)
        self._is_forward = self.gives == ("out", "lse")
        self._is_second = "do" in self._has and not self._has <= {*setting.names, *_ROWS[:4]}

    def bind(self, arrays: Arrays, results: Sequence[Any]) -> Arrays:
        """Call it in a program; `results` have the shapes and dtypes of what it gives."""
        never = _FORWARD_TWICE if any(name[0] == "u" for name in self.takes) else ""
        like = tuple(map(self._like, self.gives))
        function = target.Function(self.run, rules=self, never=never, like=like)
        operands = [arrays[name] for name in self.takes]
        made = target.bind(function, results, self.setting.method, operands)
        return dict(zip(self.gives, made, strict=True))

    def _like(self, result: str) -> int | None:
        """Return the operand whose memory order a result has; None for rows of numbers."""
        operand = {"out": "q", "tout": "q", "lse": None, "tlse": None}.get(result, result[1:])
        return None if operand is None else self.takes.index(operand)

    # -- what it computes

    def run(
        self, operands: Sequence[Any], into: tuple[Any, ...], shapes: Sequence[tuple[int, ...]]
    ) -> list[Any]:
        """Return results for arrays, in the arrays of `into` where it is possible."""
        arrays = dict(zip(self.takes, operands, strict=True))
        rows = dict(zip(self.gives, into, strict=False))
        if "seed" in arrays:
            arrays["seed"] = number_of(arrays["seed"])
        extra = arrays["q"].ndim - self.setting.axes
        if not extra:
            made = self._computed(arrays, rows)
            return [made[name] for name in self.gives]
        wanted = dict(zip(self.gives, shapes, strict=True))
        arrays = self._with_equal_axes(arrays, wanted, extra)
        mapped = host.mapped_axes({name: arrays[name] for name in "qkv"}, extra)
        for name in list(rows):
            axes = mapped if name in _ALL else arrays[name[1:]].shape[:extra]
            if wanted[name][:extra] != axes:
                del rows[name]  # a sum over axes of vmap, which is not computed there
        made = self._computed(arrays, rows)
        accumulator = self.setting.accumulator
        return [host.summed(made[name], wanted[name], accumulator) for name in self.gives]

    def _with_equal_axes(
        self, arrays: Arrays, wanted: Mapping[str, tuple[int, ...]], extra: int
    ) -> Arrays:
        """Return arrays with the axes of vmap that the functions need; they are 1 if unmapped.

        A tangent has the shape of its operand, and so has a gradient of each entry. The leading
        axes of a call are those of q, k and v.
        """
        shapes = [x.shape for x in arrays.values()] + list(wanted.values())
        mapped = np.broadcast_shapes(*(shape[:extra] for shape in shapes))
        axes = {}
        for name in self.setting.names:
            alike = [arrays[each].shape for each in (name, "t" + name) if each in arrays]
            alike += [wanted[each] for each in ("d" + name,) if each in wanted]
            axes[name] = np.broadcast_shapes(*(shape[:extra] for shape in alike))
        if np.broadcast_shapes(*(axes[name] for name in "qkv")) != mapped:
            axes["q"] = mapped
        axes |= {"t" + name: lengths for name, lengths in axes.items()}
        axes |= dict.fromkeys(_ROWS, mapped)
        return {name: host.with_axes(x, axes[name]) for name, x in arrays.items()}

    def _computed(self, arrays: Arrays, rows: Arrays) -> Arrays:
        """Return what the function for NumPy arrays returns, by name, in `rows` if it is there."""
        functions, constants = self.setting.functions, self.setting.constants.beside(arrays["q"])
        if self._is_forward:
            into = {_TARGETS[name]: x for name, x in rows.items()}
            made = functions.forward(**arrays, **into, **constants, return_lse=True)
            return dict(zip(self.gives, made, strict=True))
        if "do" not in self._has:
            into = {_TARGETS[name]: x for name, x in rows.items()}
            arrays = {name: x for name, x in arrays.items() if name not in _ROWS}
            made = functions.jvp(**arrays, **into, **constants, return_lse=True)
            return dict(zip(_ALL, made, strict=True))
        how = dict(constants)
        if "bias" in self._has and "dbias" not in self.gives:
            how["bias_gradient"] = False
        if rows:
            how["grads_out"] = tuple(map(rows.get, _GRADIENTS))
        if not self._is_second:
            made = functions.backward(**arrays, **how)
            return dict(zip(_GRADIENTS, made, strict=True))
        second = functions.backward_jvp(**arrays, **how)
        of_operands = zip(_GRADIENTS, second.gradients, strict=True)
        return {"tout": second.tout, "tlse": second.tlse, **dict(of_operands)}

    # -- its derivatives

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return results and their tangents: JAX's rule for forward mode."""
        arrays = dict(zip(self.takes, primals, strict=True))
        moves = {
            name: t for name, t in zip(self.takes, tangents, strict=True) if _is_wanted(name, t)
        }
        of_operands = {"t" + name: moves[name] for name in MOVING if name in moves}
        if self._is_forward:
            return self._with_tangents(arrays, of_operands, results)
        made = self.bind(arrays, results)
        of_tangents = {n: t for n, t in moves.items() if n[1:] in MOVING and n not in MOVING}
        if self._is_second and any(name in moves for name in (*MOVING, "do", "dlse")):
            raise ArgumentError(_THIRD)
        moved: Arrays = {}
        if "do" not in self._has:
            if any(name[0] == "u" for name in self.takes):
                raise ArgumentError(_THIRD)
            operands = {n: x for n, x in arrays.items() if n[1:] not in MOVING or n in MOVING}
            if of_tangents:  # linear in these
                moved = self._other(operands | of_tangents, results)
            if of_operands:
                along = {"u" + name[1:]: t for name, t in of_operands.items()}
                more = self._other(arrays | along, results)
                moved = {n: moved[n] + x if moved else x for n, x in more.items()}
        else:
            of_rows: Arrays = {n: moves[n] for n in ("tdo", "tdlse") if n in moves}
            of_rows |= {"t" + name: moves[name] for name in ("do", "dlse") if name in moves}
            fixed = {n: x for n, x in arrays.items() if n in (*self.setting.names, *_ROWS[:4])}
            along = of_operands | of_tangents
            if along or (self._is_second and of_rows):
                moved = self._other(fixed | along | of_rows, results)
            elif of_rows:  # gradients are linear in do and dlse
                linear = {name[1:]: t for name, t in of_rows.items()}
                given = {n: x for n, x in fixed.items() if n not in ("do", "dlse")} | linear
                given.setdefault("do", jnp.zeros_like(arrays["do"]))
                moved = self._other(given, results)
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in made.values()]
        return list(made.values()), list(moved.values()) if moved else zeros

    def _with_tangents(
        self, arrays: Arrays, along: Arrays, results: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        if along and not any(map(is_traced, (*arrays.values(), *along.values()))):
            both = Part(self.setting, (*self.takes, *along), _ALL)
            order = results[0], results[0], results[1], results[1]
            made = both.bind(arrays | along, order)
            return [made["out"], made["lse"]], [made["tout"], made["tlse"]]
        rows = self.bind(arrays, results)
        if not along:
            zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in rows.values()]
            return list(rows.values()), zeros
        given = arrays | rows | along
        moved = Part(self.setting, tuple(given), ("tout", "tlse")).bind(given, results)
        return list(rows.values()), list(moved.values())

    def _other(self, given: Arrays, results: Sequence[Any]) -> Arrays:
        """Call the function of these arrays that gives the same."""
        return Part(self.setting, tuple(given), self.gives).bind(given, results)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return cotangents of operands in which this is linear: JAX's rule for reverse mode."""
        arrays = dict(zip(self.takes, operands, strict=True))
        linear = {n: x.aval for n, x in arrays.items() if ad.is_undefined_primal(x)}
        known = {n: x for n, x in arrays.items() if n not in linear}
        came = dict(zip(self.gives, cotangents, strict=True))
        came = {name: x for name, x in came.items() if type(x) is not ad.Zero}
        if not came:
            return [ad.Zero(linear[name]) if name in linear else None for name in self.takes]
        if "do" in self._has:
            along = {"t" + name[1:]: x for name, x in came.items() if name[1:] in MOVING}
            if self._is_second:
                names = {"tdo": "tout", "tdlse": "tlse"}
                came = {"td" + name[1:].replace("out", "o"): x for name, x in came.items()}
                along |= {name: x for name, x in came.items() if name in names}
            else:
                names = {"do": "tout", "dlse": "tlse"}
            names |= {name: "d" + name[1:] for name in linear if name not in names}
            fixed = {n: x for n, x in known.items() if n in (*self.setting.names, *_ROWS[:4])}
            given = fixed | along
        else:
            rows = {"d" + name[1:].replace("out", "o"): x for name, x in came.items()}
            names = {name: "d" + name[1:] for name in linear}
            given = known | rows
            given.setdefault("do", jnp.zeros_like(known["out"]))
        made = Part(self.setting, tuple(given), tuple(names[name] for name in linear)).bind(
            given, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in linear.values()]
        )
        return [made[names[name]] if name in linear else None for name in self.takes]


def _is_wanted(name: str, tangent: Any) -> bool:
    """Whether there is a tangent. What comes through out and lse is part of the others."""
    is_zero = type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0
    return not is_zero and name not in ("out", "lse")
