# SPDX-License-Identifier: Apache-2.0
"""What a training in a loop of one's own leaves in its run folder, whenever it ends and however it goes on."""

import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import json_schema
import pytest
import safetensors.torch
import torch
from fixed_state import fixed_state
from run_folders import drawn_quickly
from torch import nn
from torch.utils.data import TensorDataset
from trainings import ZERO_OUT, cross_entropy, data, network, parameters_of, train, training_of

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import MOST_ROWS, Log
from torch_privacy.runs.reading import sha256
from torch_privacy.runs.report import render as report
from torch_privacy.runs.report import training_plots
from torch_privacy.runs.report.render import render
from torch_privacy.support.write_file import write_whole
from torch_privacy.training import run_files, run_writer

FILES = [
    "fingerprint.key", "ledger.jsonl", "metrics.csv", "model.safetensors", "privacy.json", "report.html",
    "results.json", "settings.json",
]  # fmt: skip
STEPS = 12  # two epochs of five steps, and two fifths of one


def new(folder, **settings):
    return training_of(run_folder=folder, **{"num_steps": STEPS, "delta": 1e-3} | settings)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def results_in(folder):
    found = RunFolder(folder)
    results = found.read_results()
    for read in (found.read_settings, found.read_statement, found.read_metrics):
        read(results["files"])
    assert json_schema.violations(privacy.statement_schema(), found.read_statement()) == []
    return results


def rows_in(folder):
    return RunFolder(folder).read_metrics()


def page_of(folder):
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", render([RunFolder(folder)]).replace("\u00a0", " ")))


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Draws no page but where a test asks for one: drawing takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "render", lambda folders: "a page")
        patch.setattr(training_plots, "as_svg", drawn_quickly)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a training to its end, the training, and the losses of each of its steps."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    with fixed_state("finished", None):
        return folder, *trained(folder)


def trained(folder):
    training, losses = new(folder), {}
    assert names_in(folder) == ["ledger.jsonl", "settings.json"]
    for x, y in training:
        own = cross_entropy(training.model, x, y)
        step = training.step_count
        training.step(own)
        if not training.rehearsing:
            losses.setdefault(step, []).extend(own.tolist())
    return training, losses


def test_results_have_nothing_of_one_example(tmp_path):
    """They said that the loss of an epoch was infinite, and their digest of the losses confirmed a guess of these."""
    (tmp_path / "again").mkdir()
    training = new(tmp_path / "run")
    for x, y in training:
        training.step(cross_entropy(training.model, x, y) + math.inf)  # the gradient is that of before
    assert not any(math.isfinite(row.loss) for row in rows_in(tmp_path / "run"))
    assert results_in(tmp_path / "run")["diverged"] is False
    RunFolder(tmp_path / "again").write_metrics(rows_in(tmp_path / "run"))  # as who has guessed the losses may do
    assert sha256(tmp_path / "again/metrics.csv") != results_in(tmp_path / "run")["files"]["metrics.csv"]


def test_weights_that_have_diverged_are_in_the_results(tmp_path):
    training = new(tmp_path, num_steps=2, optimizer=None)
    training.optimizer.param_groups[0]["lr"] = 1e9
    train(training)
    assert results_in(tmp_path)["diverged"] is True


def test_the_loop_writes_every_file_after_its_last_step(finished):
    folder, training, _ = finished
    assert names_in(folder) == FILES
    results = results_in(folder)
    assert set(results["files"]) == set(FILES) - {"fingerprint.key", "report.html", "results.json"}
    assert (results["num_steps"], results["num_steps_made"], results["scores"]) == (STEPS, STEPS, {})
    assert results["diverged"] is False
    assert results["privacy"]["epsilon"]["high"] == training.spent().epsilon.high
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in training.model.state_dict().items())
    settings = RunFolder(folder).read_settings()
    shown = {name: settings[name] for name in ("model", "num_trained_parameters", "optimizer", "dataset", "clipping")}
    assert shown == {
        "model": "Sequential",
        "num_trained_parameters": 26,
        "optimizer": "SGD",
        "dataset": "TensorDataset",
        "clipping": "Flat(clip_norm=0.5)",
    }
    assert "lr=1.0" in settings["optimizer_settings"]


def test_metrics_are_the_mean_losses_of_each_epoch_and_the_epsilon_so_far(finished):
    folder, _, losses = finished
    rows = rows_in(folder)
    assert [(row.epoch, row.step) for row in rows] == [(1.0, 5), (2.0, 10), (2.4, 12)]
    for row, steps in zip(rows, (range(5), range(5, 10), range(10, 12)), strict=True):
        of_epoch = [loss for step in steps for loss in losses.get(step, [])]
        assert row.loss == pytest.approx(sum(of_epoch) / len(of_epoch), rel=1e-6)
        profile = privacy.compose([(privacy.SubsampledGaussian(1.0, 8 / 40, ZERO_OUT), row.step)])
        assert (row.epsilon_low, row.epsilon_high) == tuple(profile.epsilon(1e-3))
        assert row.train_score is row.test_score is None


@pytest.mark.parametrize(
    "settings",
    [
        {"performance": tp.Performance(microbatch_size=3, memory_budget=100.0)},
        {"performance": tp.Performance(memory_budget=100.0), "examples": {"views": 2}},
    ],
)
def test_losses_do_not_depend_on_how_a_batch_is_computed(finished, tmp_path, settings):
    training = new(tmp_path / "run", **settings)
    for x, y in training:
        losses = cross_entropy(training.model, x, y)
        training.step(losses.view(-1, 2) if "examples" in settings else losses)
    found = [row.loss for row in rows_in(tmp_path / "run")]
    assert found == pytest.approx([row.loss for row in rows_in(finished[0])], rel=1e-5)


@pytest.mark.thorough
def test_batches_without_examples_and_losses_that_are_not_finite(tmp_path):
    training = new(tmp_path / "empty", expected_batch_size=0.01, num_steps=3)
    assert train(training) == []
    (row,) = rows_in(tmp_path / "empty")
    assert (row.step, row.epoch, row.loss) == (3, 0.00075, None)
    assert "no finite loss" in page_of(tmp_path / "empty")
    log = Log(10, 2.0)
    for count, total in ((8, 4.0), (0, 0.0)):
        log.add_sums(10, count, total)
        log.end_epoch(5 * len(log.rows) + 5, 0.1, math.inf)
    assert log.rows[0].loss == 0.5
    assert math.isnan(log.rows[1].loss)
    again = Log(10, 2.0)
    again.load_state_dict(json.loads(json.dumps(log.state_dict(), allow_nan=False)))
    assert repr(again.rows) == repr(log.rows)


@pytest.mark.parametrize(("num_steps", "epochs"), [(12, 2.4), (7, 7.0), (5, 0.3), (100, 9.43), (4000, 4000.0)])
def test_every_epoch_has_a_row_and_so_has_the_last_step(num_steps, epochs):
    log = Log(num_steps, epochs)
    for step in range(1, num_steps + 1):
        log.add_sums(1, 1.0, 0.5)
        if log.is_due(step):
            log.end_epoch(step)
    stride = math.ceil(epochs / MOST_ROWS)
    assert [row.epoch for row in log.rows] == pytest.approx(
        [stride * k for k in range(1, int(epochs / stride) + 1)] + [epochs] * (epochs % stride > 0)
    )
    assert log.rows[-1].step == num_steps
    assert log.rows[0].step == round(min(stride / epochs, 1) * num_steps)


def test_page_of_a_training_without_scores_says_what_it_means(finished):
    folder, training, _ = finished
    page = page_of(folder)
    assert "not finite" not in page
    assert "Private training: mine" not in page  # a test seed
    for words in (
        "NOT PRIVATE: mine", "What this means for one person", "protects nobody", "What was not protected",
        "These are exact means over the training data", "the training losses in metrics.csv", "Sequential",
        "what was treated as public: num_examples", "one item of the dataset", "fingerprint of the data",
    ):  # fmt: skip
        assert words in page
    assert f"{training.spent().epsilon.high:.2f}"[:-1] in page


def test_scores_are_added_and_what_is_no_score_is_refused(tmp_path):
    training = new(tmp_path, num_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "render", render)
        train(training)
    assert "not finite" not in (tmp_path / "report.html").read_text()
    training.write_run(
        {"accuracy": torch.tensor(0.84), "loss": 0.412, "f1": math.nan},
        baseline={"accuracy": 0.9},
        num_test_examples=50,
    )
    results = results_in(tmp_path)
    assert results["scores"] == {"accuracy": pytest.approx(0.84), "loss": 0.412, "f1": None}
    assert results["baseline_scores"] == {"accuracy": 0.9}
    page = page_of(tmp_path)
    for words in (
        "84.0 % test accuracy", "0.412 test loss", "not finite test f1", "84.00 % of 50 held-out examples",
        "test accuracy, same network, not private 90.00 %", "DIVERGED",
    ):  # fmt: skip
        assert words in page
    for wrong in ({"accuracy": "0.84"}, {3: 0.5}, {"": 0.5}, {"loss": True}, {"loss": None}, {"loss": 1e31}):
        with pytest.raises(ValueError, match="must be numbers by name"):
            training.write_run(wrong)
    with pytest.raises(ValueError, match="num_test_examples"):
        training.write_run({}, num_test_examples=2.5)
    assert results_in(tmp_path)["scores"] == results["scores"]
    training.write_run()
    assert results_in(tmp_path)["scores"] == {}


@pytest.mark.thorough
def test_a_training_that_stops_early_is_unfinished_until_it_is_written(tmp_path):
    training = new(tmp_path)
    with pytest.raises(ValueError, match="no step was made yet"):
        training.write_run()
    train(training, steps=7)
    assert names_in(tmp_path) == ["ledger.jsonl", "settings.json"]
    with pytest.raises(ValueError, match="this training is unfinished"):
        RunFolder(tmp_path).read_results()
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "ledger.jsonl").touch()
    with pytest.raises(ValueError, match=r"a run ended here before its first step\. Leave it out"):
        RunFolder(tmp_path / "before").read_results()
    training.write_run({"accuracy": 0.5})
    results = results_in(tmp_path)
    assert results["num_steps_made"] == 7
    assert results["privacy"]["epsilon"]["high"] == training.spent().planned.high > training.spent().epsilon.high
    assert [row.step for row in rows_in(tmp_path)] == [5, 7]
    assert "ended after 7 of 12 steps. Epsilon and the numbers below count all planned steps" in page_of(tmp_path)
    training.declare_stop("the machine was needed")
    training.write_run()
    assert results_in(tmp_path)["privacy"]["epsilon"]["high"] == training.spent().epsilon.high
    assert "independent of the data: the machine was needed" in page_of(tmp_path)
    train(training, steps=8)
    assert not RunFolder(tmp_path).is_complete
    train(training)
    assert results_in(tmp_path)["num_steps_made"] == STEPS


def test_a_training_that_its_budget_stops_is_written(tmp_path):
    allowed = privacy.compose([(privacy.SubsampledGaussian(1.0, 8 / 40, ZERO_OUT), 4)]).epsilon_high(1e-3)
    training = new(tmp_path, examples={"budget": privacy.Budget(allowed, 1e-3)})
    train(training)
    results = results_in(tmp_path)
    assert (results["num_steps_made"], results["privacy"]["num_steps"]) == (4, 4)
    assert "when its privacy budget was spent" in page_of(tmp_path)


def test_a_statement_with_a_release_that_has_no_price_is_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "copy")
    copied = RunFolder(tmp_path / "copy")
    content = copied.read_statement()
    for event, count in (({"noise_multiplier": -1.0}, 12), ({"sampling_probability": True}, 12), ({}, -12)):
        release = {**content["releases"][0], "count": count}
        release["event"] = {**release["event"], **event}
        copied.privacy.write_text(json.dumps(content | {"releases": [release]}))
        with pytest.raises(ValueError, match=r"cannot be priced|releases\[0\]"):
            copied.read_statement()


def test_a_resumed_training_writes_what_an_undisturbed_one_writes(finished, tmp_path):
    first = new(tmp_path)
    train(first, steps=3)
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    model = {name: value.clone() for name, value in first.model.state_dict().items()}
    train(first, steps=8)  # five steps after the checkpoint, which are made again, with the end of an epoch
    del first
    again = new(tmp_path)
    again.load_state_dict(state)
    again.model.load_state_dict(model)
    train(again)
    assert (tmp_path / "model.safetensors").read_bytes() == (finished[0] / "model.safetensors").read_bytes()
    assert rows_in(tmp_path) == rows_in(finished[0])
    results = results_in(tmp_path)
    assert results["privacy"] == results_in(finished[0])["privacy"]
    last = new(tmp_path)  # a script that is started once more
    last.load_state_dict(again.state_dict())
    before = (tmp_path / "results.json").read_bytes()
    train(last)
    assert (tmp_path / "results.json").read_bytes() == before


def test_losses_of_a_state_are_checked(tmp_path):
    training = new(tmp_path)
    state = training.state_dict()
    for wrong in ({}, {**state["losses"], "rows": [{}]}, {**state["losses"], "loss_sum": "much"}):
        with pytest.raises(tp.Refused, match="losses"):
            training.load_state_dict(state | {"losses": wrong})
    del state["losses"]
    training.load_state_dict(state)  # of a training without a folder


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"expected_batch_size": 9}, r"expected_batch_size: 9 here, 8 there"),
        ({"noise_multiplier": 1.5, "num_steps": 9}, r"num_steps: 9 here, 12 there; noise_multiplier: 1\.5 here"),
        ({"model": nn.Linear(3, 2)}, r"parameters: "),
    ],
)
def test_a_training_with_other_settings_is_refused_in_a_folder_with_steps(tmp_path, changed, words):
    unused = new(tmp_path, noise_multiplier=2.0)  # no step: the folder is free
    del unused
    train(new(tmp_path), steps=2)
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    with pytest.raises(tp.Refused, match=words):
        new(tmp_path, **changed)
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before
    new(
        tmp_path, optimizer=None, performance=tp.Performance(microbatch_size=4)
    )  # what releases do not depend on may change


def test_a_second_training_leaves_a_finished_folder_as_it_is(tmp_path):
    train(new(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    model = network()
    again = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.5), data(), expected_batch_size=8, num_steps=STEPS,
        clipping=tp.Flat(0.5), noise_multiplier=1.0, run_folder=tmp_path,
    )  # fmt: skip
    with pytest.raises(tp.Refused, match="step 0 was SubsampledGaussian"):
        train(again)
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before


def test_folders_that_belong_to_others_are_refused(tmp_path):
    for name, content in (("settings.json", {"experiment": "adult"}), ("settings.json", []), ("metrics.csv", "a,b")):
        folder = tmp_path / f"{name}{len(str(content))}"
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(tp.Refused, match=name) as refused:
            new(folder)
        assert "new folder" in str(refused.value)
        assert names_in(folder) == [name]
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        new(tmp_path / "file")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    new(tmp_path / "notes")  # other files do not matter


def test_a_training_whose_folder_was_taken_over_writes_nothing(tmp_path):
    first = new(tmp_path)
    train(first, steps=3)
    second = new(tmp_path)
    with pytest.raises(tp.Refused, match="opened anew in this process"):
        first.write_run()
    second.ledger.close()


def test_nothing_is_written_within_a_step(tmp_path):
    training = new(tmp_path, performance=tp.Performance(microbatch_size=3))
    refused = 0
    for x, y in training:
        with pytest.raises(tp.Refused, match="a step is in progress"):
            training.write_run()
        if training.step(cross_entropy(training.model, x, y)):
            training.write_run()
            break
        if not training.rehearsing:
            refused += 1
            with pytest.raises(tp.Refused, match="a step is in progress"):
                training.write_run()
    assert refused


def test_average_and_no_other_model_may_be_written(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = tp.MovingAverage(model, optimizer, 0.9)
    training = new(tmp_path, model=model, optimizer=optimizer, num_steps=4)
    train(training)
    training.write_run(model=average.model)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(p, weights[name]) for name, p in average.model.named_parameters())
    assert not torch.equal(weights["0.weight"], model[0].weight)
    with pytest.raises(ValueError, match=r"model=Linear has no '0.weight'"):
        training.write_run(model=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no run folder"):
        training_of().write_run()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(torch.tanh(self.into(x)))


def test_tied_weights_are_stored_once_and_load(tmp_path):
    model = Tied()
    train(new(tmp_path, model=model, num_steps=2))
    file = tmp_path / "model.safetensors"
    assert set(safetensors.torch.load_file(file)) == {"into.weight", "into.bias", "out.bias"}
    loaded = Tied()
    assert safetensors.torch.load_model(loaded, file) == (set(), [])
    assert torch.equal(loaded.out.weight, model.out.weight)
    assert loaded.out.weight is loaded.into.weight


def test_statement_says_when_what_with_and_what_is_not_covered(finished):
    folder, training, _ = finished
    statement = RunFolder(folder).read_statement()
    age = datetime.now(UTC) - datetime.fromisoformat(statement["date"])
    assert 0 <= age.total_seconds() < 600
    assert statement["unit"] == "one item of the dataset"
    assert statement["num_examples"] == 40
    assert "the training losses in metrics.csv" in " ".join(statement["not_covered"])
    assert set(statement["versions"]) >= {"torch_privacy", "torch", "numpy", "python"}
    assert tp.matches_fingerprint(statement, data(), folder / "fingerprint.key")
    assert tp.matches_fingerprint(folder / "privacy.json", data(), str(folder / "fingerprint.key"))
    x, y = data().tensors
    changed = x.clone()
    changed[7, 1] += 1e-6
    assert not tp.matches_fingerprint(statement, TensorDataset(changed, y), folder / "fingerprint.key")
    assert training.statement()["data"] == statement["data"]
    assert "data" not in training_of().statement()


def test_only_the_owner_reads_the_key_and_no_file_has_a_key_of_the_noise(finished):
    folder, training, _ = finished
    assert stat.S_IMODE((folder / "fingerprint.key").stat().st_mode) == 0o600
    state = training.state_dict()
    keys = [state["noise_key"], state["sampler_key"]]
    own = (folder / "fingerprint.key").read_text().strip()
    for path in folder.iterdir():
        content = path.read_bytes()
        for key in keys:
            assert key.encode() not in content
            assert bytes.fromhex(key) not in content
        assert path.name == "fingerprint.key" or own.encode() not in content


def test_key_of_the_fingerprint_stays_and_a_damaged_one_is_refused(tmp_path):
    training = new(tmp_path, num_steps=2)
    train(training)
    key = (tmp_path / "fingerprint.key").read_bytes()
    found = RunFolder(tmp_path).read_statement()["data"]
    training.write_run({"accuracy": 0.5})
    assert (tmp_path / "fingerprint.key").read_bytes() == key
    assert RunFolder(tmp_path).read_statement()["data"] == found
    again = new(tmp_path, num_steps=2)
    again.load_state_dict(training.state_dict())
    (tmp_path / "fingerprint.key").write_text("no key")
    with pytest.raises(ValueError, match=r"fingerprint\.key: cannot be read"):
        again.write_run()
    (tmp_path / "fingerprint.key").unlink()
    again.write_run()
    assert RunFolder(tmp_path).read_statement()["data"]["key_id"] != found["key_id"]


def test_the_model_is_on_disk_when_a_later_file_cannot_be_written(tmp_path, monkeypatch):
    training = new(tmp_path, num_steps=2)

    def full(path, save, mode=0o644):
        if path.name == "privacy.json":
            raise OSError(28, "No space left on device", str(path))
        write_whole(path, save, mode)

    monkeypatch.setattr("torch_privacy.runs.folder.write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        train(training)
    assert (tmp_path / "model.safetensors").exists()
    assert not RunFolder(tmp_path).is_complete
    monkeypatch.undo()
    training.write_run()
    assert results_in(tmp_path)["num_steps_made"] == 2


@pytest.mark.filterwarnings("ignore:delta=")
def test_without_a_delta_the_page_takes_a_tenth_of_one_over_n(tmp_path):
    train(new(tmp_path, delta=None, num_steps=2))
    stated = results_in(tmp_path)["privacy"]
    assert stated["delta"] == 0.0025
    profile = privacy.compose([(privacy.SubsampledGaussian(1.0, 8 / 40, ZERO_OUT), 2)])
    assert stated["epsilon"]["high"] == profile.epsilon(0.0025).high
    assert RunFolder(tmp_path).read_statement()["epsilon"] is None
    assert [run_files._delta_for(n) for n in (1, 512, 1000, 60_000)] == [0.1, 1.9e-4, 1e-4, 1.6e-6]


def test_a_training_whose_folder_somebody_else_writes_keeps_only_the_ledger_there(tmp_path):
    training = new(RunFolder(tmp_path), num_steps=2)
    train(training)
    assert os.listdir(tmp_path) == ["ledger.jsonl"]
    with pytest.raises(ValueError, match="no run folder"):
        training.write_run()


@pytest.mark.thorough
def test_an_adaptive_rule_and_prior_releases_are_priced(tmp_path):
    prior = [privacy.Release(privacy.Gaussian(5.0), "an earlier one")]
    settings = {"num_steps": 3, "clipping": tp.Adaptive(0.5, count_noise_stddev=5.0), "prior_releases": prior}
    training = new(tmp_path, **settings)
    train(training)
    stated = results_in(tmp_path)["privacy"]
    assert stated["num_steps"] == 4
    assert stated["epsilon"]["high"] == training.spent().epsilon.high
    assert "Gaussian(noise_multiplier=5.0)" in page_of(tmp_path)
    again = new(tmp_path, **settings)
    again.load_state_dict(training.state_dict())
    assert torch.isfinite(parameters_of(again)).all()


# After the last step: nothing that fails there costs the run


def test_a_page_that_cannot_be_made_is_named_and_the_rest_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "render", lambda folders: 1 / 0)
    training = new(tmp_path)
    with pytest.warns(UserWarning, match=r"could not be made \(ZeroDivisionError: .*torch-privacy report .*--out"):
        train(training)
    monkeypatch.undo()
    assert results_in(tmp_path)["num_steps_made"] == STEPS
    assert {"model.safetensors", "privacy.json", "metrics.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "report.html").exists()
    assert "<svg" in render([RunFolder(tmp_path)])


@pytest.mark.parametrize("reader", ["the training", "the command"])
def test_a_run_that_was_killed_before_its_page_gets_it_from_the_next_reader(tmp_path, reader):
    training = new(tmp_path, num_steps=2)
    train(training)
    training.write_run({"accuracy": 0.5})
    state = training.state_dict()
    training.ledger.close()
    (tmp_path / "report.html").unlink()
    if reader == "the training":
        resumed = new(tmp_path, num_steps=2)
        resumed.load_state_dict(state)
        train(resumed)
    else:
        assert run(["report", str(tmp_path), "--out", str(tmp_path / "other.html")]) == 0
    assert "accuracy" in page_of(tmp_path)
    assert results_in(tmp_path)["scores"] == {"accuracy": 0.5}


def test_the_model_is_written_before_what_may_fail(tmp_path, monkeypatch):
    training = new(tmp_path)
    monkeypatch.setattr(run_files.RunFiles, "rows", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(training)
    assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == set(training.model.state_dict())


def test_a_callback_that_fails_at_the_end_does_not_cost_the_run(tmp_path):
    class Failing(tp.Callback):
        def at_end(self, training):
            raise OSError("the logs' disk is full")

    with pytest.raises(OSError, match="the logs' disk is full"):
        train(new(tmp_path, callbacks=[Failing()]))
    assert results_in(tmp_path)["num_steps_made"] == STEPS
    assert (tmp_path / "report.html").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no such backend"])
def test_a_backend_that_is_not_installed_does_not_keep_matplotlib_out(backend):
    code = (
        "import os, runpy, sys; runpy.run_path(sys.argv[1]); from matplotlib.figure import Figure; "
        "Figure().savefig(os.devnull, format='svg'); print(os.environ['MPLBACKEND'])"
    )
    call = [sys.executable, "-c", code, str(Path(report.__file__).with_name("__init__.py"))]
    environment = os.environ | {"MPLBACKEND": backend}
    assert subprocess.run(call, env=environment, capture_output=True, text=True).stdout == f"{backend}\n"


def test_a_page_that_cannot_be_drawn_is_noticed_before_the_first_step_and_costs_nothing_else(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("no fonts")

    monkeypatch.setattr(run_writer, "_draw_nothing", broken)
    monkeypatch.setattr(report, "render", broken)
    with pytest.warns(UserWarning, match=r"no report, because nothing can be drawn here \(OSError: no fonts\)"):
        training = new(tmp_path)
    assert training.step_count == 0
    with pytest.warns(UserWarning, match="the report could not be made"):
        train(training)
    names = ("model.safetensors", "metrics.csv", "privacy.json", "results.json", "ledger.jsonl")
    assert all((tmp_path / name).exists() for name in names)
    monkeypatch.undo()
    assert run(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0


def test_a_backend_that_is_installed_stays_the_one_that_was_named():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); import matplotlib; print(matplotlib.rcParams['backend'])"
    call = [sys.executable, "-c", code, str(Path(report.__file__).with_name("__init__.py"))]
    found = subprocess.run(call, env=os.environ | {"MPLBACKEND": "svg"}, capture_output=True, text=True)
    assert found.stdout == "svg\n"
