"""The table of kernels in kernels_cu/README.md, written from their specs.

``python tests/tools/kernel_table.py`` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from cupyflash.gpu.kernels.registry import KERNELS
from cupyflash.gpu.kernels.rowwise import ANY_HEAD
from cupyflash.gpu.kernels.spec import KernelSpec

PAGE = Path(__file__).resolve().parents[2] / "kernels_cu" / "README.md"
BEGIN, END = "<!-- kernels: python tests/tools/kernel_table.py -->", "<!-- end of kernels -->"
HEAD = ("part", "kernel", "compute capability", "types, largest head", "when it serves")
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def table() -> str:
    """Return the table: of each part the kernels in the order in which they are asked."""
    rows = [HEAD, ("---",) * len(HEAD)]
    rows += [_row(spec) for specs in KERNELS.values() for spec in specs]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(spec: KernelSpec) -> tuple[str, ...]:
    capability = ".".join(map(str, spec.capability))
    where = f"{capability} and newer" if spec.architecture is None else f"{capability} alone"
    groups: dict[int, list[str]] = {}
    for dtype, largest in spec.heads.items():
        groups.setdefault(largest, []).append(_SHORT[dtype])
    types = "; ".join(
        f"{' '.join(dtypes)}: {'any' if largest == ANY_HEAD else largest}"
        for largest, dtypes in groups.items()
    )
    when = [f'{_SHORT[x]} where `precision="{y}"`' for x, y in spec.precisions.items()]
    when += [spec.condition] if spec.condition else []
    part = spec.part if spec.part == spec.computes else f"{spec.part}: {spec.computes}"
    return part, f"`{spec.name}`", where, types, "; ".join(when) or "-"


def shown(text: str) -> str:
    """Return the table that a page has."""
    return _parts(text)[1]


def _parts(text: str) -> tuple[str, str, str]:
    """Return a page before its table, the table, and the page behind it."""
    before, begin, rest = text.partition(f"{BEGIN}\n\n")
    shown, end, behind = rest.partition(END)
    assert begin, f"{PAGE}: no line {BEGIN}"
    assert end, f"{PAGE}: no line {END}"
    return before + begin, shown.removesuffix("\n"), f"\n{end}{behind}"


def main() -> None:
    before, _, behind = _parts(PAGE.read_text())
    PAGE.write_text(f"{before}{table()}{behind}")


if __name__ == "__main__":
    main()
