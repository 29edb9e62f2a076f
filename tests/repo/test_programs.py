"""Programs of known models: attention by cupyflash and by their own lines give the same."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from small_model import load

gpt2, triangle, whisper = map(load, ("numpy_gpt2", "numpy_triangle", "numpy_whisper"))
GPT2 = gpt2.Setting(width=24, layers=2, heads=3, context=20, vocabulary=50)
TRIANGLE = triangle.Setting(width=24, layers=2, heads=2, head=8)
WHISPER = whisper.Setting(width=24, layers=2, heads=3, context=20, recording=37, vocabulary=50)


def near(found, wanted, size=1e-5):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=size * np.abs(wanted).max())


def both(module, work):
    """What a program computes by cupyflash, and by its own lines."""
    return (work(module.ATTENTION[name]) for name in ("cupyflash", "numpy"))


def printed(module, name, small, arguments, monkeypatch, capsys):
    """What a program prints, at small sizes and without its times."""
    monkeypatch.setattr(module, "Setting", small)
    assert module.main([*arguments, "--attention", name, "--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf"speed +[\d,.]+ .*by {name}$", lines[-1])
    return lines[:-1]


# --- python examples/numpy_gpt2.py --attention cupyflash ---


def test_gpt2_gives_the_same_both_ways():
    weights = gpt2.random_weights(GPT2, seed=0)
    for length in (1, 7):
        tokens = gpt2.random_prompt(length, GPT2, seed=length)
        near(*both(gpt2, lambda x: gpt2.next_logits(tokens, weights, GPT2, x)))  # noqa: B023


@pytest.mark.thorough("it imports transformers; that both ways agree is quick")
def test_gpt2_is_the_published_one():
    torch = pytest.importorskip("torch", reason="pip install torch")
    models = pytest.importorskip("transformers", reason="pip install transformers")
    config = models.GPT2Config(
        n_embd=24, n_layer=2, n_head=3, n_positions=20, vocab_size=50, attn_implementation="eager"
    )
    model = models.GPT2LMHeadModel(config).eval()
    weights = gpt2.random_weights(GPT2, seed=0)
    names = {
        "wte": "tokens", "wpe": "positions", "ln_f": "norm", "ln_1": "norm 1", "ln_2": "norm 2",
        "attn.c_attn": "qkv", "attn.c_proj": "attention out", "mlp.c_fc": "up",
        "mlp.c_proj": "down",
    }  # fmt: skip
    with torch.no_grad():
        for name, x in model.transformer.named_parameters():
            layer, part = re.match(r"(?:h\.(\d+)\.)?(.+)", name).groups()
            part, _, kind = part.rpartition(".")
            ours = ("" if layer is None else f"{layer}.") + names[part] + " +" * (kind == "bias")
            x.copy_(torch.from_numpy(weights[ours]))
        tokens = gpt2.random_prompt(9, GPT2, seed=3)
        wanted = model(torch.from_numpy(tokens)[None]).logits[0, -1].numpy()
    near(gpt2.next_logits(tokens, weights, GPT2, gpt2.attention_by_cupyflash), wanted)


# --- python examples/numpy_triangle.py --attention cupyflash ---


def test_triangle_attention_gives_the_same_both_ways():
    weights = triangle.random_weights(TRIANGLE, seed=0)
    pairs = triangle.random_pairs(9, TRIANGLE, seed=1)
    near(*both(triangle, lambda x: triangle.changed_pairs(pairs, weights, TRIANGLE, x)))


def test_triangle_attention_is_its_formula():
    """Of one head: a[i, j, k] = softmax over k of q[i, j] k[i, k] / sqrt(D) + b[j, k]."""
    setting = triangle.Setting(width=12, layers=1, heads=1, head=8)
    w = {name[2:]: x.astype(float) for name, x in triangle.random_weights(setting, seed=0).items()}
    pairs = triangle.random_pairs(6, setting, seed=1)
    x = triangle.layer_norm(pairs.astype(float))
    s = np.einsum("ijc,ikc->ijk", x @ w["q"], x @ w["k"]) / np.sqrt(8) + (x @ w["bias"])[..., 0]
    p = np.exp(s) / np.exp(s).sum(axis=2, keepdims=True)
    o = np.einsum("ijk,ikc->ijc", p, x @ w["v"]) / (1 + np.exp(-(x @ w["gate"])))
    weights = triangle.random_weights(setting, seed=0)
    for name in triangle.ATTENTION:
        found = triangle.changed_pairs(pairs, weights, setting, triangle.ATTENTION[name])
        near(found, pairs + o @ w["out"])


# --- python examples/numpy_whisper.py --attention cupyflash ---


def written(attention):
    weights = whisper.random_weights(WHISPER, seed=0)
    recorded = whisper.keys_of(whisper.random_recording(WHISPER, seed=0), weights, WHISPER)
    return list(whisper.transcribe(recorded, weights, WHISPER, 12, attention))


def test_whisper_gives_the_same_both_ways():
    ours, theirs = both(whisper, written)
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    near(*(np.array([x for _, x in steps]) for steps in (ours, theirs)))


def test_whisper_attends_to_the_recording_and_to_all_tokens_before():
    asked = []

    def attention(q, k, v, length):
        asked.append((k.shape[2], length))
        return whisper.attention_in_numpy(q, k, v, length)

    written(attention)
    assert asked == [x for n in range(12) for x in [(20, n + 1), (37, None)] * WHISPER.layers]


# --- as a user runs them ---


@pytest.mark.parametrize(
    ("module", "setting", "arguments"),
    [
        (gpt2, {"width": 24, "heads": 3, "vocabulary": 50}, ["--tokens", "6", "--layers", "2"]),
        (triangle, {"width": 24, "heads": 2, "head": 8}, ["--positions", "8"]),
        (whisper, {"width": 24, "layers": 1, "vocabulary": 50}, ["--tokens", "6"]),
    ],
    ids=["numpy_gpt2.py", "numpy_triangle.py", "numpy_whisper.py"],
)
def test_both_ways_print_the_same(module, setting, arguments, monkeypatch, capsys):
    small = functools.partial(module.Setting, **setting)
    small.layers = 2  # which an option shows
    rest = (small, arguments, monkeypatch, capsys)
    ours, theirs = (printed(module, name, *rest) for name in ("cupyflash", "numpy"))
    assert ours == theirs
    assert len(ours) == 2


# --- python examples/torch_swin.py --attention cupyflash, and --attention sdpa --train ---

SWIN = {"width": 16, "depths": (2, 1, 1), "head": 8, "window": 3, "patch": 2, "image": 24}


@pytest.fixture
def swin():
    """The program, with a thread of PyTorch: threads would wait for each other beside workers."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load("torch_swin")
    torch.set_num_threads(threads)


def test_swin_gives_the_same_all_ways(swin):
    """Logits, and the gradients of the biases and of what queries, keys and values are made by."""
    setting = swin.Setting(**SWIN, classes=10)
    images, classes = swin.random_images(setting, 2)
    found = []
    for name in swin.ATTENTION:
        model = swin.model_of(setting, name)
        logits = model(images)
        swin.train(model, swin.optimizer_of(model), images, classes, 1)
        found.append([x.detach().numpy() for x in (logits, *swin.some_gradients(model))])
    for others in found[1:]:
        assert len(others) == 1 + 2 * sum(setting.depths)
        for ours, theirs in zip(found[0], others, strict=True):
            near(ours, theirs, 1e-4)


@pytest.mark.parametrize("name", ["cupyflash", "lines", "sdpa"])
def test_shifted_windows_of_swin_do_not_reach_around_the_image(swin, name):
    """A patch at the border changes patches near it, and none at the other side."""
    torch = swin.torch
    torch.manual_seed(0)
    setting = swin.Setting(**SWIN)
    for shifted in (False, True):
        windows = swin.Windows(16, 12, shifted, setting, swin.ATTENTION[name])
        assert windows.shift == shifted
        x = torch.randn(1, 12, 12, 16)
        for turned in (False, True):
            y = x.clone()
            y[(0, 5, 0) if turned else (0, 0, 5)] += 1
            with torch.no_grad():
                differs = (windows(x) != windows(y)).any(dim=-1)[0]
            along, across = (sorted(set(i.tolist())) for i in differs.nonzero(as_tuple=True))
            if turned:
                along, across = across, along
            # Shifted, rows 10 and 11 are in a window with row 0, which must not see them.
            assert along == ([0] if shifted else [0, 1, 2])
            assert across == ([4, 5, 6] if shifted else [3, 4, 5])


@pytest.mark.parametrize("more", [[], ["--train"]], ids=["classify", "--train"])
def test_swin_prints_the_same_all_ways(swin, more, monkeypatch, capsys):
    small = functools.partial(swin.Setting, **SWIN, classes=10)
    ways = [printed(swin, name, small, more, monkeypatch, capsys) for name in swin.ATTENTION]
    assert ways[0] == ways[1] == ways[2]
    assert len(ways[0]) == 2
