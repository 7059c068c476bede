# SPDX-License-Identifier: Apache-2.0
"""Interrupts in the middle of a step leave torch and the training usable."""

import pytest
import torch
from trainings import cross_entropy, parameters_of, train, training_of


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_an_interrupt_in_the_exit_of_no_grad_leaves_gradients_on(number, monkeypatch):
    expected, training = training_of(), training_of()
    train(expected)
    leave, left = torch.no_grad.__exit__, [number]

    def interrupted(self, *error):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        leave(self, *error)

    with monkeypatch.context() as patch:
        for x, y in training:
            losses = cross_entropy(training.model, x, y)
            patch.setattr(torch.no_grad, "__exit__", interrupted)
            try:
                training.step(losses)
            except KeyboardInterrupt:
                break
            finally:
                patch.undo()
    assert left[0] <= 0
    assert torch.is_grad_enabled()
    train(training)  # the user goes on
    assert training.step_count == expected.step_count
    assert parameters_of(training).isfinite().all()
