"""Judge a peer in a process of its own, so that a library that ends its process ends no more."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..report import FAILED, NOT_APPLICABLE, Failure, Report, Result, columns, failure_lines
from ..verification import LATE, chosen_properties, verify
from . import PEERS
from .base import Peer

EXAMPLES = 1  # problems a property; bounds get 8 times as many
SECONDS = 18.0  # a peer
AT_ONCE = 2  # peers, if there are as many cores
GRACE = 60.0  # seconds for imports, and for the last problem


@dataclass(frozen=True)
class Judged:
    """What became of a peer.

    Attributes
    ----------
    name, version : str
        The peer's name, and the version of its library.
    results : tuple of Result
        Its properties.
    ended : str
        How its process ended, if it ended before it was done, and at which property.
    """

    name: str
    version: str
    results: tuple[Result, ...] = ()
    ended: str = ""

    @property
    def failures(self) -> list[Result]:
        """The properties that do not hold."""
        return [x for x in self.results if x.status == FAILED]

    @property
    def run(self) -> list[Result]:
        """The properties that were tried."""
        return [x for x in self.results if x.status != NOT_APPLICABLE]

    @property
    def late(self) -> int:
        """How many properties no time was left for."""
        return sum(x.reason == LATE for x in self.results)


def verify_peer(
    name: str,
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    seconds: float = SECONDS,
    only: Sequence[str] | None = None,
) -> Judged:
    """Try every property that applies to a function of another library.

    Parameters
    ----------
    name : str
        One of ``cupyflash.testing.peers.PEERS``, or "module:NAME" of a `Peer` of your own.
    examples, seed : int
        As in `cupyflash.testing.verify`.
    seconds : float
        After this time no further property is begun.
    only : sequence of str, optional
        Names of the properties to try; by default all.

    Returns
    -------
    Judged
        Its properties, or how its process ended.

    Raises
    ------
    ValueError
        If there is no peer or no property of a name.
    ImportError
        If its library is not installed.
    """
    peer = peer_of(name)
    chosen_properties(only)
    if peer.missing:
        raise ImportError(f"peer {name} needs {peer.package}: {peer.missing}")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.jsonl")
        arguments = [name, str(examples), str(seed), str(seconds), str(said), *(only or ())]
        # It imports from where this process does, and not from the folder that it runs in.
        command = [sys.executable, "-P", "-m", __name__, *arguments]
        paths = os.environ | {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
        # Problems are small, and another peer may have its turn at the same time.
        paths.setdefault("OMP_NUM_THREADS", "1")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds + GRACE, check=False,
                env=paths,
            )  # fmt: skip
            ended = "" if done.returncode == 0 else _how(done.returncode, done.stderr)
        except subprocess.TimeoutExpired:
            ended = f"it took more than {seconds + GRACE:.0f} s"
        results = [_read(line) for line in said.read_text().splitlines()] if said.exists() else []
    if ended:
        after = f" after {results[-1].name}" if results else " before the first property"
        ended += after
    return Judged(name, str(peer.version), tuple(results), ended)


def verify_peers(
    names: Sequence[str],
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    seconds: float = SECONDS,
    only: Sequence[str] | None = None,
    begun: Callable[[str], None] = lambda name: None,
) -> list[Judged]:
    """Judge several, `AT_ONCE` at a time, each as `verify_peer` does.

    Parameters
    ----------
    names : sequence of str
        Peers that lack nothing here.
    examples, seed, seconds, only
        As in `verify_peer`.
    begun : callable
        It is called with each name when that peer's turn comes.

    Returns
    -------
    list of Judged
        In the order of the names.
    """

    def judge(name: str) -> Judged:
        begun(name)
        return verify_peer(name, examples=examples, seed=seed, seconds=seconds, only=only)

    workers = min(AT_ONCE, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(judge, names))


def peer_of(name: str) -> Peer:
    """Return the peer of a name, or a `Peer` of one's own by "module:NAME"."""
    module, colon, attribute = name.partition(":")
    if colon:
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, Peer):
            raise ValueError(f"peer: {name} is of type {type(found).__name__}; expected a Peer")
        return found
    if name not in PEERS:
        raise ValueError(
            f"peer: got {name!r}; expected all, module:NAME or one of {', '.join(PEERS)}"
        )
    return PEERS[name]


def _how(code: int, text: str) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    last = text.strip().splitlines()[-1:] or ["nothing was said"]
    return f"its process ended with status {code}: {last[0]}"


def _read(line: str) -> Result:
    content = json.loads(line)
    failures = tuple(Failure(**x) for x in content.pop("failures"))
    return Result(**(content | {"failures": failures, "worst": ()}))


def _child(name: str, examples: str, seed: str, seconds: str, said: str, *only: str) -> None:
    """Judge a peer here; each result is written when it is there."""
    peer = peer_of(name)
    warnings.simplefilter("ignore")  # of other libraries
    functions = peer.make()
    with Path(said).open("w", encoding="utf-8") as file:

        def write(result: Result) -> None:
            content = asdict(result) | {"worst": (), "families": {}}
            file.write(json.dumps(content) + "\n")
            file.flush()

        report: Report = verify(
            functions.forward, functions.backward, dtypes=peer.dtypes, features=peer.features,
            examples=int(examples), seed=int(seed), seconds=float(seconds),
            only=only or None,
            progress=lambda _, __, result: write(result), **peer.says,
        )  # fmt: skip
        for result in report.results:
            if result.status == NOT_APPLICABLE and result.reason == LATE:
                write(result)


def table(judged: list[Judged], absent: list[Peer]) -> str:
    """Return what became of peers as text."""
    rows = [["peer", "version", "properties", "failed", "problems", "late"]]
    for each in judged:
        problems = sum(x.examples for x in each.run)
        rows.append([
            each.name, each.version, str(len(each.run)), str(len(each.failures)), str(problems),
            str(each.late) if each.late else "",
        ])  # fmt: skip
    text = [columns(rows)] if judged else []
    for each in judged:
        instead = peer_of(each.name).instead
        if each.ended:
            text += ["", f"{each.name}: {each.ended}"]
        seen: dict[str, str] = {}
        for result in each.failures:
            lines = failure_lines(result, seen)
            text += ["", f"{each.name} {each.version}: {result.name}: {result.formula}"]
            text += [f"  {instead[result.name]}"] if result.name in instead else []
            text += lines[1:-1]  # without the title and the call of `check`
    if absent:
        text += ["", "Not judged, because they need:"]
        width = max(len(x.name) for x in absent)
        text += [f"  {x.name:<{width}}  {x.missing}" for x in absent]
    return "\n".join(text)


def to_json(judged: list[Judged], absent: list[Peer]) -> str:
    """Return the same as JSON."""
    content: dict[str, Any] = {
        "format": "cupyflash peers 1",
        "peers": [asdict(x) for x in judged],
        "absent": {x.name: x.missing for x in absent},
    }
    return json.dumps(content, indent=1)


if __name__ == "__main__":
    _child(*sys.argv[1:])
