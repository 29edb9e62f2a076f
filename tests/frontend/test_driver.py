"""The driver takes the same steps with a call at once, by chunks and over ranks."""

from __future__ import annotations

import re
from unittest import mock

import numpy as np
import pytest
from placement import same_bits

from cupyflash import ArgumentError, ArgumentTypeError, distributed, execute, outputs
from cupyflash.distributed.executor import Distributed, Ranks
from cupyflash.pieces.executor import Streamed
from cupyflash.problem.arguments import ANYWHERE
from cupyflash.request import Request

LENGTH = 24


def over_ranks(*arrays):
    comm = distributed.Threads(1).ranks[0]
    layout = distributed.layout(comm, LENGTH)
    return Distributed(Request(*arrays), Ranks(comm, layout, None, "auto", True, 60.0))


EXECUTORS = {
    "at once": Request,
    "by chunks": lambda *arrays: Streamed(Request(*arrays, ANYWHERE), (7, 5), None),
    "over ranks": over_ranks,
}
every_executor = pytest.mark.parametrize("made", EXECUTORS.values(), ids=EXECUTORS)


def operands():
    rng = np.random.default_rng(3)
    return [rng.standard_normal((1, 2, LENGTH, 8)).astype(np.float32) for _ in "qkv"]


@every_executor
def test_a_call_is_checked_then_allocated_then_computed(made):
    q, k, v = operands()
    request, steps = made(q, k, v), []

    def noted(name, own):
        return lambda *args, **named: steps.append(name) or own(*args, **named)

    with (
        mock.patch.object(outputs, "outputs", noted("outputs", outputs.outputs)),
        mock.patch.object(outputs, "targets", noted("targets", outputs.targets)),
        mock.patch.object(request, "forward", noted("forward", request.forward)),
        mock.patch.object(request, "backward", noted("backward", request.backward)),
    ):
        out, lse, vjp = execute.vjp_of(request, True, False, check=True)
        gradients = vjp(out)
    assert steps == ["outputs", "forward", "targets", "backward"]
    written = np.empty_like(out), np.empty_like(lse)
    again = execute.forward(made(q, k, v), True, *written)
    assert all(x is y for x, y in zip(again, written, strict=True))
    assert same_bits(again[0], out)
    grads_out = tuple(np.empty_like(x) for x in (q, k, v))
    found = execute.backward(made(q, k, v), out, out, lse, None, False, grads_out)
    assert all(x is y for x, y in zip(found[:3], grads_out, strict=True))
    for x, y in zip(found[:3], gradients[:3], strict=True):
        assert same_bits(x, y)


FORWARD = {
    "return_lse": (lambda q: {"return_lse": 1}, "return_lse: got 1; expected True or False"),
    "out": (lambda q: {"out": q[..., :3]}, "out: got shape"),
    "an input as out": (lambda q: {"out": q}, "out and q share memory"),
}
BACKWARD = {
    "deterministic": (lambda q: {"deterministic": "no"}, "deterministic: got 'no'"),
    "bias_gradient": (lambda q: {"bias_gradient": 2}, "bias_gradient: got 2"),
    "grads_out": (lambda q: {"grads_out": (q,)}, "grads_out: got tuple of length 1"),
    "do": (lambda q: {"do": q[..., :3]}, "do: got shape"),
}


@every_executor
@pytest.mark.parametrize("fault", [*FORWARD, *BACKWARD])
def test_nothing_is_computed_after_a_fault(made, fault):
    q, k, v = operands()
    change, words = (FORWARD | BACKWARD)[fault]
    out, lse = execute.forward(made(q, k, v), True, None, None)  # which may be replayed
    rows = {"do": out, "out": out, "lse": lse, "dlse": None}
    rows |= {"deterministic": False, "grads_out": None}
    execute.backward(made(q, k, v), **rows)
    function, given = execute.backward, rows
    if fault in FORWARD:
        function, given = execute.forward, {"return_lse": True, "out": None, "lse_out": None}
    request = made(q, k, v)
    wrong = AssertionError("it was computed")
    with (
        mock.patch.object(request, "forward", side_effect=wrong),
        mock.patch.object(request, "backward", side_effect=wrong),
        pytest.raises(Exception, match=re.escape(words)) as raised,
    ):
        function(request, **given | change(q))
    error = raised.value.__cause__ if request.is_shared else raised.value
    assert isinstance(error, (ArgumentError, ArgumentTypeError))
