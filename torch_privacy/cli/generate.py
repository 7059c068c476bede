# SPDX-License-Identifier: Apache-2.0
"""Provides ``generate``, which draws texts from the language model of a finished run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from torch_privacy.cli._shared import AsJson, app, naming, path_argument, path_option, print_result

RunOfGenerator = Annotated[Path, path_argument("Finished run of train text-generator.", "RUN")]
Prompt = Annotated[str, typer.Option(help="How every text begins.", metavar="TEXT", show_default="none")]
Number = Annotated[int, typer.Option(min=1, help="Texts to draw.", metavar="NUMBER")]
Label = Annotated[
    str | None, typer.Option(help="What the texts are like: negative or positive.", show_default="both in turn")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Public seed of the texts: draws the same again.", show_default="a new one")
]
Out = Annotated[
    Path | None, path_option("--out", help="File for the texts: JSON, one line for each.", show_default="none")
]


@app.command()
def generate(
    run: RunOfGenerator,
    prompt: Prompt = "",
    number: Number = 10,
    label: Label = None,
    seed: Seed = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Draw texts from the language model of a run.

    They follow from the released model alone: any number of them costs no more epsilon. Texts are drawn in batches, and
    the same seed draws the same ones on the same machine. Every line of the file names label, text and seed.
    """
    import secrets

    from torch_privacy.experiments import TRAININGS, load_trainable
    from torch_privacy.runs.folder import RunFolder

    folder = RunFolder(run)
    folder.check_not_own("generate", out)
    name = folder.read_finished().get("experiment")
    draw = load_trainable(name).generate if name in TRAININGS else None
    if draw is None:
        raise ValueError(f"{run}: is no run of a language model. Name a folder that train text-generator has made.")
    seed = secrets.randbits(32) if seed is None else seed
    found = [{**record, "seed": seed} for record in draw(folder, label, prompt, number, seed)]
    if out is not None:
        from torch_privacy.support.write_file import PUBLIC, write_whole

        lines = "".join(json.dumps(record) + "\n" for record in found)
        with naming(out):
            write_whole(out, lambda file: file.write(lines.encode()), PUBLIC)
    shown = [] if out is not None else [(record["label"], record["text"]) for record in found]
    result = {"run": str(run), "seed": seed, "number": number, **({"out": str(out)} if out else {"texts": found})}
    print_result(result, [*shown, ("seed", f"{seed}; drawing costs no epsilon")], as_json)
