"""A kernel's text as code for the emulator, and whether two texts make the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from emulator import build
from emulator.machine import Machine

SECONDS = 60  # of a processor's time that the compiler gets, however busy the machine is
# An index behind the end of an array that the compiler knows ends the process: g++ would otherwise
# take for granted that there is none, and end a mutant's loop as the original's. So does a vector
# where none may lie, which a CPU reads and a GPU does not.
FLAGS = (
    "-w",
    "-Werror=return-type",
    "-fsanitize=alignment,bounds-strict",
    "-fsanitize-undefined-trap-on-error",
    *build.FLAVOURS["races"],
)


class DoesNotCompile(Exception):
    """A mutant is no program."""


def object_of(text: str, folder: Path, flags: tuple[str, ...] = FLAGS) -> bytes:
    """Compile a text; two that are the same to the compiler give the same bytes."""
    (folder / "kernel.cpp").write_text(text, encoding="utf-8")
    limited = ["sh", "-c", f'ulimit -t {SECONDS}; exec "$@"', "sh"]
    command = ["g++", *build.COMMON, *flags, "-c", "kernel.cpp", "-o", "kernel.o"]
    done = subprocess.run([*limited, *command], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise DoesNotCompile(done.stderr.decode(errors="replace")[:500])
    return (folder / "kernel.o").read_bytes()


def library(folder: Path) -> Path:
    """Link what was compiled last."""
    # A path that is loaded already would be the old library again.
    path = folder / f"kernel{len(list(folder.iterdir()))}.so"
    parts = *build.linker(), *build.runtime()
    command = ["g++", "-shared", str(folder / "kernel.o"), *parts, "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def linked(folder: Path, name: str) -> Machine:
    """Return the machine of what was compiled last."""
    return Machine(name, library(folder))


def disassembly(text: str, folder: Path) -> list[str]:
    """Return the instructions of a text, optimised, with its own names by their order."""
    object_of(text, folder, ("-w", "-O2"))
    command = ["objdump", "-drs", "--no-show-raw-insn", "kernel.o"]  # functions have own sections
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    names: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"name{len(names)}")

    return [re.sub(r"_ZN?\w+", numbered, line) for line in done.stdout.splitlines()]
