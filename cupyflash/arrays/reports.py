"""Words of pinned host memory in which kernels leave word of what is wrong.

Nobody waits for such a kernel. Later calls on its device read the words, and so does whatever waits
for the device anyway.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ..errors import ArgumentError

CHANGED_WORDS = 65  # on changed arrays: one for each name, and whether there is any
# Places: of these words, and of one word for each array of offsets.
CHANGED, OFFSETS_Q, OFFSETS_K = 0, CHANGED_WORDS, CHANGED_WORDS + 1
OF_OFFSETS = {"offsets_q": OFFSETS_Q, "offsets_k": OFFSETS_K}
_KINDS = {  # bits of a report on offsets; the other bits are the number of an entry
    1: "entry {0} is not 0",
    2: "entry {0} is smaller than the one before it",
    3: "entry {0}, the last one, is not the packed array's length",
    4: "entry {0} ends a sequence that is longer than bias, mask or max_seqlen",
    5: "entry {0} is larger than the packed array's length",
}
KIND_BITS = 3

_lock = threading.Lock()
_reports: dict[int, tuple[memoryview, int, object]] = {}


def _pinned_words(count: int) -> tuple[memoryview, int, object]:
    """Return words of host memory that devices write to, their address, and their owner.

    They are 0.
    """
    import cupy

    held = cupy.cuda.alloc_pinned_memory(8 * count)
    words = np.frombuffer(held, np.uint64, count)
    words[:] = 0
    return words.data, int(held.ptr), held


def address(device: int, word: int) -> int:
    """Return the address of a word to which kernels of the current device write.

    It is there as long as the process.
    """
    found = _reports.get(device)
    if found is None:
        with _lock:
            found = _reports.get(device)
            if found is None:
                found = _reports[device] = _pinned_words(OFFSETS_K + 1)
    return found[1] + 8 * word


def words(device: int) -> memoryview | None:
    """Return the words of a device, or None if no kernel was launched that may write to them."""
    found = _reports.get(device)
    return None if found is None else found[0]


def taken(device: int, word: int) -> int:
    """Return what kernels of a device have left in a word, or 0. It returns each report once."""
    found = _reports.get(device)
    if found is None or not found[0][word]:
        return 0
    report, found[0][word] = found[0][word], 0
    return report


def refuse_offsets(device: int) -> None:
    """Raise an error if kernels of a device found wrong offsets of which nobody was told yet."""
    found = _reports.get(device)
    if found is None or not (found[0][OFFSETS_Q] or found[0][OFFSETS_K]):
        return
    reports: dict[str, Any] = {name: taken(device, word) for name, word in OF_OFFSETS.items()}
    wrong = {name: report for name, report in reports.items() if report}
    if wrong:
        words = [
            f"{name}, of which {_KINDS[report % 2**KIND_BITS].format(report >> KIND_BITS)}"
            for name, report in wrong.items()
        ]
        raise ArgumentError(
            f"{', '.join(wrong)}: an earlier call on this device got {' and '.join(words)}; "
            "expected offsets that run from 0 to the packed array's length and never decrease. "
            "Kernels held them within the arrays, so the results of that call are wrong. "
            "check=True finds the call, as does CUPYFLASH_DEBUG=1."
        )
