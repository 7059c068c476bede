# SPDX-License-Identifier: Apache-2.0
"""Provides ``synthesize``, which makes a private generator of rows like those of a table, and draws from it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_privacy.cli._options import Chosen, with_options
from torch_privacy.cli._shared import (
    CommandOutput,
    ResumePath,
    RunPath,
    app,
    naming,
    path_argument,
    path_option,
    print_result,
    say,
    saying_warnings,
)
from torch_privacy.cli.signals import ONCE_MORE, DeferredSignals
from torch_privacy.experiments.synthetic_table import SyntheticTableSettings
from torch_privacy.support.units import dated

Source = Annotated[
    Path | None,
    path_argument("Table, a CSV or Parquet file; or the folder of a finished run, to draw from.", "FILE|RUN"),
]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows to draw.", show_default="none")]
Out = Annotated[Path | None, path_option("--out", help="CSV file for the rows.", show_default="RUN/rows.csv")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Public seed of the rows: draws the same again.", show_default="a new one")
]
Canaries = Annotated[
    int | None, typer.Option("--audit", help="Canary rows for an audit on the page.", show_default="no audit")
]
Page = Annotated[bool, typer.Option("--page/--no-page", help="Compare the rows with real ones, on a page.")]


@app.command()
@with_options
def synthesize(
    *,
    source: Source = None,
    chosen: Annotated[dict[str, Any], Chosen(SyntheticTableSettings)],
    rows: Rows = None,
    out: Out = None,
    seed: Seed = None,
    audit: Canaries = None,
    page: Page = True,
    run: RunPath = None,
    resume: ResumePath = None,
    output: CommandOutput,
) -> None:
    """Make synthetic rows: a private generator of rows like those of a table, and any number of rows of it.

    Writes a folder with the generator, its privacy statement, and a page for the owner of the data. More rows may be
    drawn from the folder at any time, and cost no more epsilon. After Ctrl-C, --resume continues the run.
    """
    from torch_privacy.experiments import synthetic_table
    from torch_privacy.privacy.rounding import round_up, short
    from torch_privacy.runs.folder import RunFolder

    _check_drawing(rows, out, seed, audit, page, run)  # before a generator is paid for
    for folder in filter(None, (run, resume, source)):
        RunFolder(folder).check_not_own("synthesize", out)
    if out is not None and rows is None:
        raise ValueError("synthesize: --out is the file for rows; say how many with --rows.")
    if resume is not None:
        if source is not None or run is not None or chosen:
            raise ValueError("synthesize: --resume takes every setting from the run; give no table and no settings.")
        folder, job = resume, synthetic_table.resume(resume)
    elif source is None:
        raise ValueError("synthesize: name a table's file, a finished run, or continue a run with --resume FOLDER.")
    elif source.is_dir():
        if chosen or run is not None or audit is not None:
            raise ValueError(
                f"synthesize: {source} is a run, which has its settings; give --rows, --out and --seed alone."
            )
        if rows is None:
            raise ValueError("synthesize: say how many rows with --rows.")
        _draw(source, rows, out, seed, output)
        return
    else:
        folder = run or Path("runs") / dated(f"{source.name.partition('.')[0]}-synthetic")
        RunFolder(folder).check_new()
        job = synthetic_table.begin(folder, source, chosen)
    again = "torch-privacy synthesize --resume"
    with DeferredSignals(ONCE_MORE) as signals, naming(folder, again), saying_warnings():
        try:
            for made, of in job.run.steps():
                if not output.silent and (made * 10 // of > (made - 1) * 10 // of):
                    say(f"made {made} of {of} releases")
                if signals.received:
                    say("stopped; continue with")
                    given = {"rows": rows, "out": out, "seed": seed, "audit": audit}
                    options = [f"--{name} {shlex.quote(str(of))}" for name, of in given.items() if of is not None]
                    say(" ".join([f"  {again}", str(folder), *options, *([] if page else ["--no-page"])]))
                    raise typer.Exit(128 + signals.received)
            for note in () if output.silent else job.run.notes:
                say(note)
            if page:
                job.write_page(job.run.synthesizer(), audit)
            epsilon = job.run.profile().epsilon_high(job.run.settings.delta)
            job.run.finish(job.not_covered)
        finally:
            job.run.close()
    at = f"epsilon at delta = {short(job.run.settings.delta)}"
    more = [(at, f"at most {round_up(epsilon)}, for any number of rows")]
    if page:
        more.append(("page, for the owner alone", str(job.run.folder.synthesis)))
    if rows is None:
        more.append(("to draw rows", f"torch-privacy synthesize {shlex.quote(str(folder))} --rows 1000"))
        print_result({"run": str(folder), "epsilon": epsilon}, more, output.as_json)
    else:
        _draw(folder, rows, out, seed, output, more, {"epsilon": epsilon})


def _check_drawing(
    rows: int | None, out: Path | None, seed: int | None, audit: int | None, page: bool, run: Path | None
) -> None:
    """Refuses numbers of rows or canaries that cannot be drawn, and a file for rows that cannot be written."""
    from torch_privacy.experiments.table_file import needing_extra
    from torch_privacy.support import validate as _check

    with needing_extra():
        from torch_privacy.tables.synthesis.synthesizer import MOST_ROWS
    if rows is not None:
        _check.whole("synthesize", at_most=MOST_ROWS, rows=rows)
    if seed is not None:
        _check.whole("synthesize", seed=seed)
    if audit is not None:
        _check.whole("synthesize", at_least=1, at_most=MOST_ROWS, audit=audit)
        if not page:
            raise ValueError("synthesize: --audit is shown on the page; leave --no-page out.")
    if out is None or (run is not None and out.absolute().parent == run.absolute()):  # a folder that is yet to be made
        return
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a folder" if out.is_dir() else "lies in a folder that does not exist"
        raise ValueError(f"synthesize: --out {out} {what}. Name another file.")


def _draw(
    folder: Path,
    rows: int,
    out: Path | None,
    seed: int | None,
    output: CommandOutput,
    shown: list[tuple[str, str]] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Draws rows from a finished run, and writes them."""
    import secrets

    from torch_privacy.experiments.predictions import Predictions
    from torch_privacy.experiments.table_file import needing_extra
    from torch_privacy.support.write_file import PUBLIC, write_whole

    seed, place = secrets.randbits(32) if seed is None else seed, out or folder / "rows.csv"
    with needing_extra():
        from torch_privacy.tables.synthesis import Synthesizer

        made = Synthesizer.load(folder)
        found = made.draw(rows, seed)
    separator = ";" if made.grid.schema.decimal == "," else ","
    content = Predictions(found, ()).as_csv(separator).encode()
    with naming(place):
        write_whole(place, lambda file: file.write(content), PUBLIC)
    lines = [*(shown or ()), ("rows", f"{rows:,} in {place}, seed {seed}; drawing costs no epsilon")]
    print_result(
        {"run": str(folder), "rows": rows, "out": str(place), "seed": seed, **(more or {})}, lines, output.as_json
    )
