# SPDX-License-Identifier: Apache-2.0
"""Sums of parameters are reduced in buckets: slices and gradients are those of the sum, for all shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from collectives import Log, numbers_of_calls
from ranked import case, columns, layers, mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_privacy as tp
from torch_privacy.mechanisms.base import ClippedSum
from torch_privacy.training.placement import Ranked, placement_of


class Odd(nn.Module):
    """Parameters of unusual shapes and dtypes; torch cannot shard the one that is a number."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"number": (), "one": (1,), "no_rows": (0, 3), "no_columns": (3, 0), "cube": (3, 2, 4), "row": (1, 6)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.layer = nn.Linear(3, 5)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shards the layers on their own, and the rest together."""
    return layers(model, case(sharding=options), init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def odd(**options: Any) -> nn.Module:
    model = Odd()
    ignored = {model.number}
    fully_shard(model.layer, **options)
    return fully_shard(model, ignored_params=ignored, **options)


def half_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return sharded(model)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the number of reductions
    "uneven": (lambda: sharded(mlp(3, 5, 7, 2)), 3),
    "one unit": (lambda: fully_shard(mlp(3, 5, 7, 2)), 1),
    "rest at the root": (lambda: fully_shard(_first_sharded(mlp(3, 5, 7, 2))), 2),
    "columns": (lambda: sharded(mlp(4, 6, 2), shard_placement_fn=columns), 4),
    "odd shapes and dtypes": (odd, 4),  # the layer; float64 and float32 of the rest; the number
    "frozen": (half_frozen, 2),
    "DDP": (lambda: DistributedDataParallel(mlp(3, 5, 7, 2)), 1),
    "DDP of odd shapes and dtypes": (lambda: DistributedDataParallel(Odd()), 2),
}


def _first_sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return model


def sums_of(parameters: dict[str, nn.Parameter], rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        name: torch.randn(p.shape, generator=generator).to(torch.promote_types(p.dtype, torch.float32))
        for name, p in parameters.items()
    }


@dataclass(frozen=True)
class Found:
    """What a reduction gave: slices, gradients made whole, and what was expected of both."""

    slices: dict[str, Tensor]
    gradients: dict[str, Tensor]
    expected: dict[str, Tensor]
    places: dict[str, int]
    calls: dict[str, int]


def reduced(rank: int, name: str) -> Found:
    """Reduces random sums of a model's trained parameters, ranks' own."""
    model = MODELS[name][0]()
    place = placement_of(model)
    assert isinstance(place, Ranked)
    parameters = {name: p for name, p in place.model.named_parameters() if p.requires_grad}
    everywhere = [sums_of(parameters, other) for other in range(place.ranks.size)]
    expected = {name: sum(sums[name] for sums in everywhere) for name in parameters}
    sums = everywhere[rank]
    mechanism = ClippedSum(tp.Flat(1.0), [*parameters], expected_batch_size=8)
    with Log() as log:
        place.collect(sums, mechanism, parameters)
        slices, places = place.take(mechanism, parameters)
    assert not sums
    gradients = place.gradients(dict(slices), parameters)
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return Found(slices, whole, expected, places, dict(numbers_of_calls(log.collectives)))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", MODELS)
def test_slices_and_gradients_are_those_of_the_sum(ranks2, name):
    """Two numbers have one sum, in either order, so that it must be the same bit for bit."""
    found = ranks2.run(reduced, name)
    for one in found:
        firsts, at = {}, 0
        for key, total in one.expected.items():
            firsts[key], at = at, at + total.numel()
        for key, part in one.slices.items():
            total = one.expected[key]
            if part.shape == total.shape and "columns" in name and total.ndim == 2:  # zeros elsewhere
                assert torch.equal(part[part != 0], total[part != 0])
            else:
                start = one.places[key] - firsts[key]
                assert torch.equal(part.flatten(), total.flatten()[start : start + part.numel()])
        for key, gradient in one.gradients.items():
            assert torch.equal(gradient, one.expected[key].to(gradient.dtype)), key


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_unit_are_reduced_at_once(ranks2, name):
    for one in ranks2.run(reduced, name):
        assert one.calls == {"reduce-scatter": MODELS[name][1]}
