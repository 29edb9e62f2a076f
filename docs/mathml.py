"""Formulas as MathML, made when the site is built: a page needs neither scripts nor a network.

docutils, which Sphinx stands on, turns TeX into MathML. A formula that it cannot read is a warning,
with which the site does not build.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def mathml(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    """Return a formula's MathML."""
    tex = node.astext()
    try:
        return str(tex2mathml(tex, as_block=as_block))
    except MathError as error:
        LOGGER.warning("no MathML can be made of the formula %r: %s", tex, error, location=node)
        return ""


def visit_math(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_math_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own, which can be scrolled where the page is narrow."""
    translator.body.append(f'<div class="formula">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the renderer."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
