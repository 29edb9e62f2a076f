"""examples/head_statistics.py: entropies and masses of the encoder's heads, and their picture."""

import numpy as np
import pytest
from small_model import load

encoder = load("sentence_embeddings")
heads = load("head_statistics")


@pytest.fixture(scope="module")
def made():
    try:
        weights, tokenizer = encoder.load_weights(), encoder.load_tokenizer()
    except encoder.MissingPackageError:
        pytest.skip(f"needs the weights of all-MiniLM-L6-v2: {encoder.INSTALL}")
    return weights, heads.statistics(heads.TEXT, weights, tokenizer), tokenizer


def test_statistics_are_those_of_the_weights(made):
    weights, found, tokenizer = made
    ids = tokenizer.encode(heads.TEXT).ids
    q, k, _ = encoder.project(encoder.embed(np.array([ids]), weights), weights, 0)
    s = np.float64(q) @ np.float64(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)
    np.testing.assert_allclose(found.entropy[0], entropy[0], atol=1e-4)
    np.testing.assert_allclose(found.mass[0], p[0].sum(axis=-2), atol=1e-4)
    np.testing.assert_allclose(found.mass.sum(axis=-1), len(ids), rtol=1e-5)
    assert "[CLS] (19.4)" in heads.report(found)


def test_a_picture_is_drawn(made, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    for name in ("heads.png", "heads.svg"):
        assert heads.main(["--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 10_000
    assert "72 heads" in capsys.readouterr().out
    assert heads.main(["--text", str(tmp_path / "nothing.txt")]) == 1
    assert "nothing.txt" in capsys.readouterr().err
