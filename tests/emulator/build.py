"""From a kernel's text to a library for the CPU: compiled once, kept in a folder by its content."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cupyflash.gpu import source
from cupyflash.gpu.specialisation import Specialisation

HERE = Path(__file__).resolve().parent
RUNTIME = ("runtime.cpp", "races.cpp", "matrices.cpp", "warpgroups.cpp", "stores.cpp")
HEADERS = ("runtime.h", "language.h", "races.h", "clocks.h", "turns.h", "boxes.h", "numbers.h")

# No contraction: a product and a sum are two roundings here, on a GPU one or two.
COMMON = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-I", str(HERE))
KERNEL = ("-g1", "-w", "-Werror=return-type")
# What g++ puts around a kernel's accesses. "races": calls of races.cpp, and no library of
# ThreadSanitizer's. "sanitized": AddressSanitizer and UndefinedBehaviorSanitizer; the process must
# be started with their libraries.
FLAVOURS = {
    "races": (
        *("-O1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
        *("-fira-region=one", "-fno-ivopts"),  # a seventh of the time that compiling takes
    ),
    "sanitized": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*(?:include[ \t]*"|pragma[ \t]+once)')
_WRITES_BYTES = re.compile(r"\breinterpret_cast<unsigned char\*>")
_SHARED = re.compile(r"\bextern __shared__ (\w+) (\w+)\[\];")
# Who includes no header of the standard library compiles in a fifth of a second.
_TRAILER = """
#ifndef GRAIN
#define GRAIN 2
#endif
EMULATOR_EXPORT const emulator::Kernel emulated_kernel = {
    emulator::Entry<KERNEL_NAME>::run, THREADS, SHARED_BYTES, emulator::Entry<KERNEL_NAME>::SIZE,
    FLUSH_SUBNORMALS, GRAIN};
"""


def missing() -> str | None:
    """Return why kernels cannot run here, or None."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "fork"):
        return "the emulator switches stacks by x86-64 instructions, on systems like Linux"
    if shutil.which("g++") is None:
        return "g++ is not installed, and the emulator compiles kernels with it"
    return None


def read(path: str) -> str:
    """Return a file of `kernels_cu`; of `ptx/`, its twin here."""
    if path.startswith("ptx/"):
        return (HERE / path).read_text(encoding="utf-8")
    return source.read(path)


def _with_lines(text: str, path: str) -> str:
    """Say again after every line that flattening replaces which line of which file comes next."""
    lines = [f'#line 1 "{path}"']
    for number, line in enumerate(text.splitlines(), 1):
        lines.append(line)
        if _INCLUDE.match(line):
            lines.append(f'#line {number + 1} "{path}"')
    return "\n".join(lines) + "\n"


def text(special: Specialisation, read: Callable[[str], str] = read) -> str:
    """Return what is compiled for a specialisation: the text for the GPU, between two files.

    `read` returns the files of `kernels_cu`; a test may change them.
    """
    generated = special.functions.source
    paths = (special.spec.source, *(source._VOCABULARY if generated else ()))
    flat = source.flatten_with(paths, lambda path: _with_lines(read(path), path))
    flush = "true" if special.dtype != "float64" else "false"
    prelude = source.prelude(special) + f"#define FLUSH_SUBNORMALS {flush}\n"
    if _WRITES_BYTES.search(flat):
        prelude += "#define GRAIN 1\n"
    return complete(f'{prelude}{flat}#line 1 "generated"\n{generated}')


def complete(kernel: str) -> str:
    """Return a kernel's text with what a GPU's compiler knows before it, and its entry behind it.

    The text defines KERNEL_NAME, FLUSH_SUBNORMALS, THREADS and SHARED_BYTES.
    """
    kernel = _SHARED.sub(r"\1* const \2 = static_cast<\1*>(emulator::shared_memory());", kernel)
    return f'#include "language.h"\n{kernel}{_TRAILER}'


@functools.cache
def cache() -> Path:
    """Return the folder for what is compiled: native code, so it must be nobody else's."""
    given = os.environ.get("CUPYFLASH_EMULATOR_CACHE")
    if given:
        folder = Path(given)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="cupyflash-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _compiler() -> str:
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return done.stdout + "".join((HERE / name).read_text() for name in (*HEADERS, *RUNTIME))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")


@functools.cache
def linker() -> tuple[str, ...]:
    """Return the flag for gold, where it is installed: four times as fast as the default."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


def _made(name: str, suffix: str, key: str, make: Callable[[str], None]) -> Path:
    """Return a file of the cache, which `make` writes if there is none."""
    digest = hashlib.sha256(f"{_compiler()}\n{key}".encode()).hexdigest()[:24]
    path = cache() / f"{name}-{digest}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            part = str(Path(folder) / path.name)
            make(part)
            Path(part).replace(path)  # whole or not at all, whoever else compiles the same
    return path


def _object(name: str, flavour: str) -> Path:
    """Return a part of the runtime, compiled without sanitizers."""
    heap = ("-DEMULATOR_HEAP",) if flavour == "sanitized" else ()
    flags = (*COMMON, "-O2", "-g1", "-Wall", "-Wextra", *heap)

    def make(to: str) -> None:
        _run("g++", *flags, "-c", str(HERE / name), "-o", to)

    return _made(Path(name).stem, ".o", f"{name}\n{flags}", make)


@functools.cache
def runtime(flavour: str = "races") -> tuple[str, ...]:
    """Return the parts that every library has, compiled."""
    return tuple(str(_object(name, flavour)) for name in RUNTIME)


def library(kernel: str, name: str, flavour: str = "races") -> Path:
    """Return the library of a kernel's complete text."""
    parts = runtime(flavour)

    def make(to: str) -> None:
        text, compiled = f"{to}.cpp", f"{to}.o"
        Path(text).write_text(kernel, encoding="utf-8")
        _run("g++", *COMMON, *KERNEL, *FLAVOURS[flavour], "-c", text, "-o", compiled)
        linked = FLAVOURS[flavour] if flavour == "sanitized" else linker()
        _run("g++", "-shared", *linked, compiled, *parts, "-o", to)

    return _made(name[:100], ".so", f"{COMMON}{KERNEL}{linker()}{flavour}\n{kernel}", make)


def libraries(
    specials: Iterable[Specialisation],
    flavour: str = "races",
    read: Callable[[str], str] = read,
) -> None:
    """Compile many specialisations, as many at a time as there are processors."""
    names = {text(each, read): each.name for each in specials}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda each: library(each, names[each], flavour), names):
            pass
