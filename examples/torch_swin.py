"""Classify images with a Swin transformer that is written in PyTorch, or train it: Swin-T.

Each image is cut into windows of 7 × 7 patches, which attend to themselves: with a bias for each
distance between two patches, and in every other block with a mask, because there the windows are
shifted and some hold patches from two sides of the image. Weights and images are random::

    python examples/torch_swin.py --attention cupyflash
    python examples/torch_swin.py --attention lines
    python examples/torch_swin.py --attention sdpa --train

The first command attends with `cupyflash.torch.attention`, the second with the lines that such
programs have, the third with `scaled_dot_product_attention`. They print the same numbers and their
own speed. `cupyflash bench --suite programs` times them in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch
from program import seconds_of, whole
from torch import nn

# Queries, keys and values (B, W, H, N, D) of the windows of B images, the bias of each distance
# (H, N, N) and the bias that hides (W, 1, N, N), or None, to (B, W, H, N, D).
Attention = Callable[..., torch.Tensor]
RATE = 1e-3  # of the training


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model."""

    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    head: int = 32
    window: int = 7
    patch: int = 4
    image: int = 224
    classes: int = 1000


def attention_in_lines(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    near: torch.Tensor,
    hides: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within windows, as the lines of the published program do."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + near
    if hides is not None:
        scores = scores + hides
    return scores.softmax(dim=-1) @ v


def attention_by_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    near: torch.Tensor,
    hides: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within windows by PyTorch's function, which takes arrays of four axes."""
    bias = near[None] if hides is None else near + hides
    bias = bias.expand(*q.shape[:2], *bias.shape[-3:]).flatten(0, 1)
    joined = (x.flatten(0, 1) for x in (q, k, v))
    o = nn.functional.scaled_dot_product_attention(*joined, attn_mask=bias)
    return o.unflatten(0, q.shape[:2])


def attention_by_cupyflash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    near: torch.Tensor,
    hides: torch.Tensor | None,
) -> torch.Tensor:
    """Attend within windows; a bias broadcasts over images."""
    from cupyflash.torch import attention

    return attention(q, k, v, bias=near if hides is None else near + hides)


ATTENTION: dict[str, Attention] = {
    "cupyflash": attention_by_cupyflash,
    "lines": attention_in_lines,
    "sdpa": attention_by_sdpa,
}


class Windows(nn.Module):
    """Attention within the windows of an image."""

    def __init__(self, width: int, side: int, shifted: bool, setting: Setting, attend: Attention):
        super().__init__()
        self.heads, self.attend = width // setting.head, attend
        self.window = min(setting.window, side)
        self.shift = self.window // 2 if shifted and side > self.window else 0
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        at = torch.cartesian_prod(torch.arange(self.window), torch.arange(self.window))
        apart = at[:, None] - at + self.window - 1
        distances = 2 * self.window - 1
        self.register_buffer("distance", apart[..., 0] * distances + apart[..., 1])
        self.bias = nn.Parameter(0.02 * torch.randn(distances**2, self.heads))
        self.register_buffer("hides", self._hidden(side) if self.shift else None)

    def _hidden(self, side: int) -> torch.Tensor:
        """Return -inf where two patches of a shifted window are not neighbours in the image."""
        parts = torch.zeros(side)
        parts[-self.window :] = 1
        parts[-self.shift :] = 2
        numbers = self.cut(3 * parts[:, None, None] + parts[:, None])[..., 0]
        hidden = numbers[:, None, :] != numbers[:, :, None]
        return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None]

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (..., side, side, C) into windows (..., W, N, C)."""
        side, n = x.shape[-2], self.window
        x = x.unflatten(-3, (side // n, n)).unflatten(-2, (side // n, n)).transpose(-4, -3)
        return x.flatten(-5, -4).flatten(-3, -2)

    def joined(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """Turn windows (..., W, N, C) into images."""
        n = self.window
        x = x.unflatten(-2, (n, n)).unflatten(-4, (side // n, side // n)).transpose(-4, -3)
        return x.flatten(-3, -2).flatten(-4, -3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, in windows that are shifted or not: images (B, side, side, C) to the same."""
        side, shift = x.shape[-2], self.shift
        if shift:
            x = x.roll((-shift, -shift), (-3, -2))
        qkv = self.qkv(self.cut(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.movedim(-3, 0).transpose(-3, -2)
        near = self.bias[self.distance].permute(2, 0, 1)
        o = self.attend(q, k, v, near, self.hides).transpose(-3, -2).flatten(-2)
        x = self.joined(self.out(o), side)
        return x.roll((shift, shift), (-3, -2)) if shift else x


class Block(nn.Module):
    """A layer: attention within windows, and two linear maps with a GELU between them."""

    def __init__(self, width: int, side: int, shifted: bool, setting: Setting, attend: Attention):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.windows = Windows(width, side, shifted, setting, attend)
        self.maps = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change images (B, side, side, C)."""
        x = x + self.windows(self.norms[0](x))
        return x + self.maps(self.norms[1](x))


class Merging(nn.Module):
    """Joins 2 × 2 patches to one of twice the width."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.map = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn images (B, side, side, C) into (B, side / 2, side / 2, 2 C)."""
        four = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.map(self.norm(torch.cat(four, dim=-1)))


class Swin(nn.Module):
    """The model: images (B, 3, side, side) to the logits of classes."""

    def __init__(self, setting: Setting, attend: Attention):
        super().__init__()
        width, side = setting.width, setting.image // setting.patch
        self.patches = nn.Conv2d(3, width, setting.patch, setting.patch)
        layers: list[nn.Module] = [nn.LayerNorm(width)]
        for stage, depth in enumerate(setting.depths):
            if stage:
                layers.append(Merging(width))
                width, side = 2 * width, side // 2
            layers += [Block(width, side, n % 2 == 1, setting, attend) for n in range(depth)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(width))
        self.head = nn.Linear(width, setting.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images."""
        x = self.layers(self.patches(images).movedim(1, -1))
        return self.head(x.mean((1, 2)))


def model_of(setting: Setting, attention: str, seed: int = 0) -> Swin:
    """Return a model with random weights, always the same."""
    torch.manual_seed(seed)
    return Swin(setting, ATTENTION[attention])


def random_images(setting: Setting, batch: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and their classes."""
    drawn = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, 3, setting.image, setting.image, generator=drawn)
    return images, torch.randint(setting.classes, (batch,), generator=drawn)


def optimizer_of(model: Swin) -> torch.optim.Optimizer:
    """Return what changes the weights."""
    return torch.optim.AdamW(model.parameters(), RATE)


def train(
    model: Swin,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    classes: torch.Tensor,
    steps: int,
) -> list[float]:
    """Change the weights in place, and return the loss of each step."""
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def some_gradients(model: Swin) -> list[torch.Tensor]:
    """Return the newest gradients of what attention is computed from, layer by layer."""
    parts = [x for x in model.modules() if isinstance(x, Windows)]
    return [w.grad for x in parts for w in (x.bias, x.qkv.weight)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Classify images with Swin-T, or train it.")
    add = top.add_argument
    add("--train", action="store_true", help="train on the images, instead of classifying them")
    add("--images", type=whole, default=2, help="of a batch (default: %(default)s)")
    add("--runs", type=whole, default=5, help="to take the median of (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    options = top.parse_args(arguments)
    setting = Setting()
    model = model_of(setting, options.attention)
    images, classes = random_images(setting, options.images)
    print(f"model    {sum(w.numel() for w in model.parameters()):,} random weights")
    if options.train:
        optimizer = optimizer_of(model)
        (loss,), seconds = seconds_of(
            lambda: train(model, optimizer, images, classes, 1), options.runs
        )
        print(f"loss     {loss:.3f} at first")
    else:
        with torch.inference_mode():
            logits, seconds = seconds_of(lambda: model(images), options.runs)
        print(f"classes  {' '.join(map(str, logits.argmax(dim=1).tolist()))}")
    each = "step" if options.train else "batch"
    print(f"speed    {1e3 * seconds:.1f} ms a {each}, attention by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
