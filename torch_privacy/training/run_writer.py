# SPDX-License-Identifier: Apache-2.0
"""Writes the files that a training leaves behind: those of a loop of one's own, and those of the command."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ..runs.folder import RunFolder
from ..runs.metrics import Metrics
from ..sampling.fingerprint import fingerprint, new_key, read_key
from ..support.ranks import Ranks
from ..support.warning import warn
from .settings import TrainingSettings


def write_run(
    folder: RunFolder,
    weights: bytes,
    rows: Callable[[], Sequence[Metrics]],
    statement: Callable[[], Mapping[str, Any]],
    results: Callable[[], Mapping[str, Any]],
) -> None:
    """Writes model, metrics, privacy statement, results with digests, and page; settings and ledger must be there.

    The model is written first, so that the trained weights are on disk even if the rest cannot be computed or written.
    The run is complete without the page.
    """
    folder.write_model(weights)
    folder.write_metrics(list(rows()))
    content = results()
    folder.write_json(folder.privacy, dict(statement()))
    files = [folder.settings, folder.ledger, folder.metrics, folder.model, folder.privacy]
    files += [folder.schema] if folder.schema.exists() else []  # of a table
    folder.write_checked(folder.results, dict(content), *files)
    write_page(folder)


def size_of(settings: TrainingSettings, ranks: Ranks) -> dict[str, int]:
    """Returns the entries of results on size: of the data, and the number of processes if there are several."""
    return {**({"ranks": ranks.size} if ranks.size > 1 else {}), **settings.public_size()}


def try_page(folder: RunFolder) -> None:
    """Draws a trial figure before the first step; warns if there can be no report, and says what to do."""
    try:
        import_module("torch_privacy.runs.report.render")  # what `write_page` needs
        _draw_nothing()
    except Exception as error:  # of any kind, as in `write_page`
        cause = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        warn(
            f"{folder.path}: this run will have no report, because nothing can be drawn here ({cause}). The training "
            "goes on, and all its other files are written. Repair matplotlib (pip install --force-reinstall "
            f"matplotlib), and make the report afterwards: torch-privacy report {shlex.quote(str(folder.path))}"
        )


def _draw_nothing() -> None:
    from matplotlib.figure import Figure

    Figure().savefig(io.BytesIO(), format="svg")


def write_page(folder: RunFolder) -> None:
    """Writes the report of a finished run; warns if that fails, and says how to make it."""
    try:
        from ..runs.report import render  # matplotlib takes a second to import

        folder.report.unlink(missing_ok=True)
        folder.write_report(render.render([folder]))
    except Exception as error:  # of any kind: a plot must not cost the run
        cause = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        warn(
            f"{folder.report}: the report could not be made ({cause}). The run is complete without it. Make it with: "
            f"torch-privacy report {shlex.quote(str(folder.path))} --out {shlex.quote(str(folder.report))}"
        )


def fingerprint_in(folder: RunFolder, dataset: Any, settings: TrainingSettings) -> dict[str, Any]:
    """Returns the fingerprint of a data set under the folder's key, which is made if there is none."""
    path = folder.fingerprint_key
    if path.exists():
        key = read_key(path)
    else:
        key = new_key()
        folder.write_fingerprint_key(key)
    return fingerprint(dataset, key, num_owners=None if settings.owners is None else settings.num_units)
