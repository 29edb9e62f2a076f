"""Train small models of transformers with cupyflash's attention and, to compare, with PyTorch's.

A model like Llama and one like GPT-2, with random weights, learn a sequence that repeats itself.
Both implementations start from the same weights and see the same tokens, so their losses agree.
The program needs PyTorch and transformers. On a GPU, it also prints the peak memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import cupyflash.torch.transformers

OURS = "cupy_attention"
VOCABULARY = 64


def llama(length: int) -> transformers.PreTrainedModel:
    """Return a model like Llama, with rotary positions and two key heads for four query heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * length,
        )
    )


def gpt2(length: int) -> transformers.PreTrainedModel:
    """Return a model like GPT-2, with learned positions and without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=2 * length,
            n_embd=128,
            n_layer=2,
            n_head=4,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def train(
    make: Callable[[int], transformers.PreTrainedModel],
    implementation: str,
    steps: int,
    length: int,
    device: str,
) -> tuple[list[float], float, int, list[int]]:
    """Return the losses, the seconds per step, the peak bytes on a GPU, and generated tokens."""
    torch.manual_seed(0)
    model = make(length).to(device)
    model.set_attn_implementation(implementation)
    period = torch.randint(3, VOCABULARY, (4, 8))
    tokens = period.repeat(1, length // 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps + 1):
        if step == 1:  # the first step compiles
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    model.eval()
    text = model.generate(
        tokens[:1, :20], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return losses, seconds, peak, text[0, 20:].tolist()


def main() -> None:
    """Train both models with both implementations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row, a multiple of 8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cupyflash.torch.transformers.register()
    for make in (llama, gpt2):
        results = {}
        for implementation in ("sdpa", OURS):
            results[implementation] = train(
                make, implementation, options.steps, options.length, options.device
            )
            losses, seconds, peak, text = results[implementation]
            memory = f", {peak / 2**20:.0f} MiB" if peak else ""
            print(
                f"{make.__name__:6}{implementation:15} loss {losses[0]:.4f} to {losses[-1]:.4f}, "
                f"{1000 * seconds:.1f} ms a step{memory}, then {text}"
            )
        first, second = (results[name][0][0] for name in ("sdpa", OURS))
        if abs(first - second) > 1e-3:
            raise SystemExit(f"{make.__name__}: the first losses differ: {first} and {second}")


if __name__ == "__main__":
    main()
