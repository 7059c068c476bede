# SPDX-License-Identifier: Apache-2.0
"""What a task may choose: score, optimizer, schedule, further arguments of the training, prior releases."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import experiments, privacy
from torch_privacy.experiments import baseline, fitting, task
from torch_privacy.experiments.fitting import losses_and_scores
from torch_privacy.experiments.runner import Run
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import RMSE, Settings, Task, seeded
from torch_privacy.training import sampling
from torch_privacy_papers.catalog import GDP, Experiment

PRIOR = privacy.Release(privacy.Gaussian(5.0), "of this test")


DEFAULTS = Settings(
    noise_multiplier=1.0,
    delta=1e-4,
    expected_batch_size=20,
    learning_rate=0.05,
    clip_norm=1.0,
    epochs=2,
    baseline=True,
)


def build_task(settings, released=None):
    """A regression with everything that a task may choose; ``released`` only after a resume."""
    assert released is None or torch.equal(released["components"], torch.eye(3))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float32)
    data = TensorDataset(x, x.sum(1))
    return Task(
        train=data,
        test=data,
        new_model=lambda: seeded(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), settings.seed),
        new_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
        losses=lambda outputs, targets: (outputs - targets).square(),
        score=RMSE,
        new_scheduler=lambda optimizer, num_steps: torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.5, num_steps),
        private=lambda model: {
            "clipping": tp.PerLayer(clip_norm=2.0),
            "performance": tp.Performance(microbatch_size=8),
            "prior_releases": [PRIOR],
        },
        released={"components": torch.eye(3)},
        not_covered=("what this test looked at",),
        num_threads=1,
    )


def in_views(settings, released=None):
    """The same in three views each, shaken at random, with averaged weights."""
    task = build_task(settings)
    return replace(task, views=3, augment=lambda x: x + 0.1 * torch.randn_like(x), average=0.9)


@pytest.fixture
def regression(monkeypatch):
    """Sets the task of the experiment ``regression``, which exists during the test."""
    module = SimpleNamespace()

    def offer(build):
        module.STUDY = Study({}, lambda quick: [], defaults=DEFAULTS, build_task=build)

    offer(build_task)
    monkeypatch.setitem(sys.modules, "torch_privacy_papers.regression", module)
    described = Experiment("regression", GDP, "regression:STUDY", "", "", 1, 1, trains=True)
    monkeypatch.setitem(experiments.EXPERIMENTS, "regression", described)
    monkeypatch.setattr(experiments, "TRAININGS", ("regression",))
    return offer


def finish(run):
    for _ in run.steps():
        pass
    return run.finish()


@pytest.mark.thorough
def test_task_chooses_score_optimizer_schedule_and_arguments(regression, tmp_path):
    run = Run.start(tmp_path / "r", "regression")
    results = finish(run)
    optimizer = run.training.optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    x, y = run.task.test.tensors
    rmse = float((run.model(x).detach() - y).square().mean().sqrt())
    assert results["test_score"] == pytest.approx(rmse, rel=1e-6)
    assert results["score"] == {"name": "RMSE", "percent": False, "larger_is_better": False}
    assert results["baseline_test_score"] < 2
    statement = json.loads(run.folder.privacy.read_text())
    assert statement["clipping"]["rule"] == "PerLayer"
    assert "what this test looked at" in statement["not_covered"]
    assert "RMSE" in run.folder.report.read_text()


@pytest.mark.thorough
def test_baseline_stops_early_where_the_task_holds_out_training_data(regression, tmp_path, monkeypatch):
    def away(model):  # from the true weights: every epoch is worse than the one before, on any data
        torch.nn.init.ones_(model[0].weight)
        torch.nn.init.zeros_(model[0].bias)
        return torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)

    def build(settings):
        task = build_task(settings)
        return replace(task, train=shifted(task.train), new_baseline_optimizer=away, baseline_held_out=0.25)

    def shifted(data):  # the test data are others, on which the later epochs are better
        x, y = data.tensors
        return TensorDataset(x, y + 1)

    seen = []

    def score(task, model, batch, views=1):
        seen.append(batch[0])
        return losses_and_scores(task, model, batch, views)

    monkeypatch.setattr(baseline, "losses_and_scores", score)
    regression(build)
    run = Run.start(tmp_path / "r", "regression", epochs=4)
    results = finish(run)
    first, *later = [row.test_score for row in run.baseline.rows]
    assert later == [first] * 3  # the first epoch was the best on the part held out
    assert results["baseline_test_score"] == first
    trained = torch.cat(seen[-40:])
    assert len(trained.unique(dim=0)) == 150


def test_best_epoch_keeps_the_earlier_of_equals_and_a_copy(regression):
    task = replace(build_task(DEFAULTS), num_threads=None)
    best, model = baseline.BestEpoch(task), task.new_model()
    one = best.of(model)
    assert best.of(model) is one
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(1, 3))
    other = best.of(model)
    assert other is not one
    assert fitting.test_score(task, other) < fitting.test_score(task, one)
    assert baseline.BestEpoch(task, float("nan"), one).of(model) is not one


@pytest.mark.thorough
def test_baseline_has_its_own_optimizer_where_the_task_says_so(regression, tmp_path):
    def idle(model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    regression(lambda settings: replace(build_task(settings), new_baseline_optimizer=idle))
    results = finish(run := Run.start(tmp_path / "r", "regression"))
    x, y = run.task.test.tensors
    untrained = (run.task.new_model()(x).detach() - y).square().mean().sqrt()
    assert results["baseline_test_score"] == pytest.approx(float(untrained), rel=1e-6)
    assert results["test_score"] < results["baseline_test_score"]


@pytest.mark.thorough
def test_prior_release_is_part_of_every_epsilon(regression, tmp_path):
    run = Run.start(tmp_path / "r", "regression", baseline=False)
    results = finish(run)
    steps = privacy.SubsampledGaussian(1.0, 0.1)
    whole = privacy.compose([(PRIOR.event, 1), (steps, 20)]).epsilon(1e-4)
    assert results["privacy"]["epsilon"] == pytest.approx(whole._asdict())
    assert run.private.rows[-1].epsilon_high == pytest.approx(whole.high)
    assert run.epsilon_high(20) == pytest.approx(whole.high)
    assert results["privacy"]["clt"]["mu"] == pytest.approx(privacy.clt([(PRIOR.event, 1), (steps, 20)]).mu)
    assert [release["count"] for release in results["privacy"]["releases"]] == [1, 20]


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [7])
def test_resumed_run_equals_an_uninterrupted_one_with_schedule_and_adam(regression, tmp_path, stop):
    run = Run.start(tmp_path / "stopped", "regression", baseline=False)
    shutil.copytree(tmp_path / "stopped", tmp_path / "whole")  # the same secret keys
    for _, progress in zip(range(stop), run.steps(), strict=False):
        assert progress.measure == RMSE.measure
    run.checkpoint()
    run.close()
    stopped, whole = Run.resume(tmp_path / "stopped"), Run.resume(tmp_path / "whole")
    finish(stopped)
    finish(whole)
    assert stopped.private.rows == whole.private.rows
    assert stopped.folder.ledger.read_text() == whole.folder.ledger.read_text()


@pytest.mark.thorough
def test_views_are_augmented_and_averaged_weights_are_scored_and_saved(regression, tmp_path):
    regression(in_views)
    run = Run.start(tmp_path / "stopped", "regression")
    shutil.copytree(tmp_path / "stopped", tmp_path / "whole")
    for _ in zip(range(7), run.steps(), strict=False):
        pass
    run.checkpoint()
    run.close()
    stopped = Run.resume(tmp_path / "stopped")
    results = finish(stopped)
    whole = finish(Run.resume(tmp_path / "whole"))  # not before: both draw from torch's random state
    assert results == {**whole, "seconds": results["seconds"]}
    assert stopped.training.settings.views == 3
    assert stopped.average is not None
    assert stopped.average.step_count == stopped.training.step_count
    x, y = stopped.task.test.tensors
    rmse = float((stopped.average.model(x) - y).square().mean().sqrt())
    assert results["test_score"] == pytest.approx(rmse, rel=1e-6)
    saved = safetensors.torch.load_file(stopped.folder.model)
    assert all(torch.equal(saved[name], value) for name, value in stopped.average.model.state_dict().items())
    assert not torch.equal(saved["0.weight"], stopped.model.state_dict()["0.weight"])


def test_commands_and_loops_make_the_same_number_of_steps():
    settings = task.Settings(expected_batch_size=300, learning_rate=0.1, clip_norm=1.0, epochs=1)
    assert task.number_of_steps(settings, 1000) == sampling.number_of_steps(None, 1, 1000, 300) == 4
