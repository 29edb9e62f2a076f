"""The page of environment variables has those that the sources read, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupyflash.reference.cpu import thread_limits

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/environment.md").read_text(encoding="utf-8")
OWN = re.compile(r"\bCUPYFLASH_[A-Z_]*[A-Z]\b")
READ = re.compile(r"""environ(?:\.get\(|\.pop\(|\[)\s*["']([A-Z][A-Z0-9_]+)["']""")
# They are no settings for users to know, or other programs': the system's places of files; and
# Keras' back end, which `verify` sets in a process of its own.
ELSEWHERE = {
    "XDG_CACHE_HOME", "LOCALAPPDATA", "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "KERAS_BACKEND",
}  # fmt: skip


def sources() -> list[str]:
    folders = ROOT / "cupyflash", ROOT / "reference"
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 200
    return [path.read_text(encoding="utf-8") for path in files]


def rows(heading: str) -> set[str]:
    """The variables in the first column of the table below a heading."""
    text = PAGE.partition(heading)[2].partition("\n## ")[0]
    lines = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall(r"`([A-Z0-9_]+)`", line)}


def test_every_variable_of_the_package_is_on_the_page():
    read = {name for text in sources() for name in OWN.findall(text)}
    assert len(read) >= 6
    assert rows("# Environment variables") == read


def test_every_variable_that_is_read_is_on_the_page():
    """Also those of others."""
    read = {name for text in sources() for name in READ.findall(text)}
    read |= set(thread_limits.OTHERS)
    assert {"CUPY_CACHE_DIR", "CUPYFLASH_CACHE_DIR", "CUDA_VISIBLE_DEVICES"} <= read
    missing = {name for name in read - ELSEWHERE if f"`{name}`" not in PAGE}
    assert not missing


@pytest.mark.parametrize("page", ["howto/index.md", "reference/index.md", "install.md"])
def test_pages_lead_there(page):
    assert "environment" in (ROOT / "docs" / page).read_text(encoding="utf-8")
