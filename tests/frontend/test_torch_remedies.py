"""The code that errors about PyTorch tensors tell users to write works as it is written."""

from __future__ import annotations

import re

import pytest

import cupyflash

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

import cupyflash.torch as flash  # noqa: E402
from cupyflash.torch import attention, scaled_dot_product_attention  # noqa: E402

X = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8)
INTEGERS, DOUBLE = X.to(torch.int32), X.to(torch.float64)
LEAF = X.clone().requires_grad_()
FOUR = torch.cat([X, X], 1)


def over_cache(q):
    cache = torch.zeros(1, 8, 4, 8)
    return flash.flash_attn_with_kvcache(q.swapaxes(1, 2), cache[:, :, :2], cache[:, :, 2:])


SEEN = torch.ones(4, 4, dtype=torch.bool)

CASES = {
    "dtype": (
        lambda: attention(INTEGERS, X, X),
        r"\.to\(dtype\)",
        lambda code: attention(eval("x" + code, {"x": INTEGERS, "dtype": X.dtype}), X, X),
    ),
    "dtypes": (
        lambda: attention(X, DOUBLE, DOUBLE),
        r"\.to\(.*\)",
        lambda code: attention(X, *[eval("x" + code, {"x": DOUBLE, "torch": torch})] * 2),
    ),
    "additive mask": (
        lambda: attention(X, X, X, mask=torch.zeros(4, 4)),
        r"bias=",
        lambda code: attention(X, X, X, **{code[:-1]: torch.zeros(4, 4)}),
    ),
    "causal with a mask": (
        lambda: scaled_dot_product_attention(X, X, X, attn_mask=SEEN, is_causal=True),
        r"attn_mask & torch\.ones.*tril\(\)",
        lambda code: scaled_dot_product_attention(
            X, X, X, attn_mask=eval(code, {"attn_mask": SEEN, "torch": torch, "L": 4, "S": 4})
        ),
    ),
    "grouped heads": (
        lambda: scaled_dot_product_attention(FOUR, X, X),
        r"enable_gqa=True",
        lambda code: scaled_dot_product_attention(FOUR, X, X, **eval(f"dict({code})")),
    ),
    "no tensor": (
        lambda: attention([[1.0]], X, X),
        r"torch\.as_tensor",
        lambda code: attention(eval(code, {"torch": torch})([[1.0] * 8]), X[0, 0], X[0, 0]),
    ),
    "gradient over a cache": (
        lambda: over_cache(LEAF),
        r"\.detach\(\)",
        lambda code: over_cache(eval("x" + code, {"x": LEAF})),
    ),
    "gradient": (
        lambda: cupyflash.attention(LEAF, X, X),
        r"\.detach\(\)",
        lambda code: cupyflash.attention(eval("x" + code, {"x": LEAF}), X, X),
    ),
    "core dtype": (
        lambda: cupyflash.attention(INTEGERS, X, X),
        r"\.to\(\.\.\.\)",
        lambda code: cupyflash.attention(
            eval("x" + code.replace("...", "dtype"), {"x": INTEGERS, "dtype": X.dtype}), X, X
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_remedy_of_an_error_works_as_it_is_written(case):
    fails, words, remedy = CASES[case]
    with pytest.raises((cupyflash.ArgumentError, cupyflash.ArgumentTypeError)) as failure:
        fails()
    code = re.search(words, str(failure.value))
    assert code, f"the message does not say {words}: {failure.value}"
    remedy(code[0])
