"""How the commands write tables, units and lines, and how they read numbers.

It is plain text, so it needs only the package's own dependencies.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence

COLUMNS = 100


def printable(text: str) -> str:
    """Write what would command a terminal, such as ESC, as Python does: names may hold anything."""
    return "".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in text)


def complain(error: object, before: str = "error: ") -> None:
    """Print an error on standard error, in lines of 100 columns."""
    text = printable(f"{before}{error}")
    lines = textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=sys.stderr)


def table(rows: Sequence[Sequence[str]], left: int = 1, header: int = 1) -> str:
    """Lay out rows of cells in columns that are two spaces apart, with a rule below the header.

    Parameters
    ----------
    rows : sequence of sequence of str
        The header comes first; all rows have the same length.
    left : int, optional
        How many columns are flush left; the others hold numbers and are flush right.
    header : int, optional
        How many rows the header has.

    Returns
    -------
    str
        Lines without trailing space.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(header, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def megabytes(number: float) -> str:
    """Bytes in MB, with two significant digits at least."""
    millions = number / 1e6
    digits = 0 if millions >= 10 else 1 if millions >= 1 else 2
    return f"{millions:.{digits}f} MB"


def milliseconds(seconds: float) -> str:
    """Seconds in ms, with two significant digits at least."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def ratio(number: float) -> str:
    """A factor with two significant digits at least."""
    return (
        f"{number:.0f}x" if number >= 10 else f"{number:.1f}x" if number >= 1 else f"{number:.2f}x"
    )


def verdict(standard: float, ours: float, less: str, more: str) -> str:
    """Say by which factor `ours` is less or more than `standard`, in the words given."""
    factor = standard / ours
    return f"{ratio(factor)} {less}" if factor >= 1 else f"{ratio(1 / factor)} {more}"


def span(factors: Sequence[float], what: str) -> str:
    """Say in one phrase what some factors, standard over ours, mean."""
    low, high = min(factors), max(factors)
    if low >= 1:
        return f"{ratio(low)} to {ratio(high)} less {what}"
    if high < 1:
        return f"{ratio(1 / high)} to {ratio(1 / low)} more {what}"
    return f"from {ratio(1 / low)} more to {ratio(high)} less {what}"


def wrapped(lines: Sequence[tuple[str, str]]) -> str:
    """Lay out labels and texts, the texts below each other and broken at 100 columns."""
    indent = 2 + max(len(printable(label)) for label, _ in lines)
    return "\n".join(
        textwrap.fill(
            printable(text),
            COLUMNS,
            initial_indent=f"{printable(label):<{indent}}",
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in lines
    )


def whole_number(low: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `low`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a whole number of {low} or more"
            )
        return value

    return read
