# SPDX-License-Identifier: Apache-2.0
"""The page that compares with other libraries: each of its sentences has a program that runs both sides."""

import importlib
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = "comparison_points", "comparison_measures"
if not sys.modules.keys() & set(PROGRAMS):  # pytest imports this file twice, for its doctests, too
    pytest.register_assert_rewrite(*PROGRAMS)  # a false sentence shows both sides' values
points = importlib.import_module("comparison_points")
importlib.import_module("comparison_measures")  # adds its points
PAGE = (Path(__file__).parents[1] / "docs" / "comparison.md").read_text()
COMPARED = {
    points.OPACUS: "opacus",
    points.DP_ACCOUNTING: "dp-accounting",
    points.JAX: "jax-privacy",
    points.DIFFPRIVLIB: "diffprivlib",
}
MISSING = [name for name in COMPARED.values() if find_spec(name.replace("-", "_")) is None]
CASES = [(library, point) for library, found in points.in_order().items() for point in found]


def test_the_page_says_what_the_programs_show_and_nothing_else():
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    said = {}
    for section in sections:
        heading, _, text = section.partition("\n")
        items = re.split(r"^\* ", text, flags=re.MULTILINE)[1:]
        said[heading] = [" ".join(item.split()) for item in items]
    expected = {library: [points.sentence(point) for point in found] for library, found in points.in_order().items()}
    assert {heading: items for heading, items in said.items() if items} == expected


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.skipif(bool(MISSING), reason=f"make compare installs {', '.join(MISSING)} and runs these programs")
@pytest.mark.filterwarnings("ignore")  # by the other libraries
@pytest.mark.parametrize(("library", "point"), CASES, ids=[point.__name__ for _, point in CASES])
def test_a_sentence_is_true_of_both_sides(library, point, request):
    if not request.config.getoption("--all"):
        pytest.skip("JAX starts threads, and later tests fork: make compare runs these alone")
    found = version(COMPARED[library])
    assert found.startswith(library.split()[-1]), f"the page is about {library}; {found} is installed"
    try:
        point()
    except BaseException as error:
        error.add_note(f"docs/comparison.md says of {library}: {points.sentence(point)}")
        raise
