"""Properties of calls: where results are written, how arrays are laid out, and calling twice.

Every call of every property checks that inputs do not change and that nothing is read or written
outside arrays: all arrays are between guards of NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.problem.call import Gradients

from ..cases import Problem
from ..copies import Copies
from ..judge import expect
from ..placement import Layout, Placed, random_layout, same_bits
from ..subject import Subject, out_shape
from .base import a_property

NAMES = ("dq", "dk", "dv", "dbias", "dsink")


def _straight(x: Any) -> Any:
    return np.array(x, order="C") if isinstance(x, np.ndarray) else x


@a_property("repeatable", draws="any")
def twice_is_the_same(s: Subject, p: Problem) -> None:
    """The same call twice gives the same bits, forward and backward, whatever the options."""
    one, two = s.attend_problem(p), s.attend_problem(p)
    for name, a, b in zip(("out", "lse"), one, two, strict=True):
        expect(a is b is None or same_bits(a, b), f"{name} differs from run to run")
    if "backward" in s.knows:
        first, second = s.gradients_problem(p, one), s.gradients_problem(p, one)
        for name, a, b in zip(NAMES, first, second, strict=True):
            expect(a is b is None or same_bits(a, b), f"{name} differs from run to run")


@a_property("strides", draws="any", weight=2)
def strides_do_not_matter(s: Subject, p: Problem) -> None:
    """Views of any strides, order and alignment give bitwise what contiguous copies give."""
    arrays, options = (p.q, p.k, p.v), p.options
    straight = [_straight(x) for x in arrays]
    plain = {name: x if name == "mask" else _straight(x) for name, x in options.items()}
    a, b = s.attend(*arrays, **options), s.attend(*straight, **plain)
    s.same_rows(a, b, lambda: s.bound(*straight, **plain))
    if "backward" in s.knows:
        ours = s.gradients(p.do, *arrays, rows=a, dlse=p.dlse, **options)
        given = (_straight(p.do), *straight)
        theirs = s.gradients(*given, rows=a, dlse=_straight(p.dlse), **plain)
        row_gradient = _straight(p.dlse)
        s.same_gradients(ours, theirs, lambda: s.backward_bound(*given, dlse=row_gradient, **plain))


@a_property("out lse", draws="any")
def given_outputs_are_written(s: Subject, p: Problem) -> None:
    """out=, lse_out= and grads_out=, of any strides: written whole, returned, nothing outside them.

    Their memory starts as NaN; the bits are those of fresh outputs.
    """
    fresh, copies = s.attend_problem(p), Copies(s.memory)

    def target(shape: Any, dtype: Any) -> Any:
        strided = "strides" in s.features
        layout = random_layout(p.rng, len(shape), np.dtype(dtype).itemsize) if strided else Layout()
        return Placed(shape, dtype, layout).view

    shape = out_shape(p.q, p.k, p.v)
    out, lse = target(shape, p.dtype), target(shape[:-1], fresh.lse.dtype)
    arrays = [copies.array(x) for x in (p.q, p.k, p.v)]
    options = copies.options(p.options)
    given = copies.array(out, True), copies.array(lse, True)
    returned = s.call(*arrays, **options, return_lse=True, out=given[0], lse_out=given[1])
    expect(returned[0] is given[0] and returned[1] is given[1], "other arrays were returned")
    copies.check()
    expect(same_bits(copies.value(out), fresh.out), "out= holds other bits than a fresh output")
    expect(same_bits(copies.value(lse), fresh.lse), "lse_out= holds other bits than a fresh one")
    if "backward" not in s.knows:
        return
    expected = s.gradients_problem(p, fresh)
    owners = (p.q, p.k, p.v, p.options.get("bias"), p.options.get("sink"))
    made = [None if x is None else target(x.shape, x.dtype) for x in owners]
    copies = Copies(s.memory)
    rows = [copies.array(x) for x in (p.do, p.q, p.k, p.v, *fresh)]
    options = copies.options(p.options)
    options["dlse"] = copies.array(p.dlse)
    options["grads_out"] = Gradients(*(copies.array(x, True) for x in made))
    s.call_backward(*rows, **options)
    copies.check()
    for name, x, y in zip(NAMES, made, expected, strict=True):
        if x is not None:
            expect(same_bits(copies.value(x), y), f"grads_out: {name} holds other bits")
