# SPDX-License-Identifier: Apache-2.0
"""Sums that are computed when their bucket is reduced, recordings of sharded models, and what ranks must know alike."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_pool import Pool
from ranked import (
    CASES,
    VIEWS,
    calls,
    case,
    difference,
    go,
    layers,
    mesh_of,
    mlp,
    of_pair,
    start,
    trained,
    whole_weights,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.jacobian.rows.streamed_sum import DeferredSum
from torch_privacy.training.placement import base, buckets

pytestmark = VIEWS


# Deferred sums -----------------------------------------------------------------------------------------------------


def in_small_buckets(rank: int, name: str, how: str) -> tuple[dict[str, Tensor], int]:
    """Trains with sums that are never in memory together; returns the weights, and how many parts were computed."""
    computed, compute = [], DeferredSum.compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "DEFERRED_BYTES", 0)
        patch.setattr(buckets, "BUCKET_BYTES", 64)
        patch.setattr(DeferredSum, "compute", lambda self, names: computed.append(names) or compute(self, names))
        result = trained(rank, name, how, "sgd", {"noise_multiplier": 1e-6})
    return result.weights, len(computed)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "ddp"])
@pytest.mark.parametrize(
    "name", ["uneven", "microbatches", "tied", "prelu and weight norm", "gru", "non-finite examples", "memory budget"]
)
def test_sums_computed_bucket_by_bucket_are_those_of_one_process(ranks2, name, how):
    expected = trained(None, name, None, "sgd", {"noise_multiplier": 1e-6})
    found = ranks2.run(in_small_buckets, name, how)
    assert max(difference(weights, expected.weights) for weights, _ in found) <= 1e-12
    assert min(parts for _, parts in found) >= 3


# Evaluation between steps ------------------------------------------------------------------------------------------


def with_evaluation(rank: int | None, how: str | None) -> tuple[list[float], dict[str, Tensor]]:
    training, scores = start(CASES["uneven"], how), []
    x = torch.linspace(-1, 1, 30).view(10, 3)
    for batch in training:
        if training.step(of_pair(training.model, batch)):
            with torch.no_grad():
                scores.append(float(training.model(x).square().sum()))
    return scores, whole_weights(training.model)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "root", "ddp"])
def test_the_model_may_be_evaluated_between_steps(ranks2, how):
    """FSDP leaves the root's weights gathered after an evaluation, and would go on with these after the next update."""
    scores, weights = with_evaluation(None, None)
    for theirs, their_weights in ranks2.run(with_evaluation, how):
        assert theirs == pytest.approx(scores, abs=1e-9)
        assert difference(their_weights, weights) <= 1e-9


# record ------------------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return calls(lambda m, x: m.out(m.f(x)), f=lambda: weight_norm(nn.Linear(3, 5)), out=lambda: nn.Linear(5, 2))()


def recorded(rank: int, make: Any) -> tuple[bool, list[str]]:
    """Returns whether the rows of this rank's examples are exact, and the types of parameters that remain."""
    torch.manual_seed(rank)
    x, y = torch.randn(4 + rank, 3), torch.randint(2, (4 + rank,))
    alone, model = make(), layers(make(), case(), mesh_of("layers"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    jacobian = tape.jacobian(losses)
    total = jacobian.weighted_sum(torch.arange(len(x)) + 1.0)
    separate = F.cross_entropy(alone(x), y, reduction="none")
    rows = [torch.autograd.grad(loss, list(alone.parameters()), retain_graph=True) for loss in separate]
    names = [name for name, _ in alone.named_parameters()]
    norms = torch.stack([sum(part.square().sum() for part in row) for row in rows])  # type: ignore[arg-type]
    exact = torch.allclose(jacobian.squared_norms(), norms, rtol=1e-10, atol=0)
    for k, name in enumerate(names):
        exact &= torch.allclose(total[name], sum((i + 1) * row[k] for i, row in enumerate(rows)), atol=1e-12)
    del jacobian
    F.cross_entropy(model(x), y).backward()  # an ordinary update in between: the next recording must see it
    optimizer.step()
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    gathered = {name: p.detach().clone() for name, p in model.named_parameters()}
    tape.clipped_sum(losses, {"all": names}, lambda rows, _: rows.weighted_sum(torch.ones(len(x))))
    exact &= difference(gathered, whole_weights(model)) == 0
    return exact, sorted({type(p).__name__ for p in model.parameters()})


@pytest.mark.parametrize("make", [mlp, normed])
def test_a_sharded_model_is_recorded_with_a_rank_s_own_examples(ranks2, make):
    assert ranks2.run(recorded, make) == [(True, ["DTensor"])] * 2


# What ranks must know alike ----------------------------------------------------------------------------------------


def threads_differ(rank: int) -> None:
    torch.set_num_threads(1 + rank)
    try:
        start(CASES["uneven"], "ddp")
    finally:
        torch.set_num_threads(1)


def directions_differ(rank: int, how: str) -> None:
    """One rank has other auxiliary data, which their digest does not show."""
    generator = torch.Generator().manual_seed(rank)
    auxiliary = [torch.randn(3, generator=generator) for _ in range(30)]
    embedding = tp.BGEP(tp.AnchorSubspace(auxiliary, 4, collate_fn=torch.stack), tp.Flat(0.3))  # type: ignore[arg-type]
    go(start(case(mechanism=lambda: embedding), how), of_pair)


def learning_rates_differ(rank: int) -> None:
    training = start(case(num_steps=6), "layers", "plain")
    for batch in training:
        if training.step(of_pair(training.model, batch)) and training.step_count == 1 and rank:
            training.optimizer.param_groups[0]["lr"] = 0.5


def updates_differ(rank: int) -> None:
    """What each rank does after an update has one name and differs."""

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.1 * (1 + rank), 0.1 * (1 + rank))

    go(start(case(num_steps=6), "ddp", "sgd", after_update=clamp), of_pair)


def data_differ(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    own = TensorDataset(torch.randn(40, 3, generator=generator), torch.rand(40, generator=generator))
    start(case(data=lambda: own), "ddp")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (threads_differ, "the ranks differ in threads (rank 0: 1, rank 1: 2)"),
        (directions_differ, "the ranks computed different directions from the auxiliary data in step 0"),
        (learning_rates_differ, "before step 1 the optimizer of rank 1 has other settings than that of rank 0"),
        (updates_differ, "has other weights than a rank with the same shard"),
        (data_differ, "the ranks hold different data"),
    ],
)
def test_ranks_that_would_drift_apart_are_refused(ranks2: Pool, function: Any, message: str):
    arguments = ("layers",) if function is directions_differ else ()
    assert message in ranks2.refusal(function, *arguments)
