"""What ranks say to each other when something goes wrong: which rank, what happened, the remedy."""

from __future__ import annotations

from collections.abc import Sequence

AFTERWARDS = "The communicator is ended: make a new one when all ranks can go on."


def named(ranks: Sequence[int]) -> str:
    """Return the names of some ranks."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def caused(rank: int, error: BaseException) -> str:
    """Return which rank raised what."""
    return f"rank {rank} raised {type(error).__name__}: {error}"


def gave_up(rank: int, error: BaseException) -> str:
    """Return why the communicator ends when a rank raised in the middle of a call."""
    return f"{caused(rank, error)}\n{AFTERWARDS}"


def absent(rank: int, missing: Sequence[int], timeout: float, what: str) -> str:
    """Return why the communicator ends when a rank timed out."""
    return (
        f"rank {rank} timed out after {timeout:g} s waiting for {named(missing)} ({what}). "
        f"Every rank has to make the same calls; a larger timeout= waits longer.\n{AFTERWARDS}"
    )


def wrong_size(rank: int, peer: int, came: int, wanted: int, what: str) -> str:
    """Return why the communicator ends when a message does not fit."""
    return (
        f"rank {rank} got {came} bytes from rank {peer} and expected {wanted} ({what}). The two "
        "made different calls; check=True, the default, says how they differ.\n"
        f"{AFTERWARDS}"
    )
