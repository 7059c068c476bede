# SPDX-License-Identifier: Apache-2.0
"""Refuses what a ``PrivateTrainer`` cannot be, and warns where its noise leaves nothing to learn from."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection
from typing import Any

from transformers import Trainer

from ..support.validate import Refused
from ..training import PrivateTraining
from ..training.old_spelling import hint_for
from .arguments import ALLOWED, WHERE

LOG = logging.getLogger(__name__)
CURES = {  # trainer of TRL -> what to do
    "SFT": "Tokenize the texts yourself, with the label -100 on the prompt, and pass them to PrivateTrainer with "
    "TrainingArguments and peft.get_peft_model(...): the loss is the one of SFT, for each example",
    "DPO": "Override PrivateTrainer.losses(model, inputs) with the loss of each pair, (n,), and compute the log "
    "probabilities of the reference model before the training",
}
USUAL_CURE = "Override PrivateTrainer.losses(model, inputs), which returns the loss of each example, (n,)"


def refuse_trl(trainer: type, args: Any) -> None:
    """Refuses a trainer or a configuration of TRL, with the way to the same loss."""
    kinds = [*trainer.__mro__, *type(args).__mro__]
    found = next((kind.__name__ for kind in kinds if kind.__module__.split(".")[0] == "trl"), None)
    if found is None:
        return
    cure = next((cure for name, cure in CURES.items() if found.startswith(name)), USUAL_CURE)
    raise Refused(
        f"{WHERE}: {found} of TRL: its loss is a mean over the tokens of all examples of a batch, and its options for "
        f"templates, truncation and masks would not be kept. {cure}. docs/huggingface.md has both programs."
    )


def refuse_misplaced(named: Collection[str]) -> None:
    """Refuses keywords of the private training that were given beside ``privacy=``, and unknown ones near them."""
    for name in set(named) - set(inspect.signature(Trainer.__init__).parameters):
        if name in ALLOWED:
            raise TypeError(f"{WHERE}: {name}= belongs into privacy=dict({name}=...).")
        if hint := hint_for(name, ()):
            raise TypeError(f"{WHERE}: {name}= is no argument of Trainer{hint}, in privacy=dict(...).")


def swamped_by(training: PrivateTraining) -> float | None:
    """Returns how many times as long as the largest possible sum of gradients the sum of all noise is; None if unknown.

    Over T steps the sum of clipped gradients is at most ``T B S`` long, with B the expected batch size and S the
    sensitivity, and the noise has the expected length ``S sqrt(p Σ σ_t²)`` in p trained numbers. Above 1 even gradients
    that all agree are shorter than the noise.
    """
    settings = training.settings
    if training.clipping is None:  # GEP: noise in few directions
        return None
    trained = sum(p.numel() for group in training.optimizer.param_groups for p in group["params"] if p.requires_grad)
    variance = sum(settings.noise_at(step) ** 2 for step in range(settings.num_steps))
    return math.sqrt(trained * variance) / (settings.num_steps * settings.expected_batch_size)


def warn_if_swamped(training: PrivateTraining) -> None:
    """Logs a warning if the noise of all steps is longer than all gradients together can be."""
    times = swamped_by(training)
    if times is not None and times > 1:
        LOG.warning(
            "%s: noise swamps the signal. Summed over all %d steps, the noise is %.1f times as long as the largest "
            "possible sum of gradients, so that little can be learnt. Train fewer parameters (LoRA, the head alone), "
            "raise the batch size, take more steps or more examples, or allow a larger epsilon: torch-privacy plan "
            "shows what each is worth.",
            WHERE,
            training.settings.num_steps,
            times,
        )
