# SPDX-License-Identifier: Apache-2.0
"""Encodes texts as rows of word ids, with vocabularies that state whether they use private data."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torch_privacy.support import validate as _check

PAD, UNKNOWN = 0, 1  # the numbers of no word at all, and of any word that a vocabulary does not have
FIRST_WORD = 2
LETTERS = bytes(
    b if b >= 128 or chr(b).isalnum() or b == ord("'") else ord(" ")
    for b in (ord(chr(b).lower()) if b < 128 else b for b in range(256))
)


def tokenize(text: str) -> list[str]:
    """Returns the words of a text in order: runs of letters, digits and apostrophes within a word, ASCII in lower case.

    Marks of line breaks, ``<br />``, separate words. Whatever is not ASCII is kept as it is.

    Example:
        >>> tokenize("It's GOOD!<br /><br />Not 'great', though: 7/10.")
        ["it's", 'good', 'not', 'great', 'though', '7', '10']
    """
    spaced = text.encode("utf-8", "replace").replace(b"<br />", b" ").translate(LETTERS).decode("utf-8")
    return [word for quoted in spaced.split() if (word := quoted.strip("'"))]  # split knows spaces beyond ASCII


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokenized texts: every text's words as indices into the list of distinct words."""

    distinct: list[str]
    places: NDArray[np.int32]  # one text after the other
    ends: NDArray[np.int64]  # where each text ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Tokens":
        """Tokenizes texts, about 12,000 reviews per second; raises a ``ValueError`` for a single string."""
        if isinstance(texts, str):
            raise ValueError(f"encode: texts={texts[:20]!r}... must be a list of texts, not one text. Pass [text].")
        known: defaultdict[str, int] = defaultdict(count().__next__)
        lists = [[known[word] for word in tokenize(text)] for text in texts]
        ends = np.cumsum([len(words) for words in lists], dtype=np.int64)
        places = np.fromiter(chain.from_iterable(lists), np.int32, int(ends[-1]) if len(ends) else 0)
        return cls(list(known), places, ends)


class Words(Protocol):
    """Maps words to ids below ``size``; 0 is reserved for padding and 1 for unknown words."""

    @property
    def size(self) -> int: ...
    def numbers(self, words: Sequence[str]) -> NDArray[np.int64]: ...
    @property
    def not_covered(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Vocabulary:
    """A list of words; a word's id is its index plus two.

    Where the words come from decides what an epsilon is worth: a list counted on private texts is a release of its own,
    which nothing here makes private. Whoever makes one says so: ``public=False`` puts ``origin`` among the things that
    the privacy statement does not cover.
    """

    words: tuple[str, ...]
    origin: str  # where the words come from, in words
    public: bool  # whether that says nothing about the examples to be protected

    @classmethod
    def frequent(cls, texts: Iterable[str] | Tokens, *, size: int, origin: str, public: bool) -> "Vocabulary":
        """Returns the most frequent words of some texts with ids below ``size``; ties in alphabetical order.

        Example:
            >>> vocabulary = Vocabulary.frequent(["a b a", "c"], size=4, origin="two texts", public=True)
            >>> vocabulary.words, vocabulary.numbers(["b", "a", "d"]).tolist()
            (('a', 'b'), [3, 2, 1])
        """
        _check.whole("Vocabulary.frequent", at_least=FIRST_WORD + 1, size=size)
        tokens = texts if isinstance(texts, Tokens) else Tokens.of(texts)
        counts = np.bincount(tokens.places, minlength=len(tokens.distinct)).tolist()
        ranked = sorted(zip(tokens.distinct, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return cls(tuple(word for word, _ in ranked[: size - FIRST_WORD]), origin, public)

    @property
    def size(self) -> int:
        """Returns the number of ids, that is, the rows of an embedding."""
        return len(self.words) + FIRST_WORD

    def numbers(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Returns the id of each word."""
        known = {word: i for i, word in enumerate(self.words, FIRST_WORD)}
        return np.array([known.get(word, UNKNOWN) for word in words], np.int64)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Returns what epsilon does not cover, for the privacy statement."""
        return () if self.public else (f"the vocabulary, {self.origin}",)


@dataclass(frozen=True)
class HashedWords:
    """Maps words to ids by a hash of their letters, without a vocabulary, so that nothing is taken from any text.

    The number is 2 + crc32(UTF-8) mod (size - 2): the same everywhere and always; words share numbers by chance.

    Example:
        >>> HashedWords(1000).numbers(["good", "bad"]).tolist()
        [712, 467]
    """

    size: int

    def __post_init__(self):
        _check.whole("HashedWords", at_least=FIRST_WORD + 1, size=self.size)

    def numbers(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Returns the id of each word, never that of unknown words."""
        hashes = np.array([zlib.crc32(word.encode()) for word in words], np.int64)
        return FIRST_WORD + hashes % (self.size - FIRST_WORD)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Returns nothing, since no text was used."""
        return ()


def encode(
    texts: Iterable[str] | Tokens, words: Words, *, length: int, keep: str = "last", pad: str = "before"
) -> NDArray[np.int64]:
    """Returns texts as rows of exactly ``length`` ids: longer texts are cut, shorter ones padded with 0.

    Args:
        texts: The texts, or their tokens.
        words: The vocabulary.
        length: Words per text, at least 1.
        keep: Which words of a long text stay, the ``"first"`` or the ``"last"``.
        pad: Where a short text is filled, ``"before"`` or ``"after"`` its words. The defaults are those of Keras.

    Returns:
        int64 of shape (n, length).

    Example:
        >>> vocabulary = Vocabulary(("a", "b"), origin="an example", public=True)
        >>> encode(["a b b x", "b"], vocabulary, length=3).tolist()
        [[3, 3, 1], [0, 0, 3]]
    """
    _check.whole("encode", at_least=1, length=length)
    _check.one_of("encode", ("first", "last"), keep=keep)
    _check.one_of("encode", ("before", "after"), pad=pad)
    tokens = texts if isinstance(texts, Tokens) else Tokens.of(texts)
    numbers = words.numbers(tokens.distinct)[tokens.places]
    lengths = np.diff(tokens.ends, prepend=0)
    kept = np.minimum(lengths, length)
    starts = tokens.ends - (kept if keep == "last" else lengths)
    column = (
        np.arange(length) - (length - kept if pad == "before" else 0 * kept)[:, None]
    )  # which kept word stands there
    inside = (column >= 0) & (column < kept[:, None])
    encoded = np.full((len(lengths), length), PAD, np.int64)
    encoded[inside] = numbers[(starts[:, None] + column)[inside]]
    return encoded
