"""The directive `drawing`: a figure that its own code draws while the site is built.

``:::{drawing} name`` calls ``draw()`` of ``drawings/name.py``, which returns a matplotlib figure,
an SVG, or a list of them, and puts it into the page with the caption below. Text and lines take the
colours of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from svg import drawings_of, inline_svg


class Drawing(Directive):
    """The directive."""

    required_arguments = 1
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the figure and its caption."""
        (name,) = self.arguments
        if "alt" not in self.options:
            raise self.error(f"the drawing {name} has no text for those who cannot see it: :alt:")
        each = drawings_of(importlib.import_module(f"drawings.{name}").draw)
        svg = "".join(
            inline_svg(one, self.options["alt"], f"{name}{n}") for n, one in enumerate(each)
        )
        caption = nodes.container(classes=["drawing-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        picture = nodes.raw("", f'<div class="drawing-picture">{svg}</div>', format="html")
        return [nodes.container("", picture, caption, classes=["drawing"])]


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directive."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
