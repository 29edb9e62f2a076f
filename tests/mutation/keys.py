"""A key for each mutant that outlives renames, moved lines and moved files.

The baseline of survivors (tests/data/mutation_baseline.txt) must not cost anything when a kernel is
edited elsewhere. So a mutant is known by what its code looks like, not by where it stands:

- Its context is the statement that it changes, the two statements before and the two after.
  A statement ends at a semicolon, or at a brace; how lines are broken, comments and blank lines do
  not count. In Python a statement is a logical line, or one entry of a dictionary.
- Every identifier of the context is replaced by the number of its first appearance there. Words of
  C++, of CUDA and of Python, literals and operators stay. C++ inside of a Python string is read in
  the same way.
- The key is a hash of the operator, the context with the changed span marked, and what takes the
  span's place. The file's name and the line are not part of it.

The price is on both sides. An edit of a neighbouring statement gives a new key, so that the mutant
is judged once more; a wider context would make that more frequent. Two mutants whose contexts look
alike but for names share a key, so that the baseline excuses both; a narrower context would make
that more frequent. Names that a mutant brings into a context where they do not stand yet are all
alike, too: `k -> q` and `k -> v` share a key where neither q nor v stands nearby.
"""

from __future__ import annotations

import hashlib
import keyword
import tokenize
from bisect import bisect_right
from typing import NamedTuple

from . import generators, operators
from .operators import Mutant

NEIGHBOURS = 2  # statements before, and as many after

_WORDS_OF_CPP = """
    alignas alignof asm auto bool break case char class const constexpr const_cast continue decltype
    default delete do double dynamic_cast else enum explicit extern false float for friend goto if
    inline int long mutable namespace new noexcept nullptr operator private protected public
    register reinterpret_cast return short signed sizeof static static_assert static_cast struct
    switch template this throw true try typedef typeid typename union unsigned using virtual void
    volatile while
    threadIdx blockIdx gridDim blockDim fma fmaf fmax fmin fabs floor exp exp2 log tanh erf sqrt
    sin cos pow atomicAdd
"""
_FIXED = {*_WORDS_OF_CPP.split(), *keyword.kwlist}
_CLOSES = {")": "(", "]": "[", "}": "{"}


class Part(NamedTuple):
    """A token: its text, whether it is an identifier, and where it begins."""

    text: str
    is_name: bool
    start: int


def key_of(mutant: Mutant, text: str) -> str:
    """Return the key of a mutant of a text: 12 hexadecimal digits."""
    return Keys(mutant.file, text)(mutant)


class Keys:
    """The keys of one file's mutants.

    Parameters
    ----------
    file : str
        Its name, which says only whether it is Python.
    text : str
        What stands in it.
    """

    def __init__(self, file: str, text: str) -> None:
        self._python = file.endswith(".py")
        self._parts, ends = _python_parts(text) if self._python else _cuda_parts(text)
        self._starts = [part.start for part in self._parts]
        self._first: list[int] = []  # the first part of each statement
        begin = 0
        for end in ends:
            # A bracket alone says nothing about what is near.
            if any(part.text not in "{};," for part in self._parts[begin:end]):
                self._first.append(begin)
            begin = end

    def __call__(self, mutant: Mutant) -> str:
        """Return the key of a mutant: 12 hexadecimal digits."""
        first, last = self._part_at(mutant.start), self._part_at(mutant.end - 1)
        n, m = (bisect_right(self._first, part) - 1 for part in (first, last))
        begin = self._first[max(n - NEIGHBOURS, 0)]
        behind = m + NEIGHBOURS + 1
        end = self._first[behind] if behind < len(self._first) else len(self._parts)
        numbers: dict[str, int] = {}

        def normal(part: Part) -> str:
            if not part.is_name:
                return part.text
            return f"#{numbers.setdefault(part.text, len(numbers))}"

        context = [normal(part) for part in self._parts[begin:end]]
        after = [normal(part) for part in _lexed(mutant.after, 0)]
        span = (
            first - begin, mutant.start - self._starts[first],
            last - begin, mutant.end - self._starts[last] - len(self._parts[last].text),
        )  # fmt: skip
        whole = "\0".join([mutant.operator, str(span), *context, "->", *after])
        return hashlib.blake2b(whole.encode(), digest_size=6).hexdigest()

    def _part_at(self, place: int) -> int:
        return max(bisect_right(self._starts, place) - 1, 0)


def _part(text: str, start: int) -> Part:
    is_name = (text[0].isalpha() or text[0] == "_") and text not in _FIXED
    return Part(text, is_name and not text.startswith("__"), start)


def _lexed(text: str, start: int) -> list[Part]:
    """Return the tokens of C++ that stands in a string, or takes a mutant's place."""
    return [
        _part(match[0], start + match.start())
        for match in operators._TOKEN.finditer(text)
        if match.lastgroup not in (None, "skip")
    ]


def _cuda_parts(text: str) -> tuple[list[Part], list[int]]:
    """Return the tokens, and behind which of them statements end."""
    parts, ends = [], []
    opened: list[str] = []
    for token in operators.tokens(text):
        parts.append(_part(token.text, token.start))
        if token.text in "([{":
            opened.append(token.text)
        elif token.text in _CLOSES:
            opened.pop()
        if token.text in "{}" or (token.text == ";" and (not opened or opened[-1] == "{")):
            ends.append(len(parts))
    return parts, [*ends, len(parts)]


def _python_parts(text: str) -> tuple[list[Part], list[int]]:
    """Return the tokens, and behind which of them statements end."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    parts, ends = [], []
    opened: list[str] = []
    for kind, string, start, _ in generators._tokens(text, starts):
        if kind == tokenize.NEWLINE:
            ends.append(len(parts))
        elif kind == tokenize.STRING:
            parts += _string_parts(string, start)
        elif kind in (tokenize.NAME, tokenize.NUMBER, tokenize.OP):
            parts.append(_part(string, start))
        if kind == tokenize.OP:
            if string in "([{":
                opened.append(string)
            elif string in _CLOSES:
                opened.pop()
            if string in "{}" or (string == "," and opened and opened[-1] == "{"):
                ends.append(len(parts))
    return parts, [*ends, len(parts)]


def _string_parts(string: str, start: int) -> list[Part]:
    if string.endswith('"""'):
        return []  # documentation, which is a comment here
    if string.strip("\"'").isidentifier():
        return [Part(string, False, start)]  # a name of an operation, which is a literal
    quote = min(n for n in (string.find('"'), string.find("'")) if n >= 0)
    inside = _lexed(string[quote + 1 : -1], start + quote + 1)
    return [Part(string[: quote + 1], False, start), *inside]
