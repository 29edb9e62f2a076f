"""Launches of packed sequences that are short on average, as far as the device alone knows.

A launch lists the sequences that are not short. Later ones are for short sequences, or for what is
listed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.call import Call
from .kernels import registry, short_packed
from .kernels.registry import Choice
from .kernels.short_packed import SHORT_ROWS
from .kernels.spec import Extent, Request
from .workspace import ArraySpec
from .writer import Writer

_HEAD, _EACH = 6, 3  # words of a list, and of each sequence: the twin of common/long_sequences.cuh
LIST = "workspace"  # the name of its address


def list_others(writer: Writer, part: str) -> Choice | None:
    """List sequences that are not short, if these pay; return the kernel for short ones.

    Kernels that are added afterwards are for what is listed.
    """
    choice = registry.of_short(part, writer.request)
    if choice is not None:
        writer.scratch[LIST] = _list_of(writer.call)
        writer.named.append(LIST)
        writer.add("long", Extent(1, 0, 1))
        writer.listed = True
    return choice


def add(
    writer: Writer, choice: Choice, own: tuple[int, ...], fields: dict[str, Any], **how: Any
) -> None:
    """Add a kernel for short sequences; its result has leading axes of the lengths `own`."""
    part, batch = choice.spec.part, writer.call.problem.batch
    extent = writer.extent(own, of_keys=part == "dkdv")._replace(
        queries=SHORT_ROWS * batch, keys=SHORT_ROWS * batch, longest=(SHORT_ROWS, SHORT_ROWS)
    )
    fields = {**fields, "len_q": SHORT_ROWS, "len_k": SHORT_ROWS}
    after = f"; it is for sequences of at most {SHORT_ROWS} queries and keys"
    writer.add(part, extent, fields, choice=choice, short=True, after=after, **how)


def most_scratch(call: Call, target: Any) -> dict[str, ArraySpec]:
    """Return the list of a backward."""
    are_short = short_packed.are_short(Request(call.problem, target, call))
    return {LIST: _list_of(call)} if are_short else {}


def _list_of(call: Call) -> ArraySpec:
    return ArraySpec((_HEAD + _EACH * call.problem.batch,), np.dtype(np.int32))
