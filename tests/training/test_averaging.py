# SPDX-License-Identifier: Apache-2.0
"""Tests the moving average of weights: its recursion, empty batches, resuming."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp


def training_of(model, num_steps, expected_batch_size=3.0):
    data = TensorDataset(torch.randn(200, 3), torch.randint(2, (200,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "test_seed": 2}
    training = tp.PrivateTraining(
        model, optimizer, data, expected_batch_size=expected_batch_size, num_steps=num_steps, **settings
    )
    return training, optimizer


def test_average_follows_its_recursion():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = tp.MovingAverage(model, optimizer, decay=0.5)
    expected = model.weight.detach().clone()
    for step in range(12):
        model.weight.grad = torch.randn(2, 3)
        optimizer.step()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.model.weight.detach(), expected)
    assert not any(p.requires_grad for p in average.model.parameters())


def test_average_is_updated_in_every_step_including_empty_batches():
    model = nn.Linear(3, 2)
    training, optimizer = training_of(model, num_steps=20, expected_batch_size=0.5)
    average = tp.MovingAverage(model, optimizer)
    seen = 0
    for x, y in training:
        training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
        seen += 1
    assert seen < training.step_count == average.step_count == 20


def test_average_resumes_from_its_state():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    training, optimizer = training_of(model, num_steps=4)
    average = tp.MovingAverage(model, optimizer)
    for x, y in training:
        training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
    again = tp.MovingAverage(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), optimizer)
    again.load_state_dict(average.state_dict())
    assert again.step_count == average.step_count
    for resumed, original in zip(again.model.parameters(), average.model.parameters(), strict=True):
        assert torch.equal(resumed, original)


@pytest.mark.parametrize("decay", [0.0, 1.0, float("nan")])
def test_decay_out_of_range_is_refused(decay):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="decay"):
        tp.MovingAverage(model, torch.optim.SGD(model.parameters(), lr=1.0), decay=decay)
