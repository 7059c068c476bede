# SPDX-License-Identifier: Apache-2.0
"""Tests that a step releases clipped sum plus noise over the expected batch size, and records before use."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Calls, losses_of
from oracle import one_backward_per_example, recorded_jacobian
from parts import own_batches
from scipy import stats
from torch import nn
from torch.utils.data import Subset, TensorDataset
from trainings import (
    N,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    network,
    network_parameters,
    noise_of,
    parameters_of,
    squared_norms_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.mechanisms.sums import ROUNDING, BoundCheck
from torch_privacy.model_check.rehearsal.comparison import REMOVED, AnswerComparison
from torch_privacy.model_check.rehearsal.turn import Answers
from torch_privacy.support.torch_modes import full_precision, product_rounding


def test_step_releases_clipped_sum_plus_noise_over_expected_batch_size():
    training = training_of()
    for x, y in own_batches(training, cross_entropy):
        before = parameters_of(training).clone()
        model = copy.deepcopy(training.model)
        rows = one_backward_per_example(model, x, cross_entropy_of_pair, list(zip(x.split(1), y.split(1), strict=True)))
        step = training.step_count
        noise = noise_of(training, step)
        training.step(cross_entropy(training.model, x, y))
        clipped = (rows * (0.5 / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
        stddev = 0.5 * PRICED_ROUNDING  # sensitivity 0.5, noise multiplier 1, learning rate 1
        expected = before - (clipped + stddev * noise) / 8
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-9, atol=1e-9)
    assert training.step_count == 6


@pytest.mark.parametrize("left_out", [0, 7, 39])
def test_one_example_moves_the_released_sum_by_at_most_the_clip_norm(left_out):
    """All examples join, and the noise, the same in both, is subtracted."""
    everyone = data()
    others = Subset(everyone, [i for i in range(N) if i != left_out])
    sums = []
    for dataset in (everyone, others):
        training = training_of(dataset=dataset, expected_batch_size=len(dataset), num_steps=1)
        train(training)
        start = network_parameters()
        sums.append((start - parameters_of(training)) * len(dataset) - 0.5 * PRICED_ROUNDING * noise_of(training, 0))
    moved = (sums[0] - sums[1]).norm()
    assert 0.4 < moved <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_one_example_moves_the_clipped_sum_by_at_most_the_clip_norm(case):
    """Compares the sum with the example to the sum without it, without noise, in float32."""
    torch.set_default_dtype(torch.float32)
    model, x = CASES[case]()

    def clipped_sum(x):
        jacobian = recorded_jacobian(model, x, losses_of)
        total = jacobian.weighted_sum(tp.Flat(0.1).factors(jacobian.squared_norms().sqrt()))
        return torch.cat([part.flatten() for part in total.values()]).double()

    everyone = clipped_sum(x)
    for left_out in range(len(x) if len(x) > 1 else 0):
        others = torch.cat([x[:left_out], x[left_out + 1 :]])
        assert (everyone - clipped_sum(others)).norm() <= 0.1 * (1 + 1e-5)


def test_forward_may_leave_torch():
    """Inputs require no gradient, so that ``x.numpy()`` works as usual."""
    training = training_of(Calls(lambda m, x: m.f(torch.from_numpy(x.numpy().cumsum(1)) + x), f=nn.Linear(3, 2)))
    train(training)
    assert training.step_count == 6


def test_microbatches_give_the_same_noise_and_the_same_sum():
    whole, split = training_of(), training_of(performance=tp.Performance(microbatch_size=3))
    train(whole)
    sizes = [len(part) for part in train(split)]
    assert max(sizes) == 3
    assert split.step_count == whole.step_count == 6
    torch.testing.assert_close(parameters_of(split), parameters_of(whole), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(noise_of(whole, step), noise_of(split, step)) for step in range(6))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("microbatch_size", [None, 3, 1])
def test_released_noise_is_normal_for_any_dtype_and_split(dtype, microbatch_size):
    """With losses whose gradient is zero, the noise alone moves a million weights from zero."""
    model = nn.Linear(1000, 1000, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    dataset = TensorDataset(torch.randn(N, 1000, dtype=dtype), torch.zeros(N))
    training = training_of(model, dataset, num_steps=1, performance=tp.Performance(microbatch_size=microbatch_size))
    train(training, losses=lambda model, x, y: 0 * model(x).sum(1))
    z = model.weight.detach().double().flatten().numpy() * -8 / 0.5  # learning rate 1, clip norm 0.5, batch 8
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    assert abs(z.std() - 1) < 4 / (2 * len(z)) ** 0.5
    if dtype != torch.bfloat16:  # its 8 bits are so coarse that the test would see them
        assert stats.kstest(z, "norm").pvalue > 1e-3


def test_empty_batches_make_steps_of_noise_alone():
    training = training_of(expected_batch_size=0.05, num_steps=50)
    before = parameters_of(training).clone()
    seen = train(training)
    assert training.step_count == len(training.ledger) == 50
    assert 0 < len(seen) < 20
    assert (parameters_of(training) != before).all()


def test_only_empty_batches_never_reach_the_loop():
    training = training_of(expected_batch_size=1e-9, num_steps=3)
    assert train(training) == []
    start = network_parameters()
    moved = sum(noise_of(training, step) for step in range(3))
    expected = start - moved * 0.5 * PRICED_ROUNDING / 1e-9
    torch.testing.assert_close(parameters_of(training), expected, rtol=1e-7, atol=1.0)  # the grid's unit is 0.1


def test_release_is_recorded_before_the_optimizer_sees_it():
    training = training_of()
    recorded = []
    training.optimizer.register_step_pre_hook(lambda *_: recorded.append(len(training.ledger)))
    train(training)
    assert recorded == [1, 2, 3, 4, 5, 6]


def test_ledger_on_disk_has_the_release_before_it_is_used(tmp_path):
    training = training_of(run_folder=tmp_path)
    lines = []
    count = lambda *_: lines.append((tmp_path / "ledger.jsonl").read_text().count('"step"'))  # noqa: E731
    training.optimizer.register_step_pre_hook(count)
    train(training)
    assert lines == [1, 2, 3, 4, 5, 6]


def test_gradients_of_the_user_are_not_released():
    """The contents of .grad, from the user's own backward, do not enter the step."""
    clean, dirty = training_of(), training_of()
    for x, y in own_batches(dirty, cross_entropy):
        losses = F.cross_entropy(dirty.model(x), y, reduction="none")
        for p in dirty.model.parameters():
            p.grad = torch.full_like(p, 1e6)
        dirty.step(losses)
    train(clean)
    assert torch.equal(parameters_of(clean), parameters_of(dirty))
    assert all(p.grad is None for p in dirty.model.parameters())


def test_evaluation_between_and_within_steps_runs_untouched():
    training, plain = training_of(), training_of()
    for x, y in own_batches(training, cross_entropy):
        with torch.no_grad():
            training.model.eval()(x)
        training.model.train()
        losses = cross_entropy(training.model, x, y)
        training.step(losses)
        training.model(x).sum().backward()  # the user's own gradient, between steps
        assert all(p.grad is not None for p in training.model.parameters())
    train(plain)
    assert torch.equal(parameters_of(training), parameters_of(plain))


def test_copied_and_pickled_models_are_ordinary_ones():
    training = training_of()
    for x, y in own_batches(training, cross_entropy):
        clone = copy.deepcopy(training.model)
        reloaded = pickle.loads(pickle.dumps(training.model))
        for other in (clone, reloaded):
            F.cross_entropy(other(x), y).backward()
            assert all(p.grad is not None for p in other.parameters())
        training.step(cross_entropy(training.model, x, y))
    assert list(training.model.state_dict()) == list(network().state_dict())


def test_several_forward_calls_in_a_step_count_together():
    training = training_of()
    for x, _ in own_batches(training, lambda model, x, _: (model(x) * model(-2 * x)).sum(1)):
        y, z = training.model(x), training.model(-2 * x)
        losses = (y * z).sum(1)
        expected = torch.stack(
            [
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(loss, list(training.model.parameters()), retain_graph=True)
                    ]
                )
                for loss in losses
            ]
        )
        torch.testing.assert_close(squared_norms_of(training, losses), expected.square().sum(1))
        training.step(losses)


def in_parts(model, x, y):
    return F.cross_entropy(model[2](model[1](model[0](x))), y, reduction="none")


class TwoTasks(nn.Module):
    """Returns the weights of its tasks, which it learns, with the outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.kind, self.size = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.body(x).tanh()
        return self.kind(h), self.size(h).squeeze(1), (-self.log_variance).exp()


def of_two_tasks(model, x, y):
    kind, size, weight = model(x)
    return weight[0] * F.cross_entropy(kind, y, reduction="none") + weight[1] * (size - y) ** 2 - weight.log().sum()


def of_logits_by_hand(model, x, y):
    return F.cross_entropy((-model.log_variance[0]).exp() * model.kind(model.body(x)), y, reduction="none")


@pytest.mark.parametrize(
    ("make", "losses_of_loop"), [(network, in_parts), (TwoTasks, of_two_tasks), (TwoTasks, of_logits_by_hand)]
)
def test_parameters_used_outside_of_the_forward_are_recorded(make, losses_of_loop):
    model = make()
    x, y = data().tensors
    used = torch.autograd.grad(losses_of_loop(model, x, y).sum(), list(model.parameters()), allow_unused=True)
    for p, gradient in zip(model.parameters(), used, strict=True):
        p.requires_grad_(gradient is not None)
    trained = [p for p in model.parameters() if p.requires_grad]
    training = training_of(model, num_steps=3)
    for x, y in own_batches(training, losses_of_loop):
        losses = losses_of_loop(model, x, y)
        rows = [torch.autograd.grad(loss, trained, retain_graph=True) for loss in losses]
        expected = torch.stack([sum(g.square().sum() for g in row) for row in rows])
        torch.testing.assert_close(squared_norms_of(training, losses), expected)
        training.step(losses)


def test_a_loop_that_calls_parts_of_the_model_trains_as_its_forward_does():
    whole, parts = training_of(), training_of()
    train(whole)
    train(parts, losses=in_parts)
    assert torch.equal(parameters_of(whole), parameters_of(parts))


def test_nothing_is_recorded_before_the_batch_and_after_its_step():
    training = training_of()
    early = training.model[2].weight.sum()
    assert not torch.overrides._get_current_function_mode_stack()
    for x, y in training:
        training.step(cross_entropy(training.model, x, y) + (early if training.step_count == 0 else 0))
        assert not torch.overrides._get_current_function_mode_stack()
    assert training.step_count == 6


def training_with_scheduler(**settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    settings = {key: scheduler for key in settings}
    return training_of(model, optimizer=optimizer, **settings), scheduler


def test_user_s_scheduler_and_ours():
    for settings in ({"scheduler": True}, {}):
        training, scheduler = training_with_scheduler(**settings)
        for x, y in training:
            if training.step(cross_entropy(training.model, x, y)) and not settings:
                scheduler.step()
        assert scheduler.get_last_lr() == [0.5**6]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # before the optimizer's
def test_a_scheduler_that_advances_at_rehearsals_is_refused():
    training, scheduler = training_with_scheduler()
    steps = ((training.step(cross_entropy(training.model, x, y)), scheduler.step()) for x, y in training)
    with pytest.raises(tp.Refused, match=r"lr of the optimizer changed .* where training\.step\(losses\) returns True"):
        list(steps)
    assert training.step_count == len(training.ledger) == 0


def test_only_what_the_optimizer_holds_is_trained():
    model = network()
    training = training_of(model, optimizer=torch.optim.SGD(model[2].parameters(), lr=1.0))
    before = model[0].weight.clone()
    train(training)
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[2].weight, network()[2].weight)


def test_one_gradient_for_several_parameters_is_divided_once():
    model = Calls(lambda m, x: F.linear(x, m.a + m.b), a=torch.zeros(1, 3), b=torch.zeros(1, 3))
    trainings = [
        training_of(copy.deepcopy(model), performance=tp.Performance(microbatch_size=size), num_steps=1)
        for size in (None, 3)
    ]
    for training in trainings:
        train(training, losses=lambda model, x, y: model(x).sum(1))
    torch.testing.assert_close(parameters_of(trainings[0]), parameters_of(trainings[1]))
    x, _ = next(own_batches(training_of(num_steps=1), cross_entropy))
    clipped = (x * (0.5 / (2 * x.square().sum(1)).sqrt()).clamp(max=1)[:, None]).sum(0)
    expected = -(torch.cat([clipped, clipped]) + 0.5 * PRICED_ROUNDING * noise_of(trainings[0], 0)) / 8
    torch.testing.assert_close(parameters_of(trainings[0]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast(dtype):
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(5, (64,)))

    def losses(model, x, y):
        with torch.autocast("cpu", dtype=dtype):
            return F.cross_entropy(model(x), y, reduction="none")

    training = training_of(model, dataset, expected_batch_size=32)
    train(training, losses=losses)
    assert training.step_count == 6


class OnFrozenBase(nn.Module):
    """A head in float32 on frozen layers in bfloat16, or under autocast to it; no gradient goes there."""

    def __init__(self, autocast: bool):
        super().__init__()
        base = nn.GRU(3, 4).requires_grad_(False)  # its results are in float32 under autocast
        self.base, self.head, self.autocast = base if autocast else base.bfloat16(), nn.Linear(4, 2), autocast

    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            features, _ = self.base(x[None].to(self.base.bias_hh_l0.dtype))
        return self.head(features[0].float())


@pytest.mark.parametrize(
    ("make", "autocast", "coarsest"),
    [
        (network, True, torch.bfloat16),
        (network, False, torch.float32),
        (lambda: OnFrozenBase(False), False, torch.bfloat16),
        (lambda: OnFrozenBase(True), False, torch.bfloat16),
    ],
    ids=["autocast", "float32", "frozen base in bfloat16", "frozen base under autocast"],
)
@pytest.mark.parametrize("checked", [True, False])
def test_rehearsals_allow_for_the_rounding_of_half_precision(make, autocast, coarsest, checked, monkeypatch):
    """With other batch sizes torch takes other products, which round in bfloat16 though the losses are in float32."""
    torch.set_default_dtype(torch.float32)
    found, compare = [], AnswerComparison.compare

    def watched(self, *args, **options):
        found.append((options["loose"], self.rounding))
        return compare(self, *args, **options)

    monkeypatch.setattr(AnswerComparison, "compare", watched)

    def losses(model, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return cross_entropy(model, x, y)

    model = make()
    if checked:
        tp.check(model, lambda model, batch: losses(model, *batch), data()[:8])
    else:
        train(training_of(model, data(), num_steps=1), losses=losses)
    assert {loose for loose, _ in found} == {True, False}
    assert {rounding for loose, rounding in found if loose} == {torch.finfo(coarsest).eps}


@pytest.mark.parametrize(("loss", "refused"), [(1e-4, False), (0.5, True)])
def test_small_losses_may_differ_by_the_rounding_of_the_logits_behind_them(loss, refused):
    """A loss of 1e-4 is the probability of the other classes, which 7 bits of a logit of 9 change by 3 %."""
    answers = [Answers(torch.tensor([[x], [x]]), None, {}, None) for x in (loss, 1.1 * loss)]
    comparison = AnswerComparison(2, None)
    comparison.rounding = torch.finfo(torch.bfloat16).eps
    found = comparison.compare(np.array([True, False]), *answers, np.array([0]), None, REMOVED, loose=True)
    assert bool(found) is refused


@pytest.mark.parametrize("op", ["matmul", "conv", "rnn"])
def test_sums_are_computed_in_full_where_a_processor_may_multiply_coarsely(op):
    setting, cpu = getattr(torch.backends.mkldnn, op), torch.device("cpu")
    assert product_rounding(cpu) == 0.0
    setting.fp32_precision = "bf16"
    try:
        assert product_rounding(cpu) == torch.finfo(torch.bfloat16).eps
        with full_precision(cpu):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_any_precision_train(dtype):
    model = network().to(dtype)
    dataset = TensorDataset(data().tensors[0].to(dtype), data().tensors[1])
    training = training_of(model, dataset, expected_batch_size=2, num_steps=12)  # some of its batches are empty
    train(training)
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())


def test_parameters_without_entries_change_nothing():
    """As those in the tail of nn.AdaptiveLogSoftmaxWithLoss for few features."""
    model, plain = network(), training_of()
    model.empty = nn.Parameter(torch.zeros(0, 2))
    training = training_of(model)
    train(training, losses=lambda m, x, y: cross_entropy(m, x, y) + m.empty.sum())
    train(plain)
    assert torch.equal(parameters_of(training), parameters_of(plain))


def test_layers_may_be_frozen_and_unfrozen_during_training(monkeypatch):
    """Layouts are learned for the trained layers: positions come first in the second layer, examples in the others."""
    monkeypatch.setattr(Noise, "add_to", lambda *arguments: None)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            late = torch.tanh(self.b(x.transpose(0, 1))).mean(0)
            return self.out(torch.tanh(self.a(late)) + x.mean(1))

    x, y = torch.randn(6, 6, 4), torch.randint(2, (6,))
    model = Net()
    model.b.requires_grad_(False)
    training = training_of(model, TensorDataset(x, y), expected_batch_size=6, num_steps=9)
    for x, y in own_batches(training, cross_entropy):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts = [
            torch.autograd.grad(cross_entropy(model, x[i : i + 1], y[i : i + 1]).sum(), list(wanted.values()))
            for i in range(6)
        ]
        rows = torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])
        if not training.step(cross_entropy(model, x, y)):
            continue  # rehearsed at once, because other layers are trained now; the batch comes again
        expected = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0) / 6
        moved = torch.cat([(before[name] - p).flatten() for name, p in wanted.items()])
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-9)
        if training.step_count in (3, 6):
            for layer in (model.a, model.b):
                layer.requires_grad_(not layer.weight.requires_grad)


def test_recording_around_the_model_s_own_recording_notes_every_op_once():
    plain, around = training_of(), training_of()
    train(plain)
    for x, y in own_batches(around, cross_entropy):
        with around.record():
            losses = cross_entropy(around.model, x, y)
        around.step(losses)
    assert torch.equal(parameters_of(plain), parameters_of(around))


def test_another_thread_may_run_the_model_between_batch_and_step():
    expected, training = training_of(), training_of()
    train(expected)
    for x, y in own_batches(training, cross_entropy):
        losses = cross_entropy(training.model, x, y)
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            pool.submit(torch.no_grad()(training.model), x).result()
        training.step(losses)
    assert torch.equal(parameters_of(training), parameters_of(expected))


def test_a_buffer_that_is_written_late_and_past_its_version_is_refused():
    class Restarts(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.calls = nn.Linear(3, 2), 0
            self.register_buffer("code", torch.zeros(5, 3))

        def forward(self, x):
            self.calls += 1
            if self.calls == 5:
                self.code.data[0] = x[0].detach()
            return self.f(x)

    training = training_of(Restarts(), expected_batch_size=N)
    with pytest.raises(tp.Refused, match="the forward changed 'code'"):
        train(training)
    assert training.step_count == 4


def test_noise_covers_rows_that_exceed_the_clip_norm_by_rounding(monkeypatch):
    """The noise over the largest possible change is the noise multiplier of the ledger, with nothing left out."""
    training, noisy = training_of(num_steps=1), []
    monkeypatch.setattr(
        type(training._state.releases.noise),
        "add_to",
        lambda self, step, sums, stddev, places: noisy.append(
            (sum(map(torch.numel, sums.values())), {*stddev.values()})
        ),
    )
    train(training)
    longest = 0.5 * (1 + ROUNDING) ** 2  # a factor times a norm that is too small
    (event, _), *_ = training.ledger.events
    ((count, (stddev,)),) = noisy
    assert count == sum(p.numel() for p in training.model.parameters())
    assert event.noise_multiplier <= stddev / longest < event.noise_multiplier * 1.00001


@pytest.mark.parametrize(("excess", "refused"), [(0.9 * ROUNDING, False), (1.1 * ROUNDING, True)])
def test_bound_of_a_clipped_row_is_checked_to_the_rounding_that_is_priced(excess, refused):
    check = BoundCheck(tp.Flat(0.5))
    check.note("all", torch.tensor([0.5 * (1 + excess)], dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    with pytest.raises(tp.Refused, match="largest_norm") if refused else nullcontext():
        check.check()


def test_state_and_statement_name_the_generator_of_the_noise():
    training = training_of()
    generator = "AES-256-CTR, ziggurat"
    assert training.state_dict()["machine"]["generator"] == generator
    assert training.statement()["noise"] == f"Gaussian, float64 on a grid, key from the operating system: {generator}"


def test_a_warning_names_the_line_of_the_users_loop():
    x, y = data().tensors
    training = training_of(dataset=TensorDataset(torch.where(torch.arange(N)[:, None] % 3 > 0, torch.inf, x), y))
    with pytest.warns(UserWarning, match="half of the examples") as caught:
        train(training)
    assert {Path(warning.filename).name for warning in caught} == {"trainings.py"}
