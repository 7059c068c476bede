# SPDX-License-Identifier: Apache-2.0
"""Provides canaries of text: a public prefix and a random suffix, and how much of the suffix a model has learned."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ..support.validate import whole


class Exposure(NamedTuple):
    """Scores of canaries: how well a model knows each suffix, against random ones that it has never met."""

    p_values: np.ndarray
    """(m,) share of suffixes, the canary's own included, with a loss that is as small."""

    bits: np.ndarray
    """(m,) ``log2(1 / p)``: 0 for the worst of all ranks, 1 on the median."""


def next_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of a text (t,) for next-token prediction, each (t - 1,)."""
    return tokens[:-1], tokens[1:]


class TextCanaries(Dataset):
    """Canaries for language models: texts that begin with the same prefix and end with a random suffix.

    Each token of a suffix is drawn uniformly from the alphabet, independently of all else: what a model knows of it
    comes from the canary alone. The data set has one example for each text; pass it to `tp.audit` as canaries, with
    ``score="loss"``.

    Args:
        prefix: token ids, such as those of "My access code is"; public.
        alphabet: token ids among which those of a suffix are drawn, such as the ten digits; two or more.
        length: tokens in a suffix.
        count: number of canaries.
        example: makes an example like those of the data set from the tokens (t,) of a text; by default inputs and
            labels for next-token prediction.
        test_seed: fixes the suffixes, for tests only.

    Guarantees:
        - suffixes come from the operating system's random numbers.
        - for a model that a canary has not influenced, ``exposure(model).p_values[i] <= s`` has a probability of at
          most s; for one trained with (ε, δ)-privacy, of at most ``e^ε s + δ``.

    Raises:
        ValueError: an alphabet without a choice, or a number out of range.

    Example:
        >>> canaries = TextCanaries(prefix=[7, 3], alphabet=range(10), length=4, count=100)
        >>> inputs, labels = canaries[0]
        >>> len(canaries), inputs[:2].tolist(), labels.shape
        (100, [7, 3], torch.Size([5]))
        >>> knows_nothing = torch.nn.Embedding(10, 10)
        >>> canaries.exposure(knows_nothing).p_values.shape
        (100,)

    Source: Carlini et al. (2019), arXiv 1802.08232, for exposure; the p-value is its exact form with random references.
    """

    def __init__(
        self,
        prefix: Sequence[int],
        alphabet: Sequence[int],
        length: int,
        count: int,
        *,
        example: Callable[[Tensor], Any] = next_tokens,
        test_seed: int | None = None,
    ):
        whole("TextCanaries", length=length, count=count, at_least=1)
        self.prefix, self.alphabet = (torch.as_tensor(list(ids), dtype=torch.int64) for ids in (prefix, alphabet))
        if not len(self.prefix) or len(self.alphabet.unique()) < max(2, len(self.alphabet)):
            raise ValueError(
                f"TextCanaries: prefix={self.prefix.tolist()} and alphabet={self.alphabet.tolist()}: must be one "
                "or more tokens, and two or more that differ."
            )
        seed = secrets.randbits(256) if test_seed is None else test_seed
        self.length, self._example, self._rng = length, example, np.random.Generator(np.random.PCG64DXSM(seed))
        self.tokens = self._texts(count)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self._example(self.tokens[index])

    def _texts(self, count: int) -> Tensor:
        """Returns new texts (count, t) with random suffixes."""
        places = self._rng.integers(len(self.alphabet), size=(count, self.length))
        return torch.cat([self.prefix.expand(count, -1), self.alphabet[torch.from_numpy(places)]], 1)

    def exposure(self, model: nn.Module, *, num_references: int = 1000, batch_size: int = 256) -> Exposure:
        """Returns how well a causal model knows each suffix, by its rank among new random ones.

        Args:
            model: takes texts (k, t) and returns logits (k, t, v), or an object that has them as ``logits``; those at
                position j are of the token at j + 1.
            num_references: R; p-values are multiples of 1/(R + 1).
            batch_size: texts that the model takes at once.
        """
        whole("TextCanaries.exposure", num_references=num_references, batch_size=batch_size, at_least=1)
        references = self._losses(model, self._texts(num_references), batch_size).sort().values
        below = torch.searchsorted(references, self._losses(model, self.tokens, batch_size), right=True)
        p_values = (1 + below.numpy()) / (1 + num_references)
        return Exposure(p_values, -np.log2(p_values))

    def _losses(self, model: nn.Module, texts: Tensor, batch_size: int) -> Tensor:
        """Returns the negative log-likelihood of each suffix given the prefix, in eval mode."""
        device = next((p.device for p in model.parameters()), texts.device)
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            with torch.no_grad():
                parts = [self._of_batch(model, part.to(device)) for part in texts.split(batch_size)]
        finally:
            for module, training in modes:
                module.training = training
        return torch.cat(parts)

    def _of_batch(self, model: nn.Module, texts: Tensor) -> Tensor:
        returned = model(texts)
        logits = getattr(returned, "logits", returned)[:, -self.length - 1 : -1].double()
        losses = F.cross_entropy(logits.flatten(0, 1), texts[:, -self.length :].flatten(), reduction="none")
        return (
            losses.view(len(texts), -1).sum(1).float().cpu()
        )  # equal ones stay equal, whatever their place in a batch
