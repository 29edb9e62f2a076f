"""Learn a potential energy from forces, in NumPy: training by second derivatives of attention.

Particles in space have an energy, which a small model computes: features of each position become
queries, keys and values of 2 heads, and the energy is a sum over the output of attention. Forces
are its negative gradient by positions. The model is trained until its forces are those of a given
potential, so a step needs gradients of gradients. The program writes out all derivatives but
those of attention, which are cupyflash's::

    python examples/match_forces.py
    python examples/match_forces.py --check

The second command compares the gradient of every weight with central differences.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from program import whole

import cupyflash

Weights = dict[str, np.ndarray]
HEADS, SIZE, FEATURES, DIMENSIONS = 2, 8, 24, 3


def random_weights(rng: np.random.Generator) -> Weights:
    """Return weights of the model."""
    shapes = {"a": (DIMENSIONS, FEATURES), "b": (FEATURES,), "u": (HEADS, 1, SIZE)}
    shapes |= dict.fromkeys(("q", "k", "v"), (HEADS, FEATURES, SIZE))
    return {name: rng.standard_normal(x) / max(x[-2:][0], 1) ** 0.5 for name, x in shapes.items()}


def true_forces(x: np.ndarray) -> np.ndarray:
    """Return the forces of the potential sum exp(-|x_i - x_j|^2) over pairs; x is (B, N, 3)."""
    apart = x[:, :, None] - x[:, None]
    return 2 * (apart * np.exp(-(apart**2).sum(axis=-1, keepdims=True))).sum(axis=2)


def operands(w: Weights, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return features, and queries, keys and values, (B, H, N, D)."""
    f = np.tanh(x @ w["a"] + w["b"])
    return f, [f[:, None] @ w[name] for name in "qkv"]


def forces(w: Weights, x: np.ndarray) -> np.ndarray:
    """Return the model's forces: the energy is the sum of u * attention(q, k, v)."""
    f, qkv = operands(w, x)
    out, vjp = cupyflash.attention_vjp(*qkv)
    gradients = vjp(np.broadcast_to(w["u"], out.shape))
    of_features = sum(
        (g @ w[name].swapaxes(-1, -2)).sum(axis=1)
        for g, name in zip(gradients[:3], "qkv", strict=True)
    )
    return -((1 - f * f) * of_features) @ w["a"].T


def loss_and_gradients(w: Weights, x: np.ndarray, wanted: np.ndarray) -> tuple[float, Weights]:
    """Return the mean square error of forces, and its gradient by every weight.

    The gradient of ``sum(s * dE/dx)`` is that of the energy's derivative along s, which forward
    mode computes: each step of the model has a tangent, and then both go back.
    """
    error = forces(w, x) - wanted
    s = -2 * error / error.size  # of the loss by dE/dx, since a force is -dE/dx
    f, qkv = operands(w, x)
    moved = s @ w["a"]  # tangents along s
    tf = (1 - f * f) * moved
    along = [tf[:, None] @ w[name] for name in "qkv"]
    out, tout, lse, _ = cupyflash.attention_jvp(*qkv, *along, return_lse=True)

    # Back from sum(u * tout): by tangents as in a backward, by operands its derivative.
    do = np.broadcast_to(w["u"], out.shape)
    by_tangents = cupyflash.attention_backward(do, *qkv, out, lse)
    by_operands = cupyflash.attention_backward_jvp(do, *qkv, out, lse, *along).gradients
    made = {"u": tout.sum(axis=(0, 2))[:, None]}
    df, dtf = np.zeros_like(f), np.zeros_like(f)
    for name, dx, dtx in zip("qkv", by_operands, by_tangents, strict=False):
        made[name] = np.einsum("bnf,bhnd->hfd", f, dx) + np.einsum("bnf,bhnd->hfd", tf, dtx)
        df += np.einsum("bhnd,hfd->bnf", dx, w[name])
        dtf += np.einsum("bhnd,hfd->bnf", dtx, w[name])
    slope = 1 - f * f
    dz = slope * (df - 2 * f * moved * dtf)
    made["a"] = np.einsum("bnx,bnf->xf", x, dz) + np.einsum("bnx,bnf->xf", s, slope * dtf)
    made["b"] = dz.sum(axis=(0, 1))
    return float((error * error).mean()), made


def train(steps: int, seed: int = 0, report: bool = False) -> list[float]:
    """Train a model by Adam on new positions in each step; return the loss of every step."""
    rng = np.random.default_rng(seed)
    w = random_weights(rng)
    means, squares = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    losses = []
    for step in range(1, steps + 1):
        x = 1.5 * rng.standard_normal((16, 8, DIMENSIONS))
        loss, gradients = loss_and_gradients(w, x, true_forces(x))
        losses.append(loss)
        for name, g in gradients.items():
            means[name] += 0.1 * (g - means[name])
            squares[name] += 0.01 * (g * g - squares[name])
            size = np.sqrt(squares[name] / (1 - 0.99**step)) + 1e-9
            w[name] -= 0.01 * means[name] / (1 - 0.9**step) / size
        if report and (step % 100 == 0 or step == 1):
            print(f"step {step}: mean square error of forces {np.mean(losses[-50:]):.4f}")
    return losses


def largest_difference(seed: int = 0) -> float:
    """Return how far gradients are from central differences, relative to the largest one."""
    rng = np.random.default_rng(seed)
    w, x = random_weights(rng), rng.standard_normal((2, 5, DIMENSIONS))
    wanted, step, worst = true_forces(x), 1e-5, 0.0
    _, gradients = loss_and_gradients(w, x, wanted)
    for name, g in gradients.items():
        direction = rng.standard_normal(g.shape)
        ends = [
            loss_and_gradients(w | {name: w[name] + e * direction}, x, wanted)[0]
            for e in (step, -step)
        ]
        ours = float((g * direction).sum())
        worst = max(worst, abs((ends[0] - ends[1]) / (2 * step) - ours) / max(abs(ours), 1e-3))
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or check the gradients."""
    parser = argparse.ArgumentParser(description="Learn a potential energy from forces.")
    parser.add_argument("--steps", type=whole, default=600, help="steps of training (default: 600)")
    parser.add_argument("--check", action="store_true", help="compare gradients with differences")
    chosen = parser.parse_args(arguments)
    if chosen.check:
        worst = largest_difference()
        print(f"gradients differ from central differences by {worst:.1e} at most")
        return int(worst > 1e-5)
    train(chosen.steps, report=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
