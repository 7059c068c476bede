# SPDX-License-Identifier: Apache-2.0
"""Steps with a noise and a clip norm of their own are priced, clipped and resumed as such."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import ZERO_OUT, private_training

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.runs.folder import RunFolder
from torch_privacy.training.sampling import StepPlan, number_of_steps

N, STEPS = 60, 8
DATA = torch.utils.data.TensorDataset(
    torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.arange(N) % 3,
)
NOISE = [1.0 + 0.1 * step for step in range(STEPS)]


def training_of(model=None, *, lr=0.1, **more):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    settings = {"num_steps": STEPS, "noise_multiplier": 1.0, "clipping": tp.Flat(0.5), "delta": 1e-3, **more}
    if "epochs" in settings:
        del settings["num_steps"]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return private_training(model, optimizer, DATA, expected_batch_size=10, **settings)


def train(training, steps=None):
    for x, y in training:
        training.step(F.cross_entropy(training.model(x), y, reduction="none"))
        if steps is not None and training.step_count >= steps and not training.rehearsing:
            break
    return training


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "schedule",
    [NOISE, tuple(NOISE), torch.tensor(NOISE), lambda t: NOISE[t]],
    ids=["list", "tuple", "tensor", "function"],
)
def test_every_step_is_priced_with_its_own_noise(schedule):
    training = train(training_of(noise_multiplier=0.8, noise_schedule=schedule))
    noise = [0.8 * factor for factor in (schedule.tolist() if isinstance(schedule, torch.Tensor) else NOISE)]
    expected = [(privacy.SubsampledGaussian(sigma, 1 / 6, ZERO_OUT), 1) for sigma in noise]
    assert training.ledger.events == expected
    assert training.spent().epsilon == privacy.compose(expected).epsilon(1e-3)
    assert training.statement()["releases"] == [
        {"event": privacy.event_to_dict(event), "count": count} for event, count in expected
    ]


@pytest.mark.parametrize("clipping", [tp.Flat(0.5), tp.Automatic(0.5), tp.PerLayer(0.5), tp.EachLayer(0.5)], ids=repr)
def test_the_noise_of_a_step_is_that_of_its_event_and_clip_norm(clipping):
    """The weights move by the noise alone, as all gradients are 0: its standard deviation is measured."""
    clips = [2.0 ** (step % 3) for step in range(STEPS)]
    model = nn.Linear(4, 5000, bias=False)
    training = training_of(
        model, lr=1.0, clipping=clipping.scheduled(clips), noise_multiplier=0.7, noise_schedule=NOISE
    )
    before, moves = model.weight.detach().clone(), []
    for x, _ in training:
        if training.step((model(x) * 0).sum(1)):
            moves.append((model.weight.detach() - before) * 10)
            before = model.weight.detach().clone()
    bound = 0.5
    for move, noise, clip in zip(moves, NOISE, clips, strict=True):
        assert float(move.std()) == pytest.approx(0.7 * noise * clip * bound, rel=0.03)


def test_clip_schedule_clips_every_step_at_its_own_norm():
    """With next to no noise, the gradient of each step is the sum of rows clipped at that step's norm."""
    clips = [1.0, 0.1, 0.01, 3.0, 1.0, 1.0, 0.5, 0.5]
    model = nn.Linear(4, 3).double()
    found = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            found.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]).clone())
            return super().step(closure)

    data = torch.utils.data.TensorDataset(DATA.tensors[0].double(), DATA.tensors[1])
    training = tp.PrivateTraining(
        model, Noted(model.parameters(), lr=0.0), data, expected_batch_size=N, num_steps=STEPS, delta=1e-3,
        clipping=tp.Flat(0.5).scheduled(clips), noise_multiplier=1e-6,
    )  # fmt: skip
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    rows = []
    for x, y in zip(*data.tensors, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())]))
    rows = torch.stack(rows)
    for gradient, clip in zip(found, clips, strict=True):
        factors = (0.5 * clip / rows.norm(dim=1)).clamp(max=1)
        assert torch.allclose(gradient, (factors[:, None] * rows).sum(0) / N, atol=1e-6 * clip)


@pytest.mark.thorough
def test_clip_schedule_changes_no_epsilon():
    plain, scheduled = train(training_of()), train(training_of(clipping=tp.Flat(0.5).scheduled(lambda t: 0.5**t)))
    assert scheduled.spent().epsilon == plain.spent().epsilon
    assert scheduled.statement()["clipping"]["clip_schedule"]["last"] == 0.5**7
    assert scheduled.statement()["sensitivity"] == 0.5


@pytest.mark.thorough
def test_a_target_scales_the_whole_schedule():
    training = training_of(noise_multiplier=None, target_epsilon=2.0, noise_schedule=NOISE)
    events = [event for event, _ in training._setup.plan.releases]
    ratios = [event.noise_multiplier / events[0].noise_multiplier for event in events]
    assert ratios == pytest.approx([factor / NOISE[0] for factor in NOISE])
    assert 1.99 <= privacy.compose([(event, 1) for event in events]).epsilon_high(1e-3) <= 2.0


def test_a_budget_stops_before_the_step_that_would_exceed_it():
    factors = [1.0, 1.0, 1.0, 1.0, 1.0, 0.3, 1.0, 1.0]
    whole = [(privacy.SubsampledGaussian(factor, 1 / 6), 1) for factor in factors]
    epsilons = [privacy.compose(whole[: k + 1]).epsilon_high(1e-3) for k in range(STEPS)]
    limit = (epsilons[4] + epsilons[5]) / 2
    training = train(training_of(noise_schedule=factors, examples={"budget": privacy.Budget(limit, 1e-3)}))
    assert training.step_count == 5
    assert training.spent().epsilon.high == epsilons[4]


def test_a_prefix_is_planned_with_the_noise_of_the_steps_left():
    training = train(training_of(noise_schedule=NOISE), steps=3)
    events = [(privacy.SubsampledGaussian(factor, 1 / 6, ZERO_OUT), 1) for factor in NOISE]
    assert training.spent().epsilon == privacy.compose(events[:3]).epsilon(1e-3)
    assert training.spent().planned == privacy.compose(events).epsilon(1e-3)
    assert training.event == events[3][0]


def test_a_resumed_training_goes_on_in_the_schedule(tmp_path):
    more = {"noise_schedule": NOISE, "clipping": tp.Flat(0.5).scheduled([1 / factor for factor in NOISE])}
    whole = train(training_of(test_seed=3, **more))
    half = train(training_of(test_seed=3, **more), steps=4)
    resumed = training_of(test_seed=3, **more)
    resumed.model.load_state_dict(half.model.state_dict())
    resumed.load_state_dict(half.state_dict())
    train(resumed)
    assert resumed.ledger.events == whole.ledger.events
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    other = training_of(test_seed=3, **{**more, "noise_schedule": NOISE[::-1]})
    with pytest.raises(tp.Refused, match="noise_schedule"):
        other.load_state_dict(half.state_dict())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"noise_schedule": NOISE[:-1]}, "noise_schedule has 7 factors for 8 steps"),
        ({"noise_schedule": [0.0, *NOISE[1:]]}, r"noise_schedule\[0\]=0.0 must be greater than 0"),
        ({"noise_schedule": lambda t: math.nan}, r"noise_schedule\[0\]=nan must be a finite number"),
        ({"noise_schedule": 2.0}, "must be a function of the step, or numbers"),
        ({"clipping": tp.Flat(0.5).scheduled(NOISE[:-1])}, "clipping.factors has 7 factors for 8 steps"),
        ({"clipping": tp.Adaptive(1.0, count_noise_stddev=9.0).scheduled(NOISE)}, "Leave .scheduled.* out"),
        ({"noise_schedule": lambda t: 4.0**t, "clipping": tp.Adaptive(1.0, count_noise_stddev=9.0)}, "count_noise"),
        ({"num_steps": None}, "give exactly one of the two"),
        ({"num_steps": 3, "epochs": 2}, "give exactly one of the two"),
        ({"num_steps": None, "epochs": -1.0}, "epochs=-1.0 must be greater than 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_schedules_are_refused(more, words):
    settings = {"num_steps": STEPS, "noise_multiplier": 1.0, "clipping": tp.Flat(0.5), "delta": 1e-3, **more}
    model = nn.Linear(4, 3)
    with pytest.raises((ValueError, tp.Refused), match=words):
        tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, expected_batch_size=10, **settings)


def test_factors_that_are_none_are_refused_at_once():
    with pytest.raises(ValueError, match=r"Flat.scheduled: factors='abc' must be a function of the step, or numbers"):
        tp.Flat(0.5).scheduled("abc")


def test_a_rule_of_ones_own_must_say_how_it_is_scaled():
    class Own(tp.Flat):
        scaled = tp.ClippingRule.scaled

    with pytest.raises(ValueError, match=r"Own.scaled: .* Define scaled\(factor\)"):
        training_of(clipping=Own(1.0).scheduled(NOISE))


def test_estimated_norms_follow_the_schedules():
    clipping = tp.Sketched(32, clip_norm=0.5).scheduled(NOISE)
    sketched = train(training_of(clipping=clipping, noise_schedule=NOISE, test_seed=1))
    assert [event.noise_multiplier for event, _ in sketched.ledger.events] == NOISE


@pytest.mark.parametrize(
    ("epochs", "n", "batch", "steps"),
    [(3, 67_349, 1024, 198), (10, 25_000, 512, 489), (1, 10**6, 4096, 245), (1, 1000, 50, 20), (0.001, 1000, 50, 1),
     (1, 1000, 1000 / 20.00000000000001, 20), (1, 1000, 1000 / 3, 3)],
)  # fmt: skip
def test_epochs_are_rounded_up_to_steps(epochs, n, batch, steps):
    assert number_of_steps(None, epochs, n, batch) == steps


def test_epochs_make_a_training():
    training = train(training_of(epochs=2))
    assert training.settings.num_steps == training.step_count == 12


def test_plan_finds_the_event_of_each_step():
    a, b = privacy.Gaussian(1.0), privacy.Gaussian(2.0)
    plan = StepPlan([(a, 2), (a, 1), (b, 2), (a, 1)])
    assert plan.releases == [(a, 3), (b, 2), (a, 1)]
    assert [plan.at(step) for step in range(7)] == [a, a, a, b, b, a, a]
    assert plan.between(2, 5) == [(a, 1), (b, 2)]
    assert plan.between(4, 4) == []


def test_spent_is_a_number_never_below_the_truth():
    training = train(training_of(), steps=5)
    spent = training.spent()
    assert float(spent) == spent.epsilon.high == training.profile().epsilon_high(1e-3)
    assert float(train(training_of(test_seed=1)).spent()) == math.inf


@pytest.mark.thorough
def test_a_run_folder_names_the_schedules(tmp_path):
    training = train(
        training_of(noise_schedule=NOISE, clipping=tp.Flat(0.5).scheduled(NOISE), run_folder=tmp_path / "run")
    )
    folder = RunFolder(tmp_path / "run")
    written = json.loads(folder.settings.read_text())
    assert written["noise_schedule"] == written["clip_schedule"] == "first 1, last 1.7, smallest 1, largest 1.7"
    assert folder.read_results()["privacy"]["releases"] == training.statement()["releases"]
