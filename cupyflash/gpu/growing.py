"""Launches for keys whose number grows from call to call, as in a generation.

Between two numbers of keys that have as many leaves, launches differ in strides and in the numbers
of keys alone: in words of their parameters that are linear in the number of keys. So one set of
launches serves all of them, and is told these words as it is told addresses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays import cuda_device
from ..arrays.unallocated import unallocated, unallocated_like
from ..problem.call import Array, Call
from ..problem.rows import DenseRows
from . import route
from .launch import CompiledRecipe, compiled_recipe
from .writer import Launch, Recipe

_LEAF = 64  # keys, of the longest distance at which nothing else may change


class Growing(NamedTuple):
    """Launches for several numbers of keys.

    Attributes
    ----------
    least, most : int
        The numbers of keys.
    compiled : CompiledRecipe
        The launches.
    words : tuple of (str, int, int)
        Names of the words that they are told, what each is without keys, and what a key adds.
    """

    least: int
    most: int
    compiled: CompiledRecipe
    words: tuple[tuple[str, int, int], ...]

    def told(self, keys: int) -> dict[str, int]:
        """Return the words for a number of keys."""
        return {name: first + step * keys for name, first, step in self.words}


def of(call: Call, wants_lse: bool) -> Growing | None:
    """Return the launches of a call on dense arrays and of those with a few keys more or less.

    Its keys and values are contiguous or keep their strides, and no mask or score change reads
    anything. Returns None if more than words of parameters would differ.
    """
    keys = int(call.k.shape[-2])
    least = (keys - 1) // _LEAF * _LEAF + 1
    most = least + _LEAF - 1
    middle = (least + most) // 2
    device = call.device
    assert device is not None
    recipes = {n: _recipe(call, n, device, wants_lse) for n in (least, middle, most, keys)}
    first = recipes[least]
    if any(_frame(each) != _frame(first) for each in recipes.values()):
        return None
    words: list[tuple[str, int, int]] = []
    made: list[Launch] = []
    for n, launch in enumerate(first.launches):
        templates = {keys: _words(each.launches[n]) for keys, each in recipes.items()}
        steps, rest = np.divmod(templates[most] - templates[least], most - least)
        for keys, template in templates.items():
            if rest.any() or (templates[least] + steps * (keys - least) != template).any():
                return None
        slots = list(launch.slots)
        for place in map(int, np.flatnonzero(steps)):
            step = int(steps[place])
            name = f"keys {len(words)}"
            words.append((name, int(templates[least][place]) - step * least, step))
            slots.append((8 * place, name))
        made.append(replace(launch, slots=tuple(slots)))
    return Growing(
        least, most, compiled_recipe(replace(first, launches=tuple(made)), device), tuple(words)
    )


def _recipe(call: Call, keys: int, device: int, wants_lse: bool) -> Recipe:
    """Return the launches of a call like another one with so many keys."""
    k, v = (_with(keys, x) for x in (call.k, call.v))
    rows = DenseRows(call.q.shape[-2], keys)
    problem = replace(call.problem, rows=rows)
    shape = (*problem.array_lead, *call.q.shape[-3:-1], problem.d_v)
    out = unallocated_like(call.q, shape, problem.dtype)
    lse = unallocated(shape[:-1], problem.accumulator) if wants_lse else None
    target = cuda_device.of(device)
    return route.forward(replace(call, k=k, v=v, problem=problem), target, out, lse).recipe


def _with(keys: int, x: Array) -> Any:
    """Return an array like keys or values, with so many rows."""
    strides = None if x.flags.c_contiguous else x.strides
    return unallocated((*x.shape[:-2], keys, x.shape[-1]), x.dtype, strides)


def _frame(recipe: Recipe) -> object:
    """Return all of a recipe but what kernels are told; maps tell them numbers of keys, too."""
    launches = [(x.special, x.grid, x.slots, len(x.template)) for x in recipe.launches]
    has_maps = any(x.maps for x in recipe.launches)
    return launches, dict(recipe.scratch), object() if has_maps else None, recipe.atomic_dq


def _words(launch: Launch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the parameters of a launch as words of eight bytes; those of addresses are 0."""
    template = bytearray(launch.template)
    template += bytes(-len(template) % 8)
    words = np.frombuffer(template, np.int64).copy()
    words[[offset // 8 for offset, _ in launch.slots]] = 0
    return words
