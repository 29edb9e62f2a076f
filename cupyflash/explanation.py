"""What a call would run, worked out from its sizes: kernels, tiles, memory, traffic, time."""

from .costs.explanation import *  # noqa: F403, the names of its __all__
from .costs.explanation import __all__  # noqa: F401, for "import *"
