"""What a record of a run on a GPU says of itself: the commit, the card, the versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "data" / "gpu"
PACKAGES = """cupy-cuda12x cupy-cuda13x numpy numba ml_dtypes cuda-bindings nvidia-cuda-nvrtc
nvidia-cuda-nvrtc-cu12 torch transformers jax""".split()


def commit_of(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with a + if it differs from it; "" where there is no git."""

    def git(*words: str) -> str:
        asked = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
        return asked.stdout.strip() if asked.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return head + "+" * bool(head and changed)


def _words(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without the folder of its record, a path of one machine."""
    words = list(arguments)
    if "--folder" in words:
        place = words.index("--folder")
        del words[place : place + 2]
    return [word for word in words if not word.startswith("--folder=")]


def facts(commit: str) -> dict[str, Any]:
    """Return what a record begins with; `commit` is needed where there is no git."""
    commit = commit or commit_of()
    if not commit:
        sys.exit("this is no checkout of git: pass --commit")
    try:
        import cupy
    except ImportError:
        sys.exit("CuPy is not installed: pip install 'cupyflash[cuda13]'")
    from cupyflash.arrays import cuda_device

    card = cuda_device.here()
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": card.name,
        "cards": cupy.cuda.runtime.getDeviceCount(),
        "capability": "{}.{}".format(*card.capability),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "versions": versions,
        "command": " ".join(["python", Path(sys.argv[0]).name, *_words(sys.argv[1:])]),
    }


def write(record: dict[str, Any], what: str, folder: Path) -> Path:
    """Write a record as JSON under a name of its commit and card; return where."""
    card = re.sub(r"\W+", "-", record["card"]).strip("-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}_{card}_{record['commit'].rstrip('+')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)
    return path
