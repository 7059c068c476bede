# SPDX-License-Identifier: Apache-2.0
"""Settings searched for: on stand-in data, and on the private data with the price of choosing in the ledger."""

import json
import warnings
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch

from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.data.synthetic import synthetic_adult
from torch_privacy.experiments import private_search, search
from torch_privacy.experiments.private_search import PrivateSearch, worst_of
from torch_privacy.experiments.search import Trial, best_of, grid, on_stand_in
from torch_privacy.runs.folder import RunFolder
from torch_privacy.support.validate import Refused

FEW = {"epochs": 0.05}  # 6 steps
LAW = {"mean_runs": 2.0, "distribution": "geometric", "score_noise": 10.0}


@pytest.fixture(autouse=True)
def float32(float64_and_seeds):
    torch.set_default_dtype(torch.float32)


def test_a_grid_has_every_combination_or_some_at_random():
    tried = {"learning_rate": [0.1, 0.2, 0.3], "clip_norm": [1.0, 2.0]}
    everything = grid(tried, None, 0)
    assert len(everything) == 6
    some = grid(tried, 4, 1)
    assert len(some) == 4
    assert all(candidate in everything for candidate in some)
    assert some == grid(tried, 4, 1) != grid(tried, 4, 2)
    with pytest.raises(ValueError, match="tries"):
        grid(tried, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("projections", [0, 3])
def test_stand_in_data_tell_good_settings_from_useless_ones(projections):
    candidates = [{"learning_rate": 1e-6}, {"learning_rate": 0.5}]
    trials = list(on_stand_in("adult", candidates, projections=projections, epochs=0.5, noise_multiplier=0.55))
    assert best_of(trials).candidate == {"learning_rate": 0.5}


def test_stand_in_data_are_nobodys(monkeypatch):
    def private(*args, **kwargs):
        raise AssertionError("the private data were read")

    monkeypatch.setattr("torch_privacy_papers.bu2020.adult.load_adult", private)
    assert len(list(on_stand_in("adult", [{"learning_rate": 0.1}], projections=0, **FEW))) == 1


def test_nan_scores_are_worst_and_ties_go_to_the_first():
    trials = [Trial({"k": 0}, -float("inf")), Trial({"k": 1}, 0.5), Trial({"k": 2}, 0.5)]
    assert best_of(trials).candidate == {"k": 1}


def test_settings_that_diverge_rank_lowest_and_end_no_search(monkeypatch, tmp_path, capsys):
    people = synthetic_adult(600, 60, 0)
    monkeypatch.setattr("torch_privacy_papers.bu2020.adult.load_adult", lambda *args, **kwargs: people)
    monkeypatch.setattr("torch_privacy_papers.bu2020.adult.synthetic_adult", lambda **kwargs: people)
    settings = {"noise_multiplier": 1.0, "expected_batch_size": 64, "epochs": 0.3}
    candidates = [{"learning_rate": 1e30}, {"learning_rate": 0.1}]
    assert best_of([*on_stand_in("adult", candidates, projections=0, **settings)]).candidate == candidates[1]
    job = PrivateSearch("adult", candidates, **LAW, **settings)
    assert [job._one_run(number)[0] > -1e9 for number in (0, 1)] == [False, True]
    none = PrivateSearch("adult", candidates[:1], **LAW, **settings)
    with pytest.raises(ValueError, match=r"every run have diverged, and .*ledger\.jsonl has the price"):
        none.run(RunFolder(tmp_path / "run"))
    few = ["--epochs", "0.3", "--batch-size", "64", "--run", str(tmp_path / "new")]
    assert run(["search", "adult", "--learning-rate", "1e30", "--noise-multiplier", "1", *few]) == 2
    assert "no setting has a finite score, so nothing was trained" in capsys.readouterr().err


def test_synthetic_people_are_drawn_by_the_seed():
    one, same, other = (synthetic_adult(200, 50, seed).train.tensors[0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.thorough
def test_a_private_search_states_one_event_for_all_its_runs(tmp_path, monkeypatch):
    noises = []
    monkeypatch.setattr(search, "rank", None)  # nothing is ranked without noise
    add_to = private_search.Noise.add_to
    monkeypatch.setattr(
        private_search.Noise,
        "add_to",
        lambda self, step, sums, sd, *rest: noises.append(sd) or add_to(self, step, sums, sd, *rest),
    )
    job = PrivateSearch("adult", [{"learning_rate": 0.1}, {"learning_rate": 0.5}], noise_multiplier=0.8, **LAW, **FEW)
    few, budget = (privacy.Budget.open(tmp_path / str(e), epsilon=e, delta=1e-6) for e in (0.1, 50.0))
    with pytest.raises(Refused, match="does not fit"):
        job.run(RunFolder(tmp_path / "run"), few)
    assert not (tmp_path / "run").exists()
    results = job.run(RunFolder(tmp_path / "run"), budget)
    assert [run.settled for run in budget.state.runs] == [[(job.event, 1)]]
    assert json.loads((tmp_path / "run/privacy.json").read_text())["data_budget"] == budget.state.as_json()
    assert noises.count(10.0) >= 1
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    (release,) = statement["releases"]
    event = privacy.event_from_dict(release["event"])
    assert event == job.event
    zero_out: dict = {"neighboring_relation": privacy.NeighboringRelation.REPLACE_SPECIAL}
    (run_event, steps), (count, _) = event.releases
    assert run_event == replace(privacy.SubsampledGaussian(0.8, 256 / statement["num_examples"]), **zero_out)
    assert steps == statement["num_steps_planned"]
    assert count == privacy.Gaussian(10.0)
    one_run = privacy.compose(event.releases).epsilon(1e-5)
    assert statement["epsilon"] == statement["epsilon_of_steps_made"] == results["epsilon"]
    assert statement["epsilon"]["high"] > one_run.high
    assert privacy.Ledger.load(tmp_path / "run" / "ledger.jsonl").events == [(event, 1)]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "ledger.jsonl", "model.safetensors", "privacy.json", "results.json", "settings.json"
    }  # fmt: skip


def test_a_private_search_shows_no_warning_of_its_runs(tmp_path, monkeypatch):
    people = synthetic_adult(200, 20, 0)
    people.train.tensors[0][:150] = torch.nan  # of which each training warns
    monkeypatch.setattr("torch_privacy_papers.bu2020.adult.load_adult", lambda *args, **kwargs: people)
    settings = {"noise_multiplier": 1.0, "expected_batch_size": 64, "epochs": 0.4}
    job = PrivateSearch("adult", [{"learning_rate": 0.1}], **LAW, **settings)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        job._one_run(0)
        assert shown
        shown.clear()
        job.run(RunFolder(tmp_path / "run"))
        assert not shown


def test_a_private_search_does_not_say_how_long_it_took_and_so_how_many_runs_it_made(tmp_path, monkeypatch):
    last = {"date": "2099-01-01T00:00:00+00:00", "treated_as_public": [], "not_covered": []}  # of the run that won
    monkeypatch.setattr(PrivateSearch, "_one_run", lambda self, number: (1.0, {"model": b"", "statement": last}))
    folder = tmp_path / "run"
    PrivateSearch("adult", [{"learning_rate": 0.1}], noise_multiplier=0.8, **LAW, **FEW).run(RunFolder(folder))
    start = datetime.fromisoformat(json.loads((folder / "privacy.json").read_text())["date"])
    (date,) = {path.stat().st_mtime for path in (folder, *folder.iterdir())}
    assert start == datetime.fromtimestamp(date, UTC).replace(microsecond=0)


def test_commands_refused_for_the_folder_of_a_private_search_say_what_it_is(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.write_json(folder.settings, {"experiment": "adult"})
    folder.write_checked(folder.results, {"experiment": "adult", "noisy_score": 0.8, "mean_runs": 2.0})
    for command in (["report"], ["audit"], ["generate"], ["train", "--resume"]):
        assert run([*command, str(tmp_path)]) == 2
        shown = capsys.readouterr().err
        assert "holds a private search" in shown or command == ["train", "--resume"]
        assert "damaged" not in shown
        assert "report.html" not in shown  # a search writes none


@pytest.mark.thorough
def test_a_target_holds_for_the_whole_search_and_for_any_batch_size(monkeypatch):
    monkeypatch.setattr(private_search, "CALIBRATIONS", 3)
    monkeypatch.setattr(private_search, "TABLE", 20)  # a coarse one is an upper bound, too
    candidates = [{"expected_batch_size": 256}, {"expected_batch_size": 1024}]
    job = PrivateSearch("adult", candidates, target_epsilon=3.0, **LAW, **FEW)
    assert job.noise[0] < job.noise[1]
    assert privacy.compose([(job.event, 1)]).epsilon(1e-5).high <= 3.0


@pytest.mark.thorough
def test_the_worst_of_several_costs_at_least_as_much_as_each():
    runs = [(privacy.SubsampledGaussian(1.0, 0.01), 500), (privacy.SubsampledGaussian(2.0, 0.1), 50)]
    worst = privacy.compose([(worst_of(runs), 1)])
    for delta in (1e-3, 1e-5, 1e-8):
        highest = max(privacy.compose([releases]).epsilon(delta).low for releases in runs)
        assert highest <= worst.epsilon(delta).high <= highest * 1.1 + 0.05


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give values to try"),
        (["--learning-rate", "0.1", "--on", "public"], "--stand-in DIR"),
        (["--learning-rate", "0.1", "--stand-in", "x"], "--on public"),
        (["--learning-rate", "0.1", "--epsilon", "1", "--noise-multiplier", "1"], "exclude each other"),
        (["--learning-rate", "0.1", "--budget", "x"], "--budget is for --on private"),
        (["--learning-rate", "-1"], "learning-rate -1.0 must be"),
        (["--learning-rate", "0.1", "--on", "private", "--mean-runs", "1"], "mean"),
        (["--learning-rate", "0.1", "--on", "private", "--score-noise", "0"], "--score-noise 0.0 must be"),
    ],
)
def test_mistakes_are_named(arguments, said, capsys, tmp_path):
    assert run(["search", "adult", *arguments, "--run", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_tries_and_then_trains(tmp_path, capsys):
    values = ["--learning-rate", "0.000001", "--learning-rate", "0.5", "--projections", "0", "--epochs", "0.1"]
    assert run(["search", "adult", *values, "--run", str(tmp_path / "run"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["search"]["chosen"] == {"learning_rate": 0.5}
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["learning_rate"] == 0.5
    assert (tmp_path / "run" / "report.html").exists()
