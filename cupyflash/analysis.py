"""What attention costs: HBM traffic of the papers' algorithms, block sizes, FLOPs, rooflines.

Everything is computed from sizes; nothing runs and no device is needed. Traffic and the on-chip
peak are counted in elements of one head. The algorithms themselves, which count as they run, are
``cupyflash.reference.algorithms``; tests hold their counts equal to these formulas.
"""

from .costs.analysis import *  # noqa: F403, the names of its __all__
from .costs.analysis import __all__  # noqa: F401, for "import *"
