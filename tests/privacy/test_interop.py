# SPDX-License-Identifier: Apache-2.0
import builtins
import copy
import json
import math
from pathlib import Path

import pytest
import torch
from dp_accounting import NeighboringRelation as NeighborRel
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from json_schema import violations

import torch_privacy as tp
from torch_privacy import Refused, privacy
from torch_privacy.privacy import interop

STEP = privacy.SubsampledGaussian(1.1, 0.01)
EXPORTED = {
    "sampled": [(STEP, 100)],
    "full batch": [(privacy.Gaussian(4.0), 3)],
    "schedule": [(STEP, 50), (privacy.SubsampledGaussian(0.9, 0.02), 40), (privacy.Gaussian(8.0), 1)],
    "blocks": [(privacy.SubsampledBlocks((2.0, 3.0), 0.01), 20)],
    "embedding and residual": [(privacy.SubsampledGEP(2.0, 0.01), 20)],
    "zero-out": [(privacy.SubsampledGaussian(1.1, 0.01, privacy.NeighboringRelation.REPLACE_SPECIAL), 10)],
    "count": [(privacy.Laplace(3.0), 4), (STEP, 10)],
    "integer": [(privacy.DiscreteLaplace(5.0, 3), 4)],
    "sampled count": [(privacy.PoissonSampled(privacy.Laplace(1.0), 0.1), 20)],
    "nothing": [],
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_releases_cost_the_same_there(name):
    event = interop.to_dp_event(EXPORTED[name])
    low, high = privacy.compose(EXPORTED[name]).epsilon(1e-5)
    accountant = PLDAccountant()
    accountant.compose(event)
    theirs = accountant.get_epsilon(1e-5)
    assert low - 1e-9 <= theirs <= high + 1e-3  # theirs is an upper bound
    assert RdpAccountant().supports(event) or name in ("integer", "sampled count")


@pytest.mark.parametrize("name", EXPORTED)
def test_round_trip_keeps_the_price(name):
    releases = interop.from_dp_event(interop.to_dp_event(EXPORTED[name]))
    ours, back = (privacy.compose(pairs).epsilon(1e-5) for pairs in (EXPORTED[name], releases))
    assert back == pytest.approx(ours, rel=1e-9)


def test_round_trip_of_gaussian_steps_is_the_identity():
    for name in ("sampled", "full batch", "schedule", "count"):
        assert interop.from_dp_event(interop.to_dp_event(EXPORTED[name])) == EXPORTED[name]


def test_compositions_are_flattened_and_shared_samples_kept_together():
    gaussian = dp_event.GaussianDpEvent
    empty_sample = dp_event.PoissonSampledDpEvent(0.1, dp_event.NoOpDpEvent())
    event = dp_event.ComposedDpEvent(
        [
            dp_event.SelfComposedDpEvent(dp_event.SelfComposedDpEvent(gaussian(2.0), 3), 2),
            dp_event.PoissonSampledDpEvent(0.1, dp_event.ComposedDpEvent([gaussian(1.0), gaussian(2.0)])),
            dp_event.PoissonSampledDpEvent(0.1, dp_event.SelfComposedDpEvent(gaussian(1.5), 2)),
            dp_event.PoissonSampledDpEvent(0.0, gaussian(1.5)),
            dp_event.NoOpDpEvent(),
        ]
    )
    assert interop.from_dp_event(dp_event.ComposedDpEvent([empty_sample, event])) == [
        (privacy.Gaussian(2.0), 6),
        (privacy.SubsampledBlocks((1.0, 2.0), 0.1), 1),
        (privacy.SubsampledBlocks((1.5, 1.5), 0.1), 1),
    ]
    accountant = RdpAccountant()
    accountant.compose(event)
    assert privacy.compose(interop.from_dp_event(event)).epsilon(1e-5).low <= accountant.get_epsilon(1e-5)


def test_ledger_goes_out_and_comes_back(tmp_path):
    ledger = privacy.Ledger()
    for step in range(7):
        ledger.record(STEP if step < 5 else privacy.Gaussian(4.0), step, str(step))
    event = interop.to_dp_event(ledger)
    back = interop.ledger_from_dp_event(event, tmp_path / "ledger")
    assert back.events == ledger.events
    assert len(back) == 7
    back.close()
    assert privacy.Ledger.load(tmp_path / "ledger").events == ledger.events


REPLACE = privacy.NeighboringRelation.REPLACE_ONE
NOT_EXPORTED = {
    "replace one": (privacy.SubsampledGaussian(1.1, 0.01, REPLACE), "SubsampledGaussian.* is priced for replace-one"),
    "projections": (privacy.SubsampledJL(1.3, 16, 0.01), "SubsampledJL.* is no Gaussian or Laplace noise, on all data"),
    "discrete sample": (privacy.PoissonSampled(privacy.DiscreteLaplace(1.0), 0.1), "PoissonSampled.* is no Gaussian"),
    "fixed size": (privacy.FixedSizeGaussian(1.1, 0.01), "FixedSizeGaussian.* is priced for replace-one"),
}


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_export_refuses_by_name(name):
    event, words = NOT_EXPORTED[name]
    with pytest.raises(Refused, match=f"to_dp_event: .*{words}"):
        interop.to_dp_event([(STEP, 1), (event, 1)])


GAUSSIAN = dp_event.GaussianDpEvent(1.0)
NOT_IMPORTED = {
    "no privacy": (dp_event.NonPrivateDpEvent(), "NonPrivateDpEvent.* is not private"),
    "unsupported": (dp_event.UnsupportedDpEvent(), "UnsupportedDpEvent.* has no price in any accountant"),
    "with replacement": (dp_event.SampledWithReplacementDpEvent(100, 10, None), "with replacement, which has no cert"),
    "silent answers": (dp_event.RandomizedResponseDpEvent(0.0, 3), "has no noise"),
    "silent integer": (dp_event.DiscreteLaplaceDpEvent(0.0, 3), "has unlimited noise or none"),
    "silent mixture": (dp_event.MixtureOfGaussiansDpEvent(0.0, [1.0], [1.0]), "has no noise"),
    "silent tree": (dp_event.SingleEpochTreeAggregationDpEvent(0.0, 3), "has no noise"),
    "concentrated": (dp_event.ZCDpEvent(0.1, 0.2), "xi=0.2, and only 0"),
    "repeated": (dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1.0), 3.0, 0.5), "shape must be inf, 1 or 0"),
    "sampled tree": (
        dp_event.PoissonSampledDpEvent(0.1, dp_event.SingleEpochTreeAggregationDpEvent(1.0, 3)),
        "a Poisson sample of .* has no counterpart",
    ),
    "no noise": (dp_event.GaussianDpEvent(0.0), "has no noise"),
    "without replacement": (dp_event.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN), "Use FixedSizeGau"),
    "sample of a sample": (
        dp_event.PoissonSampledDpEvent(0.1, dp_event.PoissonSampledDpEvent(0.1, GAUSSIAN)),
        "only of Gaussians",
    ),
}


@pytest.mark.parametrize("name", NOT_IMPORTED)
def test_import_refuses_by_name(name):
    event, words = NOT_IMPORTED[name]
    with pytest.raises(Refused, match=f"from_dp_event: .*{words}"):
        interop.from_dp_event(dp_event.ComposedDpEvent([GAUSSIAN, event]))


SPECIAL = privacy.NeighboringRelation.REPLACE_SPECIAL
IMPORTED = {
    "answers": (dp_event.RandomizedResponseDpEvent(0.4, 5), privacy.FinitePair((0.68, 0.32), (0.2, 0.8), SPECIAL)),
    "integer": (dp_event.DiscreteLaplaceDpEvent(0.1, 3), privacy.DiscreteLaplace(10.0, 3)),
    "sampled count": (
        dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(2.0)),
        privacy.PoissonSampled(privacy.Laplace(2.0), 0.1),
    ),
    "mixture": (
        dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.5, 0.5]),
        privacy.GaussianMixture(2.0, (0.0, 1.0), (0.5, 0.5)),
    ),
    "concentrated": (dp_event.ZCDpEvent(0.01), privacy.ZeroConcentrated(0.01)),
    "tree": (dp_event.SingleEpochTreeAggregationDpEvent(6.0, [3, 8, 1]), privacy.Gaussian(3.0, SPECIAL)),
    "repeated": (
        dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 3.0, 1),
        privacy.Repeated(((privacy.Gaussian(1.0), 1),), 3.0, "geometric"),
    ),
}
FREE = [
    dp_event.RandomizedResponseDpEvent(1.0, 3),
    dp_event.RandomizedResponseDpEvent(0.0, 1),
    dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0], [1.0]),
    dp_event.ZCDpEvent(0.0),
    dp_event.SingleEpochTreeAggregationDpEvent(1.0, 0),
]


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", IMPORTED)
def test_import_translates_and_agrees_with_the_bound_there(name):
    theirs, ours = IMPORTED[name]
    (found,) = interop.from_dp_event(dp_event.SelfComposedDpEvent(theirs, 3))
    assert found[1] == 3
    assert type(found[0]) is type(ours)
    assert found[0].neighboring_relation is ours.neighboring_relation
    assert privacy.compose([found]).epsilon(1e-5) == pytest.approx(privacy.compose([(ours, 3)]).epsilon(1e-5), rel=1e-9)
    bounds = []
    for relation in (NeighborRel.REPLACE_SPECIAL, NeighborRel.REPLACE_ONE):
        accountant = RdpAccountant(neighboring_relation=relation)
        if accountant.supports(theirs):
            bounds.append(accountant.compose(theirs, 3).get_epsilon(1e-5))
    assert privacy.compose([found]).epsilon(1e-5).low <= max(bounds, default=math.inf)


@pytest.mark.parametrize(("noise", "buckets"), [(0.3, 4), (0.8, 2)])
def test_answers_cost_what_dp_accounting_says(noise, buckets):
    theirs = dp_event.ComposedDpEvent([dp_event.RandomizedResponseDpEvent(noise, buckets)] * 3)  # it forgets counts
    there = PLDAccountant(NeighborRel.REPLACE_SPECIAL).compose(theirs).get_epsilon(1e-5)
    low, high = privacy.compose(interop.from_dp_event(theirs)).epsilon(1e-5)
    assert low <= there * (1 + 1e-6)
    assert high == pytest.approx(there, rel=1e-3)


def test_mixtures_go_out_and_come_back():
    releases = [(privacy.GaussianMixture(2.0, (0.0, 1.0), (0.5, 0.5)), 3)]
    event = interop.to_dp_event(releases)
    assert event.events[0].event == dp_event.MixtureOfGaussiansDpEvent(2.0, (0.0, 1.0), (0.5, 0.5))
    assert interop.from_dp_event(event) == releases


def test_import_leaves_out_what_costs_nothing():
    assert interop.from_dp_event(dp_event.ComposedDpEvent(FREE)) == []


def test_every_class_of_dp_accounting_is_translated_or_refused_by_name():
    kinds = {name for name, kind in vars(dp_event).items() if isinstance(kind, type) and name.endswith("DpEvent")}
    assert kinds - {"DpEvent"} == interop.KINDS.keys() | interop.WITHOUT_COUNTERPART.keys()


def test_missing_dp_accounting_is_named_with_the_cure(monkeypatch):
    def without(name, *rest, **options):
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return original(name, *rest, **options)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    for call in (interop.to_dp_event, interop.from_dp_event):
        with pytest.raises(ImportError, match=r"needs dp-accounting, .* pip install 'dp-accounting>=0\.6'"):
            call([])


RULES = [
    tp.Flat(clip_norm=1.0),
    tp.PerLayer(clip_norm=1.0),
    tp.Automatic(clip_norm=1.0),
    tp.Adaptive(clip_norm=1.0, count_noise_stddev=4.0),
    tp.MicroBatches(clip_norm=1.0, size=2),
]


def statement(clipping=RULES[0], **options):
    torch.set_default_dtype(torch.float32)
    model = torch.nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    options = {"noise_multiplier": 1.0, "delta": 1e-3, **options}
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        expected_batch_size=8,
        num_steps=2,
        clipping=clipping,
        **options,
    )
    for x, y in training:
        training.step(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    return json.loads(json.dumps(training.statement(), allow_nan=False))


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("clipping", RULES, ids=lambda rule: type(rule).__name__)
def test_statement_keeps_to_the_schema_and_names_nothing_beyond_it(clipping):
    said = statement(clipping)
    assert violations(privacy.statement_schema(), said) == []
    assert said.keys() <= privacy.statement_schema()["properties"].keys()


def test_every_kind_of_statement_keeps_to_the_schema():
    for options in ({"delta": None}, {"noise_multiplier": None, "target_epsilon": 2.0}, {"test_seed": 1}):
        assert violations(privacy.statement_schema(), statement(**options)) == []


BROKEN = {
    "$.format: const": lambda said: said.update(format=3),
    "$: required": lambda said: said.pop("delta"),
    "$.neighboring_relation: enum": lambda said: said.update(neighboring_relation="add"),
    "$.sampling_probability: maximum": lambda said: said.update(sampling_probability=1.5),
    "$.num_examples: type": lambda said: said.update(num_examples=True),
    "$.epsilon: required": lambda said: said["epsilon"].pop("high"),
    "$.epsilon.low: minimum": lambda said: said["epsilon"].update(low=-1),
    "$.releases[0].count: minimum": lambda said: said["releases"][0].update(count=0),
    "$.releases[0].event: required": lambda said: said["releases"][0]["event"].pop("type"),
    "$.versions.python: type": lambda said: said["versions"].update(python=3),
    "$.private: type": lambda said: said.update(private="yes"),
}


def test_schema_refuses_what_is_no_statement():
    said = statement()
    for violation, break_it in BROKEN.items():
        broken = copy.deepcopy(said)
        break_it(broken)
        assert violation in violations(privacy.statement_schema(), broken)
    assert violations(privacy.statement_schema(), {**said, "private": False}) == ["$: required"]  # no warning


def test_the_published_schema_is_the_one_in_the_package():
    published = Path(__file__).parents[2] / "docs/statement.schema.json"
    assert json.loads(published.read_text()) == privacy.statement_schema()
