"""Print the test modules that run a CUDA kernel on the emulator.

``python tests/tools/kernel_tests.py forward_sm80``: the module of the kernel's name; else those of
the emulator that name the kernel; else that of the longest name that begins it; else the one for
all kernels. `.ci/run kernel` passes them to pytest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "cuda"
FOR_ALL = TESTS / "test_emulator.py"
OF_NONE = {
    "test_emulator", "test_emulator_barriers", "test_emulator_faults", "test_cuda_source",
    "test_cuda_functions",
}  # fmt: skip


def kernels() -> dict[str, Path]:
    """Return the source of each kernel, by its name."""
    return {path.stem: path for path in sorted((ROOT / "kernels_cu").rglob("*.cu"))}


def modules_of(kernel: str) -> list[Path]:
    """Return the test modules of a kernel."""
    if (own := TESTS / f"test_{kernel}.py").exists():
        return [own]
    named = []
    for path in sorted(TESTS.glob("test_*.py")):
        text = path.read_text()
        if path.stem not in OF_NONE and "Emulator" in text and re.search(rf"\b{kernel}\b", text):
            named.append(path)
    # Where a portable kernel is named, another one is compared with it or chosen in its place.
    if named and kernels()[kernel].parent.name != "simt":
        return named
    parts = kernel.split("_")
    for count in range(len(parts) - 1, 0, -1):
        if (family := TESTS / f"test_{'_'.join(parts[:count])}.py").exists():
            return [family]
    return [FOR_ALL]


def main() -> None:
    known = kernels()
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in known:
        raise SystemExit(f"kernel: got {name!r}; expected one of {', '.join(known)}.")
    print(*(path.relative_to(ROOT) for path in modules_of(name)))


if __name__ == "__main__":
    main()
