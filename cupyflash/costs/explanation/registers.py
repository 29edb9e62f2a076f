"""Registers and spills of a kernel, as the compiler's assembler reports them. No GPU is needed."""

from __future__ import annotations

import functools
import re
from typing import Any

from ...gpu.source import source
from ...gpu.specialisation import Specialisation
from .results import Registers

REMEDY = "pip install cuda-bindings nvidia-cuda-nvrtc"
# CuPy's own options, in addition to those of cupyflash/gpu/jit.py, and the assembler's notes.
OPTIONS = (
    "-std=c++17",
    "-ftz=true",
    "--device-as-default-execution-space",  # without it, NVRTC 12 refuses our functions
    "--ptxas-options=-v",
)


class UnknownError(Exception):
    """Why there are no numbers, and what helps."""


def registers(special: Specialisation, capability: tuple[int, int]) -> Registers:
    """Compile a kernel, and return the registers and spills of a thread.

    Parameters
    ----------
    special : Specialisation
        The kernel.
    capability : tuple of int
        Compute capability of the device for which it is compiled.

    Raises
    ------
    UnknownError
        If there is no NVRTC, or if it does not know the device.
    """
    architecture = special.architecture or f"sm_{capability[0]}{capability[1]}"
    return _compiled(source(special), special.name, architecture)


@functools.lru_cache(maxsize=256)
def _compiled(text: str, name: str, architecture: str) -> Registers:
    version, log = _log(text, architecture)
    entry = rf"Compiling entry function '{name}'.*?(?=Compiling entry|\Z)"
    found = re.search(entry, log, re.DOTALL)
    said = found[0] if found else ""
    numbers = {
        what: re.search(rf"(\d+) {words}", said)
        for what, words in (("stores", "bytes spill stores"), ("loads", "bytes spill loads"))
    }
    used = re.search(r"Used (\d+) registers", said)
    if used is None:
        raise UnknownError(f"registers: NVRTC {version} does not report them for {architecture}")
    stores, loads = (int(x[1]) if x else 0 for x in numbers.values())
    return Registers(int(used[1]), stores, loads, f"NVRTC {version}, {architecture}")


def _log(text: str, architecture: str) -> tuple[str, str]:
    """Compile, and return the compiler's version and what it says."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnknownError(
            f"registers: cuda-bindings is not installed ({error}), which compiles kernels without "
            f"a GPU: {REMEDY}"
        ) from None
    try:
        _, major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    except Exception as error:  # noqa: BLE001 (loaders fail in many ways; all are told)
        raise UnknownError(f"registers: NVRTC is not found ({_first(error)}): {REMEDY}") from None
    version = f"{major}.{minor}"
    options = [x.encode() for x in (*OPTIONS, f"-arch={architecture}")]
    _, program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    said = log.decode(errors="replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise UnknownError(
            f"registers: NVRTC {version} does not compile for {architecture} "
            f"({_complaint(said) or status})"
        )
    return version, said


def _checked(nvrtc: Any, answer: Any) -> Any:
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(str(answer[0]))
    return answer


def _complaint(log: str) -> str:
    """Return the first error of a compiler's log, which begins with its warnings."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\s*(#[\w-]+\s*)?:", line)]
    return "".join((errors or lines)[:1])[:200]


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
