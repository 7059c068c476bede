# SPDX-License-Identifier: Apache-2.0
"""Unwraps Accelerate's optimizer and scheduler, and refuses to write keys into its checkpoints."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ..support.validate import Refused


def without_accelerate(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """Returns the optimizer and the scheduler that ``Accelerator.prepare`` has wrapped; others as they are.

    The wrappers count accumulated gradients and skipped steps; a private step has neither.

    Raises:
        Refused: the wrapper scales losses (float16), or belongs to DeepSpeed or another engine.
    """
    kind = type(optimizer)
    if any(base.__module__ == "accelerate.optimizer" for base in kind.__mro__):
        if kind.__module__ != "accelerate.optimizer":
            raise Refused(
                f"PrivateTraining: {kind.__name__} of Accelerate steps in its own way. Prepare the model with plain "
                "DDP or FSDP version 2, and make the optimizer over the prepared model's parameters."
            )
        if optimizer.scaler is not None:
            raise Refused(
                "PrivateTraining: the Accelerator scales losses (mixed_precision='fp16'). Use "
                "Accelerator(mixed_precision='bf16') or 'no'."
            )
        optimizer = optimizer.optimizer
    if type(scheduler).__module__ == "accelerate.scheduler":
        scheduler = scheduler.scheduler  # the wrapper takes one step for each rank
    return optimizer, scheduler


def check_not_for_accelerate(caller: FrameType | None) -> None:
    """Refuses to give the secret state to ``Accelerator.save_state``: its folder holds models for others to load."""
    if caller is not None and caller.f_globals.get("__name__") == "accelerate.checkpointing":
        raise Refused(
            "PrivateTraining: register_for_checkpointing(training) would write the keys of noise and batches into the "
            "folder of save_state. Leave it out, and call tp.save_secret(training, path) after save_state."
        )
