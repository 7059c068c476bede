# SPDX-License-Identifier: Apache-2.0
"""Provides the command ``torch-privacy``. Accounting and lists start without importing torch."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper

import typer
from typer.exceptions import TyperException

from torch_privacy.cli import (
    accounting,
    audit,
    budget,
    explain,
    generate,
    plan,
    predict,
    report,
    reproduce,
    schema,
    search,
    synthesize,
    train,
    verify,
)
from torch_privacy.cli._options import option_names
from torch_privacy.cli._shared import app, say
from torch_privacy.cli.processes import ALONE, TOGETHER, Processes, is_first, lost_rank, num_launched
from torch_privacy.support.validate import InvalidValue

__all__ = [
    "accounting", "audit", "budget", "explain", "generate", "main", "plan", "predict", "report", "reproduce", "run",
    "schema", "search", "synthesize", "train", "verify",
]  # fmt: skip

USER_MISTAKE = 2
LONGEST = 1500  # letters of a message


def _ended(sentence: str) -> str:
    """Returns the sentence with a mark at its end."""
    return sentence if sentence.rstrip().endswith(("?", "!")) else f"{sentence.rstrip().rstrip('.')}."


def _complain(message: str) -> int:
    """Prints one line on stderr and returns the exit code of a user's mistake."""
    line = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(message.split())
    )
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    say(f"torch-privacy: {line.rstrip('.')}.")
    return USER_MISTAKE


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code.

    The code is 0, 1 if ``explain`` or ``verify`` found a problem, 2 after a user's mistake, and 130 or 143 after an
    interruption.

    Of several processes that torchrun started, rank 0 runs the command. The others share its trainings, say nothing
    unless rank 0 cannot, and return its code.
    """
    processes = Processes()
    if num_launched() == 1:
        return _run(arguments, processes)
    command = next((word for word in arguments if not word.startswith("-")), "")
    if not is_first():
        return _said(processes.follow) if command in TOGETHER else 0
    if command in ALONE:
        return _complain(
            f"{command}: works in one process, and {num_launched()} were started. Start it without torchrun."
        )
    code = 1
    try:
        code = _run(arguments, processes)
    finally:
        if command in TOGETHER:
            processes.end(code)
    return code


def _run(arguments: list[str], processes: Processes) -> int:
    command = next((word for word in arguments if not word.startswith("-")), "")
    return _said(lambda: app(arguments, prog_name="torch-privacy", standalone_mode=False, obj=processes) or 0, command)


def _said(act: Callable[[], int], command: str = "") -> int:
    """Returns the exit code of an action, and says in one sentence what it refuses or what the user mistook.

    What is wrong with the words of the command line ends by naming the command's own help.
    """
    try:
        return act()
    except BrokenPipeError:  # as in `torch-privacy tradeoff ... | head -1`
        sys.stdout = None
        return 0
    except TyperException as error:
        context = getattr(error, "ctx", None)
        place = "torch-privacy" if context is None else context.command_path
        return _complain(f"{_ended(error.format_message())} Try '{place} --help'")
    except ImportError as error:
        if "pip install" not in str(error):  # not of a package that is optional here
            raise
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{error.filename or 'file'}: {error.strerror or error}.")
    except ValueError as error:
        message = _named_by_option(error, command)
        is_of_arguments = bool(command) and message.startswith(f"{command}: ")
        return _complain(f"{_ended(message)} Try 'torch-privacy {command} --help'" if is_of_arguments else message)
    except OverflowError as error:
        return _complain(f"a number given is too large or too small to compute with ({error}).")
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except RuntimeError as error:
        if not lost_rank(error):
            raise
        _complain(str(error))
        return 1


def _named_by_option(error: ValueError, command: str) -> str:
    """Returns the message of an error, with the name of the command's option for an argument of the library."""
    if not isinstance(error, InvalidValue):
        return str(error)
    of_command = getattr(typer.main.get_command(app), "commands", {}).get(command)
    option = {} if of_command is None else option_names(of_command)
    return error.named(f"{option[error.name]} ") if error.name in option else str(error)


def main() -> None:
    """Runs the command; its entry point."""
    os.environ["MPLBACKEND"] = "agg"  # figures are files; a kernel's own backend may be missing from this Python
    for stream in (sys.stdout, sys.stderr):  # in a locale without UTF-8 a letter that it lacks becomes "?"
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
