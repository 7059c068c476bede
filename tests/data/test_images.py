# SPDX-License-Identifier: Apache-2.0
"""Readers of images on tiny files of their formats, whole and damaged."""

import gzip
import io
import lzma
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest
import scipy.io
import torch

from torch_privacy.data import (
    DataError,
    load_cifar10,
    load_labeled_public_images,
    load_mnist,
    load_public_images,
    load_svhn,
)

RANDOM = np.random.default_rng(0)


def pixels(n, *shape):
    return RANDOM.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder, train, test):
    for part, (x, y) in {"train": train, "t10k": test}.items():
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.array(y, np.uint8)))


def assert_part(part, x, y):
    assert part.tensors[0].dtype == torch.float32
    assert part.tensors[1].dtype == torch.int64
    np.testing.assert_allclose(part.tensors[0].numpy() * 255, x, atol=1e-4)
    assert part.tensors[1].tolist() == list(y)


def test_load_mnist_reads_idx_files_packed_and_not(tmp_path):
    x, x_test = pixels(5, 28, 28), pixels(2, 28, 28)
    write_mnist(tmp_path, (x, [0, 9, 3, 3, 1]), (x_test, [7, 8]))
    data = load_mnist(tmp_path, verify=False)
    assert_part(data.train, x[:, None], [0, 9, 3, 3, 1])
    assert_part(data.test, x_test[:, None], [7, 8])
    assert data.num_classes == 10
    assert len(data.files) == 4


WRONG_IDX = {
    "empty": lambda good: b"",
    "only a head": lambda good: good[:10],
    "a byte short": lambda good: good[:-1],
    "a byte long": lambda good: good + b"\0",
    "labels, not images": lambda good: idx(np.zeros(5, np.uint8)),
    "integers, not bytes": lambda good: good[:2] + b"\x0c" + good[3:],
    "a huge size": lambda good: good[:4] + b"\xff\xff\xff\xff" + good[8:],
}


@pytest.mark.parametrize("kind", WRONG_IDX)
def test_load_mnist_refuses_a_wrong_idx_file(tmp_path, kind):
    x = pixels(5, 28, 28)
    write_mnist(tmp_path, (x, range(5)), (x, range(5)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(WRONG_IDX[kind](idx(x))))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: is (no idx file|truncated or changed).*Put the"):
        load_mnist(tmp_path, verify=False)


@pytest.mark.parametrize(
    ("labels", "error"), [(range(4), "has 4 labels for the 5 images of"), (range(6, 11), "above 9")]
)
def test_load_mnist_refuses_labels_that_do_not_fit(tmp_path, labels, error):
    write_mnist(tmp_path, (pixels(5, 28, 28), labels), (pixels(5, 28, 28), range(5)))
    with pytest.raises(DataError, match=rf"train-labels-idx1-ubyte: has .*{error.removeprefix('has ')}"):
        load_mnist(tmp_path, verify=False)


def test_load_mnist_verifies_its_files(tmp_path):
    write_mnist(tmp_path, (pixels(5, 28, 28), range(5)), (pixels(5, 28, 28), range(5)))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: is truncated or changed .* pass verify=False"):
        load_mnist(tmp_path)


class Python2(pickle._Pickler):
    """Writes bytes and texts as Python 2 did, and what makes an array by its name of then: as the batches are."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, text):
        content = text.encode() if isinstance(text, str) else text
        self.write(b"T" + struct.pack("<I", len(content)) + content)
        self.memoize(text)

    def save_function(self, function, name=None):
        assert function.__name__ == "_reconstruct"
        self.write(b"cnumpy.core.multiarray\n_reconstruct\n")

    dispatch[bytes] = dispatch[str] = save_text
    dispatch[type(np.empty(0).__reduce__()[0])] = save_function


def python2(batch):
    file = io.BytesIO()
    Python2(file, protocol=2).dump(batch)
    return file.getvalue()


PICKLES = {
    "of Python 2": python2,
    "of Python 3": lambda batch: pickle.dumps(batch, protocol=4),
    "of Python 3.14": lambda batch: pickle.dumps(batch, protocol=5),
    "of Python 3.14, in columns": lambda batch: pickle.dumps(
        batch | {b"data": np.asfortranarray(batch[b"data"])}, protocol=5
    ),
    "of Python 3 for 2": lambda batch: pickle.dumps(batch, protocol=2),
}


def write_batches(folder, dump=pickle.dumps):
    folder.mkdir(exist_ok=True)
    x, y = pixels(12, 3, 32, 32), RANDOM.integers(0, 10, 12)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(2 * i, 2 * i + 2)
        batch = {b"data": x[rows].reshape(2, 3072), b"labels": y[rows].tolist(), b"batch_label": b"a batch"}
        (folder / name).write_bytes(dump(batch))
    return x, y


@pytest.mark.parametrize("python", PICKLES)
def test_load_cifar10_reads_python_batches(tmp_path, python):
    x, y = write_batches(tmp_path / "cifar-10-batches-py", PICKLES[python])
    data = load_cifar10(tmp_path, verify=False)
    assert_part(data.train, x[:10], y[:10])
    assert_part(data.test, x[10:], y[10:])
    assert data.classes[:2] == ("airplane", "automobile")
    assert list(data.files)[-1] == "test_batch"


class Harm:
    def __reduce__(self):
        return print, ("this must not be printed",)


GOOD = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
WRONG_BATCHES = {
    "empty": (b"", "is no pickle of arrays, or is truncated"),
    "truncated": (pickle.dumps(GOOD)[:-100], "is no pickle of arrays, or is truncated"),
    "no pickle": (b"anything at all", "is no pickle of arrays"),
    "code": (pickle.dumps(GOOD | {"x": Harm()}), r"it asks for builtins\.print, which no array needs"),
    "a list": (pickle.dumps([1, 2]), "holds no data and labels"),
    "no labels": (pickle.dumps({"data": GOOD["data"]}), "holds no data and labels"),
    "too few labels": (pickle.dumps(GOOD | {"labels": [1]}), "holds no rows of 3072 bytes, one per label"),
    "narrow rows": (pickle.dumps(GOOD | {"data": GOOD["data"][:, 1:]}), "holds no rows of 3072 bytes"),
    "floats": (pickle.dumps(GOOD | {"data": np.zeros((2, 3072))}), "holds no rows of 3072 bytes"),
    "lists of pixels": (pickle.dumps(GOOD | {"data": [1, 2]}), "holds no rows of 3072 bytes"),
    "label 10": (pickle.dumps(GOOD | {"labels": [1, 10]}), "has labels that are not 0 to 9"),
    "label -1": (pickle.dumps(GOOD | {"labels": [1, -1]}), "has labels that are not 0 to 9"),
    "a tree": (pickle.dumps(GOOD | {"labels": [1, [2, 3]]}), "has labels that are not 0 to 9"),
    "texts": (pickle.dumps(GOOD | {"labels": ["a", "b"]}), "has labels that are not 0 to 9"),
}


@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_load_cifar10_refuses_a_wrong_batch(tmp_path, kind, capsys):
    content, error = WRONG_BATCHES[kind]
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_3: .*{error}.*Put the original data_batch_3"):
        load_cifar10(tmp_path, verify=False)
    assert capsys.readouterr().out == ""


def test_load_cifar10_names_a_missing_batch(tmp_path):
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"data_batch_4: no such file\. .*cs\.toronto\.edu"):
        load_cifar10(tmp_path, verify=False)


def differences(x):
    """What the README beside the compact form describes: R-G, G, B-G, less the neighbors to the left and above."""
    x = x.copy()
    x[:, 0] -= x[:, 1]
    x[:, 2] -= x[:, 1]
    for axis in (2, 3):
        x = np.diff(x, axis=axis, prepend=np.zeros_like(x.take([0], axis)))
    return x


def write_compact(folder, **changed):
    x, y = pixels(6, 3, 32, 32), np.arange(6, dtype=np.uint8)
    lossy = {"lossy_train": np.array([1], np.int32), "lossy_test": np.array([0], np.int32)}
    np.savez(folder / "cifar10_labels.npz", **{"train": y[:4], "test": y[4:], **lossy, **changed})
    (folder / "cifar10_train_images.u8.xz").write_bytes(lzma.compress(differences(x[:4]).tobytes()))
    (folder / "cifar10_test_images.u8.xz").write_bytes(lzma.compress(differences(x[4:]).tobytes()))
    return x, y


def test_load_cifar10_reads_the_compact_form(tmp_path):
    x, y = write_compact(tmp_path)
    data = load_cifar10(tmp_path, verify=False)
    assert_part(data.train, x[:4], y[:4])
    assert_part(data.test, x[4:], y[4:])
    exact = load_cifar10(tmp_path, exact_only=True, verify=False)
    assert_part(exact.train, x[[0, 2, 3]], [0, 2, 3])
    assert_part(exact.test, x[5:], [5])


def test_load_cifar10_prefers_the_original(tmp_path):
    write_compact(tmp_path)
    write_batches(tmp_path)
    assert "data_batch_1" in load_cifar10(tmp_path, verify=False).files


@pytest.mark.parametrize("content", [b"", b"PK\3\4 and no more", "truncated", "no labels"])
def test_load_cifar10_refuses_a_wrong_table_of_labels(tmp_path, content):
    write_compact(tmp_path)
    path = tmp_path / "cifar10_labels.npz"
    if content == "no labels":
        np.savez(path, train=np.zeros(4))
    else:
        path.write_bytes(path.read_bytes()[:-30] if content == "truncated" else content)
    with pytest.raises(DataError, match=r"cifar10_labels\.npz: is no table of labels"):
        load_cifar10(tmp_path, verify=False)


def test_load_cifar10_refuses_pixels_that_do_not_fit(tmp_path):
    write_compact(tmp_path, train=np.array([0, 1, 2, 10]))
    with pytest.raises(DataError, match=r"cifar10_labels\.npz: has labels that are not 0 to 9"):
        load_cifar10(tmp_path, verify=False)
    write_compact(tmp_path, train=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"cifar10_labels\.npz: has 3 labels for the 4 images"):
        load_cifar10(tmp_path, verify=False)
    (tmp_path / "cifar10_train_images.u8.xz").write_bytes(lzma.compress(bytes(3071)))
    with pytest.raises(DataError, match=r"cifar10_train_images\.u8\.xz: is truncated or changed \(3071 bytes"):
        load_cifar10(tmp_path, verify=False)


def test_load_public_images_reads_both_forms(tmp_path):
    x = pixels(3, 3, 32, 32)
    (tmp_path / "cifar-100-python").mkdir()
    batch = {b"data": x.reshape(3, 3072), b"fine_labels": [99, 0, 5]}
    (tmp_path / "cifar-100-python" / "train").write_bytes(python2(batch))
    one = load_public_images(tmp_path, num_images=2, verify=False)
    np.testing.assert_allclose(one.images.numpy() * 255, x[:2], atol=1e-4)
    (tmp_path / "images_2000.u8.xz").write_bytes(lzma.compress(x[::-1].tobytes()))
    two = load_public_images(tmp_path, num_images=3, verify=False)
    np.testing.assert_allclose(two.images.numpy() * 255, x[::-1], atol=1e-4)
    assert list(two.files) == ["images_2000.u8.xz"]
    labeled = load_labeled_public_images(tmp_path, verify=False)
    np.testing.assert_allclose(labeled.images.numpy() * 255, x, atol=1e-4)
    assert labeled.labels.tolist() == [99, 0, 5]
    with pytest.raises(DataError, match="cifar-100-python/train"):
        load_labeled_public_images(tmp_path)  # not the published file
    (tmp_path / "cifar-100-python" / "train").unlink()
    assert load_labeled_public_images(tmp_path) is None


def test_load_public_images_resizes_and_mixes_colors(tmp_path):
    x = np.zeros((2, 3, 32, 32), np.uint8)
    x[1, 1] = 255  # all green
    (tmp_path / "images_2000.u8.xz").write_bytes(lzma.compress(x.tobytes()))
    images = load_public_images(tmp_path, num_images=2, size=28, gray=True, verify=False).images
    assert images.shape == (2, 1, 28, 28)
    assert images.dtype == torch.float32
    np.testing.assert_allclose(images[1], 0.587, atol=1e-6)
    assert (images[0] == 0).all()
    with pytest.raises(ValueError, match=r"num_images=3 must lie in \(0, 2\]"):
        load_public_images(tmp_path, num_images=3, verify=False)


def write_svhn(folder, part, x, y):
    scipy.io.savemat(folder / f"{part}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": np.array(y)[:, None]})


def test_load_svhn_reads_matlab_files(tmp_path):
    x = pixels(6, 3, 32, 32)
    write_svhn(tmp_path, "train", x[:3], [10, 1, 9])
    write_svhn(tmp_path, "test", x[3:5], [2, 10])
    data = load_svhn(tmp_path, verify=False)
    assert_part(data.train, x[:3], [0, 1, 9])
    assert_part(data.test, x[3:5], [2, 0])
    with pytest.raises(DataError, match=r"extra_32x32\.mat: no such file"):
        load_svhn(tmp_path, extra=True, verify=False)
    write_svhn(tmp_path, "extra", x[5:], [4])
    both = load_svhn(tmp_path, extra=True, verify=False)
    assert_part(both.train, x[[0, 1, 2, 5]], [0, 1, 9, 4])
    assert len(both.files) == 3


def test_load_svhn_refuses_wrong_files(tmp_path):
    x, path = pixels(2, 3, 32, 32), tmp_path / "train_32x32.mat"
    write_svhn(tmp_path, "test", x, [1, 2])
    write_svhn(tmp_path, "train", x, [1, 2])
    for content in (b"", path.read_bytes()[:-50], b"anything at all" * 20):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train_32x32\.mat: is no MATLAB file of version 5, or is truncated"):
            load_svhn(tmp_path, verify=False)
    scipy.io.savemat(path, {"X": x})
    with pytest.raises(DataError, match=r"train_32x32\.mat: holds no array named y"):
        load_svhn(tmp_path, verify=False)
    for y, error in [([0, 1], "labels that are not 1 to 10"), ([1], r"holds X \(32, 32, 3, 2\) and y \(1, 1\)")]:
        write_svhn(tmp_path, "train", x, y)
        with pytest.raises(DataError, match=error):
            load_svhn(tmp_path, verify=False)
