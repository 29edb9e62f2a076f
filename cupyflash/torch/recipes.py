"""Masks and score changes as tuples of names and numbers, which torch.compile can trace.

torch.compile cannot trace the constructors of `cupyflash.masks` and `cupyflash.scores`. If a
compiled function calls one of the three constructors below, the result there is a tuple instead:
the constructor's name and its arguments. If one of them is given an array, and in each other
constructor that reads arrays, the graph breaks: the constructor runs outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import masks, scores
from ..expr import arguments

_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal,
    "window": masks.window,
    "softcap": scores.softcap,
}


def made(value: Any) -> Any:
    """Return the mask or score change that a tuple describes, and anything else as it is."""
    if type(value) is tuple and value and value[0] in _CONSTRUCTORS:
        return _CONSTRUCTORS[value[0]](*value[1:])
    return value


def band(causal: bool, left: int | None, right: int | None, offset: int | None) -> Any:
    """Return the mask of a diagonal band, or None if it contains every pair."""
    if causal:
        right = 0
    if left is None:
        if right is None:
            return None
        if right == 0:
            return masks.causal(offset)
    return masks.window(left, right)


arguments.call = torch.compiler.disable(
    arguments.call,
    reason="a mask or a score reads an array; make it outside of the compiled function",
)

arguments.meant = made


def _numbers(name: str, *args: Any) -> Any:
    for value in args:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return arguments.call(_CONSTRUCTORS[name], args, {})
    return (name, *args)


@torch.compiler.substitute_in_graph(masks.causal)
def _causal(offset: Any = None) -> Any:
    return _numbers("causal", offset)


@torch.compiler.substitute_in_graph(masks.window)
def _windowed(left: int | None, right: int | None, offset: Any = None) -> Any:
    return _numbers("window", left, right, offset)


@torch.compiler.substitute_in_graph(scores.softcap)
def _capped(c: float) -> Any:
    return _numbers("softcap", c)
