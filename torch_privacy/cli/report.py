# SPDX-License-Identifier: Apache-2.0
"""``report``: several runs in one page."""

from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, folder_named, naming, print_result

Runs = Annotated[
    list[Path],
    typer.Argument(
        parser=folder_named, help="Finished runs of train or reproduce.", metavar="RUN...", show_default=False
    ),
]
Out = Annotated[Path, typer.Option("--out", parser=folder_named, help="The page to write.", metavar="FILE")]


@app.command()
def report(runs: Runs, out: Out = Path("report.html"), as_json: AsJson = False) -> None:
    """Draw several runs in one page: scores, epsilons and trade-off functions over one another, and their numbers."""
    from torch_privacy.report import render as page
    from torch_privacy.runs.folder import RunFolder

    text = page.render([RunFolder(run) for run in runs])
    with naming(out):
        out.write_text(text)
    print_result({"report": str(out), "runs": [str(run) for run in runs]}, [("report", str(out))], as_json)
