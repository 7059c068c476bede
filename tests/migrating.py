# SPDX-License-Identifier: Apache-2.0
"""Small programs as they are written for Opacus, and the same with PrivateTraining's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy.opacus import PrivacyEngine

SEED = 4
DELTA = 1e-3


def examples(n: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def made_private(
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    data: Any = None,
    batch_size: int = 10,
    engine: PrivacyEngine | None = None,
    **arguments: Any,
) -> tuple[PrivacyEngine, nn.Module, Any, Any]:
    """Returns (engine, model, optimizer, loader) of make_private with a fixed seed."""
    model = network() if model is None else model
    engine = PrivacyEngine() if engine is None else engine
    loader = DataLoader(examples() if data is None else data, batch_size=batch_size, shuffle=True)
    noise = {} if "noise_multiplier" in arguments else {"noise_multiplier": 1.0}
    parts = engine.make_private(
        module=model,
        optimizer=optimizer(model),
        data_loader=loader,
        **{"max_grad_norm": 1.0, "test_seed": SEED} | noise | arguments,
    )
    return engine, *parts  # type: ignore[return-value]


def trained(
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    epochs: int = 1,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> int:
    """Runs the loop of an Opacus program; returns how often its body ran."""
    turns = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            turns += 1
    return turns


def natively_trained(
    num_steps: int,
    losses_of: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out, y, reduction="none"),
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    after_step: Callable[[torch.optim.Optimizer], Callable[[], None]] | None = None,
    data: Any = None,
    batch_size: int = 10,
    **arguments: Any,
) -> tuple[tp.PrivateTraining, nn.Module]:
    """Returns a training by PrivateTraining's own loop, after its last step, and the model."""
    model, data = network() if model is None else model, examples() if data is None else data
    own = optimizer(model)
    follow = after_step(own) if after_step else None
    steps_per_epoch = len(DataLoader(data, batch_size=batch_size))
    training = tp.PrivateTraining(
        model,
        own,
        data,
        expected_batch_size=len(data) / steps_per_epoch,
        num_steps=num_steps,
        **{"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "test_seed": SEED} | arguments,
    )
    for x, y in training:
        if training.step(losses_of(model(x), y)) and follow is not None:
            follow()
    return training, model


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def epsilon_of(engine: PrivacyEngine, delta: float = DELTA) -> float:
    """Returns the epsilon of an engine with a fixed seed, whose own would be infinite."""
    events = engine.accountant.events()
    return tp.privacy.compose(events).epsilon(delta).high if events else 0.0
