"""Pieces of calls that are recognised, without a GPU: what kernels are told."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import masks
from cupyflash.backends.gpu import Gpu
from cupyflash.gpu import launch
from cupyflash.pieces.parts import call_of, part
from cupyflash.pieces.schedule import Piece
from cupyflash.problem import validate
from cupyflash.problem.options import Options

SHAPE, HALF = (1, 2, 256, 64), range(128)
NUMBER = np.float32


@pytest.fixture
def unchecked(monkeypatch):
    """Make every look at shapes an error: what runs now was recognised."""

    def refuse(*_, **__):
        raise AssertionError("the piece was looked at again")

    def forbid():
        for name in ("forward", "backward"):
            monkeypatch.setattr(launch, name, refuse)

    return forbid


def made(cupy, dtype=np.float16, count=3, shape=SHAPE):
    return [cupy.ndarray(shape, dtype) for _ in range(count)]


def piece(q, k, v, keys=HALF, masked=True, **options):
    """Return a piece with the first queries and some keys."""
    mask = masks.causal() if masked else None
    whole = validate.call(q, k, v, Options(mask=mask, **options))
    own = Piece(HALF, keys, masked, True)
    return call_of(whole, own, part(q, HALF), part(k, keys), part(v, keys), None)


def results(cupy, dtype=NUMBER):
    shape = (*SHAPE[:2], len(HALF))
    return cupy.ndarray((*shape, SHAPE[-1]), dtype), cupy.ndarray(shape, NUMBER)


def words(launches):
    return [each.words for each in launches]


@pytest.mark.parametrize(
    "changed",
    [{"keys": range(128, 256)}, {"masked": False}, {"scale": 0.5}, {"dropout": 0.5, "seed": 1}],
    ids=str,
)
def test_what_is_not_alike_is_looked_at(cupy, unchecked, changed):
    arrays = made(cupy)
    Gpu().forward_piece(piece(*arrays), results(cupy), True)
    unchecked()
    with pytest.raises(AssertionError, match="looked at again"):
        Gpu().forward_piece(piece(*arrays, **changed), results(cupy), True)


def test_keys_join_and_the_last_ones_write_the_results(cupy, unchecked):
    arrays, partial, rounded = made(cupy), results(cupy), results(cupy, np.float16)
    held = [partial, rounded]
    for again in range(2):
        Gpu().forward_piece(piece(*arrays), partial, False)
        Gpu().forward_piece(piece(*arrays), partial, False, rounded)
        if not again:
            unchecked()
            partial, rounded = results(cupy), results(cupy, np.float16)
            held += [partial, rounded]
    assert len(cupy.launches) == 4
    assert all("_resumes__" in each.kernel for each in cupy.launches)
    told = words(cupy.launches)
    for n, (own, results_of) in enumerate(zip(held[::2], held[1::2], strict=True)):
        in_place, last = ([int(word) for word in each] for each in told[2 * n : 2 * n + 2])
        assert [in_place.count(x.data.ptr) for x in own] == [2, 2]  # read, and written
        assert [last.count(x.data.ptr) for x in own] == [1, 1]
        assert [in_place.count(x.data.ptr) for x in results_of] == [0, 0]
        assert [last.count(x.data.ptr) for x in results_of] == [2, 1]  # a tensor map has out, too
