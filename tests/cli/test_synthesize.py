# SPDX-License-Identifier: Apache-2.0
"""``synthesize``: rows and page from a file, more rows from the folder, and what is refused."""

import json
import shlex
import signal
import stat

import numpy as np
import pandas as pd
import pytest

from torch_privacy.cli import run
from torch_privacy.experiments.table_file import SHAPE
from torch_privacy.runs.verify import verify
from torch_privacy.tables.synthesis import GeneratorRun

SCHEMA = """
target = "income"
task = "classification"

[columns.age]
kind = "number"
bounds = [0, 96]

[columns.income]
kind = "category"
categories = ["high", "low"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    age = rng.integers(20, 90, 600)
    people = pd.DataFrame({"age": age, "income": np.where(age + rng.normal(0, 10, 600) > 55, "high", "low")})
    people.to_csv(tmp_path / "people.csv", index=False)
    people[:150].to_csv(tmp_path / "few.csv", index=False)
    people[:210].to_csv(tmp_path / "210.csv", index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.thorough
def test_rows_and_page_are_made_and_more_rows_are_drawn(folder, capsys):
    assert run(["budget", "open", "b", "--epsilon", "4", "--delta", "1e-4"]) == 0
    made = "--epsilon 3 --generator mst --schema schema.toml --rows 50 --out fake.csv --run r --json --audit 100"
    made += " --budget b"
    assert run(["synthesize", "people.csv", *made.split()]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == len(pd.read_csv("fake.csv")) == 50
    assert 2.9 < shown["epsilon"] <= 3
    page = (folder / "r/synthesis.html").read_text()
    assert run(["synthesize", "r", "--rows", "0", "--out", "none.csv"]) == 0
    assert (folder / "none.csv").read_text() == "age,income\n"
    for words in (
        "for the owner of the data, not for release",
        "trained on synthetic rows",
        "Audit in one run",
        "All runs on these data",
    ):
        assert words in page
    assert stat.S_IMODE((folder / "r/synthesis.html").stat().st_mode) == 0o600
    capsys.readouterr()
    assert run(["audit", "r", "--spend"]) == 2
    assert "is audited by torch-privacy synthesize FILE --audit" in " ".join(capsys.readouterr().err.split())
    assert not verify("r").is_false
    for name in ("a.csv", "b.csv"):
        assert run(["synthesize", "r", "--rows", "7", "--seed", "3", "--out", name]) == 0
    assert (folder / "a.csv").read_bytes() == (folder / "b.csv").read_bytes()
    capsys.readouterr()
    assert run(["synthesize", "r", "--rows", "7", "--out", "r/results.json"]) == 2
    assert "r/results.json is a file of the run itself" in capsys.readouterr().err
    assert not verify("r").is_false


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("few.csv --epsilon 1", "few.csv has 150 rows"),
        ("210.csv --epsilon 1", "held out to judge the generator. A smaller --test-share than 0.1 leaves more"),
        ("people.csv", "name the total privacy loss with --epsilon"),
        ("people.csv --epsilon 1 --target incom", "--target 'incom' is no column of"),
        ("none.csv --epsilon 1", "none.csv: no such file or folder"),
        ("people.csv --epsilon 1 --out x.csv", "say how many with --rows"),
        ("--resume here", "is not a run folder"),
        ("people.csv --epsilon 1 --generator gan", "must be one of 'aim', 'mst', 'network'"),
        ("people.csv --epsilon 1 --rows -5", "--rows -5 must be an integer of at least 0"),
        ("people.csv --epsilon 1 --rows 5 --seed -1", "--seed -1 must be an integer of at least 0"),
        ("people.csv --epsilon 1 --rows 5 --out none/x.csv", "--out none/x.csv lies in a folder that does not exist"),
        ("people.csv --epsilon 1 --rows 5 --out .", "--out . is a folder"),
        ("people.csv --epsilon 1 --rows 5 --run new --out new/ledger.jsonl", "is a file of the run itself"),
        ("people.csv --epsilon 1 --audit 0", "--audit 0 must be an integer of at least 1"),
        ("people.csv --epsilon 1 --audit 5 --no-page", "leave --no-page out"),
        ("runs/none --rows 5", "runs/none: no such file or folder"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(arguments, message, folder, capsys):
    assert run(["synthesize", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("says", [None, "", 'decimal = "."\n'], ids=["no schema", "nothing", "the decimal mark"])
def test_the_statement_says_that_the_shape_of_the_file_was_read_unless_a_schema_says_it(folder, says):
    made = ["--epsilon", "3", "--target", "income", "--generator", "mst", "--no-page", "--run", "r"]
    if says is not None:
        file = folder / "schema.toml"
        file.write_text(says + file.read_text())
        made += ["--schema", "schema.toml"]
    assert run(["synthesize", "people.csv", *made]) == 0
    not_covered = json.loads((folder / "r/privacy.json").read_text())["not_covered"]
    assert (SHAPE in not_covered) == (not says)


def test_the_epsilon_that_is_printed_is_never_rounded_down(folder, capsys):
    epsilon = "1.23449"  # 1.234 to four digits
    made = ["--epsilon", epsilon, "--generator", "mst", "--schema", "schema.toml", "--no-page", "--run", "r"]
    assert run(["synthesize", "people.csv", *made, "--rows", "5", "--out", "r/fake.csv"]) == 0
    assert "at most 1.235, for any number of rows" in capsys.readouterr().out


def test_the_schema_of_a_table_to_synthesize_needs_no_target(folder, capsys):
    assert run(["schema", "people.csv", "--output", "s.toml"]) == 2
    assert "or give --target '', for synthetic rows" in capsys.readouterr().err
    assert run(["schema", "people.csv", "--target", "", "--output", "s.toml"]) == 0
    shown = capsys.readouterr().err
    assert shown.endswith(": torch-privacy synthesize people.csv --epsilon 2 --schema s.toml\n")
    (folder / "s.toml").write_text(SCHEMA.replace('target = "income"\ntask = "classification"', 'target = ""'))
    made = shlex.split(shown.partition("torch-privacy ")[2])
    assert run([*made, "--generator", "mst", "--no-page", "--run", "r"]) == 0


def test_what_cannot_be_learnt_is_refused_with_its_price_its_ledger_and_the_lines_to_write(folder, capsys):
    (folder / "same.csv").write_text("age,income\n" + "".join(f"{k % 70},high\n" for k in range(900)))
    assert run(["synthesize", "same.csv", "--epsilon", "3", "--target", "income", "--run", "r"]) == 2
    error = capsys.readouterr().err
    made = "torch-privacy schema same.csv --target income --output schema.toml"
    assert f"Make a schema ({made}), write into schema.toml: [columns.income]" in error
    assert "r/ledger.jsonl has what was released" in error
    assert run(["synthesize", "--resume", "r"]) == 2
    assert "ended here before its first step" in capsys.readouterr().err


def test_a_run_that_is_stopped_says_how_to_go_on_with_all_that_was_asked(folder, capsys, monkeypatch):
    """What was said lacked the file of the rows, the seed and the audit."""
    steps = GeneratorRun.steps

    def stopped(self):
        for step in steps(self):
            signal.raise_signal(signal.SIGTERM)
            yield step

    monkeypatch.setattr(GeneratorRun, "steps", stopped)
    made = ["--epsilon", "3", "--generator", "mst", "--schema", "schema.toml", "--run", "r"]
    asked = ["--rows", "5", "--out", "a b.csv", "--seed", "3", "--no-page"]
    assert run(["synthesize", "people.csv", *made, *asked]) == 128 + signal.SIGTERM
    said = "torch-privacy synthesize --resume r --rows 5 --out 'a b.csv' --seed 3 --no-page"
    assert said in "".join(capsys.readouterr())
    monkeypatch.setattr(GeneratorRun, "steps", steps)
    assert run(shlex.split(said)[1:]) == 0
    assert len(pd.read_csv(folder / "a b.csv")) == 5


def test_a_column_that_the_schema_lacks_is_named_with_the_schemas_file(folder, capsys):
    pd.read_csv("people.csv").assign(town="Bern").to_csv("more.csv", index=False)
    assert run(["train", "more.csv", "--epsilon", "3", "--schema", "schema.toml", "--target", "income"]) == 2
    assert "schema.toml: [columns.town] with kind" in capsys.readouterr().err
