"""The package over a cache: in pages, or as codes of 8 or 4 bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import api, cached, quantization
from ..problem.codes import types_said
from ..problem.formats import FORMATS, INT4_GROUP
from .cases import Case
from .codes import needs_codes, numbers_of
from .contenders import Array, Contender, Inputs, Job, RefusalError, options_of
from .measure import Gpu, Meter, Work


class Laid(NamedTuple):
    """A cache as a contender keeps it: keys and values, keywords, and what is told of it."""

    k: Array
    v: Array
    keywords: dict[str, Any]
    expected: Callable[[], Sequence[Array]] | None = None
    key_bytes: int | None = None


class OverCache(Contender):
    """Calls of attention_cached, whose cache is made by `laid`."""

    @abstractmethod
    def laid(self, meter: Meter, case: Case, inputs: Inputs) -> Laid:
        """Return the cache."""

    def prepare(self, meter: Meter, case: Case, inputs: Inputs) -> Job:
        """Make a case ready."""
        if case.backward:
            raise RefusalError("attention over a cache has no backward")
        if case.variant == "documents":
            raise RefusalError(
                "its documents are arrays of the keys' length; a cache has more room"
            )
        xp, options = meter.xp, options_of(case, meter.xp)
        made = self.laid(meter, case, inputs)
        arrays = inputs.q, made.k, made.v
        lengths = xp.full(case.batch, case.len_k, np.int32)

        def forward(**places: Any) -> Array:
            given = made.keywords | places | options
            attend: Callable[..., Array] = cached.attention_cached
            return attend(*arrays, lengths, **given)

        out = forward()

        def graph() -> tuple[Work, Any]:
            """Replay the same with a place for everything, which is emptied before."""
            assert isinstance(meter, Gpu)
            size: Callable[..., int] = cached.workspace_size_cached
            workspace = xp.empty(size(*arrays, **made.keywords), np.uint8)
            work = meter.captured(lambda: forward(out=out, workspace=workspace))
            out.fill(0)
            return work, out

        return Job(
            forward, forward, lambda x: [x], meter.peak_memory,
            capture=graph if isinstance(meter, Gpu) else None,
            expected=made.expected, key_bytes=made.key_bytes,
        )  # fmt: skip


class CupyflashPages(OverCache):
    """The package over a cache in pages, which lie in a random order."""

    def __init__(self, name: str, page: int) -> None:
        self.name, self.page = name, page
        self.what = f"this package over a cache in pages of {page}: attention_cached"

    def laid(self, meter: Meter, case: Case, inputs: Inputs) -> Laid:
        """Return the pages."""
        each = -(-case.len_k // self.page)
        order = np.random.default_rng(0).permutation(case.batch * each)
        table = meter.xp.asarray(order.reshape(case.batch, each).astype(np.int32))
        where = meter.xp.asarray(order)
        k, v = (self._in_pages(meter.xp, x, where) for x in (inputs.k, inputs.v))
        return Laid(k, v, {"table": table})

    def _in_pages(self, xp: Any, x: Array, order: Array) -> Array:
        batch, heads, length, columns = x.shape
        each = -(-length // self.page)
        whole = xp.zeros((batch, heads, each * self.page, columns), x.dtype)
        whole[:, :, :length] = x
        split = whole.reshape(batch, heads, each, self.page, columns).swapaxes(1, 2)
        pages = xp.empty((batch * each, heads, self.page, columns), x.dtype)
        pages[order] = split.reshape(pages.shape)
        return pages


class CupyflashCodes(OverCache):
    """The package over a cache of codes, with a scale for each row, or each 32 columns of int4.

    `kv_dtype` is the type of keys and of values, or there are two.
    """

    def __init__(self, name: str, kv_dtype: str | tuple[str, str]) -> None:
        k, v = types_said(kv_dtype)
        self.name, self.forms = name, (FORMATS[k], FORMATS[v])
        held = kv_dtype if isinstance(kv_dtype, str) else f"keys of {k} and values of {v}"
        self.what = f"this package over a cache of {held}: attention_cached"

    def laid(self, meter: Meter, case: Case, inputs: Inputs) -> Laid:
        """Return the codes."""
        needs_codes(case)
        forms = self.forms
        if any(case.d % form.packed for form in forms):
            raise RefusalError(f"two codes share a byte, and {case.d} columns are an odd number")
        made = []
        for x, form in zip((inputs.k, inputs.v), forms, strict=True):
            group = INT4_GROUP if form.packed > 1 and case.d % INT4_GROUP == 0 else case.d
            made.append(quantization.quantize(x, form.name, group=group))
        k, v = (x.view(np.uint8) for x, _ in made)
        scales = [scale for _, scale in made]
        names = tuple(form.name for form in forms)
        keywords = {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": names}

        def expected() -> list[Array]:
            pairs = zip(made, forms, strict=True)
            numbers = (
                numbers_of(x, scale, form, case.dtype, meter.xp) for (x, scale), form in pairs
            )
            return [api.attention(inputs.q, *numbers, **options_of(case, meter.xp))]

        return Laid(k, v, keywords, expected, sum(x.nbytes for x in (k, v, *scales)))
