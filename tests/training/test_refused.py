# SPDX-License-Identifier: Apache-2.0
"""Tests that training refuses unsuitable settings, losses, optimizers and models, and releases nothing."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from cases import Calls
from parts import own_batches
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainings import N, cross_entropy, data, network, parameters_of, train, training_of

import torch_privacy as tp


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)


def batch_norm_network():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def stranger():
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: {"dataset": DataLoader(data(), shuffle=True)}, r"shuffled batches cost.* 4\.06 .*loader\.dataset"),
        (lambda: {"dataset": Stream()}, r"type Stream cannot be sampled"),
        (lambda: {"dataset": TensorDataset(torch.zeros(0, 3))}, r"dataset is empty"),
        (lambda: {"model": batch_norm_network()}, r"module '1' \(use nn\.LayerNorm\(6\)"),
        (lambda: {"optimizer": stranger()}, r"1 parameter\(s\) that are not the model's"),
        (lambda: {"model": network().requires_grad_(False)}, r"nothing to train"),
        (lambda: {"expected_batch_size": 41}, r"expected_batch_size=41 must be at most 40 examples"),
        (lambda: {"expected_batch_size": 0}, r"expected_batch_size=0 must be greater than 0"),
        (lambda: {"num_steps": 6.0}, r"num_steps=6\.0 must be an integer of at least 1"),
        (lambda: {"num_steps": 0}, r"num_steps=0 must be"),
        (lambda: {"delta": 1 / N}, r"delta=0\.025 must lie in \(0, 0\.025\)"),
        (lambda: {"noise_multiplier": 0.0}, r"noise_multiplier=0\.0 must be greater than 0"),
        (lambda: {"target_epsilon": 1.0, "delta": 1e-3}, r"give exactly one of the two"),
        (lambda: {"noise_multiplier": None}, r"give exactly one of the two"),
        (lambda: {"noise_multiplier": None, "target_epsilon": 1.0}, r"target_epsilon needs delta"),
        (lambda: {"clipping": 1.0}, r"clipping=1\.0 must be a clipping rule such as Flat"),
        (lambda: {"performance": tp.Performance(microbatch_size=0)}, r"microbatch_size=0 must be"),
        (lambda: {"performance": tp.Performance(memory_budget=0)}, r"memory_budget=0 must be greater than 0"),
        (lambda: {"performance": tp.Performance(memory_budget=-1.2)}, r"memory_budget=-1\.2 must be greater than 0"),
        (
            lambda: {"clipping": tp.MicroBatches(1.0, 2), "performance": tp.Performance(microbatch_size=3)},
            r"microbatch_size=3\) would split the groups of MicroBatches\(clip_norm=1\.0, size=2\)",
        ),
        (lambda: {"clipping": tp.Groups({"0": 1.0})}, r"no prefix in clip_norms matches '2\.weight', '2\.bias'"),
        (lambda: {"clipping": tp.Adaptive(1.0)}, r"count_noise_stddev=0\.4 must be greater than 0\.5"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        training_of(**settings())


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda model, x, y: F.cross_entropy(model(x), y), r"shape \(\) given: must be \(n,\)"),
        (
            lambda model, x, y: F.cross_entropy(model(x[1:]), y[1:], reduction="none"),
            r"batch of \d+ .*microbatch_size=",
        ),
        (lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") * model(x).mean(), r"cannot be separated"),
        (
            lambda model, x, y: F.cross_entropy(model(x - x.mean(0)), y, reduction="none").detach(),
            r"requires_grad=False",
        ),
    ],
)
def test_bad_losses_are_refused_and_nothing_is_released_or_lost(losses, message):
    training = training_of()
    before = parameters_of(training).clone()
    for x, y in own_batches(training, cross_entropy):
        with pytest.raises(tp.Refused, match=message):
            training.step(losses(training.model, x, y))
        break
    assert training.step_count == len(training.ledger) == 0
    assert torch.equal(parameters_of(training), before)
    plain = training_of()
    assert train(training) == train(plain)
    assert torch.equal(parameters_of(training), parameters_of(plain))


@pytest.mark.parametrize(
    "scaled",
    [
        lambda losses, x: losses / len(x),
        lambda losses, x: losses * (1 / len(x)),
        lambda losses, x: losses / torch.tensor(len(x)),
        lambda losses, x: torch.tensor(1 / len(x)) * losses,
        lambda losses, x: losses / torch.full((1,), len(x)),
        lambda losses, x: losses.div_(len(x)) * 3,
    ],
)
def test_losses_divided_by_the_size_of_the_batch_are_refused(scaled):
    training = training_of()
    with pytest.raises(tp.Refused, match=r"Leave the division out"):
        train(training, losses=lambda model, x, y: scaled(cross_entropy(model, x, y), x))
    assert len(training.ledger) == 0


def test_losses_divided_by_a_count_over_the_batch_are_refused():
    training = training_of()
    with pytest.raises(tp.Refused, match=r"examples of a batch depend on each other: the loss of example"):
        train(training, losses=lambda model, x, y: cross_entropy(model, x, y) / (100 + (x > 0).sum()))


def test_losses_scaled_by_a_constant_or_a_schedule_are_fine():
    training = training_of()
    train(training, losses=lambda model, x, y: cross_entropy(model, x, y) / 4 * (1.0 + 0.1 * training.step_count))
    assert training.step_count == 6


def test_an_older_iterator_is_refused():
    training = training_of(performance=tp.Performance(microbatch_size=4))
    older = iter(training)
    x, y = next(older)
    training.step(cross_entropy(training.model, x, y))
    x, y = next(iter(training))
    with pytest.raises(tp.Refused, match=r"newer loop"):
        next(older)


def writes_buffer(m, x):
    m.state = 0.9 * m.state + 0.1 * x.detach().mean(0)


def writes_data(m, x):
    m.state.data.mul_(0.9).add_(x.detach().mean(0))


def writes_codebook(m, x):
    with torch.no_grad():
        m.code.mul_(0.9).add_(x.mean(0))


def writes_weight(m, x):
    m.f.weight.data.copy_(x.detach().mean(0)[None].expand(2, -1))


@pytest.mark.parametrize("write", [writes_buffer, writes_data, writes_codebook, writes_weight])
@pytest.mark.parametrize("without_gradient", [False, True])
def test_a_forward_that_writes_data_into_the_model_is_refused(write, without_gradient):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 2)
            self.code = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_buffer("state", torch.zeros(3))
            self.writes = True

        def forward(self, x):
            if self.writes:
                write(self, x)
            return self.f(x)

    def losses(model, x, y):
        if without_gradient:
            with torch.no_grad():
                model(x)
            model.writes = False
        return cross_entropy(model, x, y)

    training = training_of(Writer())
    with pytest.raises(tp.Refused, match=r"changed '(state|code|f\.weight)'"):
        train(training, losses=losses)
    assert len(training.ledger) == 0


def test_interrupted_forward_leaves_no_recording_behind():
    model = network()

    def interrupt(*_):
        handle.remove()  # a flag in a closure would be put back, as all that the model holds
        raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(interrupt)
    training = training_of(model)
    with pytest.raises(KeyboardInterrupt):
        train(training)
    train(training)
    assert torch.overrides._len_torch_function_stack() == 0
    assert training.step_count == 6


def test_input_normalised_over_the_batch_is_refused():
    model = Calls(lambda m, x: m.f((x - x.mean(0)) / x.std(0)), f=nn.Linear(3, 2))
    with pytest.raises(tp.Refused, match=r"examples of a batch depend on each other: the loss of example \d+ of"):
        train(training_of(model))


def test_a_tensor_of_inference_mode_is_refused():
    model = network()
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(2))
    with pytest.raises(tp.Refused, match=r"'scale' was made under torch.inference_mode"):
        training_of(model, data())


def test_a_lazy_layer_is_refused_before_its_first_forward():
    model = nn.Sequential(network(), nn.LazyLinear(2))
    with pytest.raises(tp.Refused, match=r"'1.weight', '1.bias' is not initialized yet"):
        training_of(model, data())


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_do_not_fit_are_refused(optimizer):
    model, settings = nn.Linear(3, 2), {"expected_batch_size": 2, "num_steps": 3, "noise_multiplier": 1.0}
    with pytest.raises(tp.Refused, match=optimizer.__name__):
        tp.PrivateTraining(model, optimizer(model.parameters()), data(), clipping=tp.Flat(1.0), **settings)


def test_buffer_that_learns_is_refused():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.f(x)

    with pytest.raises(tp.Refused, match=r"changed 'mean'"):
        train(training_of(Running()))


def test_loop_without_step_and_step_without_loop_are_refused():
    training = training_of()
    with pytest.raises(tp.Refused, match=r"without a batch"):
        training.step(torch.zeros(3))
    with pytest.raises(tp.Refused, match=r"without training\.step"):
        for _ in training:
            pass
    assert len(training.ledger) == 0


@pytest.mark.filterwarnings("ignore:PrivateTraining. the losses depend on 'taken'")  # it is switched after the step
def test_parameter_that_a_later_batch_misses_has_zero_rows():
    """A branch that only some batches take is allowed once it was seen, and refused if it never was."""
    taken = [True]
    model = Calls(lambda m, x: m.f(x) + (m.g(x) if taken[0] else 0), f=nn.Linear(3, 2), g=nn.Linear(3, 2))
    training = training_of(model)
    for x, y in own_batches(training, cross_entropy):
        losses = F.cross_entropy(model(x), y, reduction="none")
        training.step(losses)
        taken[0] = False
    assert training.step_count == 6
    with pytest.raises(tp.Refused, match=r"never reach parameter 'g\.weight', 'g\.bias'"):
        train(training_of(model))


@pytest.mark.parametrize(("share", "steps"), [(0.02, 12), (0.0, 8)])
def test_layers_that_the_data_choose_may_be_missed_in_the_first_batches(share, steps):
    """Expert g has one example, or none: then it is refused, because nothing but noise would reach it."""

    def forward(m: Calls, x: torch.Tensor) -> torch.Tensor:
        y = m.f(x)
        for low, high, expert in [(-1, share, m.g), (share, 0.6, m.h), (0.6, 2, m.i)]:
            rows = ((low <= x[:, 0]) & (x[:, 0] < high)).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows])) if len(rows) else y
        return y

    x = torch.rand(N, 3, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.linspace(0, 1, N)
    model = Calls(forward, **{name: nn.Linear(3, 2) for name in "fghi"})
    training = training_of(model, TensorDataset(x, torch.arange(N) % 2), num_steps=12)
    with (
        pytest.warns(UserWarning, match=r"do not reach 'g\.weight', 'g\.bias'.* experts"),
        contextlib.nullcontext() if share else pytest.raises(tp.Refused, match=r"never reach parameter 'g\.weight'"),
    ):
        train(training)
    assert training.step_count == steps


@pytest.mark.parametrize(("chance", "steps"), [(0.5, 12), (0.0, 8)])
def test_layers_that_random_numbers_skip_may_be_missed_in_the_first_batches(chance, steps):
    model = Calls(
        lambda m, x: m.f(x) + (m.g(x) if torch.rand(()) < chance else 0), f=nn.Linear(3, 2), g=nn.Linear(3, 2)
    )
    training = training_of(model, num_steps=12)
    with (
        pytest.warns(UserWarning, match=r"do not reach 'g\.weight', 'g\.bias'.* LayerDrop"),
        contextlib.suppress(tp.Refused),
    ):
        train(training)
    assert training.step_count == steps


def update_by_hand(training, parameters):
    for x, y in training:
        gradients = torch.autograd.grad(cross_entropy(training.model, x, y).mean(), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.data -= 0.1 * gradient
        training.step(cross_entropy(training.model, x, y))


def test_an_update_by_hand_of_parameters_in_a_list_is_refused_by_name():
    training = training_of()
    with pytest.raises(tp.Refused, match=r"changed '0.bias', '0.weight'.*Write into no parameter"):
        update_by_hand(training, [*training.model.parameters()])
    assert training.step_count == 0
