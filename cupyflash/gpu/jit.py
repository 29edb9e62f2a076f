"""Compiles a specialisation to a kernel that can be launched, once per device.

CuPy compiles with NVRTC for the current device, and keeps the result on disk (``CUPY_CACHE_DIR``,
or ``~/.cupy/kernel_cache``); the key is the text and the compiler's version. The folder holds
native code, so there is one warning if others can write to it.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from typing import Any

from . import disk_cache
from .source import source
from .specialisation import Specialisation

# Compilers before 12.9 refuse a second -arch, and CuPy already gives that of the device. Only
# kernels that need another one ask for it.
OPTIONS = ("-std=c++17",)
_DEFAULT_SHARED_MEMORY = 48 * 1024  # what a block may have without a request

# To load a kernel may wait for what the device does, such as messages that wait for another device:
# its thread must be able to load a kernel meanwhile.
_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
_kernels: dict[tuple[int, str, bool], Any] = {}


# A text is some 200 KB, of which to make and to hash one takes longer than all else of a look-up.
_text = functools.lru_cache(maxsize=256)(source)


def kernel(special: Specialisation, device: int) -> Any:
    """Return the kernel of a specialisation on a device, which must be the current one.

    Parameters
    ----------
    special : Specialisation
        What to compile.
    device : int
        The device.
    """
    text = _text(special)
    key = (device, text, special.tiles.beside)
    found = _kernels.get(key)
    if found is None:
        with _locks[device]:
            found = _kernels.get(key)
            if found is None:
                tiles = special.tiles
                found = _compiled(
                    special.name, text, tiles.shared_memory, special.architecture, tiles.beside
                )
                _kernels[key] = found
    return found


def _compiled(
    name: str,
    text: str,
    shared_memory: int,
    architecture: str | None = None,
    beside: bool = False,
) -> Any:
    import cupy

    disk_cache.warn_once()
    options = OPTIONS if architecture is None else (*OPTIONS, f"-arch={architecture}")
    try:
        made = cupy.RawModule(code=text, options=options).get_function(name)
        if shared_memory > _DEFAULT_SHARED_MEMORY:
            made.max_dynamic_shared_size_bytes = shared_memory
        if beside:
            # Drivers leave a kernel the least that it needs, and the rest to the L1 cache; a kernel
            # that needs another share then waits until the SM is empty.
            made.preferred_shared_memory_carveout = 100  # percent
    except Exception as error:
        error.add_note(f"while compiling the kernel {name}")
        raise
    return made


def compiled() -> int:
    """Return how many kernels this process holds, over all devices."""
    return len(_kernels)
