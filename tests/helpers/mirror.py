"""The kernels in CUDA C++ and their twins in Python, read as text: functions and numbered steps."""

from __future__ import annotations

import ast
import collections
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "kernels_cu"

HARDWARE = (
    "simt",
    "sm80",
    "f64",
    "sm90",
    "tf32",
    "fp8",
    "shared",
    "tile",
    "dbias",
)  # suffixes of kernels for one kind of hardware, for what entries share, and for short rows

_DEFINITION = re.compile(
    r"^ *(?:template <[^;{}()]*> )?(?:static |inline |__\w+__ )*?"
    r"(?:__device__|extern \"C\" __global__) [^;{}()]*?"
    r"(?:__launch_bounds__\([^()]*\)\s*)?(?P<name>\w+)\(",
    re.MULTILINE,
)
_NAMESPACE = re.compile(r"^namespace (?P<name>\w+) \{$|^\}  // namespace", re.MULTILINE)
_CALL = re.compile(r"\b(?:(?P<space>\w+)::)?(?P<name>[a-z]\w*)\s*[<(]")
_STEP = re.compile(r"^\s*(?://|#) (?P<number>\d) (?P<words>[a-z].*)$", re.MULTILINE)
_TABLE_ROW = re.compile(r"^\| (?P<files>`[^|]*) \| (?P<what>[^|]*) \| (?P<twins>[^|]*) \|$")


class Step(NamedTuple):
    number: int
    words: str


class Call(NamedTuple):
    name: str
    space: str = ""  # CUDA: what stands before ::


@dataclass
class Function:
    """A function: its steps and calls, in the order of the text."""

    name: str
    file: str
    space: str = ""  # CUDA: its namespace
    events: list[Step | Call] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """Its own numbered comments."""
        return [event for event in self.events if isinstance(event, Step)]


class Row(NamedTuple):
    """A line of the table of twins, with paths from the top of the checkout."""

    files: tuple[str, ...]
    twins: tuple[str, ...]


def table_of_twins() -> list[Row]:
    """Return the rows of the table in kernels_cu/README.md."""
    found = []
    for line in (CUDA / "README.md").read_text().splitlines():
        match = _TABLE_ROW.match(line)
        if match:
            files, twins = (re.findall(r"`([^`]+)`", match[side]) for side in ("files", "twins"))
            assert twins or match["twins"] == "-", f"neither twins nor a dash: {line}"
            found.append(Row(tuple(f"kernels_cu/{name}" for name in files), tuple(twins)))
    return found


def without_hardware(stem: str) -> str:
    """`backward_simt_dq` -> `backward_dq`."""
    return "_".join(part for part in stem.split("_") if part not in HARDWARE)


def all_steps(text: str) -> list[Step]:
    """Return the numbered comments of a text."""
    return [Step(int(match["number"]), match["words"]) for match in _STEP.finditer(text)]


def cuda_functions(path: str) -> list[Function]:
    """Return the functions that a CUDA file defines. The kernel's own name is `KERNEL_NAME`."""
    text = (ROOT / path).read_text()
    spaces = list(_NAMESPACE.finditer(text))
    found = []
    for match in _DEFINITION.finditer(text):
        end = _closing(text, match.end() - 1)
        body = re.compile(r"(?: const)?\s*\{").match(text, end)
        if body is None:
            continue  # a declaration
        last = _closing(text, body.end() - 1)
        inside = [space["name"] or "" for space in spaces if space.start() < match.start()]
        made = Function(match["name"], path, inside[-1] if inside else "")
        made.events = _in_order(text, body.end(), last)
        found.append(made)
    return found


def _closing(text: str, opening: int) -> int:
    """Return the place behind the bracket that closes the one at `opening`."""
    open_, close = text[opening], {"(": ")", "{": "}"}[text[opening]]
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == open_) - (text[place] == close)
        if depth == 0:
            return place + 1
    raise AssertionError(f"{text[opening : opening + 60]!r} does not end")


def _in_order(text: str, first: int, last: int) -> list[Step | Call]:
    body = text[first:last]
    events: list[tuple[int, Step | Call]] = [
        (match.start(), Step(int(match["number"]), match["words"]))
        for match in _STEP.finditer(body)
    ]
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), body)
    events += [
        (match.start("name"), Call(match["name"], match["space"] or ""))
        for match in _CALL.finditer(code)
    ]
    return [event for _, event in sorted(events, key=lambda each: each[0])]


def python_functions(path: str) -> list[Function]:
    """Return the functions of a Python module: defined, or made by a call, at its top level."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            made = Function(node.name, path)
            events: list[tuple[int, int, Step | Call]] = [
                (number, 0, step)
                for number in range(node.lineno, node.end_lineno + 1)
                for step in all_steps(lines[number - 1])
            ]
            events += [
                (child.lineno, child.col_offset + 1, Call(child.func.id))
                for child in ast.walk(node)
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Name)
            ]
            made.events = [event for *_, event in sorted(events, key=lambda each: each[:2])]
            found.append(made)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "caller"
            and isinstance(node.value.args[0], ast.Name)
        ):  # what calls a kernel by its address
            name = Call(node.value.args[0].id)
            found += [
                Function(x.id, path, events=[name]) for x in node.targets if isinstance(x, ast.Name)
            ]
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and any(made.name == node.value.func.id for made in found)
        ):
            found += [Function(x.id, path) for x in node.targets if isinstance(x, ast.Name)]
    return found


def called(caller: Function, call: Call, functions: list[Function]) -> list[Function]:
    """Return the functions that a call may mean, overloads among them.

    Those of the caller's own file come first, so that two kernels may both have a `producer`.
    Kernels do not include each other, so those of another `.cu` file are never meant.
    """
    named = [each for each in functions if each.name == call.name]
    if call.space:
        inside = [each for each in named if each.space == call.space]
        if inside:
            return inside
    own = [each for each in named if each.file == caller.file]
    others = [each for each in named if not each.file.endswith(".cu")]
    found = own or others
    files = {each.file for each in found if each.steps}
    assert len(files) <= 1, f"{call.name} in {caller.file} may be that of any of {sorted(files)}"
    return found


def expanded(function: Function, functions: list[Function]) -> list[Step]:
    """Return a function's steps with those of what it calls at the place of the call.

    A step counts where it stands first: one that a caller announces and the called function repeats
    is one step.
    """
    found: dict[Step, None] = {}
    named = collections.defaultdict(list)
    for each in functions:
        named[each.name].append(each)

    def walk(function: Function, above: tuple[tuple[str, str], ...]) -> None:
        above = (*above, (function.file, function.name))
        for event in function.events:
            if isinstance(event, Step):
                found.setdefault(event)
                continue
            for each in called(function, event, named[event.name]):
                if (each.file, each.name) not in above:
                    walk(each, above)

    walk(function, ())
    return list(found)
