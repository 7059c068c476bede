# SPDX-License-Identifier: Apache-2.0
"""One file keeps a training with its parts: a run that goes on from it equals one without a stop, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from trainings import cross_entropy, data, network, train

import torch_privacy as tp
from torch_privacy.runs import checkpoint

rates = torch.optim.lr_scheduler
OPTIMIZERS = {
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05), amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True),
}
SCHEDULERS = {
    "cosine": lambda o: rates.CosineAnnealingLR(o, 12),
    "lambda": lambda o: rates.LambdaLR(o, lambda step: 0.8**step),
    "milestones": lambda o: rates.MultiStepLR(o, [2, 2, 7]),
}


def begun(optimizer=OPTIMIZERS["AdamW with amsgrad"], scheduler=SCHEDULERS["cosine"], **settings):
    """A training with dropout, an average and a clip norm that is learned, and its parts."""
    model = nn.Sequential(nn.Dropout(0.3), network())
    made = optimizer(model.parameters())
    parts = {"model": model, "optimizer": made, "scheduler": scheduler(made)}
    settings = {
        "expected_batch_size": 8,
        "num_steps": 12,
        "clipping": tp.Adaptive(0.5, count_noise_stddev=2.0),
        "test_seed": 3,
    } | settings
    training = tp.PrivateTraining(model, made, data(), noise_multiplier=1.0, scheduler=parts["scheduler"], **settings)
    return training, parts | {"average": tp.MovingAverage(model, made, 0.7)}


def states(parts):
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*((name, "cosine") for name in OPTIMIZERS), ("Adagrad", "lambda"), ("Adagrad", "milestones")],
)
def test_a_run_that_goes_on_from_a_file_equals_one_without_a_stop(optimizer, scheduler, tmp_path):
    whole, of_whole = begun(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    train(whole, losses=cross_entropy)
    first, of_first = begun(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    train(first, steps=5, losses=cross_entropy)
    tp.save_secret(first, tmp_path / "secret", **of_first)
    second, of_second = begun(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    torch.manual_seed(99)  # as in another process
    assert tp.load_secret(second, tmp_path / "secret", **of_second) == 5
    train(second, losses=cross_entropy)
    assert checkpoint.packed(states(of_second)) == checkpoint.packed(states(of_whole))
    assert checkpoint.packed(second.state_dict()) == checkpoint.packed(whole.state_dict())


def wider():
    training, parts = begun()
    return training, parts | {"model": nn.Sequential(nn.Dropout(0.3), nn.Linear(9, 9))}


OTHERS = {
    "no average": (begun, ("average",), r"holds the states of 'average', 'model', .*and those of 'model', 'optimizer'"),
    "another model": (wider, (), r"its model differs from this one in '1\.\w"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_parts_are_refused_before_anything_is_loaded(name, tmp_path):
    make, left_out, message = OTHERS[name]
    training, parts = begun()
    train(training, steps=2, losses=cross_entropy)
    tp.save_secret(training, tmp_path / "secret", **parts)
    other, of_other = make()
    before = checkpoint.packed(states(of_other)), other.state_dict()
    with pytest.raises(tp.Refused, match=message):
        tp.load_secret(other, tmp_path / "secret", **{k: v for k, v in of_other.items() if k not in left_out})
    assert (checkpoint.packed(states(of_other)), other.state_dict()) == before


def test_an_optimizer_that_does_not_fit_is_named(tmp_path):
    training, parts = begun()
    tp.save_secret(training, tmp_path / "secret", optimizer=parts["optimizer"])
    other, parts = begun()
    with pytest.raises(tp.Refused, match=r"secret: its optimizer does not fit this one \(loaded state dict cont"):
        tp.load_secret(other, tmp_path / "secret", optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
