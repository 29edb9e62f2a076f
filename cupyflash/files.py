"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ArgumentError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path beside a file; what is written there replaces the file at the end.

    After an error, the file is as it was. If the file exists and is not a regular file, such as
    /dev/stdout, it is written to directly.

    Parameters
    ----------
    path : str or Path
        The file. If it is a link, the file that it leads to is replaced.
    """
    wanted = Path(path)
    if wanted.exists() and not wanted.is_file():
        yield wanted
        return
    wanted = wanted.resolve()
    beside = wanted.with_name(f".{wanted.stem}-{secrets.token_hex(4)}{wanted.suffix}")
    try:
        yield beside
        if wanted.exists():
            beside.chmod(wanted.stat().st_mode & 0o777)
        beside.replace(wanted)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, in UTF-8; after an error the old file is as it was."""
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")


def check_writable(path: Path, option: str) -> None:
    """Raise an error that names an option if a file could not be written later.

    Raises
    ------
    ArgumentError
        The path is a folder, its folder is missing, its name is too long, or it is not writable.
    """
    try:
        obstacle = _obstacle(path)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or error
        obstacle = f"{shortened(str(path))} cannot be written ({why}); choose another file"
    if obstacle:
        raise ArgumentError(f"{option}: {obstacle}.")


def check_ending(path: Path, argument: str, endings: tuple[str, ...]) -> None:
    """Raise an error that names an argument if a file's ending is that of another format.

    Parameters
    ----------
    path : Path
        The file. Names without an ending are fine: /dev/stdout, for instance.
    argument : str
        Which argument names it.
    endings : tuple of str
        The endings of what is written.

    Raises
    ------
    ArgumentError
        The ending is none of these.
    """
    if path.suffix and path.suffix.lower() not in endings:
        raise ArgumentError(
            f"{argument}: got the file {shortened(str(path))}; expected a name that ends in "
            f"{' or '.join(endings)}, for instance {path.with_suffix(endings[0]).name}."
        )


def _obstacle(path: Path) -> str:
    """Return why a file could not be written, and what to do; empty if it could."""
    folder = path.resolve().parent
    if not folder.is_dir():
        there = path.parent if not path.is_symlink() else folder
        return f"there is no folder {there}; make it first"
    if path.is_dir():
        return f"{path} is a folder; name a file"
    if path.exists() and not os.access(path, os.W_OK):
        return f"{path} may not be written; choose another file"
    if path.exists() and not path.is_file():
        return ""
    probe = folder / f".{path.name}-{secrets.token_hex(4)}"
    probe.touch()
    probe.unlink(missing_ok=True)
    return ""


def shortened(text: str) -> str:
    """Return a text that fits into a message."""
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"
