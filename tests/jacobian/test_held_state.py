# SPDX-License-Identifier: Apache-2.0
"""Tests that a forward keeps no data wherever its code can: in containers, classes, functions, closures and globals."""

import functools
import subprocess
import sys
import types
from collections import deque
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp


@dataclass
class Stat:
    mean: object = 0.0


class Slotted:
    __slots__ = ("mean",)

    def __init__(self):
        self.mean = 0.0


def added(old, h):
    return old + h.detach().mean(0)


class Net(nn.Module):
    """Keeps something of its hidden values, which later batches might read."""

    def __init__(self, **held):
        super().__init__()
        self.f, self.g = nn.Linear(3, 4), nn.Linear(4, 2)
        vars(self).update(held)

    def keep(self, h):
        pass

    def forward(self, x):
        h = self.f(x).tanh()
        self.keep(h)
        return self.g(h)


def keeping(keep, **held):
    """Returns a model of its own class that keeps values by this function of itself and of h."""
    return lambda: type("Keeping", (Net,), {"keep": keep})(**{name: make() for name, make in held.items()})


class OfClass(Net):
    mean, memory = 0.0, {}

    def keep(self, h):
        OfClass.mean = added(OfClass.mean, h)


class InClass(OfClass):
    def keep(self, h):
        self.memory["h"] = added(self.memory.get("h", 0.0), h)


def by_default(self, h, memory=[]):  # noqa: B006
    memory[:] = [added(memory[0] if memory else 0.0, h)]


def by_keyword(self, h, *, state={"mean": 0.0}):  # noqa: B006
    state["mean"] = added(state["mean"], h)


def by_attribute(self, h):
    by_attribute.mean = added(by_attribute.mean, h)


by_attribute.mean = 0.0


def closed():
    mean = 0.0

    def keep(self, h):
        nonlocal mean
        mean = added(mean, h)

    return keep


TOTAL, LIST, STAT = 0.0, [], Stat()


def to_global(self, h):
    global TOTAL
    TOTAL = added(TOTAL, h)


def to_list(self, h):
    LIST[:] = [added(LIST[0] if LIST else 0.0, h)]


def to_object(self, h):
    STAT.mean = added(STAT.mean, h)


class Helper:
    last = (0.0,)

    def __call__(self, h):
        Helper.last = (added(Helper.last[0], h),)


def hooked():
    model, mean = Net(), [0.0]
    model.f.register_forward_hook(lambda module, args, output: mean.__setitem__(0, added(mean[0], output)))
    return model


def to_stat(stat, h):
    stat.mean = added(stat.mean, h)


def norm_in_a_list(self, h):
    self.norms[0].running_mean = added(self.norms[0].running_mean, h)


KEPT = {
    "an object in a list": keeping(lambda self, h: to_stat(self.s[1], h), s=lambda: [Stat(), Stat()]),
    "an object in a dict": keeping(lambda self, h: to_stat(self.s["a"], h), s=lambda: {"a": Stat()}),
    "an object in a deque": keeping(lambda self, h: to_stat(self.s[0][0], h), s=lambda: (deque([Slotted()]),)),
    "a module in a list": keeping(norm_in_a_list, norms=lambda: [nn.BatchNorm1d(4, affine=False).eval()]),
    "a class attribute": OfClass,
    "a dict of a class": InClass,
    "a class of a helper": keeping(lambda self, h: self.helper(h), helper=Helper),
    "a default argument": keeping(by_default),
    "a default of a keyword": keeping(by_keyword),
    "an argument of a partial": keeping(
        lambda self, h: self.keeper(self, h), keeper=lambda: functools.partial(by_keyword, state={"mean": 0.0})
    ),
    "an attribute of a function": keeping(by_attribute),
    "a closure": keeping(closed()),
    "a global": keeping(to_global),
    "a global list": keeping(to_list),
    "a global object": keeping(to_object),
    "the closure of a hook": hooked,
}


def train(make, num_steps=4):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    model = make()
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        data,
        expected_batch_size=8,
        num_steps=num_steps,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        test_seed=1,
    )
    for x, y in training:
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    return training


@pytest.mark.parametrize("name", KEPT)
def test_values_that_are_kept_for_later_are_refused_by_name(name):
    with pytest.raises(tp.Refused, match=r"the forward changed ['\"].* depends on the examples of the batch"):
        train(KEPT[name])


CACHE = {}


def positions(n):
    if n not in CACHE:
        CACHE[n] = torch.arange(n) / n
    return CACHE[n]


class Counted(Net):
    calls = 0

    def keep(self, h):
        Counted.calls += 1


def overwriting_hook():
    model, found = Net(), {}
    model.f.register_forward_hook(lambda module, args, output: found.__setitem__("f", output))
    return model


HONEST = {
    "a counter of the class": Counted,
    "a counter in a list": keeping(lambda self, h: setattr(self.s[0], "mean", self.s[0].mean + 1), s=lambda: [Stat()]),
    "cached positions": keeping(lambda self, h: positions(h.shape[1])),
    "itself in a list": lambda: (lambda model: vars(model).update(me=[model], parts={"f": model.f}) or model)(Net()),
    "a hook that keeps the last output": overwriting_hook,
    "settings of the class": keeping(lambda self, h: self.sizes, sizes=lambda: {"a": [1, (2, Stat())]}),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", HONEST)
def test_counters_caches_and_settings_train(name):
    assert train(HONEST[name]).step_count == 4


def test_counters_of_a_class_are_those_of_the_batches_alone():
    Counted.calls = 0
    train(Counted)
    assert Counted.calls == 4


IMPORTED = """
scale = 2.0

class Options:
    power = 1
    def of(self, h):
        return scale * h ** self.power

SHARED = Options()
SHARED.names = ["a"]
"""


@pytest.mark.parametrize("made", ["Options()", "SHARED"])
def test_what_another_module_holds_stays_there_when_the_first_forward_takes_it(made):
    utils = types.ModuleType("utils")
    exec(IMPORTED, vars(utils))

    def keep(model, h):
        model.options = model.options or eval(made, vars(utils))  # the first time that the model has anything of utils
        assert model.options.of(h).shape == h.shape

    assert train(keeping(keep, options=lambda: None), num_steps=1).step_count == 1
    assert utils.SHARED.names == ["a"]


SCRIPT = """
import torch, torch_privacy as tp
from torch import nn

class Net(nn.Module):  # its functions name `first` and `b`, which are globals of the script, too: the loop's own
    def __init__(self):
        super().__init__()
        self.b, self.first = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.first(self.b(x).tanh())

model = nn.Sequential(Net(), nn.Linear(2, 2))
data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
training = tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), data, expected_batch_size=8,
                              num_steps=3, clipping=tp.Flat(1.0), noise_multiplier=1.0, test_seed=1)
for b in training:
    first = len(b[0])
    training.step(nn.functional.cross_entropy(model(b[0]), b[1], reduction="none"))
    assert len(b[0]) == first
print(len(training.ledger), flush=True)
training = tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), data, expected_batch_size=8,
                              num_steps=3, clipping=tp.Flat(1.0), noise_multiplier=1.0, test_seed=2)
batches = iter(training)
for b in batches:
    raise RuntimeError("the last line")
"""


@pytest.mark.thorough
def test_a_script_keeps_its_own_variables_and_ends_with_its_own_error(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-W", "ignore", tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: the last line"
    assert done.stderr.count("Traceback") == 1
