"""What GPUs can do by their data sheets: frozen facts, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..arrays import cuda_device
from ..arrays.dtypes import FLOATS
from ..errors import ArgumentError
from .traffic import itemsize

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """A GPU's limits, as its maker states them.

    Attributes
    ----------
    name : str
        As in `DEVICES`.
    bandwidth : float
        Of the device's memory, bytes per second.
    peak : mapping of str to float
        FLOP per second by dtype: float16 and bfloat16 on tensor cores without sparsity and with
        float32 accumulation, float32 and float64 outside tensor cores.
    sram : int
        Bytes of shared memory of a multiprocessor.
    multiprocessors : int
        How many there are.
    source : str
        Where the numbers stand.
    driver_names : tuple of str
        What the driver calls it, in lower case. Other models of a name have other limits.
    capability : tuple of int
        Compute capability, (9, 0) for Hopper.
    l2 : int
        Bytes of the second-level cache, through which everything passes.
    matrix_peak : mapping of str to float
        FLOP per second on tensor cores in types that `peak` tells without them: "float64", and
        "tf32", numbers of 32 bits whose fractions are cut to 11.
    """

    name: str
    bandwidth: float
    peak: Mapping[str, float]
    sram: int
    multiprocessors: int
    source: str
    driver_names: tuple[str, ...] = field(repr=False)
    capability: tuple[int, int]
    l2: int
    matrix_peak: Mapping[str, float]

    def sram_elements(self, dtype: str) -> int:
        """Return M of a multiprocessor, for `block_sizes` and `theorem_2`.

        Parameters
        ----------
        dtype : str
            Of q, k and v.

        Returns
        -------
        int
            Elements that its shared memory holds.
        """
        return self.sram // itemsize(dtype)

    def ridge(self, dtype: str) -> float:
        """Return the arithmetic intensity from which on the arithmetic is the limit.

        Parameters
        ----------
        dtype : str
            Of q, k and v.

        Returns
        -------
        float
            FLOP per byte.
        """
        return self.peak_of(dtype) / self.bandwidth

    def peak_of(self, dtype: str) -> float:
        """Return the peak in a dtype.

        Parameters
        ----------
        dtype : str
            Of q, k and v.

        Returns
        -------
        float
            FLOP per second.

        Raises
        ------
        ArgumentError
            If the device does not know the dtype.
        """
        if str(dtype) not in self.peak:
            raise ArgumentError(
                f"dtype={dtype!r}: no peak of the {self.name} is known; there are "
                f"{', '.join(self.peak)}"
            )
        return self.peak[str(dtype)]


def _peak(half: float, bfloat16: float | None, single: float, double: float) -> Mapping[str, float]:
    """Return peaks given in TFLOP/s."""
    peaks = zip(FLOATS, (half, bfloat16, single, double), strict=True)
    return MappingProxyType({name: n * 1e12 for name, n in peaks if n is not None})


def _matrix_peak(double: float, single: float) -> Mapping[str, float]:
    """Return peaks of tensor cores given in TFLOP/s."""
    return MappingProxyType({"float64": double * 1e12, "tf32": single * 1e12})


_TABLE = (
    "shared memory: CUDA C++ Programming Guide, technical specifications per compute capability"
)
_A100 = (
    "NVIDIA A100 Tensor Core GPU data sheet (bandwidth of the SXM model, peaks) and A100 "
    f"architecture white paper; {_TABLE}"
)
_H100 = f"NVIDIA H100 Tensor Core GPU architecture white paper, SXM5; {_TABLE}"
_H200 = f"NVIDIA H200 data sheet (bandwidth); the chip is the H100's: {_H100}"
_HOPPER = _peak(989.4, 989.4, 66.9, 33.5)
_HOPPER_MATRIX = _matrix_peak(66.9, 494.7)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        each.name: each
        for each in (
            Device(
                "T4",
                320e9,
                _peak(65, None, 8.1, 8.1 / 32),
                64 * 1024,
                40,
                "NVIDIA T4 data sheet; float64 at 1/32 of float32, and the second-level cache of "
                "the TU104, by the Turing white paper; "
                f"{_TABLE}",
                ("tesla t4", "nvidia t4"),
                (7, 5),
                4 * MIB,
                MappingProxyType({}),
            ),
            Device(
                "A100-40GB",
                1555e9,
                _peak(312, 312, 19.5, 9.7),
                164 * 1024,
                108,
                _A100,
                ("nvidia a100-sxm4-40gb", "nvidia a100-pcie-40gb"),
                (8, 0),
                40 * MIB,
                _matrix_peak(19.5, 156),
            ),
            Device(
                "A100-80GB",
                2039e9,
                _peak(312, 312, 19.5, 9.7),
                164 * 1024,
                108,
                _A100,
                ("nvidia a100-sxm4-80gb",),
                (8, 0),
                40 * MIB,
                _matrix_peak(19.5, 156),
            ),
            Device(
                "H100-SXM",
                3350e9,
                _HOPPER,
                228 * 1024,
                132,
                _H100,
                ("nvidia h100 80gb hbm3",),
                (9, 0),
                50 * MIB,
                _HOPPER_MATRIX,
            ),
            Device(
                "H200",
                4800e9,
                _HOPPER,
                228 * 1024,
                132,
                _H200,
                ("nvidia h200",),
                (9, 0),
                50 * MIB,
                _HOPPER_MATRIX,
            ),
        )
    }
)


def device(name: str | None = None) -> Device:
    """Return the facts of a device.

    Parameters
    ----------
    name : str, optional
        A name in `DEVICES` or the beginning of one alone, in any case. Without it, the current
        device's, which needs CuPy.

    Returns
    -------
    Device
        What its maker states.

    Raises
    ------
    ArgumentError
        If nothing is known of the device, or there is none at hand.
    """
    known = f"known are {', '.join(DEVICES)}"
    if name is not None:
        begun = [x for x in DEVICES.values() if x.name.lower().startswith(str(name).lower())]
        exact = [x for x in begun if x.name.lower() == str(name).lower()]
        if name and len(exact or begun) == 1:
            return (exact or begun)[0]
        raise ArgumentError(f"device={name!r}: nothing is known of it; {known}")
    try:
        here = cuda_device.here().name
    except Exception as error:
        raise ArgumentError(f"there is no device at hand ({error}): name one; {known}") from error
    for each in DEVICES.values():
        if here.lower() in each.driver_names:
            return each
    raise ArgumentError(f"nothing is known of the device at hand, {here!r}; {known}")
