"""Messages between ranks that never come, and ranks that give up on them without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from cupyflash import distributed


def lose_messages(
    monkeypatch: pytest.MonkeyPatch, threads: distributed.Threads, is_lost: Callable[[int], bool]
) -> None:
    """Lose the messages of exchanges whose sender `is_lost` says yes to.

    Who waits for one gives up as if its time were up, and nobody else does: whoever is slow on a
    busy machine is waited for. So it is always the same rank that is said to be absent.
    """
    kind = type(threads.ranks[0])
    exchange, receive = kind.exchange, kind.receive
    lost: set[tuple[int, int, int]] = set()  # by sender, receiver and the number of the exchange

    def leaky(comm: Any, sends: Any, receives: Any) -> Any:
        kept = []
        for rank, message in sends:
            if is_lost(comm.rank):
                lost.add((comm.rank, rank, comm._exchanges + 1))
            else:
                kept.append((rank, message))
        return exchange(comm, kept, receives)

    def impatient(
        comm: Any, number: int, ranks: Any, timeout: float, what: str, left: float | None = None
    ) -> Any:
        keys = [(rank, comm.rank, number) for rank in ranks]
        deadline = time.monotonic() + (timeout if left is None else left)
        while (
            comm.shared.ended is None
            and not all(map(comm.shared.boxes.get, keys))
            and lost.isdisjoint(keys)
            and time.monotonic() < deadline
        ):
            time.sleep(1e-3)
        return receive(comm, number, ranks, timeout, what, left if lost.isdisjoint(keys) else 0.0)

    monkeypatch.setattr(kind, "exchange", leaky)
    monkeypatch.setattr(kind, "receive", impatient)
