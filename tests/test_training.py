# SPDX-License-Identifier: Apache-2.0
"""Private training: what is released, what is recorded, what is refused, and that a run goes on as if never stopped."""

import copy
import json
import math
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Calls, losses_of
from oracle import one_backward_per_example, recorded_jacobian, rows_of_one_graph
from parts import own_batches
from scipy import stats
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

import torch_privacy as tp
from torch_privacy.batches import Batches
from torch_privacy.mechanism import COUNT
from torch_privacy.sampling import Poisson

N = 40


def data(n=N):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, torch.randint(2, (n,), generator=generator))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def training_of(model=None, dataset=None, optimizer=None, **settings):
    model = model or network()
    settings = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0} | settings
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return tp.PrivateTraining(model, optimizer, data() if dataset is None else dataset, test_seed=5, **settings)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def train(training, steps=None, losses=cross_entropy):
    """Answers every batch; the batches' examples (first column of x) step by step."""
    seen = {}  # a batch whose code no rehearsal has seen comes a second time, behind its rehearsals
    for x, y in training:
        if not training.rehearsing:
            seen[training.step_count, training._part.number] = x[:, 0].tolist()
        training.step(losses(training.model, x, y))
        if steps is not None and training.step_count >= steps:
            break
    return [*seen.values()]


def cross_entropy_of_pair(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1], reduction="none")


def noise_of(training, step):
    """The standard normal numbers of a step, flattened; the count's is the last where the rule is adaptive."""
    zeros = {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
    if isinstance(training.clipping, tp.Adaptive):
        zeros[COUNT] = torch.zeros(1)
    training._noise.add_to(step, zeros, stddev=1.0)
    return torch.cat([z.flatten() for z in zeros.values()])


def network_parameters():
    return torch.cat([p.detach().flatten() for p in network().parameters()])


def parameters_of(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def test_step_releases_the_clipped_sum_plus_noise_over_the_expected_batch_size():
    training = training_of()
    for x, y in own_batches(training, cross_entropy):
        before = parameters_of(training).clone()
        model = copy.deepcopy(training.model)
        rows = one_backward_per_example(model, x, cross_entropy_of_pair, list(zip(x.split(1), y.split(1), strict=True)))
        step = training.step_count
        noise = noise_of(training, step)
        training.step(cross_entropy(training.model, x, y))
        clipped = (rows * (0.5 / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
        expected = before - (clipped + 0.5 * noise) / 8  # sensitivity 0.5, noise multiplier 1, learning rate 1
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-9, atol=1e-9)
    assert training.step_count == 6


@pytest.mark.parametrize("left_out", [0, 7, 39])
def test_one_example_moves_the_released_sum_by_at_most_the_clip_norm(left_out):
    """Everyone joins, and the noise, which is the same in both, is taken off again."""
    everyone = data()
    others = Subset(everyone, [i for i in range(N) if i != left_out])
    sums = []
    for dataset in (everyone, others):
        training = training_of(dataset=dataset, expected_batch_size=len(dataset), num_steps=1)
        train(training)
        start = network_parameters()
        sums.append((start - parameters_of(training)) * len(dataset) - 0.5 * noise_of(training, 0))
    moved = (sums[0] - sums[1]).norm()
    assert 0.4 < moved <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_one_example_moves_the_clipped_sum_by_at_most_the_clip_norm(case):
    """The noise set to zero: the sum with the example against the sum without it, in float32."""
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


# Clipping rules: each beside the explicit computation from the rows of ``network()``, whose layers are columns 0-15
# (12 of them the weight's) and 16-25 (the first 8 the weight's).


def clipped(rows, clip_norm):
    return (rows * (clip_norm / rows.norm(dim=1)).clamp(max=1)[:, None]).nan_to_num().sum(0)


def clipped_in_parts(sizes, clip_norms):
    def clip(rows, groups):
        parts = rows.split(sizes, dim=1)
        return torch.cat([clipped(part, clip_norm) for part, clip_norm in zip(parts, clip_norms, strict=True)])

    return clip


def scaled_automatically(rows, groups):
    return (rows * (0.5 / (rows.norm(dim=1) + 0.1))[:, None]).nan_to_num().sum(0)


def clipped_means(rows, groups):
    return clipped(torch.stack([rows[groups == k].mean(0) for k in groups.unique()]), 0.5)


RULES = {  # name -> (rule, the clipped sum from rows and the numbers of their groups, sensitivity)
    "flat": (tp.Flat(0.5), clipped_in_parts([26], [0.5]), 0.5),
    "per layer": (tp.PerLayer(0.5), clipped_in_parts([16, 10], [0.125**0.5] * 2), 0.5),
    "each layer": (tp.EachLayer(0.3), clipped_in_parts([16, 10], [0.3, 0.3]), 0.18**0.5),
    "groups": (
        tp.Groups({"": 0.3, "2": 0.2, "2.weight": 0.6}),
        clipped_in_parts([16, 8, 2], [0.3, 0.6, 0.2]),
        0.7,
    ),
    "automatic": (tp.Automatic(0.5, gamma=0.1), scaled_automatically, 0.5),
    "adaptive": (tp.Adaptive(0.5, count_noise_stddev=4.0), clipped_in_parts([26], [0.5]), 0.5),
    "micro-batches": (tp.MicroBatches(0.5, 4), clipped_means, 1.0),
}
BY_EXAMPLE = [name for name in RULES if name != "micro-batches"]


def by_each_rule(function):
    return pytest.mark.parametrize("rule", RULES)(function)


def noise_stddev(rule):
    """Of the sum, at noise multiplier 1; an adaptive rule's leaves room for a count that one example moves by 1/2."""
    return RULES[rule][2] * ((1 - (0.5 / 4.0) ** 2) ** -0.5 if rule == "adaptive" else 1.0)


def next_clip_norm(clip_norm, norms, noise, expected_batch_size):
    """Of the adaptive rule; the count's noise has a standard deviation of 4."""
    fraction = ((norms <= clip_norm).double() - 0.5).sum() + 4.0 * noise
    fraction = fraction / expected_batch_size + 0.5
    return min(max(clip_norm * math.exp(-0.2 * (fraction - 0.5)), 1e-6), 1e6)


def rows_of(training, x, y):
    examples = list(zip(x.split(1), y.split(1), strict=True))
    return one_backward_per_example(copy.deepcopy(training.model), x, cross_entropy_of_pair, examples)


@pytest.mark.parametrize(
    ("rule", "microbatch_size"), [*((rule, None) for rule in RULES), *((rule, 3) for rule in BY_EXAMPLE)]
)
def test_step_of_any_rule_releases_the_explicit_sum_plus_noise(rule, microbatch_size):
    clipping, explicit, _ = RULES[rule]
    training = training_of(clipping=clipping, microbatch_size=microbatch_size)
    rows, clip_norm, stddev = [], 0.5, noise_stddev(rule)
    for x, y in own_batches(training, cross_entropy):
        step, before = training.step_count, parameters_of(training).clone()
        rows.append(rows_of(training, x, y))
        if not training.step(cross_entropy(training.model, x, y)):
            continue
        noise, everyone = noise_of(training, step), torch.cat(rows)
        groups = torch.from_numpy(training._sampler.groups(step, len(everyone), 2))
        rows = []
        if rule == "adaptive":
            explicit = clipped_in_parts([26], [clip_norm])
            stddev = noise_stddev(rule) * clip_norm / 0.5
            clip_norm = next_clip_norm(clip_norm, everyone.norm(dim=1), noise[-1], 8)
            assert training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6)
        divisor = 2 if rule == "micro-batches" else 8
        expected = before - (explicit(everyone, groups) + stddev * noise[:26]) / divisor
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    assert training.step_count == 6
    assert rule != "adaptive" or abs(clip_norm - 0.5) > 0.01


@by_each_rule
def test_step_of_any_rule_without_examples_is_noise_in_proportion_to_the_sensitivity(rule):
    """The clip norm of an adaptive rule goes on by the noise of its count alone."""
    training = training_of(clipping=RULES[rule][0], expected_batch_size=0.5, num_steps=3)
    training._indices = lambda step: torch.zeros(0, dtype=torch.int64).numpy()
    assert train(training) == []
    expected, stddev, clip_norm = network_parameters(), noise_stddev(rule), 0.5
    for step in range(3):
        noise = noise_of(training, step)
        expected -= stddev * noise[:26] / (1 if rule == "micro-batches" else 0.5)
        if rule == "adaptive":
            clip_norm = next_clip_norm(clip_norm, torch.zeros(0), noise[-1], 0.5)
            stddev = noise_stddev(rule) * clip_norm / 0.5
    torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6 * expected.abs().max())
    assert rule != "adaptive" or training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6) != 0.5


@by_each_rule
def test_steps_of_any_rule_are_priced_as_the_noise_multiplier_given(rule):
    training = training_of(clipping=RULES[rule][0], delta=1e-3)
    train(training)
    assert training.spent().epsilon == tp.privacy.compose([(tp.privacy.SubsampledGaussian(1.0, 0.2), 6)]).epsilon(1e-3)


@pytest.mark.parametrize("left_out", [0, 7, 39])
@by_each_rule
def test_one_example_moves_the_sum_of_any_rule_by_at_most_the_sensitivity(rule, left_out, monkeypatch):
    """Everyone joins; the others keep their micro-batches, and the noise, the same in both, is taken off again."""
    clipping, _, sensitivity = RULES[rule]
    everyone, sums = data(), []
    numbers = torch.arange(N).numpy() % 10
    groups = {N: numbers, N - 1: numbers[torch.arange(N).numpy() != left_out]}
    monkeypatch.setattr(Poisson, "groups", lambda self, step, size, count: groups.get(size, numbers[:size]))
    for dataset in (everyone, Subset(everyone, [i for i in range(N) if i != left_out])):
        training = training_of(dataset=dataset, expected_batch_size=len(dataset), num_steps=1, clipping=clipping)
        train(training)
        divisor = 10 if rule == "micro-batches" else len(dataset)
        moved = (network_parameters() - parameters_of(training)) * divisor
        sums.append(moved - noise_stddev(rule) * noise_of(training, 0)[:26])
    moved = (sums[0] - sums[1]).norm()
    assert 0.1 * sensitivity < moved <= sensitivity * (1 + 1e-5)


def test_an_example_that_outweighs_its_micro_batch_moves_the_sum_by_twice_the_clip_norm():
    """The sensitivity is no smaller than that: noise in proportion to the clip norm would be too little."""
    everyone, sums = TensorDataset(torch.tensor([[1.0], [2.0], [-1e9]])), []
    for dataset in (everyone, Subset(everyone, [0, 1])):
        model = nn.Linear(1, 1, bias=False)
        start = model.weight.item()
        training = training_of(
            model, dataset, expected_batch_size=len(dataset), num_steps=1, clipping=tp.MicroBatches(0.7, 3)
        )
        for (x,) in training:
            training.step(model(x).squeeze(1))
        sums.append(start - model.weight.item() - 1.4 * noise_of(training, 0).item())
    assert abs(sums[0] - sums[1]) == pytest.approx(1.4, rel=1e-5)


def test_micro_batches_are_drawn_anew_for_every_step_by_the_key_alone():
    here, there = training_of(), training_of()
    torch.manual_seed(7)
    draws = [here._sampler.groups(step, 1000, 5) for step in range(3)]
    assert all((draw == there._sampler.groups(step, 1000, 5)).all() for step, draw in enumerate(draws))
    assert all(stats.chisquare(torch.from_numpy(draw).bincount(minlength=5)).pvalue > 1e-4 for draw in draws)
    assert all((draws[i] != draws[j]).mean() > 0.7 for i in range(3) for j in range(i))  # 0.8 where independent


class Poisoned(TensorDataset):
    """One example that is not finite."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x * math.inf if i == 7 else x), y


@by_each_rule
def test_an_example_that_is_not_finite_is_left_out_and_counted_under_any_rule(rule):
    clipping, explicit, _ = RULES[rule]
    training = training_of(dataset=Poisoned(*data().tensors), expected_batch_size=N, num_steps=1, clipping=clipping)
    for x, y in own_batches(training, cross_entropy):
        rows = rows_of(training, x, y)
        assert rows[7].isnan().any()
        groups = torch.from_numpy(training._sampler.groups(0, N, 10))
        kept = groups != groups[7] if rule == "micro-batches" else torch.arange(N) != 7
        training.step(cross_entropy(training.model, x, y))
    assert training.num_non_finite == (~kept).sum()  # examples, not micro-batches
    sum_and_noise = explicit(rows[kept], groups[kept]) + noise_stddev(rule) * noise_of(training, 0)[:26]
    expected = network_parameters() - sum_and_noise / (10 if rule == "micro-batches" else N)
    torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    if rule == "adaptive":  # it counts as not within
        clip_norm = next_clip_norm(0.5, rows.norm(dim=1), noise_of(training, 0)[-1], N)
        assert training.clipping.clip_norm == pytest.approx(clip_norm, rel=1e-6)


def test_part_of_a_gradient_that_is_not_finite_is_left_out_of_its_group():
    """In the second layer alone: the part in the first layer is bounded by itself, and stays."""
    model = Calls(lambda m, x: m.f(x[:, :3]) + m.g(x[:, 3:]), f=nn.Linear(3, 2), g=nn.Linear(1, 2))
    x = torch.cat([data().tensors[0], torch.ones(N, 1)], 1)
    x[7, 3] = 1e200  # whose square is infinite
    training = training_of(
        model, TensorDataset(x, torch.zeros(N)), expected_batch_size=N, num_steps=1, clipping=tp.EachLayer(0.3)
    )
    start = parameters_of(training).clone()
    for x, _ in own_batches(training, lambda model, x, _: model(x).sum(1)):
        rows = one_backward_per_example(copy.deepcopy(model), x, lambda model, x: model(x).sum(1))
        training.step(model(x).sum(1))
    assert training.num_non_finite == 1
    second = rows[torch.arange(N) != 7][:, 8:]
    total = torch.cat([clipped(rows[:, :8], 0.3), clipped(second, 0.3)]) + 0.18**0.5 * noise_of(training, 0)
    torch.testing.assert_close(parameters_of(training), start - total / N, rtol=1e-6, atol=1e-6)


STATEMENTS = {  # what the privacy statement says of each rule
    "flat": {"rule": "Flat", "clip_norm": 0.5},
    "per layer": {"rule": "PerLayer", "clip_norm": 0.5, "clip_norms": {"0": 0.5 / 2**0.5, "2": 0.5 / 2**0.5}},
    "each layer": {"rule": "EachLayer", "clip_norm": 0.3, "clip_norms": {"0": 0.3, "2": 0.3}},
    "groups": {"rule": "Groups", "clip_norms": {"": 0.3, "2": 0.2, "2.weight": 0.6}},
    "automatic": {"rule": "Automatic", "clip_norm": 0.5, "gamma": 0.1},
    "adaptive": {"rule": "Adaptive", "target_quantile": 0.5, "learning_rate": 0.2, "count_noise_stddev": 4.0},
    "micro-batches": {"rule": "MicroBatches", "clip_norm": 0.5, "size": 4},
}


@by_each_rule
def test_statement_says_the_rule_its_settings_and_its_sensitivity(rule):
    training = training_of(clipping=RULES[rule][0])
    train(training)
    statement = json.loads(json.dumps(training.statement(), allow_nan=False))
    assert statement["clipping"].items() >= STATEMENTS[rule].items()
    scale = training.clipping.clip_norm / 0.5 if rule == "adaptive" else 1.0
    assert statement["sensitivity"] == pytest.approx(RULES[rule][2] * scale)


@by_each_rule
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_run_of_any_rule_is_the_uninterrupted_one_bit_for_bit(rule, stop):
    whole, first, second = (training_of(clipping=RULES[rule][0]) for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=stop)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert second.clipping == first.clipping
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.clipping == whole.clipping
    assert second.ledger.state_dict() == whole.ledger.state_dict()


@by_each_rule
def test_steps_that_the_ledger_has_beyond_the_state_are_the_same_release_under_any_rule(rule):
    training = training_of(clipping=RULES[rule][0])
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    last, clipping = parameters_of(training), training.clipping
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    train(training)
    assert torch.equal(parameters_of(training), last)
    assert training.clipping == clipping
    assert len(training.ledger) == 6


def test_resumed_run_is_bit_for_bit_also_where_the_input_is_transformed_first():
    """The first batches of either run are looked at more closely; that must not change what is kept, or how."""

    def made():
        torch.manual_seed(1)
        model = Calls(
            lambda m, x: m.g(torch.tanh(m.f(x.sin().exp().cos().exp().sin()))), f=nn.Linear(16, 16), g=nn.Linear(16, 2)
        )
        return training_of(model, dataset, expected_batch_size=20)

    dataset = TensorDataset(torch.randn(N, 9, 16), torch.zeros(N))
    whole, first = made(), made()
    train(whole, losses=lambda model, x, y: losses_of(model, x))
    train(first, losses=lambda model, x, y: losses_of(model, x), steps=4)
    second = made()
    second.load_state_dict(first.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    train(second, losses=lambda model, x, y: losses_of(model, x))
    assert torch.equal(parameters_of(second), parameters_of(whole))


def test_state_of_another_rule_is_refused():
    state = training_of(clipping=tp.PerLayer(0.5)).state_dict()
    with pytest.raises(tp.Refused, match=r"clipping=\"Groups\(clip_norms=\{'0': 0\.3, '2': 0\.3\}\)\" \(the state has"):
        training_of(clipping=tp.EachLayer(0.3)).load_state_dict(state)


def test_adaptive_clip_norm_finds_the_median_of_the_norms():
    """With hardly any noise, and a learning rate of zero so that the norms stay what they are."""
    model = network()
    rows = one_backward_per_example(
        model, data()[:][0], cross_entropy_of_pair, [(x[None], y[None]) for x, y in data()]
    ).norm(dim=1)
    training = training_of(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        expected_batch_size=N,
        num_steps=60,
        clipping=tp.Adaptive(0.01, learning_rate=0.3, count_noise_stddev=0.1),
        noise_multiplier=0.1,
    )
    train(training)
    low, high = rows.quantile(torch.tensor([0.4, 0.6]))
    assert low < training.clipping.clip_norm < high


def test_forward_may_leave_torch():
    """Inputs require no gradient, so that ``x.numpy()`` works as it does elsewhere."""
    training = training_of(Calls(lambda m, x: m.f(torch.from_numpy(x.numpy().cumsum(1)) + x), f=nn.Linear(3, 2)))
    train(training)
    assert training.step_count == 6


# Layouts and memory


MEASURED_EVERY_BATCH = ["irregular: packed", "irregular: two experts each", "irregular: sorted by expert"]


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
        training.step(losses_of(model, x))
        if isinstance(rule, tp.MicroBatches):
            groups = torch.from_numpy(training._sampler.groups(step, len(x), 2))
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
        expected = before - (total + stddev * noise_of(training, step)) / divisor
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-6, atol=1e-6)
    assert training.step_count == 5


def trained_under(memory_budget, model, x):
    training = training_of(model, TensorDataset(x), memory_budget=memory_budget)
    for (x,) in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        training.step(losses_of(model, x))
    return parameters_of(training)


@pytest.mark.parametrize("case", ["convolutional network", "tied language model", "long short-term memory"])
def test_any_memory_budget_gives_the_same_training(case):
    results = []
    for memory_budget in (1e-9, 1.2, 100, 1000, 10**12):  # above 100 they are bytes
        torch.manual_seed(1)
        model, x = CASES[case]()
        x = torch.cat([x + k if x.is_floating_point() else (x + k) % 7 for k in range(8)])
        results.append(trained_under(memory_budget, model, x))
    assert all((result - results[0]).abs().max() < 1e-9 for result in results)


def test_memory_budget_decides_what_is_kept(monkeypatch):
    """Rows kept and rows made anew differ by rounding, and by no more; with noise they lie on one grid."""
    x = torch.randn(N, 9, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with_noise = [trained_under(budget, copy.deepcopy(model), x) for budget in (1e-9, 100)]
    torch.testing.assert_close(*with_noise, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(tp.noise.Noise, "add_to", lambda *arguments: None)
    least, few_bytes, most = (trained_under(budget, copy.deepcopy(model), x) for budget in (1e-9, 101, 100))
    assert torch.equal(least, few_bytes)
    assert not torch.equal(least, most)
    torch.testing.assert_close(least, most, rtol=1e-9, atol=1e-9)


def checkpointed(m, x):
    def part(x):
        m.computed += 1
        return torch.tanh(m.g(torch.tanh(m.f(x))))

    return m.h(checkpoint(part, x, use_reentrant=False))


def training_with_checkpoints(forward):
    torch.manual_seed(1)
    model = Calls(forward, f=nn.Linear(3, 5), g=nn.Linear(5, 4), h=nn.Linear(4, 2))
    model.computed = 0
    return training_of(model, clipping=tp.PerLayer(0.5))


def test_training_with_activation_checkpointing_is_training_without():
    trainings = [
        training_with_checkpoints(forward)
        for forward in (checkpointed, lambda m, x: m.h(torch.tanh(m.g(torch.tanh(m.f(x))))))
    ]
    for training in trainings:
        train(training)
    torch.testing.assert_close(*map(parameters_of, trainings), rtol=1e-9, atol=1e-9)


def test_checkpointed_part_is_computed_again_once_a_backward():
    training = training_with_checkpoints(checkpointed)
    counts = []
    for x, y in own_batches(training, cross_entropy):
        before = training.model.computed
        training.step(cross_entropy(training.model, x, y))
        counts.append(training.model.computed - before)
    assert min(counts) == 2  # in the forward, and in the one backward, once layouts are known and not measured again


# Microbatches, noise, empty batches


def test_microbatches_give_the_same_noise_and_the_same_sum():
    whole, split = training_of(), training_of(microbatch_size=3)
    train(whole)
    sizes = [len(part) for part in train(split)]
    assert max(sizes) == 3
    assert split.step_count == whole.step_count == 6
    torch.testing.assert_close(parameters_of(split), parameters_of(whole), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(noise_of(whole, step), noise_of(split, step)) for step in range(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("microbatch_size", [None, 3, 1])
def test_released_noise_is_normal_for_any_dtype_and_split(dtype, microbatch_size):
    """Losses without a gradient: what moves a million weights from zero is the noise alone."""
    model = nn.Linear(1000, 1000, bias=False).to(dtype)
    nn.init.zeros_(model.weight)
    dataset = TensorDataset(torch.randn(N, 1000, dtype=dtype), torch.zeros(N))
    training = training_of(model, dataset, num_steps=1, microbatch_size=microbatch_size)
    train(training, losses=lambda model, x, y: 0 * model(x).sum(1))
    z = model.weight.detach().double().flatten().numpy() * -8 / 0.5  # learning rate 1, clip norm 0.5, batch 8
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    assert abs(z.std() - 1) < 4 / (2 * len(z)) ** 0.5
    if dtype != torch.bfloat16:  # whose 8 bits are coarse enough for the test to see
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
    torch.testing.assert_close(parameters_of(training), start - moved * 0.5 / 1e-9)


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
    """Whatever .grad held, from the user's own backward, has no part in the step."""
    clean, dirty = training_of(), training_of()
    for x, y in own_batches(dirty, cross_entropy):
        losses = F.cross_entropy(dirty.model(x), y, reduction="none")
        for p in dirty.model.parameters():
            p.grad = torch.full_like(p, 1e6)
        dirty.step(losses)
    train(clean)
    assert torch.equal(parameters_of(clean), parameters_of(dirty))
    assert all(p.grad is None for p in dirty.model.parameters())


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resumed_run_is_the_uninterrupted_one(stop):
    whole = training_of()
    batches = train(whole)
    first = training_of()
    seen = train(first, steps=stop)
    state = pickle.loads(pickle.dumps((first.state_dict(), first.model.state_dict(), first.optimizer.state_dict())))
    second = tp.PrivateTraining(
        *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=1.0)))(network()),
        data(),
        expected_batch_size=8,
        num_steps=6,
        clipping=tp.Flat(0.5),
        noise_multiplier=1.0,
    )
    second.load_state_dict(state[0])
    second.model.load_state_dict(state[1])
    second.optimizer.load_state_dict(state[2])
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


def with_dropout():
    torch.manual_seed(1)
    return training_of(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 2)))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resumed_run_with_dropout_is_the_uninterrupted_one_bit_for_bit(stop):
    """Without the user's random state: dropout masks are a function of the secret key and the step."""
    whole, first, second = with_dropout(), with_dropout(), with_dropout()
    batches, seen = train(whole), train(first, steps=stop)
    torch.manual_seed(99)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


def test_steps_that_the_ledger_has_beyond_the_state_are_the_same_release_with_dropout():
    training = with_dropout()
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    last = parameters_of(training)
    training.load_state_dict({**state, "ledger": training.state_dict()["ledger"]})
    training.model.load_state_dict(weights)
    torch.manual_seed(99)
    train(training)
    assert torch.equal(parameters_of(training), last)
    assert len(training.ledger) == 6


def test_breaking_off_within_a_step_begins_it_anew():
    training = training_of(microbatch_size=3)
    for x, y in own_batches(training, cross_entropy):
        training.step(cross_entropy(training.model, x, y))
        break
    assert training.step_count == 0
    train(training)
    whole = training_of(microbatch_size=3)
    train(whole)
    assert torch.equal(parameters_of(training), parameters_of(whole))


def test_going_back_to_a_state_and_training_otherwise_is_refused():
    """Rolling back with another learning rate would release other gradients with the noise already used."""
    training = training_of()
    train(training, steps=2)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training)
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    train(training, steps=4)  # the same again: a replay
    training.load_state_dict(state)
    training.model.load_state_dict(weights)
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(tp.Refused, match=r"step 3 was .* Two different releases would share one step's noise"):
        train(training)
    assert len(training.ledger) == 6


def test_interrupted_update_spends_its_noise():
    training = training_of()
    broken = [True]

    def interrupt(*_):
        if broken.pop():
            raise KeyboardInterrupt

    training.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(training)
    assert training.step_count == len(training.ledger) == 1
    broken[:] = [False] * 9
    train(training)
    assert training.step_count == len(training.ledger) == 6


def test_state_of_other_settings_is_refused():
    state = training_of().state_dict()
    with pytest.raises(tp.Refused, match=r"noise_multiplier=0\.9 \(the state has 1\.0\)"):
        training_of(noise_multiplier=0.9).load_state_dict(state)
    with pytest.raises(tp.Refused, match=r"memory_budget=2\.0 \(the state has 1\.2\)"):
        training_of(memory_budget=2.0).load_state_dict(state)


def test_state_that_is_too_old_to_say_its_memory_budget_is_taken_up():
    state = training_of().state_dict()
    del state["settings"]["memory_budget"]
    training_of(memory_budget=2.0).load_state_dict(state)


def test_run_folder_of_another_run_is_refused(tmp_path):
    train(training_of(run_folder=tmp_path), steps=2)
    model = network()
    again = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data(),
        expected_batch_size=8,
        num_steps=6,
        clipping=tp.Flat(0.5),
        noise_multiplier=1.0,
        run_folder=tmp_path,
    )
    with pytest.raises(tp.Refused, match=r"step 0 was SubsampledGaussian"):
        train(again)
    assert torch.equal(parameters_of(again), network_parameters())


KILLED = """
import os, sys, torch
sys.path[:0] = {paths!r}
from pathlib import Path
from test_training import parameters_of, train, training_of
torch.set_default_dtype(torch.float64)
folder, kill_at, resume = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
training = training_of(run_folder=folder, num_steps=12)
if resume:
    state = torch.load(folder / "state.pt")
    training.load_state_dict(state["training"]); training.model.load_state_dict(state["model"])
for x, y in training:
    if not training.step(torch.nn.functional.cross_entropy(training.model(x), y, reduction="none")): continue
    with open(folder / "batches", "a") as file: print(training.step_count, sorted(x[:, 0].tolist()), file=file)
    if training.step_count == 4 and not resume:
        training.ledger.sync()
        torch.save(dict(training=training.state_dict(), model=training.model.state_dict()), folder / "state.pt")
    if training.step_count == kill_at and not resume: os.kill(os.getpid(), 9)
torch.save(parameters_of(training), folder / "final.pt")
"""


@pytest.mark.slow
def test_run_killed_at_a_random_step_resumes_with_the_same_ledger_and_batches(tmp_path):
    kill_at = int(torch.randint(5, 12, (), generator=torch.Generator().manual_seed(torch.Generator().seed())))
    folders = [tmp_path / "whole", tmp_path / "killed"]
    code = KILLED.format(paths=[str(Path(__file__).parents[1]), str(Path(__file__).parent)])

    def run(folder, *arguments):
        folder.mkdir(exist_ok=True)
        return subprocess.run([sys.executable, "-c", code, str(folder), *arguments], check=False).returncode

    assert run(folders[0], "0") == 0
    assert run(folders[1], str(kill_at)) == -signal.SIGKILL
    assert (folders[1] / "ledger.jsonl").read_text().count('"step"') == kill_at
    assert run(folders[1], "0", "resume") == 0
    whole, killed = folders
    assert (whole / "ledger.jsonl").read_text() == (killed / "ledger.jsonl").read_text()
    later = {line for line in (killed / "batches").read_text().splitlines()}
    assert later == set((whole / "batches").read_text().splitlines())
    assert torch.equal(torch.load(whole / "final.pt"), torch.load(killed / "final.pt"))


def test_statement_and_spent_say_what_was_released():
    training = training_of(delta=1e-3)
    train(training)
    statement = training.statement()
    assert statement["releases"] == [{"event": tp.privacy.event_to_dict(training.event), "count": 6}]
    assert statement["private"] is False
    assert statement["neighboring_relation"] == "add_or_remove_one"
    spent = training.spent()
    assert spent.epsilon == tp.privacy.compose([(training.event, 6)]).epsilon(1e-3)
    assert str(spent).startswith("NOT PRIVATE")
    assert not any(secret in str(statement) for secret in (training._noise.key.hex(), training._sampler.key.hex()))


def test_private_run_says_so():
    model = network()
    training = tp.PrivateTraining(
        model,
        torch.optim.Adam(model.parameters()),
        data(),
        expected_batch_size=8,
        num_steps=3,
        clipping=tp.Flat(1.0),
        target_epsilon=2.0,
        delta=1e-3,
    )
    train(training)
    assert training.statement()["private"] is True
    assert 1.99 < training.spent().epsilon.high <= 2.0
    assert "add/remove" in str(training.spent())
    assert "Poisson" in str(training.spent())


def test_two_runs_without_a_seed_differ_even_if_the_user_seeds_torch():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = network()
        training = tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=1.0), data(), expected_batch_size=8, num_steps=1,
            clipping=tp.Flat(1.0), noise_multiplier=1.0,
        )  # fmt: skip
        train(training)
        results.append(parameters_of(training))
    assert not torch.equal(*results)


def test_evaluation_between_and_within_steps_runs_untouched():
    training, plain = training_of(), training_of()
    for x, y in own_batches(training, cross_entropy):
        with torch.no_grad():
            training.model.eval()(x)
        training.model.train()
        losses = cross_entropy(training.model, x, y)
        training.step(losses)
        training.model(x).sum().backward()  # a gradient of the user's own, between steps
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
        jacobian = training._pending.tape.jacobian(losses, retain_graph=True)
        torch.testing.assert_close(jacobian.squared_norms(), expected.square().sum(1))
        training.step(losses)


def test_parameters_used_outside_of_the_forward_need_record():
    training = training_of()
    batches = iter(training)
    x, y = next(batches)
    with pytest.raises(tp.Refused, match=r"'2.weight' reaches the losses by a path .*training.record\(\)"):
        training.step(F.cross_entropy(training.model[2](training.model[1](training.model[0](x))), y, reduction="none"))
    assert training.step_count == len(training.ledger) == 0
    for x, y in training:
        with training.record():
            losses = F.cross_entropy(training.model[2](training.model[1](training.model[0](x))), y, reduction="none")
        training.step(losses)
    assert training.step_count == 6


def training_with_scheduler(**settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    settings = {key: scheduler for key in settings}
    return training_of(model, optimizer=optimizer, **settings), scheduler


def test_user_s_scheduler_and_ours():
    for own in ({"scheduler": True}, {}):
        training, scheduler = training_with_scheduler(**own)
        for x, y in training:
            if training.step(cross_entropy(training.model, x, y)) and not own:
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


class Dictionaries(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = data()[i]
        return {"x": x, "target": (y, i)}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_any_collatable_structure_and_workers(num_workers):
    training = training_of(dataset=Dictionaries(), num_workers=num_workers, microbatch_size=5)
    for batch in training:
        assert len(batch["x"]) <= 5
        training.step(F.cross_entropy(training.model(batch["x"]), batch["target"][0], reduction="none"))
    plain = training_of(microbatch_size=5)
    train(plain)
    assert torch.equal(parameters_of(training), parameters_of(plain))


def test_collate_fn_is_used():
    training = training_of(collate_fn=lambda items: default_collate([(x * 0, y) for x, y in items]))
    assert all(step == [0.0] * len(step) for step in train(training))


@pytest.mark.parametrize(
    "dataset",
    [
        data(),
        Subset(data(), [5, 3, 9, 9, 0]),
        Subset(Subset(data(), [5, 3, 9]), [2, 0]),
        Dictionaries(),
        [1.0, 2.0, 3.0],
    ],
    ids=["tensors", "subset", "subset of a subset", "dictionaries", "list"],
)
def test_batches_are_those_of_a_data_loader(dataset):
    import numpy as np

    numbers = [np.array([1, 0]), np.array([1])]
    ours = list(Batches(dataset, None, 0).plain(numbers))
    theirs = list(DataLoader(dataset, batch_sampler=[n.tolist() for n in numbers]))
    torch.testing.assert_close(ours, theirs)


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
        (lambda: {"dataset": DataLoader(data(), shuffle=True)}, r"DataLoader: its shuffled batches.*loader\.dataset"),
        (lambda: {"dataset": Stream()}, r"type Stream cannot be sampled"),
        (lambda: {"dataset": TensorDataset(torch.zeros(0, 3))}, r"dataset is empty"),
        (lambda: {"model": batch_norm_network()}, r"module '1' \(use nn\.GroupNorm\(2, 6\)\)"),
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
        (lambda: {"microbatch_size": 0}, r"microbatch_size=0 must be"),
        (lambda: {"memory_budget": 0}, r"memory_budget=0 must be greater than 0"),
        (lambda: {"memory_budget": -1.2}, r"memory_budget=-1\.2 must be greater than 0"),
        (
            lambda: {"clipping": tp.MicroBatches(1.0, 2), "microbatch_size": 3},
            r"microbatch_size=3 would cut through the groups of MicroBatches\(clip_norm=1\.0, size=2\)",
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
        (lambda model, x, y: F.cross_entropy(model(x[1:]), y[1:], reduction="none"), r"for a batch of \d+ examples"),
        (lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") * model(x).mean(), r"cannot be told apart"),
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


def test_layout_that_the_data_decide_is_measured_on_every_batch():
    """In order for the first batches, sorted by their data later: what the first ones taught must not be trusted."""

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
        jacobian = training._pending.tape.jacobian(losses, retain_graph=True)
        torch.testing.assert_close(jacobian.squared_norms(), rows_of_one_graph(losses, model).square().sum(1))
        training.step(losses)
    assert training.step_count == 6


BRANCHES = {  # what a model may do otherwise from the third batch on: (before, then)
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


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_new_path_is_measured_anew(branch):
    """Layouts that two batches have told are those of their path: another one gives rows that are just as exact."""
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(N, 4, 3, generator=generator), torch.zeros(N))
    model = Calls(lambda m, x: BRANCHES[branch][training.step_count >= 3](m, x), f=nn.Linear(3, 2))
    training = training_of(model, dataset)
    for x, _ in own_batches(training, lambda model, x, *_: losses_of(model, x)):
        losses = losses_of(model, x)
        jacobian = training._pending.tape.jacobian(losses, retain_graph=True)
        torch.testing.assert_close(jacobian.squared_norms(), rows_of_one_graph(losses, model).square().sum(1))
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

    with pytest.raises(tp.Refused, match=r"cannot be told apart"):
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

    with pytest.raises(tp.Refused, match=r"cannot be told apart"):
        train(training, losses=losses)
    assert training.step_count == 4


def test_irregular_order_that_begins_later_in_bfloat16_is_exact_or_refused():
    def forward(m, x):
        inside = torch.arange(4 * len(x)).view(-1, 4)
        order = inside.T.flatten().roll(3) if training.step_count >= 4 else inside.flatten()
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
            norms = training._pending.tape.jacobian(losses, retain_graph=True).squared_norms().sqrt()
            torch.testing.assert_close(norms, expected, rtol=0.02, atol=0)
            training.step(losses)
        except tp.Refused:
            break
    assert training.step_count >= 4


def test_one_gradient_for_several_parameters_is_divided_once():
    model = Calls(lambda m, x: F.linear(x, m.a + m.b), a=torch.zeros(1, 3), b=torch.zeros(1, 3))
    trainings = [training_of(copy.deepcopy(model), microbatch_size=size, num_steps=1) for size in (None, 3)]
    for training in trainings:
        train(training, losses=lambda model, x, y: model(x).sum(1))
    torch.testing.assert_close(parameters_of(trainings[0]), parameters_of(trainings[1]))
    x, _ = next(own_batches(training_of(num_steps=1), cross_entropy))
    clipped = (x * (0.5 / (2 * x.square().sum(1)).sqrt()).clamp(max=1)[:, None]).sum(0)
    expected = -(torch.cat([clipped, clipped]) + 0.5 * noise_of(trainings[0], 0)) / 8
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


def test_an_older_iterator_is_refused():
    training = training_of(microbatch_size=4)
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
    interrupted = [True]

    def interrupt(*_):
        if interrupted and interrupted.pop():
            raise KeyboardInterrupt

    model[2].register_forward_pre_hook(interrupt)
    training = training_of(model)
    with pytest.raises(KeyboardInterrupt):
        train(training)
    train(training)
    assert torch.overrides._len_torch_function_stack() == 0
    assert training.step_count == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_any_precision_train(dtype):
    model = network().to(dtype)
    dataset = TensorDataset(data().tensors[0].to(dtype), data().tensors[1])
    training = training_of(model, dataset, expected_batch_size=2, num_steps=12)  # some of its batches are empty
    train(training)
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())


def test_input_normalised_over_the_batch_is_refused():
    model = Calls(lambda m, x: m.f((x - x.mean(0)) / x.std(0)), f=nn.Linear(3, 2))
    with pytest.raises(tp.Refused, match=r"examples of a batch depend on each other: the loss of example \d+ of"):
        train(training_of(model))


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


def test_parameter_that_a_later_batch_misses_has_zero_rows():
    """A branch taken for some batches only: fine once it has been seen, refused if it never was."""
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


def test_training_stops_by_itself_before_a_budget_is_exceeded():
    budget = tp.privacy.Budget(epsilon=3.0, delta=1e-3)
    training = training_of(num_steps=10_000, noise_multiplier=2.0, budget=budget)
    train(training)
    (event, made), *others = training.ledger.events
    assert not others
    assert 0 < made == training.step_count < 10_000
    assert training.spent(1e-3).epsilon.high <= 3.0 < tp.privacy.compose([(event, made + 1)]).epsilon(1e-3).high
    assert list(training) == []
    assert training.statement()["budget"] == {"epsilon": 3.0, "delta": 1e-3}


def test_budget_that_allows_no_step_is_refused():
    with pytest.raises(tp.Refused, match="does not allow one step"):
        training_of(noise_multiplier=0.3, budget=tp.privacy.Budget(epsilon=0.1, delta=1e-6))


def secret_training(model=None, **settings):
    """With keys from the operating system, as a user has it."""
    model = model or network()
    settings = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0} | settings
    return tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), data(), **settings)


def opposite(model, x, y):
    return -cross_entropy(model, x, y)


def test_one_noise_for_two_releases_of_one_process_is_refused():
    """A state that is loaded twice may be trained again in the same way, and in no other."""
    training = secret_training()
    train(training, steps=2)
    state, weights = copy.deepcopy(training.state_dict()), copy.deepcopy(training.model.state_dict())
    train(training, steps=4)
    again, other = secret_training(), secret_training()
    for copied in (again, other):
        copied.load_state_dict(copy.deepcopy(state))
        copied.model.load_state_dict(weights)
    train(again, steps=4)
    assert torch.equal(parameters_of(again), parameters_of(training))
    before = parameters_of(other).clone()
    with pytest.raises(tp.Refused, match="step 2 was released before with the same noise and other sums"):
        train(other, losses=opposite)
    assert torch.equal(parameters_of(other), before)
    assert len(other.ledger) == 2


def test_a_training_goes_on_in_its_own_process_only():
    training = secret_training()
    training._process += 1  # as it is behind a fork
    with pytest.raises(tp.Refused, match="was forked from the one that began the training"):
        train(training)
    assert len(training.ledger) == 0
    training.load_state_dict(training.state_dict())
    train(training)


def test_layers_may_be_frozen_and_unfrozen_on_the_way():
    """Layouts are learnt for what is trained: the second layer's positions come first, those of the others do not."""

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
    training._noise.add_to = lambda *_: None
    for x, y in own_batches(training, cross_entropy):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts = [
            torch.autograd.grad(cross_entropy(model, x[i : i + 1], y[i : i + 1]).sum(), list(wanted.values()))
            for i in range(6)
        ]
        rows = torch.stack([torch.cat([g.flatten() for g in part]) for part in parts])
        if not training.step(cross_entropy(model, x, y)):
            continue  # rehearsed at once, since other layers meet the data now; the batch comes again
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
