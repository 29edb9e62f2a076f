"""The tables in kernels_cu/README.md: kernels, from their specs, and compile-time values.

``python tests/tools/kernel_table.py`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cupyflash.gpu.kernels.registry import KERNELS
from cupyflash.gpu.kernels.rowwise import ANY_HEAD
from cupyflash.gpu.kernels.spec import KernelSpec
from cupyflash.gpu.specialisation import FLAGS

PAGE = Path(__file__).resolve().parents[2] / "kernels_cu" / "README.md"
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


def kernels() -> str:
    """Return the table of kernels: of each part, in the order in which they are asked."""
    head = "part", "kernel", "compute capability", "types, largest head", "when it serves"
    return _table(head, (_row(spec) for specs in KERNELS.values() for spec in specs))


def values() -> str:
    """Return the table of compile-time values, in the order of the prelude."""
    head = "value", "what it is", "in the symbol"
    return _table(head, ((flag.name, flag.about, flag.shown or "-") for flag in FLAGS))


TABLES = {"kernels": kernels, "values": values}


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


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


def shown(text: str, name: str) -> str:
    """Return a table that a page has."""
    return _parts(text, name)[1]


def _parts(text: str, name: str) -> tuple[str, str, str]:
    """Return a page before a table, the table, and the page after it."""
    first = f"<!-- {name}: python tests/tools/kernel_table.py -->"
    last = f"<!-- end of {name} -->"
    before, begin, rest = text.partition(f"{first}\n\n")
    shown, end, after = rest.partition(last)
    assert begin, f"{PAGE}: no line {first}"
    assert end, f"{PAGE}: no line {last}"
    return before + begin, shown.removesuffix("\n"), f"\n{end}{after}"


def main() -> None:
    text = PAGE.read_text()
    for name, table in TABLES.items():
        before, _, after = _parts(text, name)
        text = f"{before}{table()}{after}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
