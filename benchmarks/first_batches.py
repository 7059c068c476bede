# SPDX-License-Identifier: Apache-2.0
"""Measures the first batches of a training, with all of their rehearsals, in ordinary steps on the same batches.

    python benchmarks/first_batches.py               # all networks; exits with 1 if one exceeds the goal
    python benchmarks/first_batches.py mlp gpt --rounds 5
    python benchmarks/first_batches.py --count       # the passes that each batch takes, instead of its time

The first batches of a training are rehearsed in full, the layouts of all calls are measured or confirmed, and rows
are compared with native gradients. ``training`` is a whole step of ``PrivateTraining``, from sampling to the
optimizer's update; ``record`` is a loop of one's own over ``tp.record``. An ordinary step is forward, backward and
update of the same batch. All are minima over rounds that alternate, of processor time in one thread.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from models import GPT, MODELS, Problem, per_example
from step import keep_memory
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp

GOAL = 4.0  # ordinary steps that each of the first batches may take
BATCHES = 3
PYTHON = ("adult",)  # networks so small that Python takes most of the time; the goal does not apply


class LastToken(nn.Module):
    """Classifies texts of different lengths by the last token's output of a GPT."""

    def __init__(self, classes: int = 4, width: int = 256):
        super().__init__()
        self.gpt = GPT(1000, 128, width, heads=4, layers=4, tied=False)
        self.gpt.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        last = (ids > 0).sum(1) - 1
        return self.gpt(ids)[torch.arange(len(ids)), last]


def gpt_tied(batch: int = 8) -> Problem:
    model = GPT(1000, 128, 256, heads=4, layers=4, tied=True)
    return Problem(model, torch.randint(1000, (batch, 128)), torch.randint(1000, (batch, 128)))


def gpt_last_token(batch: int = 8) -> Problem:
    ids = torch.randint(1, 1000, (batch, 128)) * (torch.arange(128) < torch.randint(32, 129, (batch, 1)))
    return Problem(LastToken(), ids, torch.randint(4, (batch,)))


NETWORKS: dict[str, Callable[[], Problem]] = {
    **{name: MODELS[name] for name in ("adult", "mlp", "mnist_cnn", "resnet20_gn", "gpt")},
    "gpt_tied": gpt_tied,
    "gpt_last_token": gpt_last_token,
    "bilstm_imdb": MODELS["bilstm_imdb"],
}


def load(name: str) -> Problem:
    torch.manual_seed(0)
    return NETWORKS[name]()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


class Ordinary:
    """Ordinary steps on any batch."""

    def __init__(self, problem: Problem):
        self._model, self._optimizer = problem.model, sgd(problem.model)

    def seconds(self, x: Tensor, y: Tensor) -> float:
        start = time.process_time()
        per_example(self._model(x), y).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - start


def training_batches(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Makes the first steps of a training and yields the batch of each."""
    model, x, y = problem
    data = TensorDataset(torch.cat([x] * 4), torch.cat([y] * 4))
    settings = {"expected_batch_size": len(x), "num_steps": BATCHES, "noise_multiplier": 1.0, "delta": 1e-9}
    training = tp.PrivateTraining(model, sgd(model), data, clipping=tp.Flat(1.0), test_seed=3, **settings)
    for x, y in training:
        if training.step(per_example(model(x), y)):
            yield x, y


def recorded_batches(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Makes the first steps of a loop over ``tp.record`` and yields the batch of each."""
    model, x, y = problem
    optimizer, clipping = sgd(model), tp.Flat(1.0)
    for _ in range(BATCHES):
        with tp.record(model) as tape:
            losses = per_example(model(x), y)
        jacobian = tape.jacobian(losses)
        clipped_sum = jacobian.weighted_sum(clipping.factors(jacobian.squared_norms().sqrt()) / len(x))
        for name, p in model.named_parameters():
            p.grad = clipped_sum[name]
        optimizer.step()
        optimizer.zero_grad()
        yield x, y


LOOPS = {"training": training_batches, "record": recorded_batches}


def ratios(name: str, rounds: int) -> dict[str, list[float]]:
    """Returns, for each loop, the first batches' times in units of an ordinary step on the same batch."""
    ordinary = Ordinary(load(name))
    ours: dict[str, list[float]] = {loop: [float("inf")] * BATCHES for loop in LOOPS}
    theirs: dict[str, list[float]] = {loop: [float("inf")] * BATCHES for loop in LOOPS}
    for _ in range(rounds):
        for loop, batches in LOOPS.items():
            problem = load(name)
            start = time.process_time()
            for k, (x, y) in enumerate(batches(problem)):
                ours[loop][k] = min(ours[loop][k], time.process_time() - start)
                for _ in range(2):
                    theirs[loop][k] = min(theirs[loop][k], ordinary.seconds(x, y))
                start = time.process_time()
    return {loop: [a / b for a, b in zip(ours[loop], theirs[loop], strict=True)] for loop in LOOPS}


@contextmanager
def counting(model: nn.Module, found: Counter) -> Iterator[None]:
    """Counts examples in forwards of the model, and in backwards to outputs and to parameters."""
    parameters = {id(p) for p in model.parameters()}
    backward = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        cotangent = args[0] if args else kwargs.get("grad_outputs")
        if isinstance(outputs, Tensor) and isinstance(cotangent, Tensor) and cotangent.ndim == 1:
            to_parameters = any(id(t) in parameters for t in inputs)
            coded = "plain" if bool((cotangent == cotangent[:1]).all()) else "coded"
            found["native" if to_parameters else coded] += len(cotangent)
        return backward(outputs, inputs, *args, **kwargs)

    def forward(_: nn.Module, inputs: tuple) -> None:
        found["forward" if torch.is_grad_enabled() else "forward alone"] += len(inputs[0])

    handle = model.register_forward_pre_hook(forward)
    with mock.patch.object(torch.autograd, "grad", grad):
        yield
    handle.remove()


KINDS = ("forward", "forward alone", "plain", "coded", "native")


def print_counts(name: str) -> None:
    """Prints, for each of the first batches, how many passes of each kind it takes, in units of the batch."""
    for loop, batches in LOOPS.items():
        problem, found = load(name), Counter()
        with counting(problem.model, found):
            for k, (x, _) in enumerate(batches(problem)):
                counts = "".join(f"{found[kind] / len(x):14.1f}" for kind in KINDS)
                print(f"{name:<15} {loop:<9} {k + 1:5}{counts}", flush=True)
                found.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[], choices=[*NETWORKS, []], metavar="NETWORK")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", action="store_true", help="passes instead of times")
    arguments = parser.parse_args()
    names = arguments.networks or [*NETWORKS]
    keep_memory()
    torch.set_num_threads(1)
    if arguments.count:
        print(f"{'network':<15} {'loop':<9} batch" + "".join(f"{kind:>14}" for kind in KINDS))
        for name in names:
            print_counts(name)
        return
    missed = False
    print(f"{'network':<15} {'loop':<9} {'first':>7} {'second':>7} {'third':>7}    goal")
    for name in names:
        for loop, found in ratios(name, arguments.rounds).items():
            goal = "    -" if name in PYTHON else f"{GOAL:5.1f}"
            missed |= name not in PYTHON and max(found) > GOAL
            print(f"{name:<15} {loop:<9} " + " ".join(f"{ratio:7.2f}" for ratio in found) + f"   {goal}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
