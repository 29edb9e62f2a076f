"""What a tree computes, apart from the arrays that it reads: a value to compare and to look up.

Nodes compare by identity, because ``==`` makes a condition; a `Structure` compares by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from .bind import Alignment, Axis
from .nodes import LOOKUPS, Expr, LookupTable, walk

# Numbers up to this are symbols of a form, and operations that such a number may be an operand of:
# proofs for all of them hold for each.
MOST_NUMBER = 2**40
_OPEN = frozenset(
    ["add", "subtract", "minimum", "maximum", "less", "less_equal", "equal", "not_equal"]
)

_READS = (*LOOKUPS, "aligned")


class Structure:
    """The operations and numbers of a tree. Equal structures compute alike on equal arrays.

    Attributes
    ----------
    nodes : tuple
        Of each node its operation, type, operands by their places, and value.
    has_floor : bool
        Whether floats become integers, on which proofs may depend.
    """

    __slots__ = ("_apart", "_conditions", "_hash", "has_floor", "nodes")

    def __init__(self, nodes: tuple[Any, ...]) -> None:
        self.nodes = nodes
        self._hash = hash(nodes)
        self.has_floor = any(operation == "floor" for operation, *_ in nodes)
        self._apart: tuple[Structure | None, tuple[int, ...]] | None = None
        self._conditions: frozenset[int] | None = None

    @property
    def form(self) -> Structure | None:
        """The same with symbols for numbers such as a window's; None if it has no such numbers."""
        return self._of_form[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers for which the form has symbols."""
        return self._of_form[1]

    @property
    def conditions(self) -> frozenset[int]:
        """The arrays of Booleans that must all be true, by their places, and are nothing else."""
        if self._conditions is None:
            self._conditions = _conditions(self.nodes)
        return self._conditions

    @property
    def _of_form(self) -> tuple[Structure | None, tuple[int, ...]]:
        if self._apart is None:
            self._apart = _apart(self.nodes)
        return self._apart

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.nodes == other.nodes)


def _apart(nodes: tuple[Any, ...]) -> tuple[Structure | None, tuple[int, ...]]:
    """Return a structure with symbols for its numbers, if it has any, and these numbers."""
    held = {place for op, _, args, _ in nodes if op not in _OPEN for place in args}
    made = list(nodes)
    numbers: list[int] = []
    for place, (op, kind, _, value) in enumerate(nodes):
        if op == "constant" and kind == "int" and place not in held and abs(value) <= MOST_NUMBER:
            made[place] = "symbol", kind, (), _name(len(numbers))
            numbers.append(value)
    return (Structure(tuple(made)) if numbers else None), tuple(numbers)


def _conditions(nodes: tuple[Any, ...]) -> frozenset[int]:
    """Return the arrays that are read for conditions that must all hold, and for nothing else."""
    joins, read, left = set(), set(), [len(nodes) - 1]
    while left:
        place = left.pop()
        op, kind, args, _ = nodes[place]
        if op == "logical_and" and place not in joins:
            joins.add(place)
            left += args
        elif op in _READS and kind == "bool" and not _contains(op, nodes[place][3]):
            read.add(place)
    read -= {arg for place, node in enumerate(nodes) if place not in joins for arg in node[2]}
    others = {n[3][0] for place, n in enumerate(nodes) if n[0] in _READS and place not in read}
    return frozenset({nodes[place][3][0] for place in read} - others)


def _contains(op: str, value: Any) -> bool:
    """Return whether a node is true where an array has a number, not where its element is true."""
    return op == "contains" or (op == "aligned" and bool(value[2][-1]))


def _name(number: int) -> str:
    return f"number {number}"


def named(numbers: Sequence[int]) -> dict[str, int]:
    """Return the numbers of a form by the names of its symbols."""
    return {_name(n): value for n, value in enumerate(numbers)}


def structure(root: Expr) -> tuple[Structure, tuple[Any, ...]]:
    """Return the structure of a tree, and the arrays it reads, each once, in a fixed order."""
    places: dict[Expr, int] = {}
    arrays: dict[int, tuple[int, Any]] = {}  # by id: place and array
    nodes: list[Any] = []
    for node in walk(root):
        places[node] = len(nodes)
        args = tuple(places[arg] for arg in node.args)
        nodes.append((node.op, node.type, args, _value(node, arrays)))
    return Structure(tuple(nodes)), tuple(array for _, array in arrays.values())


def table_of(node: Expr) -> LookupTable | None:
    """Return the learned look-up that a node reads, if it reads one."""
    if node.op == "aligned":
        table: LookupTable | None = node.value.table
        return table
    return node.value[2] if node.op == "lookup" and len(node.value) > 2 else None


def _value(node: Expr, arrays: dict[int, tuple[int, Any]]) -> Any:
    """Return a node's value as something that compares as it computes."""
    if node.op in LOOKUPS:
        array, proven = node.value[:2]
        return _place(array, arrays), proven
    if node.op == "aligned":
        alignment = node.value
        axes = tuple((axis.size, axis.exact, axis.shared) for axis in alignment.axes)
        own = alignment.argument, alignment.lead, alignment.packed, alignment.contains
        return _place(alignment.array, arrays), axes, own
    # -0.0 equals 0.0 and NaN does not equal itself, so numbers are compared by their digits.
    return node.value.hex() if isinstance(node.value, float) else node.value


def _place(array: Any, arrays: dict[int, tuple[int, Any]]) -> int:
    return arrays.setdefault(id(array), (len(arrays), array))[0]


def tree(nodes: Sequence[Any], arrays: Sequence[Any]) -> Expr:
    """Return the tree of a structure's nodes, which reads other arrays in the same places."""
    made: list[Expr] = []
    for op, kind, places, value in nodes:
        args = tuple(made[place] for place in places)
        made.append(Expr(op, args, kind, _restored(op, kind, args, value, arrays)))
    return made[-1]


def _restored(op: str, kind: str, args: tuple[Expr, ...], value: Any, arrays: Sequence[Any]) -> Any:
    """Return the value of a node of which `_value` returned `value`."""
    if op in LOOKUPS:
        place, proven = value
        return arrays[place], proven
    if op == "aligned":
        place, sizes, (argument, *own) = value
        axes = tuple(Axis(arg, *size) for arg, size in zip(args, sizes, strict=True))
        return Alignment(arrays[place], argument, axes, *own)
    return float.fromhex(value) if op == "constant" and kind == "float" else value


class Structured:
    """What masks and score changes have in common: a tree, and its structure.

    Attributes
    ----------
    expr : Expr
        The tree.
    """

    __slots__ = ("__weakref__", "_compiled_as", "_learned", "_structure", "expr")

    # Takes each new object, and returns what a compiler of functions passes in its place. It is
    # None until there is such a compiler.
    watcher: ClassVar[Callable[[Any], Any] | None] = None

    def __init__(self, expr: Expr) -> None:
        self.expr = expr
        self._structure: tuple[Structure, tuple[Any, ...]] | None = None
        self._learned: tuple[tuple[int, LookupTable], ...] | None = None
        watcher = Structured.watcher
        self._compiled_as = None if watcher is None else watcher(self)

    @classmethod
    def unwatched(cls, expr: Expr) -> Self:
        """Return an object with this tree, and do not show it to the watcher."""
        made = cls.__new__(cls)
        made.expr, made._structure, made._compiled_as = expr, None, None
        made._learned = None
        return made

    def __reduce__(self) -> Any:
        return type(self), (self.expr,)

    @property
    def structure(self) -> tuple[Structure, tuple[Any, ...]]:
        """The structure of its tree, and the arrays that it reads."""
        if self._structure is None:
            self._structure = structure(self.expr)
        return self._structure

    @property
    def learned_tables(self) -> tuple[LookupTable, ...]:
        """The learned look-ups that its tree reads, each once."""
        return tuple(dict.fromkeys(table for _, table in self.learned_reads))

    @property
    def learned_reads(self) -> tuple[tuple[int, LookupTable], ...]:
        """The places of the structure's nodes that read learned look-ups, and these."""
        if self._learned is None:
            read = enumerate(map(table_of, walk(self.expr)))
            self._learned = tuple((n, table) for n, table in read if table is not None)
        return self._learned
