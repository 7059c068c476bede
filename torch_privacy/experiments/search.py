# SPDX-License-Identifier: Apache-2.0
"""Tries an experiment's settings on stand-in data that need no protection: synthetic or public ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

import torch_privacy as tp
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.fitting import losses_and_scores, new_average, new_training, test_score
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Settings, Task, check_numbers, check_settings, num_units
from torch_privacy.privacy import PlannedTraining
from torch_privacy.support import validate as _check
from torch_privacy.training.machine import number_of_threads
from torch_privacy.training.weights import has_diverged

TRIED = ("learning_rate", "clip_norm", "expected_batch_size")

Candidate = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A candidate and its score on stand-in data; larger is better."""

    candidate: Candidate
    score: float


def grid(tried: Mapping[str, Sequence[Any]], most: int | None, seed: int) -> list[Candidate]:
    """Returns every combination of the values, or ``most`` of them at random; leaves out settings without values.

    Example:
        >>> grid({"learning_rate": [0.1, 0.2], "clip_norm": [1.0]}, None, 0)
        [{'learning_rate': 0.1, 'clip_norm': 1.0}, {'learning_rate': 0.2, 'clip_norm': 1.0}]
    """
    names = [name for name in TRIED if tried.get(name)]
    candidates = [dict(zip(names, values, strict=True)) for values in product(*(tried[name] for name in names))]
    if most is None:
        return candidates
    _check.whole("search", at_least=1, tries=most)
    _check.whole("search", seed=seed)
    chosen = np.random.default_rng(seed).choice(len(candidates), min(most, len(candidates)), replace=False)
    return [candidates[k] for k in sorted(chosen)]


def on_stand_in(
    experiment: str, candidates: Sequence[Candidate], *, projections: int, folder: str | None = None, **fixed: Any
) -> Iterator[Trial]:
    """Trains with one candidate after the other on data that need no protection, and yields each one's test score.

    Args:
        experiment: name of the experiment.
        candidates: settings to try.
        projections: number of random projections that estimate norms (see ``Sketched``); 0 for exact norms.
        folder: public data in the experiment's format; None for synthetic data, if the experiment has some.
        fixed: settings of all candidates.
    """
    study, build = _on_stand_in("search", experiment, folder)
    for candidate in candidates:
        settings = study.settings(**{**fixed, **candidate, "data": folder})
        task = build(settings)
        check_numbers(settings)
        check_settings(settings, len(task.train))  # pyright: ignore[reportArgumentType]
        yield Trial(candidate, rank(task, trained(settings, task, projections=projections)))


def _on_stand_in(command: str, experiment: str, folder: str | None) -> tuple[Study, Callable[[Any], Task]]:
    """Returns an experiment, and what makes its task of data that need no protection."""
    study = load_trainable(experiment, command)
    build = study.task if folder is not None else study.build_stand_in
    if build is None:
        raise ValueError(
            f"{command}: {experiment} has no synthetic data to try settings on. Use public data in the same format, "
            f"with {'--on public and ' if command == 'search' else ''}--stand-in DIR."
        )
    return study, build


def best_of(trials: Sequence[Trial]) -> Trial:
    """Returns the trial with the highest score, the first of equals."""
    return max(trials, key=lambda trial: trial.score)


def trained(settings: Settings, task: Task, projections: int = 0) -> tp.PrivateTraining:
    """Trains privately without writing files, to the end or until it has diverged, which ranks lowest.

    With projections norms are estimated, on public data alone.
    """
    with number_of_threads(task.num_threads):
        steps = _steps(settings, task, projections)
        training, network = next(steps)
        while not has_diverged(training.model):  # released weights show it; a further step may be refused
            if (further := next(steps, None)) is None:
                training.model.load_state_dict(network.state_dict())
                break
            training, network = further
    return training


def _steps(settings: Settings, task: Task, projections: int = 0) -> Iterator[tuple[tp.PrivateTraining, nn.Module]]:
    """Yields the training after each step, and the network to score: the trained one, or its moving average."""
    torch.manual_seed(settings.seed)
    training = new_training(settings, task, None, projections)
    average = new_average(task, training.model, training.optimizer)
    network = training.model if average is None else average.model
    for batches in training.steps():
        for batch in batches:
            training.step(losses_and_scores(task, training.model, batch, task.views)[0])
        yield training, network


def simulated(
    experiment: str, planned: PlannedTraining, expected_batch_size: int, *, folder: str | None = None, **fixed: Any
) -> Iterator[tuple[int, float]]:
    """Trains a planned training with a small batch and the same total noise, and yields steps and test scores.

    There are ten scores, at equal distances, the last one after the last step.

    Args:
        experiment: name of the experiment that is like the training.
        planned: steps, batch and noise.
        expected_batch_size: of the simulation, at most the planned one.
        folder: as in `on_stand_in`.
        fixed: further settings.
    """
    small = planned.small(expected_batch_size)
    study, build = _on_stand_in("plan", experiment, folder)
    task = build(study.settings(**{**fixed, "data": folder}))
    n = num_units(task)
    epochs = small.pop("num_steps") * expected_batch_size / n
    settings = study.settings(**{**fixed, **small, "epochs": epochs, "data": folder})
    check_settings(settings, n)
    due = {round(part * planned.num_steps / 10) for part in range(1, 11)}
    with number_of_threads(task.num_threads):
        for training, network in _steps(settings, task):
            if training.step_count in due:
                yield training.step_count, test_score(task, network)


def rank(task: Task, training: tp.PrivateTraining) -> float:
    """Returns the test score with the sign that makes larger better; -inf unless it is finite and weights are."""
    if has_diverged(training.model):
        return -np.inf
    score = test_score(task, training.model)
    score = score if task.score.measure.larger_is_better else -score
    return score if np.isfinite(score) else -np.inf
