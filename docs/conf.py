"""How Sphinx builds the site; CONTRIBUTING.md has the command.

It documents the installed cupyflash, as the tests test the installed one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cupyflash

sys.path.insert(0, str(Path(__file__).parent))  # drawing.py, mathml.py, records.py, tables.py

project = "cupyflash"
author = "the authors of cupyflash"
version = release = cupyflash.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # for its role `autolink`
    "numpydoc",
    "drawing",
    "mathml",
    "records",
    "tables",
]
exclude_patterns = ["drawings"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# A word in single backticks in a docstring is a link where it names something on these pages, and
# emphasised where it does not, as parameters do not.
default_role = "autolink"
autosummary_generate = False
autodoc_typehints = "none"  # the docstrings say more: shapes, dtypes, units
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

# Every other name that is linked has to be found.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(numpy|hypothesis)\..*")]

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"cupyflash {release}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
