# SPDX-License-Identifier: Apache-2.0
"""Makes the content of ``settings.json`` of a training in a loop of one's own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ..mechanisms.base import summary_of
from .loop_checks import plain
from .saved_model import without_wrapper
from .settings import TrainingSettings

LONGEST_NAME, LONGEST_SETTING = 200, 10_000  # characters


def settings_of(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    dataset: Dataset,
    trained: Mapping[str, Tensor],
    settings: TrainingSettings,
    fixed: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the content of ``settings.json``; ``fixed`` is what a resumed training must share."""
    groups = [
        ", ".join(f"{key}={plain(value)!r}" for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    ]
    numbers = settings.recorded()
    for name in ("noise_schedule", "clip_schedule"):  # in full, a schedule is as long as the training
        if numbers[name] is not None:
            numbers[name] = ", ".join(f"{which} {value:.4g}" for which, value in summary_of(numbers[name]).items())
    prior = numbers.pop("prior_releases")
    if not numbers["num_canaries"]:
        del numbers["num_canaries"]
    if settings.owners is not None:  # whoever resumes has the state, which is secret and holds both
        numbers |= {"num_examples": None, "num_owners": settings.num_units, "owners": settings.owners.in_words}
        public = {"num_owners": settings.num_units, "per_owner": settings.owners.per_owner}
        fixed = {**fixed, "num_examples": None, "owners": None, **public, "owner_name": settings.owners.name}
    written = {
        "model": name_of(without_wrapper(model)),
        "num_trained_parameters": sum(p.numel() for p in trained.values()),
        "optimizer": name_of(optimizer),
        "optimizer_settings": "; ".join(groups)[:LONGEST_SETTING],
        **({} if scheduler is None else {"scheduler": name_of(scheduler)}),
        "dataset": name_of(dataset),
        **{name: _setting(value) for name, value in numbers.items()},
        **({"prior_releases": "; ".join(repr(release.event) for release in prior)[:LONGEST_SETTING]} if prior else {}),
        "fixed": fixed,
    }
    return json.loads(json.dumps(written))  # tuples become lists, as in the file


def name_of(thing: object) -> str:
    """Returns the name of an object's class, without what ``fully_shard`` adds to it."""
    return type(thing).__name__.removeprefix("FSDP")[:LONGEST_NAME]


def _setting(value: Any) -> Any:
    """Returns a setting as JSON can hold it."""
    if isinstance(value, tuple):  # a schedule
        value = ", ".join(f"{name} {factor:g}" for name, factor in summary_of(value).items())
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value[:LONGEST_SETTING] if isinstance(value, str) else value
