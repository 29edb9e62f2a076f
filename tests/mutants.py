"""Mutation testing of the CUDA sources: is every small change of them noticed?

Makes mutants of the kernels and of the code generators in cupyflash/expr/cuda.py, and runs each on
the emulator with the problems that tests/mutation/suite.py gathers, held to the error bounds, in
memory whose surroundings nobody may touch. A mutant is

- invalid, where it does not compile;
- equivalent, where its compiled code is that of the original (not counted);
- killed, where a result is wrong, the emulator reports a fault, or the process ends;
- timeout, where it does not end: killed as well;
- survived, where nothing notices. tests/data/surviving_mutants.txt says why those are right.

    python tests/mutants.py                              every mutant: hours of one core
    python tests/mutants.py --only "common/tile*"    those of some files
    python tests/mutants.py --sample 200 --seed 1        some of them
    python tests/mutants.py --changed main               those of lines changed since then
    python tests/mutants.py --json found.json --jobs 4   all numbers, on four cores
    python tests/mutants.py --resume log.jsonl           goes on where it was stopped

The exit status is 1 where one survived that the list does not name.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from mutation import generators, operators
from mutation.operators import Mutant
from mutation.workers import Outcome, outcomes

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels_cu"
JUSTIFIED = ROOT / "tests" / "data" / "surviving_mutants.txt"
COLUMNS = ("made", "invalid", "equivalent", "killed", "timeout", "survived", "listed")


def kernel_mutants() -> list[Mutant]:
    """Return every mutant of the CUDA sources, file by file."""
    paths = sorted(path for path in KERNELS.rglob("*.cu*") if path.parent.name != "ptx")
    return [
        mutant
        for path in paths
        for mutant in operators.mutants(path.relative_to(KERNELS).as_posix(), path.read_text())
    ]


def every_mutant() -> list[Mutant]:
    """Return those of the CUDA sources and of the code generators."""
    return [*kernel_mutants(), *generators.mutants()]


def text_of(file: str) -> str:
    """Return a file that has mutants."""
    folder = ROOT if file == generators.FILE else KERNELS
    return (folder / file).read_text(encoding="utf-8")


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines of kernels that differ from a commit, by file."""
    command = ["git", "diff", "--unified=0", since, "--", "kernels_cu", "cupyflash/expr/cuda.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, set[int]] = {}
    file = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/").removeprefix("kernels_cu/")
        match = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)
        if match:
            first, count = int(match[1]), int(match[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return found


def justified() -> dict[str, str]:
    """Return the mutants that may survive, each with the reason."""
    found: dict[str, str] = {}
    reason = ""
    for line in JUSTIFIED.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") or not line.strip():
            continue
        if line.startswith("    "):
            found[line.strip()] = reason
        else:
            reason = line.strip()
    return found


def key_of(mutant: Mutant, text: str) -> str:
    """Return how the list names a mutant: by its line's text, so that lines may move."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    line = lines[mutant.line - 1]
    same = lines[: mutant.line].count(line)
    which = f" ({same})" if same > 1 else ""
    before, after = (" ".join(x.split()) for x in (mutant.before, mutant.after))
    column = mutant.start - text.rfind("\n", 0, mutant.start)
    nth = text.splitlines()[mutant.line - 1][: column - 1].count(before.split("\n")[0])
    return f"{mutant.file} | {line}{which} | {before} #{nth + 1} -> {after or '(nothing)'}"


def table(results: Iterable[tuple[Mutant, Outcome]]) -> str:
    """Return the numbers of each file as a table.

    The score is the share of mutants that died, of those whose code differs; the second one also
    leaves out those that the list says nobody can notice.
    """
    reasons = justified()
    texts: dict[str, str] = {}
    counts: dict[str, Counter[str]] = {}
    for mutant, outcome in results:
        text = texts.setdefault(mutant.file, text_of(mutant.file))
        listed = outcome.status == "survived" and key_of(mutant, text) in reasons
        for name in (mutant.file, "all"):
            counts.setdefault(name, Counter()).update({"made": 1, outcome.status: 1})
            counts[name]["listed"] += listed
    rows = [f"{'file':32}" + "".join(f"{name:>11}" for name in (*COLUMNS, "score", "but listed"))]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[name]
        dead = count["killed"] + count["timeout"]
        judged = dead + count["survived"]
        scores = [
            f"{100 * dead / of:10.1f}%" if of else f"{'-':>11}"
            for of in (judged, judged - count["listed"])
        ]
        rows.append(f"{name:32}" + "".join(f"{count[x]:11}" for x in COLUMNS) + "".join(scores))
    return "\n".join(rows)


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options ask for."""
    found = every_mutant()
    if arguments.only:
        patterns = arguments.only.split(",")
        found = [x for x in found if any(fnmatch.fnmatch(x.file, each) for each in patterns)]
    if arguments.operators:
        found = [x for x in found if x.operator in arguments.operators.split(",")]
    if arguments.changed is not None:
        lines = changed_lines(arguments.changed)
        found = [x for x in found if x.line in lines.get(x.file, ())]
    if arguments.sample is not None:
        random.Random(arguments.seed).shuffle(found)
        found = found[: arguments.sample]
    return found


def read_log(path: Path | None) -> dict[str, Outcome]:
    """Return what an earlier run found out, by mutant."""
    if path is None or not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["mutant"]: Outcome(*line["outcome"]) for line in lines}


def run(wanted: list[Mutant], arguments: argparse.Namespace) -> list[tuple[Mutant, Outcome]]:
    """Try the mutants that are not in the log."""
    from mutation.trial import Bench  # compiles every kernel

    texts = {x.file: text_of(x.file) for x in wanted}
    names = {x: f"{key_of(x, texts[x.file])} @{x.start}" for x in wanted}
    known = read_log(arguments.resume)
    results = [(x, known[names[x]]) for x in wanted if names[x] in known]
    left = [x for x in wanted if names[x] not in known]
    if not left:
        return results
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="cupyflash-mutants-") as folder:
        files = {x.file for x in left} - {generators.FILE}
        bench = Bench(Path(folder), arguments.jobs, files)

        def trial(mutant: Mutant, place: Path) -> tuple[str, str]:
            changed = mutant.apply(texts[mutant.file])
            if mutant.file == generators.FILE:
                return bench.try_generator(changed, place)
            return bench.trial(mutant.file, changed, place)

        for mutant, outcome in outcomes(trial, left, arguments.jobs, until):
            results.append((mutant, outcome))
            if arguments.resume is not None:
                line = {"mutant": names[mutant], "outcome": outcome}
                with arguments.resume.open("a") as log:
                    log.write(json.dumps(line) + "\n")
            if outcome.status == "survived" or arguments.verbose:
                print(f"{outcome.status:10} {mutant.shown()}  {outcome.why}", flush=True)
    return results


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", help="of these names, by commas")
    parser.add_argument("--only", help="patterns of files, relative to kernels_cu")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changed", nargs="?", const="HEAD~1", help="of lines changed since then")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where all numbers are written")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after this")
    parser.add_argument("--resume", type=Path, help="a log, which is read and continued")
    parser.add_argument("--verbose", action="store_true", help="say what became of each")
    arguments = parser.parse_args()
    wanted = chosen(arguments)
    results = run(wanted, arguments)
    print(table(results))
    if len(results) < len(wanted):
        print(f"{len(wanted) - len(results)} were not tried: there was no time left")
    reasons = justified()
    texts = {x.file: text_of(x.file) for x, _ in results}
    survivors = [x for x, outcome in results if outcome.status == "survived"]
    unknown = [x for x in survivors if key_of(x, texts[x.file]) not in reasons]
    for mutant in unknown:
        print(
            f"survived without a reason: {mutant.shown()}\n    {key_of(mutant, texts[mutant.file])}"
        )
    if arguments.json is not None:
        rows = [x._asdict() | outcome._asdict() for x, outcome in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
