"""The route of a call: the kernels that serve it, in order; and what remains of a computed call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .call import Call, Plan


@dataclass(frozen=True, eq=False)
class Step(ABC):
    """A kernel of a route.

    Attributes
    ----------
    kernel : str
        Its name.
    part, computes : str
        Which part of the call it computes, and the same in words.
    block_q, block_kv : int
        Queries and keys of a tile of scores; 0 if it works on rows, or for several entries at once.
    why : function
        Returns in words why it is this kernel, with these tiles.
    """

    kernel: str
    part: str
    computes: str
    block_q: int
    block_kv: int
    why: Callable[[], str]

    @property
    def reason(self) -> str:
        """Why it is this kernel, with these tiles."""
        return self.why()

    @property
    @abstractmethod
    def grid(self) -> int:
        """Number of blocks; with none of them, it does not run."""

    @property
    @abstractmethod
    def scratch(self) -> int:
        """Bytes of the route's scratch memory that it reads or writes."""


@dataclass(frozen=True, eq=False)
class Route(ABC):
    """The kernels that serve a call.

    Attributes
    ----------
    call : Call
        The call as its main kernel reads it: codes may have become numbers, and the heads of a
        group may be rows of one head.
    steps : tuple of Step
        The kernels, in order; the scratch memory of several steps may be the same.
    """

    call: Call
    steps: tuple[Step, ...]

    @property
    def main(self) -> Step:
        """The first step that works on tiles; the call's plan is about it."""
        return next(step for step in self.steps if step.block_kv)

    @property
    def plan(self) -> Plan:
        """What users are told of the route."""
        main = self.main
        return Plan(main.kernel, main.block_q, main.block_kv, main.reason)

    @property
    @abstractmethod
    def scratch(self) -> int:
        """Bytes of scratch memory of all steps together."""


class CallResult(NamedTuple):
    """What remains of a computed call.

    Attributes
    ----------
    visited : int
        On the CPU, how many tiles were not EMPTY.
    compiled : CompiledRecipe or None
        On a GPU, the launches, which can be repeated unless arrays had to be copied first.
    tables : tuple of array
        The arrays that its kernels look up.
    """

    visited: int = 0
    compiled: Any = None
    tables: tuple[Any, ...] = ()
