"""Documents: their code blocks, run in order as a reader would type them, and what they print.

A block of ``text`` right below a block of ``python`` is what that block prints.
``python tests/tools/documents.py PAGE...`` runs pages and writes what they print now.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
NEEDS_A_GPU = re.compile(r"^import cupy$|device=\"cuda\"", re.MULTILINE)
# Libraries for which cupyflash has functions; it needs none of them, so that they may be missing.
LIBRARIES = re.compile(r"^(?:import|from) (?:cupyflash\.)?(torch|jax|transformers)\b", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the line of its first character, its text, and what it says it prints."""

    line: int
    text: str
    shown: str | None = None


def blocks(document: str, language: str) -> list[Block]:
    """Return every fenced block in one language."""
    text = (ROOT / document).read_text()
    found = []
    for match in FENCE.finditer(text):
        if match[1] == language:
            below = PRINTED.match(text, match.end() + 1)
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(line, match[2], below and below[1]))
    return found


def code(document: str, line: int, text: str) -> CodeType:
    """Compile a block; empty lines before it let a traceback show the document's own lines."""
    return compile("\n" * (line - 1) + text, str(ROOT / document), "exec")


def kind(document: str, block: Block) -> str:
    """Return what a block of Python needs: a "gpu", a "library", or a "cpu".

    All blocks of a page whose first one needs a library are for readers who have it.
    """
    if NEEDS_A_GPU.search(block.text):
        return "gpu"
    first = blocks(document, "python")[0]
    is_library = any(LIBRARIES.search(each.text) for each in (first, block))
    return "library" if is_library else "cpu"


def libraries(document: str) -> list[str]:
    """Return the libraries that a document's blocks import."""
    texts = [x.text for x in blocks(document, "python") if kind(document, x) == "library"]
    return sorted({name for text in texts for name in LIBRARIES.findall(text)})


def run(document: str, printed: Callable[[Block, str], None], what: str = "cpu") -> int:
    """Run the blocks of one kind in one namespace; return how many there are.

    `printed` is called with each block that shows what it prints, and what it printed.
    """
    found = [each for each in blocks(document, "python") if kind(document, each) == what]
    namespace: dict[str, object] = {"__name__": "document"}
    for block in found:
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(code(document, block.line, block.text), namespace)
        if block.shown is not None:
            printed(block, stream.getvalue())
    return len(found)


def write(document: str) -> None:
    """Run a page, and write what it prints into it."""
    path = ROOT / document
    text = path.read_text()

    def replace(block: Block, output: str) -> None:
        nonlocal text
        shown = f"```python\n{block.text}```\n\n```text\n"
        text = text.replace(f"{shown}{block.shown}```", f"{shown}{output}```")

    for what in ("cpu", "library"):
        run(document, replace, what)
    path.write_text(text)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        write(Path(page).resolve().relative_to(ROOT).as_posix())
