# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def loaded(name):
    """A script of docs as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_test", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return loaded("_results")


def test_page_of_claims_says_what_the_kept_results_say():
    assert (DOCS / "claims.md").read_text() == loaded("_claims").page(), "run python docs/_claims.py"


def test_page_says_what_the_kept_results_say(script):
    assert (DOCS / "results.md").read_text() == script.page()


def test_page_takes_finished_full_runs_only(script, tmp_path):
    for content, words in [
        ('{"experiment": "x"}', "is no run of reproduce"),
        ('{"reproduce": "x", "quick": true}', "quick"),
        ('{"reproduce": "x", "quick": false, "own_data": "fashion"}', "of other data than the paper's"),
    ]:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(SystemExit, match=words):
            script.keep(tmp_path)


def kept(rows, **more):
    listed = [{"row": row, "seeded": seeded, "paper": {}, "runs": [{"seed": 0, "numbers": {}}]} for row, seeded in rows]
    return {
        "reproduce": "jl-imdb",
        "quick": False,
        "seeds": [0],
        "deltas": [1e-5],
        "only": [],
        "skip": [],
        "rows": listed,
        **more,
    }


def test_rows_that_a_run_left_out_stay_from_the_run_before(script):
    old = kept([("non-private", False), ("JL(1)", False), ("trained, JL(1)", True)], skip=["vanilla"])
    new = kept([("trained, exact", True)], only=["trained, exact"], notes=["old words"])
    both = script.with_kept_rows(new, old)
    assert [row["row"] for row in both["rows"]] == ["non-private", "JL(1)", "trained, exact", "trained, JL(1)"]
    assert both["only"] == []
    assert both["skip"][:2] == ["vanilla", "multiple"]
    again = script.with_kept_rows(new, {**old, "skip": ["trained, JL(?0)", "JL*"]})
    assert again["skip"][0] == "trained, JL(?0)"
    assert "trained, JL(10)" not in again["skip"]
    assert "Left out: vanilla; " in both["notes"][-1]
    assert both["rows"][0]["paper"]["seconds_per_epoch"] == 12
    assert script.with_kept_rows({**new, "seeds": [1]}, old)["rows"][-1]["row"] == "trained, exact"
    assert script.with_kept_rows({**new, "only": []}, old) == {**new, "only": []}
