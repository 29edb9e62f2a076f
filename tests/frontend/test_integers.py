"""Every integer may be one of any library: what the same number of Python gives, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import distributed, masks, scores
from cupyflash.arrays.integers import integer


def of_torch(number):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    return torch.tensor(number)


class Index:
    """Anything that says which integer it is."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


KINDS = {
    "NumPy's": np.int64,
    "an unsigned one": np.uint8,
    "an array without axes": np.array,
    "a tensor": of_torch,
    "an index": Index,
}
X = np.random.default_rng(0).standard_normal((1, 2, 6, 8), dtype=np.float32)


def array(mask):
    return mask.to_array(1, 1, 8, 8)


TAKERS = {
    "window": lambda n: array(masks.window(n, n)),
    "window: offset": lambda n: array(masks.window(2, 0, offset=n)),
    "causal: offset": lambda n: array(masks.causal(n)),
    "lengths": lambda n: array(masks.lengths(n, n)),
    "prefix": lambda n: array(masks.prefix(n)),
    "dilated": lambda n: array(masks.dilated(n)),
    "blocks": lambda n: array(masks.blocks(np.eye(3, dtype=bool), n, n)),
    "a number in a mask": lambda n: array(masks.mask(lambda b, h, i, j: i - n < j)),
    "alibi_slopes": scores.alibi_slopes,
    "seed": lambda n: cupyflash.attention(X, X, X, dropout=0.5, seed=n),
    "lengths of a cache": lambda n: cupyflash.attention_cached(X, X, X, n),
    "shared": lambda n: cupyflash.attention_cached(X[:, :, :1], X, X, 6, shared=n),
    "append": lambda n: cupyflash.append(X[:, :, :2], X[:, :, :2], X.copy(), X.copy(), n),
    "chunk": lambda n: cupyflash.streamed.attention(X, X, X, chunk=n),
    "chunk of two": lambda n: cupyflash.streamed.attention(X, X, X, chunk=(n, 2)),
    "ranks": lambda n: len(distributed.Threads(n, 1).ranks),
    "explain": lambda n: str(cupyflash.explain((1, 2, n, 8))),
    "group": lambda n: cupyflash.quantize(X[..., :3], "int8", group=n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TAKERS)
def test_an_integer_of_any_kind_is_that_number(name, kind):
    wanted, found = TAKERS[name](3), TAKERS[name](KINDS[kind](3))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (wanted, found)), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("value", [3.0, np.float32(3), True, np.True_, "3", None, [3], np.ones(1)])
def test_what_is_no_integer(value):
    assert integer(value) is None
    with pytest.raises((cupyflash.ArgumentError, cupyflash.ArgumentTypeError), match="step is"):
        masks.dilated(value)


def test_booleans_of_other_libraries_are_no_integers():
    assert integer(of_torch(True)) is None
    assert integer(np.array(True)) is None
    assert integer(of_torch([3])) is None
    assert integer(of_torch(3.0)) is None
