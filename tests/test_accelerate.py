# SPDX-License-Identifier: Apache-2.0
"""Tests that what Accelerate prepares trains as without it, and that its own steps and checkpoints are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from trainings import cross_entropy, data, network, parameters_of, train, training_of

import torch_privacy as tp

accelerate = pytest.importorskip("accelerate")

SETTINGS = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0, "test_seed": 5}


@pytest.fixture
def accelerator(request):
    """An accelerator on the processor, with settings of the test; its states are shared by all, and forgotten after."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True, **getattr(request, "param", {}))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def prepared(accelerator, with_scheduler=False, **settings):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = halving(optimizer) if with_scheduler else None
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    settings = {"scheduler": scheduler} | settings
    return optimizer, tp.PrivateTraining(model, optimizer, data(), **SETTINGS | settings)


@pytest.mark.parametrize("with_scheduler", [False, True], ids=["optimizer", "scheduler"])
def test_prepared_parts_train_as_without_accelerate(accelerator, with_scheduler):
    optimizer, training = prepared(accelerator, with_scheduler)
    train(training)
    own = torch.optim.SGD((model := network()).parameters(), lr=1.0)
    alone = training_of(model, optimizer=own, scheduler=halving(own) if with_scheduler else None)
    train(alone)
    assert torch.equal(parameters_of(training), parameters_of(alone))
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"]
    assert training.optimizer is optimizer.optimizer


@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)
def test_bfloat16_is_autocast(accelerator):
    torch.set_default_dtype(torch.float32)  # autocast leaves float64 as it is
    _, training = prepared(accelerator)
    train(training)

    def losses(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        return F.cross_entropy(scores.float(), y, reduction="none")

    alone = training_of()
    train(alone, losses=losses)
    torch.testing.assert_close(parameters_of(training), parameters_of(alone), rtol=1e-5, atol=1e-5)
    exact = training_of()
    train(exact)
    assert not torch.equal(parameters_of(training), parameters_of(exact))


@pytest.mark.parametrize("accelerator", [{"gradient_accumulation_steps": 2}], indirect=True)
def test_accumulation_and_clipping_of_the_accelerator_change_nothing(accelerator):
    _, training = prepared(accelerator)
    for x, y in training:
        with accelerator.accumulate(training.model):
            if training.step(cross_entropy(training.model, x, y)):
                assert not accelerator.clip_grad_norm_(training.model.parameters(), 1e-3)
    alone = training_of()
    train(alone)
    assert torch.equal(parameters_of(training), parameters_of(alone))


def test_prepared_loaders_are_refused_with_the_cure(accelerator):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=8, shuffle=True))
    with pytest.raises(tp.Refused, match=r"Pass loader\.dataset"):
        tp.PrivateTraining(model, optimizer, loader, **SETTINGS)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("backward step", r"optimizer\.step\(\) was called inside of the loop"),
        ("backward private", "Leave out losses.backward"),
        ("backward", "went on without training.step"),
    ],
)
def test_steps_of_the_accelerator_are_refused(accelerator, steps, message):
    optimizer, training = prepared(accelerator)
    before = parameters_of(training).clone()
    with pytest.raises(tp.Refused, match=message):  # noqa: PT012
        for x, y in training:
            losses = cross_entropy(training.model, x, y)
            accelerator.backward(losses.mean())
            if "step" in steps:
                optimizer.step()
            if "private" in steps:
                training.step(losses)
    assert torch.equal(parameters_of(training), before)
    assert len(training.ledger) == 0


def test_save_state_gets_no_keys(accelerator, tmp_path):
    _, training = prepared(accelerator)
    accelerator.register_for_checkpointing(training)
    train(training, steps=2)
    with pytest.raises(tp.Refused, match="would write the keys"):
        accelerator.save_state(tmp_path / "refused")
    accelerator._custom_objects.clear()
    train(training, steps=4)
    accelerator.save_state(tmp_path / "state")
    tp.save_secret(training, tmp_path / "secret.json")
    key = training.state_dict()["noise_key"]
    for path in [*(tmp_path / "refused").rglob("*"), *(tmp_path / "state").rglob("*")]:
        content = path.read_bytes() if path.is_file() else b""
        assert key.encode() not in content
        assert bytes.fromhex(key) not in content
    train(training)
    after = parameters_of(training).clone()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator._models.clear(), accelerator._optimizers.clear()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(tmp_path / "state")
    resumed = tp.PrivateTraining(model, optimizer, data(), **SETTINGS)
    assert tp.load_secret(resumed, tmp_path / "secret.json") == 4
    train(resumed)
    assert torch.equal(parameters_of(resumed), after)


def test_wrappers_that_scale_or_step_by_themselves_are_refused(accelerator):
    model = network()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.scaler = object()
    with pytest.raises(tp.Refused, match="mixed_precision='fp16'"):
        training_of(model, optimizer=optimizer)

    class DeepSpeedOptimizerWrapper(type(optimizer)):
        pass

    optimizer.__class__ = DeepSpeedOptimizerWrapper
    with pytest.raises(tp.Refused, match="DeepSpeedOptimizerWrapper of Accelerate steps in its own way"):
        training_of(model, optimizer=optimizer)
