# SPDX-License-Identifier: Apache-2.0
"""Writes what each step did to a log of Python's ``logging``, or to TensorBoard."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ..privacy.rounding import in_float32, round_up, short
from ..support.validate import whole
from .callbacks import Callback, StepLog

if TYPE_CHECKING:
    from .loop import PrivateTraining

LOGGER = "torch_privacy.training"


class LoggingCallback(Callback):
    """Writes a line per ``every`` steps, and one for the last, to Python's ``logging``, at the level INFO.

    The line has epsilon so far and, marked "not private", loss, share of clipped examples and quantiles of the norms
    (`StepLog`). Rank 0 writes.

    Args:
        every: number of steps from line to line.
        logger: the logger or its name.

    Raises:
        ValueError: ``every`` is out of range.

    Example:
        >>> import logging
        >>> import torch_privacy as tp
        >>> logging.basicConfig(level=logging.INFO, format="%(message)s")
        >>> callback = tp.LoggingCallback(every=10)  # for PrivateTraining(callbacks=[callback])
    """

    def __init__(self, every: int = 10, logger: logging.Logger | str = LOGGER):
        whole("LoggingCallback", at_least=1, every=every)
        self._every = every
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger

    def after_step(self, training: PrivateTraining, step: StepLog) -> None:
        if step.rank == 0 and is_due(step, self._every) and self._logger.isEnabledFor(logging.INFO):
            self._logger.info("%s", line_of(step))


class TensorBoardCallback(Callback):
    """Writes a point per ``every`` steps, and one for the last, to TensorBoard.

    Tags: ``epsilon`` (so far; the certified upper end at the training's delta), ``learning_rate``, and exact numbers of
    private data: ``not_private/loss``, ``not_private/share_clipped``, ``not_private/norm_q10``, ``..._q50`` and
    ``..._q90`` (`StepLog`). If the training is not private, as with a ``test_seed``, there is ``not_private/epsilon``
    instead of ``epsilon``. The horizontal axis counts releases. Rank 0 writes.

    THE FOLDER IS AS SECRET AS THE DATA because of the tags that are not private: do not upload it.

    Args:
        writer: a folder, made at the first point, or a ``SummaryWriter`` of your own, which stays open.
        every: number of steps from point to point.

    Raises:
        ValueError: ``every`` is out of range, or the writer is neither of both.
        ImportError: TensorBoard is not installed; the message names the extra.

    Example:
        >>> import torch_privacy as tp
        >>> callback = tp.TensorBoardCallback("logs/first")  # for PrivateTraining(callbacks=[callback])
    """

    def __init__(self, writer: Any, every: int = 10):
        whole("TensorBoardCallback", at_least=1, every=every)
        self._every, self._writer = every, writer
        self._folder = fspath(writer) if isinstance(writer, str | PathLike) else None
        if self._folder is None and not callable(getattr(writer, "add_scalar", None)):
            raise ValueError(f"TensorBoardCallback: writer={writer!r:.100} must be a folder or a SummaryWriter.")
        if self._folder is not None and find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardCallback needs TensorBoard, which is not installed. Run pip install "
                "'torch-privacy[tensorboard]'."
            )

    def after_step(self, training: PrivateTraining, step: StepLog) -> None:
        if step.rank != 0 or not is_due(step, self._every):
            return
        writer = self._open()
        for tag, value in points_of(step).items():
            writer.add_scalar(tag, value, step.step)
        writer.flush()  # a loop that is left early loses nothing

    def at_end(self, training: PrivateTraining) -> None:
        if self._folder is not None and self._writer != self._folder:
            self._writer.close()

    def _open(self) -> Any:
        """Returns the writer, which opens a closed file anew."""
        if self._folder is not None and isinstance(self._writer, str | PathLike):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        return self._writer


def is_due(step: StepLog, every: int) -> bool:
    """True for one step in ``every``, and for the last."""
    return step.step % every == 0 or step.step == step.num_steps


def line_of(step: StepLog) -> str:
    """Returns a step in one line."""
    epsilon = "no delta"
    if step.epsilon is not None and step.delta is not None:
        epsilon = f"epsilon <= {round_up(step.epsilon)} at delta = {short(step.delta)}"
    private = epsilon if step.warning is None else f"{step.warning}: {epsilon}"
    exact = ", ".join(f"{name} {value:.4g}" for name, value in step.not_private.items())
    return f"step {step.step} of {step.num_steps}: {private}; not private: {exact or 'empty batch'}"


def points_of(step: StepLog) -> dict[str, float]:
    """Returns the numbers of a step by tag."""
    rates = step.learning_rates
    names = ["learning_rate"] if len(rates) == 1 else [f"learning_rate/{number}" for number in range(len(rates))]
    points = dict(zip(names, rates, strict=True))
    if step.epsilon is not None:
        points["epsilon" if step.warning is None else "not_private/epsilon"] = in_float32(step.epsilon)
    return points | {f"not_private/{name}": value for name, value in step.not_private.items()}
