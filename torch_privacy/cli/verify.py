# SPDX-License-Identifier: Apache-2.0
"""Provides ``verify``, which computes again what a run folder states."""

from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, path_argument, print_result

FALSE = 1
Folder = Annotated[Path, path_argument("Folder of a finished training.", "RUN")]


@app.command()
def verify(run: Folder, as_json: AsJson = False) -> None:
    """Compute again what a run folder states, and say what agrees, by how much, and what cannot be checked.

    Needs neither data nor model: statement and ledger are enough. The exit code is 1 if something stated is false.
    """
    from torch_privacy.cli.tables import verification_view
    from torch_privacy.runs.verify import verify as verification_of

    found = verification_of(run)
    print_result(found.as_json(), verification_view(found), as_json)
    raise typer.Exit(FALSE if found.is_false else 0)
