"""Calls on codes of float8, as users make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .execute import Request
from .gpu import launch_cache
from .lazy import cached_property
from .problem import coded, validate
from .problem.call import Call
from .problem.options import Options


class CodedRequest(Request):
    """A call on codes of float8; `given` says what they mean, as users pass it."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        given: coded.Given,
        offsets: tuple[Any, Any] | None = None,
        check: Any = True,
    ) -> None:
        super().__init__(q, k, v, options, offsets, check)
        self._given = given.beside(self._q) if self._on_device else given

    @cached_property
    def call(self) -> Call:
        """The validated call."""
        qkv, given = (self._q, self._k, self._v), self._given
        if self._offsets is None:
            return validate.call(*qkv, self._options, given=given)
        return validate.varlen_call(*qkv, *self._offsets, self._check, self._options, given=given)

    def signature(
        self, kind: str, read: Mapping[str, Any], written: Mapping[str, Any]
    ) -> launch_cache.Signature | None:
        """Return what tells the call from others, if it is one that is recognised."""
        given = self._given
        return super().signature(kind + given.kind, {**given.scales, **read}, written)


def request_of(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    given: tuple[Any, ...],
    offsets: tuple[Any, Any] | None = None,
    check: Any = True,
) -> Request:
    """Return the request of a forward; `given` are the fields of `coded.Given`."""
    if all(value is None for value in given):
        return Request(q, k, v, options, offsets, check)
    return CodedRequest(q, k, v, options, coded.Given(*given), offsets, check)
