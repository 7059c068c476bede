# SPDX-License-Identifier: Apache-2.0
"""Tests training at any memory budget, along any path through the model, with layouts that depend on the data."""

import copy
from functools import partial
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Calls, losses_of
from oracle import one_backward_per_example, rows_of_one_graph
from parts import own_batches
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from trainings import (
    N,
    clipped,
    clipped_means,
    cross_entropy,
    groups_of,
    noise_of,
    parameters_of,
    squared_norms_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.mechanisms.noise import Noise

MEASURED_EVERY_BATCH = ["irregular: packed", "irregular: two experts each", "irregular: sorted by expert"]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("rule", [tp.Flat(0.5), tp.EachLayer(0.3), tp.MicroBatches(0.5, 4)], ids=str)
@pytest.mark.parametrize("case", MEASURED_EVERY_BATCH)
def test_training_where_the_data_move_the_examples_about_equals_the_oracle(case, rule):
    model, x = CASES[case]()
    training = training_of(model, TensorDataset(torch.randn(N, *x.shape[1:])), num_steps=5, clipping=rule)
    names = [name for name, _ in model.named_parameters()]
    layers = training.clipping.groups(names)
    for (x,) in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        step, before = training.step_count, parameters_of(training).clone()
        rows = one_backward_per_example(copy.deepcopy(model), x, losses_of)
        if not training.step(losses_of(model, x)):
            continue  # the weights took the model to new code: the batch is rehearsed, and handed out again
        if isinstance(rule, tp.MicroBatches):
            groups = groups_of(training, step, len(x), 2)
            total, divisor, stddev = clipped_means(rows, groups), 2, 1.0
        elif isinstance(rule, tp.Flat):
            total, divisor, stddev = clipped(rows, 0.5), 8, 0.5
        else:
            parts = dict(zip(names, rows.split([p.numel() for p in model.parameters()], 1), strict=True))
            by_layer = [torch.cat([parts[name] for name in members], 1) for members in layers.values()]
            factors = [(0.3 / part.norm(dim=1)).clamp(max=1) for part in by_layer]
            sums = {n: c @ parts[n] for c, members in zip(factors, layers.values(), strict=True) for n in members}
            total = torch.cat([sums[name] for name in names])
            divisor, stddev = 8, 0.3 * len(layers) ** 0.5
        expected = before - (total + stddev * PRICED_ROUNDING * noise_of(training, step)) / divisor
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    assert training.step_count == 5


def trained_under(memory_budget, model, x):
    training = training_of(model, TensorDataset(x), performance=tp.Performance(memory_budget=memory_budget))
    for (x,) in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        training.step(losses_of(model, x))
    return parameters_of(training)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["convolutional network", "tied language model", "long short-term memory"])
def test_any_memory_budget_gives_the_same_training(case):
    results = []
    for memory_budget in (1e-9, 1.2, 100, 1000, 10**12):  # above 100 the budget is in bytes
        torch.manual_seed(1)
        model, x = CASES[case]()
        x = torch.cat([x + k if x.is_floating_point() else (x + k) % 7 for k in range(8)])
        results.append(trained_under(memory_budget, model, x))
    assert all((result - results[0]).abs().max() < 1e-9 for result in results)


@pytest.mark.thorough
def test_a_gradient_of_zero_passes_rehearsals_in_half_precision_at_any_memory_budget():
    """What keeps nothing and what keeps factors bound its norm by other numbers, which differ by some percent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    dataset = TensorDataset(torch.randn(N, 3).bfloat16(), (torch.arange(N) % 2).bfloat16())
    training = training_of(model, dataset, performance=tp.Performance(memory_budget=1e-6), num_steps=2)
    train(training, losses=lambda model, x, weights: model(x).float().square().sum(1) * weights)
    assert training.step_count == 2


def test_memory_budget_decides_what_is_kept(monkeypatch):
    """Rows that are kept and rows that are recomputed differ only by rounding; with noise they lie on one grid."""
    x = torch.randn(N, 9, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with_noise = [trained_under(budget, copy.deepcopy(model), x) for budget in (1e-9, 100)]
    torch.testing.assert_close(*with_noise, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(Noise, "add_to", lambda *arguments: None)
    least, few_bytes, most = (trained_under(budget, copy.deepcopy(model), x) for budget in (1e-9, 101, 100))
    assert torch.equal(least, few_bytes)
    assert not torch.equal(least, most)
    torch.testing.assert_close(least, most, rtol=1e-9, atol=1e-9)


def parts(call, dropout=0.0):
    """Returns a forward with a middle part that ``call`` calls."""

    def forward(m, x):
        def part(x):
            m.computed += 1
            return torch.tanh(m.g(F.dropout(torch.tanh(F.dropout(m.f(x), dropout)), dropout)))

        return m.h(call(part, x))

    return forward


checkpointed = partial(checkpoint, use_reentrant=False)


def training_with_checkpoints(forward):
    torch.manual_seed(1)
    model = Calls(forward, f=nn.Linear(3, 5), g=nn.Linear(5, 4), h=nn.Linear(4, 2))
    model.computed = 0
    return training_of(model, clipping=tp.PerLayer(0.5))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_with_activation_checkpointing_is_training_without(dropout):
    trainings = [training_with_checkpoints(parts(call, dropout)) for call in (checkpointed, lambda part, x: part(x))]
    for training in trainings:
        train(training)
    torch.testing.assert_close(*map(parameters_of, trainings), rtol=1e-9, atol=1e-9)


def test_checkpointed_part_is_computed_again_once_a_backward():
    training = training_with_checkpoints(parts(checkpointed))
    counts = []
    for x, y in own_batches(training, cross_entropy):
        before = training.model.computed
        training.step(cross_entropy(training.model, x, y))
        counts.append(training.model.computed - before)
    assert min(counts) == 2  # once in the forward and once in the backward, after layouts have been measured


def test_layout_that_the_data_decide_is_measured_on_every_batch():
    """The first batches are in order, later ones sorted by their data: layouts learned first must not be trusted."""

    def forward(m, x):
        h = m.pre(x)
        order = h[:, 0, 0].argsort() if training.step_count >= 4 else torch.arange(len(x))
        return m.f(h[order].flatten(0, 1)).unflatten(0, x.shape[:2])[order.argsort()]

    model = Calls(forward, pre=nn.Linear(3, 3), f=nn.Linear(3, 2))
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(N, 4, 3, generator=generator), torch.zeros(N))
    training = training_of(model, dataset)
    for x, _ in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        losses = losses_of(model, x)
        expected = rows_of_one_graph(losses, model).square().sum(1)
        torch.testing.assert_close(squared_norms_of(training, losses), expected)
        training.step(losses)
    assert training.step_count == 6


BRANCHES = {  # name -> (forward of the first batches, forward of later ones)
    "time first": (lambda m, x: m.f(x), lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1)),
    "flattened": (
        lambda m, x: m.f(x),
        lambda m, x: m.f(x.transpose(0, 1).flatten(0, 1)).view(4, -1, 2).transpose(0, 1),
    ),
    "split": (lambda m, x: m.f(x), lambda m, x: torch.stack(m.f(x.flatten(0, 1)).split([4] * len(x)))),
    "python order": (
        lambda m, x: m.f(x),
        lambda m, x: torch.stack([m.f(x)[i] for i in reversed(range(len(x)))]).flip(0),
    ),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_new_path_is_measured_anew(branch):
    """Layouts learned from two batches belong to their path; on another path the rows are exact, too."""
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(N, 4, 3, generator=generator), torch.zeros(N))
    model = Calls(lambda m, x: BRANCHES[branch][training.step_count >= 3](m, x), f=nn.Linear(3, 2))
    training = training_of(model, dataset)
    for x, _ in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        losses = losses_of(model, x)
        expected = rows_of_one_graph(losses, model).square().sum(1)
        torch.testing.assert_close(squared_norms_of(training, losses), expected)
        training.step(losses)
    assert training.step_count == 6


@pytest.mark.parametrize(
    "coupled",
    [
        lambda losses, h: losses - losses.mean(),
        lambda losses, h: losses * h.mean(),
    ],
)
def test_coupling_that_begins_later_is_refused(coupled):
    training = training_of()

    def losses(model, x, y):
        h = model(x)
        plain = F.cross_entropy(h, y, reduction="none")
        return coupled(plain, h) if training.step_count >= 4 else plain

    with pytest.raises(tp.Refused, match=r"cannot be separated"):
        train(training, losses=losses)
    assert training.step_count == 4


def normalized_over_the_batch(losses, h):
    return ((h - h.mean(0)) / h.std(0)).sin().sum(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coupled", [lambda losses, h: losses * h.mean(), normalized_over_the_batch])
def test_coupling_that_begins_later_under_autocast_is_refused(dtype, coupled):
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(5, (64,)))
    training = training_of(model, dataset, expected_batch_size=32)

    def losses(model, x, y):
        with torch.autocast("cpu", dtype=dtype):
            h = model(x)
            plain = F.cross_entropy(h, y, reduction="none")
            return coupled(plain, h.float()) if training.step_count >= 4 else plain

    with pytest.raises(tp.Refused, match=r"cannot be separated"):
        train(training, losses=losses)
    assert training.step_count == 4


def test_irregular_order_that_begins_later_in_bfloat16_is_exact_or_refused():
    def forward(m, x):
        positions = torch.arange(4 * len(x)).view(-1, 4)
        order = positions.T.flatten().roll(3) if training.step_count >= 4 else positions.flatten()
        return m.f(x.flatten(0, 1)[order])[order.argsort()].view(len(x), 4, 2)

    torch.set_default_dtype(torch.float32)
    model = Calls(forward, f=nn.Linear(3, 2))

    def losses_under_autocast(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses_of(model, x).float()

    training = training_of(model, TensorDataset(torch.randn(N, 4, 3)), expected_batch_size=12)
    for (x,) in own_batches(training, losses_under_autocast):
        losses = losses_under_autocast(model, x)
        expected = rows_of_one_graph(losses, model).norm(dim=1).float()
        try:
            norms = squared_norms_of(training, losses).sqrt()
            torch.testing.assert_close(norms, expected, rtol=0.02, atol=0)
            training.step(losses)
        except tp.Refused:
            break
    assert training.step_count >= 4


def test_first_batches_take_one_backward_more_than_rehearsals_and_sum(monkeypatch):
    """Layouts are confirmed, and rows checked, in the rehearsals that compare rows; the others take no backward."""
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: False)
    noted, backward = SimpleQueue(), torch.autograd.grad  # a list of the loop's would be put back by rehearsals

    def grad(outputs, *args, **kwargs):
        if isinstance(outputs, torch.Tensor) and outputs.ndim == 1:
            noted.put("b")
        return backward(outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(120, 3), torch.randint(2, (120,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"expected_batch_size": 40, "num_steps": 4, "noise_multiplier": 1.0, "test_seed": 1}
    for x, y in (training := tp.PrivateTraining(model, optimizer, data, clipping=tp.Flat(1.0), **settings)):
        noted.put(" ")
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    counts = [len(turn) for turn in "".join(noted.get() for _ in range(noted.qsize())).split(" ")[1:]]
    full = [1, 0, 1, 0, 0, 1, 1]  # halves replaced, a few alone, halves alone, earlier values of the loop, the batch
    assert counts == [2, 0, 2, *full[3:], *full, *full, 1, 0, 1]
