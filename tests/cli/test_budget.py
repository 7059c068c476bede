# SPDX-License-Identifier: Apache-2.0
"""The command ``budget``: makes, shows and settles; and the options ``--budget``."""

import json

import pandas as pd
import pytest

from torch_privacy import cli, privacy
from torch_privacy.experiments.runner import Run
from torch_privacy.privacy.rounding import round_up
from torch_privacy.runs.report import render as report

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be learnt at this epsilon")  # rare classes

EVENT = privacy.Gaussian(5.0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "people.budget"
    assert cli.run(["budget", "open", str(path), "--epsilon", "3", "--delta", "1e-6"]) == 0
    return path


def test_status_and_list_show_what_is_drawn(file, capsys):
    budget = privacy.Budget.open(file)
    budget.reserve([(EVENT, 2)], "two means").begin()
    assert cli.run(["budget", "status", str(file)]) == 0
    said = capsys.readouterr().out
    assert "epsilon 3 at delta = 1e-06" in said
    assert "1, of which 1 have not ended" in said
    assert cli.run(["budget", "status", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon_drawn"] == budget.spent().high
    assert cli.run(["budget", "list", str(file), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["what"], run["status"], run["share"]) == ("two means", "begun", None)
    assert run["releases"] == [{"event": privacy.event_to_dict(EVENT), "count": 2}]
    assert cli.run(["budget", "list", str(file)]) == 0
    assert "begun, declared in advance" in capsys.readouterr().out


def test_opening_and_settling_say_what_is_drawn(file, capsys):
    assert cli.run(["budget", "open", str(file), "--epsilon", "3", "--delta", "1e-6"]) == 0  # again
    assert "people.budget: epsilon 3 at delta = 1e-06, of which at most 0.000 is drawn." in capsys.readouterr().err
    run = privacy.Budget.open(file).reserve([(EVENT, 2)], "two means")
    assert cli.run(["budget", "settle", str(file), run.run]) == 0
    shown = capsys.readouterr()
    assert f"of which at most {round_up(privacy.Budget.open(file).spent().high)} is drawn." in shown.err
    assert shown.out == ""


def test_opening_refused_for_an_empty_unit_makes_no_file(tmp_path, capsys):
    path = tmp_path / "people.budget"
    for unit in ("", " "):
        assert cli.run(["budget", "open", str(path), "--epsilon", "3", "--delta", "1e-6", "--unit", unit]) == 2
        assert "must say in words what is added or removed" in capsys.readouterr().err
        assert not path.exists()


def test_killed_run_is_settled_from_its_ledger(file, tmp_path, capsys):
    budget = privacy.Budget.open(file)
    run = budget.reserve([(EVENT, 2)], "two means")
    run.begin()
    ledger = privacy.Ledger(tmp_path / "ledger", run=run.run)
    ledger.record(EVENT, 0, "a")
    ledger.close()
    command = ["budget", "settle", str(file), run.run, "--ledger", str(tmp_path / "ledger")]
    assert cli.run(command) == 2
    assert "give the reason (reason=, --reason)" in capsys.readouterr().err
    assert cli.run([*command, "--reason", "power failure"]) == 0
    assert budget.state.runs[0].settled == [(EVENT, 1)]
    assert cli.run(["budget", "settle", str(file), "none"]) == 2
    other = budget.reserve([(EVENT, 1)], "another")
    assert cli.run(["budget", "settle", str(file), other.run]) == 0
    assert budget.state.runs[1].settled == [(EVENT, 1)]


def test_training_on_an_experiment_draws_once_also_if_it_is_stopped_and_resumed(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "render", lambda folders: "a page")
    command = ["train", "adult", "--delta", "1e-6", "--batch-size", "3000", "--epochs", "0.3", "--budget", str(file)]
    code = cli.run([*command, "--noise-multiplier", "0.6", "--run", str(tmp_path / "1"), "--quiet"])
    assert "does not fit into" in capsys.readouterr().err
    assert code == 2
    budget = privacy.Budget.open(file)
    assert not budget.state.runs
    settings = {"delta": 1e-6, "expected_batch_size": 3000, "epochs": 0.3, "noise_multiplier": 3.0, "baseline": False}
    run = Run.start(tmp_path / "2", "adult", budget=str(file), **settings)
    next(run.steps())
    run.checkpoint()
    run.close()
    assert [drawn.status for drawn in budget.state.runs] == ["begun"]
    assert cli.run(["train", "--resume", str(tmp_path / "2"), "--quiet"]) == 0
    (drawn,) = budget.state.runs
    assert (drawn.status, drawn.releases) == ("settled", privacy.Ledger.read(tmp_path / "2" / "ledger.jsonl").events)
    assert drawn.releases[0][1] == 3  # steps: 0.3 of 29,305 examples, in batches of 3000
    assert json.loads((tmp_path / "2" / "settings.json").read_text())["budget"] == "people.budget"


@pytest.mark.thorough
def test_training_on_a_table_draws_once_for_its_schema_and_its_steps(file, tmp_path, capsys):
    values = [str(20 + i % 50) for i in range(4000)]  # enough rows to learn bounds at a small epsilon
    pd.DataFrame({"age": values, "paid": ["yes", "no"] * 2000}).to_csv(tmp_path / "people.csv", index=False)
    command = ["train", str(tmp_path / "people.csv"), "--target", "paid", "--delta", "1e-6", "--quiet"]
    command += ["--budget", str(file), "--batch-size", "500", "--epochs", "1"]
    code = cli.run([*command, "--epsilon", "2.9", "--run", str(tmp_path / "2")])
    said = capsys.readouterr()
    assert code == 0, said.err
    (drawn,) = privacy.Budget.open(file).state.runs
    assert drawn.status == "settled"
    assert privacy.Budget.open(file).spent().high <= 2.9
    statement = json.loads((tmp_path / "2" / "privacy.json").read_text())
    assert statement["data_budget"]["num_runs"] == 1
    settings = json.loads((tmp_path / "2" / "settings.json").read_text())
    assert settings["budget"] == "people.budget"
