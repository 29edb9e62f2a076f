"""Masks and scores as words of the command line: `causal & documents(512)`, `softcap(30)`."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import masks, scores
from ..errors import ArgumentError
from ..expr import len_k, len_q
from ..files import shortened
from ..hints.did_you_mean import did_you_mean


def documents(length: Any) -> masks.Mask:
    """Return the mask of documents of one length, counted from the first key."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"documents: got {length!r}; expected an integer of 1 or more.")
    return masks.mask(lambda b, h, i, j: (i + len_k - len_q) // length == j // length)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": masks.causal,
    "window": masks.window,
    "prefix": masks.prefix,
    "lengths": masks.lengths,
    "dilated": masks.dilated,
    "documents": documents,
}


def score_words(heads: int) -> dict[str, Callable[..., Any]]:
    """Return the scores' names for so many heads: ALiBi has a slope for each."""
    alibi = functools.partial(scores.alibi, scores.alibi_slopes(heads))
    return {"softcap": scores.softcap, "alibi": alibi}


_JOINS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def read(text: str, option: str, words: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the mask or score that a text of the command line means.

    Parameters
    ----------
    text : str
        Words with arguments in parentheses, masks joined by ``&``, ``|``, ``^`` and ``~``; or
        ``module:name``, an object of the user's.
    option : str
        The option that has this text, for errors.
    words : mapping of str to callable
        What each word makes.

    Raises
    ------
    ArgumentError
        If the text has no meaning.
    """
    if ":" in text:
        return _imported(text, option)
    wanted = f"expected {', '.join(words)}, with arguments in parentheses, or module:name"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ArgumentError(f"{option}: got {shortened(text)!r}; {wanted}.") from None

    def made(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _JOINS:
            return _JOINS[type(node.op)](made(node.left), made(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~made(node.operand)
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
        if name not in words or any(each.arg is None for each in call.keywords):
            near = did_you_mean(name, words) if name not in words else ""
            raise ArgumentError(f"{option}: got {ast.unparse(node)!r}; {wanted}{near or '.'}")
        try:
            values = [ast.literal_eval(each) for each in call.args]
            named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            return words[name](*values, **named)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{option}: {ast.unparse(node)!r}: {error}") from None

    try:
        return made(tree)
    except RecursionError:
        raise ArgumentError(
            f"{option}: got {shortened(text)!r}, which is nested too deeply; join fewer words, or "
            "name an object of a module as module:name."
        ) from None


def _imported(text: str, option: str) -> Any:
    module, _, name = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # behind the package, of which this folder may be a clone
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"{option}: got {text!r}, which cannot be imported ({error}); expected module:name, "
            "an object in a module that Python can import from this folder."
        ) from None
