"""All problems that mutants are tried with, and those that a change may matter to."""

from __future__ import annotations

from . import hopper_problems, tensor_problems
from .problems import Case, cases

# Words in the names of files that tensor cores alone have use for, and what tries those.
OF_TENSOR_CORES = {
    "sm80": (tensor_problems,), "f64": (tensor_problems,), "sm90": (hopper_problems,),
    "warpgroup": (hopper_problems,), "fragment": (tensor_problems, hopper_problems),
}  # fmt: skip


def problems(files: set[str] | None = None) -> list[Case]:
    """Return all problems; of files that will be changed those that should notice it."""
    chosen = [tensor_problems, hopper_problems]
    if files is not None:
        words = {word for word in OF_TENSOR_CORES for file in files if word in file}
        chosen = [x for x in chosen if any(x in OF_TENSOR_CORES[word] for word in words)]
    return [*cases(), *(case for x in chosen for case in x.cases())]
