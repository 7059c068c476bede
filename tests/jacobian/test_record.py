# SPDX-License-Identifier: Apache-2.0
"""``tp.record`` in the user's own loop remembers layouts of a model, and leaves the model unchanged."""

import copy
import gc
import pickle
import threading
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
import torch
from oracle import flat, rows_of_one_graph
from parts import Calls
from torch import nn

import torch_privacy as tp
from torch_privacy.jacobian import public_record as recording
from torch_privacy.jacobian.layouts.known import PROOFS, Layouts
from torch_privacy.support.notes import NOTES


@pytest.fixture(autouse=True)
def no_spot_checks(monkeypatch):
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: False)


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def losses_of(model, x):
    return model(x).sin().flatten(1).sum(1)


def assert_exact(model, x, **settings) -> int:
    """Compares rows with one backward for each example; returns the number of backwards needed."""
    count = []
    with tp.record(model, **settings) as tape:
        losses = losses_of(model, x)
    losses.grad_fn.register_prehook(lambda grads: count.append(1))
    rows = flat(tape.jacobian(losses, retain_graph=True).rows(), 1)
    taken = len(count)
    torch.testing.assert_close(rows, rows_of_one_graph(losses, model))
    return taken


def test_from_the_third_batch_on_one_backward_is_enough():
    model = network()
    assert [assert_exact(model, torch.randn(n, 3)) for n in (6, 5, 8, 7, 6)] == [2, 2, 1, 1, 1]


def test_nothing_is_kept_on_the_model():
    model = network()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    for _ in range(PROOFS + 1):
        assert_exact(model, torch.randn(6, 3))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks


@pytest.mark.thorough
def test_memory_of_a_model_is_freed_with_it():
    gc.collect()
    before = len(NOTES._notes)
    model = network()
    assert_exact(model, torch.randn(6, 3))
    assert len(NOTES._notes) == before + 1
    del model
    gc.collect()
    assert len(NOTES._notes) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_ordinary_ones(copied):
    model = network()
    for _ in range(PROOFS):
        assert_exact(model, torch.randn(6, 3))
    with tp.record(model) as tape:
        twin = copied(model)
        twin(torch.randn(2, 3))
        losses = losses_of(model, torch.randn(6, 3))
    assert tape.jacobian(losses).num_examples == 6
    assert len(tape._tape.log.calls) == 2, "what the copy computes was recorded, too"
    assert_exact(twin, torch.randn(6, 3))


def test_another_set_of_trained_parameters_is_another_path():
    model = network()
    for _ in range(PROOFS + 1):
        assert_exact(model, torch.randn(6, 3))
    model[0].weight.requires_grad_(False)
    with tp.record(model) as tape:
        losses = losses_of(model, torch.randn(6, 3))
    jacobian = tape.jacobian(losses)
    assert list(jacobian.shapes) == ["0.bias", "2.weight", "2.bias"]
    torch.testing.assert_close(jacobian.weighted_sum(torch.ones(6))["0.bias"], jacobian.rows()["0.bias"].sum(0))


def test_equal_models_have_separate_memories():
    class Equal(nn.Sequential):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    one, two = Equal(nn.Linear(3, 2)), Equal(nn.Linear(3, 2))
    for _ in range(PROOFS):
        assert_exact(one, torch.randn(6, 3))
    assert NOTES.of(one, recording._ModelMemory) is not NOTES.of(two, recording._ModelMemory)


class Biased(nn.Module):
    """Adds entries of a table, chosen by integers that are kept somewhere."""

    def __init__(self, index_of):
        super().__init__()
        self.layer, self.table = nn.Linear(3, 4), nn.Parameter(torch.randn(7, 1))
        self.index = torch.randint(0, 7, (5, 4))  # neither a buffer nor a parameter
        self.index_of = index_of

    def forward(self, x):  # (n, 5, 3)
        return self.layer(x) + self.table[self.index_of(self).view(-1)].view(5, 4)


@lru_cache
def made_once(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.arange(4 * rows).reshape(rows, 4) % 7)


def test_tensors_that_are_plain_attributes_are_constants():
    model = Biased(lambda self: self.index)
    for n in (6, 7, 5):
        assert_exact(model, torch.randn(n, 5, 3))


def test_integers_in_containers_of_the_model_are_constants():
    """Also if they have as many rows as there are examples."""
    model = Biased(lambda self: self.kept["numbers"][0])
    model.kept = {"numbers": [model.index]}
    assert_exact(model, torch.randn(5, 5, 3))


def test_attributes_that_are_written_into_are_exact():
    model = Biased(lambda self: self.index)
    assert_exact(model, torch.randn(6, 5, 3))
    model.index.copy_(model.index.flip(0))
    assert_exact(model, torch.randn(6, 5, 3))


@pytest.mark.parametrize("num_examples", [None, 6])
def test_numbers_that_the_code_keeps_are_constants(num_examples):
    """The batch size is that of the first input, unless it is given."""
    assert_exact(Biased(lambda self: made_once(5)), torch.randn(6, 5, 3), num_examples=num_examples)


def test_the_dimension_of_examples_in_the_first_input_is_learned():
    """Five positions of six, then seven examples: one batch is refused, and shows that positions come first."""
    model = Calls(lambda m, x: m.biased(x.transpose(0, 1)), biased=Biased(lambda self: made_once(5)))
    for n, works in ((6, False), (6, True), (7, True)):
        with tp.record(model) as tape:
            y = model(torch.randn(5, n, 3))
        with nullcontext() if works else pytest.raises(tp.Refused):
            assert tape.jacobian(y.flatten(1).sum(1)).num_examples == n


def test_tokens_are_not_constants_for_any_batch_size():
    """Eleven tokens of four texts in one row: no dimension can hold the examples."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.EmbeddingBag(7, 3, mode="sum")

        def forward(self, batch):
            return self.bags(*batch)

    model = Bags()
    for _ in range(3):
        batch = torch.randint(0, 7, (11,)), torch.tensor([0, 2, 5, 9])
        assert_exact(model, batch)
        assert_exact(model, batch, num_examples=4)


@pytest.mark.parametrize("num_examples", [-1, 2.0, True])
def test_an_invalid_batch_size_is_refused(num_examples):
    with pytest.raises(ValueError, match=r"record: num_examples=.* must be an integer of at least 0"):
        tp.record(network(), num_examples)


def test_threads_may_record_one_model_at_once():
    model, wrong = network(), []

    def work():
        try:
            for n in (5, 6, 7, 8):
                assert_exact(model, torch.randn(n, 3))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
