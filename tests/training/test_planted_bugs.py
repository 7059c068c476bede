# SPDX-License-Identifier: Apache-2.0
"""Checks that an audit catches ten bugs planted in the engine, and leaves the engine without the bug alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.jacobian.rows.blocks import Block
from torch_privacy.jacobian.rows.operator import Jacobian
from torch_privacy.mechanisms.gep.mechanism import _EmbeddingAndResidual
from torch_privacy.mechanisms.sums import BoundCheck
from torch_privacy.sampling.samplers import PoissonSampler
from torch_privacy.training.release import Releases

CAUGHT = 0.05
Plant = Callable[[pytest.MonkeyPatch], None]


def examples(count: int, features: int = 60, classes: int = 80) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(classes, (count,), generator=generator)
    return TensorDataset(torch.randn(count, features, generator=generator), labels)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(60, 80)


def trainer(
    make: Callable[[], nn.Module] = linear, lossed: Callable[..., torch.Tensor] | None = None, **settings: Any
) -> Callable[[Dataset], tp.PrivateTraining]:
    """Returns a training of some steps, as a function of the data set."""
    everyone = settings.pop("full_batches", False)

    def train(dataset: Dataset) -> tp.PrivateTraining:
        model = make()
        if everyone:
            settings["expected_batch_size"] = len(dataset)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        training = private_training(model, optimizer, dataset, test_seed=7, **{"clipping": tp.Flat(1.0), **settings})
        for x, y in training:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            training.step(losses if lossed is None else lossed(losses))
        return training

    return train


def in_parallel(count: int = 4, features: int = 60, classes: int = 80) -> nn.Module:
    """Returns a model with ``count`` large weights, one after the other."""
    torch.manual_seed(0)
    hidden = [nn.Linear(features, features, bias=False) for _ in range(count - 1)]
    return nn.Sequential(*hidden, nn.Linear(features, classes, bias=False))


class Repeated(nn.Module):
    """Adds one weight's outputs for 9 copies of the input: its row is 9 times that of one use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(80, 60) / 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((nn.functional.linear(x, self.weight) for _ in range(9)), torch.zeros(1))


def halved_noise(patch: pytest.MonkeyPatch) -> None:
    changed_stddevs(patch, lambda releases, step: 0.5)


def noise_missing_for_one_microbatch(patch: pytest.MonkeyPatch) -> None:
    def factor(releases: Releases, step: int) -> float:
        count = max(len(releases.draws.parts(step)), 1)
        return np.sqrt((count - 1) / count)

    changed_stddevs(patch, factor)


def changed_stddevs(patch: pytest.MonkeyPatch, factor: Callable[[Releases, int], float]) -> None:
    release = Releases.release

    def changed(self: Releases, step: int, sums: Any, stddevs: Any, places: Any = None) -> None:
        release(self, step, sums, {name: factor(self, step) * stddev for name, stddev in stddevs.items()}, places)

    patch.setattr(Releases, "release", changed)


def clip_norm_for_each_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tp.Flat, "groups", lambda self, names: {name: (name,) for name in names})
    patch.setattr(BoundCheck, "check", lambda self, *_: None)


def shuffled_batches(patch: pytest.MonkeyPatch) -> None:
    def indices(self: PoissonSampler, step: int) -> np.ndarray:
        size = round(self.num_examples * self.sampling_probability)
        per_epoch = self.num_examples // size
        order = np.random.default_rng(step // per_epoch).permutation(self.num_examples)
        return np.sort(order[size * (step % per_epoch) :][:size])

    patch.setattr(PoissonSampler, "indices", indices)


def residuals_are_not_clipped(patch: pytest.MonkeyPatch) -> None:
    factors = _EmbeddingAndResidual._factors

    def changed(self: _EmbeddingAndResidual, part: Any, squares: Any) -> Any:
        found = factors(self, part, squares)
        return {group: torch.ones_like(c) for group, c in found.items()} if part is self._residual else found

    patch.setattr(_EmbeddingAndResidual, "_factors", changed)
    patch.setattr(BoundCheck, "check", lambda self, *_: None)


def uses_of_a_weight_are_not_added(patch: pytest.MonkeyPatch) -> None:
    def squared_norms(self: Jacobian, names: Any = None, **_: Any) -> torch.Tensor:
        ops = [op for block in self._blocks for op in block.ops]
        return torch.stack([op.rows().flatten(1).square().sum(1) for op in ops]).sum(0)

    patch.setattr(Block, "merge", lambda self: None)
    patch.setattr(Jacobian, "squared_norms", squared_norms)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Plants no bug."""


def embedded() -> tp.GEP:
    generator = torch.Generator().manual_seed(5)
    return tp.GEP(tp.AnchorSubspace(torch.randn(40, 60, generator=generator), 20), tp.Flat(1.0), tp.Flat(1.0))


MICROBATCHES: dict[str, Any] = {
    "expected_batch_size": 60,
    "num_steps": 20,
    "performance": tp.Performance(microbatch_size=60),
}
MANY = tp.GradientCanaries(4000)
CASES: dict[str, tuple[Callable[..., Any], Any, Plant]] = {
    "noise half as large": (
        lambda: trainer(full_batches=True, num_steps=4, noise_multiplier=3.5),
        MANY,
        halved_noise,
    ),
    "noise of one microbatch missing": (
        lambda: trainer(noise_multiplier=1.0, **MICROBATCHES),
        examples(1000),
        noise_missing_for_one_microbatch,
    ),
    "each layer clipped to the whole norm": (
        lambda: trainer(in_parallel, full_batches=True, num_steps=4, noise_multiplier=3.5),
        tp.GradientCanaries(3600),
        clip_norm_for_each_layer,
    ),
    "residuals not clipped": (
        lambda: trainer(expected_batch_size=440, num_steps=10, noise_multiplier=1.0, clipping=embedded()),
        MANY,
        residuals_are_not_clipped,
    ),
    "uses of a tied weight not added": (
        lambda: trainer(Repeated, full_batches=True, num_steps=4, noise_multiplier=3.5),
        examples(1000),
        uses_of_a_weight_are_not_added,
    ),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("planted", [False, True], ids=["honest", "planted"])
@pytest.mark.parametrize("name", CASES)
def test_an_audit_catches_a_planted_bug(name: str, planted: bool, monkeypatch: pytest.MonkeyPatch):
    make, canaries, plant = CASES[name]
    for module in ("audit", "audit_sums"):  # blocks and ties, drawn anew in each audit: 5 % of honest ones would fail
        monkeypatch.setattr(f"torch_privacy.privacy.{module}.secrets", SimpleNamespace(randbits=lambda bits: 5))
    train = make()
    if planted:
        plant(monkeypatch)
    result = tp.audit(train, examples(400), canaries, test_seed=11)
    assert result.is_rejected == planted, (name, result.p_value, result.outcome)


def test_examples_that_depend_on_each_other_are_caught():
    class Centered(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))  # as batch normalization

    def centered() -> nn.Module:
        torch.manual_seed(0)
        return Centered(60, 80)

    def magnitudes(observed: tp.Observed) -> torch.Tensor:
        assert observed.projections is not None
        return observed.projections.abs().amax(0)

    settings = {"expected_batch_size": 100, "num_steps": 20, "noise_multiplier": 2.0}
    settings |= {"examples": {"assume_independent": "it is not"}}
    canaries = TensorDataset(100 * examples(400).tensors[0], torch.zeros(400, dtype=torch.int64))
    others = TensorDataset(examples(4000).tensors[0], torch.zeros(4000, dtype=torch.int64))
    honest = tp.audit(trainer(**settings), others, canaries, score=magnitudes, test_seed=3)
    planted = tp.audit(trainer(centered, **settings), others, canaries, score=magnitudes, test_seed=3)
    assert not honest.is_rejected
    assert planted.is_rejected, planted.p_value


# Independent games: the weights stay as they are, so every step, or every epoch, is a game with a coin of its own.
# Class 0 has the gradient (-1/2, 1/2) of features, which are so large that it is clipped to length 1.


class Recorder(torch.optim.SGD):
    """Keeps the gradients that the training releases, and moves nothing."""

    def __init__(self, model: nn.Linear):
        super().__init__(model.parameters(), lr=0.0)
        self.weight, self.seen = model.weight, []

    def step(self, closure: Any = None) -> None:
        assert self.weight.grad is not None
        self.seen.append(self.weight.grad.clone())


class Coins(Dataset):
    """Examples with the second feature, and one with the first that is there in every second game only.

    Where it is not there, its features are zero, and so is its gradient.
    """

    def __init__(self, count: int, steps_of_a_game: int):
        self.count, self.steps_of_a_game = count, steps_of_a_game
        self.training: tp.PrivateTraining | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        step = 0 if self.training is None else self.training.step_count
        is_there = step // self.steps_of_a_game % 2 == 0
        return torch.tensor([0.0, 1000.0] if index else [1000.0 * is_there, 0.0]), 0


def noisy_sums(dataset: Dataset, weight: float = 0.0, **settings: Any) -> tuple[torch.Tensor, tp.PrivateTraining]:
    """Returns the noisy sums (T, 2, 2) of a training on two features and two classes, and the training."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[0.0, 0.0], [weight, 0.0]])
    optimizer = Recorder(model)
    training = tp.PrivateTraining(model, optimizer, dataset, clipping=tp.Flat(1.0), **settings)
    if isinstance(dataset, Coins):
        dataset.training = training
    for x, y in training:
        training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
    return settings["expected_batch_size"] * torch.stack(optimizer.seen), training


@pytest.mark.thorough
@pytest.mark.parametrize("planted", [False, True], ids=["honest", "planted"])
def test_shuffled_batches_are_caught(planted: bool, monkeypatch: pytest.MonkeyPatch):
    if planted:
        shuffled_batches(monkeypatch)
    noise, epoch = 0.25, 5
    settings = {"expected_batch_size": 4, "num_steps": (400 if planted else 100) * epoch, "noise_multiplier": noise}
    sums, training = noisy_sums(Coins(20, epoch), **settings, test_seed=1)
    along = (sums[:, 1, 0] - sums[:, 0, 0]).double() / np.sqrt(2)
    scores = torch.logsumexp(along.view(-1, epoch) / noise**2, 1)
    claim = privacy.compose([(training.event, epoch)])
    result = tp.audit_scores(scores[::2], scores[1::2], claim, independent=True)
    assert result.is_rejected == planted, result.p_value


@pytest.mark.thorough
@pytest.mark.parametrize("planted", [False, True], ids=["honest", "planted"])
def test_a_divisor_that_depends_on_the_batch_is_caught(planted: bool, monkeypatch: pytest.MonkeyPatch):
    if planted:
        release = Releases.release

        def changed(self: Releases, step: int, sums: Any, stddevs: Any, places: Any = None) -> None:
            for total in sums.values():
                total.mul_(4 / max(len(self.draws.indices(step)), 1))
            release(self, step, sums, stddevs, places)

        monkeypatch.setattr(Releases, "release", changed)
    labels = torch.tensor([0] * 7 + [1])
    data = TensorDataset(torch.tensor([[0.0, 1000.0]]).repeat(8, 1), labels)
    sums, training = noisy_sums(data, expected_batch_size=4, num_steps=1000, noise_multiplier=1.0, test_seed=1)
    along = (sums[:, 1, 1] - sums[:, 0, 1]) / np.sqrt(2)  # that of the others; the canary, the last, has its opposite
    scores: tuple[list[float], list[float]] = ([], [])
    for step in range(1000):
        batch = training._state.releases.draws.indices(step)  # a fair coin for the canary in each step
        others = len(batch) - (7 in batch)
        expected = 4.0 if others else 0.0
        scores[int(7 not in batch)].append((expected - float(along[step])) / (others + 1))
    result = tp.audit_scores(*scores, privacy.compose([(privacy.Gaussian(1.0), 1)]), independent=True)
    assert result.is_rejected == planted, result.p_value


@pytest.mark.thorough
@pytest.mark.parametrize("planted", [False, True], ids=["honest", "planted"])
def test_one_key_for_two_runs_is_caught(planted: bool):
    settings = {"expected_batch_size": 2, "num_steps": 100, "noise_multiplier": 2.0}
    first, _ = noisy_sums(Coins(2, 1), **settings, test_seed=1)
    second, training = noisy_sums(Coins(2, 1), weight=-1.0, **settings, test_seed=1 if planted else 2)
    scores = (first - second).flatten(1).norm(dim=1)
    claim = privacy.compose([(training.event, 2)])
    result = tp.audit_scores(scores[::2], scores[1::2], claim, independent=True)
    assert result.is_rejected == planted, result.p_value
