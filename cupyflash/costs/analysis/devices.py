"""What GPUs can do according to their data sheets: frozen facts, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...arrays import cuda_device
from ...arrays.dtypes import FLOATS
from ...errors import ArgumentError
from ...hints.did_you_mean import did_you_mean
from .traffic import itemsize

MIB, GB = 2**20, 10**9
# Capability -> float32 units of a multiprocessor, by the programming guide's table of throughputs.
LANES = {(7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128}


@dataclass(frozen=True)
class Device:
    """A GPU's limits, as its maker states them.

    Attributes
    ----------
    name : str
        Its name in `DEVICES`.
    bandwidth : float
        Bandwidth of the device's memory, bytes per second.
    peak : mapping of str to float
        FLOP per second by dtype: float16 and bfloat16 on tensor cores without sparsity and with
        float32 accumulation, float32 and float64 outside tensor cores.
    sram : int
        Bytes of shared memory of one multiprocessor.
    multiprocessors : int
        Number of multiprocessors.
    source : str
        Where the numbers are published.
    driver_names : tuple of str
        The driver's names for it, in lower case. Other models with a similar name have other
        limits.
    capability : tuple of int
        Compute capability, (9, 0) for Hopper.
    l2 : int
        Bytes of the L2 cache, through which all traffic passes.
    matrix_peak : mapping of str to float
        FLOP per second on tensor cores in types for which `peak` excludes them: "float64", "tf32",
        which are 32-bit numbers whose fractions are cut to 11 bits, and "float8".
    memory : int
        Bytes of the device's memory.
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
    memory: int

    @property
    def clock(self) -> float:
        """Cycles per second for which the peak of float32 is stated."""
        return self.peak["float32"] / (2 * LANES[self.capability] * self.multiprocessors)

    @property
    def sram_bandwidth(self) -> float:
        """Bytes per second of the shared memory of all multiprocessors: 32 banks of 4 bytes."""
        return self.multiprocessors * 128 * self.clock

    def sram_elements(self, dtype: str) -> int:
        """Return M of one multiprocessor, for `block_sizes` and `theorem_2`.

        Parameters
        ----------
        dtype : str
            Of q, k and v.

        Returns
        -------
        int
            How many elements its shared memory holds.
        """
        return self.sram // itemsize(dtype)

    def ridge(self, dtype: str) -> float:
        """Return the arithmetic intensity from which arithmetic, not bandwidth, is the limit.

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
            If no peak is known for the dtype.
        """
        if str(dtype) not in self.peak:
            raise ArgumentError(
                f"dtype: got {dtype!r}, for which no peak of the {self.name} is known; expected "
                f"one of {', '.join(self.peak)}"
            )
        return self.peak[str(dtype)]


def _peak(half: float, bfloat16: float | None, single: float, double: float) -> Mapping[str, float]:
    """Return peaks given in TFLOP/s."""
    peaks = zip(FLOATS, (half, bfloat16, single, double), strict=True)
    return MappingProxyType({name: n * 1e12 for name, n in peaks if n is not None})


def _matrix_peak(
    double: float | None, single: float, float8: float | None = None
) -> Mapping[str, float]:
    """Return peaks of tensor cores given in TFLOP/s; None where none is stated."""
    peaks = {"float64": double, "tf32": single, "float8": float8}
    return MappingProxyType({name: n * 1e12 for name, n in peaks.items() if n is not None})


_TABLE = (
    "shared memory: CUDA C++ Programming Guide, technical specifications per compute capability"
)
_A100 = (
    "NVIDIA A100 Tensor Core GPU data sheet (memory; bandwidth of the SXM model, peaks) and A100 "
    f"architecture white paper; {_TABLE}"
)
_H100 = f"NVIDIA H100 Tensor Core GPU architecture white paper, SXM5; {_TABLE}"
_H200 = f"NVIDIA H200 data sheet (memory, bandwidth); the chip is the H100's: {_H100}"
_H20 = (
    "NVIDIA H20 data sheet (bandwidth, peaks, second-level cache), 96 GB; multiprocessors as the "
    f"driver counts them; {_TABLE}"
)
_A10 = (
    "NVIDIA A10 data sheet (bandwidth, peaks); float64 at 1/64 of float32, and the second-level "
    f"cache of the GA102, by the Ampere GA102 white paper; {_TABLE}"
)
_L40S = (
    "NVIDIA L40S data sheet (bandwidth, peaks); float64 at 1/64 of float32, and the second-level "
    f"cache of the AD102, by the Ada architecture white paper; {_TABLE}"
)
_RTX_4090 = (
    "NVIDIA Ada architecture white paper, GeForce RTX 4090 (16-bit types with float32 "
    f"accumulation); {_TABLE}"
)
_B200 = (
    "NVIDIA HGX B200 data sheet (peaks, an eighth of the board's) and DGX B200 data sheet "
    "(memory, bandwidth); second-level cache: Blackwell Tuning Guide; multiprocessors as the "
    f"driver counts them; {_TABLE}"
)
_HOPPER = _peak(989.4, 989.4, 66.9, 33.5)
_HOPPER_MATRIX = _matrix_peak(66.9, 494.7, 1978.9)

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
                16 * GB,
            ),
            Device(
                "A10",
                600e9,
                _peak(125, 125, 31.2, 31.2 / 64),
                100 * 1024,
                72,
                _A10,
                ("nvidia a10",),
                (8, 6),
                6 * MIB,
                _matrix_peak(None, 62.5),
                24 * GB,
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
                40 * GB,
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
                80 * GB,
            ),
            Device(
                "L40S",
                864e9,
                _peak(362.05, 362.05, 91.6, 91.6 / 64),
                100 * 1024,
                142,
                _L40S,
                ("nvidia l40s",),
                (8, 9),
                96 * MIB,
                _matrix_peak(None, 183, 733),
                48 * GB,
            ),
            Device(
                "RTX 4090",
                1008e9,
                _peak(165.2, 165.2, 82.6, 82.6 / 64),
                100 * 1024,
                128,
                _RTX_4090,
                ("nvidia geforce rtx 4090",),
                (8, 9),
                72 * MIB,
                _matrix_peak(None, 82.6, 330.3),
                24 * GB,
            ),
            Device(
                "H20",
                4000e9,
                _peak(148, 148, 44, 1),
                228 * 1024,
                78,
                _H20,
                ("nvidia h20",),
                (9, 0),
                60 * MIB,
                _matrix_peak(None, 74, 296),
                96 * GB,
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
                80 * GB,
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
                141 * GB,
            ),
            Device(
                "B200",
                8000e9,
                _peak(2250, 2250, 75, 37),
                228 * 1024,
                148,
                _B200,
                ("nvidia b200",),
                (10, 0),
                126 * MIB,
                _matrix_peak(37, 1125, 4500),
                180 * GB,
            ),
        )
    }
)


def _meant(name: str) -> list[Device]:
    """Return the devices that a name may mean."""
    plain = _plain(name)
    exact = [x for x in DEVICES.values() if plain == _plain(x.name) or _at_hand(name, x)]
    return exact or [x for x in DEVICES.values() if plain == _plain(x.name.partition("-")[0])]


def _plain(name: str) -> str:
    return name.lower().translate(str.maketrans("", "", "-_ "))


def _at_hand(driver_name: str, known: Device) -> bool:
    return driver_name.lower() in known.driver_names


def device(name: str | None = None) -> Device:
    """Return the facts of a device.

    Parameters
    ----------
    name : str, optional
        A name in `DEVICES`, in any case and with or without its hyphens and spaces; the part of a
        name before a hyphen, if only one device has it ("H100" is H100-SXM, but "H20" is never
        H200); or the driver's name. Without it, the current device is meant, which needs CuPy.

    Returns
    -------
    Device
        The limits that its maker states.

    Raises
    ------
    ArgumentError
        If the device is not known, or no name is given and no GPU is available.
    """
    known = f"expected one of {', '.join(DEVICES)}"
    if name is not None:
        meant = _meant(str(name))
        if len(meant) == 1:
            return meant[0]
        if meant:
            names = " or ".join(each.name for each in meant)
            raise ArgumentError(
                f"device: got {name!r}, which several devices are called; expected {names}"
            )
        near = did_you_mean(str(name), DEVICES)
        raise ArgumentError(f"device: got {name!r}, which is not known; {known}{near}")
    try:
        here = cuda_device.here().name
    except Exception as error:
        raise ArgumentError(
            f"device: got None, but no GPU is available ({error}); {known}"
        ) from error
    for each in DEVICES.values():
        if _at_hand(here, each):
            return each
    raise ArgumentError(f"device: got None, and the current GPU, {here!r}, is not known; {known}")
