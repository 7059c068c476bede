# SPDX-License-Identifier: Apache-2.0
"""Scalars of numpy and torch are numbers everywhere in accounting, strings nowhere; a used profile can be pickled."""

import json
import pickle

import numpy as np
import pytest
import torch

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.privacy import tradeoff
from torch_privacy.privacy.summary import equal_releases

KINDS = {
    "float32": lambda x: np.float32(x),
    "array": lambda x: np.array(x),
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64),
    "integer or float": lambda x: np.int64(x) if isinstance(x, int) else np.float64(x),
}
HALVES = {  # exact in float32
    "Gaussian": lambda n: privacy.Gaussian(n(0.5)),
    "SubsampledGaussian": lambda n: privacy.SubsampledGaussian(n(0.5), sampling_probability=n(0.25)),
    "SubsampledBlocks": lambda n: privacy.SubsampledBlocks((n(0.5), n(1.0)), n(0.25)),
    "SubsampledJL": lambda n: privacy.SubsampledJL(n(0.5), 32, n(0.25)),
    "Laplace": lambda n: privacy.Laplace(n(0.5)),
    "RandomizedResponse": lambda n: privacy.RandomizedResponse(n(0.5)),
    "KnownProfile": lambda n: privacy.KnownProfile((n(0.5),), (n(0.25),)),
    "ZeroConcentrated": lambda n: privacy.ZeroConcentrated(n(0.5), n(0.25)),
    "FinitePair": lambda n: privacy.FinitePair((n(0.25), n(0.75)), (n(0.75), n(0.25))),
    "Repeated": lambda n: privacy.Repeated(((privacy.Laplace(n(0.5)), 1),), n(2.0)),
    "Budget": lambda n: privacy.Budget(n(0.5), n(0.25)),
    "trade-off": lambda n: tradeoff.EpsilonDelta(n(0.5), n(0.25)),
    "Flat": lambda n: tp.Flat(n(0.5)),
    "Groups": lambda n: tp.Groups({"": n(0.5)}),
    "Adaptive": lambda n: tp.Adaptive(n(0.5), learning_rate=n(0.25)),
    "epsilon": lambda n: privacy.compose([(privacy.Laplace(0.5), 2)]).epsilon(n(0.25)),
    "delta": lambda n: privacy.compose([(privacy.Laplace(0.5), 2)]).delta(n(0.5)),
    "statement": lambda n: privacy.compose([(privacy.Laplace(0.5), 2)]).statement(n(0.25)),
    "calibrate": lambda n: privacy.calibrate(n(2.0), n(0.0625), sampling_probability=n(0.25), num_steps=4),
    "rdp": lambda n: privacy.rdp(equal_releases(n(2.0), n(0.25), 4), n(0.0625)),
    "strong composition": lambda n: privacy.strong_composition(n(2.0), n(0.25), 4, n(0.0625)),
    "clt": lambda n: privacy.clt(equal_releases(n(2.0), n(0.25), 4)).epsilon(0.0625),
}
WHOLE = {
    "compose": lambda n: privacy.compose([(privacy.Laplace(0.5), n(3))]).epsilon(0.1),
    "SubsampledJL": lambda n: privacy.SubsampledJL(1.0, n(32), 0.25),
    "RandomizedResponse": lambda n: privacy.RandomizedResponse(1.0, n(4)),
    "most_steps": lambda n: privacy.most_steps(privacy.Laplace(2.0), 4.0, 1e-3, most=n(100)),
    "calibrate": lambda n: privacy.calibrate(2.0, 0.0625, sampling_probability=0.25, num_steps=n(4)),
    "Sketched": lambda n: tp.Sketched(n(32), clip_norm=n(1)),
    "MicroBatches": lambda n: tp.MicroBatches(1.0, n(4)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", HALVES)
def test_scalars_are_numbers(call, kind):
    assert HALVES[call](KINDS[kind]) == HALVES[call](float)


@pytest.mark.parametrize("kind", ["array", "tensor", "integer or float"])
@pytest.mark.parametrize("call", WHOLE)
def test_whole_scalars_are_numbers(call, kind):
    assert WHOLE[call](KINDS[kind]) == WHOLE[call](int)


@pytest.mark.parametrize("call", HALVES)
@pytest.mark.parametrize("text", [str, np.str_])
def test_strings_are_no_numbers(call, text):
    with pytest.raises(ValueError, match=r"must (be|lie|map)|one or more finite"):
        HALVES[call](lambda x: text(x))


@pytest.mark.parametrize("call", WHOLE)
@pytest.mark.parametrize("wrong", ["3", 3.0, True, np.float64(3.0), np.True_, torch.tensor([3])])
def test_whole_numbers_refuse_anything_else(call, wrong):
    with pytest.raises(ValueError, match=r"must be an? "):
        WHOLE[call](lambda x: wrong)


def test_events_of_scalars_are_plain_json():
    event = privacy.SubsampledGaussian(np.float32(0.5), torch.tensor(0.25))
    assert json.loads(json.dumps(privacy.event_to_dict(event))) == privacy.event_to_dict(
        privacy.SubsampledGaussian(0.5, 0.25)
    )
    assert {type(event.noise_multiplier), type(event.sampling_probability)} == {float}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "events",
    [
        [(privacy.SubsampledGaussian(1.0, 0.01), 1000)],
        [(privacy.SubsampledGaussian(1.0, 0.01), 2), (privacy.Laplace(2.0), 3)],
        [(privacy.FixedSizeGaussian(1.0, 0.01), 100)],
        [(privacy.SubsampledJL(1.0, 32, 0.01), 100)],
    ],
)
def test_used_profile_can_be_pickled(events):
    profile = privacy.compose(events)
    answers = profile.epsilon(1e-5), profile.delta(0.5), profile.tradeoff(0.1)
    again = pickle.loads(pickle.dumps(profile))
    assert again.events == profile.events
    assert (again.epsilon(1e-5), again.delta(0.5), again.tradeoff(0.1)) == answers
