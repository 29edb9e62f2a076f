"""What a verification found: results of properties, as a table, as JSON, and as lines to paste."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from .judge import Worst

LEAST_BOUNDED = 0.5  # of the elements: with less, a property says little
PASSED, FAILED, NOT_APPLICABLE = "passed", "FAILED", "not applicable"


@dataclass(frozen=True)
class Failure:
    """A property that does not hold, with the smallest problem that was found.

    Attributes
    ----------
    message : str
        What was expected.
    problem : str
        A line of Python that makes the problem.
    family : str
        The family of its elements.
    trace : str
        For an exception of the kernel: where it was raised.
    """

    message: str
    problem: str
    family: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Result:
    """The result of one property.

    Attributes
    ----------
    name, formula : str
        Its name, and what it claims.
    status : str
        "passed", "FAILED" or "not applicable".
    reason : str
        Why it is not applicable.
    examples : int
        How many problems were tried: all, or those until it failed.
    seconds : float
        How long that took.
    worst : tuple of Worst
        The worst ratio of error to bound by output and dtype, the largest first; empty for
        properties that hold bit by bit.
    failures : tuple of Failure
        At most one, or with ``keep_going`` one of each family.
    families : dict of str to float
        The worst ratio by family of elements.
    """

    name: str
    formula: str
    status: str
    reason: str = ""
    examples: int = 0
    seconds: float = 0.0
    worst: tuple[Worst, ...] = ()
    failures: tuple[Failure, ...] = ()
    families: dict[str, float] = field(default_factory=dict)

    @property
    def weak(self) -> tuple[Worst, ...]:
        """The outputs of which less than half of the elements had a finite bound."""
        return tuple(x for x in self.worst if x.bounded < LEAST_BOUNDED)


@dataclass
class Report:
    """What `verify` returns.

    Attributes
    ----------
    results : list of Result
        The results, in the order in which they were run.
    seed, examples : int
        As given to `verify`.
    device : str
        As given to `verify`.
    dtypes, features : tuple of str
        The dtypes that were tested, and the features that the kernel was said to have.
    """

    seed: int
    examples: int
    device: str
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was run and nothing failed."""
        states = {result.status for result in self.results}
        return PASSED in states and FAILED not in states

    @property
    def failures(self) -> list[Result]:
        """The properties that failed."""
        return [result for result in self.results if result.status == FAILED]

    def worst(self) -> dict[str, dict[str, float]]:
        """Return the worst ratio by output and dtype, over all properties."""
        found: dict[str, dict[str, float]] = {}
        for result in self.results:
            for each in result.worst:
                row = found.setdefault(each.output, {})
                row[each.dtype] = max(row.get(each.dtype, 0.0), each.ratio)
        return found

    def to_json(self) -> str:
        """Return everything as JSON; infinite ratios are the string "inf"."""
        content = dataclasses.asdict(self) | {"passed": self.passed}
        return json.dumps(_finite(content), indent=1)

    def __str__(self) -> str:
        run = [x for x in self.results if x.status != NOT_APPLICABLE]
        idle = [x for x in self.results if x.status == NOT_APPLICABLE]
        rows = [["property", "result", "examples", "seconds", "worst", "of"]]
        rows += [line_of(result) for result in run]
        settings = f"{self.examples} examples a property, seed {self.seed}"
        text = [f"{self.device}: {', '.join(self.dtypes)}; {settings}", "", columns(rows)]
        if idle:
            text += ["", "Not run:"]
            width = max(len(x.name) for x in idle)
            text += [f"  {x.name:<{width}}  {x.reason}" for x in idle]
        weak = [
            f"  {x.name}: {y.bounded:.0%} of {y.output}, {y.dtype}" for x in run for y in x.weak
        ]
        if weak:
            text += ["", "Weak, because the stated precision bounds few of the elements:", *weak]
        seen: dict[str, str] = {}
        for result in self.failures:
            text += ["", *failure_lines(result, seen)]
        failed, total = len(self.failures), sum(x.examples for x in run)
        end = "nothing was run" if not run else (
            f"{failed} of {len(run)} properties FAILED" if failed
            else f"all {len(run)} properties passed"
        )  # fmt: skip
        text += ["", f"{end}: {total} examples, {sum(x.seconds for x in run):.1f} s"]
        return "\n".join(text)


def line_of(result: Result) -> list[str]:
    """Return a result's cells."""
    worst = result.worst[0] if result.worst else None
    return [
        result.name,
        result.status,
        str(result.examples),
        f"{result.seconds:.1f}",
        "" if worst is None else f"{worst.ratio:.3g}",
        "" if worst is None else f"{worst.output} {worst.dtype}",
    ]


def failure_lines(result: Result, seen: dict[str, str]) -> list[str]:
    """Say what failed, why, and how to see it again; an exception's place is said once."""
    lines = [f"FAILED {result.name}: {result.formula}"]
    for failure in result.failures:
        lines.append(f"  {failure.message}")
        if failure.trace:
            first = seen.setdefault(failure.trace, result.name)
            again = [f"  (raised where {first} met it)"]
            lines += failure.trace.rstrip().splitlines() if first == result.name else again
        lines += [
            f"  problem = {failure.problem}",
            f"  cupyflash.testing.check({result.name!r}, problem, attention_fn, backward_fn)",
        ]
    return lines


def columns(rows: list[list[str]]) -> str:
    """Lay out rows of cells, the header first: text to the left, numbers to the right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if n in (2, 3, 4) else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    if isinstance(x, float) and x in (float("inf"), float("-inf")):
        return "inf" if x > 0 else "-inf"
    return x
