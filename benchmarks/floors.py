# SPDX-License-Identifier: Apache-2.0
"""Measures how far the bound U of ``Sketched(r, floor=...)`` exceeds the norm, and the accuracy lost by over-clipping.

    python benchmarks/floors.py ratios                  # U / norm of 64 examples, before and after training
    python benchmarks/floors.py accuracy --seeds 3      # MNIST: 10,000 examples, exact and estimated norms

The data must be where ``torch_privacy.data`` looks for them. Training for the ratios is Adam without privacy.
"""

import argparse
from collections.abc import Callable

import models
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import HashedWords, load_cifar10, load_imdb, load_mnist
from torch_privacy.estimated_norms.floored import norm_bounds
from torch_privacy.experiments.models import networks

EXAMPLES, QUANTILES = 64, (0.1, 0.5, 0.9)
WORDS = 8185  # number of hash values for words

NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "MLP": (lambda: nn.Sequential(nn.Flatten(), models.mlp(1).model), "MNIST", 300),
    "MNIST CNN": (networks.mnist_cnn, "MNIST", 300),
    "CIFAR CNN": (networks.papernot_cnn, "CIFAR-10", 150),
    "BiLSTM": (networks.BiLSTM, "IMDb", 60),
    "GPT": (lambda: models.GPT(WORDS, 127, 128, heads=4, layers=4, tied=False), "IMDb, next word", 60),
}
"""Name -> (network, its data, number of training steps)."""

ESTIMATES = {
    "exact": None,
    "r = 16": tp.Sketched(16),
    "r = 4, floor 0.8": tp.Sketched(4, floor=0.8),
    "r = 4, floor 0.5": tp.Sketched(4, floor=0.5),
}
"""Rows of the table of accuracies."""


def tensors(data: str) -> tuple[Tensor, Tensor]:
    """Returns inputs and classes of the training examples; for next-word prediction a class for every position."""
    if data == "MNIST":
        return load_mnist().train.tensors  # type: ignore[return-value]
    if data == "CIFAR-10":
        return load_cifar10().train.tensors  # type: ignore[return-value]
    length = 150 if data == "IMDb" else 128
    words, labels = load_imdb(vocabulary=HashedWords(WORDS), length=length).train.tensors
    return (words, labels) if data == "IMDb" else (words[:, :-1], words[:, 1:])


def ratios(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Returns quantiles over the examples of the ratio of bound and norm."""
    with tp.record(model) as tape:
        losses = models.per_example(model(x), y)
    jacobian = tape.jacobian(losses)
    ratio = (jacobian.squared_bounds(norm_bounds) / jacobian.squared_norms()).sqrt()
    return "  ".join(f"{value:6.2f}" for value in torch.quantile(ratio.double(), torch.tensor(QUANTILES).double()))


def print_ratios() -> None:
    print(f"{'U / norm':12}{'at the start: 10 %  median  90 %':>34}{'after training':>26}")
    for name, (make, data, num_steps) in NETWORKS.items():
        torch.manual_seed(0)
        model, (x, y) = make(), tensors(data)
        order = torch.randperm(len(x))
        some = order[:EXAMPLES]
        before = ratios(model, x[some], y[some])
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        for batch in order[EXAMPLES:].split(64)[:num_steps]:
            optimizer.zero_grad()
            models.per_example(model(x[batch]), y[batch]).mean().backward()
            optimizer.step()
        print(f"{name:12}{before:>34}{ratios(model, x[some], y[some]):>26}   {num_steps} steps of {data}", flush=True)


def accuracy(setting: tp.Sketched | None, clip_norm: float, seed: int, num_steps: int) -> tuple[float, float]:
    """Returns test accuracy and epsilon at delta 1e-5 of the CNN on the first 10,000 digits at noise multiplier 1."""
    data = load_mnist()
    torch.manual_seed(seed)
    model, few = networks.mnist_cnn(), TensorDataset(*data.train[:10_000])
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.25), few, clipping=tp.Flat(clip_norm), jacobian=setting,
        expected_batch_size=256, num_steps=num_steps, noise_multiplier=1.0, delta=1e-5, test_seed=seed,
    )  # fmt: skip
    for x, y in training:
        training.step(models.per_example(model(x), y))
    x, y = data.test.tensors
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(1000)]) == y
    return float(right.double().mean()), training.spent().epsilon.high


def print_accuracies(seeds: int, num_steps: int) -> None:
    print(f"{'':18}{'epsilon':>9}   accuracy at clip norm 1.5, and 6")
    for name, setting in ESTIMATES.items():
        cells, epsilon = [], 0.0
        for clip_norm in (1.5, 6.0):
            runs = [accuracy(setting, clip_norm, seed, num_steps) for seed in range(seeds)]
            found, epsilon = torch.tensor([run[0] for run in runs]), runs[0][1]
            cells.append(f"{100 * found.mean():6.2f} (± {100 * found.std(correction=0):.2f})")
        print(f"{name:18}{epsilon:9.3f}   {'   '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ratios", "accuracy"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    settings = parser.parse_args()
    if settings.what == "ratios":
        print_ratios()
    else:
        print_accuracies(settings.seeds, settings.steps)


if __name__ == "__main__":
    main()
