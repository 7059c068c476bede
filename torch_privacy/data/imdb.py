# SPDX-License-Identifier: Apache-2.0
"""Reads IMDb movie reviews: texts, and whether they are positive."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_privacy.data.dataset import Data
from torch_privacy.data.files import DataError, File, Folder, Source, digests, verify_content
from torch_privacy.data.text import Tokens, Vocabulary, Words, encode
from torch_privacy.support.read_file import read_bytes

SOURCE = Source(
    name="IMDb",
    folders=("imdb",),
    checksums={
        "imdb_train.tsv.xz": "sha256:fb5475bb69320751fef173b473de4cbe5a5b368cdf29807b627e7e9b987e4cf2",
        "imdb_test.tsv.xz": "sha256:b7c215fff1f30a0b86df603069840f0b3fb670038fcbedfb8dfeb3fcfa7d2a9b",
    },
    origin="https://ai.stanford.edu/~amaas/data/sentiment/, or its folder aclImdb",
    licence="none stated by A. L. Maas et al., who ask to be cited; research use",
)
LONGEST_REVIEW = 2**20  # bytes
CLASSES = ("negative", "positive")


@dataclass(frozen=True)
class TrainingWords:
    """Requests the most frequent words of the training texts, counted without noise: no epsilon covers them."""

    size: int  # rows of the embedding; two of them are for padding and for unknown words


@dataclass(frozen=True, eq=False)
class Texts:
    """Reviews as they are written, their labels (n,), int64, and the name and SHA-256 of their file."""

    texts: list[str]
    labels: NDArray[np.int64]
    files: dict[str, str]


def load_imdb(
    folder: str | Path | None = None,
    *,
    vocabulary: Words | TrainingWords,
    length: int = 256,
    keep: str = "last",
    pad: str = "before",
    verify: bool = True,
) -> Data:
    """Returns IMDb: 25,000 and 25,000 reviews as word ids, int64 of shape (n, length), half of them positive.

    Args:
        folder: The folder of all data, with ``imdb_train.tsv.xz`` and ``imdb_test.tsv.xz`` in ``imdb/`` or itself, or
            the authors' folder ``aclImdb``. Without it ``TORCH_PRIVACY_DATA`` names it, else ``../shared/data`` beside
            a checkout is taken.
        vocabulary: Where the numbers come from, which is for the caller to choose: ``HashedWords(size)`` looks at no
            text; a ``Vocabulary`` of public texts looks at no review; ``TrainingWords(size)`` counts the training
            reviews, as the papers do, and ``Data.not_covered`` then says so.
        length: Words per review.
        keep: Which words of a longer review stay, the ``"first"`` or the ``"last"``.
        pad: Where a shorter one is filled with zeros, ``"before"`` or ``"after"`` its words.
        verify: Whether the reviews must be the published ones.

    Returns:
        Data with the size of the vocabulary in ``num_ids``.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message names it and says where to get it.

    Source: A. L. Maas, R. E. Daly, P. T. Pham, D. Huang, A. Y. Ng, C. Potts, "Learning word vectors for sentiment
    analysis", ACL 2011.
    """
    place = SOURCE.folder(folder, verify=verify)
    files = [_read(place, part) for part in ("train", "test")]
    (train, train_labels), (test, test_labels) = (_tokens(file) for file in files)
    if isinstance(vocabulary, TrainingWords):
        origin = "the most frequent words of the training reviews, counted without noise"
        vocabulary = Vocabulary.frequent(train, size=vocabulary.size, origin=origin, public=False)
    x, x_test = (
        torch.from_numpy(encode(tokens, vocabulary, length=length, keep=keep, pad=pad)) for tokens in (train, test)
    )
    return Data(
        name="IMDb",
        train=TensorDataset(x, torch.from_numpy(train_labels)),
        test=TensorDataset(x_test, torch.from_numpy(test_labels)),
        classes=CLASSES,
        licence=SOURCE.licence,
        files=digests(*files),
        num_ids=(vocabulary.size,),
        not_covered=vocabulary.not_covered,
    )


def _read(place: Folder, part: str) -> File:
    """Returns one part's reviews as a file of lines (label, stars, number, text), also from the authors' folder."""
    name = f"imdb_{part}.tsv.xz"
    for base in (place.path / "aclImdb", place.path / "imdb" / "aclImdb", place.path):
        folder = base / part
        if not place.has(name) and (folder / "pos").is_dir() and (folder / "neg").is_dir():
            content = _join(folder)
            file = File(folder, hashlib.sha256(content).hexdigest(), content, place.cure(name))
            if place.verify:
                verify_content(file, SOURCE.checksums[name])
            return file
    return place.read(name)


def _join(folder: Path) -> bytes:
    """Reads ``neg/NUMBER_STARS.txt`` and ``pos/...``, in the order of their numbers, negative ones first."""
    reviews = []
    for label, name in enumerate(("neg", "pos")):
        for path in (folder / name).glob("*.txt"):
            number, _, stars = path.stem.partition("_")
            if not (number.isdecimal() and stars.isdecimal()):
                raise DataError(f"{path}: is not called NUMBER_STARS.txt, as every review is. Move it out of there.")
            try:
                text = read_bytes(path, LONGEST_REVIEW).replace(b"\n", b" ")
            except ValueError as error:
                raise DataError(f"{path}: cannot be read ({error}). Restore it from aclImdb.") from None
            fields = str(label).encode(), stars.encode(), number.encode(), text
            reviews.append((int(number), label, b"\t".join(fields) + b"\n"))
    return b"".join(line for *_, line in sorted(reviews))


def load_imdb_texts(folder: str | Path | None = None, *, verify: bool = True) -> tuple[Texts, Texts]:
    """Returns the reviews of both parts as they are written, in the order of their numbers.

    Arguments and errors are those of `load_imdb`.
    """
    place = SOURCE.folder(folder, verify=verify)
    train, test = (_texts(_read(place, part)) for part in ("train", "test"))
    return train, test


def _tokens(file: File) -> tuple[Tokens, NDArray[np.int64]]:
    """Returns the words and labels of a file's reviews."""
    found = _texts(file)
    return Tokens.of(found.texts), found.labels


def _texts(file: File) -> Texts:
    """Returns a file's reviews."""
    lines = [line.split("\t", 3) for line in file.content.decode("utf-8", "replace").removesuffix("\n").split("\n")]
    for i, fields in enumerate(lines):
        if len(fields) != 4 or fields[0] not in ("0", "1"):
            file.refuse(f"line {i + 1} is not a label 0 or 1, stars, a number and a text, with tabs between")
    labels = np.array([int(label) for label, *_ in lines], np.int64)
    return Texts([text for *_, text in lines], labels, digests(file))
