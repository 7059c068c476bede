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


def test_page_of_items_says_what_the_kept_results_say():
    items = loaded("_items")
    assert (DOCS / "papers.md").read_text() == items.page(), "run python docs/_items.py"


def test_items_show_seeds_and_the_largest_standard_error(monkeypatch):
    items = loaded("_items")
    runs = [[0.5], [0.7, 0.9], [0.8, 0.8], [0.8, 0.8004]]
    rows = [
        {"row": f"row {number}", "runs": [{"numbers": {"score": score}} for score in scores]}
        for number, scores in enumerate(runs)
    ]
    monkeypatch.setattr(items, "kept", lambda name: {"rows": rows, "columns": {"score": {"percent": True}}})
    assert items.ours("x", ["row 0"]) == "50.0 % (1 seed, 0.5)"  # √(1/4 / 10,000)
    assert items.ours("x", ["row 2", "row 1"]) == "80.0 / 80.0 % (2 seeds, 10.0)"
    assert items.ours("x", ["row 3"]) == "80.0 % (2 seeds, 0.02)"
    with pytest.raises(SystemExit, match="no row of x fits 'row 9'"):
        items.ours("x", ["row 9"])


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
    assert script.with_kept_rows({**new, "seeds": [1]}, old)["rows"][-1]["row"] == "trained, JL(1)"
    assert script.with_kept_rows({**new, "only": []}, old) == {**new, "only": []}


def test_rows_with_more_seeds_have_a_command_of_their_own(script):
    old = kept([("non-private", False), ("trained, exact", True), ("trained, JL(30)", True), ("trained, JL(1)", True)])
    new = kept([("trained, exact", True)], only=["trained, exact"], notes=[], seeds=[0, 1])
    new["rows"][0]["runs"] = [{"seed": seed, "numbers": {}} for seed in (0, 1)]
    both = script.with_kept_rows(new, old)
    assert both["seeds"] == [0]
    first, second = script.commands(both)
    assert first.startswith("torch-privacy reproduce jl-imdb --skip vanilla")
    assert first.endswith("--skip 'trained, exact'")
    assert "non-private" not in first
    assert second == "torch-privacy reproduce jl-imdb --seeds 0,1 --only 'trained, exact'"
    assert script.table.rows_by_seeds(both)[0, 1] == ["trained, exact"]
    times = [{**row, "runs": [{**run, "seconds": 1.0} for run in row["runs"]]} for row in both["rows"]]
    said = script.table.summary({**both, "rows": times, "machine": "2 CPU cores"})
    assert said == "Seed 0 (0, 1 for trained, exact), 5 s on 2 CPU cores, epsilon at delta = 1e-05"


def test_summary_shortens_runs_of_seeds_and_lists_of_rows(script):
    def row(name, *seeds):
        return {"row": name, "seeded": True, "runs": [{"seed": seed, "seconds": 1.0} for seed in seeds]}

    rows = [*(row(f"a{k}", 0) for k in range(5)), *(row(f"b{k}", 0, 1, 2) for k in range(3)), row("c", 0, 2, 3)]
    said = script.table.summary({"quick": False, "rows": rows, "seeds": [0], "machine": "2 CPU cores"})
    assert said == "Seed 0 (0 to 2 for 3 rows; 0, 2, 3 for c), 17 s on 2 CPU cores"


def test_every_paper_has_its_figure_on_the_page(script):
    papers = loaded("_papers")
    page = script.page()
    for paper in papers.TITLES:
        assert f"](img/{paper.__name__}.svg)" in page
        assert (DOCS / "img" / f"{paper.__name__}.svg").exists(), "run python docs/_papers.py"
        for panel in paper():
            assert panel.claims or panel.ours, panel.title


def test_figure_says_which_claims_hold():
    papers = loaded("_papers")

    def words(*claims):
        panel = papers.Panel("data", "accuracy", claims, [papers.Ours(90.0, 0.5, 2.0)])
        return [text.get_text() for text in papers.figure("paper", [panel]).legends[0].get_texts()]

    fails, holds = papers.Claim(95.0, 2.4, 4e11), papers.Claim(95.0, 2.0, 1.6)
    assert words(fails) == ["paper, as claimed", "certified: more than claimed", "ours, certified"]
    assert words(holds) == ["paper, as claimed", "certified: the claim holds", "ours, certified"]
    assert len(words(fails, holds, papers.Claim(95.0, 3.0, None))) == 4
    (point,) = papers.ours(
        {"runs": [{"numbers": {"score": s, "epsilon": {"high": e}}} for s, e in ((0.5, 1), (0.7, 2))]}
    )
    assert (round(point.score, 6), round(point.error, 6), point.epsilon) == (60, 10, 2)
