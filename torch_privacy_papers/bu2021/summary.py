# SPDX-License-Identifier: Apache-2.0
"""Compares privacy, speed, memory and generality of each method: Bu, Gopi et al. (2021), Table 1.

``torch-privacy reproduce jl-summary`` states, for each method, the certified epsilon of the training of ``jl-mnist``,
time and memory of a step of its network relative to a step without privacy, and how many of five small networks the
method can train: dense layers, convolutions, a bidirectional LSTM, a network that takes a derivative inside its
forward, and one with an ``autograd.Function`` of its own. Inputs are random: they determine none of these numbers.

Source: arXiv:2102.03013, Table 1, which has marks in place of numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torch_privacy import privacy
from torch_privacy.experiments.study import Study
from torch_privacy.privacy import Bracket
from torch_privacy.runs.rows import EXACT, PRIVACY_COLUMNS, Computation, Context, Number, Numbers, TableColumn
from torch_privacy_papers.bu2021 import common as jl
from torch_privacy_papers.bu2021.methods import TimedProblem
from torch_privacy_papers.bu2021.tables import ON_MNIST

TIME, MEMORY, NETWORKS = "time_ratio", "memory_ratio", "networks"
COLUMNS = {
    EXACT: replace(PRIVACY_COLUMNS[EXACT], scientific=True),
    TIME: TableColumn("x time", digits=2),
    MEMORY: TableColumn("x memory", digits=2),
    NETWORKS: TableColumn("networks of 5", digits=0),
}
SHOWN = (
    "non-private", "vanilla", "multiple", "outer product", "ours, exact",
    "JL(1)", "JL(10)", "JL(30)", "JL(1), double vjp", "JL(10), double vjp",
)  # fmt: skip
NUM_IMAGES = 60_000  # of the priced training
TIMED_IMAGES = 2_560  # random ones
NOTES = (
    "eps: of the training of jl-mnist. x time, x memory: of a step of its network, relative to non-private; processor "
    "time if torch has one thread. Outer product is Opacus, with its own layer for the LSTM.",
    "networks: dense layers, convolutions, a bidirectional LSTM, a derivative inside the forward, and an "
    "autograd.Function of its own, without a rule for vmap. Exact norms train all five. "
    "Multiple and outer product fail at the last.",
    "The paper's marks. Privacy: all but non-private. Speed: all but vanilla. Memory: all but multiple. Generality: "
    "all but outer product. Privacy is not confirmed for JL(1) and JL(10): their epsilon is far above that of exact "
    "norms.",
)


def rows(quick: bool) -> Sequence[Computation]:
    """Returns one row for each method."""
    return [Computation(name, partial(numbers_of, name)) for name in SHOWN]


def numbers_of(method: str, context: Context) -> Numbers:
    """Returns what is known of a method; time and memory are left out if the method is not available."""
    numbers: dict[str, Number] = {NETWORKS: sum(supports(method, name) for name in NETWORKS_TRIED)}
    if method != "non-private":
        numbers[EXACT] = epsilon(method)
    seconds, peaks = _measured(context.quick)
    if method in seconds:
        numbers |= {TIME: seconds[method] / seconds["non-private"], MEMORY: peaks[method] / peaks["non-private"]}
    return numbers


def epsilon(method: str) -> Bracket[float]:
    """Returns the certified epsilon of the training of ``jl-mnist`` by this method."""
    settings = ON_MNIST.defaults
    assert settings.noise_multiplier is not None
    q, noise = settings.expected_batch_size / NUM_IMAGES, settings.noise_multiplier
    event: privacy.Event = privacy.SubsampledGaussian(noise, q)
    if method.startswith("JL("):
        event = privacy.SubsampledJL(noise, int(method[3 : method.index(")")]), q)
    return privacy.compose([(event, round(settings.epochs / q))]).epsilon(settings.delta)


class _Downhill(nn.Module):
    """A step down a learned energy, with its derivative taken inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(5, 8)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda one: torch.tanh(one @ self.weight).sum())
        return self.out(x - torch.func.vmap(slope)(x))


class _Recurrent(nn.Module):
    """A bidirectional LSTM over five inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x[:, :, None])[0][:, -1])


class _Cube(torch.autograd.Function):
    """Computes ``x w³``; vmap has no rule for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] * w**3, (3 * gradients[0] * x * w**2).sum(0)


class _CustomFunction(nn.Module):
    """Scales its inputs by an ``autograd.Function`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.rand(5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(_Cube.apply(x, self.scale))


NETWORKS_TRIED: Mapping[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
    "convolutions": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(16, 2)),
    "LSTM": _Recurrent,
    "derivative": _Downhill,
    "custom function": _CustomFunction,
}


def supports(method: str, network: str) -> bool:
    """Returns True if the method makes a step of this small network."""
    data = TensorDataset(torch.randn(32, 5), torch.randint(2, (32,)))
    problem = TimedProblem(NETWORKS_TRIED[network], _sgd, data, batch_size=8, clip_norm=1.0, noise_multiplier=1.0)
    try:
        jl.METHODS[method](problem)()
    except (*jl.UNAVAILABLE, AttributeError, ValueError):
        return False
    return True


@cache
def _measured(quick: bool) -> tuple[dict[str, float], dict[str, int]]:
    """Measures the methods alternately; all rows share the result."""
    images = TensorDataset(torch.rand(TIMED_IMAGES, 1, 28, 28), torch.randint(10, (TIMED_IMAGES,)))
    clock = process_time if torch.get_num_threads() == 1 else perf_counter
    return jl.measure_steps(ON_MNIST.problem(images, quick=quick), SHOWN, 5 if quick else 60, quick=quick, clock=clock)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


STUDY = Study(COLUMNS, rows, NOTES, delta=ON_MNIST.defaults.delta)
