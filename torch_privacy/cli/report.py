# SPDX-License-Identifier: Apache-2.0
"""Provides ``report``, which writes one page on several runs."""

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
    """Write one page on several runs: their scores, epsilons and trade-off functions, drawn together and in numbers."""
    from torch_privacy.report import render as page
    from torch_privacy.runs.folder import RunFolder

    text = page.render([RunFolder(run) for run in runs])
    with naming(out):
        out.write_text(text, encoding="utf-8")
    print_result({"report": str(out), "runs": [str(run) for run in runs]}, [("report", str(out))], as_json)
