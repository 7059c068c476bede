# SPDX-License-Identifier: Apache-2.0
"""Provides the options that describe a training's steps: by probability and number, or by batch size and epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

Delta = Annotated[
    float | None,
    typer.Option(
        help="Delta of (epsilon, delta), a probability; well below 1/n for n examples.",
        show_default="1e-5, or 1/(10 n) if --num-examples is given and that is less",
    ),
]
USUAL_DELTA = 1e-5


@dataclass(frozen=True)
class SampledSteps:
    """The steps of a training: each example joins each of ``num_steps`` steps with this probability."""

    probability: float
    num_steps: int
    num_examples: int | None
    lines: list[tuple[str, str]]  # how the two follow from the options, and the delta; for a table

    def delta(self, where: str, given: float | None) -> float:
        """Returns the delta given, or the usual one; one that was chosen is in ``lines`` then."""
        return chosen_delta(where, given, None, self.num_examples, self.lines)


def chosen_delta(
    where: str, given: float | None, of_run: float | None, num_examples: int | None, lines: list[tuple[str, str]]
) -> float:
    """Returns the delta given, that of a run, or the usual one; adds a line on one that was not given."""
    from torch_privacy.support import validate as _check

    n = num_examples
    if given is not None:
        if n is not None:
            _check.strictly_between(where, 0, 1 / n, delta=given, hint=f"It must be below 1/n (n = {n} examples).")
        _check.strictly_between(where, 0, 1, delta=given)
        return given
    if of_run is not None:
        lines.append(("delta", f"{of_run:.4g}, that of the run; --delta sets another"))
        return of_run
    if n is None or 1 / (10 * n) >= USUAL_DELTA:
        return USUAL_DELTA
    lines.append(("delta", f"{1 / (10 * n):.4g} = 1 / (10 x {n:,}); --delta sets another"))
    return 1 / (10 * n)


@dataclass(frozen=True)
class Steps:
    """The options; messages name them by the library's names for the same numbers."""

    sampling_probability: Annotated[
        float | None,
        typer.Option(help="Chance that an example joins a step, batch size / n; in (0, 1].", show_default=False),
    ] = None
    num_steps: Annotated[
        int | None,
        typer.Option(
            "--steps", help="Number of noisy steps, an integer: epochs / sampling probability.", show_default=False
        ),
    ] = None
    expected_batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Expected batch size, in examples; with --num-examples.", show_default=False),
    ] = None
    num_examples: Annotated[
        int | None,
        typer.Option(
            help="Number of training examples n; with --batch-size, in place of --sampling-probability.",
            show_default=False,
        ),
    ] = None
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Passes over the data, on average, in place of --steps: epochs x n / batch size steps, rounded up.",
            show_default=False,
        ),
    ] = None

    def sampling(self, where: str) -> SampledSteps:
        """Returns the steps that the options describe.

        The number of steps is ``epochs / probability``, which is ``epochs n / batch_size``, rounded up, as in
        ``train``.

        Raises:
            ValueError: the options contradict each other, leave something open, or are out of range.
        """
        from torch_privacy.support import validate as _check
        from torch_privacy.support.steps import steps_of

        probability, steps, epochs = self.sampling_probability, self.num_steps, self.epochs
        batch_size, num_examples = self.expected_batch_size, self.num_examples
        by_size = {"--batch-size": batch_size, "--num-examples": num_examples}
        given = [name for name, value in by_size.items() if value is not None]
        if probability is not None and given:
            raise ValueError(f"{where}: --sampling-probability and {given[0]} exclude each other; give one of them.")
        if steps is not None and epochs is not None:
            raise ValueError(f"{where}: --steps and --epochs exclude each other; give one of them.")
        if probability is None and len(given) < 2:
            lacking = "" if not given else f"{given[0]} alone says too little: "
            raise ValueError(f"{where}: {lacking}give --sampling-probability, or --batch-size with --num-examples.")
        if steps is None and epochs is None:
            raise ValueError(f"{where}: give --steps or --epochs.")
        lines: list[tuple[str, str]] = []
        if probability is None:
            assert batch_size is not None
            assert num_examples is not None
            _check.whole(where, at_least=1, expected_batch_size=batch_size)
            _check.whole(where, at_least=1, num_examples=num_examples)
            _check.in_range(
                where, 0, num_examples, expected_batch_size=batch_size, hint="It is at most --num-examples."
            )
            probability, size = batch_size / num_examples, (num_examples, batch_size)
            shown = f"x {num_examples:,} / {batch_size:,}"
            lines.append(("sampling probability", f"{probability:.6g} = {batch_size:,} / {num_examples:,}"))
        else:
            _check.in_range(where, 0, 1, sampling_probability=probability, hint="It is batch size / n.")
            size, shown = (1, probability), f"/ {probability:g}"
        if steps is not None:
            _check.whole(where, at_least=1, num_steps=steps)
        else:
            assert epochs is not None
            _check.positive(where, epochs=epochs)
            _check.in_range(where, 0, 1e9, epochs=epochs)
            steps = steps_of(epochs, *size)
            lines.append(("steps", f"{steps:,} = {epochs:g} {shown}, rounded up"))
        return SampledSteps(probability, steps, num_examples, lines)
