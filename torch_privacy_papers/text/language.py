# SPDX-License-Identifier: Apache-2.0
"""A small language model of texts of one length: its tokens, its network, and how it draws texts.

A text becomes a code, its last tokens, and ends, always as many numbers. The code stands for what the text is to be
like, such as a good or a bad review; `PLAIN` stands for nothing.

Source: N. S. Keskar et al. (2019), "CTRL", arXiv:1909.05858, for codes; R. Sennrich, B. Haddow, A. Birch (2016),
"Neural machine translation of rare words with subword units", arXiv:1508.07909, for tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_privacy_papers.text.encoder import installed

END, PLAIN = 0, 1  # tokens: after a text, to its full length; and the code of a text of which nothing is known
CODES = {"negative": 2, "positive": 3}
SPECIAL = ["<end>", "<plain>", *(f"<{name}>" for name in CODES)]
IGNORED = -100  # as in `torch.nn.functional.cross_entropy`
HEADS = 4  # of the attention
AT_ONCE = 256  # texts that are drawn together


def new_tokenizer(texts: Iterable[str], size: int) -> bytes:
    """Returns a tokenizer of ``size`` parts of words, bytes among them, learnt from public texts in lower case."""
    Tokenizer, models, normalizers, pre_tokenizers, decoders, trainers = installed(
        "tokenizers", "Tokenizer", "models", "normalizers", "pre_tokenizers", "decoders", "trainers"
    )
    found = Tokenizer(models.BPE())
    found.normalizer = normalizers.Sequence([normalizers.Replace("<br />", " "), normalizers.Lowercase()])
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, trainer)
    return found.to_str().encode()


class Layer(nn.Module):
    """One layer of attention to earlier places, and of a dense network of each place."""

    def __init__(self, units: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_of_attention, self.norm = nn.LayerNorm(units), nn.LayerNorm(units)
        self.attention, self.mixed = nn.Linear(units, 3 * units), nn.Linear(units, units)
        self.dense = nn.Sequential(nn.Linear(units, 4 * units), nn.GELU(), nn.Linear(4 * units, units))

    def forward(self, states: Tensor) -> Tensor:
        n, t, d = states.shape
        queries, keys, values = (
            self.attention(self.norm_of_attention(states)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.mixed(seen.transpose(1, 2).reshape(n, t, d))
        return states + self.dense(self.norm(states))


class LanguageModel(nn.Module):
    """A causal network of which every state knows the code: maps tokens (n, t) to logits (n, t, size) of the next ones.

    The network holds its tokenizer, so that a file of its weights is all that is needed to draw texts.

    Args:
        tokenizer: from `new_tokenizer`.
        length: t + 1, numbers of a text.
        units: of a state.
        layers: number of blocks.
    """

    def __init__(self, tokenizer: bytes, length: int, units: int = 128, layers: int = 3):
        super().__init__()
        self.register_buffer("tokenizer", torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8))
        self.reader = Reader(tokenizer, length)
        self.words, self.places = nn.Embedding(self.reader.size, units), nn.Embedding(length - 1, units)
        self.blocks = nn.Sequential(*(Layer(units, HEADS) for _ in range(layers)))
        self.norm = nn.LayerNorm(units)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "LanguageModel":
        """Returns the network that has these weights.

        Raises:
            ValueError: they are those of another network.
        """
        try:
            (length, units), tokenizer = weights["places.weight"].shape, weights["tokenizer"].numpy().tobytes()
            layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
            found = cls(tokenizer, length + 1, units, layers)
            found.load_state_dict(dict(weights))
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"they are not those of a language model ({str(error).splitlines()[0]})") from None
        return found.eval()

    def states(self, tokens: Tensor) -> Tensor:
        """Returns the last states, (n, t, units)."""
        words = self.words(tokens)
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        return self.norm(self.blocks(words + words[:, :1] + places))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.states(tokens), self.words.weight)

    @torch.no_grad()
    def draw(self, codes: Sequence[int], prompt: str = "", seed: int = 0) -> list[str]:
        """Returns a text for each code, which begins with the prompt; the same ones for the same seed.

        Texts are drawn in batches of `AT_ONCE`, token by token, each with the network's own probability.

        Raises:
            ValueError: the prompt leaves no place for a token.
        """
        begun, most = torch.tensor(self.reader.encode(prompt), dtype=torch.int64), self.reader.length - 2
        if len(begun) > most:
            raise ValueError(
                f"generate: the prompt has {len(begun):,} tokens, and texts of this network at most {most + 1}. Give "
                f"one of at most {most}."
            )
        rng = torch.Generator().manual_seed(seed)
        return [text for part in torch.tensor(codes).split(AT_ONCE) for text in self._drawn(part, begun, rng)]

    def _drawn(self, codes: Tensor, begun: Tensor, rng: torch.Generator) -> list[str]:
        tokens = torch.cat([codes[:, None], begun.expand(len(codes), -1)], 1)
        is_ended = torch.zeros(len(codes), dtype=torch.bool)
        while tokens.shape[1] < self.reader.length and not is_ended.all():
            logits = F.linear(self.states(tokens.to(self.words.weight.device))[:, -1], self.words.weight).cpu()
            logits[:, PLAIN : len(SPECIAL)] = -torch.inf
            drawn = torch.multinomial(logits.softmax(1), 1, generator=rng).squeeze(1)
            is_ended |= drawn == END
            tokens = torch.cat([tokens, drawn.masked_fill(is_ended, END)[:, None]], 1)
        return [self.reader.decode(text[1:].tolist()) for text in tokens]


class Reader:
    """Reads texts as tokens, and tokens as texts."""

    def __init__(self, tokenizer: bytes, length: int):
        (Tokenizer,) = installed("tokenizers", "Tokenizer")
        self._tokenizer: Any = Tokenizer.from_str(tokenizer.decode())
        self.length, self.size = length, self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without special ones, even where the text has their names."""
        return [token for token in self._tokenizer.encode(text).ids if token >= len(SPECIAL)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text up to the first end."""
        kept = tokens[: tokens.index(END)] if END in tokens else tokens
        return self._tokenizer.decode([token for token in kept if token >= len(SPECIAL)]).strip()

    def examples(self, texts: Iterable[str], codes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets (n, t) of the last tokens of texts: the shape says nothing of their lengths."""
        rows = []
        for text, code in zip(texts, codes, strict=True):
            tokens = [code, *self.encode(text)[-(self.length - 2) :]]
            rows.append(torch.tensor(tokens + [END] * (self.length - len(tokens))))
        return inputs_and_targets(torch.stack(rows))


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens of texts (..., t + 1) but the last, and the next ones, of which none counts after an end."""
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    return inputs, targets.masked_fill(inputs == END, IGNORED)


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of -log p over the tokens of each text, of shape (n,)."""
    of_token = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return of_token.sum(1) / (targets != IGNORED).sum(1)
