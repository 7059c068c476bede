# SPDX-License-Identifier: Apache-2.0
"""Tests models under activation checkpointing: exact rows, of inputs that are made again and not held."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_jacobian_equals_rows, flat, one_backward_per_example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape

BUDGETS = (1e-9, 1.2, 10**12)


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A tied language model; ``checkpointed`` maps a layer's number to the function that calls it."""

    def __init__(self, call, layers: int = 4, dropout: float = 0.0):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(6, dropout) for _ in range(layers)])
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.call(self, self.tokens(ids)), self.tokens.weight)


def again(function, *args, **settings):
    return checkpoint(function, *args, use_reentrant=False, **settings)


def each(model, x):
    for layer in model.layers:
        x = again(layer, x)
    return x


def every_second(model, x):
    for number, layer in enumerate(model.layers):
        x = again(layer, x) if number % 2 else layer(x)
    return x


def nested(model, x):
    def inner(x):
        return model.layers[2](again(model.layers[1], x)).tanh()

    def outer(x):
        return again(inner, model.layers[0](x)) * 2

    return model.layers[3](again(outer, x))


def without_early_stop(model, x):
    with set_checkpoint_early_stop(False):
        return each(model, x)


def one_layer_reused(model, x):
    for _ in range(3):
        x = again(model.layers[0], x)
    return model.layers[1](again(nn.Sequential(model.layers[2], model.layers[3]), x))


def tied_across_parts(model, x):
    weight = model.layers[0].up.weight
    x = again(model.layers[0], x)
    x = again(lambda h: model.layers[1](h + (h @ weight.mT).tanh()[..., :6]), x)
    return model.layers[3](model.layers[2](x))


def transposed_and_strided(model, x):
    return each(model, again(lambda h: model.layers[0](h.transpose(0, 1)).transpose(0, 1), x))


def offloaded(model, x):
    with torch.autograd.graph.save_on_cpu():
        for layer in model.layers:
            x = layer(x)
    return x


CALLS = {call.__name__: call for call in (each, every_second, nested, without_early_stop, one_layer_reused)}
CALLS |= {call.__name__: call for call in (tied_across_parts, transposed_and_strided, offloaded)}
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 1, 2, 0], [9, 9, 1, 0, 3], [10, 4, 4, 2, 8]])


def losses_of_ids(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum(2).mean(1)


@pytest.mark.parametrize("call", CALLS)
def test_rows_under_checkpointing_equal_one_backward_per_example(call):
    model = Model(CALLS[call])
    rows = one_backward_per_example(model, IDS, losses_of_ids)
    assert_jacobian_equals_rows(recorded_jacobian_of_ids(model), rows)


def recorded_jacobian_of_ids(model: nn.Module) -> tp.Jacobian:
    with tp.record(model) as tape:
        losses = losses_of_ids(model, IDS)
    return tape.jacobian(losses, verify=True)


def sums_of(model: nn.Module, budget: float, count: int = 3, clip_norm: float = 0.1) -> list[Tensor]:
    parameters, layouts, sums = dict(model.named_parameters()), Layouts(), []
    for _ in range(count):
        with Tape(parameters, [], layouts, len(IDS)) as tape:
            losses = losses_of_ids(model, IDS)

        def clip(jacobian: tp.Jacobian, group: str) -> dict[str, Tensor]:
            return jacobian.weighted_sum((clip_norm / jacobian.squared_norms().sqrt()).clamp(max=1))

        sums.append(flat(tape.clipped_sum(losses, {"all": list(parameters)}, clip, memory_budget=budget), 0))
    return sums


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("call", CALLS)
def test_clipped_sum_under_checkpointing_is_exact_for_any_budget(call, budget):
    model = Model(CALLS[call])
    rows = one_backward_per_example(model, IDS, losses_of_ids)
    expected = rows.T @ (0.1 / rows.norm(dim=1)).clamp(max=1)
    for total in sums_of(model, budget):
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)


def test_recorded_calls_hold_no_input_of_a_checkpointed_part():
    """Each input of a layer is freed before the next layer begins, and again after its part of the backward."""
    model, inputs = Model(each), []
    for layer in model.layers:
        layer.down.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))
    alive: list[int] = []

    def count_alive(module, args):
        gc.collect()
        alive.append(sum(ref() is not None for ref in inputs))

    for layer in model.layers:
        layer.norm.register_forward_pre_hook(count_alive)
    with tp.record(model) as tape:
        losses = losses_of_ids(model, IDS)
    count_alive(None, None)
    assert alive == [0] * 5
    tape.jacobian(losses)


def test_the_second_backward_frees_the_input_of_each_part_that_it_has_passed():
    alive: list[int] = []

    def call(model, x):
        inputs: list[weakref.ref] = []

        def run(layer, x):
            if len(inputs) < len(model.layers):  # the forward; later calls are of a backward
                inputs.append(weakref.ref(x))
            else:
                alive.append(sum(ref() is not None for ref in inputs))
            return layer(x)

        for layer in model.layers:
            x = again(run, layer, x)
        return x

    sums_of(Model(call), 1e-9)
    assert alive[-4:] == [4, 3, 2, 1]


def dropout_model(preserve: bool) -> Model:
    def call(model, x):
        for layer in model.layers:
            x = again(layer, x, preserve_rng_state=preserve)
        return x

    return Model(call, dropout=0.5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_dropout_in_a_checkpointed_part_is_drawn_once(budget):
    """The sum is that of the same model without checkpointing, which draws the same numbers."""
    found = []
    for call in (lambda model, x: nn.Sequential(*model.layers)(x), each):
        torch.manual_seed(1)
        model = Model(call, dropout=0.5)
        torch.manual_seed(2)
        found.append(sums_of(model, budget))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


def test_a_part_that_draws_other_numbers_in_the_second_backward_is_refused():
    torch.manual_seed(1)
    with pytest.raises(tp.Refused, match="drew random numbers when it ran again in the backward"):
        sums_of(dropout_model(preserve=False), 1e-9)


def test_selective_checkpointing_is_refused():
    """It keeps what it saved for one backward; layouts of examples, and often the sum, take another one."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 4)
    with tp.record(layer) as tape:
        losses = again(layer, x, context_fn=kept).square().sum(1)
    with pytest.raises(tp.Refused, match="Leave context_fn out of checkpoint"):
        tape.jacobian(losses)


def test_an_input_changed_in_place_in_a_checkpointed_part_is_refused():
    def call(model, x):
        def part(x):
            h = x * 1
            y = model.layers[0].up(h)
            h.add_(1)
            return y[..., :6] * h

        return nn.Sequential(*model.layers)(again(part, x))

    with pytest.raises(tp.Refused, match="changed in place"):
        recorded_jacobian_of_ids(Model(call))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_that_autocast_rounds_are_not_held(dtype):
    torch.set_default_dtype(torch.float32)
    model = Model(each)
    with tp.record(model) as tape, torch.autocast("cpu", dtype):
        losses = losses_of_ids(model, IDS).float()
    native = torch.autograd.grad(losses.sum(), [*model.parameters()], retain_graph=True)
    jacobian = tape.jacobian(losses)
    for ours, theirs in zip(jacobian.weighted_sum(torch.ones(len(IDS))).values(), native, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=0.05, atol=0.05 * float(theirs.abs().max()))
