"""What comes from libraries whose arrays mean more than their numbers, or hold them elsewhere."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, scores, streamed

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8)).astype(np.float32)
OUT = cupyflash.attention(Q, K, V)


class Series:
    """A column as pandas and xarray have it: it has a dtype, and NumPy can convert it."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.dtype, self.shape = self._values.dtype, self._values.shape

    def __array__(self, dtype=None, copy=None):
        return self._values

    def min(self):
        return self._values.min()


class Quantity(np.ndarray):
    """Numbers with a unit, as Astropy and unyt have them."""

    unit = "m"

    @property
    def value(self):
        return self.view(np.ndarray)


class Wrapped:
    """Numbers with a unit around an array, as Pint has them."""

    units = "m"

    def __init__(self, magnitude):
        self.magnitude = magnitude

    def __getattr__(self, name):
        return getattr(self.magnitude, name)


class Sparse:
    """A matrix of SciPy, of which np.asarray makes an array of one object."""

    dtype, shape = np.dtype(bool), (5, 5)

    def toarray(self):
        return np.ones((5, 5), bool)


class Dataset(Series):
    """An array in a file."""

    def __getitem__(self, index):
        return self._values[index]


Dataset.__module__ = "h5py._hl.dataset"

COLUMNS = {  # an argument of integers or floats: its values, and a call that takes it
    "lengths: k_lengths": (np.array([3, 4]), lambda x: masks.lengths(x)),
    "lengths: q_lengths": (np.array([3, 4]), lambda x: masks.lengths(5, x)),
    "causal: offset": (np.array([3, 4]), lambda x: masks.causal(x)),
    "segments: q_ids": (np.zeros(5, int), lambda x: masks.segments(x)),
    "lengths": (np.array([3, 4]), lambda x: cupyflash.attention_cached(Q, K, V, x)),
    "offsets_q": (np.array([0, 5]), lambda x: cupyflash.attention_varlen(Q[0], K[0], V[0], x, x)),
    "sink": (np.zeros(4, np.float32), lambda x: cupyflash.attention(Q, K, V, sink=x)),
    "alibi: slopes": (np.zeros(4, np.float32), lambda x: scores.alibi(x)),
    "lookup": (np.arange(4), lambda x: cupyflash.lookup(x)),
    "mask": (np.ones((5, 5), bool), lambda x: cupyflash.attention(Q, K, V, mask=x)),
    "bias": (np.ones((5, 5), np.float32), lambda x: cupyflash.attention(Q, K, V, bias=x)),
    "q": (Q, lambda x: cupyflash.attention(x, K, V)),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_refused_with_a_remedy(name):
    values, call = COLUMNS[name]
    with pytest.raises(ArgumentTypeError, match=f"^{name}: got Series; .* np.asarray.$"):
        call(Series(values))
    call(np.asarray(Series(values)))


@pytest.mark.parametrize("kind", [lambda x: x.view(Quantity), Wrapped])
@pytest.mark.parametrize("name", COLUMNS)
def test_numbers_with_a_unit_are_refused(name, kind):
    values, call = COLUMNS[name]
    quantity = kind(values)
    with pytest.raises(ArgumentTypeError, match=f"^{name}: got {type(quantity).__name__}, .*unit"):
        call(quantity)
    call(quantity.magnitude if kind is Wrapped else quantity.value)


def test_a_result_has_no_unit():
    with pytest.raises(ArgumentTypeError, match=r"^out: got Quantity, .*unit"):
        cupyflash.attention(Q, K, V, out=OUT.copy().view(Quantity))


def test_a_sparse_mask_becomes_an_array():
    with pytest.raises(ArgumentTypeError, match=re.escape("got Sparse; expected")) as raised:
        cupyflash.attention(Q, K, V, mask=Sparse())
    assert str(raised.value).endswith("Convert it with .toarray().")
    assert (cupyflash.attention(Q, K, V, mask=Sparse().toarray()) == OUT).all()


@pytest.mark.parametrize("call", [cupyflash.attention, streamed.attention])
def test_an_array_in_a_file_is_copied_into_one_that_numpy_maps(call, tmp_path, monkeypatch):
    x = Dataset(Q)
    with pytest.raises(ArgumentTypeError) as raised:
        call(x, K, V)
    assignment = re.search(r"y = (np\.lib.*x\.shape\))", str(raised.value))[1]
    monkeypatch.chdir(tmp_path)
    y = eval(assignment)  # the remedy, literally
    for n in range(len(y)):
        y[n] = x[n]
    assert (call(y, K, V) == OUT).all()
    assert (call(np.asarray(x), K, V) == OUT).all()


@pytest.mark.parametrize("name", ["q", "bias", "mask"])
def test_more_axes_than_numpy_broadcasts(name):
    bias = np.zeros((1,) * 40 + (4, 5, 5), np.float32)
    arrays = {"q": Q.reshape((1,) * 40 + Q.shape), "bias": bias, "mask": bias == 0}
    message = rf"^{name}: got 4. axes; expected at most 32. Join leading axes: "
    with pytest.raises(ArgumentError, match=message) as raised:
        cupyflash.attention(**{"q": Q, "k": K, "v": V, name: arrays[name]})
    remedy = str(raised.value).partition("axes: ")[2].rstrip(".")
    joined = eval(remedy, {"x": arrays[name]})
    got = cupyflash.attention(**{"q": Q, "k": K, "v": V, name: joined})
    assert (got.reshape(OUT.shape) == OUT).all() if name != "q" else got.shape == OUT.shape


def test_32_axes_are_taken():
    many = [x.reshape((1,) * 28 + x.shape) for x in (Q, K, V)]
    assert (cupyflash.attention(*many) == OUT).all()
    out, vjp = cupyflash.attention_vjp(*many)
    assert vjp(out).dq.shape == many[0].shape


def test_booleans_are_no_bias():
    keep = np.tri(5, dtype=bool)
    with pytest.raises(ArgumentTypeError, match=r"^bias: got dtype bool; .* Pass it as mask="):
        cupyflash.attention(Q, K, V, bias=keep)
    out = cupyflash.attention(Q, K, V, mask=keep)
    assert (out == cupyflash.attention(Q, K, V, mask=masks.causal())).all()


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5)])
def test_a_mask_of_the_keys_of_each_entry(shape):
    keep = (np.arange(5) < [[3], [4]]).reshape(shape)
    with pytest.raises(ArgumentError, match="For the keys of each batch entry, pass ") as raised:
        cupyflash.attention(Q, K, V, mask=keep)
    remedy = str(raised.value).rpartition("pass ")[2].rstrip(".")
    out = cupyflash.attention(Q, K, V, mask=eval(remedy, {"keep": keep}))
    assert (out == cupyflash.attention(Q, K, V, mask=masks.lengths([3, 4]))).all()


@pytest.mark.parametrize("v", [np.ones((7, 8), np.float32), np.ones((3, 5, 8), np.float32)])
def test_shapes_are_shown_as_they_came(v):
    with pytest.raises(
        ArgumentError, match=re.escape(f"v: got shape {v.shape} with k of shape (5, 8)")
    ):
        cupyflash.attention(Q[0, 0], K[0, 0], v)


def test_numpy_in_the_place_of_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", np)  # as programs do that have no GPU
    assert (cupyflash.attention(Q, K, V) == OUT).all()
