# SPDX-License-Identifier: Apache-2.0
"""Tests the moving average of weights: its recursion, empty batches, resuming."""

import pytest
import torch
from ranked import CASES, difference, go, start, whole_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
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


def test_average_is_applied_and_taken_back_bit_for_bit():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = tp.MovingAverage(model, optimizer)
    assert isinstance(average.model, nn.Linear)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    optimizer.step()
    own = model.weight.detach().clone()
    with average.applied():
        assert torch.equal(model.weight, average.model.weight)
        assert not torch.equal(model.weight, own)
        with pytest.raises(tp.Refused, match=r"optimizer\.step\(\) was called while the averaged weights"):
            optimizer.step()
    assert torch.equal(model.weight, own)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_average_does_not_count_the_steps_with_which_torch_looks_at_an_optimizer(make):
    """Otherwise each checkpoint moves the average; with SGD even those inside of a training's loop."""
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(200, 3), torch.randint(2, (200,)))
    optimizer = make(model.parameters(), lr=0.5)
    settings = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "test_seed": 2}
    training = tp.PrivateTraining(model, optimizer, data, expected_batch_size=3, num_steps=4, **settings)
    average = tp.MovingAverage(model, optimizer)
    get_state_dict(model, optimizer)
    assert average.step_count == 0
    for x, y in training:
        if training.step(nn.functional.cross_entropy(model(x), y, reduction="none")):
            get_state_dict(model, optimizer)
    assert average.step_count == training.step_count == 4
    assert training.state_dict()["moved_otherwise"] == ""


def test_a_step_with_zero_learning_rate_and_a_gradient_is_refused_in_the_loop():
    """It would put a gradient that is not private into the momentum."""
    model = nn.Linear(3, 2)
    training, optimizer = training_of(model, num_steps=4)
    for x, y in training:
        optimizer.param_groups[0]["lr"] = 0.0
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(tp.Refused, match=r"optimizer\.step\(\) was called inside of the loop"):
            optimizer.step()
        break


def averaged_on_ranks(rank, how):
    """Returns what the average of a training on ranks does at each of its uses."""
    training = start(CASES["uneven"], how)
    model = training.model
    average = tp.MovingAverage(model, training.optimizer, decay=0.5)
    x, _ = CASES["uneven"].data()[:4]
    seen, refused = [], {}

    def refusal(place, action):
        with pytest.raises(tp.Refused) as caught:
            action()
        refused[place] = str(caught.value)

    def apply():
        with average.applied():
            raise AssertionError("applied")

    go(training, CASES["uneven"].losses, steps=2)
    for batch in training:
        refusal("in a turn", apply)
        if training.step(CASES["uneven"].losses(model, batch)):
            before = whole_weights(model)
            with average.applied(), torch.no_grad():
                evaluated = model(x)
                evaluated = model(x)  # the forward has left whole weights
                inside = whole_weights(model)
                assert not training.state_dict().get("moved_otherwise")
                refusal("applied again", apply)
            after = whole_weights(model)
            assert all(torch.equal(after[name], p) for name, p in before.items())
            seen.append((evaluated, inside))
    with average.applied():
        refusal("loop", lambda: next(iter(training)))
    refusal("model", lambda: average.model if how != "ddp" else apply_twice(average))
    assert not training.state_dict().get("moved_otherwise")
    return seen, refused, average.step_count


def apply_twice(average):
    with average.applied(), average.applied():
        raise AssertionError("applied")


def averaged_in_one_process():
    training = start(CASES["uneven"], None)
    average = tp.MovingAverage(training.model, training.optimizer, decay=0.5)
    x, _ = CASES["uneven"].data()[:4]
    go(training, CASES["uneven"].losses, steps=2)
    seen = []
    for batch in training:
        if training.step(CASES["uneven"].losses(training.model, batch)):
            seen.append((average.model(x).detach(), whole_weights(average.model)))
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["layers", "root", "ddp"])
def test_average_on_ranks_is_that_of_one_process(ranks2, how):
    expected = averaged_in_one_process()
    found = ranks2.run(averaged_on_ranks, how)
    assert len(expected) == 3
    for seen, refused, count in found:
        assert count == 5
        for (evaluated, inside), (wanted, weights) in zip(seen, expected, strict=True):
            torch.testing.assert_close(evaluated, wanted, rtol=0, atol=1e-12)
            assert difference(inside, weights) < 1e-12
        assert "a step of the training is in progress" in refused["in a turn"]
        assert "applied already" in refused["applied again"]
        assert "the averaged weights are applied to the model" in refused["loop"]
        assert "cannot be copied" in refused["model"] or how == "ddp"
