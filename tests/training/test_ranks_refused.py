# SPDX-License-Identifier: Apache-2.0
"""What one rank refuses all ranks refuse, with one text; none waits for ever, and nothing is released."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranked import CASES, case, difference, go, layers, mesh_of, mlp, of_pair, start, whole_weights
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import Dataset, Subset, TensorDataset
from trainings import data, private_training

import torch_privacy as tp
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.privacy import Ledger

SHARDED_OR_NOT = pytest.mark.parametrize("how", ["layers", "ddp"])


def training_of(model: nn.Module, optimizer: Any = None, dataset: Any = None, **settings: Any) -> tp.PrivateTraining:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    defaults = {"expected_batch_size": 8, "num_steps": 3, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    return private_training(model, optimizer, dataset or data(), **({"test_seed": 5} | defaults | settings))


# Models and optimizers ---------------------------------------------------------------------------------------------


def plain_model(rank: int) -> None:
    training_of(mlp())


def data_parallel(rank: int) -> None:
    training_of(DataParallel(mlp()))


def fsdp1(rank: int) -> None:
    training_of(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))


def ddp_inside(rank: int) -> None:
    training_of(nn.Sequential(DistributedDataParallel(mlp()), nn.Tanh()))


def static_graph(rank: int) -> None:
    training_of(DistributedDataParallel(mlp(), static_graph=True))


def optimizer_made_before(rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_of(layers(model, case(), mesh_of("layers")), optimizer)


def offloaded(rank: int) -> None:
    training_of(fully_shard(mlp(), mesh=mesh_of("layers"), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def two_meshes(rank: int) -> None:
    model = mlp()
    fully_shard(model[0], mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    training_of(fully_shard(model, mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))))


def frozen_only(rank: int) -> None:
    training_of(layers(mlp().requires_grad_(False), case(), mesh_of("layers")))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (plain_model, "runs with 2 processes, and each would train a model of its own. Apply fully_shard"),
        (data_parallel, "nn.DataParallel splits a batch"),
        (fsdp1, r"FullyShardedDataParallel (FSDP1) keeps its parameters in flat vectors"),
        (ddp_inside, "module '0' is wrapped in DistributedDataParallel. Wrap the whole model"),
        (static_graph, "static_graph=True"),
        (optimizer_made_before, "fully_shard"),
        (offloaded, "CPUOffloadPolicy"),
        (two_meshes, "2 different device meshes"),
        (frozen_only, "nothing to train"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*FSDP.*is deprecated:FutureWarning")
def test_models_that_ranks_cannot_train_are_refused(ranks2, function, message):
    assert message in ranks2.refusal(function)


# Ranks that differ -------------------------------------------------------------------------------------------------


def differing(rank: int, how: str, on_rank_1: str) -> None:
    if on_rank_1 == "data":
        generator = torch.Generator().manual_seed(rank)
        dataset = TensorDataset(torch.randn(40, 3, generator=generator), torch.randint(2, (40,), generator=generator))
    else:
        dataset = Subset(data(), range(40 - rank)) if on_rank_1 == "n" else data()
    model = mlp()
    if on_rank_1 == "weights" and rank:
        nn.init.zeros_(model[2].bias)
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        if on_rank_1 == "weights" and rank:  # which DDP has made equal
            nn.init.zeros_(model[2].bias)
    else:
        wrapped = layers(model, case(), mesh_of(how))
    rate = 0.2 if on_rank_1 == "lr" and rank else 0.1
    kind = torch.optim.Adam if on_rank_1 == "optimizer" and rank else torch.optim.SGD
    settings: dict[str, dict[str, Any]] = {
        "test_seed": {"test_seed": 6},
        "test_seed missing": {"test_seed": None},
        "clip_norm": {"clipping": tp.Flat(0.6)},
        "rule": {"clipping": tp.Automatic(0.5)},
        "noise_multiplier": {"noise_multiplier": 1.1},
        "num_steps": {"num_steps": 4},
        "expected_batch_size": {"expected_batch_size": 9},
        "microbatch_size": {"performance": tp.Performance(microbatch_size=3)},
        "views": {"examples": {"views": 2}},
        "delta": {"delta": 1e-3},
        "budget": {"examples": {"budget": tp.privacy.Budget(3.0, 1e-3)}},
        "prior_releases": {"prior_releases": [tp.privacy.Release(tp.privacy.Gaussian(1.0), "before")]},
        "memory_budget": {"performance": tp.Performance(memory_budget=1.5)},
        "assume_independent": {"examples": {"assume_independent": "it is"}},
    }
    training_of(wrapped, kind(wrapped.parameters(), lr=rate), dataset, **settings.get(on_rank_1, {}) if rank else {})


NAMED = {"test_seed missing": "test_seed", "clip_norm": "clipping", "rule": "clipping", "n": "num_examples"}
NAMED |= {"lr": "optimizer"}
DIFFERENT = [
    "test_seed", "test_seed missing", "clip_norm", "rule", "noise_multiplier", "num_steps", "expected_batch_size",
    "microbatch_size", "views", "delta", "budget", "prior_releases", "memory_budget", "assume_independent", "n", "lr",
    "optimizer",
]  # fmt: skip


@pytest.mark.parametrize("setting", DIFFERENT)
def test_settings_that_differ_between_ranks_are_refused(ranks2, setting):
    how = "layers" if setting in ("test_seed", "n") else "ddp"
    assert f"the ranks differ in {NAMED.get(setting, setting)} (rank 0: " in ranks2.refusal(differing, how, setting)


def with_function(rank: int) -> int:
    """Keeps a function, which each rank has at another place in its memory, in a group of the optimizer."""
    ballast = [object() for _ in range(1000 * rank)]
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "rule": lambda rate: len(ballast)}], lr=0.1)
    training = training_of(model, optimizer, num_steps=1)
    go(training, of_pair)
    return training.step_count


def test_functions_in_groups_of_the_optimizer_are_the_same_on_all_ranks(ranks2):
    assert ranks2.run(with_function) == [1, 1]


@SHARDED_OR_NOT
def test_data_that_were_split_between_ranks_are_refused(ranks2, how):
    assert "the same indices give other examples" in ranks2.refusal(differing, how, "data")


def in_another_order(rank: int, as_tensors: bool) -> None:
    """All labels are equal, as most are where one class is rare."""
    x = data().tensors[0].roll(rank, 0)
    items: Any = TensorDataset(x, torch.zeros(len(x), dtype=torch.int64))
    training_of(DistributedDataParallel(mlp()), dataset=items if as_tensors else [*items])


def test_data_in_another_order_are_refused(ranks2):
    """An example would be on both ranks in one step: twice in its sum."""
    for as_tensors in (True, False):
        assert "the same indices give other examples" in ranks2.refusal(in_another_order, as_tensors)


class Noisy(Dataset):
    """Has a generator of its own, so that labels alone can be compared; one in 19 is rare."""

    def __init__(self, shift: int):
        self.shift, self.generator = shift, torch.Generator().manual_seed(shift)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(6, generator=self.generator), int((i + self.shift) % 19 == 0)


def noisy_in_another_order(rank: int) -> None:
    training_of(DistributedDataParallel(mlp()), dataset=Noisy(rank))


def test_random_data_in_another_order_are_refused_by_their_labels(ranks2):
    assert "the same indices give other examples" in ranks2.refusal(noisy_in_another_order)


def shuffled_in_each_epoch(rank: int) -> None:
    rows = [*data()]
    training = training_of(DistributedDataParallel(mlp()), dataset=rows)
    for batch in training:
        if training.step(of_pair(training.model, batch)):
            random.Random(rank).shuffle(rows)


def test_rows_that_move_are_refused(ranks2):
    assert "rows of the data set were moved or replaced before step 1" in ranks2.refusal(shuffled_in_each_epoch)


def test_replicas_that_begin_with_different_weights_are_refused(ranks2):
    assert "begin with different weights: '2.bias'" in ranks2.refusal(differing, "ddp", "weights")


# Loops -------------------------------------------------------------------------------------------------------------


def no_sync(rank: int) -> None:
    training = start(case(), "ddp")
    with training.model.no_sync():
        go(training, of_pair)


def without_gradient_sync(rank: int) -> None:
    training = start(case(), "layers")
    training.model.set_requires_gradient_sync(False)
    go(training, of_pair)


def with_scaler(rank: int, how: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = start(CASES["float32"], how)
    go(training, lambda model, batch: scaler.scale(of_pair(model, batch)))


def test_gradients_that_torch_accumulates_are_refused(ranks2):
    assert "no_sync" in ranks2.refusal(no_sync)
    assert "set_requires_gradient_sync(False)" in ranks2.refusal(without_gradient_sync)


@SHARDED_OR_NOT
def test_a_scaler_is_refused(ranks2, how):
    assert "as GradScaler does" in ranks2.refusal(with_scaler, how)


def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none") * (1 + model(x).mean())


def mean_input(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")


def scalar(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_pair(model, batch).mean()


def failing(model: nn.Module, batch: Any) -> torch.Tensor:
    raise KeyError("in the user's loss")


def other_shape(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_pair(model, batch)[1:]


def detached(model: nn.Module, batch: Any) -> torch.Tensor:
    return of_pair(model, batch).detach()


def seeding(model: nn.Module, batch: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return of_pair(model, batch)


LOSSES = {f.__name__: f for f in (coupled, mean_input, scalar, failing, other_shape, detached, seeding)}


def only_on_rank(rank: int, how: str, losses: str, chosen: int, first_step: int) -> None:
    training = start(case(), how, num_steps=12)
    made = 0

    def of_this_rank(model: nn.Module, batch: Any) -> torch.Tensor:
        bad = rank == chosen and training.step_count >= first_step
        return (LOSSES[losses] if bad else of_pair)(model, batch)

    try:
        go(training, of_this_rank)
    finally:
        made = training.step_count
        assert made == len(training.ledger) == first_step, (made, len(training.ledger))


@pytest.mark.thorough(but=2)
@SHARDED_OR_NOT
@pytest.mark.parametrize(("chosen", "first_step"), [(1, 0), (0, 3)])
@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ("coupled", "cannot be separated"),
        ("scalar", "losses of shape () given"),
        ("other_shape", "examples: must be"),
        ("detached", "requires_grad=False"),
        ("seeding", "torch.manual_seed was called inside of the loop"),
    ],
)
def test_what_one_rank_refuses_all_refuse(ranks2, how, losses, message, chosen, first_step):
    assert message in ranks2.refusal(only_on_rank, how, losses, chosen, first_step)


@SHARDED_OR_NOT
@pytest.mark.parametrize("chosen", [0, 1])
def test_examples_that_depend_on_each_other_on_one_rank_are_refused_on_all(ranks2, how, chosen):
    assert "examples of a batch depend on each other" in ranks2.refusal(only_on_rank, how, "mean_input", chosen, 0)


@pytest.mark.thorough(but=1)
@SHARDED_OR_NOT
@pytest.mark.parametrize("chosen", [0, 1])
def test_an_error_in_the_loop_of_one_rank_ends_the_others(ranks2, how, chosen):
    outcomes = ranks2.outcomes(only_on_rank, how, "failing", chosen, 2)
    assert (outcomes[chosen].kind, outcomes[chosen].text) == ("KeyError", repr("in the user's loss"))
    assert outcomes[1 - chosen].kind == "RefusedTogether"
    assert "the ranks have come to different places: rank 0 " in outcomes[1 - chosen].text
    assert f"rank {chosen} leaves the loop in step" in outcomes[1 - chosen].text


def leaving_early(rank: int, how: str) -> int:
    training = start(case(), how)
    go(training, of_pair, steps=2 if rank else None)
    return training.step_count


def leaving_together(rank: int, how: str) -> int:
    training = start(case(), how)
    go(training, of_pair, steps=2)
    go(training, of_pair, steps=3)
    return training.step_count


@pytest.mark.thorough(but=1)
@SHARDED_OR_NOT
def test_a_loop_that_one_rank_leaves_early_is_refused_on_the_others(ranks2, how):
    left, found = reversed(ranks2.outcomes(leaving_early, how))
    assert left.value == 2
    assert "rank 0 begins step 2, rank 1 leaves the loop in step 2" in found.text
    assert ranks2.run(leaving_together, how) == [3, 3]


# Failures that are no refusals -------------------------------------------------------------------------------------


class Items(Dataset):
    """Examples of which some cannot be read on rank 1."""

    def __init__(self, rank: int):
        self.rank, self.items = rank, data()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        if self.rank == 1 and i in (3, 11, 20, 33):
            raise OSError("cannot read")
        return self.items[i]


def unreadable_data(rank: int, how: str, workers: int) -> int:
    training = start(case(data=lambda: Items(rank)), how, examples={"num_workers": workers}, num_steps=12)
    return made_before_failure(training)


def failing_part(rank: int, how: str, owner: Any, name: str, chosen: int, error: type[Exception]) -> int:
    """Trains until a method fails on one rank, in its third call."""
    method, calls_made = getattr(owner, name), 0

    def failing(self: Any, *arguments: Any, **settings: Any) -> Any:
        nonlocal calls_made
        calls_made += 1
        if calls_made == 3 and rank == chosen:
            raise error("of one rank")
        return method(self, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        training = start(case(), how, "plain")
        patch.setattr(owner, name, failing)
        return made_before_failure(training)


def made_before_failure(training: tp.PrivateTraining) -> int:
    """Returns the number of releases, of which all but the last must have been used."""
    try:
        go(training, of_pair)
    except Exception as error:
        error.add_note(f"{training.step_count} steps, {len(training.ledger)} releases")
        raise
    return len(training.ledger)


@SHARDED_OR_NOT
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_one_rank_cannot_read_stop_all(ranks2, how, workers):
    first, second = ranks2.outcomes(unreadable_data, how, workers)
    assert (first.kind, second.kind) == ("RefusedTogether", "OSError")
    assert "rank 1 failed with OSError: " in first.text
    assert "cannot read" in first.text


PARTS = {
    "noise": (Noise, "add_to", 1, MemoryError, "2 steps, 2 releases"),
    "ledger": (Ledger, "record", 0, OSError, "2 steps, 2 releases"),
    "optimizer": (torch.optim.SGD, "step", 1, ArithmeticError, "3 steps, 3 releases"),
}


@SHARDED_OR_NOT
@pytest.mark.parametrize("part", PARTS)
def test_what_fails_on_one_rank_stops_all(ranks2, how, part):
    owner, name, chosen, error, made = PARTS[part]
    outcomes = ranks2.outcomes(failing_part, how, owner, name, chosen, error)
    failed, other = outcomes[chosen], outcomes[1 - chosen]
    assert (failed.kind, failed.text) == (error.__name__, "of one rank")
    assert other.kind == "RefusedTogether"
    assert f"rank {chosen} failed with {error.__name__}: of one rank. The ledger of rank 0 has" in other.text
    assert made in failed.traceback
    assert made in other.traceback


def not_finite(rank: int | None, how: str | None) -> Any:
    """Trains on examples of which every second has no gradient, one example a step, so that ranks get stand-ins."""
    x, y = data().tensors
    x = x.clone()
    x[::2] = torch.nan
    dataset = TensorDataset(x, y)
    training = start(case(data=lambda: dataset), how, expected_batch_size=1, num_steps=12, noise_multiplier=1e-6)
    go(training, of_pair)
    return whole_weights(training.model), training.num_non_finite


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:PrivateTraining. half of the examples")  # as every second has no gradient
@SHARDED_OR_NOT
def test_a_stand_in_without_a_gradient_counts_nowhere(ranks2, how):
    weights, expected = not_finite(None, None)
    for found, count in ranks2.run(not_finite, how):
        assert difference(found, weights) < 1e-12
        assert count == expected
