# SPDX-License-Identifier: Apache-2.0
"""Provides ``explain``, which checks a model before training."""

from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, print_result
from torch_privacy.experiments import TRAININGS

PROBLEM = 1
KNOWN = ", ".join(TRAININGS)

ModelName = Annotated[
    str,
    typer.Argument(
        help=f"An experiment ({KNOWN}), or package.module:factory, a function that returns (model, loss_fn, batch).",
        metavar="MODEL",
        show_default=False,
    ),
]


@app.command()
def explain(model: ModelName, as_json: AsJson = False) -> None:
    """Explain how the gradients of a model are bounded and summed, and what training would refuse.

    Nothing is trained. The exit code is 1 if there is a problem.
    """
    from torch_privacy.cli.subjects import load_subject
    from torch_privacy.model_check import check
    from torch_privacy.model_check.checkup import checkup_view

    subject = load_subject(model)
    checkup = check(subject.model, subject.loss_fn, subject.batch)
    print_result(checkup.as_json(), checkup_view(checkup, prices=True), as_json)
    raise typer.Exit(0 if checkup.ok else PROBLEM)
