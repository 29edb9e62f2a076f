"""The mutants that may survive: the real gaps, by hand, and a baseline, by a command.

tests/data/mutation_gaps.toml is written by hand. Each of its entries is a change that makes a
kernel wrong, or may, and that nothing notices; it says why, and what would close it.

tests/data/mutation_baseline.txt is written by `tests/tools/mutants.py --write-baseline`. Each of
its lines is a key of tests/mutation/keys.py, the operator, and a category:

- equivalent: the mutant computes the same;
- slower: it computes the same in another time, or in another order;
- bound: it computes something else, as good within the error bounds;
- elsewhere: a test of the suite notices it, which is none of those that mutants are tried with;
- unread: nobody has looked at it yet.

The command writes `unread`; who has looked at one may write another word there, which it keeps.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).resolve().parents[1] / "data"
GAPS = DATA / "mutation_gaps.toml"
BASELINE = DATA / "mutation_baseline.txt"
CATEGORIES = ("equivalent", "slower", "bound", "elsewhere", "unread")

_HEAD = """\
# Mutants that survive and are no gap: key, operator, category. tests/mutation/survivors.py says
# what words mean; `python tests/tools/mutants.py --write-baseline` writes this file.
"""


@dataclass(frozen=True)
class Gap:
    """Some mutants that are wrong and that nothing notices.

    Attributes
    ----------
    reason : str
        Why nothing notices them.
    closed_by : str
        Which problem or test would.
    mutants : dict of str to str
        What each of them changes, in words, by its key.
    """

    reason: str
    closed_by: str
    mutants: dict[str, str]


class Entry(NamedTuple):
    """What the baseline says of a key."""

    operator: str
    category: str


class Tried(NamedTuple):
    """A mutant that was tried: its key, its operator, and what became of it."""

    key: str
    operator: str
    status: str


def read_gaps(path: Path = GAPS) -> list[Gap]:
    """Return the gaps that are listed by hand."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["gap"]
    return [Gap(each["reason"], each["closed_by"], each["mutants"]) for each in entries]


def read_baseline(path: Path = BASELINE) -> dict[str, Entry]:
    """Return the baseline's entries by their keys."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            key, operator, category = line.split()
            found[key] = Entry(operator, category)
    return found


def excused() -> set[str]:
    """Return the keys of all mutants that may survive."""
    return {key for gap in read_gaps() for key in gap.mutants} | set(read_baseline())


def updated(
    baseline: dict[str, Entry], gaps: set[str], tried: Iterable[Tried], existing: set[str]
) -> dict[str, Entry]:
    """Return the baseline after a run.

    Parameters
    ----------
    baseline : dict of str to Entry
        As it was before.
    gaps : set of str
        Keys that are listed by hand, which the baseline does not repeat.
    tried : iterable of Tried
        What the run found out. A key stays if one of its mutants survived, and goes if none did.
    existing : set of str
        Keys of all mutants that the sources have now; others are dropped.
    """
    found = {key: entry for key, entry in baseline.items() if key in existing}
    tried = list(tried)
    for each in tried:
        if each.status != "survived":
            found.pop(each.key, None)
    for each in tried:
        if each.status == "survived":
            found[each.key] = baseline.get(each.key, Entry(each.operator, "unread"))
    return {key: entry for key, entry in found.items() if key not in gaps}


def write_baseline(entries: dict[str, Entry], path: Path = BASELINE) -> None:
    """Write the baseline, in the order of the keys."""
    lines = [" ".join((key, *entries[key])) + "\n" for key in sorted(entries)]
    path.write_text(_HEAD + "".join(lines), encoding="utf-8")
