# SPDX-License-Identifier: Apache-2.0
import base64
import json
import re
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_privacy
from torch_privacy import experiments, privacy
from torch_privacy.cli import run as command
from torch_privacy.data import Data
from torch_privacy.experiments import CATALOG, load_study
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import Bracket
from torch_privacy.runs import table
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import Computation, TableColumn, TrainingRow, folder_name, training_numbers
from torch_privacy_papers.catalog import Experiment, Paper
from torch_privacy_papers.reproduction import Reproduction

PAPER = Paper("Nobody (2000)", "On <nothing>", "nowhere")
COLUMNS = {
    "value": TableColumn("value", digits=1),
    "share": TableColumn("share", digits=1, percent=True),
    "bracket": TableColumn("bracket"),
    "unknown": TableColumn("never known"),
}
OTHER_METHODS = (
    "nearest neighbors", "naive Bayes", "decision tree", "voted trees",
    "user and film", "user, film and factors", "nearest users",
)  # fmt: skip
WITHOUT_NUMBERS = (  # of a paper
    "jl-accuracy", "jl-figures", "jl-summary", "jl-imdb-trials",
    "gep-benefit-tuning", "gep-network-tuning", "gep-mnist-tuning", "gep-pretrained-tuning",
    "best-cifar10-tuning", "text-imdb", "text-imdb-tuning", "text-generator",
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """An experiment of two computations, and how often each was made."""
    calls = []

    def compute(name, context):
        calls.append((name, context.seed))
        return {"value": 3.0 + context.seed, "share": 0.5, "bracket": Bracket(0.12345, 0.12346)}

    study = Study(
        columns=COLUMNS,
        rows=lambda quick: [
            Computation("first", lambda context: compute("first", context), {"value": 3.14}),
            Computation("second row", lambda context: compute("second", context), seeded=True),
        ],
        figures=lambda results, folder: {"curve": plots.tradeoff_plot({"one": privacy.tradeoff.Gaussian(1.0)})},
        notes=("a <note> on `it`",),
    )
    monkeypatch.setitem(sys.modules, "torch_privacy_papers.tiny_one", SimpleNamespace(STUDY=study))
    described = Experiment("tiny-one", PAPER, "tiny_one:STUDY", "Table 0", "nothing at all", 1, 1)
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny-one", described)
    return calls


@pytest.mark.parametrize("experiment", CATALOG, ids=lambda experiment: experiment.name)
def test_experiment_keeps_the_shape_that_all_have(experiment):
    study = load_study(experiment.name)
    for quick in (False, True):
        rows = study.rows(quick)
        assert len({folder_name(row.name, 0) for row in rows}) == len(rows)
        for row in rows:
            assert set(row.paper) <= set(study.columns)
            if isinstance(row, TrainingRow):
                assert set(row.settings) <= set(vars(study.settings(**row.settings)))
    assert any(row.paper for row in study.rows(False)) or experiment.name in WITHOUT_NUMBERS
    assert experiment.trains == (study.build_task is not None) == (study.defaults is not None)
    assert experiment.quick_seconds < 180


def test_list_names_every_experiment_with_its_paper_and_times(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in shown.splitlines())
    for experiment in CATALOG:
        assert experiment.name in shown
        assert experiment.paper.title.split()[-1] in shown
    assert command(["reproduce", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["experiments"]
    assert [entry["name"] for entry in listed] == [experiment.name for experiment in CATALOG]


def test_run_writes_every_number_beside_the_papers(tiny, tmp_path, capsys):
    assert command(["reproduce", "tiny-one", "--seeds", "1,5-6", "--run", str(tmp_path / "r"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "r" / "results.json").read_text())
    assert written == {key: value for key, value in results.items() if key != "run"} | {
        "format": 2,
        "check": written["check"],
    }
    assert tiny == [("first", 1), ("second", 1), ("second", 5), ("second", 6)]
    first, second = results["rows"]
    assert first["paper"] == {"value": 3.14}
    assert [run["seed"] for run in second["runs"]] == [1, 5, 6]
    assert second["runs"][1]["numbers"] == {"value": 8.0, "share": 0.5, "bracket": {"low": 0.12345, "high": 0.12346}}
    assert not (tmp_path / "r" / "lock").exists()
    assert (tmp_path / "r" / "curve.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("width", [30, 200])
def test_table_shows_ours_beside_the_papers_at_any_width(width, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert command(["reproduce", "tiny-one", "--seed", "0-2", "--run", str(tmp_path / "r"), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "never known" not in shown
    assert re.search(r"3\.0\s[^#]*3\.1", shown)  # ours before the paper's
    for words in ("4.0 ± 1.0", "50.0 %", "[0.123, 0.124]", "a <note> on `it`", "Table 0 of Nobody (2000)"):
        assert words in " ".join(shown.split())


def test_report_of_an_experiment_has_its_table_pictures_and_notes(tiny, tmp_path):
    assert command(["reproduce", "tiny-one", "--run", str(tmp_path / "r"), "--json"]) == 0
    page = (tmp_path / "r" / "report.html").read_text()
    (picture,) = re.findall('<img alt="figure" src="data:image/svg\\+xml;base64,([^"]+)">', page)
    assert b"<svg" in base64.b64decode(picture)
    for words in ("a &lt;note&gt; on <code>it</code>", "<td>3.1</td>", "[0.123, 0.124]"):
        assert words in page
    assert not re.search(r"url\((?!#)|@import|<script|<link|<img[^>]*src=\"(?!data:)", page)


def test_report_on_several_runs_tells_them_apart(tiny, tmp_path):
    for name in ("one", "two", "three"):
        assert command(["reproduce", "tiny-one", "--run", str(tmp_path / name), "--json"]) == 0
    runs = [str(tmp_path / name) for name in ("one", "two", "three")]
    assert command(["report", *runs, "--out", str(tmp_path / "all.html")]) == 0
    page = (tmp_path / "all.html").read_text()
    assert re.findall("<h1>(.*)</h1>", page) == ["tiny-one, tiny-one (2) and tiny-one (3)"]
    assert re.findall("<h2>(tiny-one[^:]*):", page) == ["tiny-one", "tiny-one (2)", "tiny-one (3)"]


def test_stopped_run_does_only_what_is_left(tiny, tmp_path, capsys):
    run = Reproduction.start(tmp_path / "r", "tiny-one")
    run.compute(run.unfinished()[0])
    run.close()
    assert command(["reproduce", "--resume", str(tmp_path / "r"), "--json"]) == 0
    assert tiny == [("first", 0), ("second", 0)]
    assert command(["reproduce", "--resume", str(tmp_path / "r")]) == 2
    assert "this run is complete, nothing is left to resume" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--only", "sec*"], ["--skip", "first"], ["--only", "*", "--skip", "f*"]])
def test_rows_can_be_chosen_and_what_is_left_out_is_said(options, tiny, tmp_path, capsys):
    folder = tmp_path / "run"
    assert command(["reproduce", "tiny-one", "--run", str(folder), "--json", *options]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in results["rows"]] == ["second row"]
    assert results["notes"] == ["a <note> on `it`", "Left out: first."]
    assert tiny == [("second", 0)]
    assert not (folder / "curve.svg").exists()  # figures are of all rows


def test_a_resumed_run_leaves_out_what_it_left_out_before(tiny, tmp_path):
    Reproduction.start(tmp_path / "run", "tiny-one", skip=["second*"]).folder.unlock()
    assert [job.row.name for job in Reproduction.resume(tmp_path / "run").unfinished()] == ["first"]


@pytest.mark.parametrize(("options", "said"), [
    (["--only", "third"], "'third' must match a row's name, one of 'first', 'second row'"),
    (["--skip", "*"], "no row is left"),
])  # fmt: skip
def test_patterns_that_leave_nothing_are_refused(options, said, tiny, tmp_path, capsys):
    assert command(["reproduce", "tiny-one", "--run", str(tmp_path / "run"), *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_run_in_use_or_of_another_kind_is_refused(tiny, tmp_path, capsys):
    run = Reproduction.start(tmp_path / "r", "tiny-one")
    assert command(["reproduce", "--resume", str(tmp_path / "r")]) == 2
    assert "another process is training in this folder" in capsys.readouterr().err
    run.close()
    assert not (tmp_path / "r").exists()  # nothing was begun
    folder = RunFolder(tmp_path / "training")
    folder.create()
    folder.write_json(folder.settings, {"experiment": "gdp-adult"})
    assert command(["reproduce", "--resume", str(folder.path)]) == 2
    assert "Continue a training with train --resume" in capsys.readouterr().err


@pytest.mark.thorough
def test_training_row_resumes_from_its_checkpoint(tmp_path):
    run = Reproduction.start(tmp_path / "r", "gdp-adult", quick=True, seeds=[3])
    job = run.unfinished()[0]
    training = run.training(job)
    for _, progress in zip(range(5), training.steps(), strict=False):
        assert progress.training == "private"
    assert training.settings.seed == 3
    training.checkpoint()
    training.close()
    run.close()
    again = Reproduction.resume(tmp_path / "r")
    training = again.training(again.unfinished()[0])
    assert training.training.step_count == 5
    training.close()
    again.close()


@pytest.mark.thorough
def test_training_row_stopped_before_its_first_checkpoint_starts_anew(tmp_path):
    run = Reproduction.start(tmp_path / "r", "gdp-adult", quick=True)
    job = run.unfinished()[0]
    job.folder.path.mkdir(parents=True)
    (job.folder.path / "ledger.jsonl").write_text('{"ledger":1}\n')
    training = run.training(job)
    assert training.training.step_count == 0
    training.close()
    run.close()


@pytest.mark.thorough
def test_releases_without_a_checkpoint_are_not_thrown_away(tmp_path, capsys):
    run = Reproduction.start(tmp_path / "r", "gdp-adult", quick=True)
    job = run.unfinished()[0]
    training = run.training(job)
    for _ in zip(range(3), training.steps(), strict=False):
        pass
    training.checkpoint()
    training.close()
    run.close()
    job.folder.checkpoint.unlink()
    before = job.folder.ledger.read_bytes()
    assert command(["reproduce", "--resume", str(tmp_path / "r")]) == 2
    assert "its ledger holds releases" in " ".join(capsys.readouterr().err.split())
    assert job.folder.ledger.read_bytes() == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("quick", "said"), [(None, "has no 'quick'; the file is damaged"), (False, "was trained with other epochs than")]
)
def test_edited_settings_of_a_run_are_refused(quick, said, tmp_path, capsys):
    run = Reproduction.start(tmp_path / "r", "gdp-adult", quick=True)
    training = run.training(run.unfinished()[0])
    training.close()
    run.close()
    settings = run._request()
    del settings["quick"]
    run.folder.write_checked(run.folder.settings, settings if quick is None else settings | {"quick": quick})
    assert command(["reproduce", "--resume", str(tmp_path / "r")]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_row_that_was_begun_before_a_setting_existed_goes_on_if_the_setting_has_its_default(tmp_path):
    run = Reproduction.start(tmp_path / "r", "gdp-adult", quick=True)
    job = run.unfinished()[0]
    run.training(job).close()
    run.close()
    settings = job.folder.read_settings()
    assert settings.pop("baseline")  # which is off by default
    job.folder.write_checked(job.folder.settings, settings)
    with pytest.raises(ValueError, match="other baseline than"):
        Reproduction.resume(tmp_path / "r")
    settings["baseline"] = True
    assert settings.pop("seed") == 0
    job.folder.write_checked(job.folder.settings, settings)
    Reproduction.resume(tmp_path / "r").close()


def test_damaged_results_of_a_row_are_named(tiny, tmp_path, capsys):
    run = Reproduction.start(tmp_path / "r", "tiny-one")
    for job in run.unfinished():
        run.compute(job)
    run.close()
    job.folder.write_json(job.folder.results, {"numbers": {}})
    assert command(["reproduce", "--resume", str(tmp_path / "r")]) == 2
    assert "results.json: has no 'seconds'; the file is damaged" in " ".join(capsys.readouterr().err.split())


def test_report_says_what_is_no_run(tiny, tmp_path, capsys):
    assert command(["reproduce", "tiny-one", "--run", str(tmp_path / "r"), "--json"]) == 0
    row = tmp_path / "r" / "rows" / "first"
    other = RunFolder(tmp_path / "other")
    other.create()
    other.write_json(other.results, {"reproduce": "tiny-one"})
    for folder, said in ((row, "it is no finished training"), (other.path, "has no 'paper', 'place'")):
        capsys.readouterr()
        assert command(["report", str(folder), "--out", str(tmp_path / "o")]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("name", "delta"), [("gdp-adult", "1e-05"), ("gdp-movielens", "1e-06"), ("jl-imdb", None)])
def test_summary_says_at_which_delta_the_epsilons_are(name, delta, tmp_path):
    run = Reproduction.start(tmp_path / "r", name, skip=[] if delta else ["trained*"])
    results = {"rows": [], "quick": False, "machine": "m", "deltas": run._deltas()}
    run.close()
    assert table.summary(results).endswith(f"epsilon at delta = {delta}" if delta else "1 s on m")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["accountant-q0.01", "gdp-calibration"])
def test_quick_look_at_accounting_has_every_figure_and_number_of_the_paper(name, tmp_path, capsys):
    path = tmp_path / "r"
    assert command(["reproduce", name, "--quick", "--run", str(path), "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        numbers = row["runs"][0]["numbers"]
        for key, printed in row["paper"].items():
            if key.startswith("delta"):  # epsilon is printed with one digit, and by moments that are no bound
                assert printed < numbers[key] < 10 * printed
            else:
                assert numbers[key] == pytest.approx(printed, rel=0.02)
    assert list(path.glob("figure-*.svg"))


@pytest.mark.thorough
def test_experiment_with_a_training_ends_with_its_numbers_and_a_page(tmp_path, capsys):
    path = tmp_path / "r"
    assert command(["reproduce", "gdp-adult", "--quick", "--run", str(path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    numbers = results["rows"][0]["runs"][0]["numbers"]
    inner = json.loads((path / "rows" / "noisysgd-seed-0" / "results.json").read_text())
    assert numbers["score"] == inner["test_score"]
    assert numbers["epsilon"] == inner["privacy"]["epsilon"]
    assert 0.7 < results["rows"][1]["runs"][0]["numbers"]["score"] < 1
    assert (path / "report.html").read_text().count("<svg") == 4  # the training's course beside the table
    assert command(["report", str(path), str(path / "rows" / "noisysgd-seed-0"), "--out", str(tmp_path / "o")]) == 0
    page = (tmp_path / "o").read_text()
    assert page.count("<svg") == 4
    assert all(f"<td>{name}</td>" in page for name in ("NoisySGD", "noisysgd-seed-0"))


def test_row_without_a_package_has_no_number_and_says_why(tiny, tmp_path, capsys, monkeypatch):
    def rows(quick):
        return [
            Computation("by hand", lambda context: {"value": 1.0}),
            Computation("first", lambda context: {"value": None}, needs="some-package"),
            Computation("second", lambda context: {"value": None}, needs="some-package"),
            Computation("third", lambda context: {"value": 2.0}, needs="some-package"),
        ]

    study = replace(load_study("tiny-one"), rows=rows)
    monkeypatch.setitem(sys.modules, "torch_privacy_papers.tiny_one", SimpleNamespace(STUDY=study))
    assert command(["reproduce", "tiny-one", "--run", str(tmp_path / "r"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["notes"]
    assert said[1:] == [
        "Without numbers: first, second. They need some-package, which is not installed: pip install some-package."
    ]


@pytest.mark.parametrize("module", ["abadi2016.mnist", "bu2020.adult", "bu2020.movielens"])
def test_rows_that_lack_scikit_learn_say_so(module, monkeypatch):
    """A row that returns no number without scikit-learn must say that it needs it."""
    study = import_module(f"torch_privacy_papers.{module}").STUDY
    users = [row for row in study.rows(False) if isinstance(row, Computation) and row.name in OTHER_METHODS]
    assert all(row.needs == "scikit-learn" for row in users)
    assert bool(users) == module.startswith("bu2020")


@pytest.mark.parametrize("name", ["abadi-mnist", "abadi-pca"])
def test_experiment_without_scikit_learn_ends_in_a_sentence(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "torch_privacy.training.pca", raising=False)
    monkeypatch.delitem(vars(torch_privacy), "PrivatePCA", raising=False)
    part = TensorDataset(torch.rand(200, 1, 28, 28), torch.zeros(200, dtype=torch.int64))
    data = Data("MNIST", part, part, tuple(range(10)), "none", {})
    monkeypatch.setattr("torch_privacy_papers.abadi2016.mnist.load_mnist", lambda folder: data)
    assert command(["reproduce", name, "--quick", "--run", str(tmp_path / "r")]) == 2
    assert capsys.readouterr().err == (
        "torch-privacy: PrivatePCA needs scikit-learn. Install it with: pip install 'torch-privacy[sklearn]'.\n"
    )
    assert not (tmp_path / "r").exists()


def test_error_of_a_package_that_is_no_extra_is_not_hidden(tiny, tmp_path, monkeypatch):
    def fails(context):
        raise ImportError("cannot import name 'x'")

    study = replace(load_study("tiny-one"), rows=lambda quick: [Computation("first", fails)])
    monkeypatch.setitem(sys.modules, "torch_privacy_papers.tiny_one", SimpleNamespace(STUDY=study))
    with pytest.raises(ImportError, match="cannot import name 'x'"):
        command(["reproduce", "tiny-one", "--run", str(tmp_path / "r")])


def test_results_of_ones_own_data_have_its_name_and_no_numbers_of_the_paper(tiny, tmp_path, capsys, monkeypatch):
    study = replace(load_study("tiny-one"), own_data=lambda folder: None if folder is None else "fashion")
    monkeypatch.setitem(sys.modules, "torch_privacy_papers.tiny_one", SimpleNamespace(STUDY=study))
    shown = {}
    for name, options in (("paper", []), ("own", ["--data", str(tmp_path)])):
        assert command(["reproduce", "tiny-one", "--run", str(tmp_path / name), "--json", *options]) == 0
        shown[name] = json.loads(capsys.readouterr().out)
    assert [row["paper"] for row in shown["paper"]["rows"]] == [{"value": 3.14}, {}]
    assert [row["paper"] for row in shown["own"]["rows"]] == [{}, {}]
    assert "own_data" not in shown["paper"]
    assert shown["own"]["own_data"] == "fashion"
    assert shown["own"]["shows"] == "fashion, data of your own"
    assert shown["own"]["notes"][0].startswith("The data are fashion, of your own")
    page = (tmp_path / "own" / "report.html").read_text()
    assert "Fashion, data of your own" in page
    assert "3.1" not in page.split("<h2>")[1].split("<svg")[0].replace("report", "")


def test_gap_is_the_last_training_score_minus_the_test_score():
    bounds = {"epsilon": {"low": 0.9, "high": 1.0}, "clt": {"mu": 1.0, "epsilon": 1.0}}
    results = {
        "privacy": {**bounds, "moments_accountant": {"epsilon": 2.0}},
        "test_score": 0.9,
        "baseline_test_score": 0.95,
    }

    def row(training, train_score, test_score):
        return Metrics(training, 1.0, 1, 0.5, train_score, test_score)

    rows = [row("private", 0.5, 0.6), row("private", 0.92, 0.9), row("non-private", 1.0, 0.95)]
    numbers = training_numbers(results, rows)
    assert (numbers["gap"], numbers["baseline_gap"]) == pytest.approx((0.02, 0.05))
    assert training_numbers(results, rows[:2])["baseline_gap"] is None
    assert training_numbers(results, [row("private", None, 0.9)])["gap"] is None


def test_cell_shows_mean_and_deviation_on_the_safe_side():
    assert table.cell([1.0, 2.0, 3.0], TableColumn("x", digits=2)) == "2.00 ± 1.00"
    assert table.cell([2.0, 2.0], TableColumn("x", digits=2)) == "2.00"
    assert (
        table.cell([{"low": 0.5, "high": 0.5001}, {"low": 0.4901, "high": 0.5}], TableColumn("x")) == "[0.490, 0.501]"
    )
    assert table.cell([{"low": 0.12345, "high": 0.12346}], TableColumn("x", digits=1, percent=True)) == "[12.3, 12.4] %"
    assert table.cell([{"low": 1.234e-6, "high": 1.234e-6}], TableColumn("x", scientific=True)) == "[1.23e-6, 1.24e-6]"
    assert table.cell([None, None], TableColumn("x")) == "-"


def test_markdown_has_a_line_for_ours_and_one_for_the_paper(tiny, tmp_path):
    assert command(["reproduce", "tiny-one", "--run", str(tmp_path / "r"), "--json"]) == 0
    lines = table.markdown(json.loads((tmp_path / "r" / "results.json").read_text())).splitlines()
    assert lines[0] == "|  |  | value | share | bracket |"
    assert lines[2:] == [
        "| first | ours | 3.0 | 50.0 % | [0.123, 0.124] |",
        "|  | paper | 3.1 | - | - |",
        "| second row | ours | 3.0 | 50.0 % | [0.123, 0.124] |",
    ]
