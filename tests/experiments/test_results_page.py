# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    """docs/_results.py as a module."""
    spec = importlib.util.spec_from_file_location("results_of_test", DOCS / "_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_says_what_the_kept_results_say(script):
    assert (DOCS / "results.md").read_text() == script.page()


def test_page_takes_finished_full_runs_only(script, tmp_path):
    for content, words in [
        ('{"experiment": "x"}', "is no run of reproduce"),
        ('{"reproduce": "x", "quick": true}', "quick"),
    ]:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(SystemExit, match=words):
            script.keep(tmp_path)


def test_notes_are_those_of_todays_experiment_and_of_the_kept_numbers(script):
    rows = [
        {"row": f"{method}, epsilon 2", "runs": [{"numbers": {"score": score}}]}
        for method, score in (("GP", 0.5), ("GEP", 0.6))
    ]
    results = {"reproduce": "gep-mnist", "notes": ["an old note", "Left out: one row."], "rows": rows}
    assert not any("points from GP" in note for note in script.notes(results))
    assert script.notes(results)[-1] == "Left out: one row."
    whole = script.notes({**results, "notes": ["an old note"]})
    assert "an old note" not in whole
    assert any("+10.0 points from GP" in note for note in whole)
