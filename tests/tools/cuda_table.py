"""What the compiled kernels take of a GPU: the table in tests/data/cuda_resources.csv.

Registers, stack, spilled bytes and shared memory of the covering set of specialisations, as NVRTC
reports them; no GPU is needed. tests/cuda/test_cuda_compile.py holds the table true.

    python tests/tools/cuda_table.py                write it anew: look at what git shows of it
    python tests/tools/cuda_table.py --kernels forward_simt,backward_bias
                                                    only rows of these, and those that it lacks
    python tests/tools/cuda_table.py --archs all    print it for all, and write nothing
    python tests/tools/cuda_table.py --archs all --once --record   each kernel once, and keep a
                                                    summary in tests/data/gpu
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import os
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "helpers"))

import gpu_machine
from cuda_specialisations import SHARED_MEMORY, Case, cases, runs_on, specialisation

from cupyflash.gpu import source

TABLE = Path(__file__).parents[1] / "data" / "cuda_resources.csv"
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_120")  # of the table


class Key(NamedTuple):
    """A specialisation on an architecture."""

    kernel: str
    dtype: str
    d: int
    d_v: int
    options: str
    packed: bool
    cache: str
    arch: str


class Resources(NamedTuple):
    """What a kernel takes; of registers, stack and spills, what a thread does."""

    block_q: int
    block_kv: int
    threads: int
    shared_memory: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


class CannotCompile(Exception):
    """NVRTC is missing or cannot be used."""


def key_of(case: Case, arch: str) -> Key:
    return Key(
        case.kernel, case.dtype.name, *case.sizes, case.options, case.packed, case.cache, arch
    )


@functools.cache
def nvrtc_version() -> str:
    """Return "major.minor" of NVRTC, once it has compiled something."""
    try:
        from cuda.bindings import nvrtc

        log = compiled('extern "C" __global__ void nothing() {}', "sm_90")
    except Exception as error:
        raise CannotCompile(f"{type(error).__name__}: {error}") from error
    assert "'nothing'" in log
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def compiled(text: str, arch: str) -> str:
    """Compile a source with CuPy's options, and return what the assembler says of it."""
    from cuda import core

    options = core.ProgramOptions(
        std="c++17", arch=arch, ftz=True, no_cache=True, ptxas_options="-v"
    )
    log = io.StringIO()
    core.Program(text, "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def measure(case: Case, arch: str) -> Resources:
    """Compile a case, and return what it takes."""
    special = specialisation(case, arch)
    log = compiled(source.source(special), special.architecture or arch)
    assert "C75" not in log, log  # products that the assembler runs one by one
    assert f"'{special.name}'" in log, log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    (stack,) = re.findall(r"(\d+) bytes stack frame", log)
    (stores,) = re.findall(r"(\d+) bytes spill stores", log)
    (loads,) = re.findall(r"(\d+) bytes spill loads", log)
    tiles = special.tiles
    return Resources(
        tiles.block_q, tiles.block_kv, tiles.threads, tiles.shared_memory,
        int(registers), int(stack), int(stores), int(loads),
    )  # fmt: skip


def read() -> tuple[str, dict[Key, Resources]]:
    """Return the table, and the version of NVRTC that it was made with."""
    first, *lines = TABLE.read_text().splitlines()
    rows = {}
    for row in csv.DictReader(lines):
        words = [row[name] for name in Key._fields]
        key = Key(
            *words[:2], int(words[2]), int(words[3]), words[4], words[5] == "True", *words[6:]
        )
        assert key not in rows, key
        rows[key] = Resources(*(int(row[name]) for name in Resources._fields))
    return first.removeprefix("# NVRTC "), rows


def write(rows: Iterable[tuple[Key, Resources]], file: io.TextIOBase) -> None:
    print(f"# NVRTC {nvrtc_version()}", file=file)
    table = csv.writer(file, lineterminator="\n")
    table.writerow(Key._fields + Resources._fields)
    table.writerows(key + resources for key, resources in rows)


def summary(rows: Iterable[tuple[Key, Resources]], commit: str) -> dict[str, Any]:
    """Return what is kept of a compilation for all architectures."""
    archs: dict[str, dict[str, Any]] = {}
    for key, made in rows:
        of_arch = archs.setdefault(key.arch, {"kernels": [], "specialisations": 0, "spilled": 0})
        of_arch["specialisations"] += 1
        of_arch["spilled"] = max(of_arch["spilled"], made.spill_stores)
        if key.kernel not in of_arch["kernels"]:
            of_arch["kernels"].append(key.kernel)
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": f"NVRTC {nvrtc_version()}",
        "command": " ".join(["python", "tests/tools/cuda_table.py", *sys.argv[1:]]),
        "archs": archs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the table of tests/data/cuda_resources.csv.")
    parser.add_argument(
        "--archs", help="print the table for these instead: sm_86,sm_89 or so, or all"
    )
    parser.add_argument("--kernels", help="compile only these again; other rows stay")
    parser.add_argument("--once", action="store_true", help="one specialisation of each kernel")
    parser.add_argument("--record", action="store_true", help="keep a summary, see above")
    given = parser.parse_args()
    chosen = given.archs
    if chosen is None and (given.once or given.record):
        parser.error("--once and --record need --archs: the table has every case")
    archs = ARCHS if chosen is None else SHARED_MEMORY if chosen == "all" else chosen.split(",")
    jobs = [(case, arch) for case in cases() for arch in archs if runs_on(case, arch)]
    if given.once:
        jobs = list({(case.kernel, arch): (case, arch) for case, arch in jobs}.values())
    held: dict[Key, Resources] = {}
    if given.kernels is not None:
        again = given.kernels.split(",")
        held = {key: x for key, x in read()[1].items() if key.kernel not in again}
    nvrtc_version()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda job: held.get(key_of(*job)) or measure(*job), jobs)
        rows = [(key_of(*job), found) for job, found in zip(jobs, made, strict=True)]
    text = io.StringIO()
    write(rows, text)
    if chosen is None:
        TABLE.write_text(text.getvalue())
        print(f"{len(rows)} rows in {TABLE}", file=sys.stderr)
    else:
        print(text.getvalue(), end="")
    if given.record:
        gpu_machine.write(summary(rows, gpu_machine.commit_of()), "compiled", gpu_machine.RECORDS)


if __name__ == "__main__":
    main()
