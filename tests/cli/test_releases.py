# SPDX-License-Identifier: Apache-2.0
"""What the accounting commands price: runs, estimated norms, GEP, components and schedules."""

import json
import re

import pytest
from run_folders import STATEMENT, write_ledger, write_own

from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.privacy import comparison
from torch_privacy.privacy.summary import releases_as_json
from torch_privacy.runs.folder import RunFolder

Q = ["--sampling-probability", "0.01"]
STEPS = ["--noise-multiplier", "1.1", *Q, "--steps", "100"]
DELTA = ["delta", "--epsilon", "0.5"]
COMPONENTS = privacy.NoisyCovariance(16.0), 1
DESCRIBED = {  # options -> the releases that they describe
    "estimated norms": ([*STEPS, "--projections", "32"], [(privacy.SubsampledJL(1.1, 32, 0.01), 100)]),
    "GEP": ([*STEPS, "--gep"], [(privacy.SubsampledGEP(1.1, 0.01), 100)]),
    "components": ([*STEPS, "--components-noise", "16"], [COMPONENTS, (privacy.SubsampledGaussian(1.1, 0.01), 100)]),
    "components alone": (
        ["--components-noise", "16", "--components-noise", "8"],
        [COMPONENTS, (privacy.NoisyCovariance(8.0), 1)],
    ),
    "schedule": (
        ["--noise-multiplier", "2", *Q, "--noise-schedule", "60x1, 40x1.5"],
        [(privacy.SubsampledGaussian(2.0, 0.01), 60), (privacy.SubsampledGaussian(3.0, 0.01), 40)],
    ),
    "schedule of estimated norms": (
        ["--noise-multiplier", "1", *Q, "--noise-schedule", "9x1,1x5e-1", "--projections", "40"],
        [(privacy.SubsampledJL(1.0, 40, 0.01), 9), (privacy.SubsampledJL(0.5, 40, 0.01), 1)],
    ),
}


def answer(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", DESCRIBED)
def test_delta_is_that_of_the_releases_that_options_describe(name, capsys):
    options, releases = DESCRIBED[name]
    shown = answer(capsys, *DELTA, *options)
    assert shown["releases"] == releases_as_json(releases)["releases"]
    assert shown["delta"] == privacy.compose(releases).delta(0.5)._asdict()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", ["components alone", *DESCRIBED])
def test_epsilon_and_tradeoff_are_those_of_the_releases_that_options_describe(name, capsys):
    options, releases = DESCRIBED[name]
    profile = privacy.compose(releases)
    low, high = profile.epsilon(1e-5)
    assert answer(capsys, "epsilon", *options)["epsilon"] == {"low": low, "high": high}
    (point,) = answer(capsys, "tradeoff", "--alpha", "0.1", *options)["tradeoff"]
    assert (point["beta_low"], point["beta_high"]) == pytest.approx(profile.tradeoff(0.1))


def compared(monkeypatch, capsys, *options):
    """Returns the claims of the accountants that take no second."""
    for slow in ("prv-accountant", "dp-accounting PLD"):
        monkeypatch.delitem(comparison.ACCOUNTANTS, slow)
    return {claim["accountant"]: claim for claim in answer(capsys, "compare", *options)["claims"]}


def test_compare_says_which_accountants_know_other_releases(monkeypatch, capsys):
    options, releases = DESCRIBED["components"]
    claims = compared(monkeypatch, capsys, *options)
    assert claims["torch_privacy"]["epsilon"] == privacy.compose(releases).epsilon(1e-5).high
    assert claims["RDP"]["epsilon"] == pytest.approx(claims["dp-accounting RDP"]["epsilon"], rel=1e-3)
    assert claims["CLT"]["epsilon"] == privacy.clt(releases).epsilon(1e-5)
    assert "equal Poisson-sampled Gaussian steps alone" in claims["strong composition"]["note"]


def test_compare_of_estimated_norms_has_the_certified_interval_alone(monkeypatch, capsys):
    options, releases = DESCRIBED["estimated norms"]
    certified, *others = compared(monkeypatch, capsys, *options).values()
    assert certified["epsilon"] == privacy.compose(releases).epsilon(1e-5).high
    assert others
    assert all(claim["epsilon"] is None and claim["note"] and "failed" not in claim["note"] for claim in others)


MADE = [COMPONENTS, (privacy.SubsampledGaussian(1.1, 0.01, privacy.NeighboringRelation.REPLACE_SPECIAL), 20)]
RELEASES = releases_as_json(MADE)["releases"]


def own_run(path, **statement):
    return write_own(path, statement={"num_examples": 1000, "delta": 1e-6, "releases": RELEASES, **statement})


def test_a_run_is_compared_at_its_delta(tmp_path, monkeypatch, capsys):
    own_run(tmp_path / "run")
    assert compared(monkeypatch, capsys, str(tmp_path / "run"))["torch_privacy"]["epsilon"] == (
        privacy.compose(MADE).epsilon(1e-6).high
    )


@pytest.mark.thorough
def test_epsilon_of_a_run_is_that_of_its_releases_at_its_delta(tmp_path, capsys):
    own_run(tmp_path / "run")
    low, high = privacy.compose(MADE).epsilon(1e-6)
    shown = answer(capsys, "epsilon", str(tmp_path / "run"))
    assert (shown["delta"], shown["epsilon"]) == (1e-6, {"low": low, "high": high})
    assert answer(capsys, "epsilon", str(tmp_path / "run"), "--delta", "1e-5")["delta"] == 1e-5


@pytest.mark.parametrize("form", ["ledger", "folder with a ledger", "list"])
def test_a_ledger_and_a_list_are_priced_too(form, tmp_path, capsys):
    path = tmp_path / ("releases.json" if form == "list" else "ledger.jsonl")
    if form == "list":
        path.write_text(json.dumps({"releases": RELEASES}))
    else:
        write_ledger(path, MADE)
    shown = answer(capsys, *DELTA, str(tmp_path if form.startswith("folder") else path))
    assert shown["delta"] == privacy.compose(MADE).delta(0.5)._asdict()


def test_a_release_beside_a_run_adds_to_its_price(tmp_path, capsys):
    own_run(tmp_path / "run")
    shown = answer(capsys, *DELTA, str(tmp_path / "run"), "--components-noise", "8")
    assert shown["delta"] == privacy.compose([(privacy.NoisyCovariance(8.0), 1), *MADE]).delta(0.5)._asdict()


def test_a_run_that_is_not_private_says_so_wherever_it_is_priced(tmp_path, monkeypatch, capsys):
    own_run(tmp_path / "run", private=False, warning="NOT PRIVATE (a seed)")
    for command in (["compare"], DELTA):
        monkeypatch.setattr(comparison, "compare", lambda *_: [])
        assert run([*command, str(tmp_path / "run"), "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["warning"] == "NOT PRIVATE (a seed)"
        assert "NOT PRIVATE" in shown.err


def test_an_unfinished_run_is_priced_by_its_ledger_and_says_so(tmp_path, capsys):
    """Its statement may be older than its ledger."""
    folder = RunFolder(tmp_path)
    stated = {**STATEMENT, "num_steps_planned": 50, "num_steps_made": 2, "releases": RELEASES[:1]}
    folder.write_json(folder.privacy, stated)
    write_ledger(folder.ledger, MADE)
    shown = answer(capsys, *DELTA, str(tmp_path))
    assert shown["delta"] == privacy.compose(MADE).delta(0.5)._asdict()
    assert "after 2 of 50 steps" in shown["unfinished"]


def test_a_run_with_a_statement_that_its_ledger_contradicts_is_refused(tmp_path, capsys):
    folder = own_run(tmp_path / "run")
    folder.ledger.unlink()
    write_ledger(folder.ledger, MADE[1:])
    assert run(["epsilon", str(folder.path)]) == 2
    assert "states 21 releases, not the 20 in" in capsys.readouterr().err


MISTAKES = {
    "run and steps": (["RUN", "--steps", "3"], "RUN has its own steps"),
    "run and GEP": (["RUN", "--gep"], "RUN has its own steps"),
    "no run": (["/nowhere"], "/nowhere: has neither privacy.json nor ledger.jsonl"),
    "no noise": ([*Q, "--steps", "3"], "give --noise-multiplier, or name a RUN"),
    "two kinds": ([*STEPS, "--gep", "--projections", "9"], "--gep and --projections exclude each other"),
    "schedule and steps": ([*STEPS, "--noise-schedule", "3x1"], "leave out --steps and --epochs"),
    "no schedule": (["--noise-multiplier", "1", *Q, "--noise-schedule", "3x1,"], "--noise-schedule '3x1,' must list"),
    "no factor": (["--noise-multiplier", "1", *Q, "--noise-schedule", "3x0"], "--noise-schedule '3x0' must list"),
    "no number": (["--noise-multiplier", "1", *Q, "--noise-schedule", "3x1.2.3"], "'3x1.2.3' must list"),
    "no components": (["--components-noise", "0"], "--components-noise 0.0 must lie in"),
    "no projections": ([*STEPS, "--projections", "0"], "--projections 0 must be"),
    "large delta": (["RUN", "--delta", "0.01"], "--delta 0.01 must lie in (0, 0.001)"),
    "no list": (["LIST"], "must be a JSON object with a list of releases"),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_in_one_sentence(options, words, tmp_path, capsys):
    if options[0] == "RUN":
        own_run(tmp_path / "run")
    (tmp_path / "list.json").write_text("[1]")
    paths = {"RUN": str(tmp_path / "run"), "LIST": str(tmp_path / "list.json")}
    assert run(["epsilon", *(paths.get(option, option) for option in options)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err)


def test_group_of_a_mixed_training_has_no_comparison(capsys):
    options, _ = DESCRIBED["components"]
    assert run(["compare", *options, "--group-size", "4"]) == 2
    assert "--group-size compares equal steps" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["epsilon"], ["tradeoff"], ["delta", "--epsilon", "1"]])
def test_plots_draw_any_releases(command, tmp_path, capsys):
    for name in ("components", "estimated norms"):
        path = tmp_path / f"{name[0]}.svg"
        assert run([*command, *DESCRIBED[name][0], "--plot", str(path)]) == 0
        kinds = len(DESCRIBED[name][1])
        assert f"releases of {kinds} kinds" in path.read_text()
