# SPDX-License-Identifier: Apache-2.0
"""Synthetic tables: the graphical model by brute force, prices by dp-accounting, runs that stop, what is refused."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

import torch_privacy as tp
from torch_privacy import privacy, tables
from torch_privacy.experiments.table_file import owners_in
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.runs.verify import verify
from torch_privacy.tables import Column, Schema
from torch_privacy.tables.encode import Encoder
from torch_privacy.tables.synthesis import GeneratorRun, SynthesisSettings, plan
from torch_privacy.tables.synthesis.cells import BINS, ColumnGrid
from torch_privacy.tables.synthesis.chain import Chain, marginal
from torch_privacy.tables.synthesis.graph import Model, NoisyCounts, elimination
from torch_privacy.tables.synthesis.judge import Judgement, audit, judge
from torch_privacy.tables.synthesis.marginals import Marginals, exponential_mechanism
from torch_privacy.tables.synthesis.network import RARE, RowNetwork
from torch_privacy.tables.synthesis.page import _scores, _scores_plot
from torch_privacy.tables.synthesis.released import PublicSetup
from torch_privacy.tables.synthesis.source import SourceRows

SIZES = (2, 3, 2, 4)
CLIQUES = [(0, 1), (1, 2), (0, 2), (2, 3)]
JOBS = ("nurse", "baker", "clerk")
SCHEMA = Schema(
    (
        Column("age", "number", (0, 96)),
        Column("job", "category", categories=JOBS),
        Column("income", "category", categories=("high", "low")),
    ),
    "income",
    "classification",
)
OPEN = Schema(tuple(Column(column.name, "learn") for column in SCHEMA.columns), "")


def people(n=400, seed=0):
    rng = np.random.default_rng(seed)
    age, job = rng.integers(20, 90, n), rng.integers(3, size=n)
    income = np.where(age + 20 * job + rng.normal(0, 10, n) > 75, "high", "low")
    return pd.DataFrame({"age": age.astype(str), "job": np.array(JOBS)[job], "income": income})


def settings(generator, **more):
    return SynthesisSettings(generator=generator, epsilon=4.0, delta=1e-4, **{"steps": 4, **more})


def finished(run):
    for _ in run.steps():
        pass
    return run.finish()


# The graphical model


def joint(model):
    """Returns the probability of every row, by the definition: the exponential of the sum of all potentials."""
    logits = np.zeros(SIZES)
    for columns, potential in model.potentials.items():
        logits += potential.reshape([SIZES[c] if c in columns else 1 for c in range(len(SIZES))])
    chances = np.exp(logits - logits.max())
    return chances / chances.sum()


def exact_marginals(rng, n=1000.0):
    truth = rng.dirichlet(np.ones(math.prod(SIZES))).reshape(SIZES)
    return [
        NoisyCounts(c, n * truth.sum(tuple(set(range(4)) - set(c))), 1.0) for c in [*CLIQUES, *[(i,) for i in range(4)]]
    ]


def test_the_chain_has_the_probabilities_of_the_potentials():
    rng = np.random.default_rng(0)
    model = Model(SIZES, exact_marginals(rng), 1000.0)
    model.potentials = {columns: rng.normal(size=value.shape) for columns, value in model.potentials.items()}
    chain = Chain(model.links(), tuple(map(np.arange, SIZES)), tuple(map(np.ones, SIZES)))
    rows = np.array(list(itertools.product(*map(range, SIZES))))
    np.testing.assert_allclose(np.exp(chain.log_chances(rows)), joint(model).ravel(), rtol=1e-12)
    drawn = marginal(chain.draw(200_000, rng), (0, 1, 2, 3), SIZES) / 200_000
    assert np.abs(drawn - joint(model)).max() < 6 * math.sqrt(0.25 / 200_000)


def test_a_fitted_model_has_the_measured_marginals_and_nothing_else():
    """Among all rows with these marginals it has the largest entropy, by construction."""
    measured = exact_marginals(np.random.default_rng(1))
    model = Model(SIZES, measured, 1000.0).fit(5000)
    for one in measured:
        found = joint(model).sum(tuple(set(range(4)) - set(one.columns)))
        np.testing.assert_allclose(1000 * found, one.counts, atol=0.5)
    assert set(model.potentials) == {one.columns for one in measured}


def test_two_measurements_count_by_their_precision_and_an_unknown_total_is_estimated():
    first, second = NoisyCounts((0,), np.array([300.0, 700.0]), 1.0), NoisyCounts((0,), np.array([400.0, 600.0]), 2.0)
    model = Model((2,), [first, second]).fit(2000)
    assert model.total == pytest.approx(1000)
    chances = model.links()[0].chances
    np.testing.assert_allclose(chances, [0.32, 0.68], atol=1e-3)  # (4 · 0.3 + 0.4) / 5


def test_every_measured_marginal_lies_within_one_group():
    groups = [{one, *around} for one, around in elimination(SIZES, CLIQUES)]
    assert all(any(set(clique) <= group for group in groups) for clique in CLIQUES)


# Cells


def test_a_row_is_encoded_by_its_own_cells_and_comes_back_within_its_bin():
    grid, frame = ColumnGrid(SCHEMA), people()
    codes = grid.encode(frame)
    np.testing.assert_array_equal(codes[5:6], grid.encode(frame.iloc[5:6]))
    back = grid.decode(codes, np.random.default_rng(0), whole=["age"])
    np.testing.assert_array_equal(grid.encode(back), codes)
    assert (back["job"] == frame["job"]).all()
    assert (back["age"].astype(float) - frame["age"].astype(float)).abs().max() < 96 / BINS


@pytest.mark.parametrize("decimal", [".", ","])
def test_drawn_numbers_have_the_decimal_mark_of_the_schema(decimal):
    """They had a point always, so that a table with decimal commas was compared with other numbers: 26.388 is 26388."""
    grid = ColumnGrid(Schema((Column("bmi", "number", (10, 42)),), "", decimal=decimal))
    codes = np.arange(1, 1 + BINS).reshape(-1, 1)
    drawn = grid.decode(codes, np.random.default_rng(0))
    assert drawn["bmi"].str.contains(decimal, regex=False).sum() > BINS / 2
    assert np.abs(grid.encode(drawn) - codes).max() <= 1  # rounding reaches the edge of a bin


def test_numbers_of_any_size_come_back_within_their_bin():
    """All numbers below 5e-13 were drawn as 0."""
    grid = ColumnGrid(Schema((Column("farad", "number", (1e-13, 3e-13)),), ""))
    codes = np.arange(1, 1 + BINS).reshape(-1, 1)
    drawn = grid.decode(codes, np.random.default_rng(0))
    assert drawn["farad"].astype(float).between(0.99e-13, 3.01e-13).all()
    assert np.abs(grid.encode(drawn) - codes).max() <= 1  # rounding reaches the edge of a bin


@pytest.mark.filterwarnings("error")
def test_a_number_far_beyond_tiny_bounds_gives_no_warning():
    """A warning of an overflow says that such a row is there, at no price."""
    columns = Column("x", "number", (0, 1e-9)), Column("y", "number", (0, 1e-9))
    frame = pd.DataFrame({"x": ["inf", "-1e308", "5e-10"], "y": ["1e300", "0", "?"]})
    assert ColumnGrid(Schema(columns, "")).encode(frame)[:, 0].tolist() == [BINS, 1, 1 + BINS // 2]
    encoded = Encoder(Schema(columns, "y", "regression")).encode(frame)
    assert encoded.numbers[:, 0].tolist() == [1, -1, 0]


# Prices


@pytest.mark.parametrize("generator", ["aim", "mst"])
def test_the_price_is_that_of_dp_accounting(generator):
    """Gaussians are exact; a choice is at most (epsilon, 0)-private and at least free, which brackets the price."""
    releases = plan.planned(generator, 3, "example", 3.0)
    gaussian = [release.event for release in releases if isinstance(release.event, privacy.Gaussian)]
    ours = privacy.compose([(event, 1) for event in gaussian]).epsilon(1e-5)
    accountant = PLDAccountant()
    for event in gaussian:
        accountant.compose(GaussianDpEvent(event.noise_multiplier))
    assert ours.high == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    choices = [release.event for release in releases if release.kind == "choice"]
    rho = sum(event.epsilon**2 / 8 for event in choices) + sum(0.5 / event.noise_multiplier**2 for event in gaussian)
    whole = privacy.compose(plan.counted(releases)).epsilon(1e-5)
    assert ours.low < whole.high <= privacy.compose([(privacy.ZeroConcentrated(rho), 1)]).epsilon_high(1e-5)
    assert rho == pytest.approx(0.5 / 3.0**2)


@pytest.mark.thorough
@pytest.mark.parametrize("generator", plan.GENERATORS)
def test_everything_together_keeps_to_epsilon(generator):
    planned = plan.Plan(settings(generator), Schema((*SCHEMA.columns[:1], Column("job", "learn")), ""), 400)
    scale = planned.scale()
    spent = privacy.compose([*planned.learning, *planned.generating(scale)]).epsilon_high(1e-4)
    assert 3.99 < spent <= 4.0


def made(codes, generator="mst", scale=3.0, key=b"k" * 32):
    releases = plan.planned(generator, 3, "example", scale)
    return Marginals(codes, np.zeros((len(codes), 1), bool), public(generator, releases, len(codes)), key), releases


def public(generator, releases, total, rows=1):
    sizes = tuple(ColumnGrid(SCHEMA).sizes)
    return PublicSetup(generator=generator, sizes=sizes, num_numeric=1, releases=releases, rows=rows, total=total)


@pytest.mark.parametrize("rows", [1, 3])
def test_removing_a_person_moves_counts_by_no_more_than_the_noise_is_for(rows, monkeypatch):
    """The sensitivity, by neighbors: distance of the counts, times the noise multiplier."""
    stddevs = []
    monkeypatch.setattr(Noise, "add_to", lambda self, step, sums, stddev: stddevs.append(stddev))
    codes = ColumnGrid(SCHEMA).encode(people())
    codes[:rows] = codes[0]  # the worst person: all rows alike
    fractions = np.zeros((len(codes), 1), bool)
    fractions[:rows] = True
    releases = plan.planned("mst", 3, "example", 3.0)
    counts = []
    for used in (slice(None), slice(rows, None)):
        one = Marginals(codes[used], fractions[used], public("mst", releases, 400, rows), b"k" * 32)
        counts.append(one.make()["counts"])
    change = float((counts[0] - counts[1]).norm())
    assert change == pytest.approx(rows * 2)  # √(3 columns + 1 number) = 2
    assert stddevs[0] >= change * releases[0].event.noise_multiplier


@pytest.mark.parametrize("generator", ["aim", "mst"])
def test_removing_a_row_moves_no_score_of_a_choice_by_more_than_its_sensitivity(generator, monkeypatch):
    from torch_privacy.tables.synthesis import marginals

    seen = []

    def choose(scores, sensitivity, epsilon):
        seen.append((np.array(scores), sensitivity))
        return 0

    monkeypatch.setattr(marginals, "exponential_mechanism", choose)
    codes = ColumnGrid(SCHEMA).encode(people())
    first, _ = made(codes, generator)
    first.make()
    for used in (codes, codes[1:]):
        of_first = first.released.public, first.released.results[:1]
        again = Marginals(used, np.zeros((len(used), 1), bool), of_first[0], b"k" * 32, of_first[1])
        again.make()
    (before, sensitivity), (after, _) = seen
    assert 0.3 * sensitivity < np.abs(before - after).max() <= sensitivity


@pytest.mark.thorough
def test_a_choice_has_the_chances_of_its_event():
    epsilon, scores, count = 1.5, [0.0, 1.0, 3.0], 4000
    weights = np.exp(epsilon * np.array(scores) / 2)
    found = np.bincount([exponential_mechanism(scores, 1.0, epsilon) for _ in range(count)], minlength=3) / count
    assert np.abs(found - weights / weights.sum()).max() < 5 * math.sqrt(0.25 / count)


# Runs


def test_rows_without_a_target_stay_so_and_have_no_loss(tmp_path):
    rows = people(600).astype(object)
    rows.loc[:200, "income"] = None
    rows.loc[201:240, "income"] = [f"about {i}" for i in range(40)]
    rows.loc[3, "job"] = "\ud800"  # half of a letter
    source = SourceRows(rows, replace(OPEN, target="income"), SynthesisSettings(epsilon=50.0, delta=1e-4))
    notes = source.learn(privacy.Ledger(tmp_path / "ledger"))["notes"]
    assert any(re.fullmatch("'income': about .* cells are missing and stay missing.", note) for note in notes)
    assert any(re.fullmatch("'income': .* count as \"other\".", note) for note in notes)
    assert not any("loss" in note for note in notes)
    assert source.digest() != replace(source, frame=people(600)).digest()


@pytest.mark.thorough
@pytest.mark.parametrize("generator", plan.GENERATORS)
def test_a_run_that_was_stopped_goes_on_and_nothing_is_paid_twice(generator, tmp_path):
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings(generator))
    for _ in run.steps():
        break
    run.close()
    again = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings(generator))
    found = finished(again)
    ledger, planned = privacy.Ledger.read(again.folder.ledger), again.plan.generating(again.scale)
    assert sum(count for _, count in ledger.events) == sum(count for _, count in planned)
    statement = json.loads(again.folder.privacy.read_text())
    assert statement["epsilon"]["high"] <= 4.0
    assert "post-processing" in statement["synthetic_rows"]["post_processing"]
    assert not again.folder.checkpoint.exists()
    loaded = tables.Synthesizer.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.draw(300, 1), found.draw(300, 1))
    assert not loaded.draw(300).equals(loaded.draw(300))
    assert list(loaded.draw(0)) == list(found.draw(3))
    with pytest.raises(ValueError, match="seed=-1 must be an integer of at least 0"):
        loaded.draw(3, -1)


@pytest.mark.parametrize("generator", ["mst", "network"])
def test_a_run_that_is_killed_before_its_first_release_keeps_what_it_has_learnt(generator, tmp_path, monkeypatch):
    """Encoding the rows and the network's first check take seconds, and a run that ended there could not be resumed."""
    schema, prepare = Schema((*SCHEMA.columns[:2], Column("income", "category")), "income"), GeneratorRun._prepare

    def killed(self):
        raise KeyboardInterrupt

    chosen = SynthesisSettings(generator=generator, epsilon=4.0, delta=1e-5, steps=4)
    monkeypatch.setattr(GeneratorRun, "_prepare", killed)
    with pytest.raises(KeyboardInterrupt):
        next(GeneratorRun(tmp_path / "run", people(900), schema, chosen).steps())
    learnt = len(privacy.Ledger.read(tmp_path / "run/ledger.jsonl"))
    monkeypatch.setattr(GeneratorRun, "_prepare", prepare)
    run = GeneratorRun(tmp_path / "run", people(900), schema, chosen)
    finished(run)
    planned = sum(count for _, count in run.plan.generating(run.scale))
    assert sum(count for _, count in privacy.Ledger.read(run.folder.ledger).events) == learnt + planned
    assert not verify(tmp_path / "run").is_false


def test_a_release_that_was_lost_after_the_ledger_is_made_again_with_the_same_noise(tmp_path, monkeypatch):
    counts, add, save = [], Noise.add_to, GeneratorRun._save

    def noted(self, step, sums, stddev):
        add(self, step, sums, stddev)
        counts.append((step, sums["counts"].clone()))

    def killed(self):
        if counts:
            raise KeyboardInterrupt
        save(self)

    monkeypatch.setattr(Noise, "add_to", noted)
    monkeypatch.setattr(GeneratorRun, "_save", killed)
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings("mst"))
    with pytest.raises(KeyboardInterrupt):
        next(run.steps())
    run.close()
    assert len(privacy.Ledger.read(run.folder.ledger)) == 1
    monkeypatch.setattr(GeneratorRun, "_save", save)
    resumed = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings("mst"))
    assert [made for made, _ in resumed.steps()] == [1, 2, 3, 4]
    resumed.close()
    first, again = counts[:2]
    assert first[0] == again[0] == 0
    assert torch.equal(first[1], again[1])
    assert len(privacy.Ledger.read(run.folder.ledger)) == 4  # counts, two choices, the chosen: none is paid twice


def test_a_network_draws_the_persons_that_are_counted(tmp_path):
    """Spaces in a name made another person of it in the training, and none in learning and in marginals."""
    names = np.array([f"{' ' * (i % 2)}person {'  '[: i % 3]}{i // 2}" for i in range(400)])
    for owners in (names, owners_in(pd.DataFrame({"name": names}), "name", tmp_path / "people.csv")):
        run = GeneratorRun(tmp_path, people(), SCHEMA, settings("network", per_owner=1, unit="person"), owners=owners)
        assert tp.Examples(range(400), **run.source.of_owners).num_units == run.source.num_units == 200
    assert len(set(owners)) == 200


@pytest.mark.parametrize("generator", ["mst", "network"])
def test_an_audit_tests_the_claim_for_persons(generator, tmp_path):
    """That of a network trained on rows without their persons: it tested another claim, a third of the epsilon."""
    chosen = settings(generator, per_owner=2, unit="person", steps=2)
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, chosen, owners=np.repeat(np.arange(200), 2))
    finished(run)
    claim = json.loads(run.folder.privacy.read_text())["epsilon"]["high"]
    assert audit(run, 4).profile.epsilon_high(chosen.delta) == pytest.approx(claim, rel=0.05)


@pytest.mark.thorough
def test_owners_are_capped_and_priced_as_persons(tmp_path):
    owners = np.repeat(np.arange(200), 2)
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings("mst", per_owner=1, unit="person"), owners=owners)
    finished(run)
    assert len(run.codes) == 200
    statement = json.loads(run.folder.privacy.read_text())
    assert (statement["owner"], statement["num_owners"]) == ("person", 200)
    assert {release["event"]["unit"] for release in statement["releases"]} == {"person"}
    assert "num_examples" not in statement
    assert not verify(tmp_path / "run").is_false


@pytest.mark.parametrize("number", [1.5, 0, -1, True])
def test_rows_of_a_person_are_a_whole_number_as_all_of_them_are_priced(number):
    with pytest.raises(ValueError, match=f"synthesize: per_owner={number} must be an integer of at least 1"):
        settings("mst", per_owner=number, unit="person")
    with pytest.raises(ValueError, match=f"synthesize: steps={number} must be an integer of at least 1"):
        settings("network", steps=number)


@pytest.mark.parametrize("generator", ["mst", "network"])
def test_a_run_that_was_settled_releases_nothing_more(tmp_path, generator):
    import torch_privacy as tp

    budget = tp.Budget.open(tmp_path / "people.budget", epsilon=5, delta=1e-4)
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings(generator), budget=budget)
    next(run.steps())
    run.close()
    for given, words in ((None, "budget"), (budget, None)):
        again = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings(generator), budget=given)
        if words is None:
            next(again.steps())
            again.close()
        else:
            with pytest.raises(tp.Refused, match=words):
                next(again.steps())
    ledger = privacy.Ledger.read(run.folder.ledger)
    budget.settle_from(ledger.run, ledger, reason="power failure")
    with pytest.raises(tp.Refused, match="is settled"):
        next(GeneratorRun(tmp_path / "run", people(), SCHEMA, settings(generator), budget=budget).steps())
    assert len(privacy.Ledger.read(run.folder.ledger)) == len(ledger)


@pytest.mark.thorough
def test_a_run_draws_from_the_budget_of_the_data(tmp_path):
    import torch_privacy as tp

    budget = tp.Budget.open(tmp_path / "people.budget", epsilon=5, delta=1e-4)
    finished(GeneratorRun(tmp_path / "first", people(), SCHEMA, settings("mst"), budget=budget))
    assert 3.9 < budget.state.epsilon_high <= 5
    statement = json.loads((tmp_path / "first/privacy.json").read_text())
    assert statement["data_budget"] == budget.state.as_json()
    with pytest.raises(tp.Refused, match="does not fit"):
        finished(GeneratorRun(tmp_path / "second", people(), SCHEMA, settings("mst"), budget=budget))
    assert not (tmp_path / "second").exists()


@pytest.mark.thorough
def test_all_is_learnt_privately_and_what_cannot_be_is_said(tmp_path):
    frame = people(2000)
    frame["notes"] = [f"met on day {i}, said {i * 7}" for i in range(len(frame))]
    schema = Schema(tuple(Column(name, "learn") for name in frame), "")
    run = GeneratorRun(tmp_path / "run", frame, schema, settings("mst"))
    drawn = finished(run).draw(100)
    assert list(drawn) == ["age", "job", "income"]
    assert any("lacks 'notes'" in note for note in run.notes)
    spent = privacy.Ledger.read(run.folder.ledger).profile().epsilon_high(1e-4)
    assert spent <= 4.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frame": people(150)}, "150 rows to learn from are too few"),
        ({"generator": "gan"}, "must be one of 'aim', 'mst', 'network'"),
        ({"schema": Schema((Column("age", "category", categories=tuple(map(str, range(1001)))),
                            *SCHEMA.columns[1:]), "")}, "'age' has 1,001 categories"),
        ({"delta": 0.01}, "below 1/n"),
        ({"epsilon": -1.0}, "epsilon=-1.0 must be greater than 0"),
        ({"owners": [1] * 400}, "owners and per_owner belong together"),
        ({"schema": OPEN, "epsilon": 0.05}, "each of 3 takes about .* rows, and there are 400.*it has cost nothing"),
        ({"schema": Schema((*SCHEMA.columns[:2], Column("income", "category")), "income"), "epsilon": 0.2},
         "a class of the target 'income' .* cannot be learnt.*it has cost nothing"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_sentence_and_nothing_is_written(change, message, tmp_path):
    given = {"frame": people(), "schema": SCHEMA, "epsilon": 1.0, "run_folder": tmp_path / "run", **change}
    with pytest.raises(ValueError, match=message):
        tables.synthesize(given.pop("frame"), given.pop("schema"), **given)
    assert not (tmp_path / "run").exists()


def test_a_stopped_run_refuses_another_table_and_other_settings(tmp_path):
    run = GeneratorRun(tmp_path / "run", people(), SCHEMA, settings("mst"))
    next(run.steps())
    run.close()
    with pytest.raises(ValueError, match="the table was changed"):
        next(GeneratorRun(tmp_path / "run", people(seed=1), SCHEMA, settings("mst")).steps())
    with pytest.raises(ValueError, match="other settings"):
        next(GeneratorRun(tmp_path / "run", people(), SCHEMA, settings("aim")).steps())


# The network, and the judgement


def test_the_probabilities_of_all_rows_add_up_to_one():
    torch.manual_seed(0)
    network = RowNetwork((2, 3, 2), [2, 0, 1])
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    rows = np.array(list(itertools.product(range(2), range(3), range(2))))
    chances = np.exp(network.log_chances(rows))
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    drawn = marginal(network.draw(100_000, np.random.default_rng(0)), (0, 1, 2), (2, 3, 2)).ravel() / 100_000
    assert np.abs(drawn - chances).max() < 6 * math.sqrt(0.25 / 100_000)


def test_a_network_of_a_single_column_is_trained(tmp_path):
    """Its embedding, which no column depends on, was refused after the first step."""
    run = GeneratorRun(tmp_path / "run", people()[["job"]], Schema(SCHEMA.columns[1:2], ""), settings("network"))
    assert set(finished(run).draw(50)["job"]) <= {"", "other", *JOBS}


def test_a_network_draws_fractions_between_whole_bounds(tmp_path):
    """Bounds such as 0 and 1 made all numbers whole, so that shares were drawn as 0 and 1."""
    rng = np.random.default_rng(0)
    cells = {"share": rng.random(400), "rooms": rng.integers(0, 9, 400), "years": rng.integers(0, 90, 400)}
    bounds = {"share": (0, 1), "rooms": (0, 8), "years": (0, 90)}
    schema = Schema(tuple(Column(name, "number", of) for name, of in bounds.items()), "")
    chosen = SynthesisSettings(generator="network", epsilon=50.0, delta=1e-4, steps=60)
    made = finished(GeneratorRun(tmp_path / "run", pd.DataFrame(cells).astype(str), schema, chosen))
    assert made.whole == ("rooms", "years")
    assert made.draw(100, 1)["share"].nunique() > 50


def test_missing_and_unnamed_cells_are_rare_before_the_first_step():
    grid = ColumnGrid(SCHEMA)
    network = RowNetwork(grid.sizes, range(len(grid.sizes)), grid.rare)
    drawn = network.draw(4000, np.random.default_rng(0))
    for codes, rare, size in zip(drawn.T, grid.rare, grid.sizes, strict=True):
        shares = np.bincount(codes, minlength=size) / len(codes)
        chances = np.exp([RARE] * rare + [0.0] * (size - rare))
        assert np.abs(shares - chances / chances.sum()).max() < 5 * math.sqrt(0.25 / len(codes))


def test_real_rows_are_judged_to_be_like_themselves_and_lost_categories_are_named():
    grid, frame = ColumnGrid(SCHEMA), people()

    class Copy:
        def __init__(self, rows):
            self.grid, self._rows = grid, rows

        def draw(self, count, seed):
            return self._rows

    same = judge(Copy(frame), frame, people(seed=1))
    assert max(same.two_way.values()) == 0
    assert same.lost == {}
    for by_name in (same.scores, same.areas):
        assert by_name["synthetic rows"] == by_name["real rows, without privacy"]
    assert same.areas["synthetic rows"] > 0.6 > same.areas["nothing: always the same guess"] == 0.5
    most = frame[SCHEMA.target].mode()[0]
    assert same.scores["nothing: always the same guess"] == pytest.approx(
        (people(seed=1)[SCHEMA.target] == most).mean()
    )
    n, correct = len(people(seed=1)), same.scores["synthetic rows"]
    error = math.sqrt(correct * (1 - correct) / n)
    assert same.errors["accuracy"]["synthetic rows"] == pytest.approx(error)
    assert f"{100 * correct:.1f} ± {100 * error:.1f} %" in "".join(_scores(same))
    without = judge(Copy(frame.assign(job="nurse")), frame, people(seed=1))
    assert set(without.lost["job"]) == {"baker", "clerk"}
    assert without.one_way["job"] == pytest.approx(1 - (frame["job"] == "nurse").mean())


def test_page_draws_the_area_under_the_curve_where_there_is_one():
    """With a rare class the accuracies of all models are those of a constant."""
    scores = {"synthetic rows": 0.985, "nothing: always the same guess": 0.985}
    areas = {"synthetic rows": 0.776, "nothing: always the same guess": 0.5}
    for found, shown in ((areas, {"AUC", "0.776", "0.500"}), ({}, {"accuracy (%)", "98.5"})):
        plot = _scores_plot(Judgement({"a": 0.0}, {("a", "b"): 0.0}, 0.0, {}, scores, "accuracy", found, 600, {}))
        assert shown <= set(re.findall(r">([^<>]+)</text>", plot))
