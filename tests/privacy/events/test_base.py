# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import functools
import json

import pytest

from torch_privacy import privacy

EVENTS = [privacy.SubsampledGaussian(1.1, 256 / 60000), privacy.SubsampledGaussian(2, 1), privacy.Gaussian(0.7)]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_event_survives_json(event):
    assert privacy.event_from_dict(json.loads(json.dumps(privacy.event_to_dict(event)))) == event


def test_events_are_frozen_and_know_their_relation_and_sampler():
    event = EVENTS[0]
    assert event.neighboring_relation is privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert (event.sampler, EVENTS[2].sampler) == ("Poisson", "full batch")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.noise_multiplier = 3.0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF, "1", None, True])
def test_noise_multiplier_is_refused_unless_positive(value):
    for kind in (lambda s: privacy.SubsampledGaussian(s, 0.1), privacy.Gaussian):
        with pytest.raises(ValueError, match=r"noise_multiplier=.*must be"):
            kind(value)


@pytest.mark.parametrize("value", [0, -0.1, 1.0001, NAN, INF, True])
def test_sampling_probability_is_refused_outside_its_range(value):
    with pytest.raises(ValueError, match=r"sampling_probability=.*must"):
        privacy.SubsampledGaussian(1.0, value)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"type": "Cauchy"}, "type='Cauchy' must be one of .*'SubsampledGaussian'"),
        ({}, "type=None"),
        ({"type": "Gaussian"}, "has the fields"),
        ({"type": "Gaussian", "noise_multiplier": 1.0, "mean": 0}, "'mean'"),
        ({"type": "Gaussian", "noise_multiplier": -1.0}, "greater than 0"),
    ],
)
def test_event_from_dict_refuses_by_name(description, message):
    with pytest.raises(ValueError, match=message):
        privacy.event_from_dict(description)


def test_event_to_dict_refuses_what_is_no_event():
    with pytest.raises(ValueError, match="type='int'"):
        privacy.event_to_dict(3)


@pytest.mark.parametrize("value", [1e-310, 1e-300, 9.9e-7, 1.1e6, 1e300])
def test_noise_multiplier_that_cannot_be_priced_is_refused(value):
    for kind in (lambda s: privacy.SubsampledGaussian(s, 0.1), privacy.Gaussian):
        with pytest.raises(ValueError, match=r"noise_multiplier=.* must lie in \[1e-06, 1e\+06\]\. It is the"):
            kind(value)


OF_EACH_TYPE = {
    "Gaussian": {"noise_multiplier": 1.0},
    "SubsampledGaussian": {"noise_multiplier": 1.0, "sampling_probability": 0.1},
    "BallsAndBins": {"noise_multiplier": 1.0, "num_bins": 10},
    "LaterBatch": {"epoch": {"type": "BallsAndBins", "noise_multiplier": 1.0, "num_bins": 10}},
    "BandedGaussian": {"noise_multiplier": 1.0, "sampling_probability": 0.1, "bands": 4},
    "TruncatedGaussian": {"noise_multiplier": 1.0, "sampling_probability": 0.1, "num_examples": 20, "most": 5},
    "FixedSizeGaussian": {"noise_multiplier": 1.0, "sampling_probability": 0.1},
    "SubsampledBlocks": {"noise_multipliers": [1.0, 2.0], "sampling_probability": 0.1},
    "SubsampledGEP": {"noise_multiplier": 1.0, "sampling_probability": 0.1},
    "NoisyCovariance": {"noise_multiplier": 1.0, "sampling_probability": 0.1},
    "SubsampledJL": {"noise_multiplier": 1.0, "num_projections": 32, "sampling_probability": 0.1},
    "SubsampledGroup": {"noise_multiplier": 1.0, "sampling_probability": 0.1, "group_size": 3},
    "Laplace": {"noise_multiplier": 1.0},
    "DiscreteLaplace": {"noise_scale": 2.0, "sensitivity": 2},
    "DiscreteGaussian": {"noise_stddev": 2.0, "sensitivity": 2},
    "PoissonSampled": {"event": {"type": "Laplace", "noise_multiplier": 1.0}, "sampling_probability": 0.1},
    "Claimed": {"event": {"type": "Gaussian", "noise_multiplier": 1.0}, "noise": "Mine()"},
    "GaussianMixture": {"noise_stddev": 1.0, "sensitivities": [0.0, 1.0], "probabilities": [0.9, 0.1]},
    "ExponentialMechanism": {"epsilon": 1.0},
    "PermuteAndFlip": {"epsilon": 1.0},
    "RandomizedResponse": {"epsilon": 1.0, "num_answers": 3},
    "KnownProfile": {"epsilons": [1.0, 2.0], "deltas": [0.1, 0.05]},
    "FinitePair": {"p": [0.5, 0.5], "q": [0.4, 0.6]},
    "ZeroConcentrated": {"rho": 0.1, "delta": 1e-6},
    "Repeated": {"releases": [[{"type": "Gaussian", "noise_multiplier": 1.0}, 3]], "mean": 3.0},
}
INVALID = [NAN, INF, -INF, -1, -1.0, 10**400, True, "x", [], [NAN], [True, True], {}, {"a": 1}, [[1, 2, 3]], b"1"]

ALLOWED = [("unit", "x"), ("person", "x"), ("noise", "x"), ("releases", []), ("monotonic", True)]


@pytest.mark.parametrize("name", sorted(privacy.events.base.EVENTS))
def test_an_invalid_value_of_any_field_is_refused_in_one_sentence(name):
    privacy.event_from_dict({"type": name, **OF_EACH_TYPE[name]})
    for field in dataclasses.fields(privacy.events.base.EVENTS[name]):
        for value in INVALID:
            if (field.name, value) in ALLOWED:
                continue
            with pytest.raises(ValueError, match=r"must|cannot|has the") as refused:
                privacy.event_from_dict({"type": name, **OF_EACH_TYPE[name], field.name: value})
            assert "\n" not in str(refused.value)


def with_value(field, value):
    event = copy.copy(EVENTS[0])
    object.__setattr__(event, field, value)  # as a pickle or a hostile file would
    return event


TAKING_EVENTS = {
    "compose": lambda event: privacy.compose([(event, 1)]),
    "ledger": lambda event: privacy.Ledger().record(event, 0, "a"),
    "release": lambda event: privacy.Release(event, "a"),
    "for_group": lambda event: privacy.for_group(event, 2),
    "to_dp_event": lambda event: privacy.to_dp_event([(event, 1)]),
    "moments_of": lambda event: privacy.moments_of([(event, 1)], 1e-5),
    "most_steps": lambda event: privacy.most_steps(event, target_epsilon=1.0, delta=1e-5),
    "budget": lambda event: privacy.Budget(1.0, 1e-5).allows([(event, 1)]),
}
BROKEN = [
    with_value("noise_multiplier", NAN),
    with_value("noise_multiplier", None),
    with_value("sampling_probability", 1.5),
    with_value("neighboring_relation", "add"),
    privacy.SubsampledGaussian,
    {"type": "Gaussian"},
    None,
]


@pytest.mark.parametrize("place", TAKING_EVENTS)
def test_an_event_that_is_broken_is_refused_wherever_events_go(place):
    for event in BROKEN:
        with pytest.raises(ValueError, match=r"must|cannot price"):
            TAKING_EVENTS[place](event)


@pytest.mark.parametrize("place", [privacy.compose, privacy.to_dp_event, lambda pairs: privacy.moments_of(pairs, 1e-5)])
def test_counts_that_are_no_counts_are_refused(place):
    for count in (-1, True, 2.5, NAN, "3", None, 2**60, 10**400):
        with pytest.raises(ValueError, match="count="):
            place([(EVENTS[0], count)])
    for pairs in (None, EVENTS[0], [EVENTS[0]], [(EVENTS[0],)]):
        with pytest.raises(ValueError, match="must be pairs"):
            place(pairs)
    with pytest.raises(ValueError, match="the event comes first"):
        place([(3, EVENTS[0])])


def test_any_callable_states_the_price_of_an_event():
    """A function becomes a method by itself; a partial does not."""
    pair = privacy.Gaussian(2.0).dominating_pair()

    @privacy.priced(functools.partial(lambda of_all, event: of_all, pair))
    @dataclasses.dataclass(frozen=True, repr=False)
    class ByPartial(privacy.Event):
        neighboring_relation = privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
        sampler = "full batch"

    try:
        assert ByPartial().dominating_pair() is pair
    finally:
        privacy.events.base.EVENTS.pop("ByPartial")


REPLACED = privacy.NeighboringRelation.REPLACE_ONE


@pytest.mark.parametrize(
    "make",
    [
        lambda relation: privacy.SubsampledJL(1.0, 32, 0.01, neighboring_relation=relation),
        lambda relation: privacy.SubsampledGroup(1.0, 0.01, 4, neighboring_relation=relation),
        lambda relation: privacy.BallsAndBins(1.0, 10, relation),
        lambda relation: privacy.TruncatedGaussian(1.0, 0.01, 1000, 30, relation),
        lambda relation: privacy.GaussianMixture(1.0, (0.0, 1.0), (0.9, 0.1), relation),
    ],
)
def test_events_without_a_price_for_replaced_examples_are_refused_with_the_way_to_one(make):
    with pytest.raises(ValueError, match=r"one in place of the other.*privacy\.tradeoff\.group\(profile\.tradeoffs"):
        make(REPLACED)
    assert make(privacy.NeighboringRelation.REPLACE_SPECIAL).dominating_pair() is not None


def test_way_to_a_price_for_replaced_examples_bounds_one_that_is_known():
    """The exact price of replacing, over twice the sensitivity, lies between that of one zero-out and of two."""
    zero_out = privacy.SubsampledGaussian(2.0, 0.1, privacy.NeighboringRelation.REPLACE_SPECIAL)
    replaced = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.1, REPLACED), 20)])
    once = privacy.compose([(zero_out, 20)]).tradeoffs["symmetrized"].low
    twice = privacy.tradeoff.group(once, 2).low
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        assert float(once.delta(epsilon)) < replaced.delta(epsilon).low
        assert replaced.delta(epsilon).high <= float(twice.delta(epsilon)) < 1
