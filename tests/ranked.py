# SPDX-License-Identifier: Apache-2.0
"""Trains small models in one process, or sharded over the ranks of a pool: the same training, step for step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import real_models
import torch
import torch.distributed as dist
from gloo_pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset
from trainings import cross_entropy, data, private_training

import torch_privacy as tp

VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # nothing writes into it

Losses = Callable[[nn.Module, Any], Tensor]


# Models ------------------------------------------------------------------------------------------------------------


def mlp(*widths: int, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Returns a network with tanh between its layers."""
    torch.manual_seed(1)
    widths = widths or (3, 5, 7, 2)
    layers = [nn.Linear(d, e, dtype=dtype) for d, e in pairwise(widths)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.Tanh())][:-1])


class Calls(nn.Module):
    """A module whose forward is a function of it."""

    def __init__(self, forward: Callable[..., Tensor], **children: Any):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def calls(forward: Callable[..., Tensor], **children: Callable[[], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return Calls(forward, **{name: child() for name, child in children.items()})

    return make


def frozen_first_layer() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def by_experts(m: Any, x: Tensor) -> Tensor:
    """Sends an example to one of two experts, by its first feature; an expert without examples is not called."""
    out = x.new_zeros(len(x), 2)
    for chosen, expert in ((x[:, 0] > 0, m.high), (x[:, 0] <= 0, m.low)):
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]))
    return out


def of_real_model(make: Callable[[], real_models.RealModel]) -> Callable[[], nn.Module]:
    def module() -> nn.Module:
        torch.manual_seed(1)
        return make().module

    return module


# Data --------------------------------------------------------------------------------------------------------------


def tokens() -> Dataset:
    ids = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(4))
    return TensorDataset(ids, ids.sum(1) % 2)


def with_nan() -> Dataset:
    dataset = data()
    x, y = dataset.tensors
    x = x.clone()
    x[1::4, 1] = torch.nan
    return TensorDataset(x, y)


class Texts(Dataset):
    """Sixteen short texts, each token labeled with the next."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(3, real_models.VOCABULARY, (6,), generator=torch.Generator().manual_seed(i))
        labels = torch.cat([ids[1:], torch.tensor([real_models.NO_LABEL])])
        return {"input_ids": ids, "attention_mask": torch.ones(6, dtype=torch.int64), "labels": labels}


# Losses ------------------------------------------------------------------------------------------------------------


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, *batch)


def of_views(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, *batch).view(-1, 2)


# Cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained: a model, which of its modules are sharded on their own, data, losses and settings."""

    model: Callable[[], nn.Module] = mlp
    layers: Callable[[Any], Sequence[nn.Module]] = lambda model: [m for m in model.children() if list(m.parameters())]
    data: Callable[[], Dataset] = data
    losses: Losses = of_pair
    settings: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Callable[[Any], Any] | None = None
    sharding: Mapping[str, Any] = field(default_factory=dict)  # arguments of fully_shard
    averaged: bool = False
    mechanism: Callable[[], Any] = lambda: tp.Flat(0.5)  # the clipping, made anew for each training


def case(model: Callable[[], nn.Module] = mlp, **rest: Any) -> Case:
    settings = {name: rest.pop(name) for name in list(rest) if name not in Case.__dataclass_fields__}
    return Case(model, settings=settings, **rest)


def columns(p: nn.Parameter) -> Shard:
    return Shard(min(1, p.ndim - 1))


def decayed(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def subspace() -> tp.AnchorSubspace:
    auxiliary = torch.randn(30, 3, generator=torch.Generator().manual_seed(7))
    return tp.AnchorSubspace(auxiliary, 6, ["0", "2"])


TEXTS: dict[str, Any] = {"data": Texts, "losses": real_models.of_logits, "expected_batch_size": 4, "num_steps": 3}

CASES: dict[str, Case] = {
    "uneven": case(),
    "one example a step": case(expected_batch_size=1, num_steps=12),
    "fewer rows than ranks": case(partial(mlp, 3, 1, 2)),
    "microbatches": case(performance=tp.Performance(microbatch_size=3)),
    "views": case(examples={"views": 2}, losses=of_views),
    "views in microbatches": case(
        examples={"views": 2}, losses=of_views, performance=tp.Performance(microbatch_size=2)
    ),
    "memory budget": case(performance=tp.Performance(memory_budget=1.0001)),
    "frozen layer": case(frozen_first_layer),
    "scheduler": case(scheduler=decayed),
    "workers": case(examples={"num_workers": 1}),
    "non-finite examples": case(data=with_nan),
    "average": case(averaged=True),
    "embedding": case(
        calls(lambda m, x: m.out(m.words(x).mean(1)), words=lambda: nn.Embedding(9, 5), out=lambda: nn.Linear(5, 2)),
        data=tokens,
    ),
    "padding": case(
        calls(
            lambda m, x: m.out(m.words(x).mean(1)),
            words=lambda: nn.Embedding(9, 5, padding_idx=0),
            out=lambda: nn.Linear(5, 2),
        ),
        data=tokens,
    ),
    "tied": case(
        calls(lambda m, x: (torch.tanh(m.f(x)) @ m.f.weight)[:, :2], f=lambda: nn.Linear(3, 5)),
        layers=lambda model: [],
    ),
    "gru": case(
        calls(
            lambda m, x: m.out(m.gru(x[:, :, None])[0][:, -1]),
            gru=lambda: nn.GRU(1, 3, batch_first=True),
            out=lambda: nn.Linear(3, 2),
        )
    ),
    "bilinear": case(
        calls(lambda m, x: m.out(m.both(x, x.flip(1))), both=lambda: nn.Bilinear(3, 3, 5), out=lambda: nn.Linear(5, 2))
    ),
    "prelu and weight norm": case(
        calls(
            lambda m, x: m.out(m.bend(m.f(x))),
            f=lambda: weight_norm(nn.Linear(3, 5)),
            bend=lambda: nn.PReLU(5),
            out=lambda: nn.Linear(5, 2),
        )
    ),
    "layer norm": case(
        calls(
            lambda m, x: m.out(m.norm(m.f(x))),
            f=lambda: nn.Linear(3, 5),
            norm=lambda: nn.LayerNorm(5),
            out=lambda: nn.Linear(5, 2),
        )
    ),
    "fallback": case(
        calls(
            lambda m, x: m.out(torch.logaddexp(m.f(x), m.level)),
            f=lambda: nn.Linear(3, 5),
            level=lambda: parameter(5),
            out=lambda: nn.Linear(5, 2),
        )
    ),
    "scalar parameter": case(
        calls(lambda m, x: m.f(x) * m.scale, f=lambda: nn.Linear(3, 2), scale=lambda: parameter(1)),
    ),
    "attention": case(
        calls(
            lambda m, x: m.out(m.attend(*[m.words(x[:, :, None])] * 3, need_weights=False)[0].mean(1)),
            words=lambda: nn.Linear(1, 4),
            attend=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
            out=lambda: nn.Linear(4, 2),
        )
    ),
    "spectral norm": case(lambda: nn.Sequential(spectral_norm(mlp(3, 4)[0]), nn.Tanh(), nn.Linear(4, 2))),
    "called twice": case(calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=lambda: nn.Linear(3, 3))),
    "full batch": case(expected_batch_size=40, num_steps=3),
    "checkpointed": case(
        calls(
            lambda m, x: m.out(checkpoint(m.body, x, use_reentrant=False)),
            body=partial(mlp, 3, 5, 4),
            out=lambda: nn.Linear(4, 2),
        )
    ),
    "experts": case(
        calls(by_experts, high=lambda: nn.Linear(3, 2), low=lambda: nn.Linear(3, 2)),
        layers=lambda model: [],
        expected_batch_size=2,
    ),
    "columns": case(partial(mlp, 4, 6, 2), sharding={"shard_placement_fn": columns}, data=lambda: wide(4)),
    "GPT-2": case(
        of_real_model(partial(real_models.gpt2_language_model, "eager")), layers=lambda m: m.transformer.h, **TEXTS
    ),
    "Llama": case(
        of_real_model(partial(real_models.llama_language_model, "sdpa")), layers=lambda m: m.model.layers, **TEXTS
    ),
    "LoRA on GPT-2": case(
        of_real_model(partial(real_models.gpt2_with_adapters, "eager")),
        layers=lambda m: m.base_model.model.transformer.h,
        **TEXTS,
    ),
    "GEP": case(partial(mlp, 3, 5, 2), mechanism=lambda: tp.GEP(subspace(), tp.Flat(0.3), tp.Flat(0.2), 0.5)),
    "BGEP": case(partial(mlp, 3, 5, 2), mechanism=lambda: tp.BGEP(subspace(), tp.Flat(0.3))),
    "bfloat16": case(
        partial(mlp, dtype=torch.float32),
        data=lambda: wide(3, torch.float32),
        sharding={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "float32": case(partial(mlp, dtype=torch.float32), data=lambda: wide(3, torch.float32)),
}


def wide(features: int, dtype: torch.dtype | None = None) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, features, generator=generator, dtype=torch.float64).to(dtype or torch.get_default_dtype())
    return TensorDataset(x, torch.randint(2, (40,), generator=generator))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


# On the ranks ------------------------------------------------------------------------------------------------------


def layers(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    for layer in case.layers(model):
        fully_shard(layer, mesh=mesh, **case.sharding)
    return fully_shard(model, mesh=mesh, **case.sharding)


def root(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh, **case.sharding)


def first_layer(model: Any, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Leaves the other layers whole on every rank."""
    fully_shard(model[0], mesh=mesh)
    return model


def all_but_one(model: Any, case: Case, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh, ignored_params={model[0].weight})


def kept_after_forward(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    for layer in case.layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def ddp(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


WRAPPERS: dict[str, Callable[[nn.Module, Case, DeviceMesh], nn.Module]] = {
    "root": root,
    "first layer": first_layer,
    "all but one": all_but_one,
    "kept after forward": kept_after_forward,
    "layers": layers,
    "ddp": ddp,
    "hsdp": layers,
}


def mesh_of(how: str) -> DeviceMesh:
    world = dist.get_world_size()
    if how == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (world,))


@dataclass(frozen=True)
class Result:
    """What a training ends with; the weights are whole on every rank."""

    weights: dict[str, Tensor]
    sizes: list[int]  # of the batches that this process got, rehearsals left out
    steps: int
    non_finite: int
    rule: str
    ledger: dict[str, Any]


def start(case: Case, how: str | None, optimizer: str = "adam", **settings: Any) -> tp.PrivateTraining:
    """Returns a training of a case, in one process (``how=None``) or on the ranks of which this is one."""
    model = case.model()
    if how is not None:
        model = WRAPPERS[how](model, case, mesh_of(how))
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    defaults: dict[str, Any] = {"expected_batch_size": 8, "num_steps": 5, "noise_multiplier": 1.0}
    defaults["clipping"] = case.mechanism()
    scheduler = None if case.scheduler is None else case.scheduler(made)
    everything = defaults | dict(case.settings) | settings
    return private_training(model, made, case.data(), scheduler=scheduler, **{"test_seed": 5} | everything)


def go(training: tp.PrivateTraining, losses: Losses, steps: int | None = None) -> list[int]:
    """Trains to the end, or to this step; returns the number of items in each batch but rehearsals."""
    sizes = []
    for batch in training:
        training.step(losses(training.model, batch))
        if not training.rehearsing:
            sizes.append(len(batch if isinstance(batch, Tensor) else next(iter(_tensors(batch)))))
        if steps is not None and training.step_count >= steps:
            break
    return sizes


def _tensors(batch: Any) -> Any:
    return batch.values() if isinstance(batch, Mapping) else batch


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters, gathered from all ranks, under the names of the model that was not wrapped."""
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def trained(rank: int | None, name: str, how: str | None, optimizer: str, settings: dict[str, Any]) -> Result:
    """Trains a case to its end."""
    case = CASES[name]
    training = start(case, how, optimizer, **settings)
    average = tp.MovingAverage(training.model, training.optimizer, decay=0.5) if case.averaged else None
    sizes = go(training, case.losses)
    weights = whole_weights(training.model)
    if average is not None:
        with average.applied():
            weights |= {f"average of {name}": p for name, p in whole_weights(training.model).items()}
    return Result(
        weights,
        sizes,
        training.step_count,
        training.num_non_finite,
        repr(training.clipping),
        training.ledger.state_dict(),
    )


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of two models' weights."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def weights_after(case: Case, how: str | None) -> dict[str, Tensor]:
    """Trains a case to its end, in one process or on the ranks of which this is one, and returns its weights."""
    training = start(case, how, "sgd")
    go(training, case.losses)
    return whole_weights(training.model)


def assert_same_bits(pool: Pool, on_rank: Callable[[int | None, str | None], dict[str, Tensor]], how: str) -> None:
    """Compares what ``on_rank(rank, how)`` returns on each rank with what it returns in one process, bit for bit."""
    weights = on_rank(None, None)
    for found in pool.run(on_rank, how):
        assert difference(found, weights) == 0
