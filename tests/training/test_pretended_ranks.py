# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks, of which this process is one: the others are pretended (torch's backend ``fake``).

A collective of that backend returns at once: this rank's values stand for those of all. So sums, shards and messages
have the shapes, the sizes and the order that they have on as many machines, and only their values are of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collective, Log, is_message, num_bytes, numbers_of_calls
from ranked import case as case_of
from ranked import layers, mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset
from trainings import cross_entropy

import torch_privacy as tp
from torch_privacy.mechanisms.base import ClippedSum
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.training.placement import Ranked, placement_of

WIDTHS = 5, 1030, 70, 3  # 2 rows of the first layer for most of 1,024 ranks; the others have fewer rows than ranks
SIZES = [1030 * 5, 1030, 70 * 1030, 70, 3 * 70, 3]  # of the parameters
ROWS = [1030, 1030, 70, 70, 3, 3]


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def mesh_of(ranks: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards"))


def wrapped(how: str, ranks: int, replicas: int = 1) -> nn.Module:
    model = mlp(*WIDTHS, dtype=torch.float32)
    return DistributedDataParallel(model) if how == "ddp" else layers(model, case_of(), mesh_of(ranks, replicas))


@dataclass
class Drawn:
    """What noise was drawn for, in each step: name -> (place, count)."""

    steps: list[dict[str, tuple[int, int]]] = field(default_factory=list)

    @contextmanager
    def listed(self) -> Iterator[None]:
        add_to = Noise.add_to

        def listing(noise: Noise, step: int, sums: dict[str, Tensor], stddev: Any, places: Any = None) -> None:
            self.steps.append({name: (places[name], total.numel()) for name, total in sums.items()})
            add_to(noise, step, sums, stddev, places)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Noise, "add_to", listing)
            yield

    def numbers(self) -> int:
        """Returns how many numbers the last step drew."""
        return sum(count for _, count in self.steps[-1].values())


def trained(model: nn.Module, ranks: int, steps: int = 2) -> tuple[tp.PrivateTraining, Drawn, list[list[Collective]]]:
    """Makes steps in which this rank has two examples; returns what noise was drawn for and what was sent."""
    x = torch.randn(8 * ranks, WIDTHS[0], dtype=torch.float32)
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        tp.Examples(TensorDataset(x, torch.randint(3, (len(x),))), assume_independent="each loss is that of one row"),
        expected_batch_size=2 * ranks,
        num_steps=steps,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        test_seed=1,
    )
    drawn, log = Drawn(), Log()
    with drawn.listed(), log:
        for batch in training:
            if training.step(cross_entropy(model, *batch)):
                log.mark()
    return training, drawn, log.steps()


def of_shard(shards: int, shard: int) -> int:
    """Returns how many numbers a shard has."""
    found = 0
    for size, rows in zip(SIZES, ROWS, strict=True):
        each = math.ceil(rows / shards)
        found += max(0, min(each, rows - shard * each)) * (size // rows)
    return found


SHARDED = {
    "8": (8, 3, 1),
    "64": (64, 33, 1),
    "1,024": (1024, 511, 1),
    "8 replicas of 8": (64, 17, 8),
    "32 replicas of 32": (1024, 1000, 32),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("ranks", "rank", "replicas"), SHARDED.values(), ids=SHARDED)
def test_a_rank_draws_the_noise_of_its_shard_alone(ranks, rank, replicas):
    shards = ranks // replicas
    with one_of(ranks, rank):
        model = wrapped("fsdp", ranks, replicas)
        before = [p.to_local().clone() for p in model.parameters()]
        training, drawn, _ = trained(model, ranks)
        assert drawn.numbers() == of_shard(shards, rank % shards) == sum(p.numel() for p in before)
        assert drawn.numbers() <= sum(SIZES) / shards + sum(
            size // rows for size, rows in zip(SIZES, ROWS, strict=True)
        )
        for p, old in zip(model.parameters(), before, strict=True):
            assert isinstance(p, DTensor)
            assert p.to_local().shape == old.shape
            assert not old.numel() or not torch.equal(p.to_local(), old)
        assert training.step_count == len(training.ledger) == 2


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_a_rank_of_ddp_draws_the_noise_of_its_slice_alone(ranks):
    with one_of(ranks, ranks // 2):
        _, drawn, _ = trained(wrapped("ddp", ranks), ranks)
        assert drawn.numbers() == math.ceil(sum(SIZES) / ranks)


def test_a_rank_of_ddp_without_a_slice_goes_on():
    with one_of(1024, 1023):
        training, drawn, _ = trained(wrapped("ddp", 1024), 1024)
        assert drawn.numbers() == 0
        assert training.step_count == 2


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_the_places_of_all_ranks_are_those_of_all_numbers(how):
    """Eight ranks, one after the other: each place has noise once, and the slices follow each other."""
    places = []
    for rank in range(8):
        with one_of(8, rank):
            _, drawn, _ = trained(wrapped(how, 8), 8, steps=1)
            places += [place + k for place, count in drawn.steps[0].values() for k in range(count)]
    assert sorted(places) == list(range(sum(SIZES)))


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_step_sends_weights_and_sums_once(how, ranks):
    """With more ranks, only the zeros after a parameter's last row become more, and the messages."""
    with one_of(ranks, 0):
        _, _, (step, *_) = trained(wrapped(how, ranks), ranks)
    messages = [one for one in step if is_message(one)]
    padded = [math.ceil(rows / ranks) * ranks * size // rows for size, rows in zip(SIZES, ROWS, strict=True)]
    numbers = sum(padded) if how == "fsdp" else math.ceil(sum(SIZES) / ranks) * ranks
    assert num_bytes(step) - num_bytes(messages) == 2 * 4 * numbers
    units = 3 if how == "fsdp" else 1
    assert numbers_of_calls(one for one in step if not is_message(one)) == {
        "all-gather": units,
        "reduce-scatter": units,
    }
    assert max(one.bytes for one in messages) <= 100 * ranks


def test_ordinary_steps_of_a_thousand_ranks_send_more():
    with one_of(1024, 0):
        model, log = wrapped("fsdp", 1024), Log()
        for _ in range(2):
            with log:
                model(torch.randn(2, WIDTHS[0], dtype=torch.float32)).sum().backward()
            log.mark()
        ordinary = log.steps()[-1]
        _, _, (*_, private) = trained(wrapped("fsdp", 1024), 1024)
    assert num_bytes(private) <= 1.02 * num_bytes(ordinary)


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_sums_of_a_rank_are_as_many_numbers_as_its_slice(how):
    """The memory of what is kept of the sums is that of the slice, with the zeros that fill a bucket."""
    with one_of(1024, 5):
        model = wrapped(how, 1024)
        place = placement_of(model)
        assert isinstance(place, Ranked)
        trained = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        sums: dict[str, Any] = {name: torch.ones(p.shape) for name, p in trained.items()}
        mechanism = ClippedSum(tp.Flat(1.0), [*trained], expected_batch_size=8)
        place.collect(sums, mechanism, trained)
        assert not sums
        slices, places = place.take(mechanism, trained)
        assert list(slices) == list(places)
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in slices.values()}
        expected = of_shard(1024, 5) if how == "fsdp" else math.ceil(sum(SIZES) / 1024)
        rows = sum(size // rows for size, rows in zip(SIZES, ROWS, strict=True))
        assert sum(part.numel() for part in slices.values()) == expected
        assert sum(storage.nbytes() for storage in storages.values()) <= 4 * max(expected, rows * 2)
