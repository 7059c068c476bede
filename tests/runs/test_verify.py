# SPDX-License-Identifier: Apache-2.0
"""A run folder is verified as it was written, and what was tampered with is found."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from ranked import CASES, go, start
from run_folders import drawn_quickly
from torch.nn.functional import cross_entropy

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.cli import run as command
from torch_privacy.experiments.private_search import PrivateSearch
from torch_privacy.privacy.events.base import EVENTS
from torch_privacy.privacy.ledger_file import LedgerFile
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair
from torch_privacy.privacy.rounding import round_up
from torch_privacy.privacy.summary import percent
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.report import training_plots
from torch_privacy.runs.verify import NEVER_CHECKED, Outcome, verify
from torch_privacy.sklearn import PrivateClassifier

N, STEPS, NOISE = 200, 6, 8.0
FORMER = Path(__file__).parent / "former"
STEP = privacy.SubsampledGaussian(NOISE, 1.0, privacy.NeighboringRelation.REPLACE_SPECIAL)
PROFILE = privacy.compose([(privacy.Gaussian(20.0), 1), (STEP, STEPS)])
EPSILON, CAUGHT = round_up(PROFILE.epsilon(1e-4).high), percent(PROFILE.true_positive_rate(0.01).high)


def train(folder, steps=STEPS, **settings):
    """Trains in a folder; full batches by default, which have a price in closed form."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(N, 3), torch.randint(2, (N,)))
    model = torch.nn.Linear(3, 2)
    given = {"expected_batch_size": N, "num_steps": STEPS, "noise_multiplier": NOISE, "delta": 1e-4, **settings}
    if "target_epsilon" in given:
        del given["noise_multiplier"]
    given = {"clipping": tp.Flat(1.0), **given}
    examples = tp.Examples(data, **given.pop("examples", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = tp.PrivateTraining(model, optimizer, examples, run_folder=folder, **given)
    for x, y in training:
        if training.step(cross_entropy(training.model(x), y, reduction="none")) and training.step_count == steps:
            break
    return training


def finish(folder, training):
    training.write_run({"accuracy": 0.5})
    RunFolder(folder).card.write_text(tp.model_card(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Draws no figure: to draw those of a page takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_plots, "as_svg", drawn_quickly)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    prior = privacy.Release(privacy.Gaussian(20.0), "components")
    return finish(folder, train(folder, prior_releases=[prior]))


class Tampered:
    """A run folder with functions that change it, as an attacker who may know the formats."""

    def __init__(self, path):
        self.folder = RunFolder(path)

    def edit(self, name, change):
        path = self.folder.path / name
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    def text(self, name, old, new):
        path = self.folder.path / name
        assert old in path.read_text(), f"{name} has no {old!r}"
        path.write_text(path.read_text().replace(old, new))

    def lines(self, change):
        """Changes the ledger's lines without their digests, and writes them with new ones."""
        file = LedgerFile(self.folder.ledger, read_only=True)
        lines = file.read()
        file.release()
        change(lines)
        steps = iter(range(len(lines)))
        lines = [line | {"step": next(steps)} if "step" in line else line for line in lines]
        self.folder.ledger.unlink()
        file = LedgerFile(self.folder.ledger, create=True)
        with file.published():
            file.append(*file.encode(lines))
        file.close()

    def raw(self, change):
        lines = self.folder.ledger.read_bytes().splitlines(keepends=True)
        change(lines)
        self.folder.ledger.write_bytes(b"".join(lines))

    def seal(self):
        """Computes the digests in results.json again."""
        results = json.loads(self.folder.results.read_text())
        files = [self.folder.path / name for name in results.pop("files", [])]
        results.pop("check", None)
        self.folder.write_checked(self.folder.results, results, *files)


def statement(change):
    return lambda run: run.edit("privacy.json", change)


def results(change):
    return lambda run: run.edit("results.json", change)


def settings(change):
    return lambda run: run.edit("settings.json", change)


def value(*path, to=None, times=None):
    """Returns a change of one entry: a new value, or a factor on the old one."""

    def change(content):
        *outer, last = path
        for key in outer:
            content = content[key]
        content[last] = to if times is None else content[last] * times

    return change


def drop(*path):
    def change(content):
        *outer, last = path
        for key in outer:
            content = content[key]
        del content[last]

    return change


def all_of(*edits):
    return lambda run: [edit(run) for edit in edits]


def louder(*path):
    """Returns a change that gives the steps twice their noise in a list of releases."""

    def change(content):
        for key in path:
            content = content[key]
        content[1]["event"]["noise_multiplier"] = 2 * NOISE

    return change


def louder_lines(lines):
    for line in lines:
        if line.get("event", {}) != 0 and "define" in line and line["define"] == 1:
            line["event"]["noise_multiplier"] = 2 * NOISE


def without_prior(content):
    del content["releases"][0], content["prior_releases"]


def swapped(lines):
    lines[-1], lines[-2] = lines[-2], lines[-1]


def flipped(lines):
    lines[-1] = lines[-1].replace(b'"fingerprint":"', b'"fingerprint":"0')


def half(name):
    return all_of(statement(value(name, "low", times=0.5)), statement(value(name, "high", times=0.5)))


def lower(*path):
    return all_of(statement(value(*path, "low", to=0.0)), statement(value(*path, "high", times=0.9)))


LEDGER = "releases of the ledger"
SEALED = {  # name -> (what is changed before the digests are computed again, a finding that must be false)
    "epsilon lowered": (half("epsilon"), "epsilon at delta = 0.0001"),
    "epsilon lowered by a percent": (
        all_of(statement(value("epsilon", "low", to=0.0)), statement(value("epsilon", "high", times=0.99))),
        "epsilon at",
    ),
    "epsilon lowered in two files": (
        all_of(half("epsilon"), results(value("privacy", "epsilon", to={"low": 0.1, "high": 0.2}))),
        "epsilon at delta = 0.0001",
    ),
    "epsilon of the steps made lowered": (half("epsilon_of_steps_made"), "epsilon of the steps made"),
    "epsilon with its ends exchanged": (statement(value("epsilon", to={"low": 9.0, "high": 1.0})), "epsilon at delta"),
    "delta changed": (statement(value("delta", to=1e-3)), "settings.json: delta"),
    "delta above 1/n": (statement(value("delta", to=0.1)), "delta is below one over"),
    "noise raised": (statement(louder("releases")), LEDGER),
    "noise raised in two files": (
        all_of(statement(louder("releases")), results(louder("privacy", "releases"))),
        LEDGER,
    ),
    "releases removed": (statement(value("releases", 1, "count", to=2)), LEDGER),
    "all releases removed": (statement(value("releases", to=[])), LEDGER),
    "a release removed from what is priced": (
        lambda run: run.edit("privacy.json", lambda s: s.update(releases_priced=s["releases"][:1])),
        "all releases are priced",
    ),
    "an unknown event": (statement(value("releases", 0, "event", "type", to="Magic")), "schema of the statement"),
    "another format": (statement(value("format", to=3)), "schema of the statement"),
    "mu lowered": (lower("attacker", "mu"), "mu"),
    "regret lowered": (statement(value("attacker", "mu", "regret", to={"low": 0, "high": 0})), "results.json: mu"),
    "advantage lowered": (lower("attacker", "advantage"), "largest advantage"),
    "rate at 1 % lowered": (lower("attacker", "true_positive_rates", 0), "true positive rate at 1 %"),
    "rate at 0.01 % lowered": (lower("attacker", "true_positive_rates", 2), "true positive rate at 0.01 %"),
    "a rate omitted": (statement(drop("attacker", "true_positive_rates", 2)), "true positive rates"),
    "unit changed": (statement(value("unit", to="one person")), "report.html: its numbers"),
    "an owner invented": (statement(value("owner", to="person")), "what is protected"),
    "relation changed": (
        statement(value("neighboring_relation", to="add_or_remove_one")),
        "neighboring relation",
    ),
    "sampler changed": (statement(value("sampler", to="balls and bins")), "sampler"),
    "prior release omitted": (statement(without_prior), LEDGER),
    "prior release not listed": (statement(drop("prior_releases")), "settings.json: prior releases"),
    "prior release omitted in statement and ledger": (
        all_of(statement(without_prior), lambda run: run.lines(lambda lines: lines.__delitem__(2))),
        "settings.json: prior releases",
    ),
    "number of examples raised": (statement(value("num_examples", to=10 * N)), "sampling probability"),
    "batch size lowered": (statement(value("expected_batch_size", to=10)), "sampling probability"),
    "sampling probability lowered": (
        all_of(statement(value("sampling_probability", to=0.5)), statement(value("expected_batch_size", to=N / 2))),
        "noise and sampling of each step",
    ),
    "noise multiplier raised": (statement(value("noise_multiplier", to=16.0)), "noise and sampling of each step"),
    "steps made lowered": (statement(value("num_steps_made", to=2)), "results.json: num_steps_made"),
    "steps made raised": (statement(value("num_steps_made", to=20)), "a release for each step"),
    "steps planned lowered": (statement(value("num_steps_planned", to=3)), "steps made"),
    "a gap in what is covered hidden": (statement(drop("not_covered", 0)), "not covered, as in every statement"),
    "nothing said to be public": (statement(value("treated_as_public", to=[])), "treated as public"),
    "a budget that was exceeded": (statement(value("budget", to={"epsilon": 0.5, "delta": 1e-4})), "budget of epsilon"),
    "a target that was missed": (statement(value("target_epsilon", to=0.5)), "target of epsilon"),
    "a budget of the data with less drawn than this run spent": (
        statement(value("data_budget", to={"epsilon": 9.0, "delta": 1e-4, "epsilon_drawn": 0.1})),
        "budget of the data",
    ),
    "a stop declared without a reason": (
        all_of(
            statement(value("stop", "independent_of_data", to=True)),
            statement(value("num_steps_planned", to=2 * STEPS)),
        ),
        "all planned steps are priced",
    ),
    "clip norm changed": (statement(value("clipping", "clip_norm", to=0.5)), "settings.json: clipping"),
    "clipping rule changed": (statement(value("clipping", "rule", to="PerLayer")), "settings.json: clipping"),
    "rounding that the noise does not cover": (statement(value("noise_factor", "grid", to=1.1)), "noise covers its"),
    "a warning that is denied": (statement(value("warning", to="NOT PRIVATE")), "it says that it is private"),
    "coupled examples hidden": (
        lambda run: run.lines(lambda lines: lines.append({"warning": "NOT PRIVATE (examples depend on each other)"})),
        "it says that it is private",
    ),
    "noise raised in the ledger": (lambda run: run.lines(louder_lines), LEDGER),
    "a release cut off the ledger": (lambda run: run.lines(lambda lines: lines.pop()), LEDGER),
    "an empty ledger": (lambda run: run.raw(lambda lines: lines.clear()), "digests of the ledger's lines"),
    "a line dropped": (lambda run: run.raw(lambda lines: lines.__delitem__(4)), "digests of the ledger's lines"),
    "lines swapped": (lambda run: run.raw(swapped), "digests of the ledger's lines"),
    "a fingerprint changed": (lambda run: run.raw(flipped), "digests of the ledger's lines"),
    "results: epsilon lowered": (
        results(value("privacy", "epsilon", to={"low": 0.1, "high": 0.2})),
        "results.json: eps",
    ),
    "results: delta changed": (results(value("privacy", "delta", to=1e-3)), "results.json: delta"),
    "results: releases removed": (results(value("privacy", "releases", 1, "count", to=1)), "results.json: releases"),
    "results: a rate lowered": (
        results(value("privacy", "attacker", "true_positive_rates", 0, "high", to=0.011)),
        "results.json: mu and rates",
    ),
    "results: number of examples": (results(value("num_examples", to=10**6)), "results.json: size of the data"),
    "results: a release added": (results(value("privacy", "releases", 1, "count", to=7)), "results.json: releases"),
    "results: steps": (results(value("privacy", "num_steps", to=100)), "results.json: num_steps, priced"),
    "results: sampler": (results(value("privacy", "sampler", to="Poisson")), "results.json: sampler"),
    "results: epsilon of the limit": (results(value("privacy", "clt", "epsilon", times=0.9)), "results.json: epsilon"),
    "results: epsilon of moments": (
        results(value("privacy", "moments_accountant", "epsilon", times=0.9)),
        "results.json: epsilon of moments_accountant",
    ),
    "results: relation": (results(value("privacy", "neighboring_relation", to="replace_one")), "results.json: neigh"),
    "a digest left out": (results(drop("files", "ledger.jsonl")), "digest of ledger.jsonl"),
    "settings: noise": (settings(value("noise_multiplier", to=16.0)), "settings.json: noise_multiplier"),
    "settings: fixed noise": (settings(value("fixed", "noise_multiplier", to=16.0)), "settings.json: fixed settings"),
    "settings: steps": (settings(value("num_steps", to=1000)), "settings.json: num_steps"),
    "settings: examples": (settings(value("num_examples", to=10**6)), "settings.json: num_examples"),
    "settings: a test seed": (settings(value("test_seed", to=1)), "it says that it is private"),
    "metrics: epsilon lowered": (
        lambda run: run.folder.metrics.write_text(
            "\n".join([*run.folder.metrics.read_text().splitlines()[:-1], f"private,6,{STEPS},0.5,,,0.1,0.2,0", ""])
        ),
        "metrics.csv: epsilon",
    ),
    "report: headline lowered": (lambda run: run.text("report.html", f"ε ≤ {EPSILON}", "ε ≤ 0.1"), "report.html"),
    "report: a rate lowered": (lambda run: run.text("report.html", f"at most {CAUGHT}<", "at most 1.1 %<"), "report"),
    "card: epsilon lowered": (lambda run: run.text("README.md", f"**ε ≤ {EPSILON}", "**ε ≤ 0.1"), "README.md"),
    "card: relation changed": (lambda run: run.text("README.md", "| zero out one", "| add/remove one"), "README.md"),
    "key for all to read": (lambda run: run.folder.fingerprint_key.chmod(0o644), "secret files"),
    "key in the card": (
        lambda run: run.text("README.md", "---\n#", f"---\n#{run.folder.fingerprint_key.read_text()}#"),
        "no secret in the other files",
    ),
}
NAIVE = {  # without new digests
    "another model": (lambda run: run.folder.model.write_bytes(b"other weights"), "digest of model.safetensors"),
    "another statement": (half("epsilon"), "digest of privacy.json"),
    "other results": (results(value("num_examples", to=10**6)), "digest of results.json itself"),
}


def false_findings(folder):
    return [finding.subject for finding in verify(folder).of(Outcome.DIFFERS)]


def test_what_was_written_is_verified_and_the_limits_are_named(finished, capsys):
    found = verify(finished)
    assert false_findings(finished) == []
    assert not found.is_false
    unchecked = [finding.subject for finding in found.of(Outcome.UNCHECKED)]
    assert set(unchecked) == set(NEVER_CHECKED)
    assert command(["verify", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "nothing is false" in shown
    assert "the weights come from these releases" in shown


def test_tampered_folders_are_found(finished, tmp_path, capsys):
    """More than 60 edits. All but three come with new digests of the files, as a skilled attacker would write them."""
    missed = {}
    for number, (name, (edit, subject)) in enumerate([*SEALED.items(), *NAIVE.items()]):
        run = Tampered(tmp_path / f"{number}")
        shutil.copytree(finished, run.folder.path)
        edit(run)
        if name in SEALED:
            run.seal()
        found = false_findings(run.folder.path)
        by_digests = [one for one in found if one.startswith("digest of")]
        if not any(one.startswith(subject) for one in found) or (name in SEALED and by_digests not in ([], [subject])):
            missed[name] = found
    assert missed == {}
    assert command(["verify", str(run.folder.path)]) == 1
    assert capsys.readouterr().out.startswith("differs: 1\n")


def test_planned_steps_left_out_are_found_whatever_limit_a_training_has(tmp_path):
    """A budget or a target ends a training where it is spent; where it is not, all planned steps count."""
    for name, limit in {"budget": {"budget": privacy.Budget(50.0, 1e-4)}, "target": {"target_epsilon": 2.0}}.items():
        given = {"examples": limit} if name == "budget" else limit
        run = Tampered(finish(tmp_path / name, train(tmp_path / name, steps=3, **given)))
        assert false_findings(run.folder.path) == []
        run.edit("privacy.json", drop("releases_priced"))
        assert "all planned steps are priced" in false_findings(run.folder.path)
    spent = tmp_path / "spent"
    finish(spent, train(spent, steps=None, examples={"budget": privacy.Budget(0.9, 1e-4)}))
    assert json.loads((spent / "privacy.json").read_text())["num_steps_made"] < STEPS
    assert false_findings(spent) == []


def test_who_changes_every_file_is_not_found_and_the_table_says_so(finished, tmp_path):
    """With twice the noise in all files, the folder is that of another training."""
    run = Tampered(tmp_path / "run")
    train(run.folder.path, noise_multiplier=2 * NOISE).write_run()
    shutil.copy(finished / "model.safetensors", run.folder.model)
    run.seal()
    found = verify(run.folder.path)
    assert not found.is_false
    assert {"all files were not changed together", "the weights come from these releases"} <= {
        finding.subject for finding in found.of(Outcome.UNCHECKED)
    }


def test_what_was_not_published_cannot_be_checked(finished, tmp_path):
    for name in ("privacy.json", "ledger.jsonl"):
        shutil.copy(finished / name, tmp_path)
    found = verify(tmp_path)
    assert not found.is_false
    assert {"digest of results.json itself", "report.html: its numbers"} <= {
        finding.subject for finding in found.of(Outcome.UNCHECKED)
    }
    agreeing = {finding.subject for finding in found.of(Outcome.AGREES)}
    assert {"epsilon at delta = 0.0001", "mu", "epsilon by dp-accounting", "releases of the ledger"} <= agreeing
    (tmp_path / "privacy.json").unlink()
    with pytest.raises(ValueError, match=r"has no privacy\.json"):
        verify(tmp_path)


@privacy.priced(lambda event: SubsampledGaussianPair(event.records / event.noise_over_clip_norm, 1.0))
@dataclass(frozen=True)
class SumOfRecords(privacy.Event):
    """A noisy sum over all the data, in which one person has at most ``records`` rows."""

    noise_over_clip_norm: float
    records: int
    neighboring_relation = privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "full batch"


del EVENTS["SumOfRecords"]  # but in the test that uses it

KINDS = {
    "Poisson": {"expected_batch_size": 20},
    "bins": {"expected_batch_size": 20, "num_steps": 10, "sampling": tp.BallsAndBins(), "steps": 10},
    "truncated": {"expected_batch_size": 20, "sampling": tp.Truncated(most=40)},
    "sizes that vary": {"expected_batch_size": 20, "sampling": tp.Varying([1, 1, 1, 2, 2, 2])},
    "banded": {"expected_batch_size": 20, "correlation": tp.Banded(bands=2)},
    "stopped early": {"steps": 3},
    "a target": {"target_epsilon": 2.0},
    "a budget": {"num_steps": 20, "steps": 20, "examples": {"budget": privacy.Budget(1.0, 1e-4)}},
    "a test seed": {"test_seed": 1},
    "owners": {"expected_batch_size": 10, "examples": {"owners": [i // 4 for i in range(N)], "per_owner": 2}},
    "a clip norm without a point": {"clipping": tp.Flat(1)},
    "layers": {"expected_batch_size": 20, "clipping": tp.PerLayer(1.0)},
    "projections": {"expected_batch_size": 20, "clipping": tp.Sketched(32, clip_norm=1.0)},
    "an adaptive norm": {"expected_batch_size": 20, "clipping": tp.Adaptive(1.0), "noise_multiplier": 1.0},
    "a schedule": {"noise_schedule": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]},
    "prior releases": {"prior_releases": [privacy.Release(privacy.Gaussian(20.0), text) for text in ("a", "b")]},
}


def embedded(share):
    public = torch.randn(30, 3, generator=torch.Generator().manual_seed(9))
    subspace = tp.AnchorSubspace(public, num_basis=4)
    return tp.GEP(subspace, tp.Flat(1.0), tp.Flat(0.2), embedding_share=share)


def components():
    return tp.PrivatePCA(2, noise_multiplier=20.0).fit(np.random.default_rng(0).normal(size=(N, 3))).release_


def own_event():
    return privacy.Release(SumOfRecords(20.0, 4), "a sum")


def on_ranks(rank, folder):
    training = start(CASES["uneven"], "ddp", run_folder=folder, noise_multiplier=NOISE, delta=1e-4, test_seed=None)
    go(training, CASES["uneven"].losses)


def searched(folder):
    law = {"mean_runs": 2.0, "distribution": "geometric", "score_noise": 10.0}
    settings = {"noise_multiplier": 2.0, "epochs": 0.05, "expected_batch_size": 256}
    PrivateSearch("adult", [{"learning_rate": rate} for rate in (0.1, 0.5)], **law, **settings).run(RunFolder(folder))


def estimated(folder):
    x = np.random.default_rng(0).uniform(-1, 1, size=(N, 2))
    made = PrivateClassifier(classes=[0, 1], epochs=3, batch_size=20, refits="separate", run_folder=folder)
    made.fit(x, (x[:, 0] > 0).astype(int))


OTHERS = {
    "two ranks": lambda folder, ranks: ranks.run(on_ranks, folder),
    "a search": lambda folder, _: searched(folder),
    "an estimator": lambda folder, _: estimated(folder),
    "GEP": lambda folder, _: finish(folder, train(folder, expected_batch_size=20, clipping=embedded(0.5))),
    "GEP in unequal parts": lambda folder, _: finish(
        folder, train(folder, expected_batch_size=20, clipping=embedded(0.3))
    ),
    "principal components": lambda folder, _: finish(folder, train(folder, prior_releases=[components()])),
    "an event of one's own": lambda folder, _: finish(folder, train(folder, prior_releases=[own_event()])),
}
EDITS = {
    "epsilon lowered": half("epsilon"),
    "a line of the ledger removed": lambda run: run.lines(lambda lines: lines.pop()),
    "noise multiplier raised": statement(value("noise_multiplier", times=2)),
}


@pytest.mark.thorough
@pytest.mark.every_case
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_every_kind_of_training_is_verified_and_one_changed_number_is_found(kind, tmp_path, ranks2, monkeypatch):
    monkeypatch.setitem(EVENTS, "SumOfRecords", SumOfRecords)
    path = tmp_path / "run"
    if kind in OTHERS:
        OTHERS[kind](path, ranks2)
    else:
        finish(path, train(path, **KINDS[kind]))
    assert false_findings(path) == []
    missed = []
    for name, edit in EDITS.items():
        run = Tampered(tmp_path / name)
        shutil.copytree(path, run.folder.path)
        edit(run)
        run.seal()
        missed += [] if false_findings(run.folder.path) else [name]
    assert missed == []


def test_event_that_is_not_imported_is_no_agreement_and_the_cure_is_said(tmp_path):
    for name in ("privacy.json", "ledger.jsonl"):
        shutil.copy(FORMER / "loop" / name, tmp_path)
    Tampered(tmp_path).edit("privacy.json", value("releases", 0, "event", "type", to="SumOfRecords"))
    (found,) = verify(tmp_path).of(Outcome.DIFFERS)
    assert "import the module of an event of your own first" in found.detail


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("kind", ["experiment", "loop"])
def test_former_folders_are_verified(kind, tmp_path):
    shutil.copytree(FORMER / kind, tmp_path / kind)
    assert false_findings(tmp_path / kind) == []
