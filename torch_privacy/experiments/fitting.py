# SPDX-License-Identifier: Apache-2.0
"""Makes the training of a task, and computes its losses and scores."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.experiments.task import Settings, Task, num_units, number_of_steps
from torch_privacy.privacy.summary import Releases, summarize
from torch_privacy.runs.folder import RunFolder
from torch_privacy.sampling.batches import Batches, split
from torch_privacy.support.ranks import Ranks, communicating, num_processes

TEST_BATCH_SIZE = 4096


def new_parts(task: Task, num_steps: int) -> tuple[nn.Module, Optimizer, LRScheduler | None]:
    """Returns a new network, its optimizer and its learning-rate scheduler."""
    model = task.new_model().to(task.device)
    optimizer = task.new_optimizer(model)
    return model, optimizer, None if task.new_scheduler is None else task.new_scheduler(optimizer, num_steps)


def wrapped_for_ranks(model: nn.Module) -> nn.Module:
    """Returns the network, wrapped in ``DistributedDataParallel`` if there are several processes."""
    if num_processes() == 1:
        return model
    with communicating("train"):
        return DistributedDataParallel(model)


def new_training(
    settings: Settings, task: Task, run_folder: RunFolder | None, projections: int = 0
) -> tp.PrivateTraining:
    """Returns the private training of a task; with ``projections`` norms are estimated, for data without protection.

    In several processes every rank calls it, and gets the training of a replica.
    """
    num_steps = number_of_steps(settings, num_units(task))
    model, optimizer, scheduler = new_parts(task, num_steps)
    arguments: dict[str, Any] = {
        "clipping": tp.Flat(clip_norm=settings.clip_norm),
        "noise_multiplier": settings.noise_multiplier,
        "target_epsilon": settings.target_epsilon,
        **task.private(model),
    }
    budget = arguments.pop("budget", None)  # a table's, which is bound to its rows
    if run_folder is None:  # only to price it
        budget = None
    elif settings.budget is not None and budget is None:
        budget = _opened(settings.budget)
    if projections:
        arguments["clipping"] = _sketched(projections, arguments["clipping"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="delta=")  # the papers' delta is close to 1/n for some data
        return tp.PrivateTraining(
            wrapped_for_ranks(model),
            optimizer,
            tp.Examples(task.train, views=task.views, budget=budget, **task.owners),
            expected_batch_size=settings.expected_batch_size,
            num_steps=num_steps,
            delta=settings.delta,
            scheduler=scheduler,
            run_folder=run_folder,
            **arguments,
        )


def _opened(path: str) -> privacy.DataBudget:
    """Returns the budget of the data, which rank 0 alone opens."""
    ranks = Ranks.here()
    with ranks.together("opens the budget"):
        budget = privacy.Budget.open(path) if ranks.is_first else None
    return ranks.from_first(budget)


def _sketched(projections: int, clipping: Any) -> tp.Sketched:
    """Returns clipping by estimated norms in place of a rule with one bound."""
    if not isinstance(clipping, (tp.Flat, tp.Sketched)):
        raise ValueError(
            f"search: norms cannot be estimated for clipping={clipping!r}. Take --projections 0, for exact norms."
        )
    return tp.Sketched(projections, clip_norm=clipping.clip_norm, not_for_release=True)


def new_average(task: Task, model: nn.Module, optimizer: Optimizer) -> tp.MovingAverage | None:
    """Returns the moving average of the weights, or None if the task has none."""
    return None if task.average is None else tp.MovingAverage(model, optimizer, task.average)


def losses_and_scores(task: Task, model: nn.Module, batch: Any, views: int = 1) -> tuple[Tensor, Tensor]:
    """Returns a training batch's losses, (n,) or (n, views), and the score of every view, after augmentation."""
    inputs, targets = _moved(batch, task.device)
    outputs = model(inputs if task.augment is None else task.augment(inputs))
    losses, scores = task.losses(outputs, targets), task.score.of_each(outputs.detach(), targets)
    return losses if views == 1 else losses.view(-1, views), scores


def releases_of(training: tp.PrivateTraining, num_steps: int) -> Releases:
    """Returns what a training has released after ``num_steps`` steps, prior releases included."""
    return [*((release.event, 1) for release in training.settings.prior_releases), (training.event, num_steps)]


def check_priced(ranks: Ranks, settings: Settings, task: Task) -> None:
    """Raises a ``ValueError`` before training if no epsilon can be computed for these settings."""
    training = new_training(settings, task, None)

    def price() -> None:
        try:
            steps_of_an_epoch = max(1, round(training.settings.num_steps / max(1, settings.epochs)))
            privacy.compose(releases_of(training, steps_of_an_epoch)).epsilon(settings.delta)
            summarize(releases_of(training, training.settings.num_steps), settings.delta)
        except (ArithmeticError, ValueError) as error:
            raise ValueError(
                f"train: no epsilon can be computed for the noise multiplier {settings.noise_multiplier!r} with "
                f"batches of {settings.expected_batch_size} examples ({str(error).rstrip('.')}). Use another noise "
                "multiplier."
            ) from None

    ranks.first_does("computes epsilon", price)


def test_score(task: Task, model: nn.Module) -> float:
    """Returns the score over all test examples; several ranks share them, and all get the score."""
    ranks = Ranks.here()
    was_training = model.training
    with ranks.together("computes the test score"), torch.no_grad():
        model.eval()
        parts = split(np.arange(length(task.test)), TEST_BATCH_SIZE)[ranks.rank :: ranks.size]
        batches = (_moved(batch, task.device) for batch in Batches(task.test, None, 0).plain(parts))
        scores = [task.score.of_each(model(x), y) for x, y in batches]
        model.train(was_training)
    if ranks.size > 1:
        scores = [score for of_rank in ranks.gather([score.cpu() for score in scores]) for score in of_rank]
    return task.score.of_mean(float(torch.cat(scores).mean()))


def _moved(batch: Any, device: str) -> tuple[Any, Tensor]:
    inputs, targets = batch
    moved = tuple(part.to(device) for part in inputs) if isinstance(inputs, (tuple, list)) else inputs.to(device)
    return moved, targets.to(device)


def length(dataset: Dataset[Any]) -> int:
    """Returns the number of examples."""
    return len(dataset)  # pyright: ignore[reportArgumentType]  # map-style data sets have a length
