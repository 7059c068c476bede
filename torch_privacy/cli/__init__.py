# SPDX-License-Identifier: Apache-2.0
"""Provides the command ``torch-privacy``. Accounting and lists start without importing torch."""

import re
import sys
from io import TextIOWrapper

import typer
from typer.exceptions import TyperException

from torch_privacy.cli import accounting, audit, explain, report, reproduce, search, train
from torch_privacy.cli._shared import app, say

__all__ = ["accounting", "audit", "explain", "main", "report", "reproduce", "run", "search", "train"]

USER_MISTAKE = 2
LONGEST = 1500  # letters of a message

OPTIONS = {  # names that differ between library and command
    "target_epsilon": "--epsilon",
    "expected_batch_size": "--batch-size",
    "num_steps": "--steps",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            "noise_multiplier", "sampling_probability", "delta", "learning_rate", "clip_norm", "epochs", "hidden_units",
            "seed", "alpha",
        )
    },
}  # fmt: skip


def _with_option_names(message: str) -> str:
    """Replaces the names of arguments in a message by the names of the command's options."""
    return re.sub(rf"(?<![\w(])({'|'.join(OPTIONS)})=", lambda found: f"{OPTIONS[found[1]]} ", message)


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

    The code is 0, 1 if ``explain`` found a problem, 2 after a user's mistake, and 130 or 143 after an interruption.
    """
    try:
        return app(arguments, prog_name="torch-privacy", standalone_mode=False) or 0
    except BrokenPipeError:  # as in `torch-privacy tradeoff ... | head -1`
        sys.stdout = None
        return 0
    except TyperException as error:
        return _complain(f"{error.format_message().rstrip('.')}; torch-privacy --help lists the commands and options.")
    except OSError as error:
        return _complain(f"{error.filename or 'file'}: {error.strerror or error}.")
    except ValueError as error:
        return _complain(_with_option_names(str(error)))
    except OverflowError as error:
        return _complain(f"a number given is too large or too small to compute with ({error}).")
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    """Runs the command; its entry point."""
    for stream in (sys.stdout, sys.stderr):  # in a locale without UTF-8 a letter that it lacks becomes "?"
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
