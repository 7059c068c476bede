# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a private step on several ranks, beside ordinary FSDP2 and DDP, and beside one process.

    python benchmarks/ranks.py                            # mlp and gpt on two ranks, gloo, one thread each
    python benchmarks/ranks.py mlp --ranks 2 --seconds 60 --json results.jsonl

Starts all processes itself: N ranks of ``torch.distributed``, and N processes that know nothing of each other, so
that the processor is as busy for both. They take turns of a second. Each rank, and each process alone, computes with a
batch of the size that the network has in docs/benchmarks.md. An ordinary step is forward, backward, the wrapper's
reduction and the optimizer; steps of the contenders are interleaved, and each begins when all ranks are ready.

Prints for each way to train the ratio of a settled private step to an ordinary one: of medians, and of minima over the
batches of at least the expected size. A rank's time is that of the clock, as it waits for the others; ``processor`` is
the ratio of the minimal processor times, which other programs disturb less. The goal: the ratio on ranks is at most 0.1
above that of one process. It exits with 1 if the smaller of the two ratios of times misses the goal. The last
line is the least time of one exchange of messages, of which a settled step has three, and the record's broadcast.
``--profile`` prints where a private step spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS, Problem, load, per_example
from peers import sgd
from step import keep_memory, non_private
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.support.ranks import Ranks

ALLOWED = 0.1  # more than in one process
SLICE = 1.0  # seconds for which the ranks, or the processes alone, have the machine
WARM_UP = 8  # private steps; the first ones are rehearsed
DATA_BYTES = 2**27
ALONE, RANKS = "one process", ("FSDP2", "DDP")
Step = Callable[[], int]


def sharded(model: nn.Module) -> nn.Module:
    """Shards each block, or each layer of a network without blocks, and the rest together."""
    parts = getattr(model, "blocks", model)
    for part in parts if isinstance(parts, nn.Sequential) else ():
        if list(part.parameters()):
            fully_shard(part)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    ALONE: lambda model: model,
    "FSDP2": sharded,
    "DDP": DistributedDataParallel,
}


def ordinary(problem: Problem, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    return non_private(problem._replace(model=wrap(problem.model)))


def private(problem: Problem, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """Returns a step of ``PrivateTraining``; it returns 0 if a rehearsal came before it."""
    model, x, y = wrap(problem.model), problem.x, problem.y
    world = dist.get_world_size() if dist.is_initialized() else 1
    copies = max(8 * world, min(60_000 * world // len(x), DATA_BYTES // (x.nbytes + y.nbytes)))
    data = TensorDataset(*(t.repeat(copies, *[1] * (t.ndim - 1)) for t in (x, y)))
    training = tp.PrivateTraining(
        model,
        sgd(model),
        data,
        expected_batch_size=world * len(x),
        num_steps=10**6,
        noise_multiplier=1.0,
        clipping=tp.Flat(1.0),
        test_seed=1,
    )
    batches = iter(training)

    def step() -> int:
        rehearsed = False
        while True:
            xb, yb = next(batches)
            if training.step(per_example(model(xb), yb)):
                return 0 if rehearsed else len(xb)
            rehearsed = True

    return step


@dataclass
class Times:
    """Times of one contender in one process; of private steps, only the settled ones."""

    full: int  # examples of the expected batch
    clock: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        clock, processor = time.perf_counter(), time.process_time()
        examples = step()
        if examples:
            self.clock.append(time.perf_counter() - clock)
            self.processor.append(time.process_time() - processor)
            self.examples.append(examples)

    def least(self, seconds: list[float]) -> float:
        """Returns the shortest of the steps with a full batch."""
        rounds = zip(seconds, self.examples, strict=True)
        return min((taken for taken, examples in rounds if examples >= self.full), default=float("nan"))


# In the processes --------------------------------------------------------------------------------------------------


def work(connection: Connection, rank: int, size: int, store: str | None, model: str) -> None:
    """Measures slices until the parent has enough, then sends the times: way -> (ordinary, private)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if store is not None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ways = (ALONE,) if store is None else RANKS
    steps = {way: (ordinary(load(model), WRAPPERS[way]), private(load(model), WRAPPERS[way])) for way in ways}
    for _ in range(WARM_UP):
        for pair in steps.values():
            for step in pair:
                step()
    full = len(load(model).x)
    times = {way: (Times(full), Times(full)) for way in ways}
    connection.send("ready")
    while (request := connection.recv()) != "end":
        if request != "slice":
            connection.send(ANSWERS[request](steps))
            continue
        end = time.perf_counter() + SLICE
        while _all_agree(time.perf_counter() < end):
            for way, pair in steps.items():
                for step, taken in zip(pair, times[way], strict=True):
                    if store is not None:
                        dist.barrier()
                    taken.add(step)
        connection.send("done")
    connection.send(times)
    if store is not None:
        dist.destroy_process_group()


def _all_agree(go_on: bool) -> bool:
    """Returns what rank 0 says, so that all make as many rounds."""
    if not dist.is_initialized():
        return go_on
    said = torch.tensor([go_on], dtype=torch.uint8)
    dist.broadcast(said, src=0)
    return bool(said)


def profiles(steps: dict[str, tuple[Step, Step]]) -> dict[str, str]:
    return {way: profiled(private) for way, (_, private) in steps.items()}


def exchange_us(steps: dict[str, tuple[Step, Step]], rounds: int = 300) -> float:
    """Returns microseconds of the shortest exchange between the ranks."""
    ranks, taken = Ranks.here(), []
    for _ in range(rounds):
        start = time.perf_counter()
        ranks.exchange("measures")
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e6


ANSWERS: dict[str, Callable[[dict[str, tuple[Step, Step]]], Any]] = {"profile": profiles, "exchange": exchange_us}


def profiled(step: Step, rounds: int = 20) -> str:
    """Returns where the time of some steps goes, by function."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(rounds):
            step()
    with tempfile.TemporaryFile("w+") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(25)
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats("torch_privacy", 45)
        file.seek(0)
        return file.read()


# In the parent -----------------------------------------------------------------------------------------------------


class Team:
    """Processes that measure at the same time: ranks, or processes alone."""

    def __init__(self, model: str, size: int, store: str | None):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=work, args=(theirs, rank, size, store, model), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        self._answers()

    def _answers(self) -> list:
        return [connection.recv() for connection in self._connections]

    def ask(self, request: str) -> list:
        """Sends a request to all, and returns their answers."""
        for connection in self._connections:
            connection.send(request)
        return self._answers()

    def end(self) -> list[dict[str, tuple[Times, Times]]]:
        """Ends the processes, and returns their times."""
        times = self.ask("end")
        for process in self._processes:
            process.join()
        return times


@dataclass(frozen=True)
class Result:
    """Ratios of a private to an ordinary step, with the milliseconds of the ordinary one."""

    model: str
    way: str
    ranks: int
    ordinary_ms: float
    medians: float
    minima: float
    processor: float
    rounds: int


def result(model: str, way: str, size: int, times: list[tuple[Times, Times]]) -> Result:
    """Joins the times of all processes: the minimum over them, and the median of all rounds."""
    bases, ours = [base for base, _ in times], [private for _, private in times]
    median = [statistics.median([t for times in side for t in times.clock]) for side in (bases, ours)]
    least = [min(times.least(times.clock) for times in side) for side in (bases, ours)]
    processor = [min(times.least(times.processor) for times in side) for side in (bases, ours)]
    return Result(
        model,
        way,
        1 if way == ALONE else size,
        least[0] * 1e3,
        median[1] / median[0],
        least[1] / least[0],
        processor[1] / processor[0],
        len(ours[0].clock),
    )


def measure(model: str, size: int, seconds: float, *, with_profile: bool) -> list[Result]:
    """Measures one network in turns of the ranks and of the processes alone."""
    with tempfile.TemporaryDirectory() as folder:
        teams = [Team(model, size, None), Team(model, size, f"{folder}/store")]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for team in teams:
                team.ask("slice")
        if with_profile:
            for team in teams:
                for way, text in team.ask("profile")[0].items():
                    print(f"{model}, {way}\n{text}")
        print(f"{model}: an exchange takes {max(teams[1].ask('exchange')):.0f} µs")
        found = [team.end() for team in teams]
    return [result(model, way, size, [each[way] for each in times]) for times in found for way in times[0]]


def report(results: list[Result]) -> Iterator[str]:
    """Yields the lines of one network's table."""
    alone = results[0]
    yield f"{alone.model}, {results[-1].ranks} ranks with a thread each; torch {torch.__version__}"
    yield f"{'':14} {'ordinary ms':>12} {'medians':>11} {'minima':>10} {'processor':>10} {'goal':>6} {'rounds':>6}"
    for r in results:
        goal = "" if r is alone else f"{goal_of(alone):.2f}"
        numbers = f"{r.ordinary_ms:12.2f} {r.medians:11.2f} {r.minima:10.2f} {r.processor:10.2f}"
        yield f"{r.way:14} {numbers} {goal:>6} {r.rounds:6d}"


def goal_of(alone: Result) -> float:
    """Returns the ratio that ranks may have."""
    return min(alone.medians, alone.minima) + ALLOWED


def missed(results: list[Result]) -> list[str]:
    """Returns a line for each way of training that misses the goal."""
    goal = goal_of(results[0])
    reached = {f"{r.model}, {r.way}": min(r.medians, r.minima) for r in results[1:]}
    return [f"{name}: {ratio:.2f}, goal {goal:.2f}" for name, ratio in reached.items() if not ratio <= goal]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a private step on several ranks.")
    parser.add_argument("models", nargs="*", default=["mlp", "gpt"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="of timing per network, behind the warm-up")
    parser.add_argument("--json", type=Path, help="file to which the results are appended, one JSON object a line")
    parser.add_argument("--profile", action="store_true", help="print where the private steps of rank 0 spend time")
    chosen = parser.parse_args()
    lines = []
    for model in chosen.models:
        results = measure(model, chosen.ranks, chosen.seconds, with_profile=chosen.profile)
        print(*report(results), sep="\n", end="\n\n", flush=True)
        lines += missed(results)
        if chosen.json:
            with chosen.json.open("a") as file:
                file.writelines(json.dumps(asdict(r) | {"seconds": chosen.seconds}) + "\n" for r in results)
    print(*lines, sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    keep_memory()
    main()
