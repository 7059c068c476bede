# SPDX-License-Identifier: Apache-2.0
"""Checks audits of real trainings: what the attack sees against one backward per example, coins, refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import one_backward_per_example
from scipy.stats import binom
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.sampling.canaries import WithCanaries
from torch_privacy.training.audit import _are_disjoint

FEATURES, CLASSES = 6, 3


def examples(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


class Watched(torch.optim.SGD):
    """Keeps the released gradients, and the weights before each update."""

    def __init__(self, model: nn.Module, lr: float = 0.5):
        super().__init__(model.parameters(), lr=lr)
        self.model, self.released, self.weights = model, [], []

    def step(self, closure: Any = None) -> None:
        named = dict(self.model.named_parameters())
        self.released.append({name: p.grad.clone() for name, p in named.items()})  # type: ignore[union-attr]
        self.weights.append({name: p.detach().clone() for name, p in named.items()})
        super().step()


class Trainer:
    """The user's training; remembers what it made."""

    def __init__(self, **settings: Any):
        self.settings: dict[str, Any] = {
            "expected_batch_size": 20,
            "num_steps": 6,
            "clipping": tp.Flat(0.3),
            "noise_multiplier": 1.0,
            "test_seed": 5,
            **settings,
        }

    def __call__(self, dataset: Dataset) -> tuple[nn.Module, tp.PrivateTraining]:
        model = network()
        self.dataset, self.optimizer = dataset, Watched(model)
        self.training = private_training(model, self.optimizer, dataset, **self.settings)
        for x, y in self.training:
            losses = losses_of(model, x, y)
            views = self.training.settings.views
            self.training.step(losses if views == 1 else losses.view(-1, views))
        return model, self.training


def observed_by(train: Trainer, canaries: Any, **options: Any) -> tuple[tp.Audit, tp.Observed]:
    """Returns the audit and what its score was computed from."""
    seen: list[tp.Observed] = []

    def score(observed: tp.Observed) -> torch.Tensor:
        seen.append(observed)
        assert observed.log_ratio is not None
        return observed.log_ratio

    return tp.audit(train, examples(60), canaries, score=score, test_seed=2, **options), seen[0]


def clipped_rows(train: Trainer, step: int, data: TensorDataset) -> torch.Tensor:
    """Returns the clipped gradients (n, p) at the weights before a step, by one backward per example in float64."""
    model = network().double()
    model.load_state_dict(train.optimizer.weights[step])
    x, y = data.tensors
    parts = [(x[i : i + 1].double(), y[i : i + 1]) for i in range(len(x))]
    rows = one_backward_per_example(model, x.double(), lambda own, part: losses_of(own, part[0], part[1]), parts)
    return rows * (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)


def test_the_attack_sees_each_release_along_the_canaries_own_gradients():
    train, canaries = Trainer(), examples(30, seed=1)
    _, observed = observed_by(train, canaries)
    assert observed.projections is not None
    assert observed.signals is not None
    data, others, stddev = train.dataset, examples(60), 0.3
    assert isinstance(data, WithCanaries)
    for step, released in enumerate(train.optimizer.released):
        batch = train.training._state.releases.draws.indices(step)
        known = clipped_rows(train, step, others)[batch[batch < 60]].sum(0)
        rows = clipped_rows(train, step, canaries)
        unknown = 20 * torch.cat([part.flatten() for part in released.values()]).double() - known
        norms = rows.norm(dim=1)
        assert observed.signals[step].double().allclose(norms / stddev, rtol=1e-4)
        assert observed.projections[step].double().allclose(rows @ unknown / norms / stddev, rtol=1e-3, atol=1e-3)


def test_the_log_ratio_is_that_of_a_mixture():
    _, observed = observed_by(Trainer(), tp.GradientCanaries(40))
    assert observed.projections is not None
    assert observed.signals is not None
    z, mu, q = observed.projections.double(), observed.signals.double(), 20 / 100
    expected = torch.log(1 - q + q * torch.exp(z * mu - mu.square() / 2)).sum(0)
    assert observed.log_ratio is not None
    assert observed.log_ratio.allclose(expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_under_balls_and_bins_it_is_that_of_the_epochs():
    """A canary has one batch of each epoch of five; the second epoch is broken off after two."""
    train = Trainer(sampling=tp.BallsAndBins(), num_steps=7)
    audit, observed = observed_by(train, tp.GradientCanaries(40))
    assert observed.projections is not None
    assert observed.signals is not None
    z, mu = observed.projections.double(), observed.signals.double()
    ratios = torch.exp(z * mu - mu.square() / 2)
    expected = sum((1 + 0.2 * (epoch - 1).sum(0)).log() for epoch in (ratios[:5], ratios[5:]))
    assert observed.log_ratio is not None
    assert observed.log_ratio.allclose(expected, rtol=1e-4, atol=1e-5)
    assert audit.epsilon_low() <= audit.profile.epsilon(1e-5).high


def gep() -> tp.GEP:
    return tp.GEP(tp.AnchorSubspace(torch.randn(20, FEATURES), 5), tp.Flat(1.0), tp.Flat(1.0))


@pytest.mark.parametrize(
    ("settings", "canaries", "expected"),
    [
        (dict, tp.GradientCanaries(40), True),
        (lambda: {"sampling": tp.BallsAndBins()}, tp.GradientCanaries(40), True),
        (lambda: {"sampling": tp.Truncated(most=60)}, tp.GradientCanaries(40), False),
        (lambda: {"clipping": gep()}, tp.GradientCanaries(40), False),
        (dict, examples(40, seed=1), False),
    ],
)
@pytest.mark.every_case
def test_scores_are_added_only_where_they_do_not_depend_on_each_other(settings, canaries, expected):
    data, model = WithCanaries(examples(60), canaries, np.ones(40, bool)), network()
    training = private_training(model, Watched(model), data, **Trainer(**settings()).settings)
    assert _are_disjoint(training, data) == expected


@pytest.mark.thorough
def test_sums_reject_honest_trainings_no_more_often_than_stated():
    audits = [
        tp.audit(Trainer(test_seed=seed), examples(60), tp.GradientCanaries(40), test_seed=seed, num_guesses=(5, 5))
        for seed in range(30)
    ]
    curve = audits[0].profile.tradeoffs["symmetrized"].low
    outcomes = [audit.sums for audit in audits if audit.sums is not None]
    assert len(outcomes) == 30
    rejected = sum(outcome.reject(curve, 0.05) for outcome in outcomes)
    assert rejected <= binom.ppf(1 - 1e-6, 30, 0.05)


def test_gradient_canaries_have_the_largest_gradient_that_is_allowed_and_do_not_disturb_each_other():
    train = Trainer()
    audit, observed = observed_by(train, tp.GradientCanaries(24))
    assert observed.projections is not None
    assert observed.signals is not None
    assert observed.signals.allclose(torch.ones_like(observed.signals), rtol=1e-4)
    data = train.dataset
    assert isinstance(data, WithCanaries)
    for step in range(6):
        drawn = train.training._state.releases.draws.sampler.indices(step)
        joined = data._is_in[60:] & np.isin(np.arange(60, 84), drawn)
        noise = observed.projections[step] - torch.from_numpy(1.0 * joined)
        # noise of variance 1, orthogonal for different canaries; whoever joined has a mean of 1
        assert noise.abs().max() < 5
        assert noise.square().mean() < 3
    assert audit.num_canaries == 24


def test_a_step_without_canaries_shows_its_noise_and_nothing_else():
    """Else the attack would learn from the missing noise that none joined, which no release says."""
    _, observed = observed_by(Trainer(num_steps=12, expected_batch_size=2), tp.GradientCanaries(1))
    assert observed.projections is not None
    assert (observed.projections != 0).all()
    assert 0.2 < observed.projections.std() < 3


@pytest.mark.thorough
def test_absent_canaries_are_never_fetched_and_present_ones_are():
    class Own(Dataset):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            return examples(60)[index]

    class Watching(Dataset):
        def __init__(self) -> None:
            self.fetched: set[int] = set()

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            self.fetched.add(index)
            return examples(30, seed=1)[index]

    canaries, train = Watching(), Trainer(expected_batch_size=60, num_steps=8)
    audit = tp.audit(train, Subset(Own(), range(60)), canaries, score="loss", test_seed=2)
    data = train.dataset
    assert isinstance(data, WithCanaries)
    assert len(audit.inside) == data._is_in[60:].sum()
    assert canaries.fetched == set(range(30)), "for their losses"
    canaries.fetched.clear()
    data.training = None
    inner = Trainer(expected_batch_size=60, num_steps=8)
    data.scores = None
    inner(data)
    assert canaries.fetched == set(np.flatnonzero(data._is_in[60:]).tolist())


def test_batches_are_those_of_the_data_without_the_absent_canaries():
    coins = np.arange(30) % 3 == 0
    train = Trainer()
    train(WithCanaries(examples(60), examples(30, seed=1), coins))
    releases = train.training._state.releases
    for step in range(6):
        drawn = releases.draws.sampler.indices(step)
        kept = [index for index in drawn.tolist() if index < 60 or coins[index - 60]]
        assert releases.draws.indices(step).tolist() == kept
    assert train.training.settings.sampling_probability == 20 / 90


def test_losses_are_those_before_and_after_training():
    train, canaries = Trainer(), examples(30, seed=1)
    seen: list[tp.Observed] = []

    def score(observed: tp.Observed) -> torch.Tensor:
        seen.append(observed)
        assert observed.losses_before is not None
        assert observed.losses_after is not None
        return observed.losses_before - observed.losses_after

    own = tp.audit(train, examples(60), canaries, score=score, test_seed=2)
    with torch.no_grad():
        assert seen[0].losses_before is not None
        assert seen[0].losses_after is not None
        assert seen[0].losses_before.allclose(losses_of(network(), *canaries.tensors))
        assert seen[0].losses_after.allclose(losses_of(train.training.model, *canaries.tensors))
    named = tp.audit(Trainer(), examples(60), canaries, score="loss", test_seed=2)
    assert named.inside == pytest.approx(own.inside)
    assert named.outside == pytest.approx(own.outside)


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("score", ["gradient", "loss"])
@pytest.mark.parametrize(
    "settings",
    [
        {"performance": tp.Performance(microbatch_size=7)},
        {"clipping": tp.PerLayer(0.3)},
        {"clipping": tp.Automatic(0.3)},
        {"clipping": tp.Adaptive(0.3)},
        {"examples": {"views": 2}},
        {"clipping": tp.Sketched(16, clip_norm=0.3)},
        {"examples": {"num_workers": 1}},
        {"clipping": "GEP"},
    ],
    ids=str,
)
def test_every_kind_of_step_can_be_audited(settings: dict[str, Any], score: str):
    if settings.get("clipping") == "GEP":
        public = torch.randn(30, FEATURES, generator=torch.Generator().manual_seed(9))
        settings = {"clipping": tp.GEP(tp.AnchorSubspace(public, 6), tp.Flat(0.3), tp.Flat(0.3))}
    audit = tp.audit(Trainer(**settings), examples(60), examples(30, seed=1), score=score, test_seed=2)
    assert audit.num_canaries == 30
    assert np.isfinite(audit.inside).all()
    assert not audit.is_rejected


@pytest.mark.thorough
def test_the_training_itself_is_the_same_with_and_without_the_observer():
    coins = np.arange(30) % 2 == 0
    plain, watched = Trainer(), Trainer()
    plain(WithCanaries(examples(60), examples(30, seed=1), coins))
    seed = next(k for k in range(100000) if (np.random.Generator(np.random.PCG64DXSM(k)).random(3) < 0.5).all())
    tp.audit(watched, examples(60), examples(3, seed=1), test_seed=seed)
    again = Trainer()
    again(WithCanaries(examples(60), examples(3, seed=1), np.ones(3, bool)))
    for with_it, without in zip(watched.optimizer.released, again.optimizer.released, strict=True):
        for name in with_it:
            assert with_it[name].equal(without[name])
    assert len(plain.optimizer.released) == 6


def test_ledger_and_statement_say_that_it_is_an_audit(tmp_path):
    train = Trainer(run_folder=tmp_path, delta=1e-3, test_seed=None)
    tp.audit(train, examples(60), examples(30, seed=1))
    train.training.ledger.close()
    header = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert header["purpose"] == "audit"
    assert tp.privacy.Ledger.load(tmp_path / "ledger.jsonl").purpose == "audit"
    statement = train.training.statement()
    assert statement["num_canaries"] == 30
    assert statement["private"] is False
    assert "AUDIT" in str(train.training.spent())
    assert "coins" not in json.dumps(statement)
    assert "inside" not in json.dumps(statement)


@pytest.mark.thorough
def test_an_ordinary_training_cannot_continue_the_ledger_of_an_audit(tmp_path):
    train = Trainer(run_folder=tmp_path)
    tp.audit(train, examples(60), examples(30, seed=1))
    train.training.ledger.close()
    with pytest.raises(tp.Refused, match="audit"):
        Trainer(run_folder=tmp_path)(examples(90))


@pytest.mark.thorough
def test_coins_come_from_the_system_unless_a_test_fixes_them():
    insides = {len(tp.audit(Trainer(), examples(60), tp.GradientCanaries(20)).inside) for _ in range(6)}
    assert len(insides) > 1
    fixed = {tuple(tp.audit(Trainer(), examples(60), tp.GradientCanaries(20), test_seed=1).inside) for _ in range(2)}
    assert len(fixed) == 1


@pytest.mark.thorough
def test_many_canaries_are_noted():
    few = tp.audit(Trainer(), examples(300), examples(30, seed=1))
    many = tp.audit(Trainer(), examples(60), examples(30, seed=1))
    assert not few.notes
    assert "more than one canary for ten examples" in str(many)


@pytest.mark.parametrize("count", [1, 3])
def test_coins_that_are_not_as_many_as_the_canaries_are_refused(count):
    for canaries in (examples(2, seed=1), tp.GradientCanaries(2)):
        with pytest.raises(ValueError, match=f"{count} coins for 2 canaries; must be as many"):
            WithCanaries(examples(3), canaries, np.ones(count, bool))


def test_an_absent_canary_cannot_be_read():
    data = WithCanaries(examples(3), examples(2, seed=1), np.array([True, False]))
    assert len(data) == 5
    assert data[3][0].equal(examples(2, seed=1)[0][0])
    with pytest.raises(tp.Refused, match="leaves out"):
        data[4]
    with pytest.raises(tp.Refused, match="no record"):
        WithCanaries(examples(3), tp.GradientCanaries(2), np.array([True, True]))[3]
    with pytest.raises(IndexError):
        data[5]


class Ends(Trainer):
    def __call__(self, dataset: Dataset) -> Any:
        model = network()
        self.training = tp.PrivateTraining(model, Watched(model), dataset, **self.settings)
        for x, y in self.training:
            if self.training.step(losses_of(model, x, y)):
                break
        return self.training


@pytest.mark.parametrize(
    ("train", "canaries", "options", "named"),
    [
        (Trainer(), tp.GradientCanaries(5), {"score": "loss"}, "no loss"),
        (Trainer(clipping=tp.MicroBatches(0.3, 2)), examples(30), {}, "MicroBatches"),
        (Trainer(clipping=tp.Sketched(16, clip_norm=0.3)), tp.GradientCanaries(5), {}, "Sketched"),
        (Trainer(), tp.GradientCanaries(1000), {}, "1000 entries"),
        (Ends(), examples(30), {"score": "loss"}, "last step"),
        (Ends(), examples(30), {}, "last step"),
        (lambda data: network(), examples(30), {}, "PrivateTraining"),
        (lambda data: Trainer()(Subset(data, range(40))), examples(30), {}, "another data set|leaves out"),
        (lambda data: Trainer()(ConcatDataset([examples(60), examples(30)])), examples(30), {}, "another data set"),
        (lambda data: Trainer()(data) and Trainer()(data), examples(30), {}, "second PrivateTraining"),
        (Trainer(), DataLoader(examples(30)), {}, "DataLoader"),
    ],
)
def test_what_cannot_be_audited_is_refused(train, canaries, options, named):
    with pytest.raises(tp.Refused, match=named):
        tp.audit(train, examples(60), canaries, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"score": "luck"}, "score"),
        ({"score": lambda observed: np.zeros(3)}, "shape"),
    ],
)
def test_wrong_arguments_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        tp.audit(Trainer(), examples(60), examples(30), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"significance": 2.0}, "significance=2.0 must lie in"),
        ({"delta": 0.0}, "delta=0.0 must lie in"),
        ({"num_guesses": (0, 0)}, "num_guesses=0 must be an integer of at least 1"),
        ({"num_guesses": (20, 11)}, "num_guesses=31 must be at most 30"),
        ({"num_guesses": 3}, "num_guesses=3 must be two numbers"),
    ],
)
def test_numbers_out_of_range_are_refused_before_the_training_spends_epsilon(options, named):
    def never(dataset):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match=named):
        tp.audit(never, examples(60), examples(30), **options)
