# SPDX-License-Identifier: Apache-2.0
"""Imports go down the floors of the package only, those for types included, and never in a circle."""

import importlib.util
import re

import architecture
from architecture import FLOOR, FLOORS, PACKAGE, imports_of, modules, room_imports, room_of

DOORS = {"experiments", "cli.reproduce", "support.held_state"}  # the last has the name only
MOST_ENTRIES = 20  # with one for each library into which ours fits, the public path of its adapter


def test_every_room_has_its_floor():
    assert {room_of(module) for module in modules()} == set(FLOOR)


def test_imports_go_down():
    imports = [(module, other) for module in modules() for other in imports_of(module)]
    between = [(module, other) for module, other in imports if room_of(module) != room_of(other)]
    assert [pair for pair in between if FLOOR[room_of(pair[1])] <= FLOOR[room_of(pair[0])]] == []


def test_the_papers_come_in_by_two_doors():
    """The library works without its papers, and they use it as anybody could."""
    sources = {module: path.read_text() for module, path in modules().items()}
    assert {module for module, text in sources.items() if "torch_privacy_papers" in text} == DOORS


def test_matplotlib_is_imported_by_the_reports_alone():
    """Their room imports it even where MPLBACKEND names a backend that is not installed."""
    text = {module: path.read_text() for module, path in modules().items()}
    importing = {module for module in text if re.search(r"(import|from) matplotlib", text[module])}
    tried_before_a_run = {"training.run_writer"}  # after the reports are imported
    assert {module for module in importing if not module.startswith("runs.report")} == tried_before_a_run


def test_random_numbers_of_ours_are_drawn_in_one_place():
    """A rehearsal replaces what other code draws, so that checks would see one number for all."""
    drawing = re.compile(r"^(?! *>>>| *\.\.\. ).*torch\.rand\w*\(.*generator=", re.MULTILINE)
    found = {module for module, path in modules().items() if drawing.search(path.read_text())}
    assert found == {"support.own_draws"}


def test_no_modules_import_each_other_in_a_circle():
    assert architecture.circles() == []


def test_the_root_has_few_entries():
    entries = [entry.name for entry in PACKAGE.iterdir() if entry.is_file() or [*entry.rglob("*.py")]]
    assert len(entries) <= MOST_ENTRIES, entries


def test_the_picture_of_the_floors_shows_the_imports_of_today():
    docs = PACKAGE.parent / "docs"
    spec = importlib.util.spec_from_file_location("pictures", docs / "_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = (docs / "img/floors.svg").read_text()
    lines = [line for rooms in FLOORS for line in pictures.imported_rooms(rooms, room_imports()).split("\n")]
    assert [line for line in lines if f">{line}<" not in drawn] == [], "run python docs/_architecture.py"
