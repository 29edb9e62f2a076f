"""Runs the kernels of a changed text on the problems, and says what notices the change.

Everything that no mutant changes is done once: bounds, launches, and what memory holds after each
of them. A mutant's kernel is compiled, and where its code differs it runs for every problem, from
the memory that was there before it.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from emulator import build
from emulator.calls import Emulator
from emulator.machine import FORWARD, Fault, Machine, Schedule
from emulator.memory import encode
from harness import GRADIENTS, bound_backward, bound_forward, call_of, with_offsets
from placement import Layout, Placed

from cupyflash.arrays import device_arrays
from cupyflash.expr.cuda import generate
from cupyflash.gpu import launch, row_launches
from cupyflash.gpu.kernels import sm90, sm90_fp8
from cupyflash.gpu.specialisation import Specialisation
from cupyflash.problem.call import Gradients
from cupyflash.rowwise import COMBINE
from cupyflash.testing import rho

from . import generators
from .compiled import DoesNotCompile, disassembly, library, linked, object_of
from .expressions import Check, Make, MaskCheck, ScoreCheck
from .functions import FunctionCheck
from .memory import Guarded, GuardedCopies
from .problems import Case, Parts, parts
from .suite import problems

Array = np.ndarray[Any, Any]
Read = Callable[[str], str]

# What each kernel writes. What others read of it is computed again, by the kernels as they are.
WRITES = {
    "forward_simt": ("out", "lse"),
    "forward_sm80": ("out", "lse"),
    "forward_sm90": ("out", "lse"),
    "forward_sm90_tf32": ("out", "lse"),
    "backward_delta": ("dq", "dk", "dv", "dbias", "dsink"),
    "backward_sink": ("dsink",),
    "backward_simt_dkdv": ("dk", "dv"),
    "backward_simt_dq": ("dq",),
    "backward_sm80_dkdv": ("dk", "dv"),
    "backward_sm80_dkdv_tile": ("dq", "dk", "dv"),
    "backward_sm80_dkdv_dbias": ("dq", "dk", "dv", "dbias"),
    "backward_sm80_dq": ("dq",),
    "backward_sm90_dkdv": ("dk", "dv"),
    "backward_dq_rows": ("dq",),
    "backward_sums": ("dk", "dv", "dbias", "dsink"),
    "backward_f64_dkdv": ("dk", "dv"),
    "backward_f64_dq": ("dq",),
    "backward_bias": ("dbias",),
    "backward_sm80_bias": ("dbias",),
    "backward_sm90_bias": ("dbias",),
    "combine": ("out", "lse"),
}
# What is tried on its own too, outside of a kernel.
OWN_FILES = {f"common/{name}.cuh" for name in ("expression", "lookup", "number", "philox")}
RUNS = 3.0  # seconds of its own time that a launch gets


class Noticed(Exception):
    """A mutant was noticed."""


@dataclass
class Step:
    """A launch, with what memory held before and after it."""

    special: Specialisation
    grid: int
    packed: bytearray
    text: str = ""
    after: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Run:
    """A problem in memory: its launches, and what its results must be."""

    name: str
    schedule: Schedule
    steps: list[Step]
    outputs: dict[str, Guarded]
    wanted: dict[str, tuple[Array, Array]]
    before: dict[str, bytes]
    kept: Any  # so that addresses stay
    nan: dict[str, Array] | None = None
    untouched: bool = False
    foreign_lse: bool = False
    counted: int | None = None

    def state_before(self, number: int) -> dict[str, bytes]:
        """Return what the outputs hold before a launch."""
        return self.steps[number - 1].after if number else self.before

    def restore(self, state: dict[str, bytes]) -> None:
        """Set what the outputs hold."""
        for name, each in self.outputs.items():
            each.restore(state[name])

    def state(self) -> dict[str, bytes]:
        """Return what the outputs hold now."""
        return {name: each.bytes() for name, each in self.outputs.items()}

    def judge(self, number: int, machines: Callable[[Step], Machine]) -> None:
        """Raise `Noticed` if what a launch left is not what it should be."""
        step = self.steps[number]
        changed = [name for name, x in self.state().items() if x != step.after[name]]
        if not changed:
            return
        writes = WRITES[step.special.kernel]
        for name in changed:
            if not self.outputs[name].same_beside(step.after[name]):
                raise Noticed(f"{self.name}: writes beside {name}")
            if name not in writes and name != "workspace":
                raise Noticed(f"{self.name}: another {name}")
        if step.special.atomic_dq:
            writes = (*writes, "dq")
        later = [other.special.kernel for other in self.steps[number + 1 :]]
        if step.special.atomic_dq or "delta" in step.special.kernel or "backward_sums" in later:
            for other in self.steps[number + 1 :]:
                machines(other).launch(other.grid, bytearray(other.packed), self.schedule)
        for name in writes:
            if name in (self.wanted if self.nan is None else self.nan):
                self._judge(name)

    def _judge(self, name: str) -> None:
        values = self.outputs[name].view
        if self.nan is not None:
            known = self.nan[name]
            if (np.isnan(values) != (known if known.dtype == bool else np.isnan(known))).any():
                raise Noticed(f"{self.name}: {name} is NaN elsewhere")
            if self.untouched and not self.outputs[name].untouched()[known].all():
                raise Noticed(f"{self.name}: {name} is written elsewhere")
            if known.dtype != bool and not _near(values, known):
                raise Noticed(f"{self.name}: {name} is not near")
            return
        exact, bound = self.wanted[name]
        with np.errstate(invalid="ignore"):  # NaN that nobody overwrote may be a signalling one
            worst = rho(values.reshape(exact.shape), exact, bound)
        if not worst.value <= 1:
            raise Noticed(f"{self.name}: {name} has rho {worst.value:.3g}")


def _near(values: Array, known: Array) -> bool:
    """Whether numbers agree to a share of the largest; infinite ones are to be the same."""
    values, known = values.astype(np.float64), known.astype(np.float64)
    finite = np.isfinite(known)
    if not np.array_equal(values[~finite], known[~finite], equal_nan=True):
        return False
    error = np.abs(values[finite] - known[finite])
    return bool((error <= 0.02 * np.abs(known[finite]).max(initial=0.0)).all())


def _recorded(emulator: Emulator, copies: GuardedCopies, work: Callable[[], Any]) -> Any:
    """Return the launches of `work`, without running anything."""
    steps: list[Step] = []

    def ready(made: Any, _: int) -> Any:
        def start(addresses: Any, _: Any) -> None:
            for each in made:
                maps = b"".join(encode(x, addresses[x.name]) for x in each.maps)
                packed, text = each.packed(addresses) + maps, build.text(each.special)
                steps.append(Step(each.special, each.grid, packed, text))

        return SimpleNamespace(start=start)

    def to_device(array: Any, dtype: Any = None) -> Array:
        held = np.ascontiguousarray(array, dtype)
        copied: Array = copies.array(held)
        return copied

    with (
        emulator._answering(ready),
        mock.patch.object(sm90, "_slower", return_value=None),  # problems are small
        mock.patch.object(sm90_fp8, "SHORTEST", 1),
        mock.patch.object(device_arrays, "to_device", to_device),
    ):
        work()
    return steps


def _run_of(case: Case, wanted: Callable[[Step], bool] = lambda step: True) -> Run | None:
    """Return a problem's launches and bounds, or None where no launch is wanted."""
    problem, blocks = case.problem, case.blocks
    emulator = Emulator(blocks, case.schedule)
    copies = GuardedCopies(problem.seed % 2)
    dirty = dataclasses.replace(problem, **case.arrays)
    arrays = {name: copies.array(getattr(dirty, name)) for name in "qkv"}
    call = call_of(dataclasses.replace(problem, options=copies.options(problem.options), **arrays))
    call = dataclasses.replace(call, device=0)
    if case.wrong_offsets is not None:
        call = with_offsets(call, [np.array(x) for x in case.wrong_offsets])
    likes = {
        "out": _like(problem.do), "lse": np.zeros(problem.do.shape[:-1], problem.accumulator)
    }  # fmt: skip
    owners = {name: getattr(problem, name) for name in "qkv"}
    owners |= {name: problem.options.get(name) for name in ("bias", "sink")}
    likes |= {f"d{name}": _like(x) for name, x in owners.items() if x is not None}
    if problem.layouts == "random":
        likes["out"] = _spread(problem.do.shape, problem.dtype)
        likes["lse"] = _spread(problem.do.shape[:-1], problem.accumulator)
        likes["dq"] = _spread(problem.q.shape, problem.dtype)
    likes["workspace"] = Placed((emulator.workspace_size(call),), np.uint8).view
    likes["visited"] = np.zeros(1, np.uint64)
    views = {name: copies.array(x, True) for name, x in likes.items()}
    views["visited"][...] = 0
    counter = None if case.counted is None else views["visited"]
    gradients = Gradients(*(views.get(name) for name in GRADIENTS))
    do, dlse = copies.array(dirty.do), copies.array(problem.dlse)

    def work() -> None:
        launch.forward(call, views["out"], views["lse"], visited=counter)
        if case.nan is None or "dq" in case.nan:
            launch.backward(
                call, do, views["out"], views["lse"], dlse, gradients, views["workspace"],
                visited=counter, deterministic=case.deterministic,
            )  # fmt: skip

    steps = _recorded(emulator, copies, work)
    if not any(map(wanted, steps)):
        return None
    outputs = {name: copies.guarded(x) for name, x in likes.items()}
    exact: dict[str, tuple[Array, Array]] = {}
    if case.nan is None:
        tensor = blocks.forward_without_arrays(call.problem).name == "forward_sm80"
        forward, backward = bound_forward(problem, tensor), bound_backward(problem, tensor)
        assert problem.hard or not (forward.ill_conditioned or backward.ill_conditioned), case.name
        exact = {"out": forward.out, "lse": forward.lse}
        exact |= {name: getattr(backward, name) for name in GRADIENTS}
        exact = {x: exact[x] for x in case.judged or exact if outputs.get(x) is not None}
    before = {name: each.bytes() for name, each in outputs.items()}
    return Run(
        case.name, case.schedule, steps, outputs, exact, before, (copies, call, gradients),
        case.nan, case.untouched, case.foreign_lse, case.counted,
    )  # fmt: skip


def _like(array: Array) -> Array:
    """Return an array whose rows lie as another's do, with what is between them."""
    if array.flags.c_contiguous and array.size:
        shift = array.__array_interface__["data"][0] % 16
        return Placed(array.shape, array.dtype, Layout(shift=shift)).view
    row = array.shape[-1] * array.itemsize
    between = array.ndim > 1 and array.strides[-1] == array.itemsize and array.strides[-2] > row
    if not between or min(array.strides) <= 0:
        return np.empty_like(array, subok=False)
    size = sum((n - 1) * x for n, x in zip(array.shape, array.strides, strict=True))
    memory = np.zeros(size // array.itemsize + 1, array.dtype)
    return np.lib.stride_tricks.as_strided(memory, array.shape, array.strides)


def _spread(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array whose rows lie backwards, and whose columns have gaps."""
    whole = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)
    return whole[..., ::-1, ::2]


def _run_of_parts(given: Parts) -> Run:
    copies = GuardedCopies()
    emulator = Emulator()
    pairs = [(copies.array(a), copies.array(b)) for a, b in given.parts]
    out, lse = copies.array(given.out, True), copies.array(given.lse, True)
    arrays = COMBINE.arrays_of(pairs) | {"out": out, "lse": lse}
    steps = _recorded(emulator, copies, lambda: row_launches.run(COMBINE.recipe, pairs, arrays))
    outputs = {"out": copies.guarded(given.out), "lse": copies.guarded(given.lse)}
    before = {name: each.bytes() for name, each in outputs.items()}
    return Run(given.name, FORWARD, steps, outputs, given.wanted, before, (copies, pairs))


# -- the bench ------------------------------------------------------------------------------------


@dataclass
class Group:
    """Everything that runs one text, which is compiled once for all of it."""

    name: str
    compose: Callable[[Read], str]  # the text, of the files that a function returns
    text: str
    files: set[str]
    tests: list[Callable[[Machine], None]] = field(default_factory=list)
    object: bytes = b""


def _group(name: str, compose: Callable[[Read], str]) -> Group:
    files: set[str] = set()

    def read(path: str) -> str:
        files.add(path)
        return build.read(path)

    return Group(name, compose, compose(read), files)


def checks(make: Make = generate) -> list[Check]:
    """Return what is tried on its own, outside of a kernel."""
    dtypes = ("float32", "float64")
    scores = [ScoreCheck(dtype, make) for dtype in dtypes]
    return [MaskCheck(make), *scores, *(FunctionCheck(dtype) for dtype in dtypes)]


def _passes(check: Check, machine: Machine) -> None:
    wrong = check.judge(machine)
    if wrong is not None:
        raise Noticed(wrong)


class Bench:
    """All problems, ready for mutants.

    Parameters
    ----------
    folder : Path
        For what is compiled.
    jobs : int
        How many compile at a time.
    files : set of str or None
        Whose mutants are to be tried: problems whose kernels have none of them are left out, and
        all but the code generators where it is empty. None for all files.
    cases : list of Case or None
        The problems. None for all of them.
    """

    def __init__(
        self,
        folder: Path,
        jobs: int = 1,
        files: set[str] | None = None,
        cases: list[Case] | None = None,
    ) -> None:
        self.folder = folder
        if files is not None and not files:
            return

        @functools.cache
        def has_some(text: str, special: Specialisation) -> bool:
            return files is None or bool(files & _group("", partial(build.text, special)).files)

        def wanted(step: Step) -> bool:
            return has_some(step.text, step.special)

        found = (_run_of(case, wanted) for case in (problems() if cases is None else cases))
        self.runs = [run for run in found if run is not None]
        self.runs += [_run_of_parts(x) for x in parts()]
        self.groups: list[Group] = []
        for check in checks():
            group = _group(check.name, check.compose)
            group.files &= OWN_FILES
            group.tests.append(partial(_passes, check))
            self.groups.append(group)
        by_text: dict[str, Group] = {}
        for run in self.runs:
            for number, step in enumerate(run.steps):
                if step.text not in by_text:
                    by_text[step.text] = _group(
                        step.special.name, partial(build.text, step.special)
                    )
                by_text[step.text].tests.append(partial(self._notice, run, number))
        self.groups += by_text.values()
        with ThreadPoolExecutor(jobs) as pool:
            made = list(pool.map(self._compiled, self.groups))
        self._machines = {
            group.text: Machine(group.name, path)
            for group, path in zip(self.groups, made, strict=True)
        }
        for run in self.runs:
            self._first(run)
        for group in self.groups[: len(checks())]:
            for test in group.tests:
                test(self._machines[group.text])

    def _compiled(self, group: Group) -> Path:
        folder = self.folder / str(self.groups.index(group))
        folder.mkdir()
        group.object = object_of(group.text, folder)
        return library(folder)

    def machine(self, step: Step) -> Machine:
        """Return the machine of a launch as it is."""
        return self._machines[step.text]

    def _first(self, run: Run) -> None:
        """Run a problem with the kernels as they are, and hold them to the bounds."""
        for step in run.steps:
            self.machine(step).launch(step.grid, bytearray(step.packed), run.schedule)
            if run.foreign_lse and step.special.kernel == "forward_simt":
                lse = run.outputs["lse"].view
                lse[...] = np.where(lse == 0, lse, np.nextafter(lse, -np.inf))
            step.after = run.state()
        for name, each in run.outputs.items():
            assert each.same_beside(run.before[name]), (run.name, name)
        try:
            for name in run.wanted if run.nan is None else run.nan:
                run._judge(name)
        except Noticed as error:
            raise AssertionError(f"the kernels as they are: {error}") from None
        if run.counted is not None:
            counting = sum(step.special.count_tiles for step in run.steps)
            assert run.outputs["visited"].view[0] == counting * run.counted, run.name

    def relevant(self, file: str) -> list[Group]:
        """Return the groups whose text a file is part of."""
        return [group for group in self.groups if file in group.files]

    def trial(self, file: str, text: str, folder: Path) -> tuple[str, str]:
        """Try a file's changed text: "killed", "survived", "invalid" or "equivalent", and why."""

        def read(path: str) -> str:
            return text if path == file else build.read(path)

        return self.tried(self.relevant(file), read, folder)

    def tried(self, groups: list[Group], read: Read, folder: Path) -> tuple[str, str]:
        """Try texts of the files that `read` returns."""
        differs: list[tuple[Group, str]] = []
        for group in groups:
            changed = group.compose(read)
            try:
                made = object_of(changed, folder)
            except DoesNotCompile as error:
                # Where the first one compiles, a later one may stop at an assertion of its own.
                if group is not groups[0]:
                    return "killed", f"{group.name} does not compile"
                return "invalid", str(error)
            if made == group.object:
                continue
            differs.append((group, changed))
            machine = linked(folder, group.name)
            try:
                for test in group.tests:
                    signal.setitimer(signal.ITIMER_VIRTUAL, RUNS)  # ends the process
                    test(machine)
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except (Noticed, Fault) as error:
                return "killed", str(error)
        if all(self._same(group, changed, folder) for group, changed in differs):
            return "equivalent", ""
        return "survived", ""

    def try_generator(self, text: str, folder: Path) -> tuple[str, str]:
        """Try a changed text of the code generators; "equivalent" where it writes the same."""
        make = generators.module_of(text).generate
        wrong = generators.structure(make)
        if wrong is not None:
            return "killed", wrong
        made = generators.checks(make)
        for check in made:
            try:
                object_of(check.compose(build.read), folder)
            except DoesNotCompile as error:
                return "killed", f"what it writes does not compile: {str(error)[:200]}"
            try:
                _passes(check, linked(folder, "check"))
            except (Noticed, Fault) as error:
                return "killed", str(error)
        return "survived", ""

    def _notice(self, run: Run, number: int, machine: Machine) -> None:
        step = run.steps[number]
        run.restore(run.state_before(number))
        machine.launch(step.grid, bytearray(step.packed), run.schedule)
        run.judge(number, self.machine)

    def _same(self, group: Group, changed: str, folder: Path) -> bool:
        return disassembly(group.text, folder) == disassembly(changed, folder)
