# SPDX-License-Identifier: Apache-2.0
"""What the experiments of the DP-SGD-JL papers share: time, memory and largest batch of each method; trainings.

Every method is timed in one process, by turns. Vanilla is timed on few of its backwards, whose number the rest of its
time is proportional to. Memory is what tensors take; the largest batch is the largest of 64, 128, 256, ... whose step
ends under a limit of 2 GiB that the system enforces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.data import Data
from torch_privacy.experiments.papers.bu2021.measure import Step, largest_that_fits, peak_bytes, seconds_by_turns
from torch_privacy.experiments.papers.bu2021.methods import (
    Maker,
    Problem,
    multiple,
    non_private,
    ours,
    outer_product,
    vanilla,
    vanilla_seconds,
)
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.privacy.bracket import Array
from torch_privacy.report import figures as plots
from torch_privacy.runs.folder import RunFolder
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    EXACT,
    PRIVACY_COLUMNS,
    SCORE,
    Column,
    Computation,
    Context,
    Number,
    Numbers,
    Row,
    Training,
    folder_name,
    rows_folder,
)

SECONDS, RATIO, MEMORY, LARGEST = "seconds_per_epoch", "ratio", "peak_mib", "largest_batch"
COLUMNS = {
    SECONDS: Column("s / epoch", digits=1),
    RATIO: Column("x non-private", digits=2),
    MEMORY: Column("peak MiB", digits=0),
    LARGEST: Column("largest batch", digits=0),
    SCORE: ACCURACY_COLUMN,
    EXACT: PRIVACY_COLUMNS[EXACT],
}
NOTES = (
    "Times of the paper are of a P100 GPU; compare the ratios.",
    "Vanilla: one backward for each example. Multiple: vmap, 256 MiB of rows at a time. Outer product: Opacus, with "
    "its own layer for an LSTM. JL(r): r projections.",
    "Largest batch: of 64, 128, 256, ... the largest that ends within 2 GiB beyond the loaded program; none is split, "
    "so multiple has all rows at once here.",
    "JL with fewer than 16 projections gives no privacy to speak of: the epsilons are certified, and so large.",
)
PROJECTIONS = 1, 5, 10, 30
FEW = 2, 6  # backwards by which vanilla is timed
LIMIT = 2**31
ACCURACY = "test accuracy (%)"
METHODS: dict[str, Maker] = {
    "non-private": non_private,
    "vanilla": vanilla,
    "multiple": multiple,
    "outer product": outer_product,
    "ours, exact": partial(ours, 0),
    **{f"JL({r})": partial(ours, r) for r in PROJECTIONS},
}
UNSPLIT = METHODS | {"vanilla": partial(vanilla, only=1), "multiple": partial(multiple, at_once=True)}
TRAINED = "trained, "
LIKE_OTHERS = "JL(5)", "JL(30)"  # these take what JL(10) takes


@dataclass(frozen=True)
class Settings:
    """What each of the experiments fills in."""

    noise_multiplier: float | None = None  # None with a target_epsilon, and only then
    target_epsilon: float | None = None
    delta: float = 1e-5
    expected_batch_size: int = 256
    learning_rate: float = 0.1
    clip_norm: float = 1.0
    epochs: float = 1
    num_projections: int = 0  # 0 for exact norms
    seed: int = 0  # public: the initial weights; never the noise
    baseline: bool = False
    data: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One of the experiments: what it trains, and the paper's numbers.

    Args:
        settings: the paper's, as defaults.
        load: folder or None -> the data.
        new_model: the network.
        new_optimizer: (parameters, lr=) -> the optimizer.
        methods: method -> the paper's numbers.
        trained: number of projections, 0 for exact norms -> the paper's numbers of a training.
        quick_epochs: of a quick look.
        quick_model: what a quick look times in the network's place; None for the same.
        projections: numbers of them that are timed.
        prefix: what the names of the methods' rows begin with.
    """

    settings: Callable[..., Settings]
    load: Callable[[str | None], Data]
    new_model: Callable[[], nn.Module]
    new_optimizer: Callable[..., Optimizer]
    methods: Mapping[str, Mapping[str, float]]
    trained: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    quick_epochs: float = 0
    quick_model: Callable[[], nn.Module] | None = None
    projections: Sequence[int] = PROJECTIONS
    prefix: str = ""

    def build_task(self, settings: Settings) -> Task:
        """The data's own split, and the network to be trained on it."""
        data = loaded(self.load, settings.data)
        return Task(
            train=data.train,
            test=data.test,
            new_model=partial(seeded, self.new_model, settings.seed),
            new_optimizer=partial(self._optimizer, settings.learning_rate),
            losses=partial(F.cross_entropy, reduction="none"),
            private=partial(_arguments, settings.num_projections),
            not_covered=data.not_covered,
            data_files=data.files,
        )

    def problem(self, data: TensorDataset, batch_size: int | None = None, *, quick: bool = False) -> Problem:
        """What every method trains. A quick look takes an eighth of the batch."""
        settings = self.settings()
        assert settings.noise_multiplier is not None
        return Problem(
            self.quick_model or self.new_model if quick else self.new_model,
            partial(self._optimizer, settings.learning_rate),
            data,
            batch_size or settings.expected_batch_size // (8 if quick else 1),
            settings.clip_norm,
            settings.noise_multiplier,
        )

    def rows(self, quick: bool) -> Sequence[Row]:
        """One row for each method, then the trainings."""
        measured = [
            Computation(self.prefix + name, partial(_numbers, self, name), self._said(name)) for name in self.timed
        ]
        return [*measured, *self.trainings(quick)]

    @property
    def timed(self) -> list[str]:
        """The methods, by name."""
        projected = {method_name(r) for r in PROJECTIONS} - {method_name(r) for r in self.projections}
        return [name for name in METHODS if name not in projected]

    def _said(self, method: str) -> dict[str, float]:
        """The paper's numbers of a method, and its ratio to the one without privacy."""
        numbers = dict(self.methods.get(method, {}))
        if SECONDS in numbers:
            numbers[RATIO] = numbers[SECONDS] / self.methods["non-private"][SECONDS]
        return numbers

    def trainings(self, quick: bool) -> list[Training]:
        """With exact norms and by projections; a quick look makes a part of an epoch of two of them."""
        epochs = self.quick_epochs if quick else self.settings().epochs
        return [
            Training(f"{TRAINED}{method_name(r)}", {"num_projections": r, "epochs": epochs}, paper)
            for r, paper in self.trained.items()
            if not quick or r in (0, 30)
        ]

    def figures(self, results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
        """Epsilon and accuracy over epochs for each number of projections, and accuracy over time and over epsilon.

        Time is that of the methods' rows, whose methods took turns; an infinite epsilon has no place.
        """
        found = courses(folder, self.trainings(results["quick"]), results["seeds"][0])
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
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        return self.new_optimizer(trained, lr=learning_rate)


@lru_cache(maxsize=1)  # unpacking photographs takes 12 seconds, and all rows share them
def loaded(load: Callable[[str | None], Data], folder: str | None) -> Data:
    """The data of a folder."""
    return load(folder)


def _seconds_per_epoch(runs: Mapping[str, Any], name: str, epochs: float) -> float:
    """Of a training: as its method was timed, or as it took itself where that was not."""
    method = name.removeprefix(TRAINED)
    timed = runs.get(method if method in METHODS else f"ours, {method}", {"numbers": {}})
    return timed["numbers"].get(SECONDS) or runs[name]["seconds"] / epochs


def method_name(num_projections: int) -> str:
    """What training by so many projections is called; 0 are exact norms."""
    return f"JL({num_projections})" if num_projections else "exact"


def _arguments(num_projections: int, model: nn.Module) -> dict[str, Any]:
    """Further arguments of `PrivateTraining`: norms by so many projections, or exactly with 0 of them."""
    if not num_projections:
        return {}
    return {"jacobian": tp.Sketched(num_projections), "not_for_release": num_projections < 16}


def _numbers(experiment: Experiment, method: str, context: Context) -> Numbers:
    """One method's row: of all methods, timed together once."""
    seconds, peaks = _measured(experiment, context)
    if method not in seconds:
        return {}
    numbers: dict[str, Number] = {SECONDS: seconds[method], RATIO: seconds[method] / seconds["non-private"]}
    numbers[MEMORY] = peaks[method] / 2**20
    if (method not in LIKE_OTHERS or LARGEST in experiment.methods.get(method, {})) and not context.quick:
        train = loaded(experiment.load, context.data).train  # in memory that the processes share
        numbers[LARGEST] = largest_that_fits(partial(_try_size, experiment, method, train), LIMIT, len(train))
    return numbers


MEASURED: dict[Any, tuple[dict[str, float], dict[str, int]]] = {}


def _measured(experiment: Experiment, context: Context) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds per epoch, and bytes at the peak of a step, of every method that can be had; kept for the next row."""
    key = experiment.new_model, context
    if key not in MEASURED:
        problem = experiment.problem(loaded(experiment.load, context.data).train, quick=context.quick)
        steps = _steps(problem, experiment.timed, quick=context.quick)
        seconds = seconds_by_turns(steps, budget=5 if context.quick else 120)
        seconds["vanilla"] = vanilla_seconds({only: seconds.pop(f"vanilla {only}") for only in FEW}, problem.batch_size)
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        peaks["vanilla"] = peaks[f"vanilla {FEW[0]}"]
        epoch = len(problem.data) / problem.batch_size
        MEASURED[key] = {name: epoch * of_step for name, of_step in seconds.items()}, peaks
    return MEASURED[key]


def _steps(problem: Problem, timed: Sequence[str], *, quick: bool) -> dict[str, Step]:
    """Every method's step; that of vanilla twice, with few backwards. One that cannot be had is left out."""
    makers = {f"vanilla {only}": partial(vanilla, only=only) for only in FEW}
    makers |= {name: METHODS[name] for name in timed if name != "vanilla"}
    steps: dict[str, Step] = {}
    for name, maker in makers.items():
        if quick and name in LIKE_OTHERS:
            continue
        try:
            step = maker(problem)
            step()
        except (ModuleNotFoundError, tp.Refused, RuntimeError, NotImplementedError, MemoryError):
            continue  # Opacus is not installed, or the method does not take this network, or not as many rows
        steps[name] = step
    return steps


def _try_size(experiment: Experiment, method: str, data: TensorDataset, size: int) -> None:
    """Some steps with a batch size; raises where memory runs out."""
    problem = experiment.problem(data, size)
    step = UNSPLIT[method](problem)
    try:
        for _ in range(3):
            step()
    except tp.Refused as error:  # vmap says so of memory, too
        raise MemoryError(str(error)) from error


def courses(folder: Path, trainings: Sequence[Training], seed: int) -> dict[str, tuple[Array, Array, Array]]:
    """Epochs, test scores and certified epsilons of each training."""
    found = {}
    for row in trainings:
        metrics = RunFolder(rows_folder(folder) / folder_name(row.name, seed)).read_metrics()
        private = [line for line in metrics if line.training == "private"]
        columns = zip(*((line.epoch, line.test_score, line.epsilon_high) for line in private), strict=True)
        found[row.name] = tuple(np.array(column, float) for column in columns)
    return found
