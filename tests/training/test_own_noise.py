# SPDX-License-Identifier: Apache-2.0
"""Trainings with noise of one's own: what is released, resumed and paid, on several ranks, and what is refused."""

import copy
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from ranked import VIEWS, assert_same_bits, case, weights_after
from scipy import stats
from scipy.special import ndtri
from trainings import (
    RULES,
    ZERO_OUT,
    N,
    cross_entropy,
    data,
    network,
    parameters_of,
    private_training,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.noise import TailNoise
from torch_privacy.training.own_noise import _lower_bounds, stddev_of

DELTA = 1e-4
PARAMETERS = 26
Q = 0.2  # of the trainings here


@dataclass(frozen=True)
class Normal(tp.OwnNoise):
    """Gaussian noise; ``claimed`` is the noise multiplier of the event, over the true one."""

    stddev: float = 0.5
    sensitivity: float = 0.5
    claimed: float = 1.0

    def magnitude(self, tail):
        return -self.stddev * ndtri(tail / 2)

    def event(self, sampling_probability, unit):
        noise = self.claimed * self.stddev / self.sensitivity
        return privacy.SubsampledGaussian(noise, sampling_probability, unit=unit)


@dataclass(frozen=True)
class Laplace(tp.OwnNoise):
    """Laplace noise: each number is (|v|/b, 0)-private for a change v, so that all are s²/(2 b²)-concentrated."""

    scale: float = 1.0
    sensitivity: float = 0.5

    def magnitude(self, tail):
        return -self.scale * np.log(tail)

    def event(self, sampling_probability, unit):
        rho = (self.sensitivity / self.scale) ** 2 / 2
        curve = privacy.compose([(privacy.ZeroConcentrated(rho), 1)])
        epsilons = np.linspace(0, rho + 8 * (2 * rho) ** 0.5, 25).tolist()
        known = privacy.KnownProfile(tuple(epsilons), tuple(curve.delta(e).high for e in epsilons), unit=unit)
        return privacy.PoissonSampled(known, sampling_probability)


@dataclass(frozen=True)
class OfOneNumber(Laplace):
    """Laplace noise at the price of a change in one number only."""

    def event(self, sampling_probability, unit):
        return privacy.PoissonSampled(privacy.Laplace(self.scale / self.sensitivity, unit=unit), sampling_probability)


def own(noise, **settings):
    return training_of(noise_multiplier=noise, **settings)


def nothing(model, x, y):
    return 0.0 * cross_entropy(model, x, y)


class Kept(torch.optim.SGD):
    """Keeps the gradients that it was given."""

    def step(self, closure=None):
        given = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        self.__dict__.setdefault("kept", []).append(torch.cat(given))
        super().step()


# What is released


@pytest.mark.parametrize("noise", [Normal(), Laplace()], ids=repr)
def test_where_losses_have_no_gradient_a_step_releases_the_noise(noise):
    model = network()
    kept = Kept(model.parameters(), lr=0.1)
    training = own(noise, model=model, optimizer=kept)
    train(training, losses=nothing)
    numbers = TailNoise(bytes.fromhex(training.state_dict()["noise_key"]), noise.magnitude, 1.0)
    for step, released in enumerate(kept.kept):
        z = {"": torch.zeros(PARAMETERS)}
        numbers.fill(step, z)
        assert np.allclose(released * 8, z[""] * (1 + 2.1e-5), atol=2**-16)  # and jitter


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("rule", ["flat", "each layer", "micro-batches"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_has_the_same_bits(rule, stop):
    clipping, _, sensitivity = RULES[rule]
    whole, first, second = (own(Laplace(2.0, sensitivity), clipping=clipping) for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


OF_OWN = case(noise_multiplier=Laplace(1.0, 0.5), clipping=tp.Flat(0.5))


def on_rank(rank: int | None, how: str | None) -> dict[str, torch.Tensor]:
    return weights_after(OF_OWN, how)


@pytest.mark.thorough
@VIEWS
@pytest.mark.parametrize("how", ["ddp", "layers"])
def test_two_ranks_train_as_one_process_bit_for_bit(ranks2, how):
    assert_same_bits(ranks2, on_rank, how)


@pytest.mark.thorough
@VIEWS
def test_four_ranks_train_as_one_process_bit_for_bit(ranks4):
    assert_same_bits(ranks4, on_rank, "layers")


# What it costs


def test_gaussian_noise_of_ones_own_has_the_price_of_the_librarys():
    training, ordinary = own(Normal()), training_of(noise_multiplier=1.0)
    assert training.settings.noise_multiplier == 1.0
    train(training)
    train(ordinary)
    ours, theirs = training.spent(DELTA), ordinary.spent(DELTA)
    # The last digits depend on which prices were asked for before.
    assert tuple(ours.epsilon) == pytest.approx(tuple(theirs.epsilon), rel=1e-10)
    inner = privacy.SubsampledGaussian(1.0, Q)
    name = "Normal(stddev=0.5, sensitivity=0.5, claimed=1.0)"
    assert training.ledger.events == [(privacy.Claimed(inner, name, ZERO_OUT), 6)]
    assert str(ours).endswith(
        f"(zero out one example, Poisson sampling; {name} hides every change up to its sensitivity, as its author "
        "claims)"
    )
    statement = training.statement()
    assert statement["noise"].startswith(f"{name}, float64 on a grid")
    assert (statement["sampler"], statement["noise_multiplier"], statement["sensitivity"]) == ("Poisson", 1.0, 0.5)


def test_laplace_noise_costs_what_its_event_says_and_whole_epochs_stay_poisson():
    training = own(Laplace(), num_steps=None, epochs=1)
    assert training.settings.noise_multiplier == pytest.approx(2 * 2**0.5, rel=1e-11)
    train(training)
    assert training.spent(DELTA).epsilon == privacy.compose([(Laplace().event(Q, "example"), 5)]).epsilon(DELTA)


def test_numbers_of_numpy_are_numbers():
    training = own(Normal(np.float64(0.5), np.float64(0.5), np.float32(1.0)))
    assert training.event == own(Normal()).event
    assert type(training.settings.noise_multiplier) is float


def test_an_owner_is_the_unit_of_the_event():
    owners = {"owners": [f"c{k // 2}" for k in range(N)], "per_owner": 2, "owner_name": "customer"}
    model = network()
    training = private_training(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data(),
        owners,
        expected_batch_size=4,
        num_steps=3,
        clipping=tp.Flat(0.5),
        noise_multiplier=Laplace(),
    )
    assert training.event.unit == "customer"
    with pytest.raises(tp.Refused, match=r"protects one example, but the training protects one customer"):
        private_training(
            model,
            training.optimizer,
            data(),
            owners,
            expected_batch_size=4,
            num_steps=3,
            clipping=tp.Flat(0.5),
            noise_multiplier=returning(lambda q, unit: privacy.SubsampledGaussian(1.0, q)),
        )


@pytest.mark.thorough
def test_a_run_folder_is_verified(tmp_path):
    training = own(Normal(), run_folder=tmp_path / "run", delta=DELTA)
    train(training)
    training.write_run()
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["own_noise"] == str(Normal())
    found = tp.verify(tmp_path / "run")
    assert "differs: 0" in str(found)


# The law


LAWS = {
    "normal": (Normal(0.7, 1.0), stats.norm(scale=0.7)),
    "laplace": (Laplace(3.0, 1.0), stats.laplace(scale=3.0)),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_standard_deviation_is_that_of_the_law(law):
    noise, theirs = LAWS[law]
    assert stddev_of(noise) == pytest.approx(theirs.std(), rel=1e-11)


@pytest.mark.parametrize("stddev", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 26, pytest.param(10**7, marks=pytest.mark.thorough)])
def test_lower_bounds_of_gaussian_noise_are_below_its_closed_form_and_near(stddev, count):
    bounds = list(_lower_bounds(Normal(stddev, 1.0), count))
    assert len({change for change, _, _ in bounds}) == min(count, 2)
    for _, epsilon, low in bounds:
        exact = privacy.tradeoff.Gaussian(1 / stddev).delta(epsilon)
        assert low <= exact + 1e-13
        assert low >= (0.95 if count > 1e6 else 0.99) * exact - 1e-6


def test_lower_bounds_of_laplace_noise_are_below_its_closed_form_and_near():
    bounds = list(_lower_bounds(Laplace(0.5, 1.0), 1))
    for _, epsilon, low in bounds:
        exact = max(0.0, -np.expm1((epsilon - 2) / 2))
        assert exact - 1e-4 <= low <= exact + 1e-13
    assert bounds[0][1] == 0


def test_lower_bounds_of_laplace_noise_in_many_numbers_agree_with_another_accountant():
    count, scale = 26, 2.0
    one = privacy_loss_distribution.from_laplace_mechanism(scale * count**0.5, value_discretization_interval=1e-4)
    witness = one.self_compose(count)
    bounds = [bound for bound in _lower_bounds(Laplace(scale, 1.0), count) if bound[0].startswith("all")]
    assert len(bounds) > 5
    for _, epsilon, low in bounds:
        most = witness.get_delta_for_epsilon(epsilon)
        assert 0.99 * most - 1e-6 <= low <= most


@dataclass(frozen=True)
class Of(tp.OwnNoise):
    """Laplace noise of scale 1, but for what ``how`` spoils."""

    how: str = ""
    sensitivity: float = 0.5

    def magnitude(self, tail):
        return SPOILED[self.how](tail)

    def event(self, sampling_probability, unit):
        return EVENTS.get(self.how, Laplace(1.0, self.sensitivity).event)(sampling_probability, unit)


def laplace(tail):
    return -np.log(tail)


def returning(event):
    EVENTS["given"] = event
    SPOILED["given"] = laplace
    return Of("given")


EVENTS = {"bounded": lambda q, unit: privacy.SubsampledGaussian(0.5, q, unit=unit)}
SPOILED = {
    "": laplace,
    "rounded": lambda tail: np.rint(laplace(tail) * 2**20) / 2**20,
    "single precision": lambda tail: laplace(tail).astype(np.float32).astype(float),
    "a single": lambda tail: laplace(tail).astype(np.float32),
    "a list": lambda tail: laplace(tail).tolist(),
    "often nothing": lambda tail: np.maximum(laplace(tail) - 1, 0),
    "rising": lambda tail: tail,
    "negative": lambda tail: laplace(tail) - 1,
    "not finite": lambda tail: np.where(tail > 0.5, laplace(tail), np.inf),
    "no number": lambda tail: laplace(tail) * np.nan,
    "of all": lambda tail: laplace(tail) / tail.mean(),
    "random": lambda tail: laplace(tail) * np.random.uniform(0.99, 1.0),
    "heavy": lambda tail: 1 / np.sqrt(tail),
    "bounded": lambda tail: 4 * (1 - tail),
}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("rounded", "would have an atom"),
        ("single precision", "would have an atom"),
        ("often nothing", "would have an atom"),
        ("a single", "array of float64"),
        ("a list", "array of float64"),
        ("rising", "must fall in tail"),
        ("negative", "must be finite and at least 0"),
        ("not finite", "must be finite and at least 0; got inf"),
        ("no number", "must be finite and at least 0; got nan"),
        ("of all", "from its own tail alone"),
        ("random", "from its own tail alone|must fall"),
        ("heavy", "finite variance"),
        ("bounded", r"one number of the sums, the noise has a delta of at least .* at epsilon .*states at most"),
    ],
)
def test_what_is_no_law_is_refused(how, message):
    with pytest.raises(tp.Refused, match=message):
        own(Of(how))


# Refusals


@pytest.mark.parametrize("batch_size", [1e-5, 8, 40])
@pytest.mark.parametrize("stddev", [0.3, 0.5, 2.0])
def test_a_scale_that_is_wrong_by_two_percent_is_refused(batch_size, stddev):
    own(Normal(stddev, 0.5, claimed=0.98), expected_batch_size=batch_size)
    with pytest.raises(tp.Refused, match=r"and its event disagree.*one number"):
        own(Normal(stddev, 0.5, claimed=1.02), expected_batch_size=batch_size)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_noise_priced_for_a_change_of_one_number_is_refused_where_many_change(scale):
    with pytest.raises(tp.Refused, match=r"changes all numbers of the sums equally, the noise has a delta of at least"):
        own(OfOneNumber(scale, 0.5))
    one = torch.nn.Linear(3, 1, bias=False)
    one.weight.requires_grad_(False)
    bias = torch.nn.Sequential(one, torch.nn.Linear(1, 1, bias=False))
    assert own(OfOneNumber(scale, 0.5), model=bias, optimizer=torch.optim.SGD(bias[1].parameters(), lr=0.1))


def test_noise_priced_for_one_number_is_refused_where_more_are_unfrozen_later():
    def scaled(model, x, y):
        return cross_entropy(lambda x: model.scale * model(x), x, y)

    model = network().requires_grad_(False)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    training = own(OfOneNumber(0.5, 0.5), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    train(training, steps=2, losses=scaled)
    model.requires_grad_()
    with pytest.raises(tp.Refused, match=r"changes all numbers of the sums equally, the noise has a delta of at least"):
        train(training, losses=scaled)
    assert training.step_count == len(training.ledger) == 2


def test_an_event_for_rarer_sampling_is_refused():
    with pytest.raises(tp.Refused, match=r"examples join a step with probability 0\.2"):
        own(returning(lambda q, unit: Laplace(1.0, 0.5).event(q / 2, unit)))
    hidden = privacy.compose([(Laplace(1.0, 0.5).event(Q / 2, "example"), 1)])
    known = privacy.KnownProfile((0.0, 0.1, 0.3), tuple(hidden.delta(e).high for e in (0.0, 0.1, 0.3)))
    with pytest.raises(tp.Refused, match="and its event disagree"):
        own(returning(lambda q, unit: known))


LATER = privacy.LaterBatch(privacy.BallsAndBins(1.0, 5))
REPLACED = privacy.Gaussian(1.0, privacy.NeighboringRelation.REPLACE_ONE)


@dataclass(frozen=True)
class Unknown(privacy.Event):
    unit, sampler, neighboring_relation = "example", "Poisson", ZERO_OUT


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (LATER, "one step with independent noise"),
        (privacy.BandedGaussian(1.0, Q, 4), "one step with independent noise"),
        (REPLACED, "priced for replace one example"),
        (Unknown(), "cannot price"),
        (1.0, "cannot price"),
    ],
)
def test_what_is_no_price_of_a_step_is_refused(event, message):
    with pytest.raises(tp.Refused, match=rf"event returned .*which is no price of a step: .*{message}"):
        own(returning(lambda q, unit: event))


@pytest.mark.parametrize("sensitivity", [0.4999999, 0.51])
def test_another_sensitivity_than_the_clipping_rules_is_refused(sensitivity):
    with pytest.raises(tp.Refused, match=rf"sensitivity of {sensitivity}, but one example changes .* by up to 0\.5"):
        own(Laplace(1.0, sensitivity))


@pytest.mark.parametrize("sensitivity", [0, -1.0, float("nan"), "0.5"])
def test_a_sensitivity_that_is_no_length_is_refused(sensitivity):
    with pytest.raises(ValueError, match="sensitivity="):
        own(Laplace(1.0, sensitivity))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_epsilon": 1.0, "delta": DELTA}, "target_epsilon=1.0 with noise_multiplier=.*its scale is fixed"),
        ({"correlation": tp.Banded(3)}, "correlation=.*independent steps"),
        ({"noise_schedule": lambda step: 1.0}, "noise_schedule=.*independent steps"),
        ({"sampling": tp.BallsAndBins()}, "sampling=.*Poisson samples"),
        ({"sampling": tp.Truncated(most=20)}, "sampling=.*Poisson samples"),
        ({"clipping": tp.Adaptive(0.5)}, "clipping=.*fixed bound"),
        ({"clipping": tp.Flat(0.5).scheduled(lambda step: 1.0)}, "clipping=.*fixed bound"),
        ({"clipping": tp.Sketched(64, clip_norm=0.5)}, "clipping=.*fixed bound"),
    ],
)
def test_settings_without_a_price_are_refused(settings, message):
    with pytest.raises(tp.Refused, match=message):
        own(Laplace(), **settings)


def test_noise_that_could_change_or_has_no_name_is_refused():
    class Undecorated(Laplace):
        pass

    @dataclass(frozen=True)
    class Listed(Laplace):
        scales: object = (1.0, 2.0)

    Mutable = type("Mutable", (tp.OwnNoise,), {"event": Laplace.event, "magnitude": Laplace.magnitude, "scale": 1.0})
    Mutable.sensitivity = 0.5
    for noise in (Mutable(), Undecorated()):
        with pytest.raises(tp.Refused, match="must be a frozen dataclass"):
            own(noise)
    with pytest.raises(tp.Refused, match=r"Listed\.scales=.*must be a number"):
        own(Listed())


@pytest.mark.parametrize("other", [1.0, Normal(0.5, 0.5, claimed=0.99), Laplace(), 2 * 2**0.5])
def test_a_state_with_other_noise_is_refused(other):
    training, again = own(Normal()), own(other)
    train(training, steps=2)
    for state, into in ((training, again), (again, own(Normal()))):
        with pytest.raises(tp.Refused, match=r"own_noise=.*\(the state has"):
            into.load_state_dict(copy.deepcopy(state.state_dict()))
