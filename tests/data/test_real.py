# SPDX-License-Identifier: Apache-2.0
"""The real files, where they are: sizes, balance and first bytes, as their publishers and ../shared/data state them."""

import hashlib
from dataclasses import replace

import pytest
import torch

from torch_privacy.data import Vocabulary, encode, load_mnist, load_movielens, load_public_images, tokenize
from torch_privacy.data.cifar import COMPACT, _read_pixels, _undo_differences
from torch_privacy.data.files import SHARED
from torch_privacy.data.imdb import SOURCE, _tokens

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="there is no ../shared/data beside this checkout")


@pytest.mark.thorough
def test_mnist():
    data = load_mnist(SHARED)
    x, y = data.train.tensors
    assert x.shape == (60000, 1, 28, 28)
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test.tensors[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert round(float(x.mean()), 4) == 0.1307  # the value usually quoted
    assert data.files["train-images-idx3-ubyte.gz"].startswith("440fcabf73cc546f")


@pytest.mark.thorough
def test_cifar10_compact_form():
    file = COMPACT.folder(SHARED).read("cifar10_test_images.u8.xz")
    x = _undo_differences(_read_pixels(file))
    decoded = "0f4be6232c5306e72c4d2207043d917b854f1144d5e6b8dfb109a2dc951fb133"
    assert x.shape == (10000, 3, 32, 32)
    assert hashlib.sha256(x.tobytes()).hexdigest() == decoded


def test_public_images():
    assert load_public_images(SHARED, size=28, gray=True).images.shape == (2000, 1, 28, 28)


def test_movielens():
    data = load_movielens(SHARED)
    assert (len(data.train), len(data.test)) == (80669, 20167)
    assert data.num_ids == (610, 9742)
    pairs, labels = (torch.cat(parts) for parts in zip(data.train.tensors, data.test.tensors, strict=True))
    assert len(pairs[:, 0].unique()) == 610
    assert len(pairs[:, 1].unique()) == 9724
    assert int(pairs[:, 0].bincount().min()) == 20
    assert labels.unique().tolist() == list(range(10))


@pytest.mark.thorough
def test_imdb():
    """One file, and the first reviews of it only: all of them take seconds."""
    file = SOURCE.folder(SHARED).read("imdb_train.tsv.xz")
    lines = file.content.splitlines(keepends=True)
    assert (len(lines), sum(line.startswith(b"1\t") for line in lines)) == (25000, 12500)
    tokens, labels = _tokens(replace(file, content=b"".join(lines[:1000])))
    assert labels.tolist() == [0, 1] * 500
    assert tokenize(lines[0].decode())[3:8] == ["story", "of", "a", "man", "who"]
    vocabulary = Vocabulary.frequent(tokens, size=500, origin="a test", public=False)
    assert vocabulary.words[:3] == ("the", "and", "a")
    x = encode(tokens, vocabulary, length=256)
    assert (x.shape, x.max()) == ((1000, 256), 499)
