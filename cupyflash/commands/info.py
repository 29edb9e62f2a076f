"""What `cupyflash info` shows: versions, devices and the kernels that serve them, cache folders.

Nothing here fails: if something cannot be found out, the text says so, with the remedy. Nothing
here prints, either; the command does.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays.cuda_device import OLDEST_CAPABILITY
from ..gpu import disk_cache
from ..gpu.kernels.registry import SPECS
from ..gpu.kernels.spec import KernelSpec
from ..hints.install import CUPY, extra

Line = tuple[str, str]  # label and text


def commit() -> str:
    """Return the commit of the clone that the package lies in, or nothing if it lies in none."""
    root = Path(__file__).parents[2]
    if not ((root / ".git").exists() and (root / "kernels_cu").is_dir()):
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Name of the CPU, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lines(version: str) -> list[Line]:
    """Return everything that `cupyflash info` shows, for a version of the package."""
    return [
        ("cupyflash", version),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("NumPy", np.__version__),
        ("Numba", installed("numba") or "not installed"),
        ("ml_dtypes", installed("ml_dtypes") or "not installed; bfloat16 arrays need it"),
        ("", ""),
        *cpu_lines(),
        ("", ""),
        *gpu_lines(),
    ]


def cpu_lines() -> list[Line]:
    """Say what serves NumPy arrays."""
    from ..reference.cpu import jit, thread_limits

    with warnings.catch_warnings():  # has its own line below
        warnings.simplefilter("ignore")
        obstacle = jit.cache_obstacle()
    try:
        limit = thread_limits.deciding()
        how = f"decided by {limit.why}"
        if thread_limits.VARIABLE not in limit.why:
            how += f"; {thread_limits.VARIABLE} sets another number"
        number_of_threads = f"{limit.number} ({how})"
    except ValueError as error:  # a user may be here to look for a wrong setting
        number_of_threads = str(error)
    return [
        ("CPU", f"{processor()}, {usable_cores()} usable cores"),
        ("kernels", "tiled, compiled by Numba when first used"),
        ("threads", number_of_threads),
        ("CPU cache", str(jit.cache_folder())),
        (
            "",
            "writable (CUPYFLASH_CACHE_DIR sets it)"
            if not obstacle
            else f"NOT used ({obstacle}): every process compiles the CPU kernels again; set "
            "CUPYFLASH_CACHE_DIR to a folder of yours that only you can write to",
        ),
    ]


def _words(error: Exception) -> str:
    """What an error says, in one short line."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return textwrap.shorten(text, 100, placeholder=" ...")


def _ask(question: Callable[[], Any]) -> tuple[Any, str]:
    """Return an answer and no words, or None and in words why there is none."""
    try:
        return question(), ""
    except Exception as error:  # noqa: BLE001 (drivers and loaders fail in many ways; all are told)
        return None, _words(error)


def find_cupy() -> tuple[Any, str]:
    """Return CuPy and no words, or None and in words what is missing and what to do."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return None, f"not installed; for NVIDIA GPUs: {CUPY}"
        return None, f"cannot be imported ({_words(error)}); install it anew: {CUPY}"
    except OSError as error:  # CuPy makes its cache folder when it is imported
        remedy = "set CUPY_CACHE_DIR to a folder of yours that is writable"
        return None, f"cannot be imported ({_words(error)}); {remedy}"
    except Exception as error:  # noqa: BLE001 (whatever is broken, the remedy is the same)
        return None, f"cannot be imported ({_words(error)}); install it anew: {CUPY}"
    return cupy, ""


def _version(number: int) -> str:
    """CUDA's versions are numbers: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _extra(cupy: Any) -> str:
    """Command that completes the CuPy that is installed."""
    number, _ = _ask(cupy.cuda.runtime.runtimeGetVersion)
    major = (number or 0) // 1000
    return extra(f"cuda{major}") if major in (12, 13) else CUPY


def cuda(cupy: Any) -> str:
    """Say the versions of the driver and of CuPy's runtime, and whether they go together."""
    runtime, why = _ask(cupy.cuda.runtime.runtimeGetVersion)
    has = f"runtime {_version(runtime)} (CuPy's)" if runtime else f"runtime unknown ({why})"
    driver, why = _ask(cupy.cuda.runtime.driverGetVersion)
    if driver is None:
        return f"driver unknown ({why}); {has}"
    if driver == 0:
        return f"no driver: install NVIDIA's, nvidia-smi then shows the GPUs; {has}"
    text = f"driver for CUDA up to {_version(driver)}; {has}"
    if runtime and driver // 1000 < runtime // 1000:
        text += f"; the driver is too old: update it, or {extra(f'cuda{driver // 1000}')}"
    return text


def nvrtc(cupy: Any) -> tuple[str, str]:
    """Return the version of the run-time compiler and no words, or nothing and what to do."""
    version, why = _ask(cupy.cuda.nvrtc.getVersion)
    if version is None:
        return "", f"not found, so no GPU kernel can be compiled: {_extra(cupy)} ({why})"
    return ".".join(str(number) for number in version), ""


def count(cupy: Any) -> tuple[int, str]:
    """Return how many devices there are and no words, or 0 and why."""
    number, why = _ask(cupy.cuda.runtime.getDeviceCount)
    if number:
        return int(number), ""
    if _ask(cupy.cuda.runtime.driverGetVersion)[0] == 0:
        return 0, "there is no NVIDIA driver"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r} may hide them"
    return 0, f"CuPy finds no usable NVIDIA GPU ({why or 'it counts 0'}){hidden}"


def served(capability: tuple[int, int]) -> str:
    """Say which kernels serve a device, and why."""
    if capability < OLDEST_CAPABILITY:
        return (
            f"NOT supported: kernels need compute capability {_dotted(OLDEST_CAPABILITY)} (Turing) "
            "or newer; NumPy arrays run on the CPU"
        )
    portable = [spec.name for spec in SPECS.values() if spec.scores and not spec.tensor_cores]
    said = f"served by the portable kernels {_listed(portable)}, in every dtype"
    cores = [spec for spec in SPECS.values() if spec.tensor_cores]
    there = [
        spec
        for spec in cores
        if (spec.capability <= capability if spec.architecture is None
            else spec.capability == capability)
    ]  # fmt: skip
    if not there:
        oldest = min(spec.capability for spec in cores)
        return f"{said}; tensor cores are used from compute capability {_dotted(oldest)} on"
    # Kernels by what they serve: dtypes, the largest head, the requested precision.
    groups: dict[tuple[str, int, str | None], list[str]] = {}
    for spec in there:
        for largest, precision, dtypes in _types(spec):
            groups.setdefault((_listed(dtypes), largest, precision), []).append(spec.name)
    parts = [
        f"{dtypes} with heads up to {largest}"
        + ("" if precision is None else f' where precision="{precision}"')
        + f" ({', '.join(names)})"
        for (dtypes, largest, precision), names in groups.items()
    ]
    return f"{said}; tensor cores multiply {'; '.join(parts)}"


def _types(spec: KernelSpec) -> list[tuple[int, str | None, list[str]]]:
    """Return the types that a kernel serves, by largest head and the precision they need."""
    groups: dict[tuple[int, str | None], list[str]] = {}
    for dtype, largest in spec.heads.items():
        groups.setdefault((largest, spec.precisions.get(dtype)), []).append(dtype)
    return [(*key, dtypes) for key, dtypes in groups.items()]


def _listed(names: list[str]) -> str:
    """Return names as a sentence has them: "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def device_lines(cupy: Any, number: int) -> list[Line]:
    """Say what one device is, and which kernels serve it."""
    label = f"GPU {number}"
    facts, why = _ask(lambda: cupy.cuda.runtime.getDeviceProperties(number))
    if facts is None:
        return [(label, f"tells nothing about itself ({why})")]
    capability = int(facts["major"]), int(facts["minor"])
    return [
        (
            label,
            f"{facts['name'].decode()}, compute capability {capability[0]}.{capability[1]}, "
            f"{facts['totalGlobalMem'] / 2**30:.0f} GiB, {facts['multiProcessorCount']} "
            f"multiprocessors, {facts['sharedMemPerBlockOptin'] // 1024} KiB of shared memory per "
            "block",
        ),
        ("", served(capability)),
    ]


def _can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the one where it would be made."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def gpu_cache_lines() -> list[Line]:
    """Say where CuPy keeps compiled kernels."""
    if disk_cache.in_memory():
        return [("GPU cache", "in memory only, by CUPY_CACHE_IN_MEMORY: every process compiles")]
    folder = disk_cache.folder()
    if distrust := disk_cache.distrust():
        return [("GPU cache", folder), ("", f"NOT safe: {distrust} (CUPY_CACHE_DIR sets it)")]
    if _can_write(Path(folder)):
        return [("GPU cache", folder), ("", "writable (CUPY_CACHE_DIR sets it)")]
    return [
        ("GPU cache", folder),
        ("", "NOT writable: CuPy fails when it compiles; set CUPY_CACHE_DIR to a folder of yours"),
    ]


def gpu_lines() -> list[Line]:
    """Say what serves CuPy arrays."""
    cupy, why = find_cupy()
    if cupy is None:
        return [("CuPy", why), ("GPU", "none without CuPy; NumPy arrays run on the CPU")]
    version, missing = nvrtc(cupy)
    number, none = count(cupy)
    found = [
        ("CuPy", str(cupy.__version__)),
        ("CUDA", cuda(cupy)),
        ("NVRTC", f"{version}, compiles the GPU kernels when first used" if version else missing),
        *gpu_cache_lines(),
    ]
    if not number:
        found.append(("GPU", f"none: {none}"))
    for device in range(number):
        found += device_lines(cupy, device)
    return found


def gpu_obstacle() -> str:
    """Say why the demo cannot run on the current GPU, and what to do; nothing where it can."""
    cupy, why = find_cupy()
    if cupy is None:
        return f"CuPy is {why}" if why.startswith("not ") else f"CuPy {why}"
    number, why = count(cupy)
    if not number:
        return why
    facts, why = _ask(lambda: cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice()))
    if facts is None:
        return f"the GPU tells nothing about itself ({why})"
    capability = int(facts["major"]), int(facts["minor"])
    if capability < OLDEST_CAPABILITY:
        return f"{facts['name'].decode()} is {served(capability)}"
    version, why = nvrtc(cupy)
    if not version:
        return f"NVRTC is {why}"
    _, why = _ask(lambda: cupy.ones((2, 2), np.float32) @ cupy.ones((2, 2), np.float32))
    if why:
        major = version.partition(".")[0]
        return (
            f"CuPy cannot multiply matrices, as standard attention does ({why}); where cuBLAS is "
            f"missing: pip install 'cuda-toolkit[cublas]=={major}.*'"
        )
    return ""
