# SPDX-License-Identifier: Apache-2.0
"""Tests when batches are rehearsed, that couplings which begin late are found, and what is said of releases before."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.jacobian.recording.coverage import CodePath
from torch_privacy.model_check.rehearsal.kept import draw_few
from torch_privacy.training.rehearsals import BLOCK, RARELY

LATE = 5  # neither one of the first steps nor a power of two


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.f, self.g, self.drop, self.factor = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(drop), 0.0
        self.register_buffer("gates", torch.zeros(2))
        self.plain = torch.zeros(())

    def forward(self, h):
        return self.g(h)


def training_of(losses, after=lambda training: None, *, num_steps=8, count=40, seed=1, drop=0.0, **settings):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(count, 3), torch.randint(2, (count,)))
    model = Net(drop)
    settings = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "delta": 1e-3, "test_seed": seed} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = tp.PrivateTraining(model, optimizer, data, expected_batch_size=8, num_steps=num_steps, **settings)

    def run():
        for x, y in training:
            h = losses(training, model, model.f(x).tanh())
            training.step(F.cross_entropy(model(h), y, reduction="none"))
            after(training)

    return training, run


def mean(h):
    return h.mean(0, keepdim=True)


def factor(t):
    return max(0, t.step_count - LATE + 1) / 10


def parts_of(t, h):
    return [1] * len(h) if t.step_count < LATE else [len(h)]


def attribute(t, m, h):
    m.factor = factor(t)
    return h + m.factor * mean(h)


FACTORS = {  # the state of a batch enters from step 5 on
    "in the loop": lambda t, m, h: h + factor(t) * mean(h),
    "an attribute": attribute,
    "a tensor of the loop": lambda t, m, h: h + torch.tensor(factor(t)) * mean(h),
    "of numpy": lambda t, m, h: h + mean(h) * np.float32(factor(t)),
    "in a list": lambda t, m, h: h + torch.tensor([0.0, factor(t)])[1] * mean(h),
    "in a list of whole numbers": lambda t, m, h: h + torch.tensor([1, int(t.step_count >= LATE)])[1] * mean(h),
    "sizes of parts": lambda t, m, h: torch.cat([p + mean(p).detach() for p in h.split(parts_of(t, h))]),
    "from numpy": lambda t, m, h: h + torch.from_numpy(np.array(factor(t), np.float32)) * mean(h),
    "a buffer": lambda t, m, h: h + m.gates[1] * mean(h),
    "a plain tensor": lambda t, m, h: h + m.plain * mean(h),
    "a weight of lerp": lambda t, m, h: torch.lerp(h, mean(h).expand_as(h), factor(t)),
    "a temperature": lambda t, m, h: h + mean(h) / (1 / factor(t) if factor(t) else math.inf),
    "a branch": lambda t, m, h: h + mean(h) if t.step_count >= LATE else h,
}


def switch_buffers(training):
    if training.step_count >= LATE:
        training.model.gates[1] = 0.5
        training.model.plain = torch.tensor(0.5)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_was_zero_until_now_is_rehearsed_at_once(name):
    training, run = training_of(FACTORS[name], switch_buffers)
    with pytest.raises(tp.Refused, match="depend"):
        run()
    assert training.step_count == LATE


HONEST = {
    "annealed": lambda t, m, h: h * (1 - t.step_count / 300),
    "random factors": lambda t, m, h: h * (1 + np.random.beta(0.2, 0.2)),
    "a factor for each example": lambda t, m, h: torch.stack([r * r.detach().norm().item() for r in h]),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", HONEST)
def test_honest_factors_are_rarely_rehearsed(name):
    turns = []
    _, run = training_of(HONEST[name], lambda training: turns.append(training.rehearsing), num_steps=60)
    run()
    assert sum(turns[len(turns) // 3 :]) < len(turns) // 3


# When


@pytest.mark.parametrize("epoch", [1, 2, 10, 100, 333.3])
def test_rehearsals_are_bounded_and_begin_epochs(epoch):
    training, _ = training_of(FACTORS["a branch"], num_steps=1000)
    rehearsals = training._state.rehearsals
    rehearsals.epoch = epoch
    due = [step for step in range(1000) if rehearsals.are_due(step, 0, 1)[0]]
    assert len(due) <= 40
    assert 999 in due
    if epoch > RARELY:
        assert {math.ceil(k * epoch) for k in range(1, int(1000 / epoch))} <= set(due)
    assert np.diff(due).max() <= 2 * BLOCK


def test_every_microbatch_has_its_turn():
    training, _ = training_of(FACTORS["a branch"], num_steps=2000)
    due = training._state.rehearsals.are_due
    numbers = [number for step in range(1999) for number in range(4) if due(step, number, 4)[0]]
    assert min(np.bincount(numbers, minlength=4)) > len(numbers) // 6
    assert [number for number in range(4) if due(1999, number, 4)[0]] == [0, 1, 2, 3]


# What is said of the releases before


def by_numpy(t, m, h):
    """Mixes examples by numpy, with the same calls of torch as before."""
    values = h.detach().numpy()
    return h + torch.from_numpy(values.mean(0, keepdims=True) + 0 * values if t.step_count >= 20 else 0 * values)


def found_late(folder):
    states = {}

    def keep(training):
        states.setdefault(training.step_count, (training.state_dict(), copy_of(training.model)))

    training, run = training_of(by_numpy, keep, num_steps=60, seed=None, run_folder=folder / "run")
    with pytest.raises(tp.Refused, match="depend on each other"):
        run()
    return training, states


def copy_of(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.thorough
def test_releases_since_the_last_rehearsal_that_passed_are_not_private(tmp_path):
    training, _ = found_late(tmp_path)
    coupled = training._state.rehearsals.coupled
    assert coupled.found == training.step_count > coupled.last >= 20 - 1 >= coupled.first - 1
    named = f"releases {coupled.first} to {coupled.last} were made"
    assert str(training.spent()).startswith("NOT PRIVATE (from the last rehearsal that passed: ")
    assert named in str(training.spent())
    assert float(training.spent()) == math.inf
    assert named in training.statement()["warning"]
    assert training.statement()["private"] is False
    assert named in tp.privacy.Ledger.read(training.ledger.path).warning  # at once, and not when it is closed
    again, _ = training_of(by_numpy, num_steps=60, seed=None)
    again.load_state_dict(training.state_dict())
    assert named in str(again.spent())
    training.write_run()
    assert named in (tmp_path / "run" / "privacy.json").read_text()
    assert named in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(("folder", "private"), [("run", False), ("another", True)])
def test_a_state_from_before_makes_private_releases_with_another_ledger(tmp_path, folder, private):
    training, states = found_late(tmp_path)
    first = training._state.rehearsals.coupled.first
    state, weights = states[first]
    training.ledger.close()
    again, _ = training_of(by_numpy, num_steps=60, seed=None, run_folder=tmp_path / folder)
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    assert str(again.spent()).startswith("NOT PRIVATE") != private
    assert bool(again.ledger.warning) != private


class Marked(nn.Linear):
    """Keeps that there was an example with a large entry; the same again for a second one."""

    def __init__(self, kind):
        super().__init__(3, 2)
        self.kind, self.factor, self.table, self.strong = kind, 1.0, {"factor": 1.0}, False
        self.scale, self.weights = torch.ones(()), torch.ones(())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if (x > 50).any():
            if self.kind == "a buffer in the model's file":
                self.seen.fill_(1.0)
            if self.kind == "a new attribute":
                self.late = 2.0
            if self.kind == "a tensor":
                self.scale = torch.full((), 2.0)
            if self.kind == "a tensor's entries":
                self.weights.fill_(2.0)
            self.factor, self.table["factor"], self.strong = 2.0, 2.0, True
        h = super().forward(x.clamp(max=1))
        if self.kind == "a branch":
            return h.tanh() if self.strong else h
        factors = {
            "a number": self.factor,
            "a dictionary": self.table["factor"],
            "a new attribute": getattr(self, "late", 1.0),
            "a tensor": self.scale,
            "a tensor's entries": self.weights,
        }
        return h * factors.get(self.kind, 1.0)


ONCE = ["a number", "a dictionary", "a branch", "a buffer in the model's file"]
ONCE += ["a new attribute", "a tensor", "a tensor's entries"]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ONCE)
def test_what_one_example_sets_once_in_a_step_that_is_not_rehearsed_is_refused(kind):
    """It was set when the batch ran first, so that nothing changed it in the rehearsals that followed."""
    x, model = torch.randn(200, 3), Marked(kind)

    def begun():
        return tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.01), TensorDataset(x, (x[:, 1] > 0).long()),
            expected_batch_size=8, num_steps=12, clipping=tp.Flat(1.0), noise_multiplier=1.0, delta=1e-4, test_seed=1,
        )  # fmt: skip

    drawn = [set(begun()._state.releases.draws.records(step).tolist()) for step in range(LATE + 1)]
    x[min(drawn[LATE].difference(*drawn[:LATE])), 0] = 100.0
    training = begun()

    def run():
        for batch, labels in training:
            training.step(F.cross_entropy(model(batch), labels, reduction="none"))

    with pytest.raises(tp.Refused, match=r"the forward changed '.*' in a way that depends on the examples"):
        run()
    assert training.step_count == LATE


def test_a_refusal_without_a_release_before_changes_nothing():
    training, run = training_of(lambda t, m, h: h + mean(h), seed=None)
    for _ in range(2):
        with pytest.raises(tp.Refused, match="depend"):
            run()
    assert str(training.spent()).startswith("epsilon")
    assert "(nothing was released) after 0 of" in str(training.spent())
    assert training.statement()["private"]


# Loops that count their own turns


@pytest.mark.parametrize("period", [2, 3, 7, 50])
def test_a_loop_that_counts_its_own_turns_is_refused(period):
    turns = []

    def losses(t, m, h):
        turns.append(t)
        return h * h if len(turns) % period == 0 else h

    _, run = training_of(losses, num_steps=200)
    with pytest.raises(tp.Refused, match=r"rehearsal: .*training.step_count"):
        run()


def test_a_log_that_is_written_once_for_each_step_trains():
    logged = {}

    def losses(t, m, h):
        if t.step_count not in logged:
            logged[t.step_count] = h.mean().item(), copy_of(m)
        return h

    turns = []
    training, run = training_of(losses, lambda training: turns.append(1), num_steps=40)
    run()
    assert training.step_count == 40
    assert len(turns) < 100


# Settings that the loop switches


def once(switch):
    done = []

    def losses(t, m, h):
        if t.step_count >= t.at and not done:
            done.append(switch(m))
        return m.drop(h)

    return losses


def by_step(switch):
    def losses(t, m, h):
        if t.step_count >= t.at:
            switch(m)
        return m.drop(h)

    return losses


SWITCHES = {
    "unfrozen": lambda m: m.f.requires_grad_(True),
    "another dropout": lambda m: setattr(m.drop, "p", 0.5),
    "in eval mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("how", [once, by_step])
@pytest.mark.parametrize("name", SWITCHES)
def test_what_the_loop_switches_trains_in_rehearsed_steps_and_others(name, how, at):
    training, run = training_of(how(SWITCHES[name]), drop=0.1)
    vars(training)["at"] = at
    training.model.f.requires_grad_(name != "unfrozen")
    run()
    assert training.step_count == 8
    assert training.model.f.weight.requires_grad
    assert not name.startswith("another") or training.model.drop.p == 0.5
    assert training.model.training == (name != "in eval mode")


@pytest.mark.parametrize("alternate", [lambda m, on: m.f.requires_grad_(on), lambda m, on: m.train(on)])
def test_what_the_loop_switches_in_every_turn_is_refused(alternate):
    turns = []

    def losses(t, m, h):
        turns.append(t)
        alternate(m, len(turns) % 2 == 0)
        return m.drop(h)

    _, run = training_of(losses, drop=0.5)
    with pytest.raises(tp.Refused, match=r"training\.step_count"):
        run()


def turns_of(training, loop):
    """Runs a loop over the training; returns the turns of each step."""
    turns = dict.fromkeys(range(len(training)), 0)

    def answered(x, y):
        turns[training.step_count] += 1
        return training.step(F.cross_entropy(training.model(training.model.f(x).tanh()), y, reduction="none"))

    loop(iter(training), answered)
    return [*turns.values()]


def by_for(batches, answered):
    for x, y in batches:
        answered(x, y)


def by_while(batches, answered):
    batch = next(batches, None)
    while batch is not None:
        while not answered(*batch):  # Python compiles this condition twice
            batch = next(batches)
        batch = next(batches, None)


def by_new_functions(batches, answered):
    for x, y in batches:
        eval("lambda x, y: answered(x, y)", {"answered": answered})(x, y)


@pytest.mark.parametrize("loop", [by_while, by_new_functions])
def test_code_that_is_compiled_anew_is_not_new_code(loop):
    expected, found = (turns_of(training_of(None, num_steps=12)[0], each) for each in (by_for, loop))
    assert found == expected
    assert min(expected) == 1


def test_two_calls_in_one_line_are_two_places():
    path = CodePath()

    def called():
        path.note_call(torch.add, ())
        return path.place

    first, second = called(), called()
    assert first != second
    repeated = [called() for _ in range(2)]
    assert repeated[0] == repeated[1] != first


@pytest.mark.parametrize(("func", "is_same"), [(torch.tensor, True), (torch.split, True), (Tensor.permute, False)])
def test_lists_with_the_same_entries_in_another_order_are_not_new_code(func, is_same):
    path, found = CodePath(), []
    for sizes in ((*[2, 5] * 9, 1, 7), (*[1, 7] * 8, 2, 9)):
        path.note_call(func, (sizes, 0), (list(sizes), 0))
        found.append(set(path.features))
    assert (found[0] == found[1]) == is_same


@pytest.mark.thorough
def test_paths_that_are_always_new_are_warned_of_once():
    _, run = training_of(lambda t, m, h: h * 2.0 ** (8 * t.step_count), num_steps=30)
    with pytest.warns(UserWarning, match="of the last [0-9]+ batches ran.*New now: the size of a number") as warned:
        run()
    assert len([one for one in warned if "was rehearsed" in str(one.message)]) == 1


@pytest.mark.thorough
def test_a_warning_of_new_code_names_the_call():
    space = {}
    for k in range(30):
        exec(f"\ndef g{k}(h):\n    return h.clone()", space)
    _, run = training_of(lambda t, m, h: space[f"g{t.step_count}"](h), num_steps=30)
    with pytest.warns(UserWarning, match=r"New now: the call of clone in g\d+ \(<string>, line 3\)"):
        run()


class Names(torch.utils.data.Dataset):
    """Names of which all but every twentieth are of the largest length, as items of tensors, text or numbers."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 400

    def __getitem__(self, k):
        numbers = [1 + (k * 7 + j) % 25 for j in range(12 if k % 20 else 5)]
        return {"tensor": torch.tensor(numbers), "text": "".join(map(chr, numbers)), "numbers": {"ids": numbers}}[
            self.kind
        ]


def padded(items):
    as_numbers = {torch.Tensor: lambda x: x.tolist(), str: lambda x: [*map(ord, x)], dict: lambda x: x["ids"]}
    numbers = [torch.tensor(as_numbers[type(item)](item)) for item in items]
    return nn.utils.rnn.pad_sequence(numbers, batch_first=True)


@pytest.mark.parametrize("kind", ["tensor", "text", "numbers"])
def test_lengths_that_others_pad_to_are_seen_even_if_nearly_all_are_the_longest(kind):
    """The last position of a recurrence is that of the longest name in the batch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(26, 4), "r": nn.GRU(4, 4, batch_first=True), "f": nn.Linear(4, 1)})
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tp.Examples(Names(kind), collate_fn=padded),
        expected_batch_size=40, num_steps=2, clipping=tp.Flat(1.0), noise_multiplier=1.0, test_seed=1,
    )  # fmt: skip

    def run():
        for x in training:
            training.step(model["f"](model["r"](model["e"](x))[0][:, -1]).squeeze(1).square())

    with pytest.raises(tp.Refused, match="when the rest was left out"):
        run()
    assert training.step_count == 0


@pytest.mark.parametrize("of_units", [False, True])
def test_the_few_that_are_kept_alone_are_shorter_than_the_longest(of_units):
    generator = np.random.default_rng(0)
    sizes = np.array([9] * 30 + [3, 5, 9, 9])
    units = np.arange(34) // 2 if of_units else None
    for _ in range(20):
        kept = sizes[draw_few(34, generator, units, sizes)]
        assert set(kept) == {3, 5}
    equal = [draw_few(34, generator, None, np.full(34, 9)).sum() for _ in range(20)]
    assert max(equal) == 4
