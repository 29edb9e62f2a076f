"""Time and peak memory of attention against sequence length, beside standard attention and PyTorch.

`cupyflash bench` is this on the command line; from Python::

    from cupyflash import bench
    from cupyflash.bench import measure

    suite = bench.SUITES["cpu"]["quick"]
    for case in suite.cases():
        row = bench.run_case(measure.Cpu(), case, bench.CONTENDERS, runs=5, seconds=1.0)
"""

from .cases import Case, made, shape_of, variant_of
from .codes import CupyflashFloat8
from .contenders import Contender, Cupyflash, Job, RefusalError, Standard
from .over_cache import CupyflashCodes, CupyflashPages
from .results import Report, Result, Row, TaskRow
from .run import run_case, run_task
from .runtime_peers import RUNTIMES
from .suites import CODES, PAGES, SMALL_PAGES, SUITES, TASKS, Suite, own_shapes
from .tasks import Task, TaskSuite
from .torch_peers import PEERS

CONTENDERS: tuple[Contender, ...] = (
    Cupyflash(),
    Standard(),
    CupyflashPages(PAGES, 16),
    CupyflashPages(SMALL_PAGES, 1),
    *(CupyflashCodes(name, kv_dtype) for name, kv_dtype in CODES.items()),
    CupyflashFloat8(),
    *PEERS,
    *RUNTIMES,
)

__all__ = [
    "CONTENDERS",
    "SUITES",
    "TASKS",
    "Case",
    "Contender",
    "Cupyflash",
    "CupyflashCodes",
    "CupyflashFloat8",
    "CupyflashPages",
    "Job",
    "RefusalError",
    "Report",
    "Result",
    "Row",
    "Standard",
    "Suite",
    "Task",
    "TaskRow",
    "TaskSuite",
    "made",
    "own_shapes",
    "run_case",
    "run_task",
    "shape_of",
    "variant_of",
]
