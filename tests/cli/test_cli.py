# SPDX-License-Identifier: Apache-2.0
import builtins
import json
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import typer

import torch_privacy
from torch_privacy import privacy
from torch_privacy.cli import run
from torch_privacy.cli._shared import app
from torch_privacy.experiments import TRAININGS, load_trainable
from torch_privacy.privacy import comparison
from torch_privacy.privacy.rounding import round_down, round_up
from torch_privacy.privacy.summary import equal_releases
from torch_privacy.runs.report import figures as plots

EVENTS = ["--noise-multiplier", "1.1", "--sampling-probability", "0.01", "--steps", "100"]
PROFILE = privacy.compose([(privacy.SubsampledGaussian(1.1, 0.01), 100)])
WITHOUT_TORCH = {
    "help": ["--help"],
    "train help": ["train", "--help"],
    "epsilon": ["epsilon", *EVENTS],
    "calibrate": ["calibrate", "--epsilon", "2", *EVENTS[2:]],
    "tradeoff": ["tradeoff", *EVENTS],
    "delta": ["delta", "--epsilon", "2", *EVENTS],
    "compare": ["compare", *EVENTS],
    "explain help": ["explain", "--help"],
    "plan": ["plan", "--examples", "100", "--epsilon", "2", "--steps", "20"],
    "list of experiments": ["reproduce"],
    "mistake": ["train", "adult", "--epsilon", "2", "--noise-multiplier", "1"],
}
MISTAKES = {  # arguments -> words of the one sentence that says what is wrong
    "no command": ([], "Missing command"),
    "unknown command": (["trian"], "No such command 'trian'"),
    "unknown option": (["train", "adult", "--epoch", "3"], "No such option: --epoch"),
    "unknown experiment": (
        ["train", "mnits"],
        "experiment='mnits' is unknown. Did you mean 'jl-mnist'? Or name a table's file",
    ),
    "no experiment": (["train"], "name an experiment (adult"),
    "two experiments": (["train", "adult", "adult"], "unexpected extra argument"),
    "no value": (["train", "adult", "--delta"], "Option '--delta' requires an argument"),
    "not a number": (["train", "adult", "--delta", "small"], "Invalid value for '--delta'"),
    "not an integer": (["train", "adult", "--batch-size", "2.5"], "Invalid value for '--batch-size'"),
    "delta of 1/n": (["train", "adult", "--delta", "3.5e-5"], "--delta 3.5e-05 must lie in (0, 3.41239e-05)"),
    "delta 0": (["train", "adult", "--delta", "0"], "--delta 0.0 must lie in"),
    "delta nan": (["train", "adult", "--delta", "nan"], "--delta nan must be a finite number"),
    "negative noise": (
        ["train", "adult", "--noise-multiplier", "-1"],
        "--noise-multiplier -1.0 must be greater than 0",
    ),
    "no noise": (["train", "adult", "--noise-multiplier", "0"], "--noise-multiplier 0.0 must be greater than 0"),
    "negative epsilon": (["train", "adult", "--epsilon", "-1"], "--epsilon -1.0 must be greater than 0"),
    "noise and epsilon": (["train", "adult", "--epsilon", "2", "--noise-multiplier", "1"], "exclude each other"),
    "empty batch": (["train", "adult", "--batch-size", "0"], "--batch-size 0 must be an integer of at least 1"),
    "huge batch": (["train", "adult", "--batch-size", "30000"], "--batch-size 30000 must lie in (0, 29305]"),
    "infinite rate": (["train", "adult", "--learning-rate", "inf"], "--learning-rate inf must be a finite number"),
    "no clipping": (["train", "adult", "--clip-norm", "0"], "--clip-norm 0.0 must be greater than 0"),
    "no epochs": (["train", "adult", "--epochs", "0"], "--epochs 0.0 must be greater than 0"),
    "no units": (["train", "adult", "--hidden-units", "0"], "--hidden-units 0 must be an integer of at least 1"),
    "negative seed": (["train", "adult", "--seed", "-1"], "--seed -1 must be an integer of at least 0"),
    "no data": (["train", "adult", "--data", "/nowhere"], "/nowhere: no such folder. Put the original a9a.xz at"),
    "resume nothing": (["train", "--resume", "/nowhere"], "/nowhere: is not a run folder"),
    "resume with settings": (["train", "--resume", "/nowhere", "--epochs", "3"], "takes every setting from the run"),
    "resume with a name": (["train", "adult", "--resume", "/nowhere"], "takes every setting from the run"),
    "probability above 1": (
        ["epsilon", *EVENTS[:3], "1.5", *EVENTS[4:]],
        "--sampling-probability 1.5 must lie in (0, 1]",
    ),
    "no steps": (["epsilon", *EVENTS[:5], "0"], "epsilon: --steps 0 must be an integer of at least 1"),
    "endless steps": (["epsilon", *EVENTS[:5], "9" * 26], "must be at most 9007199254740992"),
    "many seeds": (["reproduce", "gdp-adult", "--seed", "0-99999999999"], "names more than 1000 seeds"),
    "certain delta": (["epsilon", *EVENTS, "--delta", "1"], "--delta 1.0"),
    "nothing to price": (["epsilon"], "epsilon: name a RUN, or give --noise-multiplier and the steps"),
    "impossible target": (["calibrate", "--epsilon", "-2", *EVENTS[2:]], "-2"),
    "rate above 1": (["tradeoff", *EVENTS, "--alpha", "2"], "--alpha 2.0 must lie in [0, 1]"),
    "tiny noise": (["train", "adult", "--noise-multiplier", "1e-300"], "--noise-multiplier 1e-300 must lie in [0.001"),
    "huge noise": (["train", "adult", "--noise-multiplier", "1e300"], "--noise-multiplier 1e+300 must lie in [0.001"),
    "many epochs": (["train", "adult", "--epochs", "1e300"], "--epochs 1e+300 must lie in (0, 1e+06]"),
    "many units": (["train", "adult", "--hidden-units", "100000000000"], "--hidden-units 100000000000 must lie in"),
    "huge rate": (["train", "adult", "--learning-rate", "1e300"], "--learning-rate 1e+300 must lie in (0, 1e+30]"),
    "huge seed": (["train", "adult", "--seed", "9" * 23], "must be an integer of at most 2**63 - 1"),
    "unnamed run": (["train", "adult", "--run", ""], "Invalid value for '--run': it is empty"),
    "unnamed resume": (["train", "--resume", ""], "Invalid value for '--resume': it is empty"),
    "no steps to calibrate": (["calibrate", "--epsilon", "2", *EVENTS[2:5], "0"], "calibrate: --steps 0 must be"),
    "no steps to trade": (["tradeoff", *EVENTS[:5], "0"], "tradeoff: --steps 0 must be"),
    "negative rate": (["tradeoff", *EVENTS, "--alpha", "-0.5"], "--alpha -0.5 must lie in [0, 1]"),
    "no picture": (["epsilon", *EVENTS, "--plot", "epsilon.jpg"], "'epsilon.jpg' must end in .svg, .png, .pdf"),
    "picture nowhere": (["epsilon", *EVENTS, "--plot", "nowhere/epsilon.png"], "nowhere/epsilon.png: No such file"),
    "no steps for delta": (["delta", "--epsilon", "2", *EVENTS[:5], "0"], "delta: --steps 0 must be an integer"),
    "epsilon not a number": (["delta", "--epsilon", "nan", *EVENTS], "--epsilon nan must be a finite number"),
    "no steps to compare": (["compare", *EVENTS[:5], "0"], "compare: --steps 0 must be an integer of at least 1"),
    "compare at no delta": (["compare", *EVENTS, "--delta", "0"], "--delta 0.0 must lie in (0, 1)"),
    "nothing to reproduce": (["reproduce", "gdp"], "experiment='gdp' must be one of 'accountant-q0.01', 'abadi-"),
    "search on a table": (["search", "people.csv"], "search: people.csv is a table, and the command searches with"),
    "misspelt": (["reproduce", "gdp-adlut"], "experiment='gdp-adlut' is unknown. Did you mean 'gdp-adult'? Try"),
    "no seed": (["reproduce", "gdp-adult", "--seed", "x"], "'x' must be a seed, or several as in 0,3,7 or 0-4"),
    "seed twice": (["reproduce", "gdp-adult", "--seed", "1,0-2"], "'1,0-2' must be a seed, or several"),
    "no data to reproduce": (
        ["reproduce", "gdp-adult", "--data", "/nowhere"],
        "/nowhere: no such folder. Put the original a9a.xz at",
    ),
    "list with options": (["reproduce", "--quick"], "reproduce: name an experiment"),
    "reproduce nothing on": (["reproduce", "--resume", "/nowhere"], "/nowhere/settings.json: cannot be read"),
    "reproduce on with more": (["reproduce", "--resume", "/nowhere", "--quick"], "takes every setting from the run"),
    "report without runs": (["report"], "Missing argument 'RUN...'"),
    "report with a card alone": (["report", "--model-card"], "Missing argument 'RUN...'"),
    "report on nothing": (["report", "/nowhere"], "/nowhere/results.json: cannot be read"),
    "not a rate": (["tradeoff", *EVENTS, "--alpha", "nan"], "--alpha nan must lie in [0, 1]"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", WITHOUT_TORCH.values(), ids=WITHOUT_TORCH)
def test_cli_does_not_wait_for_torch(arguments):
    code = "import sys; from torch_privacy.cli import run; run(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False).returncode == 0


@pytest.mark.thorough(but=3)
def test_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"torch-privacy {torch_privacy.__version__}\n"


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_cli_answers_a_mistake_with_one_sentence_and_code_2(arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert re.fullmatch(r"torch-privacy: [^\n]+\.\n", shown.err)
    assert list(tmp_path.iterdir()) == []  # a mistake leaves nothing behind


def test_cli_refuses_a_folder_in_use(tmp_path, capsys):
    (tmp_path / "notes").touch()
    assert run(["train", "adult", "--run", str(tmp_path)]) == 2
    assert run(["train", "adult", "--run", str(tmp_path / "notes")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is not empty. Name a new folder, or continue an unfinished run with --resume." in first
    assert "is not a folder" in second


def test_cli_says_what_a_run_without_a_step_has_cost(tmp_path, capsys):
    """A folder of a run that was killed while it learnt its schema: neither advice leads in a circle."""
    (tmp_path / "ledger.jsonl").write_text('{"ledger":1}\n')
    for arguments in (["adult", "--run", str(tmp_path)], ["--resume", str(tmp_path)]):
        assert run(["train", *arguments]) == 2
        shown = capsys.readouterr().err
        assert f"{tmp_path / 'ledger.jsonl'} has what was released. Keep it and name a new folder;" in shown
        assert "with --resume" not in shown


def test_cli_refuses_a_path_below_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["train", "adult", "--run", str(tmp_path / "file" / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_epsilon_prints_the_bracket_rounded_outward(capsys):
    assert run(["epsilon", *EVENTS]) == 0
    low, high = PROFILE.epsilon(1e-5)
    assert f"[{round_down(low)}, {round_up(high)}]" in capsys.readouterr().out


def test_epsilon_json_has_every_number(capsys):
    assert run(["epsilon", *EVENTS, "--delta", "1e-6", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    low, high = PROFILE.epsilon(1e-6)
    assert shown["epsilon"] == {"low": low, "high": high}
    assert shown["delta"] == 1e-6
    assert shown["sampler"] == "Poisson"
    assert shown["neighboring_relation"] == "add_or_remove_one"
    assert shown["clt"]["epsilon"] == privacy.clt(equal_releases(1.1, 0.01, 100)).epsilon(1e-6)
    assert "not a bound" in shown["clt"]["note"]
    assert shown["moments_accountant"]["epsilon"] == privacy.moments_of(equal_releases(1.1, 0.01, 100), 1e-6)
    for found, rate in zip(shown["attacker"]["true_positive_rates"], (0.01, 0.001, 0.0001), strict=True):
        power = PROFILE.true_positive_rate(rate)
        assert found == {"false_positive_rate": rate, "low": power.low, "high": power.high}
    assert shown["attacker"]["mu"]["high"] == PROFILE.mu().high
    assert shown["attacker"]["mu"]["regret"]["high"] == PROFILE.regret().high


@pytest.mark.thorough
def test_epsilon_and_compare_price_a_person_with_several_examples(capsys):
    assert run(["epsilon", *EVENTS, "--group-size", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    low, high = privacy.compose([(privacy.SubsampledGroup(1.1, 0.01, 4), 100)]).epsilon(1e-5)
    assert shown["epsilon"] == {"low": low, "high": high}
    assert run(["compare", *EVENTS, "--group-size", "4", "--json"]) == 0
    persons = json.loads(capsys.readouterr().out)["persons"]
    assert persons["epsilon_sampling_examples"] == {"low": low, "high": high}
    assert persons["rule"].startswith("Sample persons (owners of Examples, per_owner=4) if")


@pytest.mark.thorough
def test_epsilon_json_says_null_where_a_number_is_infinite(capsys):
    arguments = ["--noise-multiplier", "0.1", "--sampling-probability", "0.999", "--steps", "1", "--delta", "1e-300"]
    assert run(["epsilon", *arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["clt"]["epsilon"] is None  # its mu is 5e21
    assert shown["epsilon"]["high"] > 400


@pytest.mark.thorough
def test_calibrate_never_ends_above_the_target(capsys):
    assert run(["calibrate", "--epsilon", "2", *EVENTS[2:], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"]["high"] <= 2
    assert shown["epsilon"]["high"] > 1.99
    assert shown["noise_multiplier"] == privacy.calibrate(2.0, 1e-5, sampling_probability=0.01, num_steps=100)


def test_tradeoff_agrees_with_the_profile(capsys):
    assert run(["tradeoff", *EVENTS, "--alpha", "0.01", "--alpha", "0.5", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["tradeoff"]
    curve = PROFILE.tradeoff([0.01, 0.5])
    assert [point["alpha"] for point in points] == [0.01, 0.5]
    assert [point["beta_low"] for point in points] == pytest.approx(list(curve.low), rel=1e-12)
    assert [point["beta_high"] for point in points] == pytest.approx(list(curve.high), rel=1e-12)


def test_tradeoff_prints_a_line_per_rate_and_what_follows_from_the_curve(capsys):
    assert run(["tradeoff", *EVENTS]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 6 + 1 + 3
    assert f"at most {round_up(100 * PROFILE.advantage().high, 1)} %" in shown[-3]
    assert f"report {round_up(PROFILE.mu().high)}" in shown[-2]
    assert f"at most {round_up(PROFILE.regret().high, 4)}" in shown[-1]


def test_tradeoff_names_the_smallest_gaussian_below_the_curve(capsys):
    assert run(["tradeoff", *EVENTS, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["advantage"] == PROFILE.advantage()._asdict()
    low, high = shown["mu"]["low"], shown["mu"]["high"]
    assert 0 < low <= high < 1.01 * low
    alpha = np.geomspace(1e-6, 0.99, 200)
    curve = PROFILE.tradeoff(alpha)
    inside = curve.low > 1e-6
    assert (privacy.tradeoff.Gaussian(high)(alpha) <= curve.high + 1e-9)[inside].all()
    assert not (privacy.tradeoff.Gaussian(0.97 * low)(alpha) <= curve.high)[inside].all()


def test_delta_prints_the_bracket_rounded_outward(capsys):
    assert run(["delta", "--epsilon", "0.5", *EVENTS]) == 0
    low, high = PROFILE.delta(0.5)
    text = capsys.readouterr().out
    shown = [float(value) for value in re.search(r"\[(.*), (.*)\]; report", text).groups()]
    assert shown[0] <= low <= high <= shown[1]
    assert shown == pytest.approx([low, high], rel=0.01)
    assert "an approximation, not a bound" in text


def test_delta_json_has_the_bracket_and_the_clt(capsys):
    assert run(["delta", "--epsilon", "-0.5", *EVENTS, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["delta"] == PROFILE.delta(-0.5)._asdict()
    assert shown["epsilon"] == -0.5
    assert shown["clt"]["delta"] == privacy.clt(equal_releases(1.1, 0.01, 100)).delta(-0.5)


PICTURES = {
    "epsilon": ["epsilon", *EVENTS],
    "delta": ["delta", "--epsilon", "0.5", *EVENTS],
    "calibrate": ["calibrate", "--epsilon", "2", *EVENTS[2:]],
    "tradeoff": ["tradeoff", *EVENTS],
    "compare": ["compare", *EVENTS],
}
HEADS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.thorough
@pytest.mark.parametrize("command", PICTURES)
def test_plot_draws_the_same_picture_each_time_and_changes_no_answer(command, tmp_path, capsys):
    assert run([*PICTURES[command], "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for name in ("a.svg", "b.svg"):
        assert run([*PICTURES[command], "--json", "--plot", str(tmp_path / name)]) == 0
        shown = capsys.readouterr()
        assert shown.err == f"picture: {tmp_path / name}\n"
        if command != "compare":  # which shows times
            assert json.loads(shown.out) == plain
    first, second = (tmp_path / "a.svg").read_bytes(), (tmp_path / "b.svg").read_bytes()
    assert first == second
    assert b"100 steps" in first


@pytest.mark.parametrize("kind", HEADS)
def test_plot_writes_the_format_of_the_name(kind, tmp_path):
    figure = plots.tradeoff_plot({"one": privacy.tradeoff.Gaussian(1.0)})
    plots.save(figure, tmp_path / f"curve.{kind}")
    assert (tmp_path / f"curve.{kind}").read_bytes().startswith(HEADS[kind])
    with pytest.raises(ValueError, match=r"must end in \.svg, \.png, \.pdf"):
        plots.save(figure, tmp_path / "curve")


@pytest.mark.thorough
def test_compare_holds_every_claim_against_the_certified_bracket(capsys):
    assert run(["compare", *EVENTS, "--json"]) == 0
    claims = {claim["accountant"]: claim for claim in json.loads(capsys.readouterr().out)["claims"]}
    low, high = PROFILE.epsilon(1e-5)
    assert (claims["torch_privacy"]["low"], claims["torch_privacy"]["epsilon"]) == (low, high)
    for name, claim in claims.items():
        assert claim["note"] == ""
        if claim["kind"] == "upper bound" or name == "prv-accountant":
            assert claim["epsilon"] >= low
            assert claim["true_delta"]["low"] <= 1e-5
        if claim["verdict"] == "below the truth":
            assert claim["epsilon"] < low
            assert claim["true_delta"]["high"] > 1e-5
    assert claims["CLT"]["epsilon"] == privacy.clt(equal_releases(1.1, 0.01, 100)).epsilon(1e-5)
    assert claims["moments accountant"]["epsilon"] == privacy.moments_of(equal_releases(1.1, 0.01, 100), 1e-5)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("width", [72, 80, 120])
def test_compare_table_says_what_is_below_the_truth_at_any_width(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for slow in ("prv-accountant", "dp-accounting PLD", "dp-accounting RDP"):
        monkeypatch.delitem(comparison.ACCOUNTANTS, slow)
    assert run(["compare", "--noise-multiplier", "0.7", *EVENTS[2:5], "10000"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line.rstrip()) <= width and "…" not in line for line in shown.splitlines())
    for words in ("torch_privacy", "certified", "upper bound", "not valid", "approximation,", "below", "the truth"):
        assert words in shown


def test_compare_names_a_peer_that_is_not_installed(monkeypatch):
    def without(name, *rest, **options):
        if name.startswith(("dp_accounting", "prv_accountant")):
            raise ImportError(name)
        return original(name, *rest, **options)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    claims = {claim.accountant: claim for claim in comparison.compare(equal_releases(1.1, 0.01, 100), 1e-5)}
    assert claims["prv-accountant"].note == "not installed: pip install prv-accountant"
    assert claims["dp-accounting PLD"].note == "not installed: pip install dp-accounting"
    assert claims["dp-accounting RDP"].epsilon is None
    assert claims["RDP"].epsilon == privacy.rdp(equal_releases(1.1, 0.01, 100), 1e-5)


@pytest.mark.thorough
def test_compare_shows_a_peer_that_fails_and_goes_on(monkeypatch):
    def fails(setting):
        raise MemoryError("too many\npoints")

    monkeypatch.setitem(comparison.ACCOUNTANTS, "prv-accountant", ("bracket", fails))
    claims = {claim.accountant: claim for claim in comparison.compare(equal_releases(1.1, 0.01, 100), 1e-5)}
    assert claims["prv-accountant"].note == "failed: too many points"
    assert claims["CLT"].epsilon is not None


def test_compare_asks_no_one_for_minutes(capsys):
    claims = {claim.accountant: claim for claim in comparison.compare(equal_releases(20.0, 1e-4, 100_001), 1e-5)}
    assert claims["prv-accountant"].note.startswith("not asked above 100,000 steps")


def test_compare_asks_no_library_for_a_grid_of_enormous_losses():
    found = {one.accountant: one for one in comparison.compare([(privacy.SubsampledGaussian(0.5, 0.5), 1000)], 1e-5)}
    for name in ("prv-accountant", "dp-accounting PLD"):
        assert found[name].epsilon is None
        assert found[name].note.startswith(("not asked above an epsilon of 200", "not installed"))
    assert found["dp-accounting RDP"].note == "" or "not installed" in found["dp-accounting RDP"].note


@pytest.mark.parametrize("command", ["train", "reproduce", "epsilon", "delta", "calibrate", "tradeoff", "compare"])
def test_help_explains_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    options = re.findall(r"^.[ *]+(--\S+) +(?:--\S+ +)?[<A-Z]\S+ +(.*?) *.$", shown, re.MULTILINE)
    assert len(options) >= 5
    assert all(len(text.split()) >= 3 for _, text in options)


def all_commands(command, name="torch-privacy"):
    for word, one in getattr(command, "commands", {}).items():
        yield from all_commands(one, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


@pytest.mark.parametrize("name", [name for name, _ in all_commands(typer.main.get_command(app))])
def test_help_fills_its_lines(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split()[1:], "--help"]) == 0
    prose = capsys.readouterr().out.partition("╭")[0].splitlines()
    for line, following in pairwise(map(str.strip, prose)):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > 78, line


def test_help_names_options_of_the_same_command_alone():
    strange = []
    for name, command in all_commands(typer.main.get_command(app)):
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        texts = [command.help or ""]
        for one in command.params:
            texts += [getattr(one, "help", None) or "", str(getattr(one, "show_default", ""))]
        strange += [(name, option) for option in re.findall(r"--[a-z][a-z-]*", " ".join(texts)) if option not in known]
    assert not strange


def test_train_help_states_the_settings_of_the_experiments(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(["train", "--help"])
    shown = capsys.readouterr().out
    settings = load_trainable("adult").settings()
    for option, value in {
        "epsilon": settings.target_epsilon,
        "delta": settings.delta,
        "batch-size": settings.expected_batch_size,
        "learning-rate": settings.learning_rate,
        "clip-norm": settings.clip_norm,
        "epochs": settings.epochs,
        "hidden-units": settings.hidden_units,
        "seed": settings.seed,
    }.items():
        default = re.search(rf"--{option} .*?\[default: \((?:adult: )?(.*?)\)\]", shown, re.DOTALL)
        assert default is not None, option
        assert float(default[1]) == value
    assert all(name in shown for name in TRAININGS)


def test_price_out_of_range_of_floats_is_one_sentence(capsys, monkeypatch):
    def overflow(*_):
        raise OverflowError(34, "Numerical result out of range")

    monkeypatch.setattr("torch_privacy.privacy.summary.summarize", overflow)
    assert run(["epsilon", *EVENTS]) == 2
    assert re.fullmatch(r"torch-privacy: a number given is too large or too small [^\n]*\.\n", capsys.readouterr().err)
