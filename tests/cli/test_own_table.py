# SPDX-License-Identifier: Apache-2.0
"""``train FILE`` and ``schema``: what is chosen, learnt, paid, kept and refused, on small tables."""

import hashlib
import io
import json
import re
import shlex
import stat
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

import torch_privacy as tp
from torch_privacy import privacy, tables
from torch_privacy.cli import run
from torch_privacy.cli.own_table import is_table
from torch_privacy.experiments import own_table, runner, table_file, table_notes
from torch_privacy.experiments.auditing import subject_of
from torch_privacy.experiments.own_table import complete
from torch_privacy.experiments.runner import Run
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.privacy.rounding import round_up
from torch_privacy.privacy.summary import attacker_as_json
from torch_privacy.runs.report import render
from torch_privacy.runs.verify import verify
from torch_privacy.tables.learn import TOO_FEW

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be learnt at this epsilon")  # rare classes

N = 1500
FEW_STEPS = ["--epochs", "0.6", "--batch-size", "270"]
STEPS = 3
TRAIN = ["--target", "income", "--epsilon", "4", *FEW_STEPS]
RARE, EXTREME = "SecretAgent007", 987654321.0
SCHEMA = """
target = "income"
task = "classification"

[columns.age]
kind = "number"
bounds = [18, 90]

[columns.job]
kind = "category"
categories = ["nurse", "baker"]

[columns.wealth]
kind = "ignored"

[columns.income]
kind = "category"
categories = ["high", "low"]
"""
OWNER = """
[columns.customer_id]
kind = "ignored"
"""


def people(n: int = N, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    age, job = rng.integers(18, 90, n), rng.choice(["nurse", "baker"], n)
    income = np.where(age + 20 * (job == "nurse") + rng.normal(0, 5, n) > 60, "high", "low")
    wealth = rng.normal(100, 20, n).round(2)
    frame = pd.DataFrame({"age": age, "job": job.astype(object), "wealth": wealth, "income": income})
    frame.loc[5, "job"], frame.loc[6, "wealth"] = RARE, EXTREME
    return frame


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "people.csv"
    people().to_csv(path, index=False)
    return path


class Finished(NamedTuple):
    """A finished run, and what its command printed."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def finished(file):
    folder, out, err = file.parent / "run", io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "check_priced", lambda *_: None)  # this and the page's plots take many seconds
        patch.setattr(render, "render", lambda folders: "<p>page</p>")
        attacker = attacker_as_json(privacy.compose([(privacy.Gaussian(1.0), 1)]))  # curves take seconds, too
        for module in ("privacy.summary", "training.statement"):
            patch.setattr(f"torch_privacy.{module}.attacker_as_json", lambda profile: attacker)
        assert run(["train", str(file), *TRAIN, "--run", str(folder)]) == 0
    return Finished(folder, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events_of(folder: Path) -> list[tuple[privacy.Event, int]]:
    ledger = privacy.Ledger.load(folder / "ledger.jsonl")
    ledger.close()
    return ledger.events


@pytest.mark.thorough
def test_train_on_a_table_prints_the_epsilon_of_the_ledger_learning_included(finished):
    events = events_of(finished.folder)
    assert events[-1][1] == STEPS
    assert isinstance(events[-1][0], privacy.SubsampledGaussian)
    assert len(events) > 1
    delta = json.loads((finished.folder / "settings.json").read_text())["delta"]
    epsilon, price = (privacy.compose(part).epsilon_high(delta) for part in (events, events[:-1]))
    assert 3.9 < epsilon <= 4
    assert f"report {round_up(epsilon)}" in finished.out
    assert 0 < price <= 4 * json.loads((finished.folder / "settings.json").read_text())["schema_share"]
    assert f"Learnt privately, for epsilon {round_up(price)} of the total 4" in finished.err
    assert finished.err.index("Learnt privately") < finished.err.index("private     epoch")
    assert "'income' (target) 2 categories: high, low" in finished.err


@pytest.mark.thorough
def test_run_folder_of_a_table_keeps_the_schema_with_a_digest(finished):
    results = json.loads((finished.folder / "results.json").read_text())
    assert results["experiment"] == "table"
    schema = (finished.folder / "schema.toml").read_bytes()
    assert results["files"]["schema.toml"] == hashlib.sha256(schema).hexdigest()
    assert tables.Schema.read(finished.folder / "schema.toml").is_complete
    statement = json.loads((finished.folder / "privacy.json").read_text())
    assert statement["unit"] == "one row of the table"
    assert statement["private"]
    assert results["num_examples"] + results["num_test_examples"] == N


def test_report_and_model_card_have_the_name_of_the_table(finished, tmp_path, capsys):
    page, card = tmp_path / "page.html", tmp_path / "card.md"
    assert run(["report", str(finished.folder), "--out", str(page), "--model-card", str(card)]) == 0
    assert "<h1>Private training: people.csv</h1>" in page.read_text()
    epochs = re.search("epochs</th><td>([^<]*)<", page.read_text())
    assert epochs is not None
    assert len(epochs[1]) <= 7  # six digits, no longer 31.291611185086552
    assert "\n# people.csv\n" in card.read_text()


def test_run_folder_holds_nothing_that_was_not_priced(file, finished):
    """Neither a category of one row nor an extreme value, nor a digest by which a guess of the table is verified."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for name, content in contents(finished.folder).items():
        for secret in (RARE, f"{EXTREME:g}", "987654321", digest):
            assert secret.encode() not in content, (name, secret)


def test_only_the_owner_reads_where_the_table_lies_and_exact_numbers(file, finished):
    """Settings, statement, results, page, and what else may be published have the table's name alone."""
    own = {"metrics.csv", "report.html", "results.json", "fingerprint.key", "paths.json"}
    for name, content in contents(finished.folder).items():
        assert (str(file.parent).encode() in content) == (name == "paths.json"), name
        assert stat.S_IMODE((finished.folder / name).stat().st_mode) == (0o600 if name in own else 0o644), name
    assert json.loads((finished.folder / "settings.json").read_text())["file"] == file.name
    assert subject_of(str(finished.folder))[1]["file"] == str(file)


def test_statement_has_a_fingerprint_of_the_table_that_tells_nothing_without_its_key(file, finished):
    statement, key = finished.folder / "privacy.json", finished.folder / "fingerprint.key"
    assert key.stat().st_mode & 0o777 == 0o600
    rows = tables.rows_of(tables.read_table(file))
    assert len(rows) == N
    assert tp.matches_fingerprint(statement, rows, key)
    rows[7] = ("1", *rows[7][1:])
    assert not tp.matches_fingerprint(statement, rows, key)


def test_same_settings_make_the_same_split(file, finished):
    settings = subject_of(str(finished.folder))[1]
    task, again = (own_table.build_task(own_table.STUDY.settings(**settings)) for _ in range(2))
    assert not task.private(None)["prior_releases"]  # the kept schema is complete: to use it costs nothing
    assert [y for _, y in task.test] == [y for _, y in again.test]
    train_rows, test_rows = tables.split(N, seed=0, share=settings["test_share"])
    assert (len(task.train), len(task.test)) == (len(train_rows), len(test_rows))
    assert not task.exact or "of 'job'" in task.exact[0]


@pytest.mark.thorough
def test_complete_schema_costs_nothing_and_exact_counts_are_only_shown(file, tmp_path, capsys):
    schema, folder = tmp_path / "schema.toml", tmp_path / "run"
    schema.write_text(SCHEMA.replace("[18, 90]", '[18, 90]\nscale = "bounds"'))
    assert run(["train", str(file), *TRAIN, "--schema", str(schema), "--run", str(folder)]) == 0
    shown = capsys.readouterr().err
    assert "nothing was learnt privately" in shown
    assert "not of the declared kind: 1 of 'job'" in shown
    assert [type(event) for event, _ in events_of(folder)] == [privacy.SubsampledGaussian]
    assert not any(b"not of the declared" in content for content in contents(folder).values())


def test_a_plan_reads_no_column_and_writes_nothing(file, tmp_path, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("learnt")

    monkeypatch.setattr(tables, "learn", never)
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(file), *TRAIN, "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert "1,349 rows" in plan["trains on"]
    assert "this plan has cost nothing" in plan["epsilon in all"]
    assert int(re.search(r"about (\d+) rows", plan["rare categories"])[1]) > 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["csv", "parquet"])  # the columns of the second have types
@pytest.mark.parametrize(("name", "is_one"), [("patientID", True), ("user id", True), ("SSN", True), ("paid", False)])
def test_a_column_that_numbers_persons_by_its_name_is_pointed_out(name, is_one, form, tmp_path, monkeypatch, capsys):
    """It reads no value: other columns may be as different from row to row."""

    def never(*_, **__):
        raise RuntimeError("learnt")

    monkeypatch.setattr(tables, "learn", never)
    numbered, seen = people().assign(**{name: 1.0}), tmp_path / f"numbered.{form}"
    numbered.to_csv(seen, index=False) if form == "csv" else numbered.to_parquet(seen)
    assert run(["train", str(seen), *TRAIN, "--plan", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["plan"].get("identifiers", "")
    assert (f"'{name}' will be used" in said, "--owner" in said, "schema.toml" in said) == (is_one,) * 3
    settings = own_table.STUDY.settings(**complete(seen, {"target": "income", "target_epsilon": 4.0}))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="learnt"):
            own_table.build_task(settings)
    assert any(f"'{name}' will be used" in str(one.message) for one in warned) == is_one


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_of_row_numbers_that_pandas_has_written_is_pointed_out(form, tmp_path, capsys):
    path = tmp_path / f"numbered.{form}"
    if form == "csv":
        people().to_csv(path)  # with index, under an empty name
    else:
        people().sample(frac=1, random_state=0).to_parquet(path)  # an index of other than all rows in order
    assert run(["train", str(path), *TRAIN, "--plan", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["plan"]["identifiers"]
    assert ("'column 1'" if form == "csv" else "'__index_level_0__'") in said
    assert 'kind = "ignored"' in said
    assert "--owner" not in said


def test_names_of_categories_with_a_comma_are_one_category_each():
    column = tables.Column("paid", "category", categories=("no", "yes, fully", "yes"))
    schema = tables.Schema((tables.Column("age", "number", (0, 120)), column), "paid", "classification")
    said = table_notes._in_words(schema, [])
    assert said.startswith("'paid' (target) 3 categories: no, 'yes, fully', yes; 'age'")


def test_what_was_learnt_privately_is_said_without_what_the_schema_declares(file, tmp_path):
    """All columns were listed as learnt, the declared ones, too."""
    schema = tmp_path / "schema.toml"
    open_job = SCHEMA.replace('"category"\ncategories = ["nurse", "baker"]', '"learn"')
    for text, learnt in (
        (SCHEMA, "values fill the declared bounds."),
        (open_job.replace("[18, 90]", '[18, 90]\nscale = "bounds"'), "'job'"),
    ):
        schema.write_text(text)
        settings = complete(file, {"target": "income", "target_epsilon": 4.0, "schema": str(schema)})
        (said,) = [
            note for note in own_table.build_task(own_table.STUDY.settings(**settings)).notes if "Learnt" in note
        ]
        assert f"the training has the rest: {learnt}" in said
        assert ";" not in said.partition("the rest: ")[2]


def test_declared_categories_are_listed_with_their_sources_and_rare_ones_pointed_out(file, tmp_path):
    schema = tmp_path / "schema.toml"
    known = SCHEMA.replace('["nurse", "baker"]', f'["nurse", "baker", "{RARE}", "Nurse"]\nsource = "list of jobs"')
    schema.write_text(known.replace("[18, 90]", '[18, 90]\nscale = "bounds"').replace("classification", "learn"))
    settings = complete(file, {"target": "income", "target_epsilon": 4.0, "schema": str(schema), "hidden_units": 0})
    task = own_table.build_task(own_table.STUDY.settings(**settings))
    assert not task.private(None)["prior_releases"]
    assert {one["column"]: one["source"] for one in task.declared} == {"age": "", "job": "list of jobs", "income": ""}
    assert [RARE in text for text in task.exact if "few rows" in text] == [True]
    (none,) = [text for text in task.exact if "no training row" in text]
    assert "'job': no training row has the declared category 'Nurse'. If it is misspelt, correct the schema." in none
    assert not any(RARE in text for text in task.notes)
    model = task.new_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    more = task.more_scores(model)
    listed = {(one["column"], one["value"]): one["coefficient"] for one in more["coefficients"]}
    inputs = task.test[0][0][None]
    logits = model(inputs)[0]
    job = ("(missing)", "(other)", "nurse", "baker", RARE, "Nurse")[int(inputs[0, 2])]
    by_hand = listed["(intercept)", ""] + listed["job", job] + inputs[0, 0] * listed["age", "half of its scale"]
    assert by_hand.item() == pytest.approx((logits[1] - logits[0]).item())


def test_weights_decay_as_chosen_by_default_for_two_classes_and_not_in_older_or_linear_runs(file, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA.replace("[18, 90]", '[18, 90]\nscale = "bounds"'))
    chosen = {"target": "income", "target_epsilon": 4.0, "schema": str(schema)}
    older = {name: value for name, value in complete(file, chosen).items() if name != "weight_decay"}
    for settings, decay in (
        (complete(file, chosen), 0.6),
        (complete(file, {**chosen, "weight_decay": 0.3}), 0.3),
        (complete(file, {**chosen, "hidden_units": 0}), 0.0),
        (older, 0.0),
    ):
        task = own_table.build_task(own_table.STUDY.settings(**settings))
        groups = task.new_optimizer(task.new_model()).param_groups
        assert [group["weight_decay"] for group in groups] == ([decay, 0.0] if decay else [0.0])
        assert any(f"weight decay {decay:g}," in note for note in task.notes)


@pytest.mark.thorough
def test_resumed_run_on_a_table_learns_nothing_again(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "check_priced", lambda *_: None)  # takes seconds
    path = tmp_path / "people.csv"
    path.write_bytes(file.read_bytes())
    schema = tmp_path / "public.toml"  # only one column is to be learnt
    schema.write_text(SCHEMA.replace('categories = ["nurse", "baker"]\n', ""))
    chosen = {"target": "income", "target_epsilon": 4.0, "epochs": 1.0, "expected_batch_size": 300}
    first = Run.start(tmp_path / "run", "table", **complete(path, chosen | {"schema": str(schema)}))
    for progress in first.steps():
        if progress.step == 2:
            break
    first.checkpoint()
    first.close()
    schema.unlink()
    learnt, begun = (tmp_path / "run" / "schema.toml").read_text(), first.training.ledger.events
    assert learnt == first.task.schema
    assert "nurse" in learnt
    assert RARE not in learnt

    def never(*_, **__):
        raise AssertionError("learnt twice")

    monkeypatch.setattr(tables, "learn", never)
    monkeypatch.setattr(Run, "_private_progress", lambda self, *, is_last=False: self.private.progress(1))
    second = Run.resume(tmp_path / "run")
    assert second.task.notes == first.task.notes
    for _ in second.steps():
        pass
    second.close()
    assert second.task.schema == learnt
    assert second.training.ledger.events == [*begun[:-1], (begun[-1][0], second.training.settings.num_steps)]
    path.write_bytes(file.read_bytes() + b"33,baker,10,low\n")
    assert run(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "was changed since the run began" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ['"learn"', '"category"\ncategories = ["1"]'], ids=["template", "declared"])
def test_the_owner_column_of_a_template_is_left_out_and_a_declared_one_is_refused(file, tmp_path, kind):
    """The template of ``schema`` was refused with ``--owner``, as it does not know which column is the owner's."""
    path, schema = tmp_path / "people.csv", tmp_path / "schema.toml"
    people().assign(customer_id=np.arange(N) // 3).to_csv(path, index=False)
    schema.write_text(SCHEMA + f"[columns.customer_id]\nkind = {kind}\n")
    if "learn" not in kind:
        with pytest.raises(ValueError, match=r"'customer_id' names the persons; give it kind = \"ignored\""):
            table_file.declared(path, "income", str(schema), "customer_id")
        return
    (owner,) = [
        one
        for one in table_file.declared(path, "income", str(schema), "customer_id").columns
        if one.name == "customer_id"
    ]
    assert owner.kind == "ignored"


def test_verify_knows_the_unit_of_a_run_with_owners(tmp_path):
    """It called the folder of every training on a table with owners false, as it expected other words."""
    people().assign(customer_id=np.arange(N) // 3).to_csv(tmp_path / "people.csv", index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA.replace("[18, 90]", '[18, 90]\nscale = "bounds"') + OWNER)
    owned = ["--schema", str(tmp_path / "schema.toml"), "--owner", "customer_id", "--per-owner", "2", "--epochs", "1"]
    assert run(["train", str(tmp_path / "people.csv"), *TRAIN, *owned, "--run", str(tmp_path / "run")]) == 0
    found = verify(tmp_path / "run")
    assert not found.is_false
    assert [one.verdict.value for one in found.findings if one.subject == "unit"] == ["agrees"]


@pytest.mark.thorough
def test_owners_are_protected_in_learning_split_and_training(file, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "check_priced", lambda *_: None)
    frame = people().assign(customer_id=np.arange(N) // 3)
    frame.to_csv(tmp_path / "people.csv", index=False)
    schema = tmp_path / "schema.toml"
    schema.write_text(SCHEMA.replace('categories = ["nurse", "baker"]\n', "") + OWNER)
    chosen = {"target": "income", "target_epsilon": 4.0, "epochs": 1.0, "owner": "customer_id", "per_owner": 2}
    chosen["schema"] = str(schema)
    settings = complete(tmp_path / "people.csv", chosen)
    job = Run.start(tmp_path / "run", "table", **settings)
    statement, owners, numbers = job._statement(), job.training.settings.owners, job.training.settings.public_size()
    job.close()
    assert statement["unit"] == "one customer, at most 2 rows in a step"
    assert {event.unit for event, _ in job.training.ledger.events} | {job.training.event.unit} == {"customer"}
    assert job.training.ledger.events
    assert owners.per_owner == 2
    train_rows, test_rows = tables.split(
        N, share=settings["test_share"], owners=frame["customer_id"].astype(str).to_numpy()
    )
    assert not set(train_rows // 3) & set(test_rows // 3)
    assert owners.count == len(set(train_rows // 3)) == numbers["num_examples"] == numbers["num_owners"]
    assert settings["delta"] <= 1 / (10 * owners.count)
    kept = tables.Schema.read(tmp_path / "run" / "schema.toml")
    assert "customer_id" not in [column.name for column in kept.features]


def test_settings_of_a_table_are_chosen_for_its_size(file):
    small = complete(file, {"target": "income", "target_epsilon": 2.0})
    n = len(tables.split(N, share=small["test_share"])[0])
    assert small["delta"] <= 1 / (10 * n) < 10 * small["delta"]
    assert 1 <= small["expected_batch_size"] <= n
    chosen = {"target": "income", "target_epsilon": 2.0, "delta": 1e-7, "expected_batch_size": 7, "hidden_units": 3}
    assert complete(file, chosen) | {**chosen, "hidden_units": [3]} == complete(file, chosen)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


MISTAKES = {  # arguments, with F for a table -> words of the one sentence
    "no such file": (["train", "nowhere.csv", *TRAIN], "nowhere.csv: no such file"),
    "no such path": (["train", "no/where", *TRAIN], "no/where: no such file"),
    "a folder": (["train", ".", "--target", "x", "--epsilon", "2"], "folder"),
    "no target": (["train", "F", "--epsilon", "2"], "--target, one of 'age', 'job', 'wealth', 'income'"),
    "unknown target": (["train", "F", "--target", "incme", "--epsilon", "2"], "Did you mean 'income'?"),
    "no epsilon": (["train", "F", "--target", "income"], "--epsilon"),
    "noise for an open schema": (["train", "F", "--target", "income", "--noise-multiplier", "1"], "complete schema"),
    "negative epsilon": (["train", "F", "--target", "income", "--epsilon", "-2"], "--epsilon -2.0 must be greater"),
    "delta": (["train", "F", *TRAIN, "--delta", "0.01"], "--delta 0.01 must lie in"),
    "no units": (["train", "F", *TRAIN, "--hidden-units", "-1"], "--hidden-units -1 must be an integer of at least 0"),
    "decay": (["train", "F", *TRAIN, "--weight-decay", "101"], "--weight-decay 101.0 must lie in (0, 100]"),
    "decay of nothing": (["train", "F", *TRAIN, "--weight-decay", "1", "--hidden-units", "0"], "--hidden-units 0 has"),
    "all share": (["train", "F", *TRAIN, "--schema-share", "1"], "--schema-share 1.0 must lie in (0, 1)"),
    "all test": (["train", "F", *TRAIN, "--test-share", "1"], "--test-share 1.0 must lie in (0, 1)"),
    "owner alone": (["train", "F", *TRAIN, "--owner", "job"], "--owner COLUMN and --per-owner K belong together"),
    "unknown owner": (["train", "F", *TRAIN, "--owner", "jib", "--per-owner", "2"], "Did you mean 'job'?"),
    "target as owner": (["train", "F", *TRAIN, "--owner", "income", "--per-owner", "2"], "is the target"),
    "no schema file": (["train", "F", *TRAIN, "--schema", "nowhere.toml"], "nowhere.toml"),
    "data for a table": (["train", "F", *TRAIN, "--data", "."], "leave it out"),
    "table's option": (["train", "adult", "--target", "income"], "--target is for a table of your own"),
    "schema of nothing": (["schema", "nowhere.csv", "--target", "x"], "nowhere.csv"),
    "schema of no target": (["schema", "F"], "--target, one of 'age'"),
    "schema of unknown target": (["schema", "F", "--target", "incom"], "Did you mean 'income'?"),
    "predict by nothing": (["predict", "nowhere", "F"], "nowhere/results.json: cannot be read"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_with_a_table_are_one_sentence(arguments, words, file, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run([str(file) if word == "F" else word for word in arguments]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err), shown.err
    assert list(tmp_path.iterdir()) == []


TABLES = {  # content of a file -> words of the refusal
    "empty": ("", "empty"),
    "one column": ("income\n" + "high\nlow\n" * 50, "Nothing is left to learn from"),
    "no rows": ("age,income\n", "no rows"),
    "few rows": ("age,income\n1,high\n2,low\n", "no row of table.csv would be left"),
    "constant target": ("age,income\n" + "".join(f"{k},high\n" for k in range(900)), "income"),
    "target all missing": ("age,income\n" + "".join(f"{k},\n" for k in range(900)), "income"),
    "binary": ("\0\1\2\3" * 100, ""),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("text", "words"), TABLES.values(), ids=TABLES)
def test_tables_that_cannot_be_trained_on_are_refused_in_one_sentence(text, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "table.csv", text)
    assert run(["train", "table.csv", "--target", "income", "--epsilon", "4", "--epochs", "1"]) == 2
    shown = capfd.readouterr()
    assert words in shown.err
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err), shown.err
    if "cost epsilon" not in shown.err:
        assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
        return
    (path,) = filter(Path.is_file, (tmp_path / "runs").rglob("*"))  # the ledger alone, of what was spent
    assert f"{path.relative_to(tmp_path)} has what was released" in shown.err
    spent = privacy.Ledger.read(path).profile().epsilon_high(1e-4)
    assert 0 < spent < 4


SMALL = {  # rows, epsilon -> exit code of a plan and words in it
    "classes of a tenth": (600, "1", 2, "fewer than about 1"),
    "classes of two": (300, "0.4", 2, "each takes about 3"),
    "rarer classes": (900, "4", 0, "rare classes"),
    "none": (60_000, "4", 0, ""),
}


@pytest.mark.parametrize("case", SMALL)
def test_a_rare_class_among_few_rows_is_refused_or_named_before_anything_is_paid(case, tmp_path, monkeypatch, capfd):
    n, epsilon, code, words = SMALL[case]
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        "table.csv",
        "age,ill\n" + "".join(f"{20 + k % 50},{'yes' if k % 50 == 0 else 'no'}\n" for k in range(n)),
    )
    monkeypatch.setattr(own_table.tables, "learn", None)
    train = ["train", "table.csv", "--target", "ill", "--epsilon", epsilon]
    for more in ([], ["--plan"]) if code else (["--plan"],):
        assert run([*train, *more]) == code
        shown = " ".join("".join(capfd.readouterr()).split())
        assert words in shown
        lines = 'write into schema.toml: [columns.ill], kind = "category", categories = ["...", "..."]'
        assert (lines in shown) == bool(words)
        assert ("it has cost nothing" in shown) == bool(code)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_a_misspelt_class_is_refused_or_named_before_anything_is_paid(file, tmp_path, monkeypatch):
    def paid(*_, **__):
        raise AssertionError("learnt")

    def build(classes):
        schema = write(tmp_path, "schema.toml", SCHEMA.replace('"high", "low"', classes))
        settings = complete(file, {"target": "income", "target_epsilon": 4.0, "schema": str(schema)})
        own_table.build_task(own_table.STUDY.settings(**settings))

    monkeypatch.setattr(tables, "learn", paid)
    frequent, other = people()["income"].value_counts().index
    with pytest.raises(ValueError, match=rf"but '{frequent}'. Correct \[columns.income\] in .*has cost nothing"):
        build(f'"{other}", "{frequent.title()}"')
    with pytest.warns(UserWarning, match=f"but '{other}'. Such rows"), pytest.raises(AssertionError, match="learnt"):
        build(f'"{frequent}", "{other.title()}"')


def test_lost_bounds_are_named_with_the_lines_to_write(file, tmp_path):
    lost = tables.Column("a b", "ignored", reason=TOO_FEW.removeprefix("has "))
    kept = (tables.Column("age", "number", (0, 9)), tables.Column("income", "category", categories=("x", "y")))
    settings = complete(file, {"target": "income", "target_epsilon": 4.0})
    hint = table_notes._hints(own_table.STUDY.settings(**settings), tables.Schema((lost, *kept), "income"))[0]
    assert 'write into schema.toml: [columns."a b"], kind = "number", bounds = [0, 100]' in hint


@pytest.mark.parametrize("mark", [".", ","])
def test_a_decimal_mark_that_fewer_columns_have_is_named_before_anything_is_paid(mark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i % 90},{i % 7};a text {i};yes\n{i % 90},{i % 9};a text;no\n" for i in range(1000))
    Path("people.csv").write_text(f"age;note;paid\n{rows}")
    assert run(["schema", "people.csv", "--target", "paid", "--output", "s.toml"]) == 0
    text = Path("s.toml").read_text()
    assert 'decimal = ","' in text
    Path("s.toml").write_text(text.replace('decimal = ","', f'decimal = "{mark}"'))
    capsys.readouterr()
    command = ["train", "people.csv", "--target", "paid", "--epsilon", "4", "--schema", "s.toml"]
    assert run([*command, "--plan"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = "more columns are numbers with the decimal mark ',' than with '.'. Write into " in shown
    assert said == (mark == ".")
    assert ('decimal = ","' in shown) == said


@pytest.mark.thorough
def test_a_refusal_after_learning_leaves_a_ledger_too(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "check_settings", lambda *_: (_ for _ in ()).throw(ValueError("train: no.")))
    assert run(["train", str(file), *TRAIN, "--run", str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run' / 'ledger.jsonl'} has what was released" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger.jsonl"]
    assert len(privacy.Ledger.read(tmp_path / "run" / "ledger.jsonl")) > 1


def test_what_is_a_table_and_what_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "people", "a,b\n")
    write(tmp_path, "adult", "a,b\n")
    assert is_table("people")
    assert is_table("./adult")
    assert not is_table("adult")


def test_errors_point_to_the_help_of_their_command(file, capsys):
    for arguments, command in {
        ("trian",): "torch-privacy",
        ("train", "adult", "--epoch", "3"): "torch-privacy train",
        ("train", str(file)): "torch-privacy train",
        ("train", "adult", "--epsilon", "-1"): "torch-privacy train",
        ("predict",): "torch-privacy predict",
        ("schema", str(file)): "torch-privacy schema",
        ("epsilon", "--noise-multiplier", "x"): "torch-privacy epsilon",
        ("reproduce", "adlut"): "torch-privacy reproduce",
    }.items():
        assert run(list(arguments)) == 2
        assert capsys.readouterr().err.endswith(f" Try '{command} --help'.\n")


def test_schema_command_reads_names_and_storage_types_alone(file, tmp_path, capsys):
    other = tmp_path / "people.csv"
    people(40, seed=9).to_csv(other, index=False)
    texts = []
    for path in (file, file, other):
        assert run(["schema", str(path), "--target", "income"]) == 0
        texts.append(capsys.readouterr().out.replace(str(path), "FILE"))
    assert texts[0] == texts[1] == texts[2]
    assert all(name in texts[0] for name in ("age", "job", "wealth", "income"))
    assert "nurse" not in texts[0]
    assert not any(secret in texts[0] for secret in (RARE, "987654321"))


def test_commands_that_are_shown_can_be_copied_where_names_have_spaces(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my people.csv").write_text("age,has paid?\n" + "30,yes\n40,no\n" * 500)
    assert run(["schema", "my people.csv", "--target", "has paid?", "--output", "my schema.toml"]) == 0
    shown = re.search("torch-privacy (.*)", capsys.readouterr().err)
    assert shown is not None
    assert run([*shlex.split(shown[1]), "--plan"]) == 0
    settings = TableSettings(**complete(Path("my people.csv"), {"target": "has paid?", "target_epsilon": 2.0}))
    made = re.search(r"\((torch-privacy .*)\)", table_notes.to_write(settings, "x"))
    assert made is not None
    assert shlex.split(made[1])[1:5] == ["schema", "my people.csv", "--target", "has paid?"]


def test_schema_command_writes_over_a_file_only_if_forced(file, tmp_path, capsys):
    out = tmp_path / "schema.toml"
    command = ["schema", str(file), "--target", "income", "--output", str(out)]
    assert run(command) == 0
    text = out.read_text()
    assert f"--schema {out}" in capsys.readouterr().err
    out.write_text("mine")
    assert run(command) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run([*command, "--force"]) == 0
    assert out.read_text() == text
    assert tables.Schema.read(out) == tables.Schema.template(file, "income")


def test_missing_library_for_tables_is_named_with_its_extra(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pandas", None)
    table_file._read.cache_clear()
    assert run(["train", str(file), *TRAIN]) == 2
    assert "pip install 'torch-privacy[tables]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--threshold", "high=2"], "--threshold high=2: '2' must be a probability in (0, 1]"),
        (["--threshold", "hihg=0.2"], "no test row has the class 'hihg', but 'high', 'low'. Nothing was learnt"),
        (["--batch-size", "5000"], "--batch-size 5000 must lie in (0, 13"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_refused_before_anything_is_learnt(
    arguments, words, file, tmp_path, monkeypatch, capsys
):
    def never(*_, **__):
        raise AssertionError("learnt")

    monkeypatch.setattr(tables, "learn", never)
    command = ["train", str(file), "--target", "income", "--epsilon", "4", "--run", str(tmp_path / "run")]
    assert run([*command, *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_columns_of_parquet_that_hold_no_single_values_are_said_to_be_ignored(tmp_path):
    file = tmp_path / "people.parquet"
    people().drop(columns="wealth").assign(visits=[[1, 2]] * N).to_parquet(file)
    settings = complete(file, {"target": "income", "target_epsilon": 8.0})
    task = own_table.build_task(own_table.STUDY.settings(**settings))
    (said,) = [note for note in task.notes if "visits" in note]
    assert re.fullmatch(r"'visits' is ignored: its storage type list<.*> is not a single value\.", said)
