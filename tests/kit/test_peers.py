"""Functions of other libraries are judged, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from cupyflash import masks, testing
from cupyflash.testing import FEATURES, peers
from cupyflash.testing.peers import PEERS, run
from cupyflash.testing.peers.base import additive

OWN = """
import numpy as np, os
from cupyflash.testing.peers import Functions, Peer

def right(q, k, v, *, mask=None, return_lse=True):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True), None

def wrong(q, k, v, **_):
    return np.float32(1.01) * right(q, k, v)[0], None

calls = []
def ends(q, k, v, **_):
    calls.append(q)
    if len(calls) > 8:
        os._exit(7)
    return right(q, k, v)

def dies(q, k, v, **_):
    os.abort()

def peer(name, function, package="numpy"):
    return Peer(name, package, package, f"pip install {package}", lambda: Functions(function),
                features=("lengths",), instead={"forward_within_bound": "It is 1 % too large."})

RIGHT, WRONG, ENDS, DIES = (peer(x.__name__, x) for x in (right, wrong, ends, dies))
ABSENT = peer("absent", right, "no_such_library")
NOTHING = 3
"""


SOME = ["forward_within_bound", "convex_rows"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_peers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "own_peers"
    sys.modules.pop("own_peers", None)


def test_a_right_function_passes(own):
    judged = run.verify_peer(f"{own}:RIGHT", examples=1, only=SOME)
    assert not judged.failures
    assert not judged.ended
    assert [x.name for x in judged.run] == SOME
    assert judged.version == np.__version__


def test_a_wrong_one_fails_with_words_a_problem_and_what_it_does_instead(own):
    judged = run.verify_peer(f"{own}:WRONG", examples=1, only=SOME)
    names = [x.name for x in judged.failures]
    assert names[0] == "forward_within_bound"
    text = run.table([judged], [])
    assert "It is 1 % too large." in text
    assert re.search(r"times the bound of", text)
    assert "cupyflash.testing.problem('float32'" in text
    content = json.loads(run.to_json([judged], []))
    assert content["peers"][0]["results"][0]["status"] == "FAILED"


def test_one_that_ends_its_process_ends_no_more(own):
    judged = run.verify_peer(f"{own}:ENDS", examples=1, only=SOME)
    assert "its process ended with status 7" in judged.ended
    assert "after" in judged.ended
    assert judged.results
    judged = run.verify_peer(f"{own}:DIES", examples=1, only=SOME)
    assert judged.ended == "its process was ended by SIGABRT before the first property"


def test_time_is_limited_and_what_is_left_out_is_counted(own):
    judged = run.verify_peer(f"{own}:RIGHT", examples=1, seconds=0, only=SOME)
    assert not judged.run
    assert judged.late == len(SOME)


def test_names_must_be_known(own):
    with pytest.raises(ValueError, match="expected all, module:NAME or one of torch-math"):
        run.verify_peer("torch-mats")
    with pytest.raises(ValueError, match="is of type int; expected a Peer"):
        run.verify_peer(f"{own}:NOTHING")
    with pytest.raises(ValueError, match="only: got 'no_bound', which is not a property"):
        run.verify_peer(f"{own}:RIGHT", only=["no_bound"])
    with pytest.raises(ImportError, match="needs no_such_library: pip install no_such_library"):
        run.verify_peer(f"{own}:ABSENT")


def run_cli(*arguments):
    command = [sys.executable, "-P", "-m", "cupyflash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_shows_all(own, tmp_path):
    report = tmp_path / "peers.json"
    named = [f"--peer={own}:{name}" for name in ("RIGHT", "WRONG", "ABSENT")]
    done = run_cli("verify", *named, "--examples", "1", "--only", SOME[0], "--json", str(report))
    assert done.returncode == 1, done.stderr
    assert "Not judged, because they need:\n  absent  pip install no_such_library" in done.stdout
    content = json.loads(report.read_text())
    assert [x["name"] for x in content["peers"]] == [f"{own}:RIGHT", f"{own}:WRONG"]
    done = run_cli("verify", f"--peer={own}:ABSENT")
    assert done.returncode == 2
    done = run_cli("verify", "--peer=nobody")
    assert done.returncode == 2
    assert "peer: got 'nobody'; expected all" in done.stderr


def test_each_says_what_it_takes():
    for name, peer in PEERS.items():
        assert peer.name == name
        assert set(peer.features) <= set(FEATURES)
        assert peer.install.startswith("pip install ")
        assert set(peer.says) <= {"precision", "empty_rows", "serves", "shapes"}
        assert peer.documented.layout


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("name", ["torch-math", "torch-flash", "torch-flex", "transformers-eager"])
def test_what_is_installed_is_right(name):
    if PEERS[name].version is None:
        pytest.skip(f"needs {PEERS[name].package}: {PEERS[name].install}")
    functions = PEERS[name].make()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, n, 8), dtype=np.float32) for n in (5, 9, 9))
    out, _ = functions.forward(q, k, v, mask=masks.causal())
    right = testing.forward_bound(
        q, k, v, mask=masks.causal(), precision=testing.Precision.of("float32")
    )
    assert testing.rho(out, *right.out).value <= 1


@pytest.mark.thorough("every property, for libraries that are installed beside")
@pytest.mark.parametrize("name", [x for x in PEERS if x.startswith(("torch", "jax"))])
def test_known_failures_are_all(name):
    if PEERS[name].version is None:
        pytest.skip(f"needs {PEERS[name].package}: {PEERS[name].install}")
    if PEERS[name].missing:
        pytest.skip(f"PyTorch finds no GPU, and {name} needs {PEERS[name].missing}")
    judged = run.verify_peer(name, seconds=10)
    assert not judged.ended
    assert {x.name for x in judged.failures} <= set(PEERS[name].instead)


def test_mask_and_bias_become_one_array():
    q, k = np.zeros((1, 1, 2, 4), np.float32), np.zeros((1, 1, 3, 4), np.float32)
    made = additive(np.tri(2, 3, 1, dtype=bool), np.full((2, 3), 2, np.float32), q, k)
    assert made.tolist() == [[2, 2, -np.inf], [2, 2, 2]]
    assert additive(None, None, q, k) is None
    assert peers.Documented().lse == "not returned"
