# SPDX-License-Identifier: Apache-2.0
"""Decides what of a training may leave this machine: logs to trackers, the state in checkpoints, the model card."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from ..privacy.rounding import round_up, short
from ..privacy.summary import attacker_lines
from ..support.notebook import markdown_text as _text
from ..support.validate import Refused
from ..support.write_file import PUBLIC, write_whole

CARD = "README.md"
TAG = "differential-privacy"
BEGIN, END = "<!-- begin: privacy of the training -->", "<!-- end: privacy of the training -->"
SECTION = re.compile(f"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)
EXACT = ("total_flos", "num_input_tokens_seen", "train_tokens_per_second")  # count the examples that were drawn


def public_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs without exact statistics of the training data."""
    return {name: x for name, x in logs.items() if not name.endswith("_not_private") and name not in EXACT}


def without_exact_loss(output: TrainOutput, loss: str) -> TrainOutput:
    """Returns the output of a training with its exact loss under the name ``loss`` alone, and without exact counts."""
    metrics = public_logs(output.metrics) | {name: x for name, x in output.metrics.items() if name == loss}
    return output._replace(training_loss=math.nan, metrics=metrics)


def sends_away(callback: Any) -> bool:
    """True for integrations of transformers: Weights & Biases, MLflow, TensorBoard (in ``output_dir``), ..."""
    return any(kind.__module__.startswith("transformers.integrations") for kind in type(callback).__mro__)


def check_trackers(callbacks: list[Any]) -> None:
    """Refuses a tracker that would send gradients before the noise."""
    watched = os.environ.get("WANDB_WATCH", "false").lower()
    if watched in ("all", "gradients") and any(type(one).__name__ == "WandbCallback" for one in callbacks):
        raise Refused(
            f"PrivateTrainer: WANDB_WATCH={watched} would send gradients of private examples, made without noise, to "
            "Weights & Biases. Unset it, or set WANDB_WATCH=parameters: weights are released."
        )


@contextmanager
def without_exact_numbers(state: TrainerState) -> Iterator[None]:
    """Takes exact statistics of the training data out of a Trainer's state while it is saved in ``output_dir``."""
    kept = state.log_history, state.total_flos, state.num_input_tokens_seen
    state.log_history = [public_logs(logs) for logs in kept[0]]
    state.total_flos = state.num_input_tokens_seen = 0
    try:
        yield
    finally:
        state.log_history, state.total_flos, state.num_input_tokens_seen = kept


def card_section(statement: Mapping[str, Any]) -> str:
    """Returns the section of a model card that says what a privacy statement says, in Markdown."""
    lines = ["## Privacy", ""]
    epsilon, delta = statement.get("epsilon"), statement.get("delta")
    if not statement["private"]:
        lines.append("The training is **not private**: `privacy.json` says why.")
    elif epsilon is None or epsilon["high"] is None or delta is None:
        lines.append("The training was private; no epsilon is stated, because no delta was given. See `privacy.json`.")
    else:
        lines.append(
            f"The training is (ε, δ)-differentially private with **ε ≤ {round_up(epsilon['high'])}** at "
            f"**δ = {short(delta)}**, a certified upper bound by torch\\_privacy "
            f"{statement['versions']['torch_privacy']}."
        )
    rows = [
        ("unit of privacy", statement["unit"]),
        ("number of examples", f"{statement['num_examples']:,}"),
        ("noise multiplier", f"{statement['noise_multiplier']:.6g}"),
        ("steps", f"{statement['num_steps_made']} of {statement['num_steps_planned']}"),
    ]
    if statement["private"] and statement.get("attacker"):
        rows += attacker_lines(statement["attacker"])
    lines += ["", "| | |", "|---|---|", *(f"| {_text(name)} | {_text(text)} |" for name, text in rows)]
    lines += ["", "Not covered by epsilon:", "", *(f"- {_text(text)}" for text in statement["not_covered"])]
    lines += ["", "`privacy.json`, beside the weights, lists all releases; anyone can compute the bound again from it."]
    return "\n".join(lines)


def add_to_card(folder: Path, statement: Mapping[str, Any]) -> None:
    """Puts the section into the model card of a folder, in place of an earlier one; does nothing without a card."""
    path = folder / CARD
    if not path.is_file():
        return
    text = SECTION.sub("\n", path.read_text(encoding="utf-8")).rstrip("\n")
    text = f"{text}\n\n{BEGIN}\n{card_section(statement)}\n{END}\n"
    write_whole(path, lambda file: file.write(text.encode()), PUBLIC)
