# SPDX-License-Identifier: Apache-2.0
"""Provides ``predict``, which applies the model of a finished run to another table."""

from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, naming, path_argument, path_option, print_result, say

RunOfTable = Annotated[Path, path_argument("Finished run of train on a table.", "RUN")]
NewTable = Annotated[Path, path_argument("Table to predict: a CSV or Parquet file.", "FILE")]
PredictOut = Annotated[Path | None, path_option("--output", help="CSV file to write.", show_default="standard output")]

Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        help="Column of the table to copy before the predictions, such as a number of customers; may be repeated.",
        metavar="COLUMN",
        show_default="none",
    ),
]
DecideAt = Annotated[
    str | None,
    typer.Option(
        "--threshold",
        help="Predict a class from this probability on, such as yes=0.1.",
        metavar="CLASS=P",
        show_default="that of the run, or the most probable class",
    ),
]


@app.command()
def predict(
    run: RunOfTable,
    file: NewTable,
    output: PredictOut = None,
    keep: Keep = None,
    threshold: DecideAt = None,
    as_json: AsJson = False,
) -> None:
    """Predict the target of every row of a table with the model of a run; write the predictions as CSV.

    They follow from the released model alone, so they cost no privacy of the rows that it was trained on. The table
    needs the run's columns, in any order, without the target. Its own rows are not protected.
    """
    from torch_privacy.experiments.predictions import Predictor
    from torch_privacy.experiments.table_file import needing_extra
    from torch_privacy.runs.reading import FolderReader

    FolderReader(run).check_not_own("predict", output)
    if output is not None and output.exists() and file.exists() and output.samefile(file):
        raise ValueError(f"predict: --output {output} is the table itself. Name another file.")
    with needing_extra():
        predictor = Predictor.load(run, threshold)
        found = predictor.predict_file(file, tuple(keep or ()))
    for note in found.notes:
        say(f"torch-privacy: {note}")
    if as_json:
        shown = {"run": str(run), "target": predictor.target, "predictions": found.as_records()}
        print_result(shown, [], as_json=True)
    if output is not None:
        from torch_privacy.support.write_file import PUBLIC, write_whole

        with naming(output):
            write_whole(output, lambda written: written.write(found.as_csv().encode()), PUBLIC)
    elif not as_json:
        typer.echo(found.as_csv(), nl=False)
