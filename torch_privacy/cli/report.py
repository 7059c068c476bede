# SPDX-License-Identifier: Apache-2.0
"""Provides ``report``, which writes one page on several runs, and the model card of a training."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from torch_privacy.cli._shared import AsJson, app, naming, path_argument, path_option, print_result

CARD = "--model-card"
CARD_ENDING = ".md"

Runs = Annotated[
    list[Path], path_argument("Finished runs: of train or reproduce, or run folders of PrivateTraining.", "RUN...")
]
Out = Annotated[Path, path_option("--out", help="The page to write.")]
Card = Annotated[
    str | None,
    typer.Option(
        CARD,
        help="Also write the training's model card for the Hugging Face Hub: RUN/README.md, or a FILE ending in .md.",
        metavar="[FILE]",
        show_default=False,
    ),
]


class _WithCard(TyperCommand):
    """Lets ``--model-card`` stand without a file: only a word that ends in .md belongs to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            f"{CARD}=" if word == CARD and not after.endswith(CARD_ENDING) else word
            for word, after in pairwise([*args, ""])
        ]
        return super().parse_args(ctx, words)


@app.command(cls=_WithCard)
def report(runs: Runs, out: Out = Path("report.html"), model_card: Card = None, as_json: AsJson = False) -> None:
    """Write one page on several runs: their scores, epsilons and trade-off functions, drawn together and in numbers.

    With --model-card, also write the model card of one training.
    """
    from torch_privacy.runs.folder import RunFolder
    from torch_privacy.runs.report import model_card as cards
    from torch_privacy.runs.report import render as page

    if model_card is not None and len(runs) != 1:
        raise ValueError(f"report: {CARD} is for one training, and {len(runs)} runs were given. Name one RUN.")
    folders = [RunFolder(run) for run in runs]
    text = page.render(folders)
    for folder in folders:
        if folder.is_complete and not folder.report.exists():  # the run was killed before its last file
            with suppress(OSError):  # of somebody else
                folder.write_report(text if len(runs) == 1 else page.render([folder]))
    written = {"report": out}
    if model_card is not None:
        card = cards.model_card(runs[0])
        written["model card"] = Path(model_card) if model_card else RunFolder(runs[0]).card
        with naming(written["model card"]):
            _write(written["model card"], card)
    with naming(out):
        _write(out, text)
    content = {name.replace(" ", "_"): str(path) for name, path in written.items()}
    shown = [(name, str(path)) for name, path in written.items()]
    print_result({**content, "runs": [str(run) for run in runs]}, shown, as_json)


def _write(path: Path, text: str) -> None:
    """Writes a page that its owner alone can read: it may have exact losses, and is published by chmod or a copy."""
    from torch_privacy.support.write_file import write_whole

    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path, lambda file: file.write(text.encode()))
