"""`verify` on a GPU: the package's kernels hold every property on CuPy arrays."""

from __future__ import annotations

import functools

import pytest

import cupyflash
from cupyflash import testing
from cupyflash.commands.verify import TILES, float8_of, precision_of

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", testing.PROPERTIES)
def test_property(name):
    # Else blocks add to dq in any order, and bits are not promised.
    backward, varlen_backward = (
        functools.partial(function, deterministic=True)
        for function in (cupyflash.attention_backward, cupyflash.attention_varlen_backward)
    )
    report = testing.verify(
        cupyflash.attention, backward, device="gpu", only=name, examples=3,
        varlen=cupyflash.attention_varlen, combine=cupyflash.combine, tiles=TILES["gpu"],
        varlen_backward=varlen_backward, precision=precision_of("gpu"),
        float8=float8_of("gpu"),
        cached=cupyflash.attention_cached, append=cupyflash.append, rope=cupyflash.rope,
        jvp=cupyflash.attention_jvp, varlen_jvp=cupyflash.attention_varlen_jvp,
        backward_jvp=cupyflash.attention_backward_jvp,
    )  # fmt: skip
    assert report.passed, str(report)
