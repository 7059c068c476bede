# SPDX-License-Identifier: Apache-2.0
"""What the loop keeps between batches must not carry data into losses; logs, clocks and teachers may change."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import inspect
import multiprocessing
import re
import time
import warnings
import weakref
from collections import Counter, UserDict, deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.training.loop_suspects import follows_steps, is_count

N, D = 60, 3
STEPS = 14


def training_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator)
    return TensorDataset(x, torch.randint(2, (N,), generator=generator), torch.arange(N))


def training_of(model: nn.Module, data=None, **settings) -> tp.PrivateTraining:
    data = training_data() if data is None else data
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = {"expected_batch_size": 12, "num_steps": STEPS, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    return private_training(model, optimizer, data, test_seed=5, **(chosen | settings))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))


def errors(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


# Loops that carry data into later losses. Each takes the training, and names the variable at fault.


def median_of_the_last_epoch(training, model):
    scale, seen = 1.0, []
    for x, y, _ in training:
        losses = errors(model, x, y)
        if not training.rehearsing:
            seen.append(losses.detach())
        if len(seen) == 3:
            scale, seen = float(torch.cat(seen).median()), []
        training.step(losses / scale)


def running_mean_unless_rehearsing(training, model):
    running_mean = torch.zeros(D)
    for x, y, _ in training:
        if not training.rehearsing:
            running_mean = 0.5 * running_mean + 0.5 * x.mean(0)
        training.step(errors(model, x - running_mean, y))


def two_tasks_weighted_by_the_last_losses(training, model):
    ratio = 1.0
    for x, y, _ in training:
        out = model(x)
        first, second = F.cross_entropy(out, y, reduction="none"), (out[:, 0] - x[:, 0]) ** 2
        if training.step(first + ratio * second):
            ratio = float(first.detach().mean() / second.detach().mean())


def center_of_a_teacher(training, model):
    center = torch.zeros(2)
    for x, _, _ in training:
        out = model(x)
        losses = ((out - center) ** 2).sum(1)
        if training.step(losses):
            center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)


def clusters_over_all_data(training, model):
    assignments = torch.zeros(N, dtype=torch.long)
    x_all = training._setup.batches.dataset.tensors[0]
    for x, _, i in training:
        if training.step_count % 4 == 0 and not training.rehearsing:
            with torch.no_grad():
                assignments = (model(x_all)[:, 0] > model(x_all)[:, 0].median()).long()
        training.step(errors(model, x, assignments[i]))


def weights_of_groups(training, model):
    weights = {0: 1.0, 1: 1.0}
    for x, y, _ in training:
        losses = errors(model, x, y)
        weight = torch.tensor([weights[int(label)] for label in y])
        if training.step(losses * weight):
            for label in (0, 1):
                weights[label] *= float(losses.detach()[y == label].mean().nan_to_num().exp())


class Estimator:
    def __init__(self):
        self.count, self.mean_ = 0, np.zeros(D)

    def partial_fit(self, x):
        self.count += len(x)
        self.mean_ += (x.numpy() - self.mean_).sum(0) / self.count


def partial_fit(training, model):
    estimator = Estimator()
    for x, y, _ in training:
        if training.step(errors(model, x - torch.from_numpy(estimator.mean_), y)):
            estimator.partial_fit(x)


_ACTIVATIONS = {"last": None}


def remember(activations):
    _ACTIVATIONS["last"] = activations.detach().mean(0)


def a_global_changed_by_a_helper(training, model):
    _ACTIVATIONS["last"] = torch.zeros(2)
    for x, y, _ in training:
        out = model(x) + _ACTIVATIONS["last"]
        if training.step(F.cross_entropy(out, y, reduction="none")):
            remember(out)


def a_cell_of_a_closure(training, model):
    scale = 1.0

    def loss_of(x, y):
        return errors(model, x, y) * scale

    def note(losses):
        nonlocal scale
        scale = float(losses.detach().mean())

    for x, y, _ in training:
        losses = loss_of(x, y)
        if training.step(losses):
            note(losses)


class Trainer:
    best = 1.0

    def __init__(self):
        self.scale = torch.ones(())

    def fit(self, training, model):
        for x, y, _ in training:
            losses = errors(model, x, y)
            if training.step(losses * self.scale):
                self.scale = losses.detach().mean()

    def fit_with_class_attribute(self, training, model):
        Trainer.best = 1.0
        for x, y, _ in training:
            losses = errors(model, x, y)
            if training.step(losses * Trainer.best):
                Trainer.best = min(Trainer.best, float(losses.detach().min()))


def an_attribute(training, model):
    Trainer().fit(training, model)


def a_class_attribute(training, model):
    Trainer().fit_with_class_attribute(training, model)


def a_deque(training, model):
    recent = deque(maxlen=3)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses / (1 + sum(recent))):
            recent.append(float(losses.detach().mean()))


def counts_of_classes(training, model):
    counts = Counter({0: 1, 1: 1})
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses / torch.tensor([counts[int(label)] for label in y])):
            counts.update(y.tolist())


def an_array_in_a_list(training, model):
    kept = [np.zeros(D)]
    for x, y, _ in training:
        if training.step(errors(model, x - torch.from_numpy(kept[0]), y)):
            kept[0] += x.numpy().mean(0)


@dataclass
class Meter:
    total: float = 0.0
    values: list = field(default_factory=list)


def a_dataclass(training, model):
    meter = Meter()
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * (1 + meter.total)):
            meter.total += float(losses.detach().mean())


def last_of(*more, memory=[1.0]):  # noqa: B006
    memory.extend(more)
    return memory[-1]


def a_default_argument(training, model):
    last_of(1.0)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * last_of()):
            last_of(float(losses.detach().mean()))


def a_cached_helper(training, model):
    latest = [1.0]

    @functools.lru_cache
    def scale_of(epoch):
        return latest[-1]

    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * scale_of(training.step_count // 5)):
            latest.append(float(losses.detach().mean()))


def set_once(training, model):
    mean = None
    for x, y, _ in training:
        if mean is None:
            mean = x.mean(0)
        training.step(errors(model, x - mean, y))


def state_of_a_criterion(training, model):
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, out, y):
            return F.cross_entropy(out, y, reduction="none") / self.mean

    criterion = Criterion()
    for x, y, _ in training:
        losses = criterion(model(x), y)
        if training.step(losses):
            criterion.mean.fill_(losses.detach().mean())


def running_mean_for_the_next_batch(training, model):
    running_mean = torch.zeros(D)
    for x, y, _ in training:
        losses = errors(model, x - running_mean, y)
        if not training.rehearsing:
            running_mean = 0.5 * running_mean + 0.5 * x.mean(0)
        training.step(losses)


def clusters_after_the_step(training, model):
    assignments = torch.zeros(N, dtype=torch.long)
    x_all = training._setup.batches.dataset.tensors[0]
    for x, _, i in training:
        if training.step(errors(model, x, assignments[i])) and training.step_count % 4 == 3:
            with torch.no_grad():
                assignments = (model(x_all)[:, 0] > model(x_all)[:, 0].median()).long()


def slots(training, model):
    class State:
        __slots__ = ("scale",)

    state = State()
    state.scale = 1.0
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * state.scale):
            state.scale = float(losses.detach().mean())


def attribute_of_a_function(training, model):
    def loss_of(x, y):
        return errors(model, x, y) * loss_of.scale

    loss_of.scale = 1.0
    for x, y, _ in training:
        losses = loss_of(x, y)
        if training.step(losses):
            loss_of.scale = float(losses.detach().mean())


def class_in_the_loop(training, model):
    class Stats:
        mean = 1.0

    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * Stats.mean):
            Stats.mean = float(losses.detach().mean())


def imported_in_a_function(training, model):
    import fixed_state

    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * getattr(fixed_state, "mean", 1.0)):
            fixed_state.mean = float(losses.detach().mean())


def generator_that_was_sent_losses(training, model):
    def averages():
        average = 1.0
        while True:
            number = yield average
            average = average if number is None else 0.5 * (average + number)

    average_of = averages()
    next(average_of)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * next(average_of)):
            average_of.send(float(losses.detach().mean()))


def context_variable(training, model):
    context = ContextVar("mean", default=1.0)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * context.get()):
            context.set(float(losses.detach().mean()))


def object_of_a_library(training, model):
    args = SimpleNamespace(mean=1.0)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * args.mean):
            args.mean = float(losses.detach().mean())


def attribute_of_a_weight(training, model):
    weight = model[0].weight
    weight.importance = 1.0
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * weight.importance):
            weight.importance = float(losses.detach().mean())


def mapping_written_in_python(training, model):
    memory = UserDict(mean=1.0)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * memory["mean"]):
            memory["mean"] = float(losses.detach().mean())


def list_of_mappings(training, model):
    groups = [{"mean": torch.ones(())}]
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * groups[0]["mean"]):
            groups[0]["mean"] = losses.detach().mean()


def mean_in_inference_mode(training, model):
    mean = torch.ones(1)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * (1 + mean)):
            with torch.inference_mode():
                mean = losses.mean(0, keepdim=True)


def sparse_counts(training, model):
    counts = torch.eye(2).to_sparse()
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * counts.to_dense().diagonal()[y]):
            counts = torch.diag(torch.bincount(y, minlength=2) / 6.0).to_sparse()


def attribute_of_the_model(training, model):
    model.mean = 1.0
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * model.mean):
            model.mean = float(losses.detach().mean())


def attribute_of_the_model_set_once(training, model):
    model.mean = 1.0
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * model.mean) and training.step_count == 4:
            model.mean = float(losses.detach().mean())


def number_set_once(training, model):
    number = 1.0  # another number is new to the code, so that the batch comes again for a full rehearsal
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * number) and training.step_count == 4:
            number = float(losses.detach().mean())


def table_of_losses(training, model):
    log = pandas.DataFrame({"loss": [1.0]})
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * log.loss.iloc[-1]):
            log.loc[len(log)] = float(losses.detach().mean())


def scale_of_gradients_alone(training, model):
    scale = 1.0
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(scale * losses + (1 - scale) * losses.detach()):
            scale = float(losses.detach().mean())


def mean_over_all_data(training, model):
    everything = training_data().tensors[0]
    for x, y, _ in training:
        training.step(errors(model, x - everything.mean(0), y))


def class_weights_over_all_data(training, model):
    labels = training_data().tensors[1].tolist()
    for x, y, _ in training:
        training.step(errors(model, x, y) * (1 + labels.count(1)))


def end_of(entry):
    return entry if entry.before is None else end_of(entry.before)


def end_of_a_linked_list(training, model):
    chain = linked(100)
    for x, y, _ in training:
        losses = errors(model, x, y)
        if training.step(losses * (1 + end_of(chain).value)):
            end_of(chain).value = float(losses.detach().mean())


REFUSED = {  # loop -> what the refusal names
    median_of_the_last_epoch: "depend on each other",
    running_mean_unless_rehearsing: "depend on each other",
    clusters_over_all_data: "depend on each other",
    running_mean_for_the_next_batch: "'running_mean'",
    mean_over_all_data: "rows of 'everything'",
    class_weights_over_all_data: "rows of 'labels'",
}
NAMED = {  # loop -> the variable that warning and statement name
    clusters_after_the_step: "assignments",
    slots: "state.scale",
    attribute_of_a_function: "loss_of.scale",
    class_in_the_loop: "Stats.mean",
    imported_in_a_function: "fixed_state.mean",
    generator_that_was_sent_losses: "average",
    context_variable: "context",
    object_of_a_library: "args.mean",
    attribute_of_a_weight: "model.0.weight.importance",
    mapping_written_in_python: "memory.data",
    list_of_mappings: "groups",
    mean_in_inference_mode: "mean",
    sparse_counts: "counts",
    attribute_of_the_model: "model.mean",
    attribute_of_the_model_set_once: "model.mean",
    number_set_once: "number",
    table_of_losses: "log",
    scale_of_gradients_alone: "scale",
    two_tasks_weighted_by_the_last_losses: "ratio",
    center_of_a_teacher: "center",
    weights_of_groups: "weights",
    partial_fit: "estimator.mean_",
    a_global_changed_by_a_helper: "_ACTIVATIONS",
    a_cell_of_a_closure: "scale",
    an_attribute: "self.scale",
    a_class_attribute: "Trainer.best",
    a_deque: "recent",
    counts_of_classes: "counts",
    an_array_in_a_list: "kept",
    a_dataclass: "meter.total",
    a_default_argument: "last_of.__kwdefaults__.memory",
    set_once: "mean",
    end_of_a_linked_list: "chain" + 99 * ".before" + ".value",
    state_of_a_criterion: "criterion",
}


@pytest.mark.parametrize("loop", REFUSED)
def test_values_that_carry_data_and_change_before_the_step_are_refused(loop):
    training = training_of(network())
    with pytest.raises(tp.Refused, match=REFUSED[loop]):
        loop(training, training.model)


def test_code_in_a_folder_beside_the_package_is_the_users():
    source = inspect.getsource(running_mean_for_the_next_batch)
    space = {"torch": torch, "errors": errors, "D": D}
    exec(compile(source, f"{Path(tp.__file__).parent}_demo/loop.py", "exec"), space)
    training = training_of(network())
    with pytest.raises(tp.Refused, match="'running_mean'"):
        space["running_mean_for_the_next_batch"](training, training.model)


def test_collate_fn_that_reads_all_data_is_refused():
    data = [(x, y) for x, y, _ in training_data()]
    everything = torch.stack([x for x, _ in data])

    def collate(rows):
        return torch.stack([x for x, _ in rows]) - everything.mean(0), torch.stack([y for _, y in rows])

    def loop(training):
        for x, y in training:
            training.step(errors(training.model, x, y))

    with pytest.raises(tp.Refused, match="rows of 'everything'"):
        loop(training_of(network(), data, examples={"collate_fn": collate}))


class Weighted(Dataset):
    """A data set whose items have a factor that the loop sets."""

    def __init__(self):
        self.x, self.y, _ = training_data().tensors
        self.factor = 1.0

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.x[index], self.y[index], self.factor


def test_a_number_of_the_data_set_that_follows_losses_is_named():
    data = Weighted()

    def loop(training):
        for x, y, factor in training:
            losses = errors(training.model, x, y)
            if training.step(losses * factor):
                data.factor = float(losses.detach().mean())

    with pytest.warns(UserWarning, match=r"losses depend on 'Weighted\.factor'"):
        loop(training_of(network(), data, num_steps=9))


def test_numbers_of_the_data_set_that_every_turn_sets_are_refused():
    data = Weighted()

    def loop(training):
        for x, y, factor in training:
            losses = errors(training.model, x, y)
            data.factor = float(losses.detach().mean())
            training.step(losses * factor)

    with pytest.raises(tp.Refused, match=r"losses depend on 'Weighted\.factor'"):
        loop(training_of(network(), data, num_steps=9))


class Strength:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0


class Transformed(Weighted):
    """Items are multiplied by numbers in the objects of the data set, and in memory that is shared."""

    def __init__(self):
        super().__init__()
        self.transforms = SimpleNamespace(steps=[Strength(), nn.Identity()], settings={"range": [1.0]})
        self.transforms.steps[1].strength = 1.0
        self.shared, self.raw = multiprocessing.Value("d", 1.0), ctypes.c_double(1.0)
        self.tensor = torch.ones(1).share_memory_()

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        first, second = self.transforms.steps
        factor = first.value * second.strength * self.transforms.settings["range"][0]
        return x, y, factor * self.shared.value * self.raw.value * self.tensor.item()


FOLLOWERS = {
    "Transformed.transforms.steps[0].value": lambda data, loss: setattr(data.transforms.steps[0], "value", loss),
    "Transformed.transforms.steps[1]": lambda data, loss: setattr(data.transforms.steps[1], "strength", loss),
    "Transformed.transforms.settings": lambda data, loss: data.transforms.settings["range"].__setitem__(0, loss),
    "Transformed.shared": lambda data, loss: setattr(data.shared, "value", loss),
    "Transformed.raw": lambda data, loss: setattr(data.raw, "value", loss),
}


def follow(training, data, change):
    for x, y, factor in training:
        losses = errors(training.model, x, y)
        if training.step(losses * factor):
            change(data, float(losses.detach().mean()))


@pytest.mark.every_case
@pytest.mark.parametrize("name", FOLLOWERS)
def test_numbers_in_the_objects_of_a_data_set_that_follow_losses_are_named(name):
    data = Transformed()
    with pytest.warns(UserWarning, match=f"losses depend on '{re.escape(name)}'"):
        follow(training_of(network(), data, num_steps=5), data, FOLLOWERS[name])


def of_a_class_that_nothing_names():
    class Own(Weighted):
        strength = 1.0

        def __getitem__(self, index):
            x, y, _ = super().__getitem__(index)
            return x, y, self.strength

    return Own()


def test_numbers_in_the_class_of_a_data_set_that_follow_losses_are_named():
    data = of_a_class_that_nothing_names()
    with pytest.warns(UserWarning, match=r"losses depend on 'Own\.strength'"):
        follow(
            training_of(network(), data, num_steps=5), data, lambda data, loss: setattr(type(data), "strength", loss)
        )


@pytest.mark.parametrize("name", ["shared", "tensor"])
def test_numbers_that_a_data_set_shares_with_workers_and_that_follow_losses_are_in_the_statement(name):
    data = Transformed()
    training = training_of(network(), data, num_steps=5, examples={"num_workers": 1})
    changes = {"shared": FOLLOWERS["Transformed.shared"], "tensor": lambda data, loss: data.tensor.fill_(loss)}
    follow(training, data, changes[name])
    found = [text for text in training.statement()["independence"]["not_compared"] if "share" in text]
    assert [re.search(r"changes (\S+) in", text)[1] for text in found] == [f"Transformed.{name}"]


@pytest.mark.parametrize(("last", "late"), [([1.0], 0), ({"loss": 1.0}, 5)], ids=["list", "late dict"])
def test_numbers_in_a_container_that_items_read_are_named_also_late(last, late):
    last = copy.copy(last)
    data = [(x, y) for x, y, _ in training_data()]

    def collate(rows):
        factor = sum(last.values() if isinstance(last, dict) else last)
        return factor * torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    def loop(training):
        for x, y in training:
            losses = errors(training.model, x, y)
            if training.step(losses) and training.step_count > late:
                last["loss" if isinstance(last, dict) else 0] = float(losses.detach().mean())

    with pytest.warns(UserWarning, match="losses depend on 'last'"):
        loop(training_of(network(), data, num_steps=9, examples={"collate_fn": collate}))


def test_an_epoch_that_items_read_and_a_growing_cache_are_fine():
    data, cache = Weighted(), {}

    def collate(rows):
        for row in rows:
            cache.setdefault(float(row[0][0]), float(row[0].sum()))
        sums = torch.tensor([cache[float(row[0][0])] for row in rows])
        return [torch.stack([x for x, _, _ in rows]), torch.stack([y for _, y, _ in rows]), sums * rows[0][2]]

    training = training_of(network(), data, num_steps=20, examples={"collate_fn": collate})
    for x, y, factor in training:
        training.step(errors(training.model, x, y) * factor.abs())
        data.factor = 1.0 + training.step_count // 3
    assert not any("variable" in text for text in training.statement()["not_covered"])


@pytest.mark.parametrize("length", [2, 25])
@pytest.mark.parametrize("value", [lambda epoch: epoch, lambda epoch: 0.5**epoch], ids=["affine", "geometric"])
def test_a_number_of_the_epoch_is_never_taken_for_one_that_does_not_follow(length, value):
    steps = np.arange(7, 5 * length + 8)
    values = np.array([value(step // length) for step in steps], float)
    found = [follows_steps(steps[:count], values[:count]) for count in range(1, len(steps))]
    assert found[-1] is True
    assert False not in found
    values[-length:] = 0.7
    assert follows_steps(steps, values) is not True


class RarelyFlipped(Weighted):
    """Draws random numbers of its own, so that one item differs in one of many fetches."""

    def __init__(self, number):
        super().__init__()
        self.draws = iter([*[False] * number, True, *[False] * 10_000])

    def __getitem__(self, index):
        x, y, factor = super().__getitem__(index)
        return -x if next(self.draws) else x, y, factor


@pytest.mark.every_case
@pytest.mark.parametrize("number", [40, 160, 340, 360])
def test_an_item_that_differs_once_is_no_content_of_the_loop(number):
    training = training_of(network(), RarelyFlipped(number), num_steps=4)
    for x, y, factor in training:
        training.step(errors(training.model, x, y) * factor)


def test_own_rows_and_rows_outside_of_the_training_set_may_be_read():
    x, y, _ = training_data().tensors
    training = training_of(network(), Subset(TensorDataset(torch.arange(N)), range(40)), num_steps=3)
    for (numbers,) in training:
        training.step(errors(training.model, x[numbers] - x[40:].mean(0), y[numbers]))
    assert training.step_count == 3


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("loop", NAMED)
def test_values_that_carry_data_and_change_after_the_step_are_named_once(loop):
    training = training_of(network(), num_steps=9)
    with pytest.warns(UserWarning, match=f"losses depend on '{re.escape(NAMED[loop])}'") as seen:
        loop(training, training.model)
    assert len(seen) == 1
    assert training.step_count == 9
    assert [line for line in training.statement()["not_covered"] if f"variable '{NAMED[loop]}'" in line]


def test_a_value_is_refused_when_it_is_seen_to_change_before_a_step():
    training = training_of(network())
    with pytest.warns(UserWarning, match="depend on 'scale_of'"), pytest.raises(tp.Refused, match="'scale_of'"):
        a_cached_helper(training, training.model)


# Loops that keep something, none of which enters a loss, or which follows from step count and weights alone.


def running_logs(training, model):
    running, history, best, started = 0.0, [], float("inf"), time.time()
    for number, (x, y, _) in enumerate(training):
        losses = errors(model, x, y)
        running = 0.9 * running + 0.1 * float(losses.detach().mean())
        history.append((number, running, time.time() - started))
        if training.step(losses) and running < best:
            best, best_weights = running, copy.deepcopy(model.state_dict())
    assert best_weights
    assert [number for number, *_ in history] == sorted({number for number, *_ in history})


def early_stopping(training, model):
    bad, best, stopped = 0, float("inf"), False
    for x, y, _ in training:
        if training.step(errors(model, x, y)):
            with torch.no_grad():
                score = float(errors(model, torch.ones(4, D), torch.zeros(4, dtype=torch.long)).mean())
            bad = bad + 1 if score > best else 0
            best = min(best, score)
            if bad > 50:
                stopped = True
                break
    assert not stopped


def warm_up_by_a_counter_of_its_own(training, model):
    count = 0
    for x, y, _ in training:
        if training.step(errors(model, x, y)):
            count += 1
            for group in training.optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (count + 1) / 10)
    assert count == STEPS


def weight_by_a_counter_of_its_own(training, model):
    count = 0
    for x, y, _ in training:
        if training.step(errors(model, x, y) * min(1.0, (count + 1) / 10)):
            count += 1


def a_factor_that_decays(training, model):
    factor = 1.0
    for x, y, _ in training:
        if training.step(errors(model, x, y) * factor):
            factor = max(0.3, factor * 0.9)


def two_phases(training, model):
    phase = 0
    for x, y, _ in training:
        if training.step(errors(model, x, y) * (1 + phase)):
            phase = 1 - phase


def schedule_from_the_step_count(training, model):
    for x, y, _ in training:
        beta = float(np.cos(training.step_count))
        training.step(errors(model, x, y) * (2 + beta))


def a_teacher(training, model):
    teacher = copy.deepcopy(model).requires_grad_(False)
    for x, y, _ in training:
        losses = errors(model, x, y) + (model(x) - teacher(x)).square().sum(1)
        if training.step(losses):
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                    p.data.mul_(0.9).add_(q.data, alpha=0.1)


def an_averaged_model(training, model):
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y, _ in training:
        losses = errors(model, x, y) + (model(x) - average(x).detach()).square().sum(1)
        if training.step(losses):
            average.update_parameters(model)


def our_moving_average(training, model):
    average = tp.MovingAverage(model, training.optimizer, decay=0.9)
    for x, y, _ in training:
        training.step(errors(model, x, y) + (model(x) - average.model(x)).square().sum(1))


def a_target_network(training, model):
    target = copy.deepcopy(model).requires_grad_(False)
    for x, y, _ in training:
        losses = errors(model, x, y) + (model(x) - target(x)).square().sum(1)
        if training.step(losses) and training.step_count % 4 == 0:
            target.load_state_dict(model.state_dict())


class Writer:
    def __init__(self):
        self.lines, self.buffer, self.step = [], "", 0

    def add_scalar(self, name, value, step):
        self.lines.append((name, float(value), step))
        self.buffer += f"{name} {value:.3f}\n"
        self.step = step


def a_writer(training, model):
    writer, correct, total = Writer(), 0, 0
    for x, y, _ in training:
        out = model(x)
        losses = F.cross_entropy(out, y, reduction="none")
        released = training.step(losses)
        if not training.rehearsing:
            correct, total = correct + int((out.argmax(1) == y).sum()), total + len(y)
            writer.add_scalar("loss", losses.detach().mean(), training.step_count)
        if released and training.step_count % 5 == 0:
            writer.add_scalar("accuracy", correct / total, training.step_count)
            correct = total = 0
    assert [step for name, _, step in writer.lines if name == "loss"] == [*range(1, STEPS + 1)]
    assert writer.buffer.count("\n") == len(writer.lines)


def a_scheduler(training, model):
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)
    for x, y, _ in training:
        if training.step(errors(model, x, y)):
            scheduler.step()
    assert scheduler.last_epoch == STEPS


def losses_in_lists_and_arrays(training, model):
    values, sizes, norms = np.zeros(1000), {}, torch.zeros(1000)
    turns = 0
    for x, y, _ in training:
        losses = errors(model, x, y)
        values[turns], sizes[turns], norms[turns] = float(losses.detach().mean()), len(x), x.norm()
        turns += 1
        training.step(losses)
    assert len(sizes) == turns
    assert (values[:turns] > 0).all()
    assert (norms[:turns] > 0).all()


def a_cached_table(training, model):
    @functools.cache
    def weight_of(epoch):
        return 1 / (1 + epoch)

    for x, y, _ in training:
        training.step(errors(model, x, y) * weight_of(training.step_count // 3))


class Markers:
    """Like ``pytest.mark``: an unknown name ends the run."""

    def __getattr__(self, name):
        raise KeyboardInterrupt(name)


def an_object_that_knows_few_names(training, model):
    markers = Markers()
    for x, y, _ in training:
        training.step(errors(model, x, y) * (1 if markers is not None else 0))


def steps_with_inner_loop(training, model):
    epochs = []
    for batches in training.steps():
        total = torch.zeros(())
        for x, y, _ in batches:
            losses = errors(model, x, y)
            total += losses.detach().sum()
            training.step(losses)
        epochs.append(float(total))
    assert len(epochs) == STEPS


def a_generator_of_batches(training, model):
    def batches():
        count = 0
        for batch in training:
            count += 1
            yield count, batch

    means = {}
    for count, (x, y, _) in batches():
        means[count] = float(x.mean())
        training.step(errors(model, x, y))
    assert len(means) > STEPS


class Entry:
    def __init__(self, value, before):
        self.value, self.before = value, before


def linked(length):
    entry = None
    for number in range(length):
        entry = Entry(number, entry)
    return entry


def containers_within_themselves(training, model):
    ring, shared, chain, deep = [0], [0], linked(400), []
    ring.append(ring)
    for _ in range(40):
        shared, deep = [shared, shared], [deep]
    model.ring, model.chain, tree = {"at": ring}, chain, {"steps": 0}
    tree["root"] = model.ring["own"] = tree
    for x, y, _ in training:
        ring[0], shared[0], deep[0], tree["steps"] = training.step_count, [x, shared[0]], [x], training.step_count
        training.step(errors(model, x, y))
    assert ring[1] is ring
    assert tree["root"] is tree


HONEST = [
    containers_within_themselves,
    running_logs,
    early_stopping,
    warm_up_by_a_counter_of_its_own,
    weight_by_a_counter_of_its_own,
    a_factor_that_decays,
    two_phases,
    schedule_from_the_step_count,
    a_teacher,
    an_averaged_model,
    our_moving_average,
    a_target_network,
    a_writer,
    a_scheduler,
    losses_in_lists_and_arrays,
    a_cached_table,
    an_object_that_knows_few_names,
    steps_with_inner_loop,
    a_generator_of_batches,
]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("loop", HONEST)
def test_loops_that_keep_logs_clocks_and_teachers_train_without_a_warning(loop):
    model = network()
    training = training_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(training, model)
    assert training.step_count == STEPS
    assert not [line for line in training.statement()["not_covered"] if "loop" in line]


# Other optimizers, and forwards outside of a batch.


def test_another_network_that_learns_in_the_loop_is_named():
    model, maker = network(), nn.Linear(2, D)
    other = torch.optim.SGD(maker.parameters(), lr=0.1)
    training = training_of(model)

    def train():
        for x, y, _ in training:
            fake = maker(torch.randn(len(x), 2))
            if training.step(errors(model, x, y) + errors(model, fake.detach(), y)):
                other.zero_grad()
                errors(model, fake, y).sum().backward()
                other.step()

    with pytest.warns(UserWarning, match="SGD made a step for 'maker' while the training iterates") as seen:
        train()
    assert len(seen) == 1
    assert [line for line in training.statement()["not_covered"] if "SGD" in line and "maker" in line]


def test_networks_that_are_made_anew_in_each_step_are_named_once_and_not_held():
    model, made = network(), []
    training = training_of(model)

    def train():
        for x, y, _ in training:
            if training.step(errors(model, x, y)):
                probe = nn.Linear(2, 1)
                other = torch.optim.SGD(probe.parameters(), lr=0.1)
                probe(torch.ones(1, 2)).sum().backward()
                other.step()
                made.append(weakref.ref(probe.weight))

    with pytest.warns(UserWarning, match="SGD made a step for 'probe'") as seen:
        train()
    assert len(seen) == 1
    assert len([line for line in training.statement()["not_covered"] if "SGD" in line]) == 1
    gc.collect()
    assert len([one for one in made if one() is not None]) <= 1  # contents of the last rehearsed batch


def test_steps_outside_of_the_loop_and_perturbations_of_one_turn_are_not_named():
    model, maker = network(), nn.Linear(2, D)
    training = training_of(model)

    def perturbed(x, y):
        change = torch.zeros_like(x, requires_grad=True)
        attack = torch.optim.SGD([change], lr=0.1)
        with training_model_frozen(model):
            errors(model, x + change, y).sum().backward()
        attack.step()
        return x + change.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y, _ in training:
            training.step(errors(model, perturbed(x, y), y))
        other = torch.optim.SGD(maker.parameters(), lr=0.1)
        maker(torch.ones(3, 2)).sum().backward()
        other.step()
    assert not [line for line in training.statement()["not_covered"] if "SGD" in line]


@contextlib.contextmanager
def training_model_frozen(model):
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)


@pytest.mark.parametrize("private", [True, False])
def test_forwards_on_private_rows_outside_of_a_batch_are_named(private):
    model = network()
    training = training_of(model, num_steps=3)
    rows = training._setup.batches.dataset.tensors[0] if private else torch.randn(N, D)
    for x, y, _ in training:
        if training.step(errors(model, x, y)):
            with torch.no_grad():
                model(rows)
    named = [line for line in training.statement()["not_covered"] if "outside of a batch" in line]
    assert len(named) == private


@pytest.mark.parametrize("private", [True, False])
def test_masks_of_equal_length_do_not_make_other_texts_private_rows(private):
    """A forward on test texts was named as one on private rows, because their masks of padding were equal."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(1000, 4), nn.Linear(4, 1)

        def forward(self, tokens, mask):
            return self.out((self.words(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def texts(n):
        mask = (torch.arange(12) < torch.randint(4, 12, (n, 1))).long()
        return torch.randint(1, 1000, (n, 12)) * mask, mask

    model, data = Mean(), TensorDataset(*texts(N))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = tp.PrivateTraining(
        model, optimizer, data, expected_batch_size=8, num_steps=2, clipping=tp.Flat(1.0), noise_multiplier=1.0
    )
    for tokens, mask in training:
        training.step(model(tokens, mask).square().sum(1))
    model(*(data.tensors if private else texts(200)))
    named = [line for line in training.statement()["not_covered"] if "outside of a batch" in line]
    assert len(named) == private


@pytest.mark.parametrize("leave", [lambda: None, lambda: 1 / 0], ids=["break", "exception"])
def test_variables_are_put_back_when_the_loop_is_left_in_an_exchanged_turn(leave):
    training = training_of(network())
    total, values, turns = 0.0, [0.0], 0
    with contextlib.suppress(ZeroDivisionError):
        for x, y, _ in training:
            turns += 1
            if training.step_count and total != 1.5 * training.step_count:  # it has an earlier content
                leave()
                break
            if training.step(errors(training.model, x, y)):
                total += 1.5
                values.append(total)
    assert training.step_count == 1
    assert total == 1.5
    assert values == [0.0, 1.5]


def test_a_counter_that_begins_anew_in_each_loop_ends_it_where_it_should():
    def run(training, end):
        count = 0
        for x, y, _ in training:
            count += training.step(errors(training.model, x, y))
            if count == end:
                break

    training = training_of(network())
    run(training, 3)
    run(training, 2)  # which it was in the last rehearsal of the first loop
    assert training.step_count == 5


def test_a_count_begins_anew_at_one_number_alone():
    first = [(1, 0, 0), (1, 1, 1), (1, 2, 2)]
    assert is_count([*first, (2, 3, 3)])
    assert is_count([*first, (2, 3, 0), (2, 4, 1), (3, 9, 0)])
    assert not is_count([*first, (2, 3, 5), (2, 4, 6)])  # data may have chosen it
    assert not is_count([(1, 0, 0), (2, 5, 0), (2, 6, 3)])  # three right answers, perhaps
    assert not is_count([*first, (2, 3, 0), (2, 4, 2)])


def test_a_teacher_in_the_model_that_every_turn_moves_is_not_blamed_on_the_loop():
    model = network()
    model.add_module("teacher", network().requires_grad_(False))
    body = model[:3]
    training = training_of(model, optimizer=torch.optim.SGD(body.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y, _ in training:
            out = body(x)
            training.step(F.cross_entropy(out, y, reduction="none") + (out - model.teacher(x)).square().sum(1))
            with torch.no_grad():
                for slow, fast in zip(model.teacher.parameters(), body.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    assert training.step_count == STEPS
    assert not any("variable" in text for text in training.statement()["not_covered"])


def test_a_variable_that_enters_losses_late_is_named_by_the_next_rehearsal():
    training, turns, named = training_of(network(), num_steps=9), [], []

    def loop():
        scale = 0.9
        for x, y, _ in training:
            losses = errors(training.model, x, y)
            if training.step(losses * (scale if training.step_count >= 8 else 0.9)):
                scale = float(losses.detach().mean())
                named.append(any("'scale'" in text for text in training.statement()["not_covered"]))
                turns.append(training._runs.turns_made)

    with pytest.warns(UserWarning, match="losses depend on 'scale'"):
        loop()
    assert named == [False] * 8 + [True]
    assert turns[3:8] == [1, 3, 1, 1, 1]  # with other examples, without most of them, the batch
