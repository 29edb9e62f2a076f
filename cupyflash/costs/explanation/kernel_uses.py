"""The steps of a route as an explanation lists them: one row for each kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...gpu.kernels.spec import KernelSpec, Tiles
from ...gpu.specialisation import Specialisation
from ...gpu.workspace import parts_of
from ...gpu.writer import KernelStep
from ...problem.call import Call
from ...problem.route import Route, Step
from .times import Units

OF_CODES = "numbers of the codes of q, k and v"


@dataclass(frozen=True)
class Use:
    """A kernel of the call, before anything is counted.

    Attributes
    ----------
    step : Step
        The step, or the first of several neighbouring ones with the same kernel.
    blocks : int
        Blocks of all of them.
    computes : str
        What they compute, in words.
    """

    step: Step
    blocks: int
    computes: str

    @property
    def part(self) -> str:
        """Which part of the call it computes."""
        return self.step.part

    @property
    def block_q(self) -> int:
        """Queries of a tile."""
        return self.step.block_q

    @property
    def block_kv(self) -> int:
        """Keys of a tile."""
        return self.step.block_kv

    @property
    def special(self) -> Specialisation | None:
        """What the kernel is compiled for; None on the CPU."""
        return self.step.special if isinstance(self.step, KernelStep) else None

    @property
    def spec(self) -> KernelSpec | None:
        """The kernel's spec, on a GPU."""
        return None if self.special is None else self.special.spec

    @property
    def tiles(self) -> Tiles | None:
        """The kernel's configuration, on a GPU."""
        return None if self.special is None else self.special.tiles

    @property
    def atomic_dq(self) -> bool:
        """Whether it computes its share of dq, too."""
        return self.special is not None and self.special.atomic_dq

    @property
    def adds_dq(self) -> bool:
        """Whether it adds this share to memory, or writes the zeros to which another one adds."""
        return (self.atomic_dq and not self.whole_dq) or self._clears_sums

    @property
    def _clears_sums(self) -> bool:
        slots = self.step.launch.slots if isinstance(self.step, KernelStep) else ()
        return self.part == "delta" and any(name == "dq_accum" for _, name in slots)

    @property
    def whole_dq(self) -> bool:
        """Whether it stores all of dq."""
        return self.special is not None and self.special.whole_dq

    @property
    def own_delta(self) -> bool:
        """Whether it computes delta itself."""
        return self.spec is not None and self.spec.own_delta

    @property
    def parts(self) -> int:
        """Bytes of the parts of dk and dv that are summed at the end."""
        arrays = self.step.arrays if isinstance(self.step, KernelStep) else {}
        found = (arrays.get(parts_of(name)) for name in ("dk", "dv"))
        return sum(spec.nbytes for spec in found if spec is not None)

    @property
    def lists(self) -> int:
        """Bytes of the lists of tiles that it writes or puts in order."""
        return self.step.scratch if self.part in ("lists", "order") else 0

    @property
    def units(self) -> Units:
        """What it multiplies by."""
        if self.spec is None or not self.spec.tensor_cores:
            return "no tensor cores"
        if self.part == "forward_codes":
            return "float8"
        return "mma.sync" if self.spec.architecture is None else "tensor cores"

    def blocks_of_tiles(self, call: Call) -> tuple[int, int, int]:
        """Return queries and keys of a tile, and the queries that the first tiles lack."""
        missing = 0
        if self.special is not None and self.block_kv:
            missing = self.special.missing_queries(int(call.problem.len_q))
        return self.block_q, self.block_kv, missing


def uses_of(route: Route) -> list[Use]:
    """Return the kernels of a route that run, and its main kernel."""
    steps = [step for step in route.steps if step.grid or step is route.main]
    widening = [step for step in steps if step.part == "numbers"]
    uses = [Use(step, step.grid, step.computes) for step in steps if step not in widening]
    if widening:  # the same kernel for q, k and v
        uses.insert(0, Use(widening[0], sum(step.grid for step in widening), OF_CODES))
    return uses
