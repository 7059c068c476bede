# SPDX-License-Identifier: Apache-2.0
"""``PrivateTraining.steps`` hands out one iterator for each step, empty batches included."""

import contextlib

import pytest
import torch
from trainings import cross_entropy, network, train, training_of

import torch_privacy as tp
from torch_privacy.training import release
from torch_privacy.training.release import Releases

RARE = {"expected_batch_size": 0.8, "num_steps": 12, "performance": tp.Performance(microbatch_size=1)}


def test_each_iterator_is_one_step_also_for_an_empty_batch():
    model, other = network(), network()
    training, expected = training_of(model, **RARE), training_of(other, **RARE)
    sizes = []
    for k, batches in enumerate(training.steps()):
        assert training.step_count == k
        sizes.append(0)
        for x, y in batches:
            training.step(cross_entropy(model, x, y))
            sizes[-1] += 0 if training.rehearsing else len(x)
        assert training.step_count == k + 1
    assert sizes == [len(training._state.releases.draws.indices(k)) for k in range(12)]
    assert 0 in sizes
    assert max(sizes) > 1
    for x, y in expected:
        expected.step(cross_entropy(other, x, y))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_going_on_before_the_step_is_made_is_refused():
    training = training_of()
    with pytest.raises(tp.Refused, match="step 0 was not made"):
        for _ in training.steps():
            pass
    assert training.step_count == 0


@pytest.mark.filterwarnings("ignore:.*no ledger on disk")
def test_steps_end_where_new_keys_leave_none(monkeypatch):
    settings = {"noise_multiplier": None, "target_epsilon": 3.0, "delta": 1e-3}
    first, again = training_of(**settings), training_of(**settings)
    train(first, steps=3)
    state = first.state_dict()
    train(first)
    monkeypatch.setattr(release, "_RELEASED", {})
    again.load_state_dict(state | {"ledger": first.ledger.state_dict()})  # with other weights

    def go_on():
        for batches in again.steps():
            for x, y in batches:
                again.step(cross_entropy(again.model, x, y))

    with pytest.warns(UserWarning, match="3 of 6 steps are made"):
        go_on()
    assert (again.step_count, again.num_lost, len(again.ledger)) == (3, 3, 6)


def test_loop_can_be_left_and_begun_anew():
    model, other = network(), network()
    training, expected = training_of(model), training_of(other)
    for _ in range(2):
        steps = training.steps()
        for batches in steps:
            for x, y in batches:
                training.step(cross_entropy(model, x, y))
            if training.step_count == 2:
                break
        steps.close()
    for x, y in expected:
        expected.step(cross_entropy(other, x, y))
    assert training.step_count == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_released_weights_may_be_loaded_and_others_are_noticed():
    training = training_of()
    for x, y in training:
        training.step(cross_entropy(training.model, x, y))
        if training.step_count == 2:
            saved = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    with training.loading_released_weights():
        training.model.load_state_dict(saved)
    assert training._progress().moved_otherwise == ""
    with torch.no_grad():
        next(training.model.parameters()).add_(1)
    assert training._progress().moved_otherwise


def train_on(training):
    """Goes on whatever the disk does."""
    for x, y in training:
        with contextlib.suppress(OSError):
            training.step(cross_entropy(training.model, x, y))


def test_a_loop_that_goes_on_after_an_error_of_the_release_must_iterate_anew(monkeypatch):
    """Otherwise the next step's examples would be taken for those of the step that failed."""
    training, release, batches = training_of(), Releases.release, []

    def fails_once(self, step, *arguments):
        if step == 3 and not batches:
            batches.append("failed")
            raise OSError("the disk is full")
        return release(self, step, *arguments)

    monkeypatch.setattr(Releases, "release", fails_once)
    with pytest.raises(tp.Refused, match=r"after an error in it.*iterate over the training anew"):
        train_on(training)
    assert training.step_count == 3
    sizes = [len(batch) for batch in train(training)]
    assert sizes == [len(training._state.releases.draws.indices(step)) for step in (3, 4, 5)]
