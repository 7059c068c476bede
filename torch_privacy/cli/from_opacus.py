# SPDX-License-Identifier: Apache-2.0
"""Provides ``from-opacus``, which prints a program for Opacus as one for this library."""

from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import app

Script = Annotated[
    Path, typer.Argument(help="Python program that uses Opacus; it is neither run nor changed.", show_default=False)
]


@app.command("from-opacus")
def from_opacus(script: Script) -> None:
    """Print a training program for Opacus with the loop of PrivateTraining.

    Lines "# torch_privacy: ..." say what must be finished by hand.
    """
    from torch_privacy.opacus.translation import translated

    try:
        source = script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"from-opacus: {str(script)!r} is no text in UTF-8") from error
    typer.echo(translated(source, repr(str(script))), nl=False)
