"""The training example: its gradients are right, its loss falls, and what is missing it names."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest
from small_model import EXAMPLES, load, transformer

ROOT = EXAMPLES.parent
SCRIPT = EXAMPLES / "train_lm.py"

# Small enough for a test: seconds, and a loss that only a model that sees the bytes before reaches.
SMALL = {"width": 48, "layers": 2, "heads": 2, "context": 64, "batch": 8, "steps": 150}
SMALL_LOSS = 2.9  # the frequencies of single bytes give 3.4


train_lm = load("train_lm")
model_file = load("model_file")
program = load("program")


@pytest.fixture
def with_extra():
    for name in ("rich", "matplotlib", "safetensors"):
        pytest.importorskip(name, reason=program.INSTALL)


def run(folder, *arguments):
    """Run the example in a process of its own, and return what it printed."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags(**setting):
    return [word for name, value in setting.items() for word in (f"--{name}", str(value))]


# --- gradients ---


def errors(xp=np, seed=0):
    found = transformer.check_gradients(train_lm.TINY, np.random.default_rng(seed), xp)
    return {line.name: line for line in found}


def test_gradients_are_central_differences():
    found = errors()
    assert set(found) == set(
        transformer.initial_weights(train_lm.TINY, np.random.default_rng(0), np, np.float64)
    )
    for name, line in found.items():
        # The step is 1e-5: what it cuts off and what the loss's rounding leaves is below 1e-6.
        assert line.error <= line.bound <= 1e-6, name


@pytest.mark.thorough("the check itself is quick")
def test_a_wrong_gradient_of_attention_is_found(monkeypatch, capsys):
    (original,) = transformer.attend.__defaults__

    def attention_vjp(*qkv, **options):
        o, vjp = original(*qkv, **options)
        return o, lambda do: (vjp(do).dq * 1.0001, *vjp(do)[1:])

    monkeypatch.setattr(transformer.attend, "__defaults__", (attention_vjp,))
    found = errors()
    assert found["0.qkv"].error > found["0.qkv"].bound
    assert found["logits"].error <= found["logits"].bound  # nothing is wrong above attention
    assert train_lm.main(["--check", "--device", "cpu"]) == 1
    assert "wrong gradients of" in capsys.readouterr().err


@pytest.mark.thorough("another fault; one of attention is quick")
def test_a_wrong_gradient_of_a_norm_is_found(monkeypatch):
    original = transformer.rms_norm

    def rms_norm(x, gain):  # as if the root mean square were a constant
        inverse = ((x * x).mean(axis=-1, keepdims=True) + transformer.EPSILON) ** -0.5
        y, vjp = original(x, gain)
        return y, lambda dy: (dy * gain * inverse, vjp(dy)[1])

    monkeypatch.setattr(transformer, "rms_norm", rms_norm)
    found = errors()
    assert found["embedding"].error > found["embedding"].bound


@pytest.mark.thorough("another fault; one of attention is quick")
def test_a_gradient_of_nan_is_wrong(monkeypatch, capsys):
    original = transformer.rms_norm

    def rms_norm(x, gain):
        y, vjp = original(x, gain)
        return y, lambda dy: (vjp(dy)[0], vjp(dy)[1] * np.nan)

    monkeypatch.setattr(transformer, "rms_norm", rms_norm)
    assert train_lm.main(["--check", "--device", "cpu"]) == 1
    found = capsys.readouterr().err
    assert "1.perceptron norm" in found
    assert "qkv" not in found


def test_the_check_as_a_user_runs_it(tmp_path):
    printed = run(tmp_path, "--check", "--device", "cpu")
    worst = re.search(r"worst relative error (\S+); at most (\S+) of a bound", printed)
    assert float(worst[1]) < 1e-6
    assert float(worst[2]) <= 1


def test_attention_in_bfloat16_is_near():
    pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    setting = dataclasses.replace(train_lm.TINY, attention="float32")
    weights = transformer.initial_weights(setting, rng, np, np.float32)
    weights["logits"] = rng.standard_normal(weights["logits"].shape, dtype=np.float32)
    windows = rng.integers(0, 256, (2, 141))
    loss, vjp = transformer.loss_vjp(windows, weights, setting, np)
    coarse = dataclasses.replace(setting, attention="bfloat16")
    other, other_vjp = transformer.loss_vjp(windows, weights, coarse, np)
    assert loss != other
    assert abs(loss - other) < 2.0**-8 * loss  # bfloat16 has 8 significant bits
    gradients, others = vjp(), other_vjp()
    for name, gradient in gradients.items():
        assert others[name].dtype == np.float32
        distance = np.linalg.norm(gradient - others[name])
        assert distance < 0.05 * np.linalg.norm(gradient), name


# --- training ---


@pytest.mark.thorough("a training run; its check and the run of a page are quick")
def test_the_loss_falls(tmp_path, with_extra):
    files = ("--plot", "loss.svg", "--save", "model.safetensors")
    printed = run(tmp_path, *files, "--device", "cpu", *flags(**SMALL))
    first, last = re.search(r"validation loss (\S+) -> (\S+) nats per byte in", printed).groups()
    assert float(first) == round(math.log(256), 3)  # the last matrix begins as 0
    assert float(last) < SMALL_LOSS
    assert float(re.search(r"single bytes alone give (\S+)\)", printed)[1]) > SMALL_LOSS
    assert printed.count("\nstep ") == train_lm.REPORTS
    assert "\x1b" not in printed  # neither a bar nor colours in a pipe
    assert "--- written\n" in printed
    weights, setting = model_file.load(tmp_path / "model.safetensors", np)
    assert dataclasses.asdict(setting).items() >= SMALL.items()
    held_out = train_lm.split_text(train_lm.standard_text(large=False), setting.context)[1]
    assert f"{train_lm.validate(held_out, weights, setting, np):.3f}" == last

    curve = ET.parse(tmp_path / "loss.svg").getroot()
    assert curve.tag.endswith("svg")
    paths = [path.get("d", "") for path in curve.iter("{http://www.w3.org/2000/svg}path")]
    assert max(path.count("L") for path in paths) > SMALL["steps"] // 2  # the loss of every step


def test_the_curve_as_pixels(tmp_path, with_extra):
    path = train_lm.writable_picture(tmp_path / "loss.png")
    train_lm.plot(path, [5.5, 4.0, 3.0], {0: 5.545, 3: 3.1}, 3.3, "three steps")
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.shape[0] > 300
    assert 0.001 < (pixels[..., :3].min(axis=-1) < 0.9).mean() < 0.5  # something is drawn, not all


def some_weights(setting, seed=0):
    return transformer.initial_weights(setting, np.random.default_rng(seed), np, np.float32)


def test_a_seed_repeats_the_training():
    setting = dataclasses.replace(train_lm.TINY, steps=3, attention="float32")
    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)

    def losses():
        weights, rng = some_weights(setting), np.random.default_rng(1)
        return [float(x) for x in train_lm.train(text, weights, setting, rng, np)]

    once = losses()
    assert once == losses()
    assert once[0] == pytest.approx(math.log(256))
    assert once[2] < once[0]


def test_validation_is_the_mean_over_all_windows():
    setting = dataclasses.replace(train_lm.TINY, batch=3, context=20, attention="float32")
    weights = some_weights(setting)
    weights["logits"] = np.random.default_rng(5).standard_normal((18, 256), dtype=np.float32)
    text = np.frombuffer(
        (ROOT / "LICENSE").read_bytes()[:201], np.uint8
    )  # ten windows, 3 + 3 + 3 + 1
    windows = np.lib.stride_tricks.sliding_window_view(text, 21)[::20]
    wanted = [transformer.loss_vjp(w[None], weights, setting, np)[0] for w in windows]
    assert len(wanted) == 10
    assert train_lm.validate(text, weights, setting, np) == pytest.approx(np.mean(wanted), 1e-5)


def test_what_is_printed_controls_no_terminal():
    assert program.readable(b"a \x1b[2J\n\xff~") == "a .[2J\n.~"


# --- text ---


def test_the_standard_text():
    text = train_lm.standard_text(large=False)
    assert len(text) > 300_000
    paragraphs = text.split(b"\n\n")
    assert len(paragraphs) > len(set(paragraphs)) * 0.99
    assert b'The "nonlocal" statement' in text
    large = train_lm.standard_text(large=True)
    assert large.startswith(text)
    assert len(large) > 3_000_000


def test_no_byte_is_both_learnt_and_validated():
    text = bytes(np.random.default_rng(0).integers(0, 256, 20 * 8 * 16 * 2 + 5, np.uint8))
    training, held_out = train_lm.split_text(text, 16)
    assert (len(training), len(held_out)) == (38 * 128, 2 * 128)
    assert held_out.tobytes() == text[19 * 128 : 20 * 128] + text[39 * 128 : 40 * 128]
    assert training.tobytes() == text[: 19 * 128] + text[20 * 128 : 39 * 128]


# --- what cannot be served ---


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--text", "no-such-file"], "--text"),
        (["--text", str(ROOT)], "--text"),
        (["--text", str(ROOT / "LICENSE"), "--context", "512"], "lower --context"),
        (["--plot", "loss.xyz"], "svg"),
        (["--plot", "nowhere/loss.svg"], "no folder nowhere"),
        (["--save", "nowhere/model.safetensors"], "no folder nowhere"),
    ],
)
def test_what_cannot_be_served_is_explained(arguments, wanted, with_extra, capsys):
    assert train_lm.main(["--device", "cpu", *arguments]) == 1
    captured = capsys.readouterr()
    assert wanted in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--width", "30", "--heads", "4"], "not a multiple of --heads 4"),
        (["--steps", "0"], "a whole number of 1 or more"),
        (["--rate", "nan"], "between 0 and 1"),
        (["--attention", "float16"], "bfloat16"),
    ],
)
def test_wrong_arguments(arguments, wanted, capsys):
    with pytest.raises(SystemExit) as error:
        train_lm.main(["--device", "cpu", *arguments])
    assert error.value.code == 2
    assert wanted in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch, with_extra, capsys):
    monkeypatch.setattr(train_lm, "validate", lambda *_: math.nan)
    text = ["--text", str(ROOT / "LICENSE"), "--device", "cpu"]
    small = flags(width=8, layers=1, heads=1, context=32, batch=1, steps=1)
    assert train_lm.main([*text, *small]) == 1
    assert "lower --rate" in capsys.readouterr().err


def no_product(*_):
    raise ImportError("libcublas.so.12: cannot open shared object file")


@pytest.mark.parametrize(
    ("cupy", "wanted"),
    [
        (None, "cuda13"),
        (SimpleNamespace(is_available=lambda: False), "cupyflash info"),
        (SimpleNamespace(is_available=lambda: True, ones=no_product), "cublas"),
    ],
)
def test_a_gpu_that_is_not_there_is_explained(cupy, wanted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert train_lm.main(["--device", "gpu"]) == 1
    captured = capsys.readouterr()
    assert wanted in captured.err
    assert "--device cpu" in captured.err
    assert not captured.out
    xp, device = program.array_module("auto")
    assert xp is np
    assert wanted in device  # and by itself it says why it runs on the CPU


@pytest.mark.parametrize("module", ["rich.console", "matplotlib.figure", "safetensors.numpy"])
def test_a_missing_package_is_explained(module, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    files = ["--plot", str(tmp_path / "loss.svg"), "--save", str(tmp_path / "model.safetensors")]
    assert train_lm.main(["--device", "cpu", *files]) == 1
    captured = capsys.readouterr()
    assert program.INSTALL in captured.err
    assert not captured.out


# --- on a GPU ---


@pytest.mark.gpu
def test_gradients_on_the_gpu(gpu):
    import cupy

    for name, line in errors(cupy).items():
        assert line.error <= line.bound <= 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["float32", "bfloat16"])
def test_training_on_the_gpu_is_the_same(gpu, attention):
    import cupy

    pytest.importorskip("ml_dtypes")  # which knows bfloat16 by its name
    setting = dataclasses.replace(train_lm.TINY, steps=5, attention=attention)
    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)
    losses = []
    for xp in (np, cupy):
        weights = transformer.initial_weights(setting, np.random.default_rng(0), xp, np.float32)
        steps = train_lm.train(text, weights, setting, np.random.default_rng(1), xp)
        losses.append([float(loss) for loss in steps])
        assert train_lm.validate(text[:1000], weights, setting, xp) < losses[-1][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4 if attention == "float32" else 1e-2)
