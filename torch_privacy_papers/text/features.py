# SPDX-License-Identifier: Apache-2.0
"""Computes what a frozen public encoder makes of each text, once, and keeps it on disk.

What is made of a text depends on no other text: it goes through the network alone, without padding, so that not even
the rounding depends on the others. A classifier that is trained privately on it is therefore as private as one that is
trained on the texts.

The files are in ``$TORCH_PRIVACY_CACHE``, or else ``~/.cache/torch_privacy``, each with the features of `PART` texts.
They reveal nearly as much as the texts do, so that only their owner can read them; whoever must delete the texts has to
delete them, too.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_privacy.experiments.task import PREPARATION
from torch_privacy.support.write_file import write_whole
from torch_privacy.training.machine import number_of_threads
from torch_privacy_papers.text.encoder import TextEncoder, shortened

VARIABLE = "TORCH_PRIVACY_CACHE"
PART = 250  # texts of a file: what is lost if the computation is killed
SAID = 10  # files after which it is said how far the computation is
LAYERS = 4  # of the encoder's six: the last two tell less about a text's tone, and cost time
VERSION, VERSION_BELOW = f"words, layers, 1, {LAYERS}", "last inputs, 1"  # another one makes the files anew

_log = logging.getLogger(PREPARATION)


def cache_folder() -> Path:
    """Returns the folder of the files."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "torch_privacy"


def features(encoder: TextEncoder, texts: Sequence[Tensor], length: int) -> Tensor:
    """Returns the features of texts, float16 of shape (n, 2 + `LAYERS`, units), from the disk where they are there.

    Entry 0 is the mean of the vectors of all words of the text, as the encoder looks them up. Entry 1 + l is the mean
    state after layer l of the last ``length`` tokens; layer 0 are the embeddings with their places.

    Args:
        encoder: the public encoder.
        texts: the tokens of each text, from `TextEncoder.tokens`.
        length: tokens that go through the encoder, with the marks of start and end.
    """
    return _from_disk(_pooled, VERSION, encoder, texts, length)


def last_inputs(encoder: TextEncoder, texts: Sequence[Tensor], length: int) -> Tensor:
    """Returns what enters the last layer, float16 of shape (n, length, units), from the disk where it is there.

    Behind the end of a text, all entries are 0. The arguments are those of `features`.
    """
    return _from_disk(_below, VERSION_BELOW, encoder, texts, length)


def _from_disk(
    computed: Callable[[Any, Sequence[Tensor], int], Iterator[Tensor]],
    version: str,
    encoder: TextEncoder,
    texts: Sequence[Tensor],
    length: int,
) -> Tensor:
    """Returns what is computed of each text, by parts, each of them from its file if there is one."""
    place, network, found = cache_folder(), None, []
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    parts = [texts[start : start + PART] for start in range(0, len(texts), PART)]
    for number, part in enumerate(parts, 1):
        path = place / f"{_digest(version, encoder, part, length)}.safetensors"
        if not path.exists():
            if network is None:
                network = encoder.network()
                _log.info("computes features of %d texts, once; they are kept in %s", len(texts), place)
            with torch.no_grad(), number_of_threads(1):  # more change the rounding, and are no faster for one text
                made = safetensors.torch.save({"features": torch.stack(list(computed(network, part, length)))})
            write_whole(path, lambda file, made=made: file.write(made))
            if not number % SAID:
                _log.info("features of %d of %d texts", number * PART, len(texts))
        found.append(safetensors.torch.load_file(path)["features"])
    return torch.cat(found)


def _digest(version: str, encoder: TextEncoder, texts: Sequence[Tensor], length: int) -> str:
    """Returns the name of what was made of these texts."""
    content = hashlib.sha256(f"{version}, {length}, {[len(text) for text in texts]}".encode())
    for file in encoder.files:
        content.update(file.sha256.encode())
    for text in texts:
        content.update(text.numpy().tobytes())
    return content.hexdigest()


def _pooled(network: Any, texts: Sequence[Tensor], length: int) -> Iterator[Tensor]:
    """Yields the features of one text after the other."""
    words: nn.Embedding = network.embeddings.word_embeddings
    for text in texts:
        state = network.embeddings(shortened(text, length)[None])
        means = [words(text).mean(0) if len(text) else torch.zeros(words.embedding_dim), state[0].mean(0)]
        for layer in network.encoder.layer[:LAYERS]:
            state = layer(state, None)
            means.append(state[0].mean(0))
        yield torch.stack(means).half()


def _below(network: Any, texts: Sequence[Tensor], length: int) -> Iterator[Tensor]:
    """Yields what enters the last layer of one text after the other."""
    for text in texts:
        state = network.embeddings(shortened(text, length)[None])
        for layer in network.encoder.layer[:-1]:
            state = layer(state, None)
        yield F.pad(state[0], (0, 0, 0, length - state.shape[1])).half()
