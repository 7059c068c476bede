# SPDX-License-Identifier: Apache-2.0
"""Loads the model, loss and batch that ``torch-privacy explain`` checks, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from torch_privacy.experiments import TRAININGS, load_trainable

RETURNED = "(model, loss_fn, batch) or (model, (x, labels))"


@dataclass(frozen=True)
class Subject:
    """The arguments of ``check``."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Any


def load_subject(name: str) -> Subject:
    """Loads an experiment or ``package.module:factory``, which may be in the current folder.

    The factory takes no arguments and returns (model, loss_fn, batch), or (model, (x, labels)) for a classifier.

    Raises:
        ValueError: If nothing has that name, or it returns something else; the message lists the valid names.
    """
    if name in TRAININGS:
        return _of_experiment(name)
    if not is_factory(name):
        raise ValueError(
            f"explain: {name!r} must be one of {', '.join(map(repr, TRAININGS))}, or package.module:factory, a "
            f"function without arguments that returns {RETURNED}."
        )
    return _of_parts(name, made_by("explain", name, RETURNED))


def is_factory(name: str) -> bool:
    """True for ``package.module:factory``."""
    module, colon, factory = name.partition(":")
    return bool(colon) and factory.isidentifier() and all(part.isidentifier() for part in module.split("."))


def function_named(command: str, name: str) -> Callable[..., Any]:
    """Returns the function ``package.module:function``, in a module that may be in the current folder.

    Args:
        command: the command that asks, for messages.
        name: names the function.

    Raises:
        ValueError: If there is none.
    """
    module_name, _, attribute = name.partition(":")
    module = _import(command, name, module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{command}: {name!r} must name a function; {module.__name__} has none called {attribute!r}.")
    return function


def made_by(command: str, name: str, returned: str) -> tuple[Any, ...]:
    """Returns what the function ``package.module:factory`` returns, as a tuple.

    Args:
        command: as for `function_named`.
        name: names the function.
        returned: the values that it must return, in words.

    Raises:
        ValueError: If there is no such function without arguments.
    """
    function = function_named(command, name)
    try:
        signature(function).bind()
    except (TypeError, ValueError):
        raise ValueError(f"{command}: {name!r} must be a function without arguments that returns {returned}.") from None
    try:
        made = function()
    except SystemExit:
        raise ValueError(f"{command}: {name!r} ended the process. Name a function that returns {returned}.") from None
    return made if isinstance(made, tuple) else (made,)


def _of_experiment(name: str) -> Subject:
    study = load_trainable(name)
    settings = study.settings()
    task = study.task(settings)
    examples = (task.train[i] for i in range(len(task.train)))  # type: ignore[arg-type]
    batch = default_collate(list(islice(examples, settings.expected_batch_size)))
    return Subject(task.new_model(), lambda model, batch: task.losses(model(batch[0]), batch[1]), batch)


def _import(command: str, name: str, module: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found, but one that it imports is missing
        raise ValueError(
            f"{command}: {name!r} names no module {error.name!r} in {here} or among the installed packages."
        ) from None
    finally:
        sys.path.remove(here)


def _of_parts(name: str, parts: tuple[Any, ...]) -> Subject:
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"explain: {name!r} gave ({kinds}): must be {RETURNED}.")
    if len(parts) == 3:
        return Subject(*parts)
    batch = parts[1]
    if not (isinstance(batch, (tuple, list)) and [isinstance(t, Tensor) for t in batch] == [True, True]):
        raise ValueError(f"explain: {name!r} gave a batch without a loss_fn: must be (x, labels), or return a loss_fn.")
    return Subject(parts[0], cross_entropies, batch)


def cross_entropies(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the cross-entropy (n,) of outputs (n, classes, ...) and labels (n, ...), averaged over positions."""
    x, labels = batch
    losses = F.cross_entropy(model(x), labels, reduction="none")
    return losses.reshape(len(losses), -1).mean(1)
