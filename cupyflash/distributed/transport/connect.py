"""From what users have, ranks of MPI or of threads, to a communicator."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from ...errors import ArgumentError, ArgumentTypeError
from ...hints.install import extra
from .communication import Communicator


def communicator(
    ranks: object, device: SupportsIndex | None = None, *, copies: bool = True
) -> Communicator:
    """Return what the functions of this module take as `comm`.

    Parameters
    ----------
    ranks : mpi4py.MPI.Comm or Communicator
        An intracommunicator of mpi4py, for instance ``MPI.COMM_WORLD``; all its ranks call this
        function together. A `Communicator` is returned as it is.
    device : int, optional
        The GPU of this rank, for calls on CuPy arrays; each rank has another one. Connected GPUs of
        one machine copy arrays to each other, and all others send them by NCCL.
    copies : bool
        With `device`: whether connected GPUs do so. If it is False on a rank, all that the rank
        sends and receives goes by NCCL.

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
    if device is not None:
        return _on_gpus(communicator(ranks), device, copies)
    if type(ranks).__module__.partition(".")[0] == "mpi4py":
        from .mpi import Mpi

        return Mpi(ranks)
    if isinstance(ranks, Communicator):
        return ranks
    raise ArgumentTypeError(
        f"communicator: got {type(ranks).__name__}; expected a communicator of mpi4py, as "
        "MPI.COMM_WORLD, or one of distributed.Threads(n).ranks."
    )


def _on_gpus(ranks: Communicator, device: SupportsIndex, copies: bool) -> Communicator:
    try:
        number = operator.index(device)
    except TypeError:
        raise ArgumentTypeError(
            f"device: got {device!r}; expected the number of a GPU of this process."
        ) from None
    try:
        import cupy
        from cupy.cuda import nccl  # noqa: F401, its absence is told here
    except ImportError as error:
        raise ArgumentError(
            f"device: got {number}, and NCCL cannot be used ({error}). Install it with CuPy: "
            f"{extra('cuda12,nccl', 'cuda13,nccl13')}. Without device=, calls take NumPy arrays."
        ) from error
    count = cupy.cuda.runtime.getDeviceCount()
    if not 0 <= number < count:
        raise ArgumentError(f"device: got {number}; expected 0 to {count - 1}.")
    from .nccl import Nccl

    return Nccl(ranks, number, copies)
