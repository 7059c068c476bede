# SPDX-License-Identifier: Apache-2.0
import dataclasses
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
        ({"type": "Cauchy"}, "type='Cauchy' must be one of 'Gaussian', 'SubsampledGaussian'"),
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
