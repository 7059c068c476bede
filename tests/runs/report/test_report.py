# SPDX-License-Identifier: Apache-2.0
import re

import pytest
from run_folders import EVENTS, ROWS, Links, write_run

from torch_privacy.privacy.rounding import round_down, round_up
from torch_privacy.privacy.summary import compose_steps, equal_releases, privacy_lines, summarize
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.metrics import Measure, Metrics
from torch_privacy.runs.report import style, training_plots
from torch_privacy.runs.report.render import render


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return render([write_run(RunFolder(tmp_path_factory.mktemp("run")))])


@pytest.fixture(scope="module")
def parsed(page):
    links = Links()
    links.feed(page)
    return links


@pytest.mark.thorough
def test_report_fetches_nothing(page, parsed):
    assert all(address.startswith("#") for address in parsed.addresses)
    assert not {"script", "link", "img", "iframe"} & parsed.tags
    assert not re.search(r"url\((?!#)|@import", page)
    assert set(re.findall(r"https?://[^\"' ]*", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_report_shows_four_plots_that_follow_the_page_colors(page):
    assert page.count("<svg ") == 4
    assert "var(--first)" in page
    assert "prefers-color-scheme: dark" in page
    assert not set(style.PAGE_VARIABLES) & set(re.findall(r"#[0-9a-f]{6}", page))


def test_report_has_the_numbers_of_the_closing_table(parsed):
    for line in privacy_lines(summarize(equal_releases(*EVENTS), 1e-5)):
        assert all(text in parsed.text for text in line)
    assert "81.0 %" in parsed.text
    assert "86.00 %" in parsed.text


def test_report_on_what_is_not_private_says_so(tmp_path, page):
    folders = [RunFolder(tmp_path / name) for name in ("one", "two")]
    for folder, statement in zip(folders, ({"private": False, "warning": "NOT PRIVATE (a test)"}, {}), strict=True):
        folder.create()
        write_run(folder, **statement)
    assert "NOT PRIVATE" not in page
    alone = render(folders[:1])
    assert "<h1>Training, NOT PRIVATE: " in alone
    assert '<p class="warning">NOT PRIVATE (a test)</p>' in alone
    both = render(folders)
    assert "<td>one, NOT PRIVATE</td>" in both
    assert "<td>two</td>" in both


def test_report_escapes_what_it_is_given(page, parsed):
    assert "<tiny>" not in page
    assert "what <nobody> promised" in parsed.text


def test_metrics_survive_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics(ROWS)
    assert folder.read_metrics() == ROWS


def test_plots_work_without_a_baseline_and_after_part_of_an_epoch():
    rows = [Metrics("private", 0.5, 10, 0.6, 0.7, 0.71, 0.9, 1.0)]
    assert "non-private" not in training_plots.score_plot(rows, Measure("accuracy", percent=True))
    assert "at most 1.000" in training_plots.epsilon_plot(rows, 1e-5)


@pytest.mark.parametrize(("largest", "scale"), [(3.0, "linear"), (300.0, "log"), (float("inf"), "linear")])
def test_epsilons_are_drawn_by_powers_of_ten_where_runs_are_far_apart(largest, scale):
    _, axes = training_plots.new_axes("", "", "")
    axes.plot([0, 1], [0.5, 1.0])
    axes.plot([0, 1], [0.5, largest])
    training_plots.scale_epsilons(axes)
    assert axes.get_yscale() == scale
    assert scale == "log" or axes.get_ylim()[0] == 0


def test_tradeoff_plot_marks_what_the_attacker_misses():
    summary = summarize(equal_releases(*EVENTS), 1e-5)
    missed = round_down(100 * (1 - summary.true_positive_rate_high), 1)
    assert f"at least {missed} % are missed" in training_plots.tradeoff_plot(compose_steps(*EVENTS), summary)


@pytest.mark.parametrize("value", [0.1, 11.80701, 2.0, 1e-9, 123.4567])
def test_rounding_stays_on_the_safe_side(value):
    assert float(round_down(value)) <= value <= float(round_up(value))
    assert float(round_up(value)) - float(round_down(value)) <= 0.001 + 1e-12


def test_large_numbers_are_written_with_a_power_of_ten():
    assert (round_down(999999.99949), round_up(999999.9991)) == ("999999.999", "1000000.000")
    assert (round_down(485834620928.0), round_up(485834620928.0)) == ("4.85e11", "4.86e11")
