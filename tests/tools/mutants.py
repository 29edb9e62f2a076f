"""Mutation testing of the CUDA sources: is every small change of them noticed?

Makes mutants of the kernels and of the code generators in cupyflash/expr/cuda.py, and runs each on
the emulator with the problems that tests/mutation/suite.py gathers, held to the error bounds, in
memory whose surroundings nobody may touch. Those of caches, codes and pieces, also in Python, are
run with the tests that tests/mutation/judges.py names. A mutant is

- invalid, where it does not compile;
- equivalent, where its compiled code is that of the original (not counted);
- killed, where a result is wrong, the emulator reports a fault, or the process ends;
- timeout, where it does not end: killed as well;
- survived, where nothing notices.

A survivor is a gap in the problems, or it is right. tests/data/mutation_gaps.toml lists the gaps
by hand, tests/data/mutation_baseline.txt the others; tests/mutation/survivors.py describes both.

    python tests/tools/mutants.py                              every mutant: hours of one core
    python tests/tools/mutants.py --only "common/tile*"        those of some files
    python tests/tools/mutants.py --sample 200 --seed 1        some of them
    python tests/tools/mutants.py --changed main               those of lines changed since then
    python tests/tools/mutants.py --json found.json --jobs 4   all numbers, on four cores
    python tests/tools/mutants.py --resume log.jsonl           goes on where it was stopped
    python tests/tools/mutants.py --only "rowwise/*" --write-baseline    writes what it found out

With --write-baseline the survivors that are no gap are added to the baseline, and mutants that were
killed or exist no longer are dropped from it. The exit status is 1 where one survived that neither
file names, and no baseline was written.
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
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "helpers"))

from mutation import generators, judges, operators, survivors
from mutation.keys import Keys
from mutation.operators import Mutant
from mutation.workers import Outcome, outcomes

if TYPE_CHECKING:
    from mutation.trial import Bench

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cu"
NOT_CHANGED = ("params.cuh", "ide_prelude.cuh")
COLUMNS = ("made", "invalid", "equivalent", "killed", "timeout", "survived", "known")


def sources() -> list[Path]:
    """Return the CUDA files that are changed.

    Neither the instructions of ptx/, which have twins on the emulator, nor the parameters, which
    the host writes and a test holds to cupyflash/gpu/params.py.
    """
    paths = KERNELS.rglob("*.cu*")
    return sorted(x for x in paths if x.parent.name != "ptx" and x.name not in NOT_CHANGED)


def kernel_mutants() -> list[Mutant]:
    """Return every mutant of the CUDA sources, file by file."""
    return [
        mutant
        for path in sources()
        for mutant in operators.mutants(path.relative_to(KERNELS).as_posix(), path.read_text())
    ]


def every_mutant() -> list[Mutant]:
    """Return those of the CUDA sources, of the code generators, and of Python that has judges."""
    judged = [file for file in judges.JUDGES if file.endswith(".py")]
    return [
        *kernel_mutants(),
        *generators.mutants(),
        *(x for y in judged for x in generators.mutants(y)),
    ]


def text_of(file: str) -> str:
    """Return a file that has mutants."""
    folder = ROOT if file.endswith(".py") else KERNELS
    return (folder / file).read_text(encoding="utf-8")


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines of kernels that differ from a commit, by file."""
    command = ["git", "diff", "--unified=0", since, "--", "kernels_cu", "cupyflash", "reference"]
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


def keys_of(wanted: Iterable[Mutant]) -> dict[Mutant, str]:
    """Return the keys of mutants, by which the gaps and the baseline name them."""
    files: dict[str, Keys] = {}
    found = {}
    for mutant in wanted:
        if mutant.file not in files:
            files[mutant.file] = Keys(mutant.file, text_of(mutant.file))
        found[mutant] = files[mutant.file](mutant)
    return found


def table(results: Iterable[tuple[Mutant, Outcome]]) -> str:
    """Return the numbers of each file as a table.

    The score is the share of mutants that died, of those whose code differs; the second one also
    leaves out those of the baseline that somebody has looked at.
    """
    results = list(results)
    right = {key for key, x in survivors.read_baseline().items() if x.category != "unread"}
    keys = keys_of(mutant for mutant, _ in results)
    counts: dict[str, Counter[str]] = {}
    for mutant, outcome in results:
        known = outcome.status == "survived" and keys[mutant] in right
        for name in (mutant.file, "all"):
            counts.setdefault(name, Counter()).update({"made": 1, outcome.status: 1})
            counts[name]["known"] += known
    rows = [f"{'file':32}" + "".join(f"{name:>11}" for name in (*COLUMNS, "score", "but known"))]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[name]
        dead = count["killed"] + count["timeout"]
        judged = dead + count["survived"]
        scores = [
            f"{100 * dead / of:10.1f}%" if of else f"{'-':>11}"
            for of in (judged, judged - count["known"])
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


def tried(bench: Bench, file: str, text: str, folder: Path) -> tuple[str, str]:
    """Try a file's changed text on the problems, and then by the tests that judge it."""
    status, why = "survived", ""
    if not file.endswith(".py") and bench.relevant(file):
        status, why = bench.trial(file, text, folder)
    if file in judges.JUDGES and status in ("survived", "equivalent"):
        judged = judges.judge(file, text, folder)
        return judged if judged[0] != "survived" else (status, why)
    return status, why


def run(wanted: list[Mutant], arguments: argparse.Namespace) -> list[tuple[Mutant, Outcome]]:
    """Try the mutants that are not in the log."""
    from mutation.trial import Bench  # imports what compiles kernels

    texts = {x.file: text_of(x.file) for x in wanted}
    names = {x: f"{x.file} {key} @{x.start} {x.after}" for x, key in keys_of(wanted).items()}
    known = read_log(arguments.resume)
    results = [(x, known[names[x]]) for x in wanted if names[x] in known]
    left = [x for x in wanted if names[x] not in known]
    if not left:
        return results
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="cupyflash-mutants-") as folder:
        files = {x.file for x in left if not x.file.endswith(".py")}
        bench = Bench(Path(folder), arguments.jobs, files)

        def trial(mutant: Mutant, place: Path) -> tuple[str, str]:
            changed = mutant.apply(texts[mutant.file])
            if mutant.file == generators.FILE:
                return bench.try_generator(changed, place)
            return tried(bench, mutant.file, changed, place)

        for mutant, outcome in outcomes(trial, left, arguments.jobs, until):
            results.append((mutant, outcome))
            if arguments.resume is not None:
                line = {"mutant": names[mutant], "outcome": outcome}
                with arguments.resume.open("a") as log:
                    log.write(json.dumps(line) + "\n")
            if outcome.status == "survived" or arguments.verbose:
                print(f"{outcome.status:10} {mutant.shown()}  {outcome.why}", flush=True)
    return results


def write_baseline(tried: list[survivors.Tried]) -> None:
    """Bring the baseline up to date with what a run found out, and say how many it has."""
    before = survivors.read_baseline()
    gaps = {key for gap in survivors.read_gaps() for key in gap.mutants}
    existing = set(keys_of(every_mutant()).values())
    after = survivors.updated(before, gaps, tried, existing)
    survivors.write_baseline(after)
    added, dropped = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    print(f"the baseline has {len(after)} mutants: {added} more, {dropped} less")


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
    parser.add_argument(
        "--write-baseline", action="store_true", help="add survivors, drop those killed or gone"
    )
    parser.add_argument("--verbose", action="store_true", help="say what became of each")
    arguments = parser.parse_args()
    wanted = chosen(arguments)
    results = run(wanted, arguments)
    print(table(results))
    if len(results) < len(wanted):
        print(f"{len(wanted) - len(results)} were not tried: there was no time left")
    keys = keys_of(x for x, _ in results)
    excused = survivors.excused()
    unknown = [
        x for x, outcome in results if outcome.status == "survived" and keys[x] not in excused
    ]
    for mutant in unknown:
        print(f"survived, and is not known: {keys[mutant]} {mutant.shown()}")
    if arguments.write_baseline:
        tried = [survivors.Tried(keys[x], x.operator, outcome.status) for x, outcome in results]
        write_baseline(tried)
        unknown = []
    if arguments.json is not None:
        rows = [x._asdict() | outcome._asdict() for x, outcome in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
