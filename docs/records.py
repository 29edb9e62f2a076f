"""Directives that write tables of the records of runs: what was tried where, and what came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from tables import MEASURED, filled

RECORDS = Path(__file__).parents[1] / "tests" / "data" / "gpu"
OF_CPUS = RECORDS.parent / "cpu"
OF_PEERS = RECORDS.parent / "judged"
# Compute capabilities of NVIDIA's GPUs that are supported, and cards that have them.
CARDS = {
    "7.5": "Turing: T4, RTX 20",
    "8.0": "Ampere: A100, A30",
    "8.6": "Ampere: A10, RTX 30",
    "8.7": "Ampere: Jetson Orin",
    "8.9": "Ada: L4, L40, RTX 40",
    "9.0": "Hopper: H100, H200, GH200",
    "10.0": "Blackwell: B100, B200, GB200",
    "10.3": "Blackwell: B300, GB300",
    "11.0": "Blackwell: Jetson Thor",
    "12.0": "Blackwell: RTX 50, RTX PRO",
    "12.1": "Blackwell: GB10",
}
Table = tuple[list[str], list[list[str]]]


def records(what: str) -> list[dict[str, Any]]:
    """Return the records of a kind, the newest first."""
    paths = RECORDS.glob(f"{what}_*.json")
    made = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)]
    return sorted(made, key=lambda record: record["date"], reverse=True)


def capability(arch: str) -> str:
    """Return the capability of an architecture: sm_120 is 12.0."""
    digits = arch.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}"


def cards() -> Table:
    """Return which capabilities were run, and which were only compiled for."""
    run: dict[str, list[str]] = {}
    for what in ("tests", "fuzz"):
        for record in records(what):
            run.setdefault(record["capability"], []).append(record["card"])
    compiled = {
        capability(arch): f"{len(made['kernels'])} kernels, {made['specialisations']} "
        f"specialisations, by {record['card']}, commit {record['commit']}"
        for record in reversed(records("compiled"))
        for arch, made in record["archs"].items()
    }
    rows = []
    for number, names in CARDS.items():
        known = ", ".join(dict.fromkeys(run.get(number, ())))
        state = f"run: {known}" if known else "compiled, not run" if number in compiled else "–"
        rows.append([number, names, state, compiled.get(number, "not compiled")])
    return ["capability", "cards", "state", "compiled"], rows


def of_tests(record: dict[str, Any]) -> Table:
    """Return how many tests of each file passed in one run, and how many did not."""
    outcomes = "passed", "failed", "not ended", "skipped"
    rows = [
        [name.removeprefix("tests/"), *(str(found.get(x, "")) for x in outcomes)]
        for name, found in record["files"].items()
    ]
    total = [sum(found.get(x, 0) for found in record["files"].values()) for x in outcomes]
    return ["file", *outcomes], [*rows, ["all of them", *map(str, total)]]


def about(record: dict[str, Any]) -> str:
    """Return where and when a run was made."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    driver = f"driver for CUDA {record['driver'] // 1000}.{record['driver'] % 1000 // 10}"
    return f"{record['card']}, {driver}; commit {record['commit']}, {record['date']}; {versions}."


def of_fuzz() -> Table:
    """Return what came of drawn problems that were compared with the independent model."""
    rows = [
        [x["card"], x["commit"], x["date"], str(x["problems"]), str(len(x["wrong"]))]
        for x in records("fuzz")
    ]
    return ["card", "commit", "date", "problems", "wrong"], rows


def of_cpus() -> Table:
    """Return for which CPUs every property of attention was tried."""
    rows = []
    for path in sorted(OF_CPUS.glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        counts = [str(made["properties"]), str(made["examples"]), str(len(made["failed"]))]
        numba = f"Numba {made['versions']['numba']}"
        rows.append([made["cpu"], made["how"], *counts, f"{made['commit']}, {numba}"])
    return ["CPU", "how", "properties", "examples", "failed", "commit"], rows


def of_peers(path: Path) -> tuple[str, Table]:
    """Return on which machine other libraries were judged, and what came of it."""
    made = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for name, found in made["peers"].items():
        words = [f"{key}: {text}" for key, text in found["failed"].items()]
        counts = [str(found[x]) for x in ("properties", "problems")]
        failed, late = str(len(found["failed"])), str(found["late"] or "")
        rows.append([f"{name} {found['version']}", *counts, failed, late,
                     " ".join([*words, found["ended"]]).strip()])  # fmt: skip
    return f"{made['machine']}; {made['date']}.", (
        ["library", "properties", "problems", "failed", "late", "what it does instead"], rows,
    )  # fmt: skip


def of_benchmarks() -> Table:
    """Return of which runs the tables of measured times are."""
    rows = []
    for path in sorted(MEASURED.glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        commit = made["versions"].get("commit", "")
        rows.append([path.name, made["suite"], made["device"], commit, str(len(made["tasks"]))])
    return ["file", "suite", "machine", "commit", "rows"], rows


def of_ranks() -> Table:
    """Return the times of one GPU and of several, and the efficiency of these."""
    rows = []
    for record in records("ranks"):
        for name, found in record["milliseconds"].items():
            one, several, schemes = found["one GPU"], found["all GPUs"], found["schemes"]
            shares = [a / record["ranks"] / b for a, b in zip(one, several, strict=True)]
            pairs = (f"{x:.2f}" for x in one), (f"{x:.2f}" for x in several)
            shown = *map(" / ".join, pairs), " / ".join(f"{x:.0%}" for x in shares)
            where = f"{record['ranks']} × {record['card']}, commit {record['commit']}"
            rows.append([name, *shown, " / ".join(dict.fromkeys(schemes)), where])
    return ["mask", "one GPU, ms", "all, ms", "efficiency", "scheme", "GPUs"], rows


def of_steps(record: dict[str, Any]) -> Table:
    """Return times of whole models by sdpa and by cupyflash; of a row that failed, its error."""
    rows = []
    for found in record["rows"].values():
        if "new_tokens" in found:
            continue
        cells = []
        for what in ("inference", "training step"):
            times, speeds = (found.get(what, {}).get(x, {}) for x in ("ms", "speed"))
            cells += [" / ".join(f"{x:.1f}" for x in times.values())]
            cells += [" / ".join(f"{x:.2f}" for x in speeds.values())]
        differs = found.get("loss_difference")
        cells += [found.get("error", "") if differs is None else f"{differs:.0e}"]
        rows.append([f"{found['model']}, {tuple(found['shape'])}", *cells])
    ways = "sdpa / cupyflash, ms", "speed"
    inference, step = ([f"{what}, {ways[0]}", ways[1]] for what in ("inference", "training step"))
    return ["model", *inference, *step, "losses differ by"], rows


def of_generation(record: dict[str, Any]) -> Table:
    """Return times of generation by each way, its speed and equal tokens; also what failed."""
    many = [found for found in record["rows"].values() if "new_tokens" in found]
    ways = list(dict.fromkeys(way for x in many for way in x.get("first_seconds", ())))
    rows = []
    for found in many:
        cells = []
        for way in ways:
            if way not in found.get("first_seconds", ()):
                cells.append("–")
                continue
            made = found["generation"]
            told = [f"{made['ms'][way]:.0f} ms"]
            if way in made.get("speed", ()):
                told += [f"{made['speed'][way]:.2f}", f"{found['equal_tokens'][way]:.0%}"]
            cells.append(", ".join([*told, f"{found['first_seconds'][way]:.0f} s"]))
        name = f"{found['model']}, {tuple(found['shape'])} + {found['new_tokens']}"
        if "error" in found:
            name += f" ({found['error']})"
        rows.append([name, *cells])
    return ["model", *ways], rows


class Cards(Directive):
    """``cards``: which capabilities were run, and which were only compiled for."""

    made = staticmethod(cards)

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        head, rows = self.made()
        return [filled(head, rows, [100 // len(head)] * len(head))]


class Fuzz(Cards):
    """``fuzz-runs``: drawn problems."""

    made = staticmethod(of_fuzz)


class Cpus(Cards):
    """``cpu-runs``: properties on CPUs."""

    made = staticmethod(of_cpus)


class Benchmarks(Cards):
    """``benchmark-runs``: runs of the measured tables."""

    made = staticmethod(of_benchmarks)


class Ranks(Cards):
    """``rank-runs``: one sequence on one GPU and divided among several."""

    made = staticmethod(of_ranks)


class Steps(Directive):
    """``transformers-steps``: whole models by sdpa and by cupyflash, for each run.

    Its content stands for the table as long as there is no record.
    """

    has_content = True
    made = staticmethod(of_steps)

    def run(self) -> list[nodes.Node]:
        """Return a table and a paragraph for each run."""
        made: list[nodes.Node] = []
        for record in records("transformers"):
            head, rows = self.made(record)
            if rows:
                widths = [25] + [75 // (len(head) - 1)] * (len(head) - 1)
                made += [filled(head, rows, widths), nodes.paragraph("", "")]
                made[-1] += nodes.emphasis("", about(record))
        if self.content and not made:
            found = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, found)
            return list(found.children)
        return made


class Generation(Steps):
    """``transformers-generation``: generation by sdpa and by cupyflash, with every cache."""

    made = staticmethod(of_generation)


class Peers(Directive):
    """``peer-runs``: what came of the properties of other libraries, by machine."""

    def run(self) -> list[nodes.Node]:
        """Return a paragraph and a table for each record."""
        made: list[nodes.Node] = []
        for path in sorted(OF_PEERS.glob("*.json")):
            begin, (head, rows) = of_peers(path)
            made += [nodes.paragraph("", begin), filled(head, rows, [22, 11, 10, 8, 7, 42])]
        return made


class Tests(Directive):
    """``test-runs``: each run of tests on a GPU, with what did not pass by its name."""

    def run(self) -> list[nodes.Node]:
        """Return a table and two paragraphs for each run."""
        made: list[nodes.Node] = []
        for record in records("tests"):
            selected, left = record.get("selected"), record.get("left", 0)
            begin = f"{about(record)} " + (
                f"Of {selected} tests, {left} were not begun in the time given." if selected else ""
            )
            made.append(nodes.paragraph("", begin))
            head, rows = of_tests(record)
            made.append(filled(head, rows, [48, 13, 13, 13, 13]))
            for words, names in (("Failed", "failed"), ("Not ended", "not_ended")):
                if record[names]:
                    made.append(nodes.paragraph("", f"{words}: {', '.join(record[names])}."))
        return made


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directives."""
    app.add_directive("cards", Cards)
    app.add_directive("test-runs", Tests)
    app.add_directive("fuzz-runs", Fuzz)
    app.add_directive("cpu-runs", Cpus)
    app.add_directive("peer-runs", Peers)
    app.add_directive("benchmark-runs", Benchmarks)
    app.add_directive("rank-runs", Ranks)
    app.add_directive("transformers-steps", Steps)
    app.add_directive("transformers-generation", Generation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
