# SPDX-License-Identifier: Apache-2.0
"""Refuses settings of a ``Trainer``, a module or a loader that a private training cannot keep."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from ..sampling.datasets import check_map_style
from ..sampling.examples import Examples
from ..sampling.shared_examples import share_examples
from ..support.validate import Refused

WHERE = "PrivateFit"
HOOKS_OF_STEPS = (  # a private step has no place for them
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)
REFUSED_CALLBACKS = {  # with the cure; a subclass is refused, too
    "BatchSizeFinder": "it trains on the data to try batch sizes; "
    "set performance=Performance(microbatch_size=...) of PrivateFit",
    "LearningRateFinder": "it trains on the data to try learning rates; search on public data, or with "
    "tp.search_privately",
    "ModelPruning": "it changes the weights between steps; prune the trained model, and save that",
    "SpikeDetection": "it ends the training by exact training losses, which its checkpoints hold, too; leave it out",
    "StochasticWeightAveraging": "it changes the weights between steps; use tp.MovingAverage in configure_optimizers",
    "WeightAveraging": "it changes the weights between steps; use tp.MovingAverage in configure_optimizers",
}


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuses what would make a step of its own, or change a private one.

    Raises:
        Refused: names it and the cure.
    """
    if not isinstance(trainer, Trainer):
        raise Refused(
            f"{WHERE}: the Trainer is one of {type(trainer).__module__.split('.')[0]}. Import Trainer and "
            "LightningModule from lightning.pytorch, of the package lightning."
        )
    if not module.automatic_optimization:
        raise Refused(
            f"{WHERE}: {type(module).__name__}.automatic_optimization is False, so that training_step would step "
            "optimizers itself. Set it to True and return losses (n,), or write the loop over tp.PrivateTraining "
            "without a Trainer."
        )
    strategy = trainer.strategy
    if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise Refused(
            f"{WHERE}: strategy {type(strategy).__name__} steps or shards in its own way. Use one device or "
            "strategy='ddp'; for sharded models write the loop over tp.PrivateTraining with fully_shard (FSDP2)."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise Refused(f"{WHERE}: precision '16-mixed' scales the losses. Use precision='bf16-mixed' or '32-true'.")
    _check_numbers(trainer)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise Refused(f"{WHERE}: training_step(dataloader_iter) fetches batches itself. Take (batch, batch_idx).")
    for holder in (module, *_callbacks(trainer)):
        kind = Callback if isinstance(holder, Callback) else LightningModule
        own = [name for name in HOOKS_OF_STEPS if hasattr(kind, name) and is_overridden(name, holder, kind)]
        if own:
            raise Refused(
                f"{WHERE}: {type(holder).__name__} defines {', '.join(own)}, and a private step calls none: "
                "PrivateTraining computes, clips and releases the gradient and steps the optimizer. Remove them; "
                "clip with clipping=, and watch norms with callbacks=[tp.LoggingCallback()]."
            )


def _check_numbers(trainer: Trainer) -> None:
    cures = {
        "accumulate_grad_batches": (
            1,
            "Raise expected_batch_size of PrivateFit; for memory pass performance=Performance(...)",
        ),
        "gradient_clip_val": (None, "It would rescale the noise. Clipping is that of clipping= of PrivateFit"),
        "overfit_batches": (0, "It repeats the same batches. Pass a Subset of the data set, with its own epsilon"),
        "reload_dataloaders_every_n_epochs": (0, "Data must stay the same in a private training"),
    }
    for name, (plain, cure) in cures.items():
        value = getattr(trainer, name)
        if value != plain and not (value is not None and not value and not plain):  # 0 clips nothing
            raise Refused(f"{WHERE}: Trainer({name}={value!r}) must be left out. {cure}.")


def _callbacks(trainer: Trainer) -> list[Callback]:
    """Returns the other callbacks; refuses those that would train or move weights."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in found:
        for kind in type(callback).__mro__:
            if kind.__name__ in REFUSED_CALLBACKS:
                raise Refused(f"{WHERE}: {kind.__name__} cannot be used: {REFUSED_CALLBACKS[kind.__name__]}.")
        if isinstance(callback, GradientAccumulationScheduler) and callback.scheduling != {0: 1}:
            raise Refused(f"{WHERE}: GradientAccumulationScheduler must be left out. Raise expected_batch_size.")
    return [c for c in found if type(c).__name__ not in (WHERE, "GradientAccumulationScheduler")]


def steering_metrics(trainer: Trainer) -> set[str]:
    """Returns the names of metrics by which callbacks and schedulers steer, or by which checkpoints are called."""
    stops: list[Any] = [c for c in trainer.callbacks if isinstance(c, EarlyStopping | ModelCheckpoint)]  # type: ignore[attr-defined]
    plateaus = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    called = [
        name for callback in stops for name in re.findall(r"\{(.*?)[:}]", getattr(callback, "filename", "") or "")
    ]
    metrics = {name for name in [*(callback.monitor for callback in stops), *plateaus, *called] if name is not None}
    return metrics - {"epoch", "step"}


def validates_on(trainer: Trainer, dataset: Dataset, steering: Collection[str]) -> bool:
    """True if a validation loader holds examples of the training data, so that its scores are exact numbers of these.

    Raises:
        Refused: some of these scores would steer.
    """
    loaders = trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    shares = any(share_examples(loader.dataset, dataset) for loader in loaders if isinstance(loader, DataLoader))
    if shares and steering:
        raise Refused(
            f"{WHERE}: a validation loader holds examples of the training data, and {', '.join(sorted(steering))} "
            "steers the training or the choice of a checkpoint, or is in its name: a release without noise. Validate "
            "on other data, or leave the choice out."
        )
    return shares


def examples_in(loader: Any) -> Examples:
    """Returns the examples of a train loader, or of a data set without a loader; `Examples` as they are.

    Raises:
        Refused: several loaders, data that are not map-style, or settings of the loader that would be lost.
    """
    if isinstance(loader, Examples):
        return loader
    if not isinstance(loader, DataLoader):
        if not (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")) or isinstance(
            loader, dict | list | tuple
        ):
            raise Refused(
                f"{WHERE}: the train data are {type(loader).__name__}. Give one DataLoader or one map-style data set, "
                "of which an item is an example."
            )
        check_map_style(loader, f"{WHERE}: train data")
        return Examples(loader)
    check_map_style(loader.dataset, f"{WHERE}: train DataLoader")
    if loader.batch_size is None and type(loader.batch_sampler) is not BatchSampler:
        raise Refused(
            f"{WHERE}: the train DataLoader has batch_size=None or a batch_sampler of its own, so that an item may be "
            "a batch, or sampling not that of all examples. Batches are drawn by PrivateFit: give a loader without "
            "them; its data set has one example per item."
        )
    sampler = loader.sampler
    plain = type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    if not plain or getattr(sampler, "replacement", False) or len(sampler) != _of_rank(sampler, len(loader.dataset)):  # type: ignore[arg-type]
        raise Refused(
            f"{WHERE}: sampler {type(sampler).__name__} of the train DataLoader chooses or weights examples, but "
            "private batches are Poisson samples, each example with the same probability. Leave it out; choose "
            "examples by torch.utils.data.Subset."
        )
    if loader.worker_init_fn is not None:
        raise Refused(f"{WHERE}: worker_init_fn of the train DataLoader is not called. Leave it out.")
    return Examples(loader.dataset, collate_fn=loader.collate_fn, num_workers=loader.num_workers)


def _of_rank(sampler: Any, num_examples: int) -> int:
    """Returns how many examples a plain sampler gives."""
    return -(-num_examples // sampler.num_replicas) if isinstance(sampler, DistributedSampler) else num_examples
