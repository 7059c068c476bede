# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile data files: every reader returns data or names the file in one sentence."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import pickle
import resource
import shutil

import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutations

from torch_privacy.data import (
    HashedWords,
    load_adult,
    load_cifar10,
    load_imdb,
    load_mnist,
    load_movielens,
    load_svhn,
)
from torch_privacy.data.files import DataError

ALL = "TORCH_PRIVACY_ALL_FAULTS" in os.environ
PERSON = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K\n"
)
NUMBERS = np.random.default_rng(0)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def matlab(path, n):
    x, y = NUMBERS.integers(0, 256, (32, 32, 3, n), np.uint8), NUMBERS.integers(1, 11, (n, 1), np.uint8)
    scipy.io.savemat(path, {"X": x, "y": y}, do_compression=True)


def write_all(folder):
    """Small files of every format, in a folder for each."""
    for name in LOADERS:
        (folder / name).mkdir()
    (folder / "libsvm" / "a9a.xz").write_bytes(lzma.compress(b"+1 3:1 11:1\n-1 4:1 123:1\n" * 5))
    (folder / "libsvm" / "a9a.t").write_bytes(b"+1 3:1 11:1\n-1 4:1 123:1\n" * 5)
    (folder / "census" / "adult.data").write_text(PERSON * 9)
    (folder / "census" / "adult.test").write_text("|1x3 Cross validator\n" + PERSON.replace("K\n", "K.\n") * 9)
    ratings = [(user, movie, 1 + (user + movie) % 5, 964982703) for user in range(1, 9) for movie in (1, 2, 3)]
    (folder / "movielens" / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n" + "".join(f"{u},{m},{r}.0,{t}\n" for u, m, r, t in ratings)
    )
    (folder / "movielens" / "movies.csv").write_text('movieId,title,genres\n1,"A, B (1995)",x\n2,C,y\n3,D,z\n')
    (folder / "million" / "ratings.dat").write_text("".join(f"{u}::{m}::{r}::{t}\n" for u, m, r, t in ratings))
    (folder / "million" / "movies.dat").write_text("1::A (1995)::x\n2::B::y\n3::C::z\n")
    for part in ("train", "test"):
        (folder / "imdb" / f"imdb_{part}.tsv.xz").write_bytes(lzma.compress(b"1\t9\t0\tgood film\n0\t2\t1\tbad\n" * 4))
        matlab(folder / "svhn" / f"{part}_32x32.mat", 3)
    for part, n in (("train", 4), ("t10k", 3)):
        images = gzip.compress(idx(NUMBERS.integers(0, 256, (n, 28, 28), np.uint8)))
        (folder / "mnist" / f"{part}-images-idx3-ubyte.gz").write_bytes(images)
        (folder / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(n, dtype=np.uint8)))
    batches = folder / "cifar" / "cifar-10-batches-py"
    batches.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {"data": NUMBERS.integers(0, 256, (2, 3072), np.uint8), "labels": [1, 2]}
        (batches / name).write_bytes(pickle.dumps(batch, protocol=2))
    labels = {"train": [1, 2, 3], "test": [4], "lossy_train": [0], "lossy_test": []}
    np.savez(folder / "compact" / "cifar10_labels.npz", **{k: np.array(v, np.int64) for k, v in labels.items()})
    for part, n in (("train", 3), ("test", 1)):
        pixels = NUMBERS.integers(0, 256, (n, 3, 32, 32), np.uint8).tobytes()
        (folder / "compact" / f"cifar10_{part}_images.u8.xz").write_bytes(lzma.compress(pixels))


LOADERS = {
    "libsvm": (load_adult, ["a9a.xz", "a9a.t"]),
    "census": (load_adult, ["adult.data", "adult.test"]),
    "movielens": (load_movielens, ["ratings.csv", "movies.csv"]),
    "million": (load_movielens, ["ratings.dat", "movies.dat"]),
    "imdb": (lambda *a, **k: load_imdb(*a, vocabulary=HashedWords(50), length=8, **k), ["imdb_train.tsv.xz"]),
    "mnist": (load_mnist, ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"]),
    "svhn": (load_svhn, ["train_32x32.mat"]),
    "cifar": (load_cifar10, ["cifar-10-batches-py/data_batch_3", "cifar-10-batches-py/test_batch"]),
    "compact": (load_cifar10, ["cifar10_labels.npz", "cifar10_train_images.u8.xz"]),
}
CHOICES = st.sampled_from(list(LOADERS)).flatmap(
    lambda name: st.tuples(st.just(name), mutations([*LOADERS[name][1], *REPACKED.get(name, ())]))
)
REPACKED = {"libsvm": ["a9a.t"], "imdb": ["imdb_test.tsv"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_all(folder)
    test = folder / "imdb" / "imdb_test.tsv.xz"  # one part unpacked, so that damage reaches its lines
    (folder / "imdb" / "imdb_test.tsv").write_bytes(lzma.decompress(test.read_bytes()))
    test.unlink()
    for name, (load, _) in LOADERS.items():
        assert len(load(folder / name, verify=False).train) > 0
    return folder


@pytest.mark.thorough
@settings(
    max_examples=20_000 if ALL else 200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(chosen=CHOICES)
def test_damaged_data_are_read_or_refused(chosen, data, tally):
    name, (file, changes) = chosen
    copy = data / "copy"
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(data / name, copy)
    for change in changes:
        with contextlib.suppress(Exception):  # the file is no longer of its format
            change.apply(copy / file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failure = ""
    try:
        read = LOADERS[name][0](copy, verify=False)
        for part in (read.train, read.test):
            for number in range(min(len(part), 2)):
                part[number]
    except DataError as error:
        failure = "" if len(str(error)) < 2000 and str(error).endswith(".") else f"no sentence: {error}"
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    tally("damaged data file", 1, int(not failure))
    assert not failure, (chosen, failure)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 * 2**10
