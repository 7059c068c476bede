# SPDX-License-Identifier: Apache-2.0
"""Provides the networks of the benchmarks, each with one batch of random data: name -> function in ``MODELS``.

Those of the papers come from ``torch_privacy_papers.models.networks``; the others are here.

Sizes are arguments, so that ``growth.py`` can vary them; the defaults are those of the benchmarks. Random data cost as
much as real data. ``load`` moves a network to a device and a dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_privacy_papers.models import networks


class Problem(NamedTuple):
    """A network with one batch: inputs x (n, ...) and classes y (n,), or (n, t) for a class at every position."""

    model: nn.Module
    x: Tensor
    y: Tensor


def per_example(out: Tensor, y: Tensor) -> Tensor:
    """Returns the cross entropy of every example (n,), averaged over its positions; in float32, as under autocast."""
    losses = F.cross_entropy(out.float().flatten(0, y.ndim - 1), y.flatten(), reduction="none")
    return losses if y.ndim == 1 else losses.view_as(y).mean(1)


def adult(batch: int = 256) -> Problem:
    return Problem(networks.adult_perceptron(), (torch.rand(batch, 123) < 0.11).float(), torch.randint(2, (batch,)))


def mlp(batch: int = 256, width: int = 1000) -> Problem:
    hidden = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return Problem(nn.Sequential(*hidden, nn.Linear(width, 10)), torch.rand(batch, 784), torch.randint(10, (batch,)))


def mnist_cnn(batch: int = 256) -> Problem:
    return Problem(networks.mnist_cnn(), torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,)))


def cifar_cnn(batch: int = 128) -> Problem:
    return Problem(networks.papernot_cnn(), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


def resnet20_gn(batch: int = 64) -> Problem:
    """Returns ResNet-20 for CIFAR (He et al. 2016, section 4.2) with GroupNorm, 0.27 million parameters."""
    model = networks.ResNet20(groups=8, affine=True, normed_shortcut=False)
    return Problem(model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (n, heads, t, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer layer with pre-normalization."""

    def __init__(self, width: int, heads: int, *, causal: bool):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, heads: int, layers: int, *, tied: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns the normalized output of the blocks, (n, t, width)."""
        # Positions are looked up for every example, because Opacus cannot attribute a broadcast sum to examples.
        positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        return self.norm(self.blocks(self.tokens(ids) + self.positions(positions)))


class LastTokenGPT(GPT):
    """A GPT that classifies texts of different lengths by their last tokens; id 0 is padding."""

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        return self.head(self.hidden(ids)[torch.arange(len(ids), device=ids.device), lengths - 1])


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of low rank added to it (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_lora(problem: Problem, rank: int) -> Problem:
    """Returns the problem with its network frozen, and adapters at the qkv and output layers of attention."""
    for p in problem.model.parameters():
        p.requires_grad_(False)
    for module in problem.model.modules():
        if isinstance(module, Attention):
            module.qkv, module.out = LoRA(module.qkv, rank), LoRA(module.out, rank)
    return problem


def gpt(batch: int = 8, positions: int = 128, width: int = 256, layers: int = 4) -> Problem:
    """Returns a GPT with four layers, four heads and an untied output layer, 3.7 million parameters."""
    model = GPT(1000, positions, width, heads=4, layers=layers, tied=False)
    return Problem(model, torch.randint(1000, (batch, positions)), torch.randint(1000, (batch, positions)))


def gpt_tied(batch: int = 8, positions: int = 128) -> Problem:
    """Returns the same GPT with its output layer tied to the embedding of tokens."""
    model = GPT(1000, positions, 256, heads=4, layers=4, tied=True)
    return Problem(model, torch.randint(1000, (batch, positions)), torch.randint(1000, (batch, positions)))


def gpt_last_token(batch: int = 8, positions: int = 128) -> Problem:
    """Returns a GPT of the same size that sorts texts of 32 to 128 tokens into 1,000 classes."""
    model = LastTokenGPT(1000, positions, 256, heads=4, layers=4, tied=False)
    lengths = torch.randint(positions // 4, positions + 1, (batch, 1))
    ids = torch.where(torch.arange(positions) < lengths, torch.randint(1, 1000, (batch, positions)), 0)
    return Problem(model, ids, torch.randint(1000, (batch,)))


def gpt2_small(batch: int = 2, positions: int = 512) -> Problem:
    """Returns GPT-2 small: 12 layers, width 768, tied embedding, 124 million parameters (at 1024 positions)."""
    model = GPT(50257, positions, 768, heads=12, layers=12, tied=True)
    return Problem(model, torch.randint(50257, (batch, positions)), torch.randint(50257, (batch, positions)))


def gpt2_small_lora(batch: int = 2, positions: int = 512, rank: int = 8) -> Problem:
    """Returns GPT-2 small, frozen, with adapters of rank 8 at the qkv and output layers of attention."""
    return with_lora(gpt2_small(batch, positions), rank)


class Encoder(nn.Module):
    """An encoder of texts with a class from the mean over the positions."""

    def __init__(self, vocabulary: int, positions: int, width: int, heads: int, layers: int, classes: int):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Parameter(0.02 * torch.randn(positions, width)),
        )
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)).mean(1))


def encoder(batch: int = 8, positions: int = 256) -> Problem:
    """Returns an encoder of 12 layers and width 768, as large as BERT base: 109 million parameters."""
    model = Encoder(30522, positions, 768, heads=12, layers=12, classes=2)
    return Problem(model, torch.randint(30522, (batch, positions)), torch.randint(2, (batch,)))


def gpt2_small_1024(batch: int = 8) -> Problem:
    return gpt2_small(batch, positions=1024)


def bilstm_imdb(batch: int = 256, positions: int = 150) -> Problem:
    """Returns the IMDb network of Bu et al. (2021), with both of PyTorch's biases per gate."""
    model = networks.BiLSTM(one_bias=False)
    return Problem(model, torch.randint(8185, (batch, positions)), torch.randint(2, (batch,)))


class ViT(nn.Module):
    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.class_token.expand(len(x), -1, -1), h], dim=1) + self.positions
        return self.head(self.norm(self.blocks(h))[:, 0])


def vit_b16(batch: int = 64) -> Problem:
    """Returns ViT-B/16 at 224 pixels, 86 million parameters."""
    model = ViT(224, 16, 768, heads=12, layers=12, classes=1000)
    return Problem(model, torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm; a 1x1 convolution in the shortcut if the shape changes."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(32, after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(32, after)),
        )
        shortcut = [nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after)]
        self.shortcut = nn.Sequential(*shortcut) if stride != 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet18_gn(batch: int = 32) -> Problem:
    """Returns ResNet-18 for CIFAR (a 3x3 stem without pooling) with GroupNorm, 11.2 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    before = 64
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers += [BasicBlock(before, width, stride), BasicBlock(width, width, 1)]
        before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return Problem(nn.Sequential(*layers, *head), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with GroupNorm; a 1x1 convolution in the shortcut if the shape changes."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        after = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.GroupNorm(32, after)),
        )
        changes = stride != 1 or before != after
        shortcut = [nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after)]
        self.shortcut = nn.Sequential(*shortcut) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet50_gn(batch: int = 64) -> Problem:
    """Returns ResNet-50 at 224 pixels with GroupNorm, 25.6 million parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, before = [], 64
    for width, stride, depth in [(64, 1, 3), (128, 2, 4), (256, 2, 6), (512, 2, 3)]:
        for i in range(depth):
            blocks.append(Bottleneck(before, width, stride if i == 0 else 1))
            before = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return Problem(nn.Sequential(*stem, *blocks, *head), torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


ON_CPU = (  # at most seconds per step
    *(adult, mlp, mnist_cnn, cifar_cnn, resnet20_gn, resnet18_gn),
    *(gpt, gpt_tied, gpt_last_token, bilstm_imdb, gpt2_small, gpt2_small_lora, encoder),
)
ON_GPU = (gpt2_small_1024, vit_b16, resnet50_gn)
MODELS: dict[str, Callable[[], Problem]] = {make.__name__: make for make in (*ON_CPU, *ON_GPU)}
DTYPES = {"float32": "all in float32", "bf16": "all in bfloat16", "autocast": "float32 under autocast to bfloat16"}


def checkpointed(problem: Problem) -> Problem:
    """Returns the problem with activation checkpointing of every transformer layer."""
    for module in problem.model.modules():
        if isinstance(module, Block):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return problem


class Autocast(nn.Module):
    """The model with its forward under autocast to bfloat16."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.model(x)


def load(name: str, device: str = "cpu", dtype: str = "float32") -> Problem:
    """Returns the named network and its batch, always the same, on a device and in one of ``DTYPES``."""
    torch.manual_seed(0)
    return place(MODELS[name](), device, dtype)


def place(problem: Problem, device: str, dtype: str) -> Problem:
    model, x, y = problem
    if dtype == "bf16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
    model = Autocast(model) if dtype == "autocast" else model
    return Problem(model.to(device), x.to(device), y.to(device))
