"""What ranks tell each other before a call: that they can go on, and that they make one call."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DistributedError
from ..expr.bind import bind
from ..expr.evaluate import host
from ..expr.nodes import Expr, walk
from ..expr.sharded import HeldArray
from ..expr.structure import structure
from ..problem.call import Array, Call
from .partition.layouts import Layout
from .transport.communication import Communicator
from .transport.faults import caused, named

Facts = dict[str, str]
SHOWN = 160  # characters of a fact that differs
MOST_SHOWN = 200  # operations of a mask or a score, as it is written, that ranks tell in words
_IN_WORDS = b"?"  # instead of a digest, where facts may differ, or where an error is told


def agree(
    comm: Communicator, facts: Mapping[str, str], error: Exception | None, timeout: float
) -> list[Facts]:
    """Return the facts of every rank, if none has an error and all have the same facts.

    Facts whose name begins with an underscore may differ.
    """
    differ = error is not None or any(name[0] == "_" for name in facts)
    return agree_on(comm, _IN_WORDS if differ else digest(facts), facts, error, timeout)


def digest(facts: Mapping[str, str]) -> bytes:
    """Return a digest of what has to be the same on every rank."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def agree_on(
    comm: Communicator,
    of_facts: bytes,
    facts: Mapping[str, str],
    error: Exception | None,
    timeout: float,
) -> list[Facts]:
    """Return the facts of every rank, as `agree` does.

    If all ranks have the same digest of their facts, they tell each other no more.
    """
    told_first = comm.tell(of_facts, timeout)
    if of_facts != _IN_WORDS and all(each == of_facts for each in told_first):
        return [dict(facts)] * comm.size
    own = {"error": caused(comm.rank, error) if error else "", "facts": dict(facts)}
    told = [json.loads(text) for text in comm.tell(json.dumps(own).encode(), timeout)]
    errors = [each["error"] for each in told if each["error"]]
    if errors:
        raise DistributedError(
            "\n".join(errors) + "\nNo rank began the call; correct it, and call again."
        ) from error
    of_ranks: list[Facts] = [each["facts"] for each in told]
    differences = _differences(of_ranks)
    if differences:
        raise DistributedError(
            "the ranks do not make the same call:\n"
            + "\n".join(differences)
            + "\nPass the same on every rank. No rank began the call."
        )
    return of_ranks


def _differences(of_ranks: list[Facts]) -> list[str]:
    found = []
    names = dict.fromkeys(name for facts in of_ranks for name in facts if name[0] != "_")
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            values.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            shown = _around_difference(list(values))
            each = [
                f"{x} on {named(ranks)}" for x, ranks in zip(shown, values.values(), strict=True)
            ]
            found.append(f"  {name}: {'; '.join(each)}")
    return found


def _around_difference(texts: list[str]) -> list[str]:
    """Return texts without most of what they have in common before they first differ."""
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))
    begin = max(sum(1 for _ in same) - SHOWN // 2, 0)
    return [_cut(f"...{text[begin:]}" if begin else text) for text in texts]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def facts_of(call: Call, layout: Layout, layout_k: Layout, more: Mapping[str, Any]) -> Facts:
    """Return what has to be the same on every rank, in words; `more` are further options."""
    problem = call.problem
    version = importlib.import_module(__package__.partition(".")[0]).__version__
    facts = {name: str(value) for name, value in more.items()}
    facts |= {
        name: f"{_shape(x)} of {x.dtype}"
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
    }
    facts |= {"layout": _layout(layout), "layout_k": _layout(layout_k)}
    facts |= {name: _content(x) for name, x in call.rows.offsets.items()}
    facts |= {
        "mask": _digest(call.mask.expr, call) if call.mask is not None else "None",
        "score_mod": _digest(call.score_mod.expr, call) if call.score_mod is not None else "None",
        "bias": "None" if call.bias is None else f"{_shape(call.bias)} of {call.bias.dtype}",
        "sink": "None" if call.sink is None else _content(call.sink),
        "scale": repr(problem.scale),
        "dropout": repr(problem.dropout),
        "seed": repr(problem.seed),
        "precision": str(problem.precision),
        "version of cupyflash": str(version),
    }
    return facts


def _shape(x: Array) -> str:
    """Return a shape in which the axis of positions is left out."""
    sizes = [str(size) for size in x.shape]
    if len(sizes) > 1:
        sizes[-2] = "L"
    return f"({', '.join(sizes)})"


def _layout(layout: Layout) -> str:
    runs = [[(run.start, run.stop) for run in of_rank] for of_rank in layout.runs]
    held = _short(hashlib.sha256(repr((runs, layout.chunk)).encode()))
    return f"{layout.kind}, {layout.length} positions on {layout.size} ranks [{held}]"


def _digest(root: Expr, call: Call) -> str:
    """Return a digest of what an expression computes, with the arrays that it reads."""
    made, arrays = structure(root)
    held = [array for array in arrays if isinstance(array, HeldArray)]
    if not held:  # proofs about parts need those of all ranks
        made, arrays = structure(bind(root, call.problem))
    found = hashlib.sha256(repr(made.nodes).encode())
    for array in arrays:
        if isinstance(array, HeldArray):
            found.update(f"{array.shape} {array.dtype} {array.axis}".encode())
        else:
            _update(found, host(array))
    words = f"{len(made.nodes)} operations [{_short(found)}]"
    sizes: dict[Expr, int] = {}
    for node in walk(root):
        sizes[node] = 1 + sum(sizes[arg] for arg in node.args)
    return f"{root}, {words}" if sizes[root] <= MOST_SHOWN else words


def _content(x: Any) -> str:
    found = hashlib.sha256()
    _update(found, host(x))
    return f"{x.shape} of {x.dtype} [{_short(found)}]"


def _update(found: Any, x: Array) -> None:
    found.update(f"{x.shape} {x.dtype}".encode())
    found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


def _short(found: Any) -> str:
    return str(found.hexdigest()[:12])


def bias_facts(bias: Array | None, rows: int | None) -> Facts:
    """Return facts about a bias: whether it has this rank's rows, or is one for all.

    `rows` are those that the rank holds; None if a bias with rows is one for all, too.
    """
    if bias is None:
        return {}
    if rows is not None and bias.ndim > 1 and bias.shape[-2] != 1:
        return {"_bias": "own"}
    how = "either" if bias.ndim > 1 and rows == 1 else "one"
    return {"_bias": how, "_content of bias": _content(bias)}


def bias_is_shared(of_ranks: list[Facts]) -> bool:
    """Return whether the rows of a bias are one for all ranks, whose gradients are added."""
    kinds = [facts.get("_bias", "") for facts in of_ranks]
    if "one" not in kinds:
        return set(kinds) == {"either"}
    if "own" in kinds:
        raise DistributedError(
            f"bias: {named([n for n, x in enumerate(kinds) if x == 'own'])} passed a row for each "
            f"query, and {named([n for n, x in enumerate(kinds) if x == 'one'])} one for all; "
            "expected the same on every rank. No rank began the call."
        )
    contents = [{"bias": facts["_content of bias"]} for facts in of_ranks]
    differences = _differences(contents)
    if differences:
        raise DistributedError(
            "a bias of one row for all queries differs:\n"
            + "\n".join(differences)
            + "\nPass the same on every rank. No rank began the call."
        )
    return True
