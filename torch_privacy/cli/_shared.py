# SPDX-License-Identifier: Apache-2.0
"""Provides the app, the options that several commands share, and functions that print."""

import errno
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from torch_privacy.support.version import __version__

KERNEL = "JPY_PARENT_PID"  # in the environment of what a Jupyter kernel starts

app = typer.Typer(
    name="torch-privacy",
    help="Differentially private deep learning with a certified epsilon.",
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"torch-privacy {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def new_console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """Returns a console of rich; one for plain text where a Jupyter kernel started the command.

    A cell (``!torch-privacy ...``) looks like a terminal, and its kernel asks for colors, but it shows a bar that is
    drawn again as one line after the other.
    """
    if KERNEL in os.environ:
        return Console(stderr=stderr, highlight=False, force_terminal=False, color_system=None)
    return Console(stderr=stderr, highlight=highlight)


def folder_named(text: str) -> Path:
    """Returns the path; refuses an empty one, which would mean the current folder, and one that no file can have."""
    if not text:
        raise typer.BadParameter("it is empty; name a folder")
    if "\0" in str(text):  # a default is a path already
        raise typer.BadParameter("it has a NUL character; name a folder")
    return Path(text)


def path_option(*names: str, help: str, metavar: str = "FILE", show_default: str | bool = True) -> Any:
    """Returns an option for a file or a folder."""
    return typer.Option(*names, parser=folder_named, help=help, metavar=metavar, show_default=show_default)


def path_argument(help: str, metavar: str) -> Any:
    """Returns an argument that is a file or a folder."""
    return typer.Argument(parser=folder_named, help=help, metavar=metavar, show_default=False)


RunPath = Annotated[
    Path | None, path_option("--run", help="New folder for the run.", metavar="FOLDER", show_default="runs/NAME-TIME")
]
ResumePath = Annotated[
    Path | None,
    path_option("--resume", help="Unfinished run's folder, to continue with its settings.", metavar="FOLDER"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class CommandOutput:
    """Holds what a long command is to print."""

    quiet: Quiet = False
    as_json: AsJson = False

    @property
    def silent(self) -> bool:
        """True if no progress is to be shown."""
        return self.quiet or self.as_json


def check_alone(command: str, *others: Any) -> None:
    """Raises a ``ValueError`` if --resume was combined with other options."""
    if any(other is not None for other in others):
        raise ValueError(
            f"{command}: --resume takes every setting from the run; give no experiment, --run or settings with it."
        )


@contextmanager
def naming(folder: Path, resume: str = "") -> Iterator[None]:
    """Adds the folder to an ``OSError`` without a file name, such as that of a full disk.

    Of a full disk, and with a command to ``resume`` the run in the folder, it says that one, too.
    """
    try:
        yield
    except OSError as error:
        goes_on = resume and error.errno in (errno.ENOSPC, errno.EDQUOT) and (folder / "settings.json").exists()
        if isinstance(error, BrokenPipeError) or (error.filename is not None and not goes_on):
            raise
        reason = error.strerror or str(error)
        if goes_on:
            reason = f"{reason}. Once there is room, {resume} {folder} continues the run"
        raise OSError(error.errno or errno.EIO, reason, str(error.filename or folder)) from error


@contextmanager
def saying_warnings() -> Iterator[None]:
    """Prints warnings as one line on stderr, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"torch-privacy: {' '.join(str(message).split())}")
        yield


class _Saying(logging.Handler):
    """Prints each record as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextmanager
def saying_preparations(*, silent: bool) -> Iterator[None]:
    """Prints what an experiment logs of a preparation that takes long, such as features of many texts."""
    from torch_privacy.experiments.task import PREPARATION

    log, handler = logging.getLogger(PREPARATION), _Saying(logging.INFO)
    before = log.level
    if not silent:
        log.setLevel(logging.INFO)
        log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def print_result(content: dict[str, Any], shown: list[tuple[str, str]] | RenderableType, as_json: bool) -> None:
    """Prints a result as JSON or for people."""
    from torch_privacy.cli.tables import lines_table

    if as_json:
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        new_console(highlight=False).print(lines_table(shown) if isinstance(shown, list) else shown)


def say(message: str) -> None:
    """Prints a line on stderr."""
    typer.echo(message, err=True)
