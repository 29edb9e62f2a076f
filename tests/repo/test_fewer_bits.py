"""The example that measures caches of fewer bits: its losses are those of the model."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_model import SETTING, load, some_weights, transformer

fewer_bits, model_file, program = map(load, ("fewer_bits", "model_file", "program"))
Kept = fewer_bits.Kept


def texts(number, length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, length))


def losses(of, kept=None, spread="", weights=None):
    weights = some_weights() if weights is None else weights
    return fewer_bits.losses(of, kept or Kept("float32"), spread, weights, SETTING, np)


def test_losses_are_those_of_the_training():
    windows = texts(3, SETTING.context + 1)
    wanted, _ = transformer.loss_vjp(windows, some_weights(), SETTING, np)
    assert losses(windows).mean() == pytest.approx(wanted, rel=1e-5)
    alone = [losses(windows[b : b + 1])[0] for b in range(3)]
    np.testing.assert_allclose(losses(windows), alone, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, ("int4", "int4"), ("int8", "int4")])
def test_bytes_may_be_read_in_any_chunks(kv_dtype, monkeypatch):
    some, kept = texts(2, 75), Kept("float32", kv_dtype)
    wanted = losses(some, kept)
    monkeypatch.setattr(fewer_bits, "CHUNK", 7)
    np.testing.assert_allclose(losses(some, kept), wanted, rtol=1e-3 if kv_dtype else 1e-5)


def test_outliers_and_spread_rows_change_no_score():
    some = texts(2, 40)
    wanted, weights = losses(some), fewer_bits.with_outliers(some_weights(), SETTING, 16)
    assert not np.array_equal(weights["0.qkv"], some_weights()["0.qkv"])
    np.testing.assert_array_equal(losses(some, weights=weights), wanted)
    for spread in fewer_bits.SPREAD.values():
        np.testing.assert_allclose(losses(some, spread=spread, weights=weights), wanted, rtol=1e-4)


def test_what_is_measured_is_the_cache():
    """Fewer bits lose more; with outliers int4 loses most, less of it with hadamard."""
    some = texts(4, 60)
    outliers = fewer_bits.with_outliers(some_weights(), SETTING, 16)
    wanted = losses(some)

    def off(kv_dtype, spread="", weights=None):
        both = kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)
        return np.abs(losses(some, Kept("float32", both), spread, weights) - wanted).mean()

    assert 0 < off("int8") < off("float8_e5m2") < off("int4", weights=outliers)
    assert off("int4", "qk", outliers) < off("int4", weights=outliers)
    assert off(("int8", "int4"), weights=outliers) < off(("int4", "int8"), weights=outliers)


def test_a_change_and_its_error():
    exact = np.log([2.0, 2.0, 2.0])
    more, error = fewer_bits.change(exact + np.array([0.0, 0.01, 0.02]), exact)
    assert more == pytest.approx(100 * (np.exp(0.01) - 1))
    assert error == pytest.approx(100 * np.exp(0.01) * 0.01 / np.sqrt(3))


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("safetensors", reason=program.INSTALL)
    pytest.importorskip("ml_dtypes")
    path = tmp_path / "model.safetensors"
    model_file.save(path, some_weights(), SETTING, np)
    return path


def test_a_transposed_weight_is_saved_as_it_is(tmp_path):
    pytest.importorskip("safetensors", reason=program.INSTALL)
    pytest.importorskip("ml_dtypes")
    weights = some_weights()
    turned = {name: np.asfortranarray(w) for name, w in weights.items()}
    assert any(not w.flags.c_contiguous for w in turned.values())
    model_file.save(tmp_path / "turned.safetensors", turned, SETTING, np)
    read, _ = model_file.load(tmp_path / "turned.safetensors", np)
    for name, w in weights.items():
        assert np.array_equal(read[name], w), name


@pytest.mark.parametrize("outliers", [[], ["--outliers", "16"]], ids=["own keys", "outliers"])
def test_the_program(saved, outliers, capsys):
    short = ["--device", "cpu", "--texts", "2", "--bytes", "9"]
    assert fewer_bits.main([str(saved), *short, *outliers]) == 0
    out = capsys.readouterr().out
    assert "2 pieces of 9 bytes" in out
    assert ("2 columns of each head are 16 times as large" in out) == bool(outliers)
    rows = [line for line in out.splitlines() if line.startswith("| ") and "±" in line]
    names = ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4"]
    names += ["int8,int4", "int4,int8"]
    assert [row.split()[1] for row in rows] == names
    for row in rows:
        assert len(re.findall(r"[+-]\d+\.\d{3} ± \d+\.\d{3} %", row)) == 3, row


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(["--bytes", "1"], "expected 2 or more"), (["--outliers", "3"], "expected a power of 2")],
)
def test_wrong_arguments(arguments, wanted, capsys):
    with pytest.raises(SystemExit) as error:
        fewer_bits.main(["model.safetensors", "--device", "cpu", *arguments])
    assert error.value.code == 2
    assert wanted in capsys.readouterr().err


def test_a_missing_model_is_explained(tmp_path, capsys):
    pytest.importorskip("safetensors", reason=program.INSTALL)
    assert fewer_bits.main([str(tmp_path / "no.safetensors"), "--device", "cpu"]) == 1
    assert "train_lm.py --save FILE" in capsys.readouterr().err
