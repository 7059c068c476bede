# SPDX-License-Identifier: Apache-2.0
"""How batches are drawn: balls and bins, truncated samples, what they cost, and what is taken by default."""

import copy
import math
import os
import pickle
from dataclasses import replace
from functools import partial

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from ranked import VIEWS, case, difference, start, whole_weights
from torch.utils.data import Dataset, Subset, TensorDataset
from trainings import (
    RULES,
    ZERO_OUT,
    N,
    by_each_rule,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    parameters_of,
    rows_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.sampling.batches import Batches, BatchRequest
from torch_privacy.sampling.places import Places
from torch_privacy.sampling.samplers import PoissonSampler, VaryingSampler
from torch_privacy.training import release

BINS = {"sampling": tp.BallsAndBins(), "num_steps": 13}  # 5 batches in an epoch: two epochs, and three batches
EPOCH = privacy.BallsAndBins(1.0, 5, ZERO_OUT)
DELTA = 1e-4


def first_of_all():
    """Returns the first feature of each example, which identifies it."""
    return data().tensors[0][:, 0].tolist()


def price(releases, delta=DELTA):
    return privacy.compose(releases).epsilon(delta)


def test_every_example_is_in_one_batch_of_each_epoch():
    seen = train(training_of(sampling=tp.BallsAndBins(), num_steps=15))
    epochs = [[x for batch in seen[start : start + 5] for x in batch] for start in (0, 5, 10)]
    assert all(sorted(epoch) == sorted(first_of_all()) for epoch in epochs)
    assert len({tuple(map(len, seen[start : start + 5])) for start in (0, 5, 10)}) > 1  # drawn anew


def test_the_ledger_has_an_entry_for_each_batch_and_each_epoch_is_paid_once_and_whole():
    training = training_of(**BINS)
    train(training)
    later = privacy.LaterBatch(EPOCH)
    assert training.ledger.events == [(EPOCH, 1), (later, 4), (EPOCH, 1), (later, 4), (EPOCH, 1), (later, 2)]
    assert training.spent(DELTA).epsilon == price([(EPOCH, 3)])
    statement = training.statement()
    assert statement["sampler"] == "balls and bins"
    assert statement["sampling_probability"] == 0.2
    assert statement["expected_batch_size"] == 8


def shuffle(rows):
    rows[:] = rows[::-1]


def flipped(array):
    array[:] = array[::-1].copy()


MOVED = {  # name -> what is made of the data, and what moves its rows
    "list": (list, shuffle),
    "shorter list": (list, lambda rows: rows.pop()),
    "subset": (lambda rows: Subset(list(rows), [*range(N)]), lambda rows: shuffle(rows.indices)),
    "tensors": (lambda rows: rows, lambda rows: rows.tensors[0].copy_(rows.tensors[0].flip(0))),
    "memory of tensors": (lambda rows: rows, lambda rows: flipped(rows.tensors[0].numpy())),
    "other tensors": (lambda rows: rows, lambda rows: setattr(rows, "tensors", tuple(t.flip(0) for t in rows.tensors))),
    "subset of tensors": (lambda rows: Subset(rows, [*range(N)]), lambda rows: shuffle(rows.indices)),
    "shorter subset": (lambda rows: Subset(rows, [*range(N)]), lambda rows: rows.indices.clear()),
    "subset of a subset": (
        lambda rows: Subset(Subset(rows, [*range(N)]), [*range(N)]),
        lambda rows: shuffle(rows.dataset.indices),
    ),
}

PLACED = {
    "bins": BINS,
    "banded": {"correlation": tp.Banded(3)},
    "owners": {"examples": {"owners": [k // 2 for k in range(N)], "per_owner": 2}},
}


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("name", PLACED)
def test_rows_that_move_are_refused_where_the_price_depends_on_their_places(kind, name):
    make, move = MOVED[kind]
    rows = make(TensorDataset(*(tensor.clone() for tensor in data().tensors)))
    training = training_of(dataset=rows, **PLACED[name])
    train(training, steps=3)
    move(rows)
    with pytest.raises(tp.Refused, match=r"rows of the data set were moved or replaced before step 3"):
        train(training)
    assert len(training.ledger) == 3


def test_rows_may_move_where_every_step_draws_from_all():
    rows = list(data())
    training = training_of(dataset=rows)
    train(training, steps=3)
    shuffle(rows)
    train(training)
    assert "rows of the data set" not in str(training.statement()["not_covered"])


def centered(rows):
    mean = sum(x for x, _ in rows) / N
    rows[:] = [(x - mean, y) for x, y in rows]


def centered_in_place(rows):
    mean = sum(x for x, _ in rows) / N
    for x, _ in rows:
        x.sub_(mean)


def centered_by_numpy(rows):
    rows.tensors[0].numpy()[:] -= rows.tensors[0].numpy().mean(0)


class Own(Dataset):
    """A data set that makes its items in code, with augmentation."""

    def __init__(self, rows):
        self.x, self.y = (tensor.numpy() for tensor in rows.tensors)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.from_numpy(self.x[index]) + torch.rand(3), self.y[index]


class Frame(Own):
    """Has a data frame of pandas, with texts and dates beside the numbers."""

    def __init__(self, rows):
        super().__init__(rows)
        self.frame = pd.DataFrame(self.x).assign(name="a", day=pd.Timestamp("2020-01-01"), none=None, y=self.y)
        self.x = None

    def __getitem__(self, index):
        row = self.frame.iloc[index]
        return torch.tensor([row[0], row[1], row[2]]), int(row["y"])


def centered_frame(rows):
    rows.frame[0] -= rows.frame[0].mean()


STORED = {  # name -> (stores numbers in rows, reads one)
    "dictionary": (lambda x: dict(enumerate(x)), lambda stored, i: stored[i]),
    "table of arrow": (lambda x: pa.table({"x": [*x]}), lambda stored, i: stored["x"][i].as_py()),
    "data set of Hugging Face": (lambda x: datasets.Dataset.from_dict({"x": x}), lambda stored, i: stored[i]["x"]),
}


class Stored(Own):
    """Has its numbers in something that has rows and is no array."""

    def __init__(self, kind, rows):
        super().__init__(rows)
        self.make, self.read = STORED[kind]
        self.x, self.stored = None, self.make(self.x)

    def __getitem__(self, index):
        return torch.tensor(self.read(self.stored, index)), self.y[index]


def centered_stored(rows):
    x = np.array([rows.read(rows.stored, i) for i in range(N)])
    rows.stored = rows.make(x - x.mean(0))


REWRITTEN = {
    "data frame": (Frame, centered_frame),
    **{kind: (partial(Stored, kind), centered_stored) for kind in STORED},
    "items made in code": (Own, lambda rows: setattr(rows, "x", rows.x - rows.x.mean(0))),
    "list": (list, centered),
    "subset": (lambda rows: Subset(list(rows), [*range(N)]), lambda rows: centered(rows.dataset)),
    "entries of a list": (list, centered_in_place),
    "tensors": (lambda rows: rows, lambda rows: rows.tensors[0].sub_(rows.tensors[0].mean(0))),
    "memory of tensors": (lambda rows: rows, centered_by_numpy),
}


@pytest.mark.parametrize("kind", REWRITTEN)
def test_rows_that_are_written_are_named(kind):
    make, write = REWRITTEN[kind]
    rows = make(TensorDataset(*(tensor.clone() for tensor in data().tensors)))
    training = training_of(dataset=rows, num_steps=20)
    train(training, steps=3)
    write(rows)
    with pytest.warns(UserWarning, match=r"rows of the data set were written or replaced before step \d"):
        train(training)
    assert "first seen before step" in training.statement()["not_covered"][-1]


class Signals(Own):
    """Has a data frame with an array in each cell."""

    def __init__(self, x):
        self.frame = pd.DataFrame({"x": [*x]})

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        return torch.from_numpy(self.frame["x"][index])


def test_long_cells_of_a_table_are_compared_in_full_and_no_more_are_kept_than_fit():
    x = np.random.default_rng(0).standard_normal((20, 300_000))
    signals = Signals(x)
    [kept] = Places(signals, signals.__getitem__)._kept
    assert len(kept._kept) == 6  # of 2.4 MB each
    x[0, 150_000] += 1.0  # where numpy's text has dots
    assert not kept.are_current()


class Caching(Own):
    """Keeps what it has computed, counts how often items are fetched, and has a transform."""

    def __init__(self, rows):
        super().__init__(rows)
        self.cache, self.counts, self.transform = [None] * N, np.zeros(N), torch.abs

    def __getitem__(self, index):
        self.counts[index] += 1
        if self.cache[index] is None:
            self.cache[index] = torch.from_numpy(self.x[index]).square()
        return self.transform(self.cache[index]), self.y[index]


class Flipping(Caching):
    """Draws random numbers of its own for some items."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.flip(0) if np.random.default_rng().random() < 0.5 else x, y


def with_keys(rows):
    """Computes what is new for each entry of the list, and keeps it there."""
    for row in rows:
        row.setdefault("squares", row["x"].square())
    return torch.stack([row["squares"] for row in rows]), torch.stack([row["y"] for row in rows])


UNCHANGED = {
    "a data frame with a new column": (Frame, lambda rows: rows.frame.insert(0, "loss", 1.0), None),
    "a cache, counts and another transform": (Caching, lambda rows: setattr(rows, "transform", torch.neg), None),
    "own random numbers": (Flipping, lambda rows: rows.counts.fill(0.0), None),
    "entries with new keys": (lambda rows: [{"x": x, "y": y} for x, y in rows], len, with_keys),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", UNCHANGED)
def test_rows_that_give_the_same_items_are_not_named(kind):
    make, change, collate = UNCHANGED[kind]
    rows = make(data())
    training = training_of(dataset=rows, num_steps=80, examples={"collate_fn": collate})
    train(training, steps=40)
    change(rows)
    train(training)
    assert not any("rows" in text for text in training.statement()["not_covered"])


class Opening(Own):
    """Opens a file when it is first read."""

    owner = None

    def __getitem__(self, index):
        self.owner = self.owner or os.getpid()
        assert self.owner == os.getpid(), "a file of another process"
        return super().__getitem__(index)


def test_workers_inherit_no_file_that_the_data_set_opens_when_it_is_first_read(tmp_path):
    examples = {"num_workers": 1}
    training = training_of(dataset=Opening(data()), num_steps=6, examples=examples, run_folder=tmp_path, delta=1e-3)
    train(training, steps=3)
    train(training)
    assert training.step_count == 6


def test_batches_are_pickled_for_workers_after_rows_were_looked_at():
    batches = Batches([*data()], None, 1)
    assert not batches.places.are_rewritten(np.arange(3))
    assert len(pickle.loads(pickle.dumps(batches)).fetch(BatchRequest(np.arange(3))).batch[0]) == 3


def test_a_step_is_that_of_poisson_sampling_on_the_same_batch():
    """The divisor is the mean size, not that of the batch, and the noise is the key's."""
    training = training_of(**BINS | {"num_steps": 1})
    before = parameters_of(training)
    [batch] = train(training)
    chosen = np.flatnonzero(np.isin(first_of_all(), batch))
    whole = training_of(dataset=TensorDataset(*data()[chosen]), expected_batch_size=len(chosen), num_steps=1)
    train(whole)
    moved, expected = parameters_of(training) - before, parameters_of(whole) - before
    torch.testing.assert_close(8 * moved, len(chosen) * expected)


@pytest.mark.thorough
@by_each_rule
def test_microbatches_and_rules_and_a_stop_leave_bits_as_they_are(rule):
    small = {} if rule == "micro-batches" else {"performance": tp.Performance(microbatch_size=3)}
    whole, first, second = (training_of(clipping=RULES[rule][0], **BINS, **small) for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))
    assert second.ledger.state_dict() == whole.ledger.state_dict()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*no ledger on disk")
@pytest.mark.parametrize("stop", [6, 10])
def test_under_new_keys_the_epoch_is_paid_again(monkeypatch, stop):
    def made(**settings):
        model = torch.nn.Linear(3, 2)
        return tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=1.0), data(), expected_batch_size=8, num_steps=13,
            sampling=tp.BallsAndBins(), clipping=tp.Flat(0.5), delta=DELTA, **settings,
        )  # fmt: skip

    training = made(target_epsilon=20.0)
    train(training, steps=stop)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    train(training, steps=12)
    state["ledger"] = training.ledger.state_dict()
    monkeypatch.setattr(release, "_RELEASED", {})
    again = made(target_epsilon=20.0)
    again.load_state_dict(copy.deepcopy(state))
    again.model.load_state_dict({name: 1.001 * weight for name, weight in weights.items()})
    with pytest.warns(UserWarning, match="did not repeat bit for bit"):
        train(again)
    epoch = again.ledger.events[0][0]
    assert isinstance(epoch, privacy.BallsAndBins)
    later = privacy.LaterBatch(epoch)
    expected = [(epoch, 1), (later, 4), (epoch, 1), (later, 4), (epoch, 1), (later, 1)]
    lost = 12 - stop
    assert again.num_lost == lost
    assert again.ledger.events[: len(expected)] == expected
    new = [event for event, count in again.ledger.events[len(expected) :] for _ in range(count)]
    starts = [stop + place for place, event in enumerate(new) if event == epoch]
    assert starts == [step for step in range(stop, again.step_count) if step == stop or step % 5 == 0]
    assert again.spent().epsilon.high <= 20.0
    kept = again.state_dict()
    third = made(target_epsilon=20.0)
    third.load_state_dict(copy.deepcopy(kept))
    assert third.spent().epsilon == again.spent().epsilon


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("given", "stop"),
    [
        ({"noise_multiplier": 1.0}, 11),
        ({"target_epsilon": 20.0}, 11),
        ({"noise_multiplier": 1.0}, 13),
        ({"target_epsilon": 20.0}, 13),  # the skipped steps end with an epoch
        ({"noise_multiplier": 1.0}, 20),  # other keys have released more than all steps
    ],
)
def test_every_epoch_drawn_is_paid_where_steps_of_other_keys_are_skipped(monkeypatch, tmp_path, given, stop):
    drawn = set()

    def going_on(state=None, replay=None):
        monkeypatch.setattr(release, "_RELEASED", {})
        training = training_of(
            delta=DELTA,
            sampling=tp.BallsAndBins(),
            num_steps=20,
            run_folder=tmp_path / "run",
            **{"noise_multiplier": None} | given,
        )
        if state is not None:
            training.load_state_dict(copy.deepcopy(state), replay)
        return training

    def go(training, steps=None, losses=cross_entropy):
        start = training.step_count
        train(training, steps, losses)
        key = training.state_dict()["sampler_key"]
        drawn.update((key, step // 5) for step in range(start, training.step_count))

    first = going_on()
    go(first, 5)
    state = first.state_dict()
    go(first, 7)
    with pytest.warns(UserWarning, match="did not repeat bit for bit"):
        go(going_on(state, "exact"), stop, lambda model, x, y: 2 * cross_entropy(model, x, y))
    with pytest.warns(UserWarning, match="not repeated"):
        last = going_on(state, "skip")
    go(last)
    assert sum(count for event, count in last.ledger.events if isinstance(event, privacy.BallsAndBins)) == len(drawn)
    assert last.spent(DELTA).epsilon.high <= given.get("target_epsilon", math.inf)


@pytest.mark.filterwarnings("ignore:.*They are not repeated")
def test_every_epoch_drawn_is_paid_after_a_lost_ledger_and_a_second_kill(monkeypatch, tmp_path):
    drawn = set()

    def going_on(state, steps):
        monkeypatch.setattr(release, "_RELEASED", {})
        training = training_of(sampling=tp.BallsAndBins(), num_steps=15, run_folder=tmp_path / "run")
        training.settings.__dict__["test_seed"] = None  # new keys are random
        if state is not None:
            training.load_state_dict(copy.deepcopy(state), "skip")
        start, key = training.step_count, training.state_dict()["sampler_key"]
        train(training, steps)
        drawn.update((key, step // 5) for step in range(start, training.step_count))
        return training

    first = going_on(None, 5)
    state = first.state_dict()
    first.ledger.path.unlink()
    going_on(state, 7)
    last = going_on(state, None)
    assert sum(count for event, count in last.ledger.events if isinstance(event, privacy.BallsAndBins)) == len(drawn)


@pytest.mark.parametrize("given", [{"sampling": tp.BallsAndBins()}, {"noise_schedule": [1.0, 2.0] * 7}])
def test_steps_that_are_yet_to_be_repeated_are_planned_once(given):
    first, again = (training_of(num_steps=14, delta=DELTA, **given) for _ in range(2))
    planned = first.spent().planned
    train(first, steps=4)
    state = first.state_dict()
    train(first, steps=8)
    again.load_state_dict(state | {"ledger": first.ledger.state_dict()})
    assert again.step_count == 4
    assert again.spent().planned == planned
    assert again.spent().epsilon == first.spent().epsilon


OF_BINS = case(**BINS)


def on_rank(rank: int | None, how: str | None) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]], dict]:
    """Returns the weights, the examples that this rank got in each step, and the ledger."""
    training, seen = start(OF_BINS, how, "sgd"), []
    for batch in training:
        step = training.step_count
        training.step(cross_entropy_of_pair(training.model, batch))
        if not training.rehearsing and not training.stands_in:
            seen += [(step // 5, x) for x in batch[0][:, 0].tolist()]
    return whole_weights(training.model), seen, training.ledger.state_dict()["events"]


@pytest.mark.thorough
@VIEWS
def test_two_ranks_divide_the_batches_of_one_process(ranks2):
    weights, seen, events = on_rank(None, None)
    found = ranks2.run(on_rank, "layers")
    assert sorted(found[0][1] + found[1][1]) == sorted(seen)
    for own, _, recorded in found:
        assert difference(own, weights) <= 1e-9
        assert recorded == events


def test_owners_are_in_one_batch_of_each_epoch():
    ids = np.arange(N) // 4
    training = training_of(
        examples={"owners": ids, "per_owner": 2}, sampling=tp.BallsAndBins(), num_steps=10, expected_batch_size=2
    )
    owner_of, seen = dict(zip(first_of_all(), ids.tolist(), strict=True)), train(training)
    batches = [sorted({owner_of[x] for x in batch}) for batch in seen]
    assert sum(map(len, seen)) == 2 * 10 * 2
    counts = np.bincount([owner for batch in batches for owner in batch], minlength=10)
    assert counts.tolist() == [2] * 10
    assert training.ledger.events[0] == (privacy.BallsAndBins(1.0, 5, ZERO_OUT, unit="owner"), 1)


# What it costs


def test_a_target_is_met_with_less_noise_than_under_poisson_sampling():
    given = {"noise_multiplier": None, "target_epsilon": 3.0, "delta": DELTA, "epochs": 3, "num_steps": None}
    bins, poisson = (training_of(**given, sampling=sampling) for sampling in (tp.BallsAndBins(), tp.Poisson()))
    noise, others = bins.settings.noise_multiplier, poisson.settings.noise_multiplier
    assert noise is not None
    assert others is not None
    assert price([(privacy.BallsAndBins(noise, 5), 3)]).high <= 3.0
    assert price([(privacy.BallsAndBins(noise * (1 - 2e-4), 5), 3)]).high > 3.0
    assert noise < 0.97 * others


def test_a_budget_stops_before_the_epoch_that_would_exceed_it():
    budget = privacy.Budget(price([(EPOCH, 2)]).high + 1e-6, DELTA)
    training = training_of(**BINS, examples={"budget": budget})
    train(training)
    assert training.step_count == 10


@pytest.mark.parametrize("clipping", [tp.Adaptive(0.5, count_noise_stddev=4.0), tp.PerLayer(0.5)])
def test_releases_that_are_one_gaussian_have_the_price_of_an_epoch(clipping):
    assert training_of(**BINS, clipping=clipping).event == EPOCH


# Defaults and refusals


@pytest.mark.parametrize(
    ("settings", "sampling", "size"),
    [
        ({"epochs": 2}, tp.BallsAndBins(), 8),
        ({"epochs": 2, "expected_batch_size": 7}, tp.BallsAndBins(), 40 / 6),
        ({"epochs": 2.0, "expected_batch_size": 3.3}, tp.BallsAndBins(), 40 / 12),
        ({"epochs": 2, "expected_batch_size": 30}, tp.Poisson(), 30),  # 1 batch of 40, or 2 of 20
        ({"epochs": 1.5}, tp.Poisson(), 8),
        ({"epochs": 0.5}, tp.Poisson(), 8),
        ({"num_steps": 10}, tp.Poisson(), 8),
        ({"epochs": 2, "noise_schedule": lambda step: 1 + step}, tp.Poisson(), 8),
        ({"epochs": 2, "clipping": tp.Sketched(64, clip_norm=0.5)}, tp.Poisson(), 8),
        ({"epochs": 2, "clipping": tp.Sketched(64, clip_norm=0.5).scheduled(lambda step: 1.0)}, tp.Poisson(), 8),
        ({"epochs": 2, "sampling": tp.Poisson()}, tp.Poisson(), 8),
        ({"epochs": 2, "sampling": tp.Truncated(most=12)}, tp.Truncated(most=12), 8),
    ],
)
def test_epochs_are_balls_and_bins_where_these_have_a_price(settings, sampling, size):
    training = training_of(**{"num_steps": None} | settings)
    assert training.settings.sampling == sampling
    assert training.settings.expected_batch_size == size
    if training.settings.sampling == tp.BallsAndBins():
        assert training.settings.num_steps == 2 * round(40 / size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"expected_batch_size": 7},
            r"= 5\.71429\. Nearest: 6\.666666667 \(6 batches\) or 8 \(5 batches\)",
        ),
        ({"expected_batch_size": 30}, r"Nearest: 40 \(1 batches\) or 20 \(2 batches\)|Nearest: 20 .* or 40"),
        ({"clipping": tp.Sketched(64, clip_norm=0.5)}, r"no known price for SubsampledJL.*tp\.Poisson\(\)"),
        ({"noise_schedule": lambda step: 1 + step}, r"changes within the epoch of steps 0 to 4.*tp\.Poisson\(\)"),
        ({"num_steps": None, "epochs": 0}, r"epochs=0"),
        ({"expected_batch_size": 0}, r"expected_batch_size=0"),
        ({"expected_batch_size": 41}, r"expected_batch_size=41 must be at most 40"),
        ({"sampling": "bins"}, r"sampling='bins' must be tp\.Poisson\(\)"),
    ],
)
def test_what_has_no_price_in_bins_is_refused(settings, message):
    with pytest.raises((tp.Refused, ValueError), match=message):
        training_of(**BINS | settings)


def test_a_size_that_is_whole_up_to_rounding_is_taken():
    training = training_of(**BINS | {"expected_batch_size": 6.6666667})
    assert training.settings.expected_batch_size == 40 / 6
    assert training.event == privacy.BallsAndBins(1.0, 6, ZERO_OUT)


def test_the_noise_may_change_between_epochs():
    training = training_of(**BINS, noise_schedule=lambda step: 1 + step // 5)
    train(training)
    epochs = [privacy.BallsAndBins(noise, 5, ZERO_OUT) for noise in (1.0, 2.0, 3.0)]
    assert training.profile().epsilon(DELTA) == price([(epoch, 1) for epoch in epochs])


def test_a_state_of_other_sampling_is_refused():
    training = training_of(**BINS)
    train(training, steps=2)
    with pytest.raises(tp.Refused, match=r"sampling='Poisson\(\)' \(the state has 'BallsAndBins\(\)'\)"):
        training_of(num_steps=13).load_state_dict(training.state_dict())


# Varying


def test_batches_of_varying_size_are_priced_step_by_step_and_divided_by_their_own_mean_size():
    factors = [1, 2, 3, 4, 5, 15]  # mean 5: sizes 1.6, 3.2, 4.8, 6.4, 8, 24 of 40
    training = training_of(sampling=tp.Varying(factors), noise_multiplier=2.0, clipping=tp.Flat(0.3))
    drawn = [training._state.releases.draws.sampler.indices(step) for step in range(6)]
    before, rows, steps = parameters_of(training).clone(), [], []
    for batches in training.steps():
        step = training.step_count
        for x, y in batches:
            found = rows_of(training, x, y)
            training.step(cross_entropy(training.model, x, y))
            rows = [] if training.rehearsing else [found]
        clipped = [row * min(1, 0.3 / row.norm()) for part in rows for row in part]
        noise = {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
        training._state.releases.noise.add_to(step, noise, stddev=PRICED_ROUNDING * 2.0 * 0.3)
        total = sum(clipped, torch.zeros_like(before)) + torch.cat([part.flatten() for part in noise.values()])
        torch.testing.assert_close(parameters_of(training), before - total / (8 * factors[step] / 5))
        assert len(clipped) == len(drawn[step])
        before, rows = parameters_of(training).clone(), []
        steps.append((privacy.SubsampledGaussian(2.0, 0.2 * factors[step] / 5, ZERO_OUT), 1))
    for (event, count), (expected, once) in zip(training.ledger.events, steps, strict=True):
        assert count == once
        assert event.sampling_probability == pytest.approx(expected.sampling_probability, rel=1e-12)
        assert replace(event, sampling_probability=0.1) == replace(expected, sampling_probability=0.1)
    assert training.spent(DELTA).epsilon.high == pytest.approx(price(steps).high, rel=1e-9)
    assert training.statement()["size_schedule"] == {"first": 0.2, "last": 3.0, "smallest": 0.2, "largest": 3.0}


def test_sizes_are_those_of_the_schedule_and_every_example_is_as_likely():
    probabilities = (0.05, 0.9)
    sampler = VaryingSampler(2000, probabilities, key=bytes(32))
    for step, q in enumerate(probabilities):
        assert abs(len(sampler.indices(step)) - 2000 * q) < 5 * (2000 * q * (1 - q)) ** 0.5
        assert np.array_equal(sampler.indices(step), PoissonSampler(2000, q, key=bytes(32)).indices(step))


def test_a_target_holds_for_batches_of_varying_size_and_less_noise_would_not_do():
    sampling = tp.Varying(lambda step: 1 + step)
    training = training_of(sampling=sampling, num_steps=20, noise_multiplier=None, target_epsilon=2.0, delta=DELTA)
    spent = price(training.settings.plan(training._setup.mechanism).releases)
    assert 1.998 < spent.high <= 2.0
    constant = training_of(num_steps=20, noise_multiplier=None, target_epsilon=2.0, delta=DELTA)
    assert training.settings.noise_multiplier > constant.settings.noise_multiplier * 1.001  # large batches cost more


def test_a_run_with_varying_sizes_is_resumed_and_another_schedule_is_refused():
    whole = training_of(sampling=tp.Varying(range(1, 7)))
    train(whole)
    stopped = training_of(sampling=tp.Varying(range(1, 7)))
    train(stopped, steps=3)
    state = copy.deepcopy((stopped.state_dict(), stopped.model.state_dict()))
    again = training_of(sampling=tp.Varying([2, 4, 6, 8, 10, 12]))  # the same sizes
    again.load_state_dict(state[0])
    again.model.load_state_dict(state[1])
    train(again)
    assert torch.equal(parameters_of(again), parameters_of(whole))
    with pytest.raises(tp.Refused, match="sampling="):
        training_of(sampling=tp.Varying([1, 1, 1, 1, 1, 2])).load_state_dict(state[0])
    with pytest.raises(tp.Refused, match="sampling="):
        training_of(sampling=tp.Poisson()).load_state_dict(state[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": tp.Varying([1, 2])}, "has 2 factors for 6 steps"),
        ({"sampling": tp.Varying([1, 1, 1, 1, 1, 0])}, r"factors\[5\]=0"),
        ({"sampling": tp.Varying([1, 1, 1, 1, 1, 60])}, "batches of up to 44.3077 on average, and n is 40"),
        ({"sampling": tp.Varying(range(1, 7)), "clipping": tp.Adaptive(0.5)}, "no rule for clipping=Adaptive"),
        ({"sampling": tp.Varying(range(1, 7)), "clipping": tp.MicroBatches(0.5, 2)}, "clipping=MicroBatches"),
        ({"sampling": tp.Varying(range(1, 7)), "clipping": tp.Sketched(32, clip_norm=1.0)}, "clipping=Sketched"),
        ({"sampling": tp.Varying(range(1, 7)), "correlation": tp.Banded(2)}, "which draws batches itself"),
    ],
)
def test_varying_sizes_without_a_rule_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        training_of(**settings)


# Truncated


def test_a_truncated_training_has_at_most_so_many_examples_and_its_price():
    training = training_of(sampling=tp.Truncated(most=9), num_steps=30)
    sizes = [len(batch) for batch in train(training)]
    assert max(sizes) == 9
    assert sizes.count(9) > 5
    event = privacy.TruncatedGaussian(1.0, 0.2, N, 9)
    assert training.ledger.events == [(event, 30)]
    assert training.spent(DELTA).epsilon == price([(event, 30)])
    assert "truncated Poisson sampling" in str(training.spent(DELTA))


@pytest.mark.parametrize("most", [0, 2.5, "3"])
def test_a_size_that_is_no_number_is_refused(most):
    with pytest.raises(ValueError, match="Truncated: most="):
        tp.Truncated(most=most)
