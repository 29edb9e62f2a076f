"""Masks and score changes as inputs of a graph: arrays and integers may change, the rest is fixed.

torch.compile takes an object for a constant, and compiles again for another one. Tensors and
integers that it finds in an attribute are inputs of the graph. Each mask that is made after the
first compilation therefore has an attribute with its tensors and integers, and with a text that
says all the rest, by which graphs are told apart.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..arrays.device_arrays import is_device_array
from ..expr.structure import Structured, tree
from ..masks import Mask
from ..scores import Score
from . import tensors


class Parts(NamedTuple):
    """A mask or a score change in parts.

    Attributes
    ----------
    text : str
        The kind and the nodes of its structure, without integers.
    tables : tuple of torch.Tensor
        The arrays that it reads, in the same memory.
    integers : tuple of int
        Its integers, in the order of its nodes.
    """

    text: str
    tables: tuple[torch.Tensor, ...]
    integers: tuple[int, ...]


class Blank(NamedTuple):
    """The fixed part of a mask or a score change."""

    kind: type[Mask | Score]
    nodes: tuple[Any, ...]
    tables: int
    integers: int

    def filled(
        self,
        tables: Iterator[torch.Tensor],
        integers: Iterator[int],
        array_of: Callable[[torch.Tensor], Any] = tensors.array_of,
    ) -> Mask | Score:
        """Return the mask or score change with the next tensors, as arrays, and integers."""
        mine = tuple(itertools.islice(tables, self.tables))
        numbers = tuple(itertools.islice(integers, self.integers))
        if mine:
            known = _of_table.get(id(mine[0]))
            if known is not None and known._compiled_as is not None:
                _, held, same = known._compiled_as
                if same == numbers and all(map(operator.is_, held, mine)):
                    return known  # with what has been found out about it
        rest = iter(numbers)
        nodes = [(*node[:3], next(rest)) if _is_integer(node) else node for node in self.nodes]
        return self.kind.unwatched(tree(nodes, [*map(array_of, mine)]))


# Masks and score changes by the first tensor of their parts, as long as they exist.
_of_table: WeakValueDictionary[int, Mask | Score] = WeakValueDictionary()


def watch() -> None:
    """Give masks and score changes their parts from now on."""
    Structured.watcher = _parts


def _parts(made: Mask | Score) -> Parts | None:
    """Return the parts of a mask or a score change, or None if no graph can take it as inputs."""
    if type(made) not in _KINDS.values() or torch.compiler.is_compiling():
        return None
    if made.learned_tables:
        return None  # what is made of parts would have no gradients
    found, arrays = made.structure
    try:
        tables = tuple(map(_tensor, arrays))
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None  # an array without a tensor in the same memory
    nodes = tuple((*node[:3], None) if _is_integer(node) else node for node in found.nodes)
    integers = tuple(node[3] for node in found.nodes if _is_integer(node))
    if tables:
        _of_table[id(tables[0])] = made
    return Parts(repr((type(made).__name__, nodes, len(tables), len(integers))), tables, integers)


_KINDS: dict[str, type[Mask | Score]] = {"Mask": Mask, "Score": Score}


def _is_integer(node: Any) -> bool:
    return bool(node[0] == "constant" and node[1] == "int")


def _tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor in the same memory."""
    if is_device_array(array):
        return torch.from_dlpack(array)
    return tensors.tensor_of(array if array.flags.writeable else np.asarray(_Memory(array)))


class _Memory:
    """The memory of an array that is only read, which PyTorch takes for one that is written."""

    def __init__(self, array: Any) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def blank(text: str) -> Blank:
    """Return the fixed part that a text describes."""
    kind, *rest = ast.literal_eval(text)
    return Blank(_KINDS[kind], *rest)
