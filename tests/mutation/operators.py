"""What a mutant is: one small change of a CUDA source, made on its tokens.

Lines keep their numbers. Comments, strings, lines of the preprocessor and static assertions are
left alone. The sources are formatted by clang-format, so an operator between two operands has
spaces on both sides, and a bracket of a template or a pointer's star has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*\#[^\n]*|\s+)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>0[xX][\da-fA-F]+[uUlL]*|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[uUlLfF]*)
      | (?P<sign><<=|>>=|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int
    spaced: bool  # white space before and behind


class Mutant(NamedTuple):
    """A change of a file: bytes `start` to `end` become `after`."""

    file: str
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the text with the change, on as many lines."""
        assert text[self.start : self.end] == self.before, self
        lines = self.before.count("\n") - self.after.count("\n")
        return text[: self.start] + self.after + "\n" * lines + text[self.end :]

    def shown(self) -> str:
        """Return "file:line before -> after" on one line."""
        before, after = (" ".join(x.split()) for x in (self.before, self.after))
        return f"{self.file}:{self.line} [{self.operator}] {before} -> {after or '(nothing)'}"


def tokens(text: str) -> list[Token]:
    """Return the tokens that may be changed."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind is None or kind == "skip":
            continue
        start, end = match.span()
        spaced = text[start - 1 : start].isspace() and text[end : end + 1].isspace()
        found.append(Token(kind, match[0], start, end, spaced))
    return _without_assertions(found)


def _without_assertions(found: list[Token]) -> list[Token]:
    kept, n = [], 0
    while n < len(found):
        if found[n].text == "static_assert":
            while found[n].text != ";":
                n += 1
        else:
            kept.append(found[n])
        n += 1
    return kept


RELATIONS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"),
    "==": ("!=",), "!=": ("==",),
}  # fmt: skip
ARITHMETIC = {
    "+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "%": ("/",), "+=": ("-=",), "-=": ("+=",),
    "*=": ("+=",), "/=": ("*=",), "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",),
    "^": ("&",),
}  # fmt: skip
LOGIC = {"&&": ("||",), "||": ("&&",)}
# Names of one type that are easily mistaken for each other.
_PAIRS = """
    row_thread column_thread, i j, i0 j0, ni nj, i_low j_low, i_high j_high, i_end j_end, q k, k v,
    dk dv, ROWS COLUMNS, A_STRIDE B_STRIDE, D D_V, BLOCK_Q BLOCK_KV, row column, row col,
    len_q len_k, offsets_q offsets_k, total_q total_k, start_q start_k, heads heads_kv, h h_kv,
    AT_ONCE LANES, lse delta, lse_smem delta_smem, ROW_THREADS COLUMN_THREADS, EMPTY FULL,
    PARTIAL FULL, low high, c0 c2, c1 c3, key_0 key_1, product_0 product_1, WEYL_0 WEYL_1,
    MULTIPLIER_0 MULTIPLIER_1, x y, minimum maximum, m m_new, m l, one_query one_key,
    i_limit j_limit, q_block kv_block, q_blocks kv_blocks, bias_len_q bias_len_k, first_a first_b,
    valid_a valid_b, lead_size own_size, tile_smem dropped_smem, a_smem b_smem, k_smem v_smem,
    q_smem do_smem, filled_smem chunk_smem, filled_smem rows_smem, CHUNK STRIDE, STEP STRIDE,
    SMALLEST_INT LARGEST_INT, VECTOR STORED_VECTOR, first valid, element gradient, n r, kind_dk
    kind_dv, strides shape, K_STRIDE V_STRIDE, Q_STRIDE DO_STRIDE, COLUMNS_K COLUMNS_V, to_half
    to_bfloat, rows columns, begin_rows finish_rows, multiply_add multiply_add_unmasked,
    sums factor,
    out d_out, own_size lead_size, seed seed_gmem, KIND_FLOAT16 KIND_BFLOAT16, sink row_lse
"""
SWAPS: dict[str, set[str]] = {}
for _pair in _PAIRS.split(","):
    _a, _b = _pair.split()
    SWAPS.setdefault(_a, set()).add(_b)
    SWAPS.setdefault(_b, set()).add(_a)

_KEYWORDS = {"return", "else", "case", "throw", "new", "do", "sizeof"}
_NO_STATEMENT = {
    "const", "constexpr", "using", "struct", "template", "namespace", "typedef", "static", "if",
    "for", "while", "else", "return", "case", "default", "switch", "extern", "enum", "union",
    "public", "inline", "do",
}  # fmt: skip
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}
_OPEN, _CLOSE = {"(", "[", "{"}, {")", "]", "}"}


def mutants(file: str, text: str) -> list[Mutant]:
    """Return every mutant of a text, in the order of their places, no two alike."""
    found: dict[tuple[int, int, str], Mutant] = {}
    all_ = tokens(text)
    known = {token.text for token in all_}
    for operator, start, end, after in _changes(text, all_):
        before = text[start:end]
        if operator == "name" and after not in known:
            continue
        if " ".join(before.split()) == " ".join(after.split()):
            continue
        line = text.count("\n", 0, start) + 1
        made = Mutant(file, line, operator, start, end, before, after)
        found.setdefault((start, end, after), made)
    return [found[key] for key in sorted(found)]


Change = tuple[str, int, int, str]


def _changes(text: str, all_: list[Token]) -> Iterator[Change]:
    for n, token in enumerate(all_):
        yield from _operators(all_, n)
        yield from _numbers(token)
        yield from _words(text, all_, n)
    deletions = list(_statements(text, all_))
    yield from deletions
    yield from _conditions(text, all_, {start: end for _, start, end, _ in deletions})
    yield from _choices(text, all_)
    yield from _clamps(text, all_)
    yield from _loops(text, all_)


def _operators(all_: list[Token], n: int) -> Iterator[Change]:
    token = all_[n]
    if token.kind != "sign":
        return
    if token.spaced:
        for name, table in (("relation", RELATIONS), ("arithmetic", ARITHMETIC), ("logic", LOGIC)):
            for after in table.get(token.text, ()):
                yield name, token.start, token.end, after
    elif token.text in "-!" and n and all_[n + 1].start == token.end:
        yield "sign" if token.text == "-" else "negation", token.start, token.end, ""


def _numbers(token: Token) -> Iterator[Change]:
    if token.kind != "number":
        return
    match = re.fullmatch(r"(0[xX][\da-fA-F]+|\d+)([uUlL]*)", token.text)
    if match is None:
        digits = token.text.rstrip("fFlL")
        suffix = token.text[len(digits) :]
        yield "constant", token.start, token.end, f"{float(digits) * 1.001:.9g}{suffix}"
        return
    value = int(match[1], 0)
    others = (1,) if value == 0 else (value + 1, value - 1)
    for other in others:
        # A literal that stays as wide as it was.
        shown = hex(other) if match[1].lower().startswith("0x") else str(other)
        yield "constant", token.start, token.end, shown + match[2]


def _is_declared(all_: list[Token], n: int) -> bool:
    """Whether a word is the name that a declaration gives, or a template's parameter."""
    before = all_[n - 1] if n else None
    if before is None:
        return False
    if before.kind == "word":
        return before.text not in _KEYWORDS
    behind = all_[n - 2].kind == "word" or all_[n - 2].text == ">"
    return before.text in ("&", "*", ">") and not before.spaced and behind


def _words(text: str, all_: list[Token], n: int) -> Iterator[Change]:
    token = all_[n]
    if token.kind != "word":
        return
    if token.text in ("true", "false"):
        other = "false" if token.text == "true" else "true"
        yield "flag", token.start, token.end, other
    follows = all_[n + 1].text if n + 1 < len(all_) else ""
    if token.text in SWAPS and not _is_declared(all_, n):
        for other in sorted(SWAPS[token.text]):
            yield "name", token.start, token.end, other
    alone = n and all_[n - 1].text in ("=", "(", ",", "return", ":", "?")
    if follows == "?" and alone:
        yield "negation", token.start, token.end, f"!{token.text}"
    if token.text == "infinity" and follows == "(" and all_[n - 1].text == "::":
        end = _closing(all_, n + 1)
        yield "infinity", all_[n - 2].start, all_[end].end, "accum_t(0)"
    if token.text == "infinite" and not _is_declared(all_, n):
        yield "infinity", token.start, token.end, "T(0)"
    if token.text == "shuffle_xor" and follows == "(" and all_[n - 1].text == "::":
        end = _closing(all_, n + 1)
        inside = text[all_[n + 1].end : all_[end].start]
        yield "shuffle", all_[n - 2].start, all_[end].end, f"({inside.rpartition(',')[0]})"
    if token.text == "barrier_or" and all_[n - 1].text == "::":
        yield "barrier", all_[n - 2].start, token.end, ""


def _closing(all_: list[Token], opening: int) -> int:
    """Return the number of the token that closes the bracket of another one."""
    depth = 0
    for n in range(opening, len(all_)):
        depth += (all_[n].text in _OPEN) - (all_[n].text in _CLOSE)
        if depth == 0:
            return n
    raise ValueError(f"a bracket does not close: {all_[opening]}")


def _statements(text: str, all_: list[Token]) -> Iterator[Change]:
    """Assignments and calls, and jumps without a value, are left out."""
    begins = _statement_starts(all_)
    for n in sorted(begins):
        token = all_[n]
        if token.text in ("continue", "break") or (
            token.text == "return" and all_[n + 1].text == ";"
        ):
            yield "deletion", token.start, token.end, ""
            continue
        if token.text in _NO_STATEMENT or token.kind == "number" or token.text in "{};":
            continue
        depth, last, assigns, adjacent = 0, n, False, False
        while last < len(all_) and (depth or all_[last].text != ";"):
            depth += (all_[last].text in _OPEN) - (all_[last].text in _CLOSE)
            if depth < 0:
                break
            top = depth == 0
            assigns = assigns or (top and all_[last].text in _ASSIGNMENTS)
            if top and last > n and all_[last].kind == "word" and not assigns:
                adjacent = adjacent or all_[last - 1].kind == "word" or _is_declared(all_, last)
            last += 1
        if last >= len(all_) or all_[last].text != ";" or depth < 0 or adjacent:
            continue
        if not assigns and all_[last - 1].text != ")":
            continue
        start, end = token.start, all_[last - 1].end
        waits = re.fullmatch(r"(?:\w+::)?(?:__syncthreads|cp_async_wait_all)\(\)", text[start:end])
        yield "barrier" if waits else "deletion", start, end, ""


def _statement_starts(all_: list[Token]) -> set[int]:
    begins = set()
    heads = set()  # what closes the head of an if, for or while
    for n, token in enumerate(all_):
        if token.text in ("if", "for", "while"):
            opening = n + 2 if all_[n + 1].text == "constexpr" else n + 1
            if opening < len(all_) and all_[opening].text == "(":
                heads.add(_closing(all_, opening))
    for n in range(1, len(all_)):
        before = all_[n - 1].text
        if before in (";", "{", "}", "else") or n - 1 in heads:
            begins.add(n)
    return begins


def _conditions(text: str, all_: list[Token], deleted: dict[int, int]) -> Iterator[Change]:
    """A condition is negated, or one side of it is always taken.

    A loop does not go on for ever, and what another mutant deletes is not passed by as well.
    """
    for n, token in enumerate(all_):
        if token.text not in ("if", "while"):
            continue
        opening = n + 2 if all_[n + 1].text == "constexpr" else n + 1
        if all_[opening].text != "(":
            continue
        end = _closing(all_, opening)
        start, stop = all_[opening].end, all_[end].start
        yield "negation", start, stop, f"!({text[start:stop]})"
        if token.text == "if":
            yield "side", start, stop, "true"
            behind = deleted.get(all_[end + 1].start)
            if behind is not None and not re.match(r";\s*else\b", text[behind:]):
                continue
        yield "side", start, stop, "false"


def _choices(text: str, all_: list[Token]) -> Iterator[Change]:
    """One side of `a ? b : c` is always taken; where that is the smaller or larger of two, it is a
    bound that is removed.
    """
    for n, token in enumerate(all_):
        if token.text != "?":
            continue
        first = _condition_start(all_, n)
        if first == n:
            continue
        start, stop = all_[first].start, all_[n - 1].end
        relations = [m for m in range(first, n) if all_[m].spaced and all_[m].text in RELATIONS]
        name = "side"
        if len(relations) == 1:
            (m,) = relations
            bounds = text[start : all_[m - 1].end], text[all_[m + 1].start : stop]
            if text[all_[n + 1].start : all_[_colon(all_, n) - 1].end] in bounds:
                name = "clamp"
        for side in ("true", "false"):
            yield name, start, stop, side


def _condition_start(all_: list[Token], question: int) -> int:
    """Return the number of the token with which the condition before a "?" begins."""
    depth = 0
    for n in range(question - 1, -1, -1):
        token = all_[n]
        depth += (token.text in _CLOSE) - (token.text in _OPEN)
        ends = token.text in ("?", ":", ",", ";", "return", "}") or token.text in _ASSIGNMENTS
        in_template = token.text == "<" and not token.spaced
        if depth < 0 or (depth == 0 and (ends or in_template)):
            return n + 1
    return 0


def _colon(all_: list[Token], question: int) -> int:
    """Return the number of the colon that belongs to a "?"."""
    depth, n = 1, question
    while depth:
        n += 1
        if all_[n].text in _OPEN:
            n = _closing(all_, n)
        depth += (all_[n].text == "?") - (all_[n].text == ":")
    return n


BOUNDS = {"min", "max", "fmin", "fmax", "minimum", "maximum", "clamp"}


def _clamps(text: str, all_: list[Token]) -> Iterator[Change]:
    """A call of `min` or `max` becomes either operand; `clamp` loses either bound, or both."""
    for n, token in enumerate(all_):
        follows = all_[n + 1].text if n + 1 < len(all_) else ""
        if token.text not in BOUNDS or follows != "(" or _is_declared(all_, n):
            continue
        begin = n
        while all_[begin - 1].text == "::":
            begin -= 2
        end = _closing(all_, n + 1)
        start, stop = all_[begin].start, all_[end].end
        operands = _operands(text, all_, n + 1, end)
        if token.text == "clamp":
            x, low, high = operands
            yield "clamp", start, stop, f"({x})"
            yield "clamp", start, stop, f"(({x}) < ({low}) ? ({low}) : ({x}))"
            yield "clamp", start, stop, f"(({x}) > ({high}) ? ({high}) : ({x}))"
        else:
            for operand in operands:
                yield "clamp", start, stop, f"({operand})"


def _operands(text: str, all_: list[Token], opening: int, end: int) -> list[str]:
    """Return the texts between the commas of a call."""
    found, begin, n = [], opening + 1, opening + 1
    while n <= end:
        if n == end or all_[n].text == ",":
            found.append(text[all_[begin].start : all_[n - 1].end])
            begin = n + 1
        elif all_[n].text in _OPEN:
            n = _closing(all_, n)
        n += 1
    return found


def _loops(text: str, all_: list[Token]) -> Iterator[Change]:
    """A loop begins one later, or ends one earlier."""
    for n, token in enumerate(all_):
        if token.text != "for" or all_[n + 1].text != "(":
            continue
        end = _closing(all_, n + 1)
        depth, semicolons = 0, []
        for m in range(n + 2, end):
            depth += (all_[m].text in _OPEN) - (all_[m].text in _CLOSE)
            if depth == 0 and all_[m].text == ";":
                semicolons.append(m)
        if len(semicolons) != 2:
            continue
        for m in range(n + 2, semicolons[0]):
            if all_[m].text == "=":
                start, stop = all_[m + 1].start, all_[semicolons[0]].start
                yield "loop", start, stop, f"({text[start:stop]}) + 1"
                break
        for m in range(semicolons[0], semicolons[1]):
            if all_[m].text in ("<", "<=") and all_[m].spaced:
                start, stop = all_[m + 1].start, all_[semicolons[1]].start
                yield "loop", start, stop, f"({text[start:stop]}) - 1"
                break
