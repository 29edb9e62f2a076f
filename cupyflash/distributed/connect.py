"""From what users have, ranks of MPI or of threads, to a communicator."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentTypeError
from .communication import Communicator


def communicator(ranks: Any) -> Communicator:
    """Return what the functions of this module take as `comm`.

    Parameters
    ----------
    ranks : mpi4py.MPI.Comm or Communicator
        An intracommunicator of mpi4py, for instance ``MPI.COMM_WORLD``; all its ranks call this
        function together. A `Communicator` is returned as it is.

    Returns
    -------
    Communicator
        The ranks. Calls use a duplicate of mpi4py's communicator, so that no message of the
        program is mistaken for theirs.

    Raises
    ------
    ArgumentTypeError
        It is neither.
    """
    if type(ranks).__module__.partition(".")[0] == "mpi4py":
        from .mpi import Mpi

        return Mpi(ranks)
    if isinstance(ranks, Communicator):
        return ranks
    raise ArgumentTypeError(
        f"communicator: got {type(ranks).__name__}; expected a communicator of mpi4py, as "
        "MPI.COMM_WORLD, or one of distributed.Threads(n).ranks."
    )
