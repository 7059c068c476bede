# SPDX-License-Identifier: Apache-2.0
"""Measures time, memory and largest batch of each method in the DP-SGD-JL papers, and trains with some of them.

The methods are timed alternately in one process. Vanilla is timed with few backward passes and extrapolated, since its
time is linear in their number. Memory is that of tensors; the largest batch is the largest of 64, 128, 256, ... with
which a step completes under a limit of 2 GiB that the system enforces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import Data
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task
from torch_privacy.privacy.bracket import Array
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    EXACT,
    PRIVACY_COLUMNS,
    SCORE,
    Computation,
    Context,
    Number,
    Numbers,
    Row,
    TableColumn,
    TrainingRow,
    folder_name,
    rows_folder,
)
from torch_privacy_papers.bu2021.measure import Step, largest_that_fits, peak_bytes, seconds_by_turns
from torch_privacy_papers.bu2021.methods import (
    Maker,
    TimedProblem,
    multiple,
    non_private,
    ours,
    outer_product,
    vanilla,
    vanilla_seconds,
    without_warnings,
)

SECONDS, RATIO, MEMORY, LARGEST = "seconds_per_epoch", "ratio", "peak_mib", "largest_batch"
REACHED = "epochs_to_goal"
COLUMNS = {
    SECONDS: TableColumn("s / epoch", digits=1),
    RATIO: TableColumn("x non-private", digits=2),
    MEMORY: TableColumn("peak MiB", digits=0),
    LARGEST: TableColumn("largest batch", digits=0),
    SCORE: ACCURACY_COLUMN,
    REACHED: TableColumn("epochs to goal", digits=0),
    EXACT: PRIVACY_COLUMNS[EXACT],
}
NOTES = (
    "The paper's times are from a P100 GPU; compare the ratios. Methods are timed in turns; a row that was measured "
    "later than others (`--only`) has its ratio to the non-private steps of its own run.",
    "Vanilla: one backward pass for each example. Multiple: vmap, 256 MiB of rows at a time. Outer product: Opacus, "
    "with its own layer for an LSTM. JL(r): r projections, by forward mode; double vjp: by two backward passes each.",
    "Largest batch: the largest of 64, 128, 256, ... that fits into 2 GiB beyond the loaded program; none is split, "
    "so multiple has all rows at once here.",
    "Few projections give little privacy. On MNIST epsilon is eight times that of exact norms with JL(10), and above "
    "100 with JL(5) or JL(1).",
)
PROJECTIONS = 1, 4, 5, 10, 30
BY_DOUBLE_VJP = ", double vjp"
FEW = 2, 6  # numbers of backward passes with which vanilla is timed
LIMIT = 2**31
ACCURACY = "test accuracy (%)"
METHODS: dict[str, Maker] = {
    "non-private": non_private,
    "vanilla": vanilla,
    "multiple": multiple,
    "outer product": outer_product,
    "ours, exact": partial(ours, 0),
    **{f"JL({r})": partial(ours, r) for r in PROJECTIONS},
    **{f"JL({r}){BY_DOUBLE_VJP}": partial(ours, r, method="double vjp") for r in (1, 10)},
}
UNSPLIT = METHODS | {"vanilla": partial(vanilla, only=1), "multiple": partial(multiple, at_once=True)}
TRAINED = "trained, "
# Opacus is not installed, or the method does not support this network or runs out of memory.
UNAVAILABLE = ModuleNotFoundError, tp.Refused, RuntimeError, NotImplementedError, MemoryError
LIKE_OTHERS = "JL(4)", "JL(5)", "JL(30)"  # these need as much memory as JL(10)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training with exact or estimated norms."""

    num_projections: int = 0  # 0 for exact norms


@dataclass(frozen=True, kw_only=True)
class MicroBatchSettings(Settings):
    """The settings of a training that may clip micro-batches."""

    micro_batch_size: int = 1  # examples that are clipped together, by their mean; 1 for each by itself


@dataclass(frozen=True)
class AccuracyComparison:
    """Compares the methods on one network and data set, and holds the paper's numbers.

    Args:
        defaults: the paper's settings.
        load: ``load(folder)`` returns the data.
        new_model: returns the network.
        new_optimizer: ``new_optimizer(parameters, lr=...)`` returns the optimizer.
        methods: method -> the paper's numbers.
        trained: number of projections, 0 for exact norms -> the paper's numbers of a training.
        goal: test accuracy to which the paper compares times.
        micro_batches: sizes of the micro-batches with which exact norms are trained as well.
        shorter: rate and epochs of two more trainings, with exact norms and with 30 projections; none if empty.
        quick_epochs: epochs of a quick look's trainings.
        quick_model: the network that a quick look times; None for the same.
        projections: numbers of projections that are timed.
        prefix: the beginning of the names of the methods' rows.
        with_largest: whether the largest batch of each method is searched, which takes long for large networks.
    """

    defaults: Settings
    load: Callable[[str | None], Data]
    new_model: Callable[[], nn.Module]
    new_optimizer: Callable[..., Optimizer]
    methods: Mapping[str, Mapping[str, float]]
    trained: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    goal: float | None = None
    micro_batches: Sequence[int] = ()
    shorter: Mapping[str, float] = field(default_factory=dict)
    quick_epochs: float = 0
    quick_model: Callable[[], nn.Module] | None = None
    projections: Sequence[int] = (1, 5, 10, 30)
    prefix: str = ""
    with_largest: bool = True

    def study(self, *notes: str) -> Study:
        """Returns the study of this comparison; ``notes`` are added to those of all."""
        return Study(
            COLUMNS,
            self.rows,
            (*NOTES, *notes),
            self.defaults,
            self.build_task,
            figures=self.figures,
            findings=self.findings,
            findings_need_all=False,
            numbers_of=self.numbers_of,
        )

    def build_task(self, settings: Settings) -> Task:
        """Returns the data's own split and the network."""
        return task.classification(
            loaded(self.load, settings.data),
            partial(task.seeded, self.new_model, settings.seed),
            settings,
            new_optimizer=partial(self._optimizer, settings.learning_rate),
            private=partial(_arguments, settings),
        )

    def problem(self, data: TensorDataset, batch_size: int | None = None, *, quick: bool = False) -> TimedProblem:
        """Returns what every method trains; a quick look has an eighth of the batch size."""
        settings = self.defaults
        assert settings.noise_multiplier is not None
        return TimedProblem(
            self.quick_model or self.new_model if quick else self.new_model,
            partial(self._optimizer, settings.learning_rate),
            data,
            batch_size or settings.expected_batch_size // (8 if quick else 1),
            settings.clip_norm,
            settings.noise_multiplier,
        )

    def rows(self, quick: bool) -> Sequence[Row]:
        """Returns one row for each method, then the trainings."""
        measured = [
            Computation(self.prefix + name, partial(_numbers, self, name), self._said(name)) for name in self.timed
        ]
        return [*measured, *self.trainings(quick)]

    @property
    def timed(self) -> list[str]:
        """Returns the names of the methods that are timed."""
        projected = {method_name(r) for r in PROJECTIONS} - {method_name(r) for r in self.projections}
        return [name for name in METHODS if name.removesuffix(BY_DOUBLE_VJP) not in projected]

    def _said(self, method: str) -> dict[str, float]:
        """Returns the paper's numbers of a method, with its ratio to the non-private one."""
        numbers = dict(self.methods.get(method, {}))
        if SECONDS in numbers and RATIO not in numbers:
            numbers[RATIO] = numbers[SECONDS] / self.methods["non-private"][SECONDS]
        return numbers

    def trainings(self, quick: bool) -> list[TrainingRow]:
        """Returns the trainings; a quick look has two of them, for a part of an epoch."""
        epochs = self.quick_epochs if quick else self.defaults.epochs
        found = [
            TrainingRow(f"{TRAINED}{method_name(r)}", {"num_projections": r, "epochs": epochs}, paper)
            for r, paper in self.trained.items()
            if not quick or r in (0, 30)
        ]
        if self.shorter and not quick:
            how = "{epochs:g} epochs at rate {learning_rate:g}".format_map(self.shorter)
            found += [
                TrainingRow(f"{TRAINED}{method_name(r)}, {how}", {"num_projections": r, **self.shorter})
                for r in (0, 30)
            ]
        return found + [
            TrainingRow(f"{TRAINED}micro-batches of {size}", {"micro_batch_size": size, "epochs": epochs})
            for size in self.micro_batches[: 1 if quick else None]
        ]

    def numbers_of(self, run: RunFolder) -> Numbers:
        """Returns the number of epochs after which a training first has the goal's accuracy, if it ever has."""
        private = [line for line in run.read_metrics() if line.training == "private"]
        reached = [line.epoch for line in private if self.goal is not None and (line.test_score or 0) >= self.goal]
        return {REACHED: min(reached, default=None)}

    def findings(self, results: Mapping[str, Any]) -> Iterator[str]:
        """Yields the time in which each training reaches the goal, at the measured seconds per epoch."""
        runs = {row["row"]: row["runs"][0] for row in results["rows"]}
        for row in self.trainings(results["quick"]) if self.goal is not None else ():
            numbers = runs[row.name]["numbers"] if row.name in runs else {}
            if REACHED not in numbers:
                continue
            epochs = numbers[REACHED]
            seconds = runs.get(_timed_as(row.name), {"numbers": {}})["numbers"].get(SECONDS)
            if epochs is None:
                yield f"{row.name}: never {self.goal:.0%} in {row.settings['epochs']:g} epochs."
            else:
                time = "" if seconds is None else f", {epochs * seconds:.0f} s at {seconds:.1f} s an epoch"
                yield f"{row.name}: {self.goal:.0%} first after {epochs:g} epochs{time}."

    def figures(self, results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
        """Draws epsilon and accuracy over epochs for each number of projections, and accuracy over time and epsilon.

        Times are those of the methods' rows, which were measured alternately; infinite epsilons are left out.
        """
        found = learning_curves(folder, self.trainings(results["quick"]), results["seeds"][0])
        runs = {row["row"]: row["runs"][0] for row in results["rows"]}
        accuracy = {name: (epochs, 100 * scores) for name, (epochs, scores, _) in found.items()}
        epsilon = {name: (epochs, np.where(np.isfinite(e), e, np.nan)) for name, (epochs, _, e) in found.items()}
        over_time = {name: (x * _seconds_per_epoch(runs, name, x[-1]), y) for name, (x, y) in accuracy.items()}
        price = {name: (epsilon[name][1], y) for name, (_, y) in accuracy.items()}
        return {
            "epsilon": plots.curves_plot(epsilon, title="Certified epsilon", ylabel="epsilon", log_y=True),
            "accuracy": plots.curves_plot(accuracy, title="Accuracy", ylabel=ACCURACY),
            "accuracy-time": plots.curves_plot(
                over_time, title="Accuracy over time", ylabel=ACCURACY, xlabel="seconds"
            ),
            "accuracy-epsilon": plots.curves_plot(
                price, title="Accuracy and its certified price", ylabel=ACCURACY, xlabel="epsilon", log_x=True
            ),
        }

    def _optimizer(self, learning_rate: float, model: nn.Module) -> Optimizer:
        return self.new_optimizer(task.trainable(model), lr=learning_rate)


@lru_cache(maxsize=1)  # unpacking CIFAR-10 takes 12 seconds, and all rows share it
def loaded(load: Callable[[str | None], Data], folder: str | None) -> Data:
    """Returns the data of a folder."""
    return load(folder)


def _seconds_per_epoch(runs: Mapping[str, Any], name: str, epochs: float) -> float:
    """Returns a training's time per epoch: that of its method's row, or its own if the method was not timed."""
    timed = runs.get(_timed_as(name), {"numbers": {}})
    return timed["numbers"].get(SECONDS) or runs[name]["seconds"] / epochs


def _timed_as(training: str) -> str:
    """Returns the name of the row that times the method of a training."""
    method = training.removeprefix(TRAINED).partition(",")[0]
    return method if method in METHODS else f"ours, {method}"


def method_name(num_projections: int) -> str:
    """Returns the name of a method by its number of projections, 0 for exact norms."""
    return f"JL({num_projections})" if num_projections else "exact"


def _arguments(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """Returns the arguments of `PrivateTraining` for norms by projections or micro-batches; none for exact norms."""
    if isinstance(settings, MicroBatchSettings) and settings.micro_batch_size > 1:
        return {"clipping": tp.MicroBatches(settings.clip_norm, settings.micro_batch_size)}
    if not settings.num_projections:
        return {}
    count, few = settings.num_projections, settings.num_projections < 16
    return {"clipping": tp.Sketched(count, clip_norm=settings.clip_norm, not_for_release=few)}


def _numbers(comparison: AccuracyComparison, method: str, context: Context) -> Numbers:
    """Returns one method's numbers; the first call measures all methods."""
    seconds, peaks = _measured(comparison, context)
    if method not in seconds:
        return {}
    numbers: dict[str, Number] = {SECONDS: seconds[method], RATIO: seconds[method] / seconds["non-private"]}
    numbers[MEMORY] = peaks[method] / 2**20
    if comparison.with_largest and method not in LIKE_OTHERS and not context.quick:
        train = loaded(comparison.load, context.data).train  # in memory shared by the processes
        numbers[LARGEST] = largest_that_fits(partial(_try_size, comparison, method, train), LIMIT, len(train))
    return numbers


MEASURED: dict[Any, tuple[dict[str, float], dict[str, int]]] = {}


def _measured(comparison: AccuracyComparison, context: Context) -> tuple[dict[str, float], dict[str, int]]:
    """Measures seconds per epoch and peak bytes of a step for every available method; keeps them for other rows."""
    key = comparison.new_model, context
    if key not in MEASURED:
        problem = comparison.problem(loaded(comparison.load, context.data).train, quick=context.quick)
        budget = 5 if context.quick else 120
        seconds, peaks = measure_steps(problem, comparison.timed, budget, quick=context.quick)
        epoch = len(problem.data) / problem.batch_size
        MEASURED[key] = {name: epoch * of_step for name, of_step in seconds.items()}, peaks
    return MEASURED[key]


def measure_steps(
    problem: TimedProblem,
    names: Sequence[str],
    budget: float,
    *,
    quick: bool,
    clock: Callable[[], float] = perf_counter,
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns seconds and peak bytes of a step of every available method, measured alternately."""
    with without_warnings():  # by our trainings, each of which notices the steps of other methods
        steps = _steps(problem, names, quick=quick)
        seconds = seconds_by_turns(steps, budget, clock)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
    seconds["vanilla"] = vanilla_seconds({only: seconds.pop(f"vanilla {only}") for only in FEW}, problem.batch_size)
    peaks["vanilla"] = peaks[f"vanilla {FEW[0]}"]
    return seconds, peaks


def _steps(problem: TimedProblem, timed: Sequence[str], *, quick: bool) -> dict[str, Step]:
    """Returns every available method's step; that of vanilla twice, with few backward passes."""
    makers = {f"vanilla {only}": partial(vanilla, only=only) for only in FEW}
    makers |= {name: METHODS[name] for name in timed if name != "vanilla"}
    steps: dict[str, Step] = {}
    for name, maker in makers.items():
        if quick and name in LIKE_OTHERS:
            continue
        try:
            step = maker(problem)
            step()
        except UNAVAILABLE:
            continue
        steps[name] = step
    return steps


def _try_size(comparison: AccuracyComparison, method: str, data: TensorDataset, size: int) -> None:
    """Makes three steps with a batch size; raises an error if memory does not suffice."""
    problem = comparison.problem(data, size)
    step = UNSPLIT[method](problem)
    try:
        for _ in range(3):
            step()
    except tp.Refused as error:  # vmap raises it where memory does not suffice
        raise MemoryError(str(error)) from error


def learning_curves(folder: Path, trainings: Sequence[TrainingRow], seed: int) -> dict[str, tuple[Array, Array, Array]]:
    """Returns the epochs, test scores and certified epsilons of each training."""
    found = {}
    for row in trainings:
        metrics = RunFolder(rows_folder(folder) / folder_name(row.name, seed)).read_metrics()
        private = [line for line in metrics if line.training == "private"]
        columns = zip(*((line.epoch, line.test_score, line.epsilon_high) for line in private), strict=True)
        found[row.name] = tuple(np.array(column, float) for column in columns)
    return found
