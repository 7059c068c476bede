# SPDX-License-Identifier: Apache-2.0
"""``predict``: the released model's answers for another table, and what is said of tables that do not fit."""

import csv
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

from torch_privacy import tables
from torch_privacy.cli import run
from torch_privacy.experiments import auditing, load_trainable
from torch_privacy.experiments.predictions import Predictions, Predictor

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be learnt at this epsilon")  # rare classes

N = 600
DATE = '"date"\nbounds = [2020-01-01, 2024-12-31]'
SCHEMAS = {
    "income": """
target = "income"
task = "classification"
[columns.age]
kind = "number"
bounds = [18, 90]
[columns.job]
kind = "category"
categories = ["nurse", "baker"]
[columns.income]
kind = "category"
categories = ["high", "low"]
[columns.rent]
kind = "ignored"
""",
    "rent": """
target = "rent"
task = "regression"
[columns.age]
kind = "number"
bounds = [18, 90]
[columns.job]
kind = "category"
categories = ["nurse", "baker"]
[columns.income]
kind = "ignored"
[columns.rent]
kind = "number"
bounds = [0, 2000]
""",
}


def people(n=N, seed=0):
    rng = np.random.default_rng(seed)
    age, job = rng.integers(18, 90, n), rng.choice(["nurse", "baker"], n)
    income, rent = np.where(age > 50, "high", "low"), (10.0 * age + rng.normal(0, 50, n)).round(1)
    return pd.DataFrame({"age": age, "job": job.astype(object), "income": income.astype(object), "rent": rent})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by target."""
    folder = tmp_path_factory.mktemp("runs")
    people().to_csv(folder / "people.csv", index=False)
    for target, schema in SCHEMAS.items():
        (folder / f"{target}.toml").write_text(schema)
        command = ["train", str(folder / "people.csv"), "--target", target, "--epsilon", "4", "--epochs", "2"]
        more = ["--batch-size", "200", "--schema", str(folder / f"{target}.toml"), "--run", str(folder / target)]
        assert run([*command, *more, "--quiet"]) == 0
    return {target: folder / target for target in SCHEMAS}


def predicted(capsys, *arguments):
    capsys.readouterr()
    assert run(["predict", *map(str, arguments)]) == 0
    shown = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(shown.out))), shown.err


def by_hand(folder, frame):
    """The outputs of the saved network, for tensors made without the encoder."""
    schema = tables.Schema.read(folder / "schema.toml")
    model = tables.new_model(schema, json.loads((folder / "settings.json").read_text())["hidden_units"]).float()
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    encoded = tables.Encoder(schema).encode(frame.drop(columns=schema.target).astype(str), with_target=False)
    with torch.no_grad():
        return model.eval()((encoded.numbers, encoded.categories))


def test_predicted_classes_are_those_of_the_saved_network(runs, tmp_path, capsys):
    new = people(50, seed=1)
    new.drop(columns="income").to_csv(tmp_path / "new.csv", index=False)
    rows, said = predicted(capsys, runs["income"], tmp_path / "new.csv")
    assert said == ""
    probabilities = by_hand(runs["income"], new).softmax(1)
    assert [row["prediction"] for row in rows] == [("high", "low")[k] for k in probabilities.argmax(1)]
    assert {row["prediction"] for row in rows} == {"high", "low"}
    found = [[float(row["probability of high"]), float(row["probability of low"])] for row in rows]
    torch.testing.assert_close(torch.tensor(found).float(), probabilities, atol=1e-6, rtol=1e-5)


def test_columns_are_kept_and_a_threshold_decides(runs, tmp_path, capsys):
    new = people(50, seed=1).assign(id=[f"n{i}" for i in range(50)])
    new.to_csv(tmp_path / "new.csv", index=False)
    chosen = ["--keep", "id", "--threshold", "low=0.2"]
    rows, _ = predicted(capsys, runs["income"], tmp_path / "new.csv", *chosen)
    assert [row["id"] for row in rows] == new["id"].tolist()
    assert all((row["prediction"] == "low") == (float(row["probability of low"]) >= 0.2) for row in rows)
    for wrong, said in ((["--keep", "ids"], "no column of"), (["--threshold", "lo=1"], "none of 'high', 'low'")):
        assert run(["predict", str(runs["income"]), str(tmp_path / "new.csv"), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_predicted_numbers_are_in_the_unit_of_the_target(runs, tmp_path, capsys):
    new = people(50, seed=1)
    new.to_csv(tmp_path / "new.csv", index=False)
    rows, _ = predicted(capsys, runs["rent"], tmp_path / "new.csv")
    found = torch.tensor([float(row["prediction"]) for row in rows]).float()
    schema = tables.Schema.read(runs["rent"] / "schema.toml")
    (low, high), (first, last) = schema.target_column.bounds, schema.target_column.scale
    expected = ((first + last + (last - first) * by_hand(runs["rent"], new)) / 2).clamp(low, high)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=1e-4)
    assert list(rows[0]) == ["prediction"]


def test_columns_of_a_new_table_may_be_in_any_order_more_or_without_the_target(runs, tmp_path, capsys):
    new = people(20, seed=2)
    new.to_csv(tmp_path / "new.csv", index=False)
    plain, _ = predicted(capsys, runs["income"], tmp_path / "new.csv")
    new = new.drop(columns=["income", "rent"])[["job", "age"]].assign(shoe=43, name="x")
    new.to_csv(tmp_path / "other.csv", index=False, sep=";")
    other, said = predicted(capsys, runs["income"], tmp_path / "other.csv")
    assert other == plain
    assert "ignored: 'shoe', 'name'" in said
    new.to_parquet(tmp_path / "new.parquet")
    assert predicted(capsys, runs["income"], tmp_path / "new.parquet")[0] == plain


def test_unknown_categories_are_other_and_missing_cells_are_predicted_too(runs, tmp_path, capsys):
    for name, job in {"known": "nurse", "a": "astronaut", "b": "poet", "none": ""}.items():
        (tmp_path / f"{name}.csv").write_text(f"age,job\n40,{job}\n,{job}\n")
    rows = {
        name: predicted(capsys, runs["income"], tmp_path / f"{name}.csv")[0] for name in ("known", "a", "b", "none")
    }
    assert rows["a"] == rows["b"]
    assert rows["a"] != rows["known"]
    assert len(rows["none"]) == 2


def test_cells_that_the_model_cannot_use_are_counted_and_a_decimal_comma_is_noticed(runs, tmp_path, capsys):
    """A table with another decimal mark was predicted as if all its numbers were missing, without a word."""
    (tmp_path / "new.csv").write_text("age;job\n40,5;nurse\n50,5;poet\nold;\n")
    _, said = predicted(capsys, runs["income"], tmp_path / "new.csv")
    assert "cells that it cannot read: 3 of 'age'; these are no number or date, and are imputed." in said
    assert "categories that the model does not know: 1 of 'job'; these count as other." in said
    assert "have a decimal comma" not in said  # of one cell in three this is not so
    (tmp_path / "new.csv").write_text("age;job\n40,5;nurse\n50,5;poet\n")
    assert "new.csv: numbers have a decimal comma, and" in predicted(capsys, runs["income"], tmp_path / "new.csv")[1]


def test_decimal_points_are_noticed_by_a_model_that_reads_commas(tmp_path):
    schema = tables.Schema.from_toml('decimal = ","' + SCHEMAS["income"])
    predictor = Predictor(schema, tables.new_model(schema, (4,)).float().eval())
    for rows, noticed in (
        ("40.5,nurse\n50.388,baker", True),
        ('"40,5",nurse\n"50,388",baker', False),
        ("40,poet", False),
    ):
        (tmp_path / "new.csv").write_text(f"age,job\n{rows}\n")
        said = " ".join(predictor.predict_file(tmp_path / "new.csv").notes)
        assert ("decimal point, and the model reads a decimal comma. Write 1,5, not 1.5." in said) is noticed


def test_dates_in_another_order_than_the_model_reads_are_noticed(tmp_path, capsys):
    schema = tables.Schema.from_toml(SCHEMAS["rent"].replace('"number"\nbounds = [18, 90]', DATE))
    predictor = Predictor(schema, tables.new_model(schema, (4,)).float().eval())
    (tmp_path / "new.csv").write_text("age,job\n25/12/2023,nurse\n03/04/2023,baker\n")
    (said,) = predictor.predict_file(tmp_path / "new.csv").notes[:1]
    assert "dates have days before months, and the model reads 'age' the other way" in said
    (tmp_path / "new.csv").write_text("age,job\n2023-12-25,nurse\n04/03/2023,baker\n")
    assert predictor.predict_file(tmp_path / "new.csv").notes == ()


def test_no_cell_of_the_predictions_is_a_formula_and_numbers_stay():
    names = ["=HYPERLINK(1)", "+cmd", "-x", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "-1", "+2.5e3", "-2,5", "plain"]
    frame = pd.DataFrame({"prediction": np.array(names, object), "=A1": -1.5})
    rows = list(csv.reader(io.StringIO(Predictions(frame, ()).as_csv(), newline="")))
    assert rows[0] == ["prediction", "'=A1"]
    assert [row[0].replace(" ", "\r") for row in rows[1:]] == [*(f"'{name}" for name in names[:7]), *names[7:]]
    assert {row[1] for row in rows[1:]} == {"-1.5"}


def test_empty_table_gives_the_header_alone(runs, tmp_path, capsys):
    (tmp_path / "new.csv").write_text("age,job\n")
    assert run(["predict", str(runs["income"]), str(tmp_path / "new.csv")]) == 0
    assert capsys.readouterr().out == "prediction,probability of high,probability of low\n"


def test_predictions_go_to_a_file_or_into_json(runs, tmp_path, capsys):
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    people(5, seed=3).to_csv(new, index=False)
    rows, _ = predicted(capsys, runs["income"], new)
    assert run(["predict", str(runs["income"]), str(new), "--output", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert list(csv.DictReader(io.StringIO(out.read_text()))) == rows
    assert run(["predict", str(runs["income"]), str(new), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["target"] == "income"
    assert [row["prediction"] for row in shown["predictions"]] == [row["prediction"] for row in rows]
    assert run(["predict", str(runs["income"]), str(new), "--output", str(new)]) == 2
    assert "is the table itself" in capsys.readouterr().err
    model = runs["income"] / "model.safetensors"
    before = model.read_bytes()
    assert run(["predict", str(runs["income"]), str(new), "--output", str(model)]) == 2
    assert "model.safetensors is a file of the run itself" in capsys.readouterr().err
    assert model.read_bytes() == before


def test_predict_refuses_what_does_not_fit_in_one_sentence(runs, tmp_path, capsys):
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in runs["income"].iterdir():
        content = path.read_bytes()
        (changed / path.name).write_bytes(content.replace(b"90", b"91") if path.name == "schema.toml" else content)
    lacking = tmp_path / "lacking.csv"
    lacking.write_text("agee,jobb\n40,nurse\n")
    for arguments, words in {
        (runs["income"], lacking): "'age'",
        (runs["income"], tmp_path / "nowhere.csv"): "nowhere.csv",
        (changed, lacking): "digest",
        (tmp_path, lacking): "results.json: cannot be read",
    }.items():
        assert run(["predict", *map(str, arguments)]) == 2
        shown = capsys.readouterr()
        assert words in shown.err
        assert shown.out == ""
        assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err), shown.err


def test_report_and_audit_know_the_run_on_a_table(runs, tmp_path, capsys):
    assert run(["report", str(runs["rent"]), "--out", str(tmp_path / "report.html")]) == 0
    experiment, settings = auditing.subject_of(str(runs["income"]))
    task = load_trainable(experiment).task(load_trainable(experiment).settings(**settings))
    assert settings["schema"] == str(runs["income"] / "schema.toml")
    assert not task.private(task.new_model())["prior_releases"]  # nothing is learnt again
