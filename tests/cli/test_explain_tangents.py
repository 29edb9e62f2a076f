"""`explain` of tangents and of second derivatives: kernels, products, bytes and memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, masks
from cupyflash.commands.main import main
from cupyflash.reference.cpu.forward_tangent_call import ForwardTangentCall

SHAPE = (2, 4, 1000, 64)


def explain(*shapes, **options):
    return cupyflash.explain(
        *shapes, **{"device": "H200", "compile": False, "tangents": True} | options
    )


def test_the_kernels_are_those_of_the_plan():
    x = np.zeros(SHAPE, np.float32)
    plan = cupyflash.plan(x, x, x, mask=masks.causal(), tangents=True)
    made = cupyflash.explain(x, mask=masks.causal(), tangents=True, compile=False)
    (kernel,) = made.kernels
    assert (kernel.name, kernel.block_q, kernel.block_kv) == (
        plan.kernel,
        plan.block_q,
        plan.block_kv,
    )
    assert (kernel.computes, made.tangents) == ("out, log-sum-exp and their tangents", True)
    assert made.reason == plan.reason
    made = cupyflash.explain(x, mask=masks.causal(), tangents=True, backward=True)
    assert [each.computes for each in made.kernels] == [
        "out, log-sum-exp and their tangents", "tangents of dk and dv", "tangent of dq",
    ]  # fmt: skip
    made = explain(SHAPE, dtype="float32")
    assert [each.name for each in made.kernels] == ["forward_simt_tangent"]


def test_the_cpu_visits_the_tiles_that_are_explained():
    x = np.random.default_rng(0).standard_normal((2, 3, 700, 16)).astype(np.float32)
    mask = masks.window(100, 0)
    made = cupyflash.explain(x, mask=mask, tangents=True, backward=True, compile=False)
    out, lse = cupyflash.attention(x, x, x, mask=mask, return_lse=True)
    visited = []
    original = ForwardTangentCall.__call__

    def counted(self, *args):
        original(self, *args)
        visited.append(self.visited)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardTangentCall, "__call__", counted)
        cupyflash.attention_backward_jvp(x, x, x, x, out, lse, x, x, x, mask=mask)
    assert visited == [made.main.tiles.visited]


@pytest.mark.parametrize("backward", [False, True])
def test_products_and_bytes_by_hand(backward):
    # One head of 256 on the CPU: one tile.
    made = explain(
        (256, 64), (256, 64), (256, 40), device="cpu", backward=backward, dtype="float32"
    )
    pairs, q, v, row = 256 * 256, 256 * 64 * 4, 256 * 40 * 4, 256 * 4
    products = [kernel.flops for kernel in made.kernels]
    forward = 2 * pairs * (3 * 64 + 3 * 40)
    inputs = {"q": q, "tq": q, "k": q, "tk": q, "v": v, "tv": v}
    assert products[0] == forward
    assert made.kernels[0].once.reads == inputs
    assert made.kernels[0].once.writes == {"o": v, "to": v, "lse": row, "tlse": row}
    if not backward:
        assert (
            made.flops
            == forward
            == 3
            * cupyflash.explain(
                (256, 64), (256, 64), (256, 40), device="cpu", dtype="float32"
            ).flops
        )
        assert made.least.reads == inputs
        assert made.memory == 2 * (v + row)
        assert made.standard.memory == made.memory + 4 * pairs * 4
        return
    assert products[1:] == [2 * pairs * (5 * 64 + 3 * 40), 2 * pairs * (5 * 64 + 2 * 40)]
    assert made.flops == 2 * pairs * (10 * 64 + 5 * 40)
    rows = {"do": v, "tdo": v, "lse": row, "tlse": row, "delta": row, "tdelta": row}
    assert made.kernels[1].once.reads == inputs | rows
    assert made.kernels[1].once.writes == {"tdk": q, "tdv": v}
    assert made.kernels[2].once.reads == inputs | rows
    assert made.least.writes == {"tdq": q, "tdk": q, "tdv": v, "to": v, "tlse": row}
    assert made.memory == 2 * q + v + (v + row) + 4 * v + 256 * 40 + 4 * row  # results, scratch
    assert made.standard.matrices == 7
    assert made.standard.traffic.total > 20 * pairs * 4


# Run in a process of its own: what others left on the heap would count as the call's.
MEASURED = """
import sys
import numpy as np
import cupyflash
from cupyflash import masks
from cupyflash.bench import measure

mask = masks.window(64, 0)
q = np.random.default_rng(0).standard_normal((16, 4096, 64)).astype(sys.argv[1])
out, lse = cupyflash.attention(q, q, q, mask=mask, return_lse=True)

def call():
    if sys.argv[2] == "True":
        return cupyflash.attention_backward_jvp(out, q, q, q, out, lse, q, q, q, mask=mask)
    return cupyflash.attention_jvp(q, q, q, q, q, q, mask=mask, return_lse=True)

call()  # loads its kernels
print(min(measure.Cpu().peak_memory(call) for _ in range(2)))
"""


@pytest.mark.thorough("measures; the quick half checks what is allocated by hand")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_is_what_a_call_takes(dtype, backward, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")  # threads may not overlap, scratches neither
    made = explain(
        (16, 4096, 64), dtype=dtype, mask=masks.window(64, 0), device="cpu", backward=backward
    )
    command = [sys.executable, "-c", MEASURED, dtype, str(backward)]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert abs(int(done.stdout) - made.memory) <= 0.1 * made.memory + 4_000_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8_e4m3fn"}, "tangents: got it with dtype float8_e4m3fn"),
        ({"ranks": 4}, "tangents: got True with ranks"),
        ({"tangents": 1}, "tangents: got 1"),
    ],
)
def test_what_has_no_tangents(options, words):
    with pytest.raises((ArgumentError, cupyflash.ArgumentTypeError), match=words):
        explain(SHAPE, **options)


def test_the_command(capsys):
    words = ["explain", "1,2,300,32", "--device", "cpu", "--tangents", "--no-compile"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "forward and tangents of q (1, 2, 300, 32)" in text
    assert "S, P and their tangents" in text
    assert main([*words, "--backward"]) == 0
    text = capsys.readouterr().out
    assert "reference.backward_tangent_dkdv" in text
    assert "gradients and tangents of q" in text
    assert main([*words, "--cache"]) == 2
    assert "--tangents" in capsys.readouterr().err
