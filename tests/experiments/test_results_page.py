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
    ]:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(SystemExit, match=words):
            script.keep(tmp_path)


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
