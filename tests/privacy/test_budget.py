# SPDX-License-Identifier: Apache-2.0
"""The budget of a data set: who draws, who is refused, and what survives kills, bit flips and other writers."""

import json
import os
import re
import shutil
import signal
import time

import pytest

from torch_privacy import privacy
from torch_privacy.privacy import budget_file
from torch_privacy.support.validate import Refused

Gaussian = privacy.Gaussian


@pytest.fixture
def budget(tmp_path):
    return privacy.Budget.open(tmp_path / "people.budget", epsilon=3, delta=1e-6)


def forked(act):
    """Calls a function in a forked process, which ends with 0, or with 3 after a refusal; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        act()
        code = 0
    except Refused:
        code = 3
    finally:
        os._exit(code)


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_declared_runs_cost_what_their_composition_does(budget):
    runs = [[(privacy.SubsampledGaussian(1.0, 0.01), 100)], [(Gaussian(5.0), 2)], [(privacy.Laplace(10.0), 1)]]
    for releases in runs:
        budget.reserve(releases, "a run")
    together = [release for releases in runs for release in releases]
    assert budget.spent().high == privacy.compose(together).epsilon_high(1e-6)


def test_runs_with_banded_noise_in_one_reservation_cost_what_their_composition_does(budget):
    runs = [(privacy.BandedGaussian(4.0, 0.01, bands=20), 1)] * 3
    budget.reserve(runs, "three short runs")
    assert budget.spent().high == privacy.compose(runs).epsilon_high(1e-6)


def test_run_after_the_first_begun_takes_a_share(budget):
    first = budget.reserve([(Gaussian(4.0), 1)], "first")
    exact = budget.spent([(Gaussian(4.0), 1)]).high
    first.begin()
    later = budget.spent([(Gaussian(4.0), 1)]).high
    assert exact < later < 1.1 * exact
    budget.reserve([(Gaussian(4.0), 1)], "later")
    assert budget.state.runs[0].share is None
    assert budget.state.runs[1].share == pytest.approx(budget.state.filter.share([(Gaussian(4.0), 1)]))
    assert budget.spent().high == later


def test_run_that_does_not_fit_is_refused_and_changes_nothing(budget):
    budget.reserve([(Gaussian(1.8), 1)], "a run").begin()
    before = budget.path.read_bytes()
    assert not budget.allows([(Gaussian(1.8), 1)])
    with pytest.raises(Refused, match=r"does not fit into .*people.budget.* and with this run, as one that may"):
        budget.reserve([(Gaussian(1.8), 1)], "too much")
    with pytest.raises(Refused, match=r"Nothing was read or released. Add noise"):
        budget.check([(Gaussian(1.8), 1)])
    assert budget.path.read_bytes() == before


def test_epsilons_of_a_refusal_are_never_below_the_truth(tmp_path):
    for noise in (3.0, 4.0, 5.0, 6.0, 7.0):
        budget = privacy.Budget.open(tmp_path / f"{noise}.budget", epsilon=3, delta=1e-6)
        budget.reserve([(Gaussian(noise), 1)], "first")
        drawn, further = budget.spent().high, budget.spent([(Gaussian(1.0), 1)]).high
        with pytest.raises(Refused) as refusal:
            budget.reserve([(Gaussian(1.0), 1)], "second")
        said = re.search(r"\): ([\d.]+) is drawn, and with this run it would be ([\d.]+)\. ", str(refusal.value))
        assert said is not None
        assert drawn <= float(said[1]) < drawn + 1.1e-3
        assert further <= float(said[2]) < further + 1.1e-3


@pytest.mark.parametrize("begun", [False, True])
def test_remaining_is_the_largest_number_that_is_allowed(budget, begun):
    first = budget.reserve([(Gaussian(5.0), 1)], "first")
    if begun:
        first.begin()
    number = budget.remaining(Gaussian(20.0))
    assert budget.allows([(Gaussian(20.0), number)])
    assert not budget.allows([(Gaussian(20.0), number + 1)])
    assert budget.remaining(Gaussian(20.0), after=[(Gaussian(20.0), 3)]) == number - 3
    assert budget.remaining(Gaussian(20.0), most=5) == 5


def test_run_that_is_far_too_large_is_refused_after_another_has_begun(budget):
    budget.reserve([(Gaussian(10.0), 1)], "first").begin()
    much = [(Gaussian(1e-3), 1)]
    assert not budget.allows(much)
    assert budget.spent(much).high == float("inf")
    assert 0 < budget.remaining(Gaussian(10.0)) < 100
    with pytest.raises(Refused, match=r"does not fit .* would be inf"):
        budget.reserve(much, "much")


def test_events_of_another_unit_or_relation_are_refused(tmp_path, budget):
    with pytest.raises(Refused, match=r"protects one customer, and .* is a budget for one example"):
        budget.reserve([(Gaussian(5.0, unit="customer"), 1)], "a run")
    with pytest.raises(Refused, match=r"holds for replace one example, and .* for zero out one example"):
        budget.reserve([(Gaussian(5.0, privacy.NeighboringRelation.REPLACE_ONE), 1)], "a run")
    budget.reserve([(Gaussian(5.0, privacy.NeighboringRelation.ADD_OR_REMOVE_ONE), 1)], "holds for zero-out, too")
    relation = privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
    other = privacy.Budget.open(tmp_path / "b", epsilon=1, delta=1e-6, unit="customer", neighboring_relation=relation)
    with pytest.raises(Refused, match="holds for zero out one example"):
        other.reserve([(Gaussian(5.0, privacy.NeighboringRelation.REPLACE_SPECIAL, "customer"), 1)], "a run")


def test_budget_is_fixed_when_it_is_made(tmp_path, budget):
    again = privacy.Budget.open(budget.path)
    assert again == budget == privacy.Budget.open(budget.path, epsilon=3, delta=1e-6, unit="example")
    with pytest.raises(Refused, match=r"epsilon=4, but .* was made with epsilon=3, delta=1e-06, unit='example'"):
        privacy.Budget.open(budget.path, epsilon=4)
    with pytest.raises(FileNotFoundError, match="give epsilon and delta to make one"):
        privacy.Budget.open(tmp_path / "no.budget", epsilon=3)
    with pytest.raises(ValueError, match="epsilon=-1 must be greater than 0"):
        privacy.Budget.open(tmp_path / "no.budget", epsilon=-1, delta=1e-6)
    assert not (tmp_path / "no.budget").exists()
    privacy.Ledger(tmp_path / "ledger").close()
    with pytest.raises(Refused, match="is no budget, or damaged"):
        privacy.Budget.open(tmp_path / "ledger")


def test_settled_run_gives_back_what_it_did_not_release_for_a_reason(budget):
    run = budget.reserve([(Gaussian(5.0), 4)], "a run")
    run.begin()
    with pytest.raises(Refused, match="give the reason"):
        run.settle([(Gaussian(5.0), 1)])
    with pytest.raises(Refused, match="more than"):
        run.settle([(Gaussian(5.0), 5)], reason="power failure")
    with pytest.raises(Refused, match="more than"):
        run.settle([(Gaussian(4.0), 1)], reason="power failure")
    assert budget.spent().high == privacy.compose([(Gaussian(5.0), 4)]).epsilon_high(1e-6)
    run.settle([(Gaussian(5.0), 1)], reason="power failure")
    assert budget.spent().high == privacy.compose([(Gaussian(5.0), 1)]).epsilon_high(1e-6)
    for act in (run.begin, run.settle):
        with pytest.raises(Refused, match="is settled"):
            act()


def test_declared_run_is_not_withdrawn_for_outcomes_of_another(budget):
    first, second = (budget.reserve([(Gaussian(5.0), 1)], name) for name in ("first", "second"))
    budget.reserve([(Gaussian(5.0), 1)], "before any run has begun").settle(())
    first.begin()
    with pytest.raises(Refused, match="give the reason"):
        second.settle(())
    later = budget.reserve([(Gaussian(5.0), 1)], "later")
    later.settle(())  # its share was not used, whatever the reason
    assert budget.spent().high == privacy.compose([(Gaussian(5.0), 2)]).epsilon_high(1e-6)


def test_run_that_has_released_has_begun_also_where_that_was_not_noted(budget):
    run = budget.reserve([(Gaussian(5.0), 4)], "a run without begin")
    with pytest.raises(Refused, match="give the reason"):  # outcomes may have decided when it ends
        run.settle([(Gaussian(5.0), 1)])
    assert budget.state.is_open
    run.settle()
    assert not budget.state.is_open
    budget.reserve([(Gaussian(5.0), 1)], "may be chosen from outcomes")
    assert budget.state.runs[1].share is not None


def test_run_that_goes_on_is_not_settled_for_less(tmp_path, budget):
    path = tmp_path / "ledger.jsonl"
    reserved = budget.reserve([(Gaussian(5.0), 4)], "a run", run="one", ledger=path)
    ledger = privacy.Ledger(path, run="one")
    ledger.record(Gaussian(5.0), 0, "a")

    def settle():
        budget.settle_from("one", privacy.Ledger.read(path), reason="power failure")

    assert code_of(forked(settle)) == 3
    assert budget.state.runs[0].settled is None
    settle()  # in the same process: what is settled cannot go on
    with pytest.raises(Refused, match="takes no further release"):
        ledger.record(Gaussian(5.0), 1, "b")
    with pytest.raises(Refused, match="is settled"):
        reserved.begin()


def test_settled_later_run_gives_back_its_share(budget):
    budget.reserve([(Gaussian(9.0), 1)], "first").begin()
    run = budget.reserve([(Gaussian(9.0), 4)], "later")
    run.begin()
    whole = budget.state.share
    run.settle([(Gaussian(9.0), 1)], reason="power failure")
    assert budget.state.share == pytest.approx(whole / 4, rel=1e-3)


def test_run_of_the_same_name_does_not_reserve_again(budget):
    for _ in range(2):
        run = budget.reserve([(Gaussian(5.0), 4)], "a run", run="one")
    run.begin()
    assert len(budget.state.runs) == 1
    with pytest.raises(Refused, match=r"run one has reserved .* and would now release"):
        budget.reserve([(Gaussian(4.0), 4)], "a run", run="one")


def test_run_that_has_begun_is_not_resumed_without_its_ledger(tmp_path, budget):
    def resume(name, ledger=None):
        return budget.reserve([(Gaussian(5.0), 4)], "a run", run=name, ledger=ledger)

    resume("one").begin()
    begun_in(tmp_path / "2", budget, run="two").close()
    for name, ledger in (("one", None), ("one", tmp_path / "new"), ("one", tmp_path / "2"), ("two", None)):
        with pytest.raises(Refused, match="has begun, and no ledger of its own says what it has released"):
            resume(name, ledger)
    resume("two", tmp_path / "2").begin()
    (tmp_path / "2").unlink()
    with pytest.raises(Refused, match="has begun, and no ledger of its own"):
        resume("two", tmp_path / "2")


def test_run_is_settled_from_its_own_ledger_alone(tmp_path, budget):
    run = budget.reserve([(Gaussian(5.0), 4)], "a run")
    ledger, other = privacy.Ledger(tmp_path / "1", run=run.run), privacy.Ledger(tmp_path / "2")
    ledger.record(Gaussian(5.0), 0, "a")
    ledger.close()
    with pytest.raises(Refused, match=r"ledger of run \(none\), not of"):
        budget.settle_from(run.run, other, reason="power failure")
    assert privacy.Ledger.read(tmp_path / "1").run == run.run
    budget.settle_from(run.run, privacy.Ledger.load(tmp_path / "1"), reason="power failure")
    assert budget.state.runs[0].settled == [(Gaussian(5.0), 1)]
    with pytest.raises(Refused, match="has no run 'two'"):
        budget.settle("two")


def begun_in(path, budget, run="one"):
    """Returns the ledger of a run that has made one of four releases."""
    budget.reserve([(Gaussian(5.0), 4)], "a run", run=run, ledger=path).begin()
    ledger = privacy.Ledger(path, run=run)
    ledger.record(Gaussian(5.0), 0, "a")
    return ledger


def test_run_goes_on_where_its_ledger_was_moved_and_not_in_a_copy(tmp_path, budget):
    path, other = tmp_path / "1", tmp_path / "2"
    begun_in(path, budget).close()
    shutil.copy(path, other)
    (tmp_path / "link").symlink_to(tmp_path)

    def resume(ledger):
        return budget.reserve([(Gaussian(5.0), 4)], "a run", run="one", ledger=ledger)

    for same in (path, tmp_path / "link" / "1"):
        resume(same).begin()
    with pytest.raises(Refused, match="is a copy of it: both would draw what was reserved once"):
        resume(other)
    path.rename(tmp_path / "3")
    begun_in(path, budget, run="another").close()  # at the place that the run has left
    resume(tmp_path / "3").begin()


def test_run_is_settled_from_a_moved_ledger_with_its_warning(tmp_path, budget):
    ledger = begun_in(tmp_path / "1", budget)
    ledger.reason.ask = lambda: "NOT PRIVATE (a test)"
    ledger.note_warning()
    ledger.close()
    (tmp_path / "1").rename(tmp_path / "2")
    budget.settle_from("one", privacy.Ledger.read(tmp_path / "2"), reason="power failure")
    assert budget.state.runs[0].warning == "NOT PRIVATE (a test)"


def test_run_is_not_settled_from_an_older_copy_of_its_ledger(tmp_path, budget):
    ledger = begun_in(tmp_path / "1", budget)
    older = privacy.Ledger.read(tmp_path / "1")
    ledger.record(Gaussian(5.0), 1, "b")
    ledger.close()
    with pytest.raises(Refused, match=r"has 2 releases in .*, and the ledger given has 1"):
        budget.settle_from("one", older, reason="power failure")
    assert budget.state.runs[0].settled is None


def test_releases_of_settled_runs_are_known_by_event_and_fingerprint(budget):
    run = budget.reserve([(Gaussian(5.0), 1)], "components")
    run.settle(fingerprints=["ab"])
    here, others = (
        privacy.Release(Gaussian(5.0), "ab"),
        [privacy.Release(Gaussian(4.0), "ab"), privacy.Release(Gaussian(5.0), "b")],
    )
    assert budget.unknown([here, *others]) == others


def filled(budget):
    """Returns the content of a file with every kind of line."""
    budget.bind(lambda: {"fingerprint": "a", "method": "m"})
    budget.reserve([(Gaussian(5.0), 4)], "a run", run="one").begin()
    budget.reserve([(Gaussian(5.0), 1)], "a run", run="two")
    budget.settle("one", [(Gaussian(5.0), 1)], reason="power failure", fingerprints=["x"])
    return budget.path.read_bytes()


def test_bit_flip_at_any_byte_is_noticed(tmp_path, budget):
    content, path = filled(budget), tmp_path / "flipped"
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(Refused):
            privacy.Budget.open(path)


def test_torn_last_line_is_dropped_and_lost_line_is_noticed(tmp_path, budget):
    content, path = filled(budget), tmp_path / "torn"
    lines = content.splitlines(keepends=True)
    for size in (1, len(lines[-1]) // 2, len(lines[-1]) - 3):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:size])
        opened = privacy.Budget.open(path)
        assert [run.status for run in opened.state.runs] == ["begun", "reserved"]
        opened.reserve([(Gaussian(50.0), 1)], "goes on")
        assert len(privacy.Budget.open(path).state.runs) == 3
    path.write_bytes(b"".join(lines[:-2]) + lines[-1])
    with pytest.raises(Refused, match="its digest does not fit"):
        privacy.Budget.open(path)


def test_state_is_read_without_writing_or_locking(budget):
    filled(budget)
    budget.path.chmod(0o444)
    with budget_file.locked(budget.path):  # another writer has it
        before = budget.path.read_bytes(), budget.path.stat().st_mtime_ns
        assert len(privacy.Budget.open(budget.path).state.runs) == 2
        assert budget.state.as_json()["num_unsettled"] == 1
        assert (budget.path.read_bytes(), budget.path.stat().st_mtime_ns) == before


def test_killed_run_keeps_its_reservation(budget):
    def act():
        budget.reserve([(Gaussian(1.8), 1)], "killed").begin()
        os.kill(os.getpid(), signal.SIGKILL)

    assert code_of(forked(act)) == -signal.SIGKILL
    (run,) = budget.state.runs
    assert (run.what, run.status) == ("killed", "begun")
    assert not budget.allows([(Gaussian(1.8), 1)])
    budget.settle(run.run, (), reason="it was killed before its first release")
    assert budget.allows([(Gaussian(1.8), 1)])


@pytest.mark.parametrize(("noise", "codes"), [(1.8, [0, 3]), (5.0, [0, 0])], ids=["one fits", "both fit"])
def test_of_two_processes_that_want_the_rest_one_is_refused(tmp_path, budget, monkeypatch, noise, codes):
    def act():
        (tmp_path / f"ready {os.getpid()}").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.001)
        budget.reserve([(Gaussian(noise), 1)], "the rest", run=str(os.getpid()))

    check = privacy.DataBudget._check_fits  # slow, so that both would find room if they did not wait
    monkeypatch.setattr(privacy.DataBudget, "_check_fits", lambda *given: [check(*given), time.sleep(0.2)])
    children = [forked(act) for _ in range(2)]
    while len(list(tmp_path.glob("ready *"))) < 2:
        time.sleep(0.001)
    (tmp_path / "go").touch()
    assert sorted(map(code_of, children)) == codes
    assert len(budget.state.runs) == codes.count(0)


def test_waiting_writer_is_refused_in_the_end(budget, monkeypatch):
    monkeypatch.setattr(budget_file, "PATIENCE", 0.05)
    start = time.monotonic()
    with budget_file.locked(budget.path), pytest.raises(Refused, match="another process writes"):
        budget.reserve([(Gaussian(5.0), 1)], "a run")
    assert time.monotonic() - start < 5
    budget.reserve([(Gaussian(5.0), 1)], "a run")


def test_file_has_a_line_for_each_step(budget):
    lines = [json.loads(line) for line in filled(budget).splitlines()]
    assert lines[0]["neighboring_relation"] == "replace_special"
    assert [next(iter(line)) for line in lines] == ["ledger", "bind", "reserve", "begin", "reserve", "settle"]
    assert lines[2]["share"] is None
    assert lines[4]["share"] > 0
