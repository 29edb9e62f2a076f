"""What was measured, as data, and its JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from .cases import Case
from .tasks import Task

FORMAT = "cupyflash bench 1"
MEASURED, REFUSED, WRONG = "measured", "refused", "WRONG"


@dataclass(frozen=True)
class Result:
    """What one contender did with one case.

    Attributes
    ----------
    contender : str
        Its name.
    status : str
        measured, refused (it cannot do this case) or WRONG (its result differs from the first
        contender's).
    reason : str
        Why it was not measured.
    seconds : float or None
        Median of the runs.
    low, high : float or None
        First and third quartile of the runs, seconds.
    runs : int
        How many runs there were.
    peak_bytes : int or None
        Memory held at the peak, including results but not inputs. A backward is measured together
        with its forward, because what the forward keeps counts, too.
    difference : float or None
        Difference from the first contender's result: the largest norm of a difference, divided by
        the norm of the result.
    key_bytes : int or None
        Bytes of keys and values that a step of decoding reads, if they are not those of the case.
    """

    contender: str
    status: str
    reason: str = ""
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    runs: int = 0
    peak_bytes: int | None = None
    difference: float | None = None
    key_bytes: int | None = None

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        if not self.seconds or self.low is None or self.high is None:
            return 0.0
        return (self.high - self.low) / self.seconds


class _Results:
    """What several contenders did, the first one first."""

    results: tuple[Result, ...]

    def of(self, contender: str) -> Result | None:
        """Return what a contender measured; None where it did not."""
        for result in self.results:
            if result.contender == contender and result.status == MEASURED:
                return result
        return None

    def factors(self, ours: str, other: str) -> tuple[float, float] | None:
        """Return by how much `ours` is faster and takes less memory than `other`."""
        a, b = self.of(ours), self.of(other)
        if not (a and b and a.seconds and b.seconds):
            return None
        memory = (b.peak_bytes or 0) / a.peak_bytes if a.peak_bytes else 0.0
        return b.seconds / a.seconds, memory


@dataclass(frozen=True)
class Row(_Results):
    """A case, and what every contender did with it, the first one first."""

    case: Case
    results: tuple[Result, ...]


@dataclass(frozen=True)
class TaskRow(_Results):
    """A task, and what every contender did with it, the first one first."""

    task: Task
    results: tuple[Result, ...]

    def ratio(self, other: str) -> float | None:
        """Return the first contender's time divided by another one's."""
        factors = self.factors(self.results[0].contender, other)
        return 1 / factors[0] if factors else None

    @property
    def fastest(self) -> str:
        """The fastest contender after the first one; nothing if none was measured."""
        times = {x.contender: x.seconds for x in self.results[1:] if x.seconds}
        return min(times, key=lambda name: times[name], default="")


@dataclass(frozen=True)
class Report:
    """Everything that a run of the benchmarks measured, and under which conditions.

    Attributes
    ----------
    suite : str
        Name of the suite, or "own shapes".
    kind : str
        cpu or gpu.
    device : str
        Its name, and on a CPU the numbers of threads.
    versions : dict of str to str
        Versions of the packages that took part.
    method : str
        How times were taken.
    rows : tuple of Row
        In the order of the run.
    absent : dict of str to str
        Contenders that could not take part at all, with the reason and the remedy.
    tasks : tuple of TaskRow
        Those of a suite of tasks, which has no cases.
    """

    suite: str
    kind: str
    device: str
    versions: dict[str, str]
    method: str
    rows: tuple[Row, ...]
    absent: dict[str, str]
    tasks: tuple[TaskRow, ...] = ()

    @property
    def contenders(self) -> list[str]:
        """Names of those that measured something, in order."""
        names = [
            result.contender
            for row in (*self.rows, *self.tasks)
            for result in row.results
            if result.status == MEASURED
        ]
        return list(dict.fromkeys(names))

    @property
    def wrong(self) -> list[tuple[Case | Task, Result]]:
        """Results that differ from the first contender's."""
        found: list[tuple[Case | Task, tuple[Result, ...]]] = []
        found += [(row.case, row.results) for row in self.rows]
        found += [(row.task, row.results) for row in self.tasks]
        return [(what, x) for what, results in found for x in results if x.status == WRONG]

    def to_json(self) -> str:
        """Return everything as JSON, which `from_json` reads."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises
        ------
        ArgumentError
            If the text is something else.
        """
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise ArgumentError(f"its format is not {FORMAT!r}, which --json writes")
            if content["kind"] not in ("cpu", "gpu"):
                raise ArgumentError(f"its kind is {content['kind']!r}; expected cpu or gpu")
            content["rows"] = tuple(_row(row) for row in content["rows"])
            content["tasks"] = tuple(
                TaskRow(Task(**row["task"]), _results(row)) for row in content.get("tasks", ())
            )
            return cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArgumentError(f"this is not what --json writes: {error}") from error


def unit(kind: str, decodes: bool) -> str:
    """Return what `rate` is in, on a cpu or gpu."""
    return "GB/s" if decodes else {"cpu": "GFLOP/s", "gpu": "TFLOP/s"}[kind]


def rate(case: Case, result: Result, kind: str, decodes: bool) -> float:
    """Return FLOPs per second, or bytes of K and V per second of a step of decoding."""
    assert result.seconds is not None, "it was measured"
    if decodes:
        return (result.key_bytes or case.key_bytes) / result.seconds / 1e9
    return case.flops / result.seconds / {"cpu": 1e9, "gpu": 1e12}[kind]


def _row(content: dict[str, Any]) -> Row:
    return Row(Case(**content["case"]), _results(content))


def _results(content: dict[str, Any]) -> tuple[Result, ...]:
    return tuple(Result(**x) for x in content["results"])
