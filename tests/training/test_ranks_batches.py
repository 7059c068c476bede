# SPDX-License-Identifier: Apache-2.0
"""Ranks divide one batch between them, add its noise once, and take as long as each other whatever their data."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranked import CASES, VIEWS, Case, calls, case, difference, go, of_pair, start, whole_weights
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.training.rehearsals import Rehearsals

pytestmark = VIEWS
N = 40

# Noise -------------------------------------------------------------------------------------------------------------


def changes(rank: int | None, how: str | None, steps: int) -> np.ndarray:
    """Returns the changes of 10 weights by the noise alone, in units of its standard deviation: (steps, 10)."""
    noise = case(lambda: nn.Linear(4, 2), layers=lambda model: [], data=lambda: numbered(4), losses=nothing)
    training = start(
        noise, how, "plain", num_steps=steps, expected_batch_size=4, examples={"assume_independent": "it is zero"}
    )
    found = [flat(training)]
    for batch in training:
        if training.step(nothing(training.model, batch)):
            found.append(flat(training))
    return -np.diff(np.stack(found), axis=0) * 4 / (1.0 * 0.5)


def flat(training: tp.PrivateTraining) -> np.ndarray:
    return torch.cat([p.flatten() for p in whole_weights(training.model).values()]).numpy()


def nothing(model: nn.Module, batch: Any) -> torch.Tensor:
    return 0 * model(batch[0]).sum(1)


def numbered(features: int = 3, n: int = N) -> TensorDataset:
    """Examples that know their number."""
    x = torch.randn(n, features, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, torch.arange(n) % 2, torch.arange(n))


def assert_standard_normal(z: np.ndarray) -> None:
    """Checks variance and correlations within 5 standard errors; half or twice the variance is 10 of them away."""
    num_steps, num_places = z.shape
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / z.size)
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    correlations = np.corrcoef(z.T)[np.triu_indices(num_places, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(num_steps)
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-6


FOUR = ["hsdp", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("layers", "ddp"))]  # kinds of four ranks
STEPS = 80


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_noise_of_two_ranks_has_the_variance_of_one_process(ranks2, how):
    alone = changes(None, None, STEPS)
    assert_standard_normal(alone)
    for z in ranks2.run(changes, how, STEPS):
        assert_standard_normal(z)
        np.testing.assert_allclose(z, alone, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["hsdp"])
def test_noise_of_four_ranks_has_the_variance_of_one_process(ranks4, how):
    for z in ranks4.run(changes, how, 200):
        assert_standard_normal(z)


# Batches -----------------------------------------------------------------------------------------------------------


def examples(rank: int | None, how: str | None, settings: dict[str, Any]) -> list[list[int]]:
    """Returns the numbers of the examples that this process got in each step, without stand-ins."""
    training = start(case(data=numbered), how, **settings)
    found: list[list[int]] = [[] for _ in range(len(training))]
    for x, y, numbers in training:
        step = training.step_count
        training.step(F.cross_entropy(training.model(x), y, reduction="none"))
        if not training.rehearsing and not training.stands_in:
            found[step] += numbers.tolist()
    return found


def assert_one_batch_divided(parts: list[list[list[int]]], expected: list[list[int]]) -> None:
    for step, of_ranks in enumerate(zip(*parts, strict=True)):
        assert sorted(number for part in of_ranks for number in part) == sorted(expected[step])
        sizes = [len(part) for part in of_ranks]
        assert max(sizes) - min(sizes) <= 1


BATCHES = [
    {"num_steps": 6},
    {"num_steps": 12, "expected_batch_size": 1},
    {"num_steps": 4, "performance": tp.Performance(microbatch_size=3)},
]


@pytest.mark.thorough
@pytest.mark.parametrize("settings", BATCHES)
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_two_ranks_divide_the_batch_of_one_process(ranks2, how, settings):
    assert_one_batch_divided(ranks2.run(examples, how, settings), examples(None, None, settings))


@pytest.mark.thorough
@pytest.mark.parametrize("settings", BATCHES)
@pytest.mark.parametrize("how", FOUR)
def test_four_ranks_divide_the_batch_of_one_process(ranks4, how, settings):
    assert_one_batch_divided(ranks4.run(examples, how, settings), examples(None, None, settings))


def inclusions(rank: int, steps: int, seed: int) -> np.ndarray:
    """Returns which examples this rank got, with keys of the system: (steps, N)."""
    torch.manual_seed(seed)  # as a user's script does, the same on all ranks
    settings = {"num_steps": steps, "expected_batch_size": 16, "test_seed": None}
    settings |= {"examples": {"assume_independent": "it is zero"}}
    training = start(case(data=numbered), "ddp", **settings)
    found = np.zeros((steps, N))
    for x, y, numbers in training:
        found[training.step_count, numbers] = 1
        training.step(F.cross_entropy(training.model(x), y, reduction="none"))
    return found


@pytest.mark.thorough
def test_no_two_ranks_get_the_same_mask_and_pairs_of_examples_are_independent(ranks2):
    steps = 80
    first, second = ranks2.run(inclusions, steps, 0)
    assert not (first * second).any()
    joined = first + second
    assert abs(joined.mean() - 0.4) < 5 * math.sqrt(0.24 / joined.size)
    covariances = np.cov(joined.T)[np.triu_indices(N, 1)]
    assert np.abs(covariances).max() < 5.5 * 0.24 / math.sqrt(steps)  # the largest of 780
    again = sum(ranks2.run(inclusions, 5, 0))
    assert not np.array_equal(again, joined[:5])


# Ranks that do not do the same -------------------------------------------------------------------------------------


def padded(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads texts to the longest of this part, so that ranks have batches of different shapes."""
    ids = nn.utils.rnn.pad_sequence([ids[: 2 + int(ids[0]) % 4] for ids, _ in items], batch_first=True)
    return ids, torch.stack([y for _, y in items])


def of_words(model: Any, batch: Any) -> torch.Tensor:
    ids, y = batch
    words = model(ids) * (ids > 0)[:, :, None]
    return F.cross_entropy(words.sum(1), y, reduction="none")


def words() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


TEXTS = Case(words, data=CASES["embedding"].data, losses=of_words, settings={"examples": {"collate_fn": padded}})


def of_texts(rank: int | None, how: str | None, settings: dict[str, Any], checked: int | None = None) -> Any:
    """Trains on texts of different lengths; rank ``checked`` measures and rehearses every batch, the others do not."""
    with pytest.MonkeyPatch.context() as patch:
        if checked is not None:
            due = rank == checked
            patch.setattr(Layouts, "spot_check_is_due", lambda self: due)
            patch.setattr(Rehearsals, "are_due", lambda *_: (due, due))
        training = start(TEXTS, how, **settings)
        go(training, of_words)
    return whole_weights(training.model)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
@pytest.mark.parametrize(
    "settings", [{"expected_batch_size": 3, "num_steps": 8}, {"performance": tp.Performance(microbatch_size=2)}]
)
def test_ranks_with_other_shapes_measure_as_long_as_they_need(ranks2, how, settings):
    expected = of_texts(None, None, settings)
    for weights in ranks2.run(of_texts, how, settings):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
@pytest.mark.parametrize("checked", [0, 1])
def test_a_rank_that_checks_more_than_the_others_does_not_stop_them(ranks2, how, checked):
    settings = {"expected_batch_size": 3, "num_steps": 8}
    expected = of_texts(None, None, settings)
    for weights in ranks2.run(of_texts, how, settings, checked):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight)


def branching() -> nn.Module:
    """Returns a model in which the data of a rank determine which layers it runs."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        number = int(10 * x[:, 0].abs().sum())
        h = torch.tanh(m.first(x))
        if number % 3:
            h = torch.tanh(m.often(h))
        if number % 2 or len(x) > 4:
            h = torch.tanh(m.again(h))
        return m.last(h)

    parts = {"first": (3, 4), "often": (4, 4), "again": (4, 4), "last": (4, 2)}
    return calls(forward, **{name: (lambda shape=shape: nn.Linear(*shape)) for name, shape in parts.items()})()


def on_other_paths(rank: int | None, how: str, assumed: str | None) -> dict[str, torch.Tensor]:
    training = start(Case(branching), how, expected_batch_size=8, num_steps=8, examples={"assume_independent": assumed})
    go(training, of_pair)
    return whole_weights(training.model)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_ranks_on_different_paths_through_the_model_refuse_or_finish(ranks2, how):
    """An example's loss depends on the others of its part here, which a rehearsal finds; the ranks never wait."""
    assert "examples of a batch depend on each other" in ranks2.refusal(on_other_paths, how, None)
    first, second = ranks2.run(on_other_paths, how, "a reason")
    assert difference(first, second) == 0


def sharded_experts(rank: int | None, how: str | None) -> Any:
    training = start(replace(CASES["experts"], layers=lambda m: m.children()), how, expected_batch_size=2, num_steps=12)
    go(training, of_pair)
    return whole_weights(training.model)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
def test_an_expert_that_only_one_rank_calls_is_trained_as_in_one_process(ranks2, how):
    expected = sharded_experts(None, None)
    for weights in ranks2.run(sharded_experts, how):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight)


def skipping(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.first(x))
    return m.last(m.often_skipped(h) if torch.rand(()) < m.chance else h)


def skipped(rank: int, how: str, chance: float) -> int:
    """Returns the number of steps with a layer that each rank skips by random numbers of its own."""
    model = calls(
        skipping,
        first=lambda: nn.Linear(3, 4),
        often_skipped=lambda: nn.Linear(4, 4),
        last=lambda: nn.Linear(4, 2),
        chance=lambda: chance,
    )
    training = start(case(model, layers=lambda model: []), how, num_steps=12)
    with contextlib.suppress(tp.Refused):
        go(training, of_pair)
    return training.step_count


@pytest.mark.parametrize(("chance", "steps"), [(0.15, 12), (0.0, 8)])
@pytest.mark.filterwarnings("ignore:PrivateTraining. the losses of the first batch do not reach 'often_skipped")
def test_a_layer_that_all_ranks_skip_at_first_is_trained_as_in_one_process(ranks2, chance, steps):
    assert ranks2.run(skipped, "ddp", chance) == [steps, steps]
