"""`cupyflash info`, and how the demo chooses a device: what is missing is said, with a remedy."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import H200, T4, V100, fails, fake_cupy
from test_cli import run

import cupyflash.kernels_cu
from cupyflash.commands import info
from cupyflash.commands.demo import choose_device
from cupyflash.commands.main import main
from cupyflash.gpu.kernels.sm90 import FORWARD


@pytest.fixture
def said(monkeypatch, capsys):
    """What `info` says with some CuPy, by label; what has no label continues the line before."""

    def ask(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        assert main(["info"]) == 0
        return parsed(capsys.readouterr().out)

    return ask


def parsed(text):
    found, label = {}, ""
    for line in text.splitlines():
        assert len(line) <= 100 or " " not in line[11:], line  # only a path may be longer
        label = line[:11].strip() or label
        found[label] = f"{found.get(label, '')} {line[11:]}".strip()
    return found


def test_info(tmp_path):
    cache = tmp_path / "kernels"
    done = run(tmp_path, "info", CUPYFLASH_NUM_THREADS="1", CUPYFLASH_CACHE_DIR=str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    lines = parsed(done.stdout)
    assert lines["cupyflash"] == cupyflash.__version__
    assert lines["NumPy"] == np.__version__
    assert lines["Numba"] == importlib.metadata.version("numba")
    assert lines["threads"].startswith("1 ")
    assert "CUPYFLASH_NUM_THREADS" in lines["threads"]
    assert lines["CPU cache"].startswith(f"{cache} writable")
    assert re.search(r"\d+ usable core", lines["CPU"])
    try:
        version = importlib.import_module("cupy").__version__
    except ImportError:
        assert '".[cuda12]"' in lines["CuPy"]
        assert '".[cuda13]"' in lines["CuPy"]
    else:
        assert lines["CuPy"] == version


def test_a_cpu_cache_that_is_not_writable(tmp_path):
    (tmp_path / "file").touch()
    done = run(tmp_path, "info", CUPYFLASH_CACHE_DIR=str(tmp_path / "file" / "kernels"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "NOT used" in parsed(done.stdout)["CPU cache"]
    assert "set CUPYFLASH_CACHE_DIR" in parsed(done.stdout)["CPU cache"]


def test_without_cupy(said):
    lines = said(None)
    assert lines["CuPy"].startswith("not installed")
    assert 'pip install ".[cuda12]"' in lines["CuPy"]
    assert '".[cuda13]"' in lines["CuPy"]
    assert lines["GPU"].startswith("none")


@pytest.mark.parametrize(
    ("statement", "words", "remedy"),
    [
        ("import nothing_of_that_name", "nothing_of_that_name", 'pip install ".[cuda12]"'),
        ("raise ImportError('libcuda is broken')", "libcuda is broken", '".[cuda13]"'),
        ("raise PermissionError(13, 'no', '/x')", "PermissionError", "set CUPY_CACHE_DIR"),
        ("raise ValueError", "ValueError", '".[cuda13]"'),
    ],
)
def test_a_cupy_that_cannot_be_imported(statement, words, remedy, tmp_path, monkeypatch, capsys):
    (tmp_path / "cupy.py").write_text(statement + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert main(["info"]) == 0
    line = parsed(capsys.readouterr().out)["CuPy"]
    assert words in line
    assert remedy in line
    assert words in info.gpu_obstacle()


def test_several_devices(said):
    lines = said(fake_cupy((H200, T4, V100, None)))
    assert lines["CuPy"] == "14.2.0"
    assert lines["CUDA"] == "driver for CUDA up to 13.1; runtime 13.0 (CuPy's)"
    assert lines["NVRTC"].startswith("13.0, ")
    assert lines["GPU 0"].startswith("NVIDIA H200, compute capability 9.0, 140 GiB, ")
    assert "227 KiB of shared memory" in lines["GPU 0"]
    assert "Tesla T4, compute capability 7.5, 15 GiB" in lines["GPU 1"]
    for name in ("GPU 0", "GPU 1"):
        assert "served by" in lines[name]
    found = lines["GPU 0"].partition("tensor cores multiply ")[2].split("; ")
    halves = "float16 and bfloat16 with heads up to {} ({}"
    served = "forward_sm90, forward_sm80, backward_sm80_dkdv,"
    assert found[0].startswith(halves.format(FORWARD.heads["float16"], served))
    tf32 = 'float32 with heads up to {} where precision="tf32x3" ({})'
    assert tf32.format(128, "forward_sm90_tf32") in found
    assert tf32.format(256, "forward_sm80") in found
    assert "float64 with heads up to 128 (forward_sm80, backward_f64_dkdv" in lines["GPU 0"]
    assert "tensor cores are used from compute capability 8.0 on" in lines["GPU 1"]
    assert "NOT supported" in lines["GPU 2"]
    assert "7.5 (Turing)" in lines["GPU 2"]
    assert "served by" not in lines["GPU 2"]
    assert "device is lost" in lines["GPU 3"]


def test_the_kernels_it_names_exist():
    sources = Path(cupyflash.kernels_cu.__file__).parent
    for capability, folders in ((7, 5), ["simt"]), ((8, 0), ["simt", "sm80"]), (
        (9, 0), ["simt", "sm80", "sm90"],
    ):  # fmt: skip
        named = re.findall(
            r"\b(?:forward|backward|decode|list|order|reduce)_\w+", info.served(capability)
        )
        stems = {path.stem for folder in folders for path in (sources / folder).glob("*.cu")}
        assert set(named) == stems - {"single_tiles"}  # which computes no scores


def test_without_a_driver(said):
    lines = said(fake_cupy((), driver=0, nvrtc=None))
    assert lines["CUDA"].startswith("no driver: install")
    assert '".[cuda13]"' in lines["NVRTC"]
    assert "Failure finding libnvrtc.so" in lines["NVRTC"]
    assert lines["GPU"] == "none: there is no NVIDIA driver"


def test_without_a_device(said, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = said(fake_cupy(()))
    assert "cudaErrorNoDevice" in lines["GPU"]
    assert "CUDA_VISIBLE_DEVICES=''" in lines["GPU"]


def test_a_driver_that_is_too_old(said):
    lines = said(fake_cupy((), driver=12080))
    assert "too old" in lines["CUDA"]
    assert '".[cuda12]"' in lines["CUDA"]


def test_versions_that_nobody_tells(said):
    lines = said(fake_cupy((), driver=None, runtime=None, nvrtc=None))
    assert "driver unknown" in lines["CUDA"]
    assert "runtime unknown" in lines["CUDA"]
    assert "no answer of the driver" in lines["CUDA"]
    assert '".[cuda12]"' in lines["NVRTC"]
    assert '".[cuda13]"' in lines["NVRTC"]


def test_where_cupy_keeps_kernels(said, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert said(fake_cupy())["GPU cache"].startswith(f"{tmp_path / 'new' / 'folder'} writable")
    assert not (tmp_path / "new").exists()  # to look is not to make
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    line = said(fake_cupy())["GPU cache"]
    assert "NOT writable" in line
    assert "set CUPY_CACHE_DIR" in line
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert said(fake_cupy())["GPU cache"].startswith(str(tmp_path / ".cupy" / "kernel_cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert said(fake_cupy())["GPU cache"].startswith("in memory only")


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
def test_a_gpu_cache_that_others_can_write(said, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    for mode in (0o777, 0o770, 0o702):
        tmp_path.chmod(mode)
        line = said(fake_cupy())["GPU cache"]
        assert line.startswith(f"{tmp_path} NOT safe: others may write to it")
        assert "chmod go-w" in line
    tmp_path.chmod(0o755)
    assert "writable" in said(fake_cupy())["GPU cache"]
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    assert "NOT safe: it belongs to another user" in said(fake_cupy())["GPU cache"]


# -- the demo's device ----------------------------------------------------------------------------

OBSTACLES = {
    "no CuPy": (None, '".[cuda13]"'),
    "no device": (fake_cupy(()), "cudaErrorNoDevice"),
    "too old": (fake_cupy((V100, H200)), "Tesla V100 is NOT supported"),
    "a lost device": (fake_cupy((None,)), "device is lost"),
    "no NVRTC": (fake_cupy(nvrtc=None), '".[cuda13]"'),
    "no cuBLAS": (fake_cupy(product=fails("no libcublas")), "'cuda-toolkit[cublas]==13.*'"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_the_demo_without_a_usable_gpu(name, monkeypatch, capsys):
    cupy, words = OBSTACLES[name]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    kind, choice = choose_device(None)
    assert kind == "cpu"
    assert words in choice
    assert main(["demo", "--device", "gpu"]) == 1
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split())
    assert not captured.out


def test_the_demo_chooses_a_usable_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy((T4,)))
    for wanted in (None, "gpu"):
        kind, choice = choose_device(wanted)
        assert kind == "gpu"
        assert "--device cpu" in choice
    kind, choice = choose_device("cpu")
    assert kind == "cpu"
    assert "--device gpu" in choice


def test_a_forced_cpu_asks_no_gpu(monkeypatch):
    monkeypatch.setattr(info, "gpu_obstacle", fails("nobody may ask"))
    assert choose_device("cpu")[0] == "cpu"
