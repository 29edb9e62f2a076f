"""Calls that must be recognised: any that is checked and planned again is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from cupyflash import execute


class OtherPathError(Exception):
    pass


@contextlib.contextmanager
def only_again() -> Iterator[None]:
    """Let no call be made otherwise."""

    def other(*args: object, **named: object) -> None:
        raise OtherPathError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "forward", other)
        patch.setattr(execute, "backward", other)
        yield
