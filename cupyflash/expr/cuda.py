"""Turn expressions into CUDA C++: the functions that a kernel calls for masks and scores.

The text contains only a tree's structure and the types of the arrays that it looks up. Its numbers
are parameters of the kernel (``p.ints``, ``p.floats``), and so are those arrays (``p.tables``), so
that a thousand different offsets compile one kernel. Numbers that `interval`, `key_range` and
`derivative` introduce belong to the structure and are written out; and so are divisors, since a
division by a number that the compiler knows takes half as many instructions.

Every node becomes one statement, ``const long long t3 = t1 + t2;``, and equal nodes become one.
Floats are float32 in masks and of the accumulator's type in scores. A product on which a comparison
or `floor` depends is rounded before it is added to something, as in NumPy; elsewhere the compiler
may contract. Integers have 64 bits; those of a pair have 32 if `width` shows that they fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from .block_range import BlockRange, block_range
from .cuda_division import division, divisors_of
from .cuda_functions import Functions, Generated, reads_by_place
from .distance import with_distances
from .edges import has_edges
from .key_range import KeyRange
from .nodes import READS, Expr, abbreviated, rebuild, show_node, walk
from .width import narrow

MAX_AXES = 8  # of a looked-up array, as in params.cuh

# How an operation is written, by the type of its result, with the names of its operands. Functions
# that are not part of C++ are in common/lookup.cuh and common/expression.cuh. A tile's class
# computes with bounds of integers, which may be at the ends of 64 bits.
_FLOAT = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "negative": "-{0}",
    "absolute": "fabs({0})",
    "minimum": "minimum({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "power": "pow({0}, {1})",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "log": "log({0})",
    "tanh": "tanh_of({0})",
    "sigmoid": "sigmoid({0})",
    "erf": "erf({0})",
    "sqrt": "sqrt({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "to_float": "static_cast<{type}>({0})",
    "where": "{0} ? {1} : {2}",
}
# Integer operations whose results may not fit although their operands do.
_ARITHMETIC = {
    "add", "subtract", "multiply", "negative", "absolute", "floor_divide", "remainder",
    "left_shift",
}  # fmt: skip
_INT = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "negative": "-{0}",
    "absolute": "{0} < 0 ? -{0} : {0}",
    "minimum": "{0} < {1} ? {0} : {1}",
    "maximum": "{0} > {1} ? {0} : {1}",
    "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "left_shift": "left_shift({0}, {1})",
    "right_shift": "right_shift({0}, {1})",
    "floor": "floor_to_int({0})",
    "to_int": "static_cast<{type}>({0})",
    "where": "{0} ? {1} : {2}",
}
_BOUND = _INT | {
    "add": "saturating_add({0}, {1})",
    "subtract": "saturating_subtract({0}, {1})",
    "multiply": "saturating_multiply({0}, {1})",
    "left_shift": "saturating_left_shift({0}, {1})",
    "negative": "saturating_subtract(0LL, {0})",
    "absolute": "{0} < 0 ? saturating_subtract(0LL, {0}) : {0}",
}
_BOOL = {
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} != {1}",
    "logical_not": "!{0}",
    "where": "{0} ? {1} : {2}",
}

# Operations that cost more than a multiplication, with their approximate cost.
_STEPS = {
    "exp": 4, "log": 12, "tanh": 16, "divide": 12, "floor": 8, "floor_divide": 24, "remainder": 24,
    "exp2": 4, "sigmoid": 16, "erf": 20, "sqrt": 8, "sin": 24, "cos": 24, "power": 40,
}  # fmt: skip


@dataclass
class _Parameters:
    """What the functions of one kernel share: constants and tables, numbered as they are met."""

    structural: bool = False  # from here on, constants are written out
    divisors: frozenset[Expr] = frozenset()  # constants that are written out
    places: dict[Expr, str] = field(default_factory=dict)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    tables: dict[int, str] = field(default_factory=dict)  # where an array stands, by its id

    def constant(self, node: Expr) -> str | None:
        """Return where a constant stands, or None where it is written out."""
        if node.type == "bool" or node in self.divisors:
            return None
        if node not in self.places and self.structural:
            return None
        if node not in self.places:
            if node.type == "int":
                self.places[node] = f"p.ints[{len(self.ints)}]"
                self.ints.append(node.value)
            else:
                self.places[node] = f"p.floats[{len(self.floats)}]"
                self.floats.append(node.value)
        return self.places[node]

    def table(self, array: Any) -> str:
        if array.ndim > MAX_AXES:
            raise ArgumentError(
                f"lookup: got an array with {array.ndim} axes; expected at most {MAX_AXES}."
            )
        if id(array) not in self.tables:
            self.tables[id(array)] = f"p.tables[{len(self.arrays)}]"
            self.arrays.append(array)
        return self.tables[id(array)]


def generate(
    allowed: Expr | None = None,
    classes: Expr | None = None,
    changed: Expr | None = None,
    slope: Expr | None = None,
    keys: KeyRange | None = None,
    short: bool = False,
    tangent: Expr | None = None,
    curve: Expr | None = None,
) -> Generated:
    """Write the functions of a call's bound expressions.

    Parameters
    ----------
    allowed, classes : Expr, optional
        The mask, and its class over a tile.
    changed, slope : Expr, optional
        The changed score, with the bias, and the derivative of the score change without it. A
        derivative that is 1 everywhere has no function.
    keys : KeyRange, optional
        The range of keys that the mask lets a query see, if it has one.
    short : bool
        Whether positions and lengths are at most `width.LIMIT`.
    tangent : Expr, optional
        A tangent of the score, to which that of the bias is added.
    curve : Expr, optional
        The second derivative of the score change; one that is 0 everywhere has no function.
    """
    if slope is not None and slope.op == "constant" and slope.value == 1.0:
        slope = None
    if curve is not None and curve.op == "constant" and curve.value == 0.0:
        curve = None
    parameters = _Parameters(divisors=divisors_of(allowed, changed, tangent))
    for root in (
        allowed,
        changed,
        tangent,
    ):  # the users' numbers come first, then those of the structure
        for node in walk(root) if root is not None else ():
            if node.op == "constant":
                parameters.constant(node)
    parameters.structural = True
    parts = []
    mask_steps = 0
    scored: dict[str, int] = {}  # operations of both score functions, which share some
    if allowed is not None:
        body = _site_body(allowed, "float", parameters, short)
        parts.append(_function("bool mask_allows", "Site", allowed, body))
        mask_steps = sum(body.steps.values())
    blocks = block_range(allowed) if short and keys is None and allowed is not None else None
    if classes is not None:
        # No list has the classes of such masks: they are asked about each tile in each head.
        words = {} if blocks is None else narrow(classes)
        body = _Body("float", parameters, rounded=_rounded(classes), bounds=True, words=words)
        parts.append(_function("int tile_class", "TileBox", classes, body))
    if keys is not None:
        parts.append(_range_function(keys, parameters))
    if blocks is not None:
        parts.append(_block_function(blocks, parameters))
    scores = {"score_mod": changed, "score_mod_derivative": slope, "score_tangent": tangent}
    scores["score_mod_curvature"] = curve
    roots = {name: root for name, root in scores.items() if root is not None}
    found = (node for root in roots.values() for node in _given(root, parameters))
    given = list(dict.fromkeys(found))
    if roots:
        parts.append(_given_function(given, parameters, short))
    for name, root in roots.items():
        tree = _with_given(with_distances(root) if short else root, given)
        body = _site_body(tree, "accum_t", parameters, short)
        parts.append(_score_function(name, tree, body))
        scored |= body.steps
    functions = Functions(
        source="\n".join(parts),
        num_ints=len(parameters.ints),
        num_floats=len(parameters.floats),
        num_tables=len(parameters.arrays),
        has_mask=allowed is not None,
        has_score=changed is not None,
        has_dscore=slope is not None,
        has_range=keys is not None,
        has_edges=allowed is not None and has_edges(allowed),
        mask_steps=mask_steps,
        mask_block=0 if blocks is None else blocks.size,
        score_steps=sum(scored.values()),
        score_reads=changed is not None and reads_by_place(changed),
        num_given=len(given),
        has_tangent=tangent is not None,
        has_curve=curve is not None,
    )
    constants = tuple(parameters.ints), tuple(parameters.floats)
    return Generated(functions, *constants, tuple(parameters.arrays))


def _site_body(root: Expr, float_type: str, parameters: _Parameters, short: bool) -> _Body:
    words = narrow(root) if short else {}
    return _Body(float_type, parameters, rounded=_rounded(root), words=words)


def _function(name: str, site: str, root: Expr, body: _Body) -> str:
    (result,) = body.write(root)
    comment = "" if body.bounds else f"  // {body.text[root]}\n"
    return (
        f"__device__ __forceinline__ {name}(const Params& p, const {site}& at) {{\n"
        f"{comment}{_lines(body)}  return {result};\n}}\n"
    )


def _lines(body: _Body) -> str:
    return "".join(f"  {line}\n" for line in body.lines)


def _score_function(name: str, root: Expr, body: _Body) -> str:
    (result,) = body.write(root)
    return (
        f"__device__ __forceinline__ accum_t {name}(const Params& p, const HeadConstants& given,\n"
        f"    accum_t score, const Site& at) {{\n"
        f"  // {body.text[root]}\n{_lines(body)}  return {result};\n}}\n"
    )


def _given_function(given: list[Expr], parameters: _Parameters, short: bool) -> str:
    words = narrow(*given) if short else {}
    body = _Body("accum_t", parameters, rounded=_rounded(*given), words=words)
    results = ", ".join(body.write(*given))
    comment = "".join(f"  // {n}: {body.text[node]}\n" for n, node in enumerate(given))
    return (
        "__device__ __forceinline__ HeadConstants score_head_constants(const Params& p, "
        "const Site& at) {\n"
        f"{comment}{_lines(body)}  return HeadConstants{{{{{results}}}}};\n}}\n"
    )


def _given(root: Expr, parameters: _Parameters) -> list[Expr]:
    """Return the floats below `root` that are the same for all pairs of a head.

    None of them is an operand of another one, or a number that is written out.
    """
    nodes = walk(root)
    varies: set[Expr] = set()
    for node in nodes:
        if node.op == "symbol" and node.value in ("i", "j", "score"):
            varies.add(node)
        if any(arg in varies for arg in node.args):
            varies.add(node)
    asked = {arg for node in nodes if node in varies for arg in node.args} | {root}
    same = [node for node in nodes if node in asked and node not in varies]
    return [
        node
        for node in same
        if node.type == "float" and (node.op != "constant" or node in parameters.places)
    ]


def _with_given(root: Expr, given: list[Expr]) -> Expr:
    places = {node: Expr("given", (), "float", n) for n, node in enumerate(given)}
    return rebuild(root, places.get)


def _range_function(keys: KeyRange, parameters: _Parameters) -> str:
    roots = [end for end in keys if end is not None]
    body = _Body("float", parameters, rounded=_rounded(*roots))
    written = iter(body.write(*roots))
    unbounded = "SMALLEST_INT", "LARGEST_INT"
    ends = [
        other if end is None else next(written) for end, other in zip(keys, unbounded, strict=True)
    ]
    return (
        "__device__ __forceinline__ KeyRange mask_range(const Params& p, const Site& at) {\n"
        f"{_lines(body)}  return KeyRange{{{', '.join(ends)}}};\n}}\n"
    )


def _block_function(blocks: BlockRange, parameters: _Parameters) -> str:
    """Return the code of what a query sees of a block: ends are integers of 32 bits."""
    roots = [root for root in blocks[1:] if root is not None]
    body = _Body("float", parameters, rounded=_rounded(*roots), words=narrow(*roots))
    written = iter(body.write(*roots))
    ends = [
        other if root is None else next(written)
        for root, other in zip(blocks[1:], ("", "0", "0x40000000"), strict=True)
    ]
    return (
        "__device__ __forceinline__ BlockKeys mask_block(const Params& p, const Site& at) {\n"
        f"{_lines(body)}  return BlockKeys{{{', '.join(ends)}}};\n}}\n"
    )


def _rounded(*roots: Expr) -> set[Expr]:
    """Return the floats on which an integer or a condition hangs."""
    found: set[Expr] = set()
    for node in reversed(walk(*roots)):
        if node.op == "floor" or node.type == "bool" or node in found:
            found.update(arg for arg in node.args if arg.type == "float")
    return found


class _Body:
    """The statements of one function."""

    def __init__(
        self,
        float_type: str,
        parameters: _Parameters,
        rounded: set[Expr],
        bounds: bool = False,
        words: Mapping[Expr, tuple[int, int]] | None = None,
    ) -> None:
        self.types = {"bool": "bool", "int": "long long", "float": float_type}
        self.parameters = parameters
        self.rounded = rounded
        self.bounds = bounds
        self.words = words or {}  # integers of 32 bits -> their least and largest value
        self.steps: dict[str, int] = {}  # the cost of an operation, by its text
        self.lines: list[str] = []
        self.text: dict[Expr, str] = {}  # the tree in Python, numbers by their place
        self._names: dict[str, str] = {}  # type and right-hand side -> name

    def write(self, *roots: Expr) -> list[str]:
        """Write every statement that `roots` need, and return their names."""
        names: dict[Expr, str] = {}
        for node in walk(*roots):
            args = [names[arg] for arg in node.args]
            names[node] = self._statement(node, args)
            self.text[node] = abbreviated(self._show(node))
        return [names[root] for root in roots]

    def _type(self, node: Expr) -> str:
        return "int" if node in self.words else self.types[node.type]

    def _statement(self, node: Expr, args: list[str]) -> str:
        value = self._value(node, args)
        if node.op in ("symbol", "given") or (node.op == "constant" and "p." not in value):
            return value
        self.steps[value] = self._cost(node)
        return self._named(self._type(node), value)

    def _named(self, kind: str, value: str) -> str:
        """Write a value as a statement, unless it stands already, and return its name."""
        key = f"{kind} {value}"
        if key not in self._names:
            self._names[key] = f"t{len(self.lines)}"
            self.lines.append(f"const {kind} {self._names[key]} = {value};")
        return self._names[key]

    def _value(self, node: Expr, args: list[str]) -> str:
        kind = self._type(node)
        if node.op == "symbol":
            if node in self.words:
                return f"static_cast<int>(at.{node.value})"
            return "score" if node.value == "score" else f"at.{node.value}"
        if node.op == "constant":
            place = self.parameters.constant(node)
            if place is None:
                return _literal(node, kind)
            return place if kind == "long long" else f"static_cast<{kind}>({place})"
        if node.op in READS:
            return self._read(node, args)
        if node.op == "given":
            return f"given.x[{node.value}]"
        if node.op == "distance":
            return self._distance(node, args[0])
        if node.type == "float":
            text = _FLOAT[node.op]
            if node.op == "multiply" and node in self.rounded:
                text = "multiply_rounded({0}, {1})"
        elif node.type == "bool":
            text = _BOOL[node.op]
        elif (special := division(node, self.parameters.divisors, self.words)) is not None:
            text = special[0]
        else:
            text = (_BOUND if self.bounds and node not in self.words else _INT)[node.op]
            if node not in self.words and node.op in _ARITHMETIC:
                # C++ computes in the operands' type, whatever the type of the variable.
                args = [
                    f"static_cast<long long>({arg})" if operand in self.words else arg
                    for operand, arg in zip(node.args, args, strict=True)
                ]
        return text.format(*args, type=kind)

    def _cost(self, node: Expr) -> int:
        special = division(node, self.parameters.divisors, self.words)
        return _STEPS.get(node.op, 1) if special is None else special[1]

    def _distance(self, node: Expr, rest: str) -> str:
        """Write what all pairs of a thread share, and return the sum with the rest of the place."""
        signs = {1: " + ", -1: " - "}
        base, step = rest, "0"
        for name, times in zip("ij", node.value, strict=True):
            if times:
                base += f"{signs[times]}static_cast<int>(at.{name} - at.step_{name})"
                step += f"{signs[times]}at.step_{name}"
        kind = self.types["float"]
        shared = self._named(kind, f"static_cast<{kind}>({self._named('int', base)})")
        return f"{shared} + static_cast<{kind}>({step})"

    def _read(self, node: Expr, args: list[str]) -> str:
        array = node.value[0]
        table, axes = self.parameters.table(array), array.ndim
        # An axis of length 1 has one element, whatever the index's tree is.
        last = axes - 1 if node.op.startswith("contains") else axes  # is a number, not an index
        args = [
            "0LL" if n % axes != last and array.shape[n % axes] == 1 else arg
            for n, arg in enumerate(args)
        ]
        kind = "float" if node.type == "float" else "int"
        element = f"KIND_{array.dtype.name.upper()}"
        parameter = f"<{self.types['float']}, {element}>" if kind == "float" else f"<{element}>"
        if node.op == "contains":
            return f"row_contains<{element}>({', '.join([table, *args])})"
        if node.op in ("contains_all", "contains_any"):
            call = f"rows_contain<{element}>({', '.join([table, *args])})"
            return f"{self._named('auto', call)}.{node.op.removeprefix('contains_')}"
        if node.op == "lookup":
            value = f"lookup_{kind}{parameter}({', '.join([table, *args])})"
        else:
            call = f"range_{kind}{parameter}({', '.join([table, *args])})"
            value = f"{self._named('auto', call)}.{'low' if node.op == 'range_minimum' else 'high'}"
        return f"{value} != 0" if node.type == "bool" else value

    def _show(self, node: Expr) -> str:
        args = [self.text[arg] for arg in node.args]
        if node.op == "constant":
            place = self.parameters.constant(node)
            return _literal(node, self.types[node.type]) if place is None else place[2:]
        if node.op in READS:
            return f"{self.parameters.table(node.value[0])[2:]}[{', '.join(args)}]"
        if node.op == "given":
            return f"given[{node.value}]"
        if node.op == "distance":
            signs = {1: " + ", 0: "", -1: " - "}
            pairs = zip("ij", node.value, strict=True)
            return f"({args[0]}{''.join(f'{signs[n]}{name}' for name, n in pairs if n)})"
        return show_node(node, args)


def _literal(node: Expr, kind: str) -> str:
    value = node.value
    if node.type == "bool":
        return "true" if value else "false"
    if node.type == "int":
        if value == -(2**63):
            return "(-9223372036854775807LL - 1)"
        digits = f"{value}" if kind == "int" else f"{value}LL"
        return digits if value >= 0 else f"({digits})"
    if math.isnan(value):
        return f"not_a_number<{kind}>()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}infinity<{kind}>()"
    return f"static_cast<{kind}>({float(value).hex()})"
