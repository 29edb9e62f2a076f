"""What the commands do when nobody reads their output, or it cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from .text import complain

NOBODY_READS = 128 + 13  # what a shell says of a program that SIGPIPE ended


class OutputError(Exception):
    """A standard stream could not be written. It is no OSError, which commands expect of files."""


class Stream:
    """A standard stream whose failures are `OutputError`.

    Parameters
    ----------
    stream : Any
        The stream, to which everything else is left.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, with an escape for what the stream's encoding does not have."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        return int(_reported(self._stream.write, text) or 0)

    def flush(self) -> None:
        """Write what is waiting."""
        _reported(self._stream.flush)


def _reported(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except OSError as error:
        raise OutputError from error


def watched(command: Callable[[], int]) -> int:
    """Run a command, and return its exit status.

    If nobody reads its output any more, it ends in silence with `NOBODY_READS`. If its output
    cannot be written otherwise, to a full disk for instance, one sentence says so, and it is 1.
    """
    own = sys.stdout, sys.stderr
    if own[0] is None or own[1] is None:  # closed by who started the program
        return command()
    out, err = Stream(own[0]), Stream(own[1])
    sys.stdout, sys.stderr = out, err
    try:
        try:
            return command()
        finally:
            out.flush()
            err.flush()
    except OutputError as failure:
        for stream in own:
            _leave(stream)
        cause = failure.__cause__
        if getattr(cause, "errno", None) == errno.EPIPE:
            return NOBODY_READS
        sys.stderr = own[1]
        complain(f"the output cannot be written ({getattr(cause, 'strerror', None) or cause}).")
        return 1
    finally:
        sys.stdout, sys.stderr = own


def _leave(stream: Any) -> None:
    """Let nothing that still waits in a stream be written when Python ends, which would fail."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
