"""The package on codes: queries, keys and values of float8, and what codes mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import api, quantization
from ..problem import coded, codes, formats
from ..problem.formats import FORMATS, Format
from ..testing.options import float_type
from .cases import Case
from .contenders import Array, Contender, Inputs, Job, RefusalError, options_of
from .measure import Gpu, Meter, Work

FLOAT8 = "float8_e4m3fn"
# Weights may be rounded to codes, by at most half of the spacing of e4m3.
TOLERANCE = 2.0**-4


def needs_codes(case: Case) -> None:
    """Refuse a case for whose dtype there are no codes."""
    if case.dtype not in codes.QUERIES:
        raise RefusalError(f"codes have no {case.dtype}; there is {', '.join(codes.QUERIES)}")


def numbers_of(x: Array, scale: Array, form: Format, dtype: str, xp: Any) -> Array:
    """Return scale * code, rounded to a dtype."""
    numbers = formats.numbers(x, form, xp)
    grouped = numbers.reshape(*scale.shape, -1)
    grouped *= scale[..., None]
    return numbers.astype(float_type(dtype))


class CupyflashFloat8(Contender):
    """The package on codes of float8 instead of numbers, with a scale for each row."""

    name = "cupyflash-fp8"
    what = f"this package on queries, keys and values of {FLOAT8}: attention"

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready."""
        if case.backward:
            raise RefusalError("codes have no gradients; keep numbers of 16 bits for them")
        needs_codes(case)
        xp, options, form = meter.xp, options_of(case, meter.xp), FORMATS[FLOAT8]
        made = [quantization.quantize(x, FLOAT8) for x in inputs[:3]]
        raw = [x.view(np.uint8) for x, _ in made]
        q_scale, k_scale, v_scale = (scale for _, scale in made)
        given = coded.Fp8(q_scale, k_scale, v_scale, FLOAT8, float_type(case.dtype))
        attend: Callable[..., Array] = api.attention

        def forward(**places: Any) -> Array:
            return attend(*raw, **vars(given), **options, **places)

        out = forward()

        def graph() -> tuple[Work, Any]:
            """Replay the same with a place for the result, which is emptied before."""
            assert isinstance(meter, Gpu)
            work = meter.captured(lambda: forward(out=out))
            out.fill(0)
            return work, out

        def expected() -> list[Array]:
            numbers = (numbers_of(x, scale, form, case.dtype, xp) for x, scale in made)
            return [attend(*numbers, **options)]

        return Job(
            forward, forward, lambda x: [x], meter.peak_memory,
            capture=graph if isinstance(meter, Gpu) else None,
            expected=expected, tolerance=TOLERANCE,
        )  # fmt: skip
