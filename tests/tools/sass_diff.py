"""Which kernels' machine code a change of the CUDA sources changes; no GPU is needed.

Compiles the covering set of specialisations (tests/helpers/cuda_specialisations.py) with NVRTC, and
compares the code sections, registers, stack and spills of each with those of another commit. A
kernel whose source differs only in comments, or whose PTX is the same but for names, is equal
without the assembler's work.

    python tests/tools/sass_diff.py                        this tree and HEAD
    python tests/tools/sass_diff.py --since main           this tree and another commit
    python tests/tools/sass_diff.py --save base.json       what this tree's kernels are
    python tests/tools/sass_diff.py --base base.json       this tree and what was saved
    python tests/tools/sass_diff.py --kernels "*sm90*" --archs sm_90

The exit status is 1 if a kernel differs. A kernel that only one of the two has is named, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cupyflash", "reference", "kernels_cu", "tests")
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_VARIABLE = re.compile(r"(\w+)(?:\[\d*\])?(?: = .*)?;$")  # of PTX
# Not .nv.constant4, the addresses of all variables: it grows with each `constexpr` of a header.
_CODE = re.compile(r"\.(text|rela?\.text|nv\.shared|nv\.constant[0-35-9])\.")
_SAID = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A specialisation that can be compiled: its symbol, its text and its architecture."""

    name: str
    text: str
    arch: str

    def source(self) -> str:
        """Return a digest of the text without comments and blanks."""
        kept = _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", self.text)
        lines = (re.sub(r"\s+", " ", line).strip() for line in kept.splitlines())
        return digest("\n".join(line for line in lines if line).encode())


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of a kernel: digests of its source, PTX and machine code, and its resources."""

    source: str
    ptx: str
    code: str
    code_bytes: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def nvrtc(kernel: Kernel, arch: str, *more: str) -> tuple[str, bytes, str]:
    """Compile a kernel, and return its PTX, its cubin (for an sm_ architecture) and the log."""
    from cuda.bindings import nvrtc as api

    def checked(answer: Any) -> Any:
        status, *values = answer
        if status != api.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{kernel.name} for {arch}: {status}\n{log()}")
        return values[0] if values else None

    def text(size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
        room = bytearray(checked(size(program)))
        data = bytes(room)
        checked(get(program, data))
        return data

    def log() -> str:
        _, size = api.nvrtcGetProgramLogSize(program)
        data = bytes(bytearray(size))
        api.nvrtcGetProgramLog(program, data)
        return data.decode().rstrip("\0")

    _, program = api.nvrtcCreateProgram(kernel.text.encode(), b"kernel.cu", 0, [], [])
    try:
        options = ["-std=c++17", "-ftz=true", "-w", f"-arch={arch}", *more]
        checked(api.nvrtcCompileProgram(program, len(options), [x.encode() for x in options]))
        cubin = b""
        if arch.startswith("sm_"):
            cubin = text(api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN)
        ptx = text(api.nvrtcGetPTXSize, api.nvrtcGetPTX).decode().rstrip("\0")
        return ptx, cubin, log()
    finally:
        api.nvrtcDestroyProgram(program)


def ptx_digest(ptx: str, name: str) -> str:
    """Return a digest of a kernel's PTX that does not depend on the names of C++.

    Of variables it has those that the code refers to: each `constexpr` of a header becomes one.
    """
    begin = min(ptx.find(word) for word in (".entry", ".func") if word in ptx)
    head, code = ptx[:begin], re.sub(r"//[^\n]*", "", ptx[begin:])
    variables = [(_VARIABLE.search(line), line) for line in head.splitlines()]
    words = set(re.findall(r"\w+", code))
    used = [line for found, line in variables if found and found[1] in words]
    names: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"$name{len(names)}")

    pattern = rf"\b(?:_Z\w+|{re.escape(name)}(?=_param_|\b))"
    return digest(re.sub(pattern, renamed, code + "\n".join(used)).encode())


def sections(elf: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit ELF file by name, those without contents as their size."""
    assert elf[:6] == b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file"
    (begin,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, begin + n * size) for n in range(count)]
    _, _, _, _, strings, _ = headers[names]
    found = {}
    for at, kind, _, _, offset, length in headers:
        first = strings + at
        name = elf[first : elf.index(b"\0", first)].decode()
        found[name] = length.to_bytes(8, "little") if kind == 8 else elf[offset : offset + length]
    return found


def compiled(kernel: Kernel) -> Compiled:
    """Compile a kernel down to machine code."""
    ptx, cubin, log = nvrtc(kernel, kernel.arch, "--ptxas-options=-v")
    held = {
        name.replace(kernel.name, "$kernel"): data
        for name, data in sections(cubin).items()
        if _CODE.match(name)
    }
    code = held[".text.$kernel"]
    all_code = b"".join(name.encode() + b"\0" + held[name] for name in sorted(held))
    said = {}
    for what, pattern in _SAID.items():
        (number,) = re.findall(pattern, log)
        said[what] = int(number)
    return Compiled(
        kernel.source(), ptx_digest(ptx, kernel.name), digest(all_code), len(code), **said
    )


def compared(kernel: Kernel, base: Compiled) -> Compiled:
    """Compile a kernel as far as is needed to know whether it is the one of the base."""
    if kernel.source() == base.source:
        return base
    ptx, _, _ = nvrtc(kernel, kernel.arch.replace("sm_", "compute_"))
    if ptx_digest(ptx, kernel.name) == base.ptx:
        return base
    return compiled(kernel)


def differences(now: Compiled, base: Compiled) -> list[str]:
    """Return what differs between two compiled kernels, in words; nothing if their code is one."""
    changed = []
    for field in ("registers", "stack", "spill_stores", "spill_loads", "code_bytes"):
        was, is_ = getattr(base, field), getattr(now, field)
        if was != is_:
            changed.append(f"{field.replace('_', ' ')} {was} -> {is_}")
    if now.code != base.code and not changed:
        changed.append("other instructions, as many")
    return changed


def kernels(tree: Path, pattern: str, archs: list[str] | None) -> dict[str, Kernel]:
    """Return the covering set of a tree, whose `cupyflash` is the one to import, by name."""
    sys.path[:0] = [str(tree / "tests" / name) for name in ("tools", "helpers", "")]
    from cuda_specialisations import cases, runs_on, specialisation
    from cuda_table import ARCHS, key_of

    from cupyflash.gpu import source

    found = {}
    for case in cases():
        if not fnmatch.fnmatch(case.kernel, pattern):
            continue
        for arch in archs or ARCHS:
            if runs_on(case, arch):
                special = specialisation(case, arch)
                text = source.source(special)
                kernel = Kernel(special.name, text, special.architecture or arch)
                found[" ".join(str(x) for x in key_of(case, arch))] = kernel
    return found


def in_parallel(tasks: list[Callable[[], Compiled]], jobs: int) -> list[Compiled]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda task: task(), tasks))


def save(path: Path, found: dict[str, Kernel], jobs: int) -> None:
    made = in_parallel([lambda k=k: compiled(k) for k in found.values()], jobs)
    rows = {key: dataclasses.asdict(each) for key, each in zip(found, made, strict=True)}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def read(path: Path) -> dict[str, Compiled]:
    return {key: Compiled(**row) for key, row in json.loads(path.read_text()).items()}


def of_commit(commit: str, more: list[str]) -> dict[str, Compiled]:
    """Compile what a commit has, in a process that imports that commit's package."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(
            ["git", "archive", commit, *FOLDERS], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        for part in ("reference", "kernels_cu"):  # where the installed package has them
            (tree / part).rename(tree / "cupyflash" / part)
        table = tree / "base.json"
        command = [sys.executable, __file__, "--tree", folder, "--save", str(table), *more]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": folder})
        return read(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the machine code of kernels.")
    parser.add_argument("--since", default="HEAD", help="the commit to compare with")
    parser.add_argument("--base", type=Path, help="a file of --save to compare with instead")
    parser.add_argument("--save", type=Path, help="write what the kernels are, and compare nothing")
    parser.add_argument("--kernels", default="*", help="a pattern of names of kernels")
    parser.add_argument("--archs", help="sm_80,sm_90 or so instead of those of the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = parser.parse_args()
    archs = given.archs.split(",") if given.archs else None
    found = kernels(given.tree, given.kernels, archs)
    if not found:
        parser.error(f"--kernels: got {given.kernels!r}, which is the name of no kernel")
    if given.save:
        save(given.save, found, given.jobs)
        print(f"{len(found)} kernels in {given.save}", file=sys.stderr)
        return 0
    if given.base:
        base = read(given.base)
    else:
        more = ["--kernels", given.kernels, "--jobs", str(given.jobs)]
        base = of_commit(given.since, more + (["--archs", given.archs] if given.archs else []))
    both = [key for key in found if key in base]
    now = in_parallel([lambda key=key: compared(found[key], base[key]) for key in both], given.jobs)
    differ = 0
    for key, each in zip(both, now, strict=True):
        changed = differences(each, base[key])
        differ += bool(changed)
        if changed:
            print(f"{key}: {', '.join(changed)}")
    for key in found.keys() - base.keys():
        print(f"{key}: only in this tree")
    if given.kernels == "*" and archs is None:
        for key in base.keys() - found.keys():
            print(f"{key}: only in the base")
    print(f"{len(both)} kernels compared, {differ} differ", file=sys.stderr)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
