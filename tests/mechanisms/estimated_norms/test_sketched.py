# SPDX-License-Identifier: Apache-2.0
"""Tests random projections: their distribution, agreement of all strategies, black boxes, and refusals."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracle import flat, recorded_jacobian, rows_of_one_graph
from parts import Calls, losses_of, own_batches, trained
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.mechanisms.estimated_norms.directions import Directions
from torch_privacy.mechanisms.estimated_norms.jvp import STRATEGIES, ForwardCall, differentiable_twice
from torch_privacy.mechanisms.estimated_norms.projected import ProjectedRecording, Projector
from torch_privacy.mechanisms.estimated_norms.settings import Projections
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.privacy import SubsampledGaussian, SubsampledJL, compose
from torch_privacy.support.random_state import RandomState

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
KEY = bytes(range(32))


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def recorded_call(model, x):
    """Returns the losses of a forward, and the recorded call, which can be repeated."""
    call = ForwardCall(model, (x,), {}, RandomState())
    kept = []
    handle = model.register_forward_hook(lambda module, args, output: kept.append(output))
    losses = losses_of(model, x)
    handle.remove()
    call.record_output(kept[0])
    return losses, call


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.function = torch.jit.script(scripted_step)

    def forward(self, x):
        return self.function(x, self.w)


def scripted_step(x, w):  # no annotations: torch.jit would see them as strings
    h = x
    for _ in range(2):
        h = torch.tanh(h @ w @ w.t())
    return h


class CubeWithJvp(torch.autograd.Function):
    """Computes ``x w³`` with a backward that cannot be differentiated: only its forward mode can be projected."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        return x * w**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return b * w**3, (3 * b * x * w**2).sum(0)

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        out = 0
        out = out if dx is None else out + dx * w**3
        return out if dw is None else out + 3 * x * w**2 * dw


class TwiceDifferentiable(torch.autograd.Function):
    """Computes the same without a forward mode."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return b * w**3, (3 * b * x * w**2).sum(0)


def neural_ode(module, x):
    """Runs five Runge-Kutta steps through the field ``tanh(W x)``."""

    def field(h):
        return torch.tanh(F.linear(h, module.w))

    h = x
    for _ in range(5):
        k1 = field(h)
        k2 = field(h + 0.1 * k1)
        h = h + 0.2 * k2
    return h


def hypernetwork(module, x):
    """Computes the layer's weights by another network, so that no gradient of a leaf is an outer product."""
    w = module.hyper(module.code).view(3, 3)
    return torch.tanh(x @ torch.linalg.matrix_exp(w))


def mixed_layouts(module, x):
    """Places examples first, then last, then side by side in one dimension."""
    h = (x @ module.w).T.contiguous()  # (e, n)
    h = torch.fft.irfft(torch.fft.rfft(h, dim=0) * module.v[:, None], n=4, dim=0)
    return h.T


BLACK_BOXES = {
    "custom function with jvp": lambda: Calls(lambda m, x: CubeWithJvp.apply(x, m.w), w=torch.rand(3)),
    "custom function without": lambda: Calls(lambda m, x: TwiceDifferentiable.apply(x, m.w), w=torch.rand(3)),
    "neural ODE": lambda: Calls(neural_ode, w=torch.randn(3, 3)),
    "hypernetwork": lambda: Calls(hypernetwork, hyper=nn.Linear(2, 9), code=torch.randn(2)),
    "scripted": Scripted,
    "mixed layouts": lambda: Calls(mixed_layouts, w=torch.randn(3, 4), v=torch.randn(3)),
    "lstm": lambda: Calls(lambda m, x: m.lstm(x[:, None].expand(-1, 4, -1))[0], lstm=nn.LSTM(3, 2, batch_first=True)),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 8),
        nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True),
        nn.Flatten(),
    ),
    "in-place and dropout": lambda: nn.Sequential(nn.Linear(3, 9), nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "a weight that is one number": lambda: Calls(
        lambda m, x: (x @ m.w) * m.scale, w=torch.randn(3, 4), scale=torch.rand(())
    ),
    "custom weight outside of torch's functions": lambda: Calls(lambda m, x: x * m.w.exp().cumsum(0), w=torch.rand(3)),
}


@pytest.mark.parametrize("box", [*BLACK_BOXES])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_every_strategy_that_works_gives_the_products_of_rows_and_directions(box, strategy):
    torch.manual_seed(1)
    model, x = BLACK_BOXES[box](), torch.randn(5, 3)
    with differentiable_twice(model):
        losses, call = recorded_call(model, x)
        rows = rows_of_one_graph(losses, model)
        v = Directions(KEY, 0, 0).draw(range(3), trained(model))
        try:
            projections = STRATEGIES[strategy](losses, trained(model), [call])(v)
        except RuntimeError as error:
            if "custom function" in box or "scripted" in box:
                pytest.skip(str(error).partition("\n")[0])
            raise
    expected = rows @ flat(v, 1).double().T
    if "with jvp" in box and "double" in strategy:
        pytest.fail("a backward that cannot be differentiated was differentiated")
    torch.testing.assert_close(projections, expected)


def test_the_taped_jacobian_projects_alike():
    model, x = small(), torch.randn(6, 3)
    v = Directions(KEY, 3, 0).draw(range(4), trained(model))
    losses, call = recorded_call(model, x)
    taped = recorded_jacobian(model, x, losses_of).project(v)
    for strategy in STRATEGIES.values():
        torch.testing.assert_close(strategy(losses, trained(model), [call])(v), taped)


DRAWS = 100_000


@pytest.mark.parametrize("r", [1, 5])
def test_estimates_follow_the_priced_distribution_with_every_strategy(r):
    """Rows that share no parameter have independent estimates, so that one batch gives many draws."""
    torch.set_default_dtype(torch.float32)
    model, x = nn.Embedding(DRAWS, 2), torch.arange(DRAWS)
    with tp.record(model) as tape:
        taped = tape.jacobian(losses_of(model, x))
    losses, call = recorded_call(model, x)
    v = Directions(KEY, 7, 1).draw(range(r), trained(model))
    batched = [strategy(losses, trained(model), [call]) for name, strategy in STRATEGIES.items() if "together" in name]
    projections = [project(v).detach() for project in (taped.project, *batched)]
    for found in projections:
        torch.testing.assert_close(found, projections[0], rtol=1e-4, atol=1e-5)
        ratio = found.square().sum(1) / taped.squared_norms()
        assert stats.kstest(ratio.numpy(), "chi2", args=(r,)).pvalue > 1e-3


def test_directions_are_never_used_twice_and_repeat_for_a_step():
    parameters = {"w": torch.zeros(1000), "b": torch.zeros(2, 3, dtype=torch.float64)}
    streams = {
        (key, step, part): torch.cat([d.flatten().double() for d in Directions(key, step, part).draw(
            range(2), parameters).values()])
        for key in (KEY, KEY[::-1]) for step in (0, 1) for part in (0, 1)
    }  # fmt: skip
    assert len({tuple(s.tolist()) for s in streams.values()}) == len(streams)
    every = torch.cat([*streams.values()])
    assert len(every.unique()) > 0.999 * len(every)
    state = torch.get_rng_state()
    again = Directions(KEY, 1, 1).draw([1], parameters)["w"]
    torch.testing.assert_close(again.double().flatten(), streams[KEY, 1, 1][1000:2000], rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    noise = Noise(KEY)
    sums = {"w": torch.zeros(1000, dtype=torch.float32)}
    noise.add_to(1, sums, 1.0)
    assert not set(sums["w"].double().tolist()) & set(streams[KEY, 1, 0].tolist())


def data(n=40):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.randint(2, (n,), generator=generator))


def sketched(num_projections, **more):
    return tp.Sketched(num_projections, clip_norm=0.5, **more)


def training_of(model, setting=None, optimizer=torch.optim.SGD, **settings):
    settings = {"expected_batch_size": 8, "num_steps": 4, "noise_multiplier": 1.0} | settings
    dataset = settings.pop("dataset", data())
    setting = setting or sketched(16)
    return private_training(model, optimizer(model.parameters(), lr=0.1), dataset, clipping=setting, **settings)


def train(training, losses=lambda model, x, y: losses_of(model, x), steps=None):
    for x, y in training:
        training.step(losses(training.model, x, y))
        if training.step_count == steps:
            break
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


@pytest.mark.thorough
@pytest.mark.parametrize("box", [*BLACK_BOXES])
def test_black_boxes_train_privately_and_state_their_price(box):
    torch.manual_seed(1)
    training = training_of(BLACK_BOXES[box](), optimizer=torch.optim.Adam, delta=1e-3)
    before = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    after = train(training)
    assert after.isfinite().all()
    assert (after != before).any()
    assert "projections by" in training.explain()
    statement = training.statement()
    assert statement["private"]
    assert sum(release["count"] for release in statement["releases"]) == 4
    exact = tp.privacy.compose([(tp.privacy.SubsampledGaussian(1.0, 0.2), 4)]).epsilon(1e-3)
    assert training.spent().epsilon.low >= exact.high


def test_a_custom_function_is_projected_by_the_mode_that_it_supports():
    boxes = {box: training_of(BLACK_BOXES[box]()) for box in ("custom function with jvp", "custom function without")}
    for training in boxes.values():
        train(training)
    assert "forward mode" in boxes["custom function with jvp"].explain().partition(";")[0]
    assert "double vjp" in boxes["custom function without"].explain().partition(";")[0]
    assert "not by forward mode" in boxes["custom function without"].explain()


def test_losses_may_have_more_digits_than_the_model():
    training = training_of(small().float(), dataset=TensorDataset(data().tensors[0].float(), data().tensors[1]))
    train(training, lambda model, x, y: losses_of(model, x).double(), steps=2)
    assert "forward mode" in training.explain().partition(";")[0]


class Counts(nn.Module):
    """A model that gives another output on every forward."""

    def __init__(self):
        super().__init__()
        self.body, self.calls = small(), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) * self.calls


def test_forwards_that_do_not_repeat_are_projected_by_a_double_vjp():
    training = training_of(Counts(), examples={"assume_independent": "it counts its calls alone"})
    train(training)
    assert "double vjp" in training.explain().partition(";")[0]
    assert "does not match its random projections" in training.explain()


def test_padding_that_only_later_batches_have_is_projected_by_a_double_vjp():
    """Forward mode has a tangent in the row of padding, in which the gradient is zero."""
    table = nn.Embedding(5, 3, padding_idx=0)
    ids = torch.randint(1, 5, (40, 4))
    ids[::8, -1] = 0
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 2))
    training = training_of(model, dataset=TensorDataset(ids, ids), performance=tp.Performance(microbatch_size=1))
    train(training)
    assert training.step_count == 4
    assert "padding_idx" in training.explain()
    table.requires_grad_(False)  # then there is nothing to leave out
    training = training_of(model, dataset=TensorDataset(ids, ids))
    train(training)
    assert "forward mode" in training.explain().partition(";")[0]


@pytest.mark.thorough
def test_dropout_that_forward_mode_draws_anew_is_noticed():
    layer = nn.TransformerEncoderLayer(8, 2, 8, 0.5, batch_first=True)
    training = training_of(nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 8), layer, nn.Flatten()))
    train(training)
    assert training.step_count == 4


def test_one_step_is_the_clipped_sum_by_estimates_plus_noise():
    training = training_of(
        small(), sketched(16), test_seed=5, num_steps=1, performance=tp.Performance(microbatch_size=3)
    )
    training.optimizer.param_groups[0]["lr"] = 1.0
    model, total = copy.deepcopy(training.model), 0.0
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    noise = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    training._state.releases.noise.add_to(0, noise, 0.5 * PRICED_ROUNDING)
    for part, (x, _) in enumerate(own_batches(training, lambda model, x, _: losses_of(model, x))):
        rows = rows_of_one_graph(losses_of(model, x), model)
        v = Directions(training._state.releases.noise.key, 0, part).draw(range(16), trained(model))
        norms = (rows @ torch.cat([d.flatten(1) for d in v.values()], 1).T).square().mean(1).sqrt()
        total = total + (0.5 / norms).clamp(max=1) @ rows
        training.step(losses_of(training.model, x))
    expected = before - (total + torch.cat([z.flatten() for z in noise.values()])) / 8
    after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_many_projections_train_like_exact_norms():
    exact = tp.PrivateTraining(
        model := small(), torch.optim.SGD(model.parameters(), lr=0.1), data(),
        expected_batch_size=8, num_steps=4, clipping=tp.Flat(0.5), noise_multiplier=1.0, test_seed=5,
    )  # fmt: skip
    away = []
    initial = copy.deepcopy(model)
    reference = train(exact)
    for r in (20, 2000):
        away.append((train(training_of(copy.deepcopy(initial), sketched(r), test_seed=5)) - reference).norm())
    assert away[1] < 0.3 * away[0]


@pytest.mark.thorough
def test_group_size_changes_nothing_but_rounding():
    initial = small()
    ends = [train(training_of(copy.deepcopy(initial), sketched(17, group_size=g), test_seed=5)) for g in (1, 4, 17)]
    torch.testing.assert_close(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2])


def test_groups_are_even_and_a_single_direction_is_not_batched():
    groups = Directions(KEY, 0, 0).in_groups(10, 8, {"w": torch.zeros(3)})
    assert [len(group["w"]) for group in groups] == [5, 5]
    explanations = []
    for r in (1, 2):
        model = small()
        losses, call = recorded_call(model, torch.randn(4, 3))
        projector = Projector(Projections(r))
        projector.jacobian(losses, trained(model), [call], Directions(KEY, 0, 0))
        explanations.append(projector.explain())
    assert "one direction after the other" in explanations[0]
    assert "directions together" in explanations[1]


@pytest.mark.thorough
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("box", ["lstm", "custom function without"])
def test_a_resumed_run_repeats_bit_for_bit(box, microbatch_size):
    torch.manual_seed(1)
    initial = BLACK_BOXES[box]()
    settings = {"test_seed": 5, "performance": tp.Performance(microbatch_size=microbatch_size)}
    reference = train(training_of(copy.deepcopy(initial), **settings))
    stopped = training_of(copy.deepcopy(initial), **settings)
    train(stopped, steps=2)
    resumed = training_of(copy.deepcopy(stopped.model), **settings)
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(train(resumed), reference)


def test_a_run_cannot_go_on_with_other_projections():
    state = training_of(small(), sketched(16)).state_dict()
    with pytest.raises(tp.Refused, match="num_projections=32"):
        training_of(small(), sketched(32)).load_state_dict(state)


def test_a_run_whose_estimates_changed_is_refused():
    """Nothing is released that the ledger would call something else."""
    training = training_of(small())
    train(training, steps=2)
    training._setup.mechanism._estimator.setting = Projections(3)
    with pytest.raises(tp.Refused, match="changed since the start"):
        train(training)
    assert training.step_count == 2
    assert [count for _, count in training.ledger.events] == [2]


@pytest.mark.parametrize("changed", ["clipping", "noise_multiplier", "sampling_probability"])
def test_settings_cannot_be_changed_on_the_way(changed):
    training = training_of(small())
    with pytest.raises(AttributeError, match=f"PrivateTraining.{changed} cannot be set"):
        setattr(training, changed, {"clipping": sketched(3)}.get(changed, 0.1))


def test_few_projections_are_refused_unless_nothing_is_released():
    with pytest.raises(tp.Refused, match=r"would cost an epsilon of .* or more at delta = 0.001: with fewer than 16"):
        training_of(small(), sketched(3), delta=1e-3)
    with pytest.raises(tp.Refused, match="would cost an epsilon of"):
        training_of(small(), sketched(15), delta=1e-3, noise_multiplier=None, target_epsilon=3.0)
    training = training_of(small(), sketched(12, not_for_release=True), delta=1e-3)
    train(training)
    assert str(training.spent()).startswith("NOT PRIVATE (made with not_for_release=True")
    assert not training.statement()["private"]


def test_too_little_noise_for_a_price_is_refused_unless_nothing_is_released():
    with pytest.raises(tp.Refused, match=r"noise_multiplier=0.01 is less than 0.05, and then no bound on epsilon"):
        training_of(small(), sketched(32), delta=1e-3, noise_multiplier=0.01)
    training = training_of(small(), sketched(3, not_for_release=True), delta=1e-3, noise_multiplier=1e-4)
    train(training)
    least = compose([(SubsampledJL(0.05, 3, 0.2), 4)]).epsilon(1e-3)
    spent = training.spent()
    assert (spent.epsilon.low, spent.epsilon.high) == (least.low, float("inf"))
    assert str(spent).startswith("NOT PRIVATE (made with not_for_release=True")


def test_epsilon_is_above_that_of_exact_norms_and_converges_to_it():
    training = training_of(small(), delta=1e-3)
    train(training)
    assert training.spent().epsilon.high > compose([(SubsampledGaussian(1.0, 0.2), 4)]).epsilon(1e-3).high
    relation = training.settings.neighboring_relation
    assert training.event == replace(sketched(16).event(1.0, 0.2), neighboring_relation=relation)
    exact = compose([(SubsampledGaussian(1.0, 0.01), 2000)]).epsilon(1e-5).high
    away = [compose([(SubsampledJL(1.0, r, 0.01), 2000)]).epsilon(1e-5).high - exact for r in (32, 1000)]
    assert 0 < away[1] < 0.05
    assert away[1] < away[0] / 8


@pytest.mark.thorough
def test_a_target_epsilon_takes_more_noise_than_exact_norms_need():
    training = training_of(small(), sketched(32), delta=1e-3, noise_multiplier=None, target_epsilon=2.0)
    exact = tp.privacy.calibrate(2.0, 1e-3, sampling_probability=0.2, num_steps=4)
    assert 1.01 * exact < training.settings.noise_multiplier < 1.5 * exact
    train(training)
    assert 1.99 < training.spent().epsilon.high <= 2.0


def in_batch_negatives(model, x, y):
    z = model(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")


class Standardized(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        return self.body((x - x.mean(0)) / x.std(0))


class WritesBuffer(Standardized):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return self.body(x)


class WrongBackward(torch.autograd.Function):
    """Clamps the gradient, which is neither linear nor a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, b):
        return b.clamp(-0.01, 0.01)

    @staticmethod
    def jvp(ctx, dx):
        return dx.clone()


class Once(torch.autograd.Function):
    """The identity, which can be differentiated only once, in reverse mode."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, b):
        return b.clone()


class Doubled(Once):
    """The identity with a jvp that disagrees with its backward."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, b):
        return 2 * b

    @staticmethod
    def jvp(ctx, dx):
        return dx.clone()


WRONG = {
    "coupled behind a lookup of our own": (
        lambda: Calls(lambda m, x: m.w[x].sum(1), w=torch.rand(3, 2)),
        lambda m, x, y: in_batch_negatives(m, x.abs().long().clamp(max=2), y), "the loss of example"),
    "coupled behind an embedding": (
        lambda: Calls(lambda m, x: m.e(x).sum(1) - m.e(x).mean((0, 1)), e=nn.Embedding(3, 2)),
        lambda m, x, y: losses_of(m, x.abs().long().clamp(max=2)), "mixed in the model's own forward"),
    "a scalar loss": (small, lambda m, x, y: losses_of(m, x).mean(), "one loss per example"),
    "in-batch negatives": (small, in_batch_negatives, "depend on each other"),
    "batch statistics": (Standardized, lambda m, x, y: losses_of(m, x), "depend on each other"),
    "a loss over the batch's size": (small, lambda m, x, y: losses_of(m, x) / len(x), "divided by the number"),
    "a buffer that learns": (WritesBuffer, lambda m, x, y: losses_of(m, x), "'seen'"),
    "an undefined gradient": (small, lambda m, x, y: losses_of(m, x) * (x[:, 0] - x[:, 0]).sqrt().exp() * (
        m(x)[:, 0] * 0).sqrt(), "not finite"),
    "a clamped gradient": (lambda: nn.Sequential(small(), Calls(lambda m, x: WrongBackward.apply(x))),
                           lambda m, x, y: losses_of(m, x), "no way to project"),
    "neither a jvp nor a second derivative": (lambda: nn.Sequential(small(), Calls(lambda m, x: Once.apply(x))),
                                              lambda m, x, y: losses_of(m, x), "no way to project"),
    "a wrong backward in front": (lambda: Calls(lambda m, x: m.body(Doubled.apply(x * m.w)), body=small(),
                                                w=torch.rand(3)), lambda m, x, y: losses_of(m, x), "no way"),
    "half precision": (lambda: small().bfloat16(), lambda m, x, y: losses_of(m, x.bfloat16()).float(), "half"),
    "a parameter that is not reached": (lambda: Calls(lambda m, x: m.a(x), a=small(), b=nn.Linear(2, 2)),
                                        lambda m, x, y: losses_of(m, x), "never reach parameter 'b.weight', 'b.bias'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_guaranteed_is_refused_and_nothing_is_released(wrong):
    make, losses, message = WRONG[wrong]
    training = training_of(make(), expected_batch_size=40)
    with pytest.raises(tp.Refused, match=message):
        train(training, losses)
    assert training.step_count == 0
    assert not training.ledger.events


def test_a_model_without_batch_inputs_trains():
    training = training_of(Calls(lambda m, x: m.w, w=torch.rand(3)))
    train(training, lambda m, x, y: (x * m(None)).sum(1).sin())
    assert training.step_count == 4


class Positions(nn.Module):
    """Adds embeddings of words and positions; positions, examples and embedding entries are equal in number."""

    def __init__(self, number=lambda m, x: torch.arange(6)):
        super().__init__()
        self.words, self.places, self.number = nn.Embedding(9, 6), nn.Embedding(9, 6), number
        self.register_buffer("order", torch.arange(8))

    def forward(self, x):
        return (self.words(x) * self.places(self.number(self, x))).sum(1)


def training_on_words(model):
    words = TensorDataset(torch.randint(9, (6, 6)), torch.zeros(6))
    return training_of(model, dataset=words, expected_batch_size=6)


@pytest.mark.parametrize("number", [
    lambda m, x: torch.arange(6), lambda m, x: m.order[:6] + 1, lambda m, x: torch.arange(x.shape[1])[None],
    lambda m, x: torch.ones(6, dtype=torch.long).cumsum(0),
], ids=["range", "buffer", "of the input's size", "summed"])  # fmt: skip
def test_positions_are_not_confused_with_as_many_examples(number):
    train(training_on_words(Positions(number)))


@pytest.mark.parametrize("number", [
    lambda m, x: x.sum(0) % 9, lambda m, x: torch.arange(6).copy_(x[0]), lambda m, x: torch.tensor(x[0].tolist()),
    lambda m, x: torch.where(x[0] > 4, m.order[:6], 0),
], ids=["over the batch", "written over", "past torch", "chosen by data"])  # fmt: skip
def test_positions_computed_from_data_are_refused(number):
    with pytest.raises(tp.Refused, match=r"examples of a batch depend on each other: .* the model's own forward"):
        train(training_on_words(Positions(number)))


def test_batch_normalization_is_refused_at_once():
    with pytest.raises(tp.Refused, match="batch normalization"):
        training_of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def test_an_infinite_estimate_leaves_the_example_out():
    model = Calls(lambda m, x: x * m.w, w=torch.ones(3))
    x = torch.ones(4, 3)
    x[2] = 1e200
    training = training_of(
        model, dataset=TensorDataset(x, torch.zeros(4)), expected_batch_size=4, num_steps=2, test_seed=1
    )
    train(training, lambda model, x, y: model(x).sum(1))
    assert training.num_non_finite == 2
    assert model.w.isfinite().all()


def test_empty_batches_are_steps_of_noise_alone():
    training = training_of(small(), dataset=data(4), expected_batch_size=0.4, num_steps=8, test_seed=2)
    assert any(len(training._state.releases.draws.indices(step)) == 0 for step in range(8))
    train(training)
    assert training.step_count == 8


def test_evaluation_and_copies_run_untouched():
    training = training_of(small())
    train(training)
    copy.deepcopy(training.model)(torch.randn(2, 3)).sum().backward()
    assert training.model(torch.randn(2, 3)).shape == (2, 2)


def test_random_numbers_of_the_user_are_the_same_as_without_projections():
    model = nn.Sequential(small(), nn.Dropout(0.5))
    recording = ProjectedRecording(Projector(Projections(16)), trained(model), Directions(KEY, 0, 0))
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    plain = model(x)
    expected = torch.rand(3)
    torch.manual_seed(3)
    torch.randn(4, 3)
    recording.begin(model, (x,), {})
    y = model(x)
    recording.end(y)
    norms = []
    recording.clipped_sum(y.square().sum(1), {"all": ()}, None, observe=lambda j, _: norms.append(j.squared_norms()))
    assert torch.equal(y, plain)
    assert norms[0].isfinite().all()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.thorough
def test_prefetched_tangents_change_nothing(monkeypatch):
    """Estimates are the same whether tangents are computed before the forward or after it."""
    initial, prefetched = nn.Sequential(small(), nn.Dropout(0.5), nn.Linear(2, 2)), []
    prefetch = ForwardCall.prefetch_tangents
    monkeypatch.setattr(ForwardCall, "prefetch_tangents", lambda *args: prefetched.append(prefetch(*args)))
    torch.manual_seed(4)
    reference = train(
        training_of(copy.deepcopy(initial), sketched(17), test_seed=5, examples={"assume_independent": "test"})
    )
    assert len(prefetched) == 9  # three groups in all steps except the first
    monkeypatch.setattr(Projector, "prefetches", False)
    torch.manual_seed(4)
    assert torch.equal(train(training_of(copy.deepcopy(initial), sketched(17), test_seed=5)), reference)
    assert len(prefetched) == 9


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_batch_at_a_kink_where_the_repeated_forward_has_other_bits_is_projected_by_its_own_graph(microbatch_size):
    """As for a fused LSTM before a ReLU: here one example changes its sign wherever its forward is repeated."""
    trained_weights, dataset = [], data()

    def forward(m, x):
        is_repeated = not torch.is_grad_enabled()
        return torch.where((x[:, :1] > 9) & is_repeated, -1.0, 1.0) * m.body(x)

    dataset.tensors[0][7, 0] = 10.0
    for method in (None, "double vjp"):
        torch.manual_seed(0)
        setting, settings = sketched(16, method=method), {"dataset": dataset, "test_seed": 5}
        settings["performance"] = tp.Performance(microbatch_size=microbatch_size)
        training = training_of(Calls(forward, body=small()), setting, **settings)
        trained_weights.append(train(training))
        assert ("forward mode" in training.explain().partition(";")[0]) == (method is None)
    torch.testing.assert_close(*trained_weights)


class InPlaceLater(nn.Module):
    """Changes its input in place when ``is_late``."""

    def __init__(self):
        super().__init__()
        self.body, self.is_late = small(), False

    def forward(self, x):
        return self.body(x.mul_(2) if self.is_late else x)


def test_a_forward_that_starts_to_change_its_input_is_refused():
    model = InPlaceLater()
    training = training_of(model)
    train(training, steps=2)
    model.is_late = True
    with pytest.raises(tp.Refused, match=r"cannot be projected like the earlier ones: .*in-place operation"):
        train(training)


@pytest.mark.parametrize("strategy", [name for name, strategy in STRATEGIES.items() if strategy.repeats_forward])
def test_a_forward_that_changed_its_input_is_not_repeated(strategy):
    model = InPlaceLater()
    model.is_late = True
    losses, call = recorded_call(model, torch.randn(5, 3))
    v = Directions(KEY, 0, 0).draw(range(2), trained(model))
    with pytest.raises(RuntimeError, match="changed its input in place"):
        STRATEGIES[strategy](losses, trained(model), [call])(v)


def test_a_forward_that_changes_its_input_is_projected_by_a_double_vjp():
    model = InPlaceLater()
    model.is_late = True
    training = training_of(model)
    train(training)
    assert "projections by double vjp" in training.explain()


def test_a_batch_is_released_as_it_was_though_earlier_turns_changed_it():
    trained_weights = []
    for forward in (lambda m, x: m.body(x.mul_(2)), lambda m, x: m.body(2 * x)):
        torch.manual_seed(0)
        model = Calls(forward, body=small())
        trained_weights.append(train(training_of(model, test_seed=5)))
    torch.testing.assert_close(*trained_weights)


@pytest.mark.parametrize("functions", [(CubeWithJvp, TwiceDifferentiable), (TwiceDifferentiable, CubeWithJvp)])
def test_a_batch_with_other_ops_is_refused_and_nothing_is_released(functions):
    model = Calls(lambda m, x: m.function(x, m.w), w=torch.rand(3))
    training = training_of(model)
    model.function = functions[0].apply
    train(training, steps=2)
    before, model.function = model.w.detach().clone(), functions[1].apply
    with pytest.raises(tp.Refused, match="cannot be projected like the earlier ones"):
        train(training)
    assert training.step_count == 2
    assert torch.equal(model.w, before)
