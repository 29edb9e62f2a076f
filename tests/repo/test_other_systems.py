"""Programs on Windows and macOS, simulated by what Python's modules lack there.

The workflow `tests` in `.github/workflows/` runs the tests on these systems themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from halves import mostly_thorough

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
SYSTEMS = "nt", "darwin"


def run(system, program, folder, **environment):
    """Run a program on a system; return what it printed, with warnings as errors."""
    begin = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n"
    begin += f"import other_system; other_system.become({system!r})\n"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", begin + textwrap.dedent(program)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


CALLS = """
    import os
    import numpy as np
    import cupyflash
    from cupyflash import files, masks, streamed
    from cupyflash.bench import measure
    from cupyflash.commands import main
    from cupyflash.gpu import disk_cache
    from cupyflash.reference.cpu import amx, jit, openmp, thread_limits

    assert not hasattr(os, "sched_getaffinity")
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, 40, 16)).astype(np.float32)
    out, vjp = cupyflash.attention_vjp(q, k, v, mask=masks.causal())
    s = np.where(np.tri(40, dtype=bool), q @ k.swapaxes(-1, -2) / 4, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert np.abs(out - p @ v).max() < 1e-5
    assert np.isfinite(vjp(np.ones_like(out)).dq).all()
    held = np.lib.format.open_memmap("x.npy", "w+", q.dtype, q.shape)
    held[...] = k
    parts = streamed.attention(q, held, v, chunk=16, mask=masks.causal())
    assert np.abs(parts - out).max() < 1e-5
    assert thread_limits.num_threads() >= 1 and thread_limits.cpu_quota() is None
    assert openmp.loaded(files.Path(".")) is None
    assert jit.cache_obstacle() == "", jit.cache_obstacle()
    for text in ("one", "two"):
        files.write_text("made.txt", text)
    assert open("made.txt").read() == "two"
    meter = measure.Cpu()
    assert meter.peak_memory(lambda: np.ones(10**6)) >= 8 * 10**6
    assert meter.free_memory() is None
    assert main.main(["info"]) == 0
    assert main.main(["explain", "1,2,64,16"]) == 0
"""


@mostly_thorough(
    "system", SYSTEMS, quick=["nt"], why="a process of its own; Windows lacks what macOS lacks"
)
def test_calls_and_commands(system, tmp_path):
    said = run(system, CALLS, tmp_path)
    assert "Traceback" not in said


KEPT = """
    import numpy as np
    import cupyflash

    x = np.ones((1, 2, 40, 16), np.float32)
    assert (cupyflash.attention(x, x, x) == 1).all()
"""


@pytest.mark.thorough("kernels are compiled twice; the folder of this machine is tried quickly")
@pytest.mark.parametrize("system", SYSTEMS)
def test_kernels_are_kept(system, tmp_path):
    """A second process compiles nothing, and finds no files that are left behind."""
    folder = tmp_path / "kept"
    folder.mkdir()
    first = run(system, KEPT, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert "compiling" in first
    names = [path.name for path in folder.iterdir()]
    assert names
    assert all(name.endswith(".bin") for name in names)
    assert "compiling" not in run(system, KEPT, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))


@pytest.mark.thorough("a process of its own for a rare case")
def test_a_kernel_that_another_process_reads_is_kept(tmp_path):
    """Windows replaces no file that is open; the kernel there is the same."""
    program = """
    import os
    from cupyflash.reference.cpu import jit
    folder = None
    jit.cache_folder().mkdir(parents=True)
    jit._write_file(folder, "kernel.bin", b"one")
    held = os.open(jit.cache_folder() / "kernel.bin", os.O_RDONLY)
    jit._write_file(folder, "kernel.bin", b"one")
    assert sorted(os.listdir(jit.cache_folder())) == ["kernel.bin"]
    os.close(held)
    """
    run("nt", program, tmp_path, CUPYFLASH_CACHE_DIR=str(tmp_path / "kept"))
