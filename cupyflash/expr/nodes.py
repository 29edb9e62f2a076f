"""The typed expression tree: symbols, numbers, look-ups and operations.

A tree is a value of type ``bool``, ``int`` (behaves as int64) or ``float`` (float32 in a mask, the
accumulator's type in a score). Python's operators build it; nothing is computed here. Each reader
of the tree has a table with the meaning of every operation: `evaluate` (NumPy and exact Python),
`interval`, `derivative`, `rounding` and `lower`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any, Literal, TypeAlias

import numpy as np

from ..arrays.dtypes import DTYPES, WORDS
from ..arrays.integers import integer
from ..errors import ArgumentError, ArgumentTypeError, TraceError

Type: TypeAlias = Literal["bool", "int", "float"]
Operand: TypeAlias = "Expr | bool | int | float"

# name -> (number of operands, rule by which operand types become the result's type)
OPERATIONS: dict[str, tuple[int, str]] = {
    "add": (2, "number"),
    "subtract": (2, "number"),
    "multiply": (2, "number"),
    "minimum": (2, "number"),
    "maximum": (2, "number"),
    "negative": (1, "number"),
    "absolute": (1, "number"),
    "floor_divide": (2, "int"),
    "remainder": (2, "int"),
    "left_shift": (2, "int"),
    "right_shift": (2, "int"),
    "divide": (2, "float"),
    "power": (2, "float"),
    "exp": (1, "float"),
    "exp2": (1, "float"),
    "log": (1, "float"),
    "tanh": (1, "float"),
    "sigmoid": (1, "float"),
    "erf": (1, "float"),
    "sqrt": (1, "float"),
    "sin": (1, "float"),
    "cos": (1, "float"),
    "floor": (1, "floor"),
    "to_float": (1, "convert"),
    "to_int": (1, "convert"),
    "less": (2, "compare"),
    "less_equal": (2, "compare"),
    "equal": (2, "compare"),
    "not_equal": (2, "compare"),
    "logical_and": (2, "logic"),
    "logical_or": (2, "logic"),
    "logical_xor": (2, "logic"),
    "logical_not": (1, "logic"),
    "where": (3, "where"),
}

# Functions whose last bits depend on the library or the GPU.
APPROXIMATE = frozenset("power exp exp2 log tanh sigmoid erf sin cos".split())

# Functions of NumPy, and of libraries like it, that may be applied to an expression, and the
# operation each one means.
_UFUNCS: dict[str, str] = {name: name for name in OPERATIONS if name not in ("to_float", "to_int")}
_UFUNCS |= {
    "expit": "sigmoid",
    "greater": "greater",
    "greater_equal": "greater_equal",
    "fabs": "absolute",
    "true_divide": "divide",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "invert": "logical_not",
}


class Expr:
    """One node of a tree: ``==``, ``<`` … make conditions, ``&``, ``|``, ``~`` join them."""

    __slots__ = ("args", "op", "type", "value")
    __hash__ = object.__hash__

    def __init__(self, op: str, args: tuple[Expr, ...], type: Type, value: Any = None) -> None:
        self.op = op
        self.args = args
        self.type: Type = type
        self.value = value

    def __add__(self, other: Operand) -> Expr:
        return operation("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return operation("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return operation("subtract", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return operation("subtract", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return operation("multiply", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return operation("multiply", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return operation("divide", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return operation("divide", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return operation("floor_divide", self, other)

    def __rfloordiv__(self, other: Operand) -> Expr:
        return operation("floor_divide", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return operation("remainder", self, other)

    def __rmod__(self, other: Operand) -> Expr:
        return operation("remainder", other, self)

    def __divmod__(self, other: Operand) -> tuple[Expr, Expr]:
        return self // other, self % other

    def __rdivmod__(self, other: Operand) -> tuple[Expr, Expr]:
        return other // self, other % self

    def __lshift__(self, other: Operand) -> Expr:
        return operation("left_shift", self, other)

    def __rlshift__(self, other: Operand) -> Expr:
        return operation("left_shift", other, self)

    def __rshift__(self, other: Operand) -> Expr:
        return operation("right_shift", self, other)

    def __rrshift__(self, other: Operand) -> Expr:
        return operation("right_shift", other, self)

    def __pow__(self, exponent: Operand, modulus: object = None) -> Expr:
        if modulus is not None:
            raise TraceError("pow: got a modulus, too; expected two numbers. Write x ** y % n.")
        return _power(self, exponent)

    def __rpow__(self, base: Operand) -> Expr:
        return _power(base, self)

    def __neg__(self) -> Expr:
        return operation("negative", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return operation("absolute", self)

    def __lt__(self, other: Operand) -> Expr:
        return operation("less", self, other)

    def __le__(self, other: Operand) -> Expr:
        return operation("less_equal", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return operation("less", other, self)

    def __ge__(self, other: Operand) -> Expr:
        return operation("less_equal", other, self)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return operation("equal", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return operation("not_equal", self, other)

    def __and__(self, other: Operand) -> Expr:
        return operation("logical_and", self, other)

    __rand__ = __and__

    def __or__(self, other: Operand) -> Expr:
        return operation("logical_or", self, other)

    __ror__ = __or__

    def __xor__(self, other: Operand) -> Expr:
        return operation("logical_xor", self, other)

    __rxor__ = __xor__

    def __invert__(self) -> Expr:
        return operation("logical_not", self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Expr:
        name = _UFUNCS.get(ufunc.__name__)
        if name is None or method != "__call__" or kwargs:
            raise TraceError(
                f"np.{ufunc.__name__} cannot be recorded in a mask or score; use arithmetic, "
                "comparisons, & | ~ << >>, and cupyflash.expr's exp, exp2, log, tanh, sigmoid, "
                "erf, sqrt, sin, cos, where, clip, minimum, maximum, floor."
            )
        if name == "power":
            return _power(*inputs)
        if name in ("greater", "greater_equal"):
            return operation("less" if name == "greater" else "less_equal", *reversed(inputs))
        return operation(name, *inputs)

    def __bool__(self) -> bool:
        raise TraceError(
            "A mask or score function cannot branch on a symbol: `if`, `and`, `or`, `not`, `min`, "
            "`max` and chained comparisons need a value now, and a symbol has none. Use "
            "cupyflash.expr.where(condition, a, b), `&`, `|`, `~`, minimum, maximum, clip."
        )

    def _no_value(self, *_: Any) -> Any:
        raise TraceError(
            "A symbol of a mask or score has no value yet, so it cannot index an array or become a "
            "Python number. Wrap the array, cupyflash.lookup(array)[...], and use cupyflash.expr's "
            "functions (exp, log, sqrt, where, clip, floor and others) instead of those of `math`."
        )

    __index__ = __int__ = __float__ = __complex__ = __iter__ = __len__ = __array__ = _no_value
    __round__ = __trunc__ = __floor__ = __ceil__ = _no_value

    def __repr__(self) -> str:
        return show(self)


class LookupTable:
    """An array made readable inside a mask or score: index it with expressions."""

    __slots__ = ("array", "learned", "owner")

    def __init__(self, array: Any, learned: bool = False, owner: Any = None) -> None:
        self.array, self.learned = array, learned
        self.owner = owner  # a tensor in the same memory, to which PyTorch gives the gradient

    def __getitem__(self, index: Any) -> Expr:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != self.array.ndim:
            raise ArgumentError(
                f"lookup of an array of shape {tuple(self.array.shape)} was indexed with "
                f"{len(indices)} expressions; give one for each of its {self.array.ndim} axes."
            )
        places = tuple(as_expr(position) for position in indices)
        return lookup_node(self.array, places, table=self if self.learned else None)

    def _not_a_number(self, *_: Any) -> Any:
        raise TraceError("A lookup is read by indexing: write lookup(array)[h] and the like.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _not_a_number
    __rtruediv__ = __floordiv__ = __mod__ = __neg__ = __abs__ = __and__ = __or__ = _not_a_number
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __iter__ = _not_a_number
    __hash__ = object.__hash__


def array_type(array: Any, argument: str = "lookup") -> Type:
    """Return the type an array's elements have in an expression, or raise."""
    dtype = np.dtype(array.dtype)
    if not dtype.isnative:
        raise ArgumentTypeError(
            f"{argument}: {dtype} has foreign byte order; convert it with .astype()."
        )
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu" and dtype != np.uint64:
        return "int"
    if dtype.name in DTYPES:
        return "float"
    raise ArgumentTypeError(
        f"{argument}: got an array of dtype {dtype}; expected bool, a signed integer, uint8 to "
        f"uint32, {WORDS}. Convert it with .astype()."
    )


def lookup_node(
    array: Any, indices: tuple[Expr, ...], proven: bool = False, table: Any = None
) -> Expr:
    """Read `array` at `indices`, `proven` to be in range; `table` is what has its gradient."""
    for position in indices:
        if position.type != "int":
            raise TraceError(f"A lookup's index must be an integer expression; {position} is not.")
    value = (array, proven) if table is None else (array, proven, table)
    return Expr("lookup", indices, array_type(array), value)


# Nodes of a bound tree that read an array, ``value[0]``: its element at some indices; and whether
# its row at all indices but the last has the last one, which is a number, among its elements.
LOOKUPS = "lookup", "contains"
# These, and the bounds of their values over a tile.
READS = (*LOOKUPS, "range_minimum", "range_maximum", "contains_all", "contains_any")


def as_expr(value: Any) -> Expr:
    """Return `value` as a node: an expression stays, a number becomes a constant."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, LookupTable):
        value._not_a_number()
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]  # NumPy turns its own numbers into arrays before it passes them on
    if isinstance(value, (bool, np.bool_)):
        return Expr("constant", (), "bool", bool(value))
    if isinstance(value, (int, np.integer)):
        if not -(2**63) <= int(value) < 2**63:
            raise ArgumentError(f"The integer {value} does not fit into 64 bits.")
        return Expr("constant", (), "int", int(value))
    if isinstance(value, (float, np.floating)) or type(value).__name__ == "bfloat16":
        return Expr("constant", (), "float", float(value))
    number = integer(value)
    if number is not None:
        return as_expr(number)
    raise TraceError(
        f"got {type(value).__name__} in a mask or score; expected a number or an expression. Wrap "
        "an array: cupyflash.lookup(array)[...]."
    )


def symbol(name: str) -> Expr:
    """Return the symbol `name`: an integer, or a float for ``score``."""
    return Expr("symbol", (), "float" if name == "score" else "int", name)


def convert(node: Expr, type: Type) -> Expr:
    """Return `node` as `type`: bool to int to float."""
    if node.type == type:
        return node
    if node.op == "constant":
        return Expr("constant", (), type, float(node.value) if type == "float" else int(node.value))
    if type == "float" and node.type == "bool":
        node = convert(node, "int")
    return Expr("to_float" if type == "float" else "to_int", (node,), type)


def operation(name: str, *operands: Any) -> Expr:
    """Return the node of an operation, with its operands converted to a common type."""
    arity, rule = OPERATIONS[name]
    nodes = tuple(as_expr(operand) for operand in operands)
    if len(nodes) != arity:
        raise TraceError(f"{name}: got {len(nodes)} operands; expected {arity}.")
    types = [node.type for node in nodes]
    if rule == "convert":
        return convert(nodes[0], "float" if name == "to_float" else "int")
    if rule == "logic":
        if any(type != "bool" for type in types):
            raise TraceError(
                f"{name}: got a {next(t for t in types if t != 'bool')}; expected conditions. "
                "Compare it first (x != 0), and put comparisons in parentheses: (i < j) & (j < "
                "n)."
            )
        return Expr(name, nodes, "bool")
    if rule == "where":
        if types[0] != "bool":
            raise TraceError(f"where: got a {types[0]} as the first operand; expected a condition.")
        chosen = _common(types[1:])
        return Expr(name, (nodes[0], *(convert(node, chosen) for node in nodes[1:])), chosen)
    if rule == "int":
        if "float" in types:
            remedy = "floor(x)" if name in ("left_shift", "right_shift") else "floor(x / y)"
            raise TraceError(
                f"{name}: got a float; expected integers. Use cupyflash.expr.{remedy}."
            )
        return Expr(name, tuple(convert(node, "int") for node in nodes), "int")
    if rule == "float":
        return Expr(name, tuple(convert(node, "float") for node in nodes), "float")
    if rule == "floor":
        return nodes[0] if types[0] != "float" else Expr(name, nodes, "int")
    common = _common(types)
    if rule == "compare":
        if common == "bool":
            common = "int"
        return Expr(name, tuple(convert(node, common) for node in nodes), "bool")
    if common == "bool":
        common = "int"
    return Expr(name, tuple(convert(node, common) for node in nodes), common)


def _common(types: list[Type]) -> Type:
    order: tuple[Type, ...] = ("bool", "int", "float")
    return max(types, key=order.index)


def _power(base: Any, exponent: Any) -> Expr:
    """Return a product where the exponent is a whole number of 0 or more; else a float."""
    if isinstance(exponent, (bool, np.bool_)):
        raise TraceError("`**`: got a bool as exponent; expected a number. Use where.")
    if not isinstance(exponent, (int, np.integer)) or exponent < 0:
        return operation("power", base, exponent)
    result, factor, left = None, as_expr(base), int(exponent)
    while left:
        if left & 1:
            result = factor if result is None else result * factor
        left >>= 1
        factor = factor * factor if left else factor
    return as_expr(1) if result is None else result


def walk(*roots: Expr, known: Container[Expr] = ()) -> list[Expr]:
    """Return every node once, operands before the operations that use them.

    Nodes in `known`, and what only they use, are left out.
    """
    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, operands_done = stack.pop()
        if operands_done:
            order[node] = None
        elif node not in order and node not in known:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return list(order)


def rebuild(root: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """Return the tree with every node for which `replace` gives a node exchanged for it."""
    return remade(root, lambda node, args: replace(node))


def remade(root: Expr, make: Callable[[Expr, tuple[Expr, ...]], Expr | None]) -> Expr:
    """Return the tree with every node exchanged for what `make` gives, if it gives a node.

    It receives the node, and what has become of its operands.
    """
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(done[arg] for arg in node.args)
        other = make(node, args)
        if other is None:
            same = all(new is old for new, old in zip(args, node.args, strict=True))
            other = node if same else Expr(node.op, args, node.type, node.value)
        done[node] = other
    return done[root]


_INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "left_shift": "<<",
    "right_shift": ">>",
    "power": "**",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
    "logical_and": "&",
    "logical_or": "|",
    "logical_xor": "^",
}


# Longer lines are abbreviated, because a shared operation is written out wherever it is used.
_LONGEST = 400


def show(root: Expr) -> str:
    """Return the tree as a line of Python."""
    lines: dict[Expr, str] = {}
    for node in walk(root):
        lines[node] = abbreviated(show_node(node, [lines[arg] for arg in node.args]))
    return lines[root]


def abbreviated(line: str) -> str:
    """Return a line, without its middle if it is long."""
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


def show_node(node: Expr, args: list[str]) -> str:
    """Return one node as Python, given its operands as Python."""
    if node.op == "constant":
        return repr(node.value) if math.isfinite(node.value) else f"float('{node.value}')"
    if node.op == "symbol":
        return str(node.value)
    if node.op == "lookup":
        return f"lookup(<{tuple(node.value[0].shape)}>)[{', '.join(args)}]"
    if node.op == "contains":
        return f"({args[-1]} in lookup(<{tuple(node.value[0].shape)}>)[{', '.join(args[:-1])}])"
    if node.op == "aligned" and node.value.contains:
        return f"({args[-1]} in {node.value.argument}[{', '.join(args[:-1])}])"
    if node.op == "aligned":
        return f"{node.value.argument}[{', '.join(args)}]"
    if node.op in _INFIX:
        return f"({args[0]} {_INFIX[node.op]} {args[1]})"
    if node.op in ("negative", "logical_not"):
        return f"{'-' if node.op == 'negative' else '~'}{args[0]}"
    if node.op in ("to_float", "to_int"):
        return args[0]
    return f"{node.op}({', '.join(args)})"
