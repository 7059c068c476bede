# SPDX-License-Identifier: Apache-2.0
"""The page and the model card of a training: what they say to readers who are no engineers, and to programs."""

import json
import math
import re

import pytest
from huggingface_hub import ModelCard
from run_folders import EVENTS, ROWS, Links, drawn_quickly, write_ledger, write_own, write_run

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.privacy.rounding import round_up
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Metrics
from torch_privacy.runs.report import training_plots
from torch_privacy.runs.report.render import render
from torch_privacy.runs.report.training_plots import NOT_PRIVATE

PROFILE = privacy.compose(equal_releases(*EVENTS))


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Draws no figure but where a test is about them."""
    if "shows_the_loss" not in request.node.name:
        monkeypatch.setattr(training_plots, "as_svg", drawn_quickly)


def text_of(page):
    parsed = Links()
    parsed.feed(page[page.index("<h1>") :])
    return re.sub(r"\s+", " ", parsed.text.replace("\u00a0", " "))


@pytest.mark.parametrize("own", [True, False])
def test_page_tells_one_person_what_is_certified(tmp_path, own):
    folder = write_own(tmp_path / "run") if own else write_run(RunFolder(tmp_path))
    page = text_of(render([folder]))
    assert "What this means for one person" in page
    assert "The model was trained on 1,000 examples. Protected is one example" in page
    for rate, digits in {0.0001: 3, 0.001: 3, 0.01: 1, 0.05: 1, 0.1: 1, 0.5: 1}.items():
        most = round_up(100 * PROFILE.true_positive_rate(rate).high, digits)
        assert f"{100 * rate:g} %{100 * rate:g} %at most {most} %" in page
    chance = round_up(50 * (1 + PROFILE.advantage().high), 1)
    assert f"the best guess is right in at most {chance} % of the cases. Without the model it is right in 50 %" in page
    assert "Somebody with several examples in the data is protected less" in page
    assert "What was not protected" in page
    assert "what <nobody> promised" in page
    assert "secret files of the training" in page


def test_page_names_the_unit_of_the_statement(tmp_path):
    unit = "one customer, at most 5 rows"
    page = text_of(render([write_own(tmp_path / "run", statement={"unit": unit})]))
    assert f"Protected is {unit}" in page
    assert f"knows all the data but {unit}" in page
    assert "several examples" not in page
    assert f"unit of privacy{unit}" in page


def test_page_says_what_was_public_assumed_and_not_compared(tmp_path):
    independence = {"shown_by": "assumption", "assumed_because": "rows are people", "not_compared": ["the order"]}
    statement = {"treated_as_public": ["hyper-parameters"], "independence": independence, "date": "2026-01-02T03:04:05"}
    page = text_of(render([write_own(tmp_path / "run", statement=statement)]))
    for words in (
        "what was treated as public: hyper-parameters", "assumed that they do not (rows are people)",
        "what rehearsals could not compare: the order", "date2026-01-02T03:04:05", "cd" * 32, "10 of 1,000 examples",
    ):  # fmt: skip
        assert words in page


def test_page_of_what_is_not_private_promises_nothing(tmp_path):
    folder = write_own(tmp_path / "run", statement={"private": False, "warning": "NOT PRIVATE (a test)"})
    page = text_of(render([folder]))
    assert page.startswith("Training, NOT PRIVATE: run")
    assert "This training protects nobody: NOT PRIVATE (a test)" in page
    assert "Protected is" not in page
    card = tp.model_card(folder.path)
    assert "**not private**" in card
    assert "> **NOT PRIVATE (a test)**" in card
    assert "differential-privacy" not in ModelCard(card).data.to_dict()["tags"]
    assert "Protected is" not in card


@pytest.mark.thorough
def test_page_without_scores_shows_the_loss_and_its_warning(tmp_path):
    page = render([write_own(tmp_path / "run")])
    assert page.count("<svg ") == 4
    assert "Training loss (not private)" in page
    assert "These are exact means over the training data" in page
    assert "test accuracy" not in text_of(page)
    assert "not finite" not in text_of(page)


def test_page_of_a_training_that_diverged_or_drew_no_example_can_be_drawn(tmp_path):
    rows = [Metrics("private", 0.5, 50, None), Metrics("private", 1.0, 100, math.nan, None, None, 1.2, math.inf)]
    page = text_of(render([write_own(tmp_path / "run", rows, diverged=True, scores={"loss": None})]))
    assert "no finite loss" in page
    assert "DIVERGED" in page
    assert "not finite" in page


def test_page_is_made_for_paper_and_fetches_nothing(tmp_path):
    page = render([write_own(tmp_path / "run", scores={"<script>": 0.5})])
    style = page[page.index("@media print") :]
    for rule in ("break-inside: avoid", "--paper: #ffffff", "break-after: avoid", "max-width: none"):
        assert rule in style[: style.index("</style>")]
    assert "@page { size: A4;" in page
    parsed = Links()
    parsed.feed(page)
    assert not {"script", "link", "img", "iframe"} & parsed.tags
    assert not re.search(r"url\((?!#)|@import", page)


def test_runs_of_all_kinds_share_a_page(tmp_path):
    folders = [
        write_run(RunFolder(tmp_path / "one")) if name == "one" else write_own(tmp_path / name, scores={"AUC": 0.7})
        for name in ("two", "one", "three")
        if (tmp_path / name).mkdir() is None
    ]
    page = render(folders)
    assert page.count("<svg ") == 5  # losses, scores, epsilons, trade-offs, profiles
    text = text_of(page)
    for words in ("AUC 0.700", "accuracy 81.0 %", "two", "three"):
        assert words in text


def test_hostile_run_folders_are_refused_in_words(tmp_path):
    def damaged(words, change):
        path = tmp_path / re.sub("[^a-z]", "", words)
        folder = write_own(path)
        change(folder)
        with pytest.raises(ValueError, match=words) as refused:
            render([folder])
        assert str(path) in str(refused.value)

    def results_with(**changed):
        def change(folder):
            content = json.loads(folder.results.read_text())
            files = content.pop("files")
            del content["check"]
            folder.write_checked(folder.results, content | changed)
            again = json.loads(folder.results.read_text())
            del again["check"]
            folder.write_checked(folder.results, again | {"files": files})

        return change

    damaged("scores", results_with(scores={"a": "b"}))
    damaged("scores.a is 1e[+]31", results_with(scores={"a": 1e31}))
    damaged("num_steps_made is 0", results_with(num_steps_made=0))
    damaged("unknown entry 'more'", results_with(more=1))
    damaged("its digest is not that", lambda folder: folder.metrics.write_text("x"))
    damaged("its digest is not that in", lambda folder: folder.write_json(folder.settings, {}))
    damaged(
        "digest does not fit",
        lambda folder: folder.write_json(folder.results, json.loads(folder.results.read_text()) | {"num_steps": 7}),
    )
    damaged("unfinished", lambda folder: folder.results.unlink())
    (tmp_path / "of an experiment").mkdir()
    folder = write_run(RunFolder(tmp_path / "of an experiment"))
    folder.write_metrics([*ROWS, Metrics("private", 3.0, 150, 0.5)])
    with pytest.raises(ValueError, match="has no loss or no test score"):
        render([folder])


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_release_that_is_in_the_ledger_alone_is_refused(tmp_path, is_stated):
    """Whoever changes a file can compute all digests again, but then the ledger beside it says more."""
    folder = write_own(tmp_path / "run")
    made = [*equal_releases(*EVENTS), (privacy.Gaussian(0.5), 1)]
    stated = json.loads(folder.privacy.read_text())
    if is_stated:
        stated["releases"] += [{"event": privacy.event_to_dict(made[-1][0]), "count": 1}]
    write_own(tmp_path / "run", statement={"releases": stated["releases"]})
    folder.ledger.unlink()
    write_ledger(folder.ledger, made)
    content = json.loads(folder.results.read_text())
    files = [folder.path / name for name in content.pop("files")]
    folder.write_checked(folder.results, {key: content[key] for key in content if key != "check"}, *files)
    for read in (lambda: render([folder]), lambda: tp.model_card(folder.path)):
        with pytest.raises(ValueError, match=r"results.json: prices 1" if is_stated else r"privacy.json: states 100"):
            read()


@pytest.mark.parametrize("own", [True, False])
def test_model_card_is_read_by_the_hub(tmp_path, own):
    scores = {"accuracy": 0.84, "loss": 1e-05, "f1": None}
    folder = write_own(tmp_path / "run", scores=scores) if own else write_run(RunFolder(tmp_path))
    card = ModelCard(tp.model_card(folder.path))
    found = card.data.to_dict()
    assert found["tags"] == ["pytorch", "safetensors", "differential-privacy"]
    assert found["library_name"] == "pytorch"
    assert "license" not in found
    metrics = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert metrics == ({"accuracy": 0.84, "loss": 1e-05} if own else {"accuracy": 0.81})
    assert type(metrics.get("loss", 1.0)) is float
    high = round_up(PROFILE.epsilon(1e-5).high)
    for words in (
        f"**ε ≤ {high}** at **δ = 1e-05**", "## What this means for one person", "## What is not covered",
        "## How to verify", "## Versions", "noise multiplier", "1,000",
    ):  # fmt: skip
        assert words in card.text
    assert "Training loss" not in card.text
    assert "0.6" not in re.sub(r"\d\.\d{2,}", "", card.text.split("## Scores")[0].split("## What this")[0])


def test_model_card_computes_the_bound_again(tmp_path, monkeypatch, capsys):
    folder = write_own(tmp_path / "run")
    monkeypatch.chdir(folder.path)
    code = re.search("```python\n(.*?)```", tp.model_card("."), re.DOTALL)[1]
    exec(code)
    assert f"high={PROFILE.epsilon(1e-5).high}" in capsys.readouterr().out
    assert tp.model_card(".").count("# run") == 1


@pytest.mark.parametrize("name", ["a: b # c", "<script>", "`x`|y", "é\n---\nlicense: mit", "x\n\n<script>y\n\n"])
def test_names_cannot_change_the_card(tmp_path, name):
    statement = {"unit": f"one {name}", "owner": name, "not_covered": [name], "warning": name, "noise": name}
    folder = write_own(tmp_path / "run", model=name, scores={name: 0.5}, statement=statement)
    card = ModelCard(tp.model_card(folder.path))
    assert name.split("\n")[-1] not in (line for line in card.text.splitlines() if line)
    assert "<script>" not in re.sub("`[^`\n]*`", "", card.text).replace("\\<script\\>", "")
    assert card.data.eval_results[0].metric_type == name
    assert "license" not in card.data.to_dict()
    assert set(card.data.to_dict()) <= {"library_name", "tags", "model-index"}


def test_model_card_of_a_stopped_training_says_what_is_counted(tmp_path):
    releases = [{"event": privacy.event_to_dict(privacy.SubsampledGaussian(1.1, 0.01)), "count": 40}]
    folder = write_own(tmp_path / "run", statement={"releases": releases}, num_steps_made=40)
    card = tp.model_card(folder.path)
    assert "ended after 40 of 100 steps. Epsilon and the numbers below count all planned steps" in card
    assert "the bound above counts all planned steps" in card


def test_command_writes_card_and_page(tmp_path, monkeypatch, capsys):
    write_own(tmp_path / "run")
    write_own(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert run(["report", "run", "--model-card"]) == 0
    assert (tmp_path / "run" / "README.md").read_text() == tp.model_card("run")
    assert (tmp_path / "report.html").exists()
    assert run(["report", "--model-card", "run", "--out", "page.html"]) == 0
    assert run(["report", "--model-card", "card.md", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 4)[-1])["model_card"] == "card.md"
    assert run(["report", "run", "--model-card=other.md"]) == 0
    assert (tmp_path / "card.md").read_text() == (tmp_path / "other.md").read_text() == tp.model_card("run")
    assert run(["report", "run", "other", "--model-card"]) == 2
    assert "--model-card is for one training, and 2 runs were given" in capsys.readouterr().err
    assert run(["report", "run", "other"]) == 0
    with pytest.raises(ValueError, match="cannot be read"):
        tp.model_card(tmp_path)
    assert NOT_PRIVATE not in tp.model_card("run")
