# SPDX-License-Identifier: Apache-2.0
"""Measures time and memory of one training step: non-private, ours, and peers, interleaved in one process.

    python benchmarks/step.py                        # all networks that suit a CPU
    python benchmarks/step.py adult mlp --seconds 20
    python benchmarks/step.py gpt resnet20_gn --contenders non-private --budgets 1.05,1.2,1.5,2
    python benchmarks/step.py vit_b16 gpt2_small_1024 --device cuda --dtype autocast --json results.jsonl

Prints for every network the median milliseconds of a non-private step, and for every contender the ratio of medians
to it, the ratio of minima, the goal, and its peak memory above the loaded network (measured in a separate process;
on a GPU, its allocations). It exits with 1 if the smaller of the two ratios misses a goal: goals are those for a CPU in
float32. A contender that fails on a network prints the reason, and the others continue.

``ours-no-noise`` is recording, norms, clipping and the clipped sum; ``ours`` is all of ``PrivateTraining``: Poisson
sampling, noise, ledger. ``opacus-all`` is all of Opacus: its loader with Poisson sampling over the same data set, rows
by hooks, noise, its accountant; ``opacus-all-ghost`` the same with ghost clipping. Batches are fixed in all other
contenders; the minima of these are over batches of at least the expected size. ``opacus-hooks`` and ``opacus-ghost``
add noise; vmap and BackPACK clip and sum only. Loss and optimizer are the same. Other programs on the machine disturb
the numbers, especially with several threads; with one (``OMP_NUM_THREADS=1``), times are processor times.

Under glibc, malloc returns memory to the system and requests it again at random times, which costs some contender
up to a third of its time: so the script restarts itself with malloc configured to keep memory. ``--malloc``
disables that.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from models import DTYPES, MODELS, ON_CPU, Problem, load, per_example
from peers import Maker, Step, apply, backpack_norms, backpack_rows, opacus, repeated, sgd, trained, vmap
from torch import Tensor

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import MEMORY_BUDGET, Tape

WARM_UP = 4  # number of steps; our first ones measure layouts
FEW, HOPELESS = 5, 20  # after 5 rounds a contender that is 20 times slower than non-private drops out
GOALS: dict[str, dict[str, float]] = {  # network -> contender -> ratio to the non-private step, at most
    "mlp": {"ours-no-noise": 1.10, "ours": 1.7},
    "mnist_cnn": {"ours-no-noise": 1.3, "ours": 1.35},
    "cifar_cnn": {"ours-no-noise": 1.1, "ours": 1.15},
    "resnet20_gn": {"ours-no-noise": 1.2, "ours": 1.3},
    "gpt": {"ours-no-noise": 1.2, "ours": 1.3},
    "gpt_tied": {"ours": 1.4},
    "gpt_last_token": {"ours": 1.6},
    "bilstm_imdb": {"ours-no-noise": 1.3, "ours": 1.4},
    "gpt2_small": {"ours": 1.12},
    "gpt2_small_lora": {"ours": 1.15},
}

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # options of glibc, ignored elsewhere


def keep_memory() -> None:
    """Restarts this program with malloc configured to keep memory, unless it is already."""
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def non_private(problem: Problem) -> Step:
    model, x, y = problem
    optimizer = sgd(model)

    def step() -> int:
        per_example(model(x), y).mean().backward()
        apply(optimizer)
        return len(x)

    return step


def ours_without_noise(problem: Problem, memory_budget: float = MEMORY_BUDGET) -> Step:
    model, x, y = problem
    optimizer, clipping, layouts = sgd(model), tp.Flat(1.0), Layouts()
    parameters = trained(model)
    constants = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]

    def clip(jacobian: tp.Jacobian, group: str) -> dict[str, Tensor]:
        return jacobian.weighted_sum(clipping.factors(jacobian.squared_norms().sqrt()) / len(x))

    def step() -> int:
        with Tape(parameters, constants, layouts, len(x)) as tape:
            losses = per_example(model(x), y)
        clipped_sum = tape.clipped_sum(losses, {"all": tuple(parameters)}, clip, memory_budget=memory_budget)
        for name, p in parameters.items():
            p.grad = clipped_sum[name].to(p.dtype)
        apply(optimizer)
        return len(x)

    return step


def ours(problem: Problem) -> Step:
    model, data = problem.model, repeated(problem)
    settings = {"expected_batch_size": len(problem.x), "num_steps": 10**6, "noise_multiplier": 1.0}
    training = tp.PrivateTraining(model, sgd(model), data, clipping=tp.Flat(1.0), **settings)
    batches = iter(training)

    def step() -> int:
        rehearsed = False
        while True:
            xb, yb = next(batches)
            if training.step(per_example(model(xb), yb)):
                return 0 if rehearsed else len(xb)  # 0: not a settled step
            rehearsed = True

    return step


CONTENDERS: dict[str, Maker] = {
    "non-private": non_private,
    "ours-no-noise": ours_without_noise,
    "ours": ours,
    "vmap": vmap,
    "opacus-hooks": opacus("hooks"),
    "opacus-ghost": opacus("ghost"),
    "opacus-all": opacus("hooks", with_loader=True),
    "opacus-all-ghost": opacus("ghost", with_loader=True),
    "backpack-rows": backpack_rows,
    "backpack-norms": backpack_norms,
}


def maker(contender: str) -> Maker:
    """Returns the maker of a contender's step; ``ours-no-noise@1.5`` has a ``memory_budget`` of 1.5."""
    name, _, budget = contender.partition("@")
    return partial(ours_without_noise, memory_budget=float(budget)) if budget else CONTENDERS[name]


@dataclass(frozen=True)
class Place:
    """Device and dtype of the steps."""

    device: str = "cpu"
    dtype: str = "float32"

    def load(self, model: str) -> Problem:
        return load(model, self.device, self.dtype)

    def wait(self) -> None:
        """Waits until the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> str:
        device = torch.cuda.get_device_name() if self.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return f"torch {torch.__version__}, {device}, {DTYPES[self.dtype]}"


@dataclass(frozen=True)
class Result:
    """Results of one contender on one network; times in seconds, memory in MiB, all None if it fails."""

    model: str
    contender: str
    fails: str | None = None
    median_s: float | None = None
    least_s: float | None = None
    rounds: int = 0
    peak_mib: float | None = None


def peak_memory(model: str, contender: str, place: Place) -> float | str:
    """Returns peak MiB above the loaded model during three steps, in this process; or the reason of its failure."""
    warnings.simplefilter("ignore")
    try:
        step = maker(contender)(place.load(model))
        before = _reset_peak(place)
        for _ in range(3):
            step()
        place.wait()
        return (_peak(place) - before) / 2**20
    except Exception as error:
        return reason(error)


def _reset_peak(place: Place) -> int:
    """Resets the peak, and returns the bytes in use."""
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(place: Place) -> int:
    return torch.cuda.max_memory_allocated() if place.device == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def reason(error: Exception) -> str:
    """Returns the beginning of an error's message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:110]}{'...' if len(text) > 110 else ''}"


def in_new_process(model: str, contender: str, place: Place) -> float | str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(peak_memory, model, contender, place).result()
        except BrokenProcessPool:
            return "its process was killed (out of memory?)"


def now() -> float:
    """Returns seconds: with one thread of the processor, which other programs disturb less."""
    return (
        time.process_time() if torch.get_num_threads() == 1 and not torch.cuda.is_available() else time.perf_counter()
    )


@dataclass
class Clock:
    """A contender's step and its rounds: (seconds, examples)."""

    step: Step
    place: Place
    taken: list[tuple[float, int]]

    def run(self) -> None:
        start = now()
        examples = self.step()
        self.place.wait()
        self.taken.append((now() - start, examples))

    def least(self, batch: int) -> float:
        """Shortest step with a full batch."""
        return min((seconds for seconds, examples in self.taken if examples >= batch), default=float("nan"))

    def median(self) -> float:
        return statistics.median([seconds for seconds, examples in self.taken if examples] or [float("nan")])


def clocks(
    problem: Callable[[], Problem], contenders: Iterable[str], place: Place, seconds: float
) -> dict[str, Clock | str]:
    """Returns the clock of every contender, measured in turns until the time is up, or the reason of its failure."""
    found: dict[str, Clock | str] = {name: _warmed_up(problem, name, place) for name in contenders}
    running = {name: clock for name, clock in found.items() if isinstance(clock, Clock)}
    end = time.perf_counter() + seconds
    while running and time.perf_counter() < end:
        for name, clock in list(running.items()):
            try:
                clock.run()
            except Exception as error:
                found[name] = reason(error)
                del running[name]
            else:
                if _is_hopeless(clock, running.get("non-private")):
                    del running[name]  # a few rounds suffice, and more would evict the caches of the others
    return found


def _warmed_up(problem: Callable[[], Problem], contender: str, place: Place) -> Clock | str:
    try:
        clock = Clock(maker(contender)(problem()), place, [])
        for _ in range(WARM_UP):
            clock.run()
    except Exception as error:
        return reason(error)
    clock.taken.clear()
    return clock


def _is_hopeless(clock: Clock, base: Clock | None) -> bool:
    if base is None or len(clock.taken) < FEW:
        return False
    return min(clock.taken)[0] > HOPELESS * min(base.taken)[0]


def measure(
    model: str, contenders: list[str], place: Place, seconds: float, *, with_memory: bool = True
) -> list[Result]:
    """Measures memory first, in separate processes; contenders that fail there are excluded from the timing."""
    memory = {name: in_new_process(model, name, place) if with_memory else None for name in contenders}
    able = [name for name in contenders if not isinstance(memory[name], str)]
    timed = clocks(lambda: place.load(model), able, place, seconds)
    batch = len(load(model).x)
    return [_result(model, name, memory[name], timed.get(name), batch) for name in contenders]


def _result(model: str, contender: str, memory: float | str | None, clock: Clock | str | None, batch: int) -> Result:
    if isinstance(memory, str):
        return Result(model, contender, fails=memory)
    if not isinstance(clock, Clock) or not clock.taken:
        return Result(model, contender, fails=clock if isinstance(clock, str) else "no time left", peak_mib=memory)
    return Result(model, contender, None, clock.median(), clock.least(batch), len(clock.taken), memory)


def ratio(base: Result, result: Result) -> float | None:
    """Returns the smaller of the ratio of medians and that of minima to ``base``; None if there is none."""
    if None in (base.median_s, base.least_s, result.median_s, result.least_s):
        return None
    ratios = (result.median_s / base.median_s, result.least_s / base.least_s)  # type: ignore[operator]
    return min((r for r in ratios if r == r), default=None)  # no settled batch was large enough


def missed(results: list[Result]) -> list[str]:
    """Returns a line for each goal that the results of one network miss."""
    base, lines = results[0], []
    for r in results:
        goal, reached = GOALS.get(r.model, {}).get(r.contender), ratio(base, r)
        if goal is not None and (reached is None or reached > goal):
            lines.append(f"{r.model}: {r.contender} {'fails' if reached is None else f'{reached:.2f}'}, goal {goal}")
    return lines


def report(results: list[Result]) -> str:
    """Prints the network's table, with ratios to the non-private step."""
    base = results[0]
    if base.median_s is None or base.least_s is None:
        return f"{base.model}: non-private fails: {base.fails}"
    lines = [
        f"{base.model}: non-private step {base.median_s * 1e3:.2f} ms (median of {base.rounds})",
        f"{'':18} {'ratio of medians':>17} {'of minima':>10} {'goal':>6} {'peak MiB':>9} {'rounds':>7}",
    ]
    for r in results:
        if r.median_s is None or r.least_s is None:
            lines.append(f"{r.contender:18} fails: {r.fails}")
        else:
            ratios = f"{r.median_s / base.median_s:17.2f} {r.least_s / base.least_s:10.2f}"
            goal = GOALS.get(r.model, {}).get(r.contender, "")
            peak = "-" if r.peak_mib is None else f"{r.peak_mib:.0f}"
            lines.append(f"{r.contender:18} {ratios} {goal:>6} {peak:>9} {r.rounds:7d}")
    return "\n".join(lines)


def append_json(path: Path, results: list[Result], place: Place, seconds: float) -> None:
    """Writes one line of JSON per contender; ``null`` for missing numbers."""
    made = {"place": place.describe(), **asdict(place), "seconds": seconds}
    with path.open("a") as file:
        for result in results:
            fields = {k: None if v != v else v for k, v in asdict(result).items()}
            file.write(json.dumps({**fields, **made}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of one training step.")
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="names with commas between")
    parser.add_argument("--budgets", help="also ours-no-noise with these memory budgets, such as 1.05,1.2,1.5,2")
    parser.add_argument("--seconds", type=float, default=40, help="of timing per network, behind the warm-up")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--json", type=Path, help="file to which the results are appended, one JSON object a line")
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument("--malloc", action="store_true", help="leave malloc as it is")
    chosen = parser.parse_args()
    chosen.models = chosen.models or [make.__name__ for make in ON_CPU]
    chosen.contenders = list(dict.fromkeys(["non-private", *chosen.contenders.split(",")]))
    for kind, names, known in [("model", chosen.models, MODELS), ("contender", chosen.contenders, CONTENDERS)]:
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown {kind} {', '.join(map(repr, unknown))}; must be of {', '.join(known)}")
    chosen.contenders += [f"ours-no-noise@{budget}" for budget in (chosen.budgets or "").split(",") if budget]
    return chosen


def main() -> None:
    chosen = arguments()
    if not chosen.malloc:
        keep_memory()
    warnings.simplefilter("ignore")
    place = Place(chosen.device, chosen.dtype)
    print(place.describe(), flush=True)
    below: list[str] = []
    for model in chosen.models:
        results = measure(model, chosen.contenders, place, chosen.seconds, with_memory=not chosen.no_memory)
        print(f"\n{report(results)}", flush=True)
        below += missed(results) if place == Place() else []
        if chosen.json:
            append_json(chosen.json, results, place, chosen.seconds)
    if below:
        print("\nGoals missed:\n" + "\n".join(below))
        sys.exit(1)


if __name__ == "__main__":
    main()
