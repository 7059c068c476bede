# SPDX-License-Identifier: Apache-2.0
"""Provides ``schema``, which writes a template of a table's schema from names and storage types alone."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, naming, path_argument, path_option, print_result, say

TablePath = Annotated[Path, path_argument("Table: a CSV or Parquet file.", "FILE")]
Target = Annotated[
    str | None, typer.Option(help="Column to predict.", metavar="COLUMN", show_default="none, and all are named")
]
SchemaOut = Annotated[Path | None, path_option("--output", help="File to write.", show_default="standard output")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that exists.")]


@app.command()
def schema(
    file: TablePath, target: Target = None, output: SchemaOut = None, force: Force = False, as_json: AsJson = False
) -> None:
    """Write a template of a table's schema, to fill in with what is publicly known about its columns.

    It follows from names, storage types and how the file is written: separator, decimal mark, order of days and months,
    as most cells show. What the schema says costs no privacy; what it leaves open, train learns privately, for a share
    of epsilon.
    """
    from torch_privacy.experiments.own_table import template

    if output is not None and output.exists() and not force:
        raise ValueError(f"schema: --output {output} exists. Name another file, or write over it with --force.")
    text = template(file, target)
    if output is not None:
        from torch_privacy.support.write_file import PUBLIC, write_whole

        with naming(output):
            write_whole(output, lambda written: written.write(text.encode()), PUBLIC)
    if as_json:
        print_result({"schema": text, "output": None if output is None else str(output)}, [], as_json=True)
    elif output is None:
        typer.echo(text, nl=False)
    else:
        what = ["train", str(file), "--target", target] if target else ["synthesize", str(file)]
        command = shlex.join(["torch-privacy", *what, "--epsilon", "2", "--schema", str(output)])
        say(f"Fill in {output} and declare it public: {command}")
