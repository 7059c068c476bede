# SPDX-License-Identifier: Apache-2.0
"""Times the engine under ``compile=True`` beside compiled training: ``python benchmarks/compiled.py [network]``.

The engine is forward, losses, backward, norms and clipped sums; ordinary training is forward, losses and backward. All
contenders take turns in one process on one thread, and minima of processor time are compared. Exits with 1 if a network
misses the goal.
"""

import sys
import time
import warnings
from collections.abc import Callable

import torch
from models import MODELS, Problem, load, per_example

import torch_privacy as tp
from torch_privacy.training import loop

GOAL = 1.15  # times compiled ordinary training
NETWORKS = ("mlp", "mnist_cnn", "gpt", "resnet20_gn")
WARM_UP, ROUNDS = 24, 30
Run = Callable[[], float]  # returns the processor time of one step


def ordinary(problem: Problem, *, compile: bool) -> Run:
    """Returns a step of ordinary training without the optimizer."""
    model = torch.compile(problem.model, dynamic=False) if compile else problem.model

    def run() -> float:
        start = time.process_time()
        problem.model.zero_grad()
        per_example(model(problem.x), problem.y).mean().backward()
        return time.process_time() - start

    return run


def private(problem: Problem, *, compile: bool) -> tuple[Run, loop.PrivateTraining]:
    """Returns a step of private training, of which forward, losses and clipped sum are timed, and the training."""
    n = len(problem.x)
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)
    data = torch.utils.data.TensorDataset(problem.x, problem.y)
    training = tp.PrivateTraining(
        problem.model,
        optimizer,
        data,
        expected_batch_size=n,
        num_steps=10**6,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        delta=0.1 / n,
        memory_budget=4,
        compile=compile,
        test_seed=1,
    )
    batches, seconds = iter(training), [0.0]
    clipped_sums = training._clipped_sums

    def timed(*args: object, **kwargs: object) -> dict:
        start = time.process_time()
        sums = clipped_sums(*args, **kwargs)  # type: ignore[arg-type]
        seconds[0] += time.process_time() - start
        return sums

    vars(training)["_clipped_sums"] = timed

    def run() -> float:
        while True:
            x, y = next(batches)
            seconds[0], start = 0.0, time.process_time()
            losses = per_example(problem.model(x), y)
            forward = time.process_time() - start
            if training.step(losses):
                return forward + seconds[0]

    return run, training


def measure(name: str) -> bool:
    """Prints one network's figures; returns whether it meets the goal."""
    compiled, training = private(load(name), compile=True)
    contenders: dict[str, Run] = {
        "ordinary": ordinary(load(name), compile=False),
        "ordinary, compiled": ordinary(load(name), compile=True),
        "private": private(load(name), compile=False)[0],
        "private, compiled": compiled,
    }
    for run in contenders.values():
        for _ in range(WARM_UP):
            run()
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for contender, run in contenders.items():
            least[contender] = min(least[contender], run())
    assert training._compiled is not None
    graphs = training._compiled._compiled
    ratio = least["private, compiled"] / least["ordinary, compiled"]
    print(f"{name}: {ratio:.2f} of compiled ordinary training, goal {GOAL}" + graphs.given_up, flush=True)
    for contender, seconds in least.items():
        print(f"  {contender:20} {seconds * 1e3:9.3f} ms  {seconds / least['ordinary']:6.2f} of ordinary")
    return ratio <= GOAL and not graphs.given_up


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or NETWORKS
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise SystemExit(f"unknown network {', '.join(unknown)}; must be of {', '.join(MODELS)}")
    met = [measure(name) for name in names]
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
