# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel model gets the weights that one process gives it, noise included, and refuses what cannot be."""

import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import tensor_parallel_models as models
import torch
from gloo_pool import Pool
from ranked import OPTIMIZERS, VIEWS, difference, subspace, whole_weights
from tensor_parallel_models import losses_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.support import ranks
from torch_privacy.training.agreement import PROBED
from torch_privacy.training.placement.buckets import Slice
from torch_privacy.training.placement.tensor_parallel import Split
from torch_privacy.training.rehearsals import Rehearsals

pytestmark = VIEWS
N = 40
HARDLY_ANY_NOISE = 1e-6
PADDED, PLAN = "table by words", models.by(models.PERCEPTRON_PLAN)


@dataclass(frozen=True)
class Result:
    """What a training ends with; the weights are whole on every rank."""

    weights: dict[str, torch.Tensor]
    moved: float
    non_finite: int
    rule: str
    ledger: dict[str, Any]
    in_words: str


def examples(case: str, dtype: torch.dtype, *, with_nan: bool = False) -> Dataset:
    torch.manual_seed(4)
    x = models.CASES[case][2](N)
    x = x.to(dtype) if x.is_floating_point() else x
    if with_nan:
        x[::4] = torch.nan
    return TensorDataset(x)


def model_of(case: str, mesh: tuple[int, ...] | None, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns the model, in one process (``mesh=None``), on a mesh (t,), or on one (d, t) that also shards rows."""
    make, distribute, _ = models.CASES[case]
    torch.manual_seed(1)
    model = make().to(dtype)
    if mesh is not None:
        names = ("dp", "tp")[-len(mesh) :]
        whole = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        distribute(model, whole["tp"] if len(mesh) > 1 else whole)
        if len(mesh) > 1:
            fully_shard(model, mesh=whole["dp"])
    return model


def start(model: Any, dataset: Dataset, optimizer: str = "sgd", **settings: Any) -> tp.PrivateTraining:
    defaults: dict[str, Any] = {
        "expected_batch_size": 8,
        "num_steps": 4,
        "clipping": tp.Flat(0.5),
        "noise_multiplier": 1.0,
    }
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    return private_training(model, made, dataset, **({"test_seed": 5} | defaults | settings))


def go(training: tp.PrivateTraining, steps: int | None = None) -> None:
    for (x,) in training:
        training.step(losses_of(training.model, x))
        if training.step_count == steps:
            return


def trained(
    rank: int | None, case: str, mesh: tuple[int, ...] | None, optimizer: str = "sgd", **settings: Any
) -> Result:
    dtype, with_nan = settings.pop("dtype", torch.float64), settings.pop("with_nan", False)
    if "num_workers" in settings:
        settings["examples"] = {"num_workers": settings.pop("num_workers")}
    model = model_of(case, mesh, dtype)
    before = whole_weights(model)
    training = start(model, examples(case, dtype, with_nan=with_nan), optimizer, **settings)
    go(training)
    weights, ledger = whole_weights(model), training.ledger.state_dict()
    in_words = training._setup.placement.in_words
    moved = difference(weights, before)
    return Result(weights, moved, training.num_non_finite, repr(training.clipping), ledger, in_words)


def on_ranks(rank: int, case: str, mesh: tuple[int, ...], optimizer: str, settings: dict[str, Any]) -> Result:
    return trained(rank, case, mesh, optimizer, **settings)


@cache
def in_one_process(case: str, optimizer: str, settings: tuple[tuple[str, Any], ...]) -> Result:
    return trained(None, case, None, optimizer, **dict(settings))


def assert_as_in_one_process(
    pool: Pool, case: str, mesh: tuple[int, ...] = (2,), optimizer: str = "sgd", **settings: Any
) -> tuple[Result, list[Result]]:
    """Trains on the ranks and in one process, and compares; ``pytest -rP`` prints the differences."""
    expected = in_one_process(case, optimizer, tuple(settings.items()))
    found = pool.run(on_ranks, case, mesh, optimizer, settings)
    far = max(difference(result.weights, expected.weights) for result in found)
    print(f"{case}, mesh {mesh}, {optimizer}, {settings}: {far:.2g} after moves up to {expected.moved:.2g}")
    assert far <= (1e-6 if settings.get("dtype") is torch.float32 else 1e-12)
    assert expected.moved > 1e-3
    for result in found:
        assert difference(result.weights, found[0].weights) == 0
        assert (result.non_finite, result.rule) == (expected.non_finite, expected.rule)
        assert "tensor parallel over" in result.in_words
    return expected, found


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("case", models.CASES)
def test_sums_of_shards_are_those_of_one_process(ranks2, case):
    assert_as_in_one_process(ranks2, case, noise_multiplier=HARDLY_ANY_NOISE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [*zip(["perceptron", "uneven shards", "tied", PADDED, "table by features"], itertools.cycle(["sgd", "adam"]))],
)
def test_noise_of_shards_is_that_of_one_process(ranks2, case, optimizer):
    assert_as_in_one_process(ranks2, case, optimizer=optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [1.0, HARDLY_ANY_NOISE])
@pytest.mark.parametrize("case", ["perceptron", "attention by heads"])
def test_shards_in_float32_are_those_of_one_process(ranks2, case, noise):
    assert_as_in_one_process(ranks2, case, dtype=torch.float32, noise_multiplier=noise)


RULES = {
    "automatic": tp.Automatic(0.5),
    "per layer": tp.PerLayer(0.5),
    "adaptive": tp.Adaptive(0.5, count_noise_stddev=2.0),
    "micro-batches": tp.MicroBatches(0.5, 3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["perceptron", "tied"])
def test_each_rule_clips_rows_over_shards_as_in_one_process(ranks2, case, rule):
    noise = 1.0 if rule == "adaptive" else HARDLY_ANY_NOISE
    assert_as_in_one_process(ranks2, case, clipping=RULES[rule], noise_multiplier=noise)


SETTINGS: dict[str, dict[str, Any]] = {
    "microbatches": {"performance": tp.Performance(microbatch_size=3)},
    "adaptive in microbatches": {"performance": tp.Performance(microbatch_size=3), "clipping": RULES["adaptive"]},
    "one example a step": {"expected_batch_size": 1, "num_steps": 12},
    "examples that are not finite": {"with_nan": True},
    "workers": {"num_workers": 1},
    "little memory": {"performance": tp.Performance(memory_budget=1.0001)},
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "mesh"), [*zip(SETTINGS, itertools.cycle([(2,), (1, 2), (2, 1)]))], ids=str)
def test_settings_mean_the_same_over_shards(ranks2, mesh, name):
    expected, _ = assert_as_in_one_process(ranks2, "perceptron", mesh, **SETTINGS[name])
    assert (expected.non_finite > 5) == (name == "examples that are not finite")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "mesh"),
    [*zip(["perceptron", "uneven shards", "tied", PADDED, "table by features"], itertools.cycle([(1, 2), (2, 1)]))],
    ids=str,
)
def test_sharded_shards_are_those_of_one_process(ranks2, mesh, case):
    assert_as_in_one_process(ranks2, case, mesh, "adam")


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "noise"), [*zip(models.CASES, itertools.cycle([HARDLY_ANY_NOISE, 1.0]))][::3])
def test_four_ranks_give_the_weights_of_one_process(ranks4, case, noise):
    assert_as_in_one_process(ranks4, case, (2, 2), noise_multiplier=noise)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "case"), [*zip(SETTINGS, itertools.cycle(["perceptron", "uneven shards"]))])
def test_settings_mean_the_same_on_four_ranks(ranks4, case, name):
    assert_as_in_one_process(ranks4, case, (2, 2), "adam", **SETTINGS[name])


@pytest.mark.thorough
def test_the_ledger_is_that_of_one_process(ranks2):
    expected, found = assert_as_in_one_process(ranks2, "perceptron")
    assert found[0].ledger["events"] == expected.ledger["events"]
    assert found[0].in_words == "tensor parallel over 2 ranks"


# Ranks stay alike --------------------------------------------------------------------------------------------------


def rounding_otherwise(rank: int) -> tuple[dict[str, torch.Tensor], str]:
    """Trains with other sums on rank 1, as other hardware would round them."""
    training = start(model_of("perceptron", (2,)), examples("perceptron", torch.float64), clipping=RULES["adaptive"])
    placement: Any = training._setup.placement
    collect = placement.collect

    def collect_otherwise(sums: dict[str, torch.Tensor], *rest: Any) -> None:
        collect({name: total * (1 + 1e-3 * rank) for name, total in sums.items()}, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "collect", collect_otherwise)
        go(training)
    whole = {name: p.detach() for name, p in training.model.named_parameters() if not isinstance(p, DTensor)}
    return whole, repr(training.clipping)


@pytest.mark.thorough
def test_weights_that_all_ranks_have_get_one_release(ranks2):
    (first, rule), (second, other_rule) = ranks2.run(rounding_otherwise)
    assert first.keys() == {"4.weight", "4.bias"}
    assert difference(first, second) == 0
    assert rule == other_rule


def moving(rank: int) -> None:
    """Moves a weight that all ranks have, on rank 1 alone."""
    model: Any = model_of("perceptron", (2,))
    training = start(model, examples("perceptron", torch.float64))
    for (x,) in training:
        if training.step(losses_of(training.model, x)) and rank:
            model[4].bias.data += 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:PrivateTraining. the trained weights were changed")  # by rank 1 alone
def test_weights_that_drift_on_one_rank_are_refused(ranks2):
    assert re.search(r"sums of .*'4\.bias' differ .* a rank has other weights", ranks2.refusal(moving))


def resumed(rank: int) -> float:
    """Stops after two of four steps and goes on from the state; returns how far the weights are from one run's."""
    dataset = examples("perceptron", torch.float64)
    uninterrupted = start(model_of("perceptron", (2,)), dataset, "plain")
    go(uninterrupted)
    first = start(model_of("perceptron", (2,)), dataset, "plain")
    go(first, steps=2)
    again = start(model_of("perceptron", (2,)), dataset, "plain")
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(first.state_dict())
    go(again)
    assert again.step_count == 4
    return difference(whole_weights(again.model), whole_weights(uninterrupted.model))


@pytest.mark.thorough
def test_a_resumed_training_repeats_bit_for_bit(ranks2):
    assert ranks2.run(resumed) == [0.0, 0.0]


# Refusals ----------------------------------------------------------------------------------------------------------


def with_subspace(rank: int) -> None:
    gep = tp.GEP(subspace(), tp.Flat(0.3), tp.Flat(0.2), 0.5)
    start(model_of("perceptron", (2,)), examples("perceptron", torch.float64), clipping=gep)


def with_sketches(rank: int) -> None:
    start(model_of("perceptron", (2,)), examples("perceptron", torch.float64), clipping=tp.Sketched(16, clip_norm=0.5))


def without_data_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    start(parallelize_module(models.perceptron(), mesh["tp"], models.PERCEPTRON_PLAN), TensorDataset(torch.ones(40, 6)))


def two_meshes(rank: int) -> None:
    model = models.perceptron()
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), {"0": ColwiseParallel()})
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("b",)), {"2": ColwiseParallel()})
    start(model, TensorDataset(torch.ones(40, 6)))


def two_dimensions(rank: int) -> None:
    model = nn.Linear(6, 2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh))
    start(model, TensorDataset(torch.ones(40, 6)))


def inside_of_ddp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = DistributedDataParallel(models.perceptron())
    parallelize_module(model.module, mesh, models.PERCEPTRON_PLAN)
    start(model, TensorDataset(torch.ones(40, 6)))


def sharded(**how: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = models.perceptron()
    parallelize_module(model, mesh["tp"], models.PERCEPTRON_PLAN)
    if how.pop("ignores", False):
        how["ignored_params"] = {model[4].bias}
    start(fully_shard(model, mesh=mesh["dp"], **how), TensorDataset(torch.ones(40, 6)))


def sharded_by_columns(rank: int) -> None:
    sharded(shard_placement_fn=lambda p: Shard(p.ndim - 1))


def sharded_in_part(rank: int) -> None:
    sharded(ignores=True)


def replicas_of_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    model = models.perceptron()
    parallelize_module(model, mesh["tp"], models.PERCEPTRON_PLAN)
    start(fully_shard(model, mesh=mesh["replicas", "shards"]), TensorDataset(torch.ones(40, 6)))


def positions(rank: int) -> None:
    refused_while_training("norm by positions")


def behind_zeros(rank: int) -> None:
    """Shards by zeros what follows a norm of every head, so that its rows are zero in the first batch."""
    refused_while_training("norm of heads", lambda model: nn.init.zeros_(model[2].weight))


def refused_while_training(case: str, begin: Callable[[Any], Any] = lambda model: None) -> None:
    make, distribute, batch, _ = models.REFUSED[case]
    model = make()
    begin(model)
    distribute(model, init_device_mesh("cpu", (2,)))
    torch.manual_seed(1)
    go(start(model, TensorDataset(batch(N))))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_subspace, "clipping=GEP("),
        (with_sketches, "clipping=Sketched("),
        (
            without_data_parallel,
            "1 of the 2 processes, and the others would train models of their own",
        ),
        (two_meshes, "DTensors on 2 device meshes"),
        (two_dimensions, "of 2 dimensions"),
        (inside_of_ddp, "wrapped in DistributedDataParallel. Use fully_shard"),
        (sharded_by_columns, "Leave out shard_placement_fn"),
        (sharded_in_part, "not so: 4.bias"),
        (replicas_of_shards, "no replicas of shards"),
        (positions, "SequenceParallel"),
        (behind_zeros, "the clipped sums of the replicated parameters '1.scale' differ"),
    ],
)
def test_what_has_no_slices_is_refused(ranks2, function, message):
    assert message in ranks2.refusal(function)


def detached(losses: torch.Tensor) -> torch.Tensor:
    return losses.detach()


def seeding(losses: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return losses


def shorter(losses: torch.Tensor) -> torch.Tensor:
    return losses[1:]


CHANGES = {f.__name__: f for f in (torch.mean, detached, seeding, shorter)}


def only_on_rank(rank: int, change: str, chosen: int, first_step: int) -> None:
    training = start(model_of("perceptron", (2,)), examples("perceptron", torch.float64))
    try:
        for (x,) in training:
            losses = losses_of(training.model, x)
            if rank == chosen and training.step_count >= first_step:
                losses = CHANGES[change](losses)
            training.step(losses)
    finally:
        assert training.step_count == len(training.ledger) == first_step


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("chosen", "first_step"), [(1, 0), (0, 3)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("mean", "losses of shape () given"),
        ("detached", "requires_grad=False"),
        ("seeding", "torch.manual_seed was called inside of the loop"),
        ("shorter", "examples: must be"),
    ],
)
def test_what_one_rank_refuses_all_refuse(ranks2, change, message, chosen, first_step):
    assert message in ranks2.refusal(only_on_rank, change, chosen, first_step)


class Failing(Dataset):
    """Fails on one rank after some time, and may hold others there, which none of the comparisons at the start sees."""

    def __init__(self, rank: int, after: int, shift: float = 0.0):
        self.shift, self.left = shift, itertools.count(after - rank, -rank)  # which copies of the data set share
        self.start = after - 2 * PROBED

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[torch.Tensor]:
        left = next(self.left)
        if left < 0:
            raise KeyError("in the data")
        x = torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        return (x + self.shift * (left < self.start),)


def with_data(rank: int, after: int, shift: float) -> None:
    go(start(model_of("perceptron", (2,)), Failing(rank, after, shift)))


def test_data_that_fail_or_differ_on_one_rank_are_refused_on_all(ranks2):
    assert "called the model with different inputs" in ranks2.refusal(with_data, 10**6, 1.0)
    outcomes = ranks2.outcomes(with_data, 60, 0.0)
    assert (outcomes[0].kind, outcomes[1].kind) == ("RefusedTogether", "KeyError")
    assert "rank 1 failed with KeyError: 'in the data'" in outcomes[0].text


def rehearsing_otherwise(rank: int, at: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if at == "begins":
            patch.setattr(Rehearsals, "are_due", lambda *_: (not rank, not rank))
        elif rank:
            patch.setattr(Rehearsals, "is_new", lambda self, part, code: self.model.training and not part.thorough)
        go(start(model_of("perceptron", (2,)), examples("perceptron", torch.float64), num_steps=8))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("at", ["begins", "goes on"])
def test_ranks_that_rehearse_otherwise_are_refused(ranks2, at):
    assert "differently from another rank with the same batch" in ranks2.refusal(rehearsing_otherwise, at)


def leaving_early(rank: int) -> int:
    training = start(model_of("perceptron", (2,)), examples("perceptron", torch.float64))
    go(training, steps=2 if rank else None)
    return training.step_count


@pytest.mark.thorough
def test_a_loop_that_one_rank_leaves_early_is_refused_on_the_others(ranks2):
    found, left = ranks2.outcomes(leaving_early)
    assert left.value == 2
    assert "rank 0 begins step 2, rank 1 leaves the loop in step 2" in found.text


def failing_before_the_model(rank: int) -> None:
    """Fails on rank 1 before the model, in which rank 0 waits; rank 1 then ends, as an uncaught error ends a script."""
    ranks.PATIENCE = 0.2
    training = start(model_of("perceptron", (2,)), examples("perceptron", torch.float64))
    try:
        for (x,) in training:
            if rank and training.step_count == 2:
                raise KeyError("in the user's loop")
            training.step(losses_of(training.model, x))
    except KeyError:
        os._exit(7)


@pytest.mark.thorough
def test_an_error_before_the_model_of_one_rank_does_not_keep_the_others_waiting(ranks2):
    waiting, ended = ranks2.outcomes(failing_before_the_model)
    assert ended.exit_code == 7
    assert waiting.kind == "RuntimeError"


# Places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_rows_of_a_shard_have_their_places_in_the_whole_weight(dim):
    weight = torch.arange(30.0).view(5, 6)
    split = Split(weight.shape, dim, 2, 1)
    shard = weight if dim is None else weight.narrow(dim, *split.span)
    rows = shard[1:].reshape(-1)
    found = split.placed(Slice(rows, shard[0].numel()))
    there = found.numbers > 0
    assert torch.equal(found.numbers[there], (torch.arange(30.0)[found.first :][: len(there)])[there])
    assert torch.equal(split.own(found.numbers), rows)
