"""The build backend: setuptools', with an sdist that depends on the files' content alone.

With ``SOURCE_DATE_EPOCH`` setuptools makes the same wheel again, byte by byte. Its sdist, however,
holds the times and owners of the files. Here that time replaces all times, and no owner is named.
Setuptools puts into a wheel whatever an earlier build has left in ``build/lib``, such as modules
that were removed since. Here that folder is cleared first.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel from the sources alone; return the name of its file."""
    for left in (*Path("build").glob("lib*"), *Path("build").glob("bdist.*")):
        shutil.rmtree(left)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the sdist; return the name of its file."""
    name = build_meta.build_sdist(sdist_directory, config_settings)
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        path = Path(sdist_directory, name)
        path.write_bytes(rewritten(path, int(epoch)))
    return name


def rewritten(path: Path, time: int) -> bytes:
    """Return a .tar.gz with its members in order of name, of one time, owned by nobody."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 9, packed, mtime=time) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as new,
        tarfile.open(path) as old,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            content = old.extractfile(member)
            member.pax_headers = {}
            member.mtime = time
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            new.addfile(member, content)
    return packed.getvalue()
