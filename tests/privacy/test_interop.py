# SPDX-License-Identifier: Apache-2.0
import builtins
import copy
import json
from pathlib import Path

import pytest
import torch
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
    "nothing": [],
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_releases_cost_the_same_there(name):
    event = interop.to_dp_event(EXPORTED[name])
    low, high = privacy.compose(EXPORTED[name]).epsilon(1e-5)
    accountant = PLDAccountant()
    accountant.compose(event)
    theirs = accountant.get_epsilon(1e-5)
    assert low - 1e-9 <= theirs <= high + 1e-3  # theirs is an upper bound
    assert RdpAccountant().supports(event)


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
    "projections": (privacy.SubsampledJL(1.3, 16, 0.01), "SubsampledJL.* is neither a Poisson-sampled Gaussian nor"),
    "fixed size": (privacy.FixedSizeGaussian(1.1, 0.01), "FixedSizeGaussian.* is priced for replace-one"),
}


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_export_refuses_by_name(name):
    event, words = NOT_EXPORTED[name]
    with pytest.raises(Refused, match=f"to_dp_event: .*{words}"):
        interop.to_dp_event([(STEP, 1), (event, 1)])


GAUSSIAN = dp_event.GaussianDpEvent(1.0)
NOT_IMPORTED = {
    "no privacy": (dp_event.NonPrivateDpEvent(), "NonPrivateDpEvent.* has no counterpart"),
    "no noise": (dp_event.GaussianDpEvent(0.0), "has no noise"),
    "without replacement": (dp_event.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN), "has no counterpart"),
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
