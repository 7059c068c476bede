# SPDX-License-Identifier: Apache-2.0
"""Chooses the tests that `make test` and `make thorough` run.

Of a test with many cases, `make test` runs as few as have every value of every parameter, and at most MOST; one, if it
needs several processes; but all of a test of refusals, which has "refuse" or "mistake" in its name. Marks say where
that is wrong: `every_case` (each case is a promise of its own), `thorough` (no case is needed, because other tests show
nearly the same sooner) and `thorough(but=2)` (two cases are enough).

`make thorough` runs the others. Many tests have the same list of some hundred models. Of each, but for those marked
`oracle`, it runs every third case, from another one for each test: a model meets a third of the tests, and a test a
third of the models. Of a test that needs several processes it runs as many cases as have every value of every
parameter. ``--all`` runs every case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest

MOST = 4
POOLS = frozenset({"ranks2", "ranks4"})  # fixtures
OF_RANKS = 1  # cases of a test that needs several processes
MANY, SHARE = 100, 3  # cases of a test, from which on `make thorough` runs one of SHARE
GOLDEN = 0.6180339887  # multiples of it, modulo 1, are spread evenly

Values = set[tuple[str, Hashable]]


def of_make_test(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that `make test` runs."""
    return {case for cases in _by_test(items).values() for case in _chosen(cases)}


def of_make_thorough(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that `make thorough` runs, of those that `make test` leaves out."""
    return {case for test, cases in _by_test(items).items() for case in _share(test, cases)}


def _by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def _share(test: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    if needs_ranks(cases[0]):
        return _covering(_spread(cases), len(cases))
    if len(cases) < MANY or cases[0].get_closest_marker("oracle"):
        return cases
    return cases[crc32(test.encode()) % SHARE :: SHARE]


def is_thorough(test: object) -> bool:
    """True for a test function, or a class of tests, that `make test` leaves out as a whole."""
    marks = vars(test).get("pytestmark", []) if hasattr(test, "__dict__") else []
    return any(mark.name == "thorough" and not mark.kwargs.get("but") for mark in marks)


def _chosen(cases: list[pytest.Item]) -> list[pytest.Item]:
    few = [case for case in cases if not any(mark.name == "thorough" for mark in _marks_of_parameters(case))]
    limits = [mark.kwargs.get("but", 0) for case in few[:1] for mark in case.iter_markers("thorough")]
    is_refusal = "refuse" in cases[0].name or "mistake" in cases[0].name
    if needs_ranks(cases[0]):
        limits.append(OF_RANKS)
    if not limits and (is_refusal or cases[0].get_closest_marker("every_case")):
        return few
    most = min(limits, default=MOST)
    return _covering(_spread(few), most)


def needs_ranks(case: pytest.Item) -> bool:
    """True if a test runs in a pool of processes, where each case costs as much as several in one."""
    return not POOLS.isdisjoint(getattr(case, "fixturenames", ()))


@cache
def file_needs_ranks(file: Path) -> bool:
    """True if a file has tests that run in a pool of processes."""
    return file.name.startswith("test_") and any(pool in file.read_text() for pool in POOLS)


def _spread(cases: list[pytest.Item]) -> list[tuple[pytest.Item, Values]]:
    """Returns cases with their values, neighbors far from each other."""
    order = sorted(range(len(cases)), key=lambda number: number * GOLDEN % 1)
    return [(cases[number], _values(cases[number])) for number in order]


def _covering(cases: list[tuple[pytest.Item, Values]], most: int) -> list[pytest.Item]:
    """Returns cases that have every value of every parameter; at most so many of them, and at least one."""
    missing, chosen = set().union(*(values for _, values in cases)), [case for case, _ in cases[: min(most, 1)]]
    missing -= cases[0][1] if chosen else set()
    while missing and len(chosen) < most:
        case, values = max(cases, key=lambda each: len(missing & each[1]))
        missing -= values
        chosen.append(case)
    return chosen


def _marks_of_parameters(case: pytest.Item) -> list[pytest.Mark]:
    return list(case.callspec.marks) if hasattr(case, "callspec") else []


def _values(case: pytest.Item) -> Values:
    """Returns the values of a case's parameters, by content or, for objects, by identity."""
    values = case.callspec.params.items() if hasattr(case, "callspec") else ()
    return {(name, v if isinstance(v, (str, int, float, type(None))) else id(v)) for name, v in values}
