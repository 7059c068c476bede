# SPDX-License-Identifier: Apache-2.0
"""Trainings with banded noise: what is released, resumed and paid, on one rank and on two, and what is refused."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from ranked import VIEWS, assert_same_bits, case, mlp, weights_after, wide
from scipy.linalg import toeplitz
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainings import (
    RULES,
    ZERO_OUT,
    N,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    network,
    parameters_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.training import release

BANDED = {"correlation": tp.Banded(3), "expected_batch_size": 8, "num_steps": 11}
DELTA = 1e-4
PARAMETERS = 26


def priced(*releases):
    return privacy.compose(releases).epsilon(DELTA)


class Kept(torch.optim.SGD):
    """Keeps the gradients that it was given."""

    def step(self, closure=None):
        given = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.__dict__.setdefault("kept", []).append(torch.cat(given))
        super().step()


def test_coefficients_times_what_is_released_is_independent_noise():
    """Where the losses have no gradient, a step releases sensitivity times noise multiplier times x."""
    model = network()
    kept = Kept(model.parameters(), lr=0.1)
    training = training_of(model=model, optimizer=kept, **BANDED)
    train(training, losses=lambda model, x, y: 0.0 * cross_entropy(model, x, y))
    x = torch.stack(kept.kept).numpy() * 8 / 0.5
    c = privacy.best_coefficients(3, privacy.Workload(11))
    z, noise = [], Noise(bytes.fromhex(training.state_dict()["noise_key"]))
    for step in range(11):
        sums = {"": torch.zeros(PARAMETERS)}
        noise.fill(step, sums)
        z.append(sums[""].numpy())
    found = toeplitz(np.append(c, np.zeros(8)), np.zeros(11)) @ x
    assert np.allclose(found, np.stack(z) * (1 + 2.1e-5), atol=1e-7)


def test_one_band_is_an_ordinary_training_bit_for_bit():
    one, ordinary = training_of(correlation=tp.Banded(1)), training_of()
    assert train(one) == train(ordinary)
    assert torch.equal(parameters_of(one), parameters_of(ordinary))
    assert one.spent(DELTA).epsilon == ordinary.spent(DELTA).epsilon


def test_an_example_is_in_steps_that_are_a_multiple_of_the_bands_apart():
    seen = train(training_of(**BANDED | {"num_steps": 60, "expected_batch_size": 13}))
    steps = {x: [step for step, batch in enumerate(seen) if x in batch] for x in data().tensors[0][:, 0].tolist()}
    assert all({step % 3 for step in of_one} in ({0}, {1}, {2}) for of_one in steps.values())


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("rule", ["flat", "each layer", "micro-batches"])
@pytest.mark.parametrize("stop", [1, 2, 7])
def test_a_resumed_run_has_the_same_bits(rule, stop):
    whole, first, second = (training_of(clipping=RULES[rule][0], **BANDED) for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=stop)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


OF_BANDED = case(**BANDED)


def on_rank(rank: int | None, how: str | None) -> dict[str, torch.Tensor]:
    return weights_after(OF_BANDED, how)


@pytest.mark.thorough(but=1)
@VIEWS
@pytest.mark.parametrize("how", ["ddp", "layers"])
def test_two_ranks_train_as_one_process_bit_for_bit(ranks2, how):
    assert_same_bits(ranks2, on_rank, how)


@pytest.mark.thorough
@VIEWS
def test_four_ranks_train_as_one_process_bit_for_bit(ranks4):
    assert_same_bits(ranks4, on_rank, "layers")


NOTHING_IN_FLOAT32 = case(
    partial(mlp, dtype=torch.float32),
    data=lambda: wide(3, torch.float32),
    losses=lambda model, batch: 0.0 * cross_entropy_of_pair(model, batch),
    **BANDED,
)


def without_gradients(rank: int | None, how: str | None) -> dict[str, torch.Tensor]:
    return weights_after(NOTHING_IN_FLOAT32, how)


@pytest.mark.thorough
@VIEWS
def test_in_float32_the_noise_of_two_ranks_is_that_of_one_process_bit_for_bit(ranks2):
    """Only sums over other parts are rounded otherwise, as in any training."""
    assert_same_bits(ranks2, without_gradients, "layers")


AVERAGES = {
    "MovingAverage": (
        lambda model, optimizer: tp.MovingAverage(model, optimizer, 0.9).model,
        lambda t: min(0.9, (1 + t) / (10 + t)),
    ),
    "mean of all": (AveragedModel, lambda t: t / (t + 1)),
    "exponential": (partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.8)), lambda t: 0.8 if t else 0.0),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_the_workload_is_what_optimizer_and_average_make_of_gradients(name):
    """One number, which gets the gradient -1 in one step; the share of the first weight, 0, is none."""
    make, average = AVERAGES[name]
    rates = [1.0, 0.5, 2.0, 1.0, 0.25]
    found = np.zeros((5, 5))
    for step in range(5):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        averaged = make(model, optimizer) if name == "MovingAverage" else make(model)
        for t, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            model.weight.grad = torch.full((1, 1), -1.0 if t == step else 0.0)
            optimizer.step()
            if name != "MovingAverage":
                averaged.update_parameters(model)
            found[t, step] = next(averaged.parameters()).item()
    workload = tp.Banded(2, momentum=0.9, learning_rates=rates, average=average).workload(5)
    assert np.allclose(found, workload.matrix() * np.sqrt(np.mean(np.square(rates))), atol=1e-12)


# What it costs


def test_steps_cost_the_groups_that_were_begun():
    training, event = training_of(**BANDED), privacy.BandedGaussian(1.0, 0.2, 3, 0, ZERO_OUT)
    for steps, groups in ((1, 1), (3, 1), (4, 2), (11, 4)):
        train(training, steps=steps)
        assert training.spent(DELTA).epsilon == priced((privacy.SubsampledGaussian(1.0, 0.6), groups))
    assert training.ledger.events == [(event, 11)]
    statement = training.statement()
    assert statement["sampler"] == "cyclic Poisson"
    assert statement["correlation"] == {
        "bands": 3,
        "order": "cyclic",
        "coefficients": list(privacy.best_coefficients(3, privacy.Workload(11))),
    }


@pytest.mark.filterwarnings("ignore:.*no ledger on disk")
def test_under_new_keys_noise_classes_and_groups_begin_anew(monkeypatch):
    def made():
        model = torch.nn.Linear(3, 2)
        optimizer = Kept(model.parameters(), lr=0.0)
        return tp.PrivateTraining(
            model, optimizer, data(), clipping=tp.Flat(0.5), delta=DELTA, noise_multiplier=1.0, **BANDED
        )

    training = made()
    train(training, steps=4)
    state = training.state_dict()
    train(training, steps=9)
    state["ledger"] = training.ledger.state_dict()
    monkeypatch.setattr(release, "_RELEASED", {})
    again = made()  # with other weights
    again.load_state_dict(copy.deepcopy(state))
    with pytest.warns(UserWarning, match="did not repeat bit for bit"):
        train(again, losses=lambda model, x, y: 0.0 * cross_entropy(model, x, y))
    first, second = (privacy.BandedGaussian(1.0, 0.2, 3, run, ZERO_OUT) for run in (0, 9))
    assert again.ledger.events == [(first, 9), (second, 7)]
    assert again.spent().epsilon == priced((privacy.SubsampledGaussian(1.0, 0.6), 3 + 3))
    c = privacy.best_coefficients(3, privacy.Workload(11))
    x = torch.stack(again.optimizer.kept).numpy() * 8 / 0.5
    assert len(x) == 7
    z = {"": torch.zeros(8)}
    Noise(bytes.fromhex(again.state_dict()["noise_key"])).fill(4, z)
    assert np.allclose(c[0] * x[0], z[""].numpy() * (1 + 2.1e-5), atol=1e-7)


def test_runs_of_several_ledgers_are_paid_one_by_one():
    def made(*prior, **more):
        model, settings = network(), {"clipping": tp.Flat(0.5), "delta": DELTA, "noise_multiplier": 1.0} | BANDED
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return tp.PrivateTraining(model, optimizer, data(), **settings | {"prior_releases": prior} | more)

    first, second = made(), made()
    train(first, steps=4)
    train(second, steps=2)
    third = made(*first.ledger, *second.ledger)
    train(third, steps=2)
    last = made(*third.ledger)
    for training, groups in ((third, 2 + 1 + 1), (last, 2 + 1 + 1)):
        assert training.ledger.profile().epsilon(DELTA) == priced((privacy.SubsampledGaussian(1.0, 0.6), groups))
    whole = priced((privacy.SubsampledGaussian(1.0, 0.6), 2 + 1 + 4)).high
    scaled = made(*first.ledger, *second.ledger, noise_multiplier=None, target_epsilon=whole)
    assert scaled.settings.noise_multiplier == pytest.approx(1.0, rel=1e-4)


def test_a_budget_stops_before_the_group_that_would_exceed_it():
    budget = privacy.Budget(priced((privacy.SubsampledGaussian(1.0, 0.6), 2)).high + 1e-9, DELTA)
    training, again = (training_of(**BANDED, examples={"budget": budget}) for _ in range(2))
    train(training, steps=4)
    again.load_state_dict(copy.deepcopy(training.state_dict()))
    again.model.load_state_dict(training.model.state_dict())
    for one in (training, again):  # a group that was begun is not paid again
        train(one)
        assert one.step_count == 6


def test_the_best_number_of_bands_is_taken_and_shown(capsys):
    settings = {"noise_multiplier": None, "target_epsilon": 8.0, "delta": DELTA, "num_steps": 100}
    training = training_of(**BANDED | settings | {"correlation": tp.Banded("best")})
    assert training.settings.correlation == tp.Banded(4)
    table = tp.Banded("best").table(8.0, DELTA, sampling_probability=0.2, num_steps=100)
    assert capsys.readouterr().out == f"{table}\n4 bands are best.\n"
    assert training.settings.noise_multiplier == pytest.approx(dict((b, s) for b, s, _ in table.rows)[4], rel=2e-4)
    assert priced((training.event, 100)).high <= 8.0


def test_the_best_number_of_bands_counts_prior_releases():
    prior = privacy.Release(privacy.Gaussian(1.0), "before")
    settings = {"noise_multiplier": None, "target_epsilon": 8.0, "delta": DELTA, "num_steps": 100}
    settings |= {"correlation": tp.Banded("best"), "prior_releases": [prior]}
    training = training_of(**BANDED | settings)
    errors = {}
    for bands in (1, 2, 4):
        one = training_of(**BANDED | settings | {"correlation": tp.Banded(bands)}).settings
        errors[bands] = one.noise_multiplier * one.correlation.error(100, 0.2)
    assert training.settings.correlation.bands == min(errors, key=errors.get) == 2  # 4 without the prior release
    with pytest.raises(ValueError, match=r"target_epsilon=3\.0 is spent by prior releases"):
        training_of(**BANDED | settings | {"target_epsilon": 3.0})


def test_the_error_in_the_weights_is_explained():
    training = training_of(**BANDED)
    workload = privacy.Workload(11)
    share = privacy.mean_error(privacy.best_coefficients(3, workload), workload) / 6**0.5  # of 1, ..., 11 the mean is 6
    assert training.explain() == (
        "exact norms by the tape; noise of 3 bands, with "
        f"{share:.3f} times the error of independent noise in the weights"
    )


def test_in_fixed_order_batches_are_those_of_the_data_set_and_each_pass_is_one_gaussian():
    training = training_of(**BANDED | {"correlation": tp.Banded(3, order="fixed")})
    seen = train(training)
    first = data().tensors[0][:, 0].tolist()
    assert seen == [first[step % 5 :: 5] for step in range(11)]
    assert training.spent(DELTA).epsilon == priced((privacy.Gaussian(1.0), 3))
    assert "no sampling" in str(training.spent(DELTA))


def test_a_banded_inverse_sums_noise_at_the_price_of_its_passes():
    def nothing(model, x, y):
        return 0.0 * cross_entropy(model, x, y)

    settings = BANDED | {"correlation": tp.Banded(3, order="fixed", inverse=True)}
    trainings = []
    for _ in range(2):
        model = network()
        trainings.append(training_of(model=model, optimizer=Kept(model.parameters(), lr=0.1), **settings))
    training, again = trainings
    train(training, losses=nothing, steps=4)
    again.load_state_dict(copy.deepcopy(training.state_dict()))
    train(training, losses=nothing)
    train(again, losses=nothing)
    assert torch.equal(torch.stack(again.optimizer.kept), torch.stack(training.optimizer.kept[4:]))
    w = privacy.inverse_coefficients(3, privacy.Workload(11), 5)
    z = torch.empty(11, PARAMETERS)
    for step in range(11):
        Noise(bytes.fromhex(training.state_dict()["noise_key"])).fill(step, {"": z[step]})
    expected = toeplitz(np.append(w, np.zeros(8)), np.zeros(11)) @ z.numpy() * (1 + 2.1e-5)
    assert np.allclose(torch.stack(training.optimizer.kept).numpy() * 8 / 0.5, expected, atol=1e-7)
    assert training.statement()["correlation"]["coefficients"] == list(w)
    assert training.spent(DELTA).epsilon == priced((privacy.Gaussian(1.0), 3))
    assert "times the error of independent noise" in training.explain()


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correlation": tp.Banded(6)}, r"bands=6\) with expected_batch_size / n = 0\.2: .*at most 5 bands"),
        ({"correlation": 3}, r"correlation=3 must be tp\.Banded"),
        ({"correlation": tp.Banded("best")}, r"needs target_epsilon and delta"),
        ({"correlation": tp.Banded(3, learning_rates=[1.0, 0.5])}, r"learning_rates has 2 rates for 11 steps"),
        ({"sampling": tp.Poisson()}, r"sampling=Poisson\(\) with correlation=Banded\(bands=3\).*Leave sampling out"),
        ({"noise_schedule": lambda step: 1.0 + step}, r"noise_schedule with correlation"),
        ({"clipping": tp.Flat(1.0).scheduled(lambda step: 1.0)}, r"clipping=Scheduled\(\.\.\.\) with correlation"),
        ({"clipping": tp.Adaptive(0.5)}, r"clipping=Adaptive\(\.\.\.\) with correlation"),
        ({"clipping": tp.Sketched(64, clip_norm=0.5)}, r"Sketched\(\.\.\.\) has no known price"),
        ({"correlation": tp.Banded(3, order="fixed"), "expected_batch_size": 7}, r"5\.71429\. Take n / 5 or n / 6"),
    ],
)
def test_what_has_no_price_is_refused(settings, message):
    with pytest.raises((tp.Refused, ValueError), match=message):
        training_of(**BANDED | settings)


@pytest.mark.parametrize(
    "settings", [{"bands": 0}, {"bands": 2.5}, {"bands": 2, "order": "random"}, {"bands": 2, "momentum": 1.5}]
)
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(reversed(settings))):
        tp.Banded(**settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"order": "fixed", "learning_rates": [1.0]}, {"order": "fixed", "average": lambda step: step / (step + 1)}],
)
def test_a_banded_inverse_without_a_price_or_with_rates_is_refused(settings):
    with pytest.raises(tp.Refused, match="inverse=True"):
        tp.Banded(3, inverse=True, **settings)


def test_a_state_with_other_noise_is_refused():
    training = training_of(**BANDED)
    train(training, steps=2)
    with pytest.raises(tp.Refused, match=r"correlation=\["):
        training_of(**BANDED | {"correlation": tp.Banded(3, momentum=0.9)}).load_state_dict(training.state_dict())


def test_an_audit_by_releases_is_refused():
    def trained(dataset):
        training = training_of(dataset=dataset, **BANDED)
        train(training)
        return training.model, training

    with pytest.raises(tp.Refused, match='Take score="loss"'):
        tp.audit(trained, data(), canaries=tp.GradientCanaries(N))
