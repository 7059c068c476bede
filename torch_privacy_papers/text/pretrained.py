# SPDX-License-Identifier: Apache-2.0
"""Pretrains the language model on public texts, once, and keeps it on disk.

The file is in the folder of the features. It is renewed after each tenth of the training: one that is killed goes on
there.
"""

import hashlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

from torch_privacy.experiments.task import PREPARATION
from torch_privacy.support import random_state
from torch_privacy.support.write_file import write_whole
from torch_privacy.training.machine import number_of_threads
from torch_privacy_papers.text.features import cache_folder
from torch_privacy_papers.text.language import (
    END,
    PLAIN,
    LanguageModel,
    inputs_and_targets,
    losses,
    new_tokenizer,
)

VERSION = 1  # of what is computed here; another one makes the file anew
PARTS, BATCH_SIZE = 10, 64
RATE = 3e-3  # of Adam; it falls to a tenth

_log = logging.getLogger(PREPARATION)


def pretrained(texts: Sequence[str], length: int, size: int) -> LanguageModel:
    """Returns a language model that has read each public text once, from its file where it is there.

    Args:
        texts: public.
        length: of what the network reads at once, see `LanguageModel`; a text is cut in pieces.
        size: of the vocabulary, which is learnt from the same texts.
    """
    settings = VERSION, PARTS, BATCH_SIZE, RATE, length, size
    name = hashlib.sha256(repr((settings, *texts)).encode()).hexdigest()
    path = cache_folder() / f"language-{name}.pt"
    with random_state.seeded(0), number_of_threads(1):
        # pickle: of weights and of the optimizer's state, a cache that this user alone can write; read as weights only
        state = torch.load(path, weights_only=True) if path.exists() else None
        tokenizer = new_tokenizer(texts, size) if state is None else state["model"]["tokenizer"].numpy().tobytes()
        model = LanguageModel(tokenizer, length).float()
        optimizer = Adam(model.parameters())
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        made = 0 if state is None else state["made"]
        if made < PARTS:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            pieces = _pieces(model, texts)
            for part in range(made, PARTS):
                _read(model, optimizer, pieces.tensor_split(PARTS)[part], part)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "made": part + 1}
                # pickle: see above
                write_whole(path, lambda file, state=state: torch.save(state, file))
                _log.info("read %d of %d parts of the public texts", part + 1, PARTS)
    return model.eval()


def _pieces(model: LanguageModel, texts: Sequence[str]) -> Tensor:
    """Returns pieces of the texts, from their ends on, and in random order, of shape (n, t + 1)."""
    reader, rows = model.reader, []
    for text in texts:
        tokens = [*reader.encode(text), END]
        while tokens:
            cut = max(0, len(tokens) - reader.length + 1)
            piece = [PLAIN, *tokens[cut:]]
            rows.append(piece + [END] * (reader.length - len(piece)))
            tokens = tokens[:cut]
    return torch.tensor(rows)[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def _read(model: LanguageModel, optimizer: Adam, pieces: Tensor, part: int) -> None:
    """Takes a step for each batch of pieces."""
    batches = pieces.split(BATCH_SIZE)
    for number, batch in enumerate(batches):
        done = (part + number / len(batches)) / PARTS
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 20 * done + 0.01) * (1 - 0.9 * done)
        x, y = inputs_and_targets(batch)
        optimizer.zero_grad()
        losses(model(x), y).mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
