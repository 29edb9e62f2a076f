"""The directive `table-of`: a mapping of the package as a table of names and what they mean."""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive


def row_of(*cells: nodes.Node) -> nodes.row:
    """Return a row of cells."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


class TableOf(Directive):
    """``table-of module NAME``: values are texts, or have a formula."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        module, name = self.arguments
        mapping = getattr(importlib.import_module(module), name)
        group = nodes.tgroup("", cols=2)
        group += [nodes.colspec(colwidth=width) for width in (30, 70)]
        body = nodes.tbody("")
        for key, value in mapping.items():
            text = value if isinstance(value, str) else value.formula
            body += row_of(nodes.literal("", key), nodes.Text(text))
        group += body
        return [nodes.table("", group)]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("table-of", TableOf)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
