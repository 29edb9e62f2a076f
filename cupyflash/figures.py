"""Pictures of masks: which tiles of the score matrix are skipped, masked, or computed in full.

A figure is an SVG document, which notebooks show, and the same picture in characters, for a
terminal.
"""

from .costs.figures import *  # noqa: F403, the names of its __all__
from .costs.figures import __all__  # noqa: F401, for "import *"
