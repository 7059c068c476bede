# SPDX-License-Identifier: Apache-2.0
"""Provides small models with the plans that distribute them over tensor-parallel ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORDS, WIDTH, LENGTH = 10, 8, 4


class Residual(nn.Module):
    """Adds to its input what a module makes of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def perceptron(hidden=12, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(6, hidden), activation(), nn.Linear(hidden, 6), nn.Tanh(), nn.Linear(6, 3))


class Language(nn.Module):
    """Embedding, layer norm, attention by heads, a perceptron, and a head that may share the embedding's table."""

    def __init__(self, tied=False, heads=2):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        self.tied, self.heads = tied, heads
        self.share()

    def share(self):
        if self.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        h = self.embedding(ids)
        x = self.norm(h)
        width = WIDTH // self.heads
        q, k, v = (layer(x).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = h + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.down(F.gelu(self.up(self.last_norm(h)))))


LANGUAGE_PLAN = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
PERCEPTRON_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank term, like those of LoRA."""

    def __init__(self, d, e, rank=2):
        super().__init__()
        self.base = nn.Linear(d, e).requires_grad_(False)
        self.a, self.b = nn.Linear(d, rank, bias=False), nn.Linear(rank, e, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class HeadNorm(nn.Module):
    """Scales every head's features by one vector, which all heads share."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return (x.unflatten(-1, (-1, len(self.scale))) * self.scale).flatten(-2)


class PartScale(nn.Module):
    """Scales the features of this rank by its part of a vector."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return x * (self.scale.to_local() if isinstance(self.scale, DTensor) else self.scale)


def part_scale_plan(model, mesh):
    """Shards the scale with the features."""
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model[1].scale = nn.Parameter(distribute_tensor(model[1].scale, mesh, [Shard(0)], src_data_rank=None))


class Scaled(nn.Module):
    """A linear layer with a weight that is computed from two parameters."""

    def __init__(self, d, e):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(e, d)), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return F.linear(x, self.weight * self.scale)


def scaled_plan(model, mesh):
    """Shards the layer's weight by outputs, and replicates its scale."""
    layer = model[0]
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)], src_data_rank=None))
    layer.scale = nn.Parameter(distribute_tensor(layer.scale, mesh, [Replicate()], src_data_rank=None))
    layer.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
    layer.register_forward_hook(lambda _, args, y: y.redistribute(placements=[Replicate()]).to_local())


def replicated_norm_plan(model, mesh):
    """Distributes the norm, too, as a replicated one."""
    parallelize_module(model, mesh, LANGUAGE_PLAN)
    distribute_module(model.norm, mesh, input_fn=enter_whole, output_fn=leave_whole)


def softened_plan(model, mesh):
    """Distributes also the last module, as a replicated one."""
    parallelize_module(model, mesh, PERCEPTRON_PLAN)
    distribute_module(model[3], mesh, input_fn=enter_whole, output_fn=leave_whole)


def enter_whole(module, args, mesh):
    return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in args)


def leave_whole(module, y, mesh):
    return y.to_local()


def by(plan):
    return lambda model, mesh: parallelize_module(model, mesh, plan)


def tied_plan(model, mesh):
    """Shards the table by words, for the look-up and for the product."""
    plan = {
        **LANGUAGE_PLAN,
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.share()


def sequence_plan(model, mesh):
    """Shards activations by position between the layers."""
    trains_norm = model[0].weight.requires_grad  # torch forgets it
    parallelize_module(
        model,
        mesh,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    model[0].requires_grad_(trains_norm)
    model[0].register_forward_pre_hook(
        lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(mesh, [Shard(1)]),),
        prepend=True,
    )


def sequence_model(trained):
    layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    layers[0].requires_grad_(trained)
    return layers


class Softened(nn.Module):
    """Applies an op without a rule, and one in place, to an activation that is whole on every rank."""

    def __init__(self, d):
        super().__init__()
        self.floor, self.shift = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(d))

    def forward(self, x):
        y = torch.logaddexp(x, self.floor)
        y += self.shift
        return y


class Sorted(nn.Module):
    """Runs a module on the examples in an order that depends on them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.inner(x[order])[order.argsort()]


def deep(activation=nn.Tanh):
    """Returns a perceptron whose backward needs the other rank."""
    return nn.Sequential(perceptron(activation=activation), nn.Tanh(), nn.Linear(3, 8), activation(), nn.Linear(8, 3))


DEEP_PLAN = {
    "0.0": ColwiseParallel(),
    "0.2": RowwiseParallel(),
    "2": ColwiseParallel(),
    "4": RowwiseParallel(),
}


def half_dead():
    """Returns a deep perceptron in which all units of a layer on the first rank have no gradient."""
    model = deep(activation=nn.ReLU)
    with torch.no_grad():
        model[0][0].bias[:6] = -100
    return model


def frozen_and_adapted():
    return nn.Sequential(Adapted(6, 8), nn.Tanh(), Adapted(8, 6), nn.Linear(6, 3).requires_grad_(False))


ADAPTED_PLAN = {  # plain adapters where activations are whole, sharded ones where they are sharded
    "0.base": ColwiseParallel(),
    "0.b": ColwiseParallel(),
    "2.base": RowwiseParallel(),
    "2.a": RowwiseParallel(),
}


def vectors(n):
    return torch.randn(n, 6)


def sequences(n):
    return torch.randn(n, LENGTH, 6)


def words(n):
    return torch.randint(WORDS, (n, LENGTH))


# name -> (model, how it is distributed, a batch of n)
CASES = {
    "perceptron": (perceptron, by(PERCEPTRON_PLAN), vectors),
    "of sequences": (perceptron, by(PERCEPTRON_PLAN), sequences),
    "uneven shards": (
        lambda: perceptron(hidden=7),
        by({"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}),
        vectors,
    ),
    "one number on a rank": (lambda: perceptron(hidden=2), by(PERCEPTRON_PLAN), sequences),
    "all layers": (perceptron, by({**PERCEPTRON_PLAN, "4": ColwiseParallel(output_layouts=Replicate())}), vectors),
    "rows first": (perceptron, by({"0": RowwiseParallel(input_layouts=Replicate())}), vectors),
    "distributed losses": (
        perceptron,
        by({**PERCEPTRON_PLAN, "4": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}),
        vectors,
    ),
    "attention by heads": (Language, by(LANGUAGE_PLAN), words),
    "table by words": (
        Language,
        by({**LANGUAGE_PLAN, "embedding": RowwiseParallel(input_layouts=Replicate())}),
        words,
    ),
    "table by features": (
        Language,
        by({**LANGUAGE_PLAN, "embedding": ColwiseParallel(output_layouts=Replicate())}),
        words,
    ),
    "tied": (lambda: Language(tied=True), tied_plan, words),
    "tied, whole on each rank": (lambda: Language(tied=True), by(LANGUAGE_PLAN), words),
    "replicated norm": (Language, replicated_norm_plan, words),
    "adapters": (frozen_and_adapted, by(ADAPTED_PLAN), vectors),
    "adapters beside a frozen model": (
        lambda: nn.Sequential(perceptron().requires_grad_(False), Residual(nn.Linear(3, 3))),
        by({"0.0": ColwiseParallel(), "0.2": RowwiseParallel()}),
        vectors,
    ),
    "ops without a rule, and in place": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), Softened(6)),
        by({"0": ColwiseParallel(), "2": RowwiseParallel()}),
        vectors,
    ),
    "an op without a rule of distributed tensors": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), Softened(6)),
        softened_plan,
        vectors,
    ),
    "frozen norm by positions": (lambda: sequence_model(trained=False), sequence_plan, sequences),
    "computed weight": (lambda: nn.Sequential(Scaled(6, 8), nn.Tanh(), nn.Linear(8, 3)), scaled_plan, vectors),
}
DEEP = {"deep": (deep, by(DEEP_PLAN), vectors), "dead units": (half_dead, by(DEEP_PLAN), vectors)}
MEASURED_ANEW = {  # on every batch
    "sorted": (
        lambda: Sorted(perceptron()),
        by({"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}),
        vectors,
    ),
}
REFUSED = {  # name -> (the same, what the refusal says)
    "norm by positions": (
        lambda: sequence_model(trained=True),
        sequence_plan,
        sequences,
        "'0.weight'.*SequenceParallel",
    ),
    "norm of heads": (
        lambda: nn.Sequential(nn.Linear(6, 8), HeadNorm(2), nn.Linear(8, 3)),
        by({"0": ColwiseParallel(), "2": RowwiseParallel()}),
        vectors,
        "'1.scale' have other norms on each",
    ),
    "part of a vector": (
        lambda: nn.Sequential(nn.Linear(6, 8), PartScale(8), nn.Linear(8, 3)),
        part_scale_plan,
        vectors,
        r"'1.scale' is a distributed tensor, and the forward uses this rank's part of it \(to_local",
    ),
    "norm of heads beside longer rows": (
        lambda: nn.Sequential(nn.Linear(6, 8), HeadNorm(2), nn.Linear(8, 3), nn.Linear(3, 200)),
        by({"0": ColwiseParallel(), "2": RowwiseParallel()}),
        vectors,
        "'1.scale' have other norms on each",
    ),
}


def losses_of(model, x):
    """Returns (n,) losses, each of its own example."""
    y = model(x)
    target = torch.arange(y.shape[-1], dtype=y.dtype) / 7
    if isinstance(y, DTensor):
        target = distribute_tensor(target, y.device_mesh, [Replicate()], src_data_rank=None)
    return (y.sin() - target).square().flatten(1).sum(1)
