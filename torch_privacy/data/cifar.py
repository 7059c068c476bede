# SPDX-License-Identifier: Apache-2.0
"""Reads CIFAR-10, and images of CIFAR-100 as public data, mostly without labels: 32x32 pixels, three colors."""

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from torch_privacy.data.arrays import unpickle
from torch_privacy.data.dataset import Data, images, scaled
from torch_privacy.data.files import File, Folder, Source, digests
from torch_privacy.support import validate as _check

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
LICENCE = "none stated by A. Krizhevsky, who asks to be cited; research use"
ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = 3, 32, 32  # red, green and blue planes
CIFAR10 = Source(
    name="CIFAR-10",
    folders=("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10"),
    checksums={
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    },
    origin=f"{ORIGIN}, Python version",
    licence=LICENCE,
)
COMPACT = Source(
    name="CIFAR-10",
    folders=("cifar10",),
    checksums={
        "cifar10_train_images.u8.xz": "sha256:f3c4c8da050e514cf7241773d03aac588bb0542efd6d2e2ca57d0101e89825c3",
        "cifar10_test_images.u8.xz": "sha256:11ed31dba99761233f322912977e864d7270310ccdee7098370d6f29393236b8",
        "cifar10_labels.npz": "sha256:e26672cf9558c0fdce68885ec0afe3d1a454d69396238a17ab3202f3c4f4a647",
    },
    origin="the shared data of this project",
    licence=LICENCE,
)
CIFAR100 = Source(
    name="CIFAR-100",
    folders=("cifar-100-python", "cifar100/cifar-100-python"),
    checksums={"train": "md5:16019d7e3df5f24257cddd939b257f8d"},
    origin=f"{ORIGIN}, Python version",
    licence=LICENCE,
)
AUXILIARY = Source(
    name="CIFAR-100",
    folders=("cifar100_auxiliary",),
    checksums={"images_2000.u8.xz": "sha256:e1b9254fd23bcfe69257448c5859a7956c92633c0a9eba1780f8ae42e6034014"},
    origin=f"the shared data of this project; cifar-100-python/train of {ORIGIN} serves as well",
    licence=LICENCE,
)


def load_cifar10(folder: str | Path | None = None, *, exact_only: bool = False, verify: bool = True) -> Data:
    """Returns CIFAR-10: 50,000 and 10,000 images, float32 of shape (n, 3, 32, 32) in [0, 1], in the official order.

    It reads the six batches of the Python version or, if these are missing, the compact format of this project's
    shared data, in which 111 of the 60,000 images are decoded from JPEG.

    Args:
        folder: The folder of all data, with the files in ``cifar-10-batches-py/``, ``cifar10/`` or itself. Without it
            ``TORCH_PRIVACY_DATA`` names it; the last resort is ``../shared/data`` beside a checkout.
        exact_only: Whether to leave out those 111 images (86 of train, 25 of test). The batches have none.
        verify: Whether the files must be the published ones. In either case pickles may hold only arrays.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message names it and says where to get it.

    Source: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
    """
    place, compact = (source.folder(folder, verify=verify) for source in (CIFAR10, COMPACT))
    if not place.has("data_batch_1") and any(compact.has(name) for name in COMPACT.checksums):
        return _load_compact(compact, exact_only)
    files = [place.read(name) for name in CIFAR10.checksums]
    batches = [_read_batch(file, "labels", 10) for file in files]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True))
    return Data("CIFAR-10", images(x, y), images(*batches[-1]), CLASSES, LICENCE, digests(*files))


def _load_compact(place: Folder, exact_only: bool) -> Data:
    train, test, table = (place.read(name) for name in COMPACT.checksums)
    labels = _read_table(table)
    parts = {}
    for part, file in {"train": train, "test": test}.items():
        x, y = _undo_differences(_read_pixels(file)), _labels(table, labels[part], 10)
        table.check(len(x) == len(y), f"has {len(y)} labels for the {len(x)} images of {file.path.name}")
        if exact_only:
            exact = np.isin(np.arange(len(x)), labels[f"lossy_{part}"], invert=True)
            x, y = x[exact], y[exact]
        parts[part] = images(x, y)
    files = digests(train, test, table)
    return Data("CIFAR-10", **parts, classes=CLASSES, licence=LICENCE, files=files)


@dataclass(frozen=True, eq=False)
class PublicImages:
    """Images that need no protection, (n, channels, size, size), float32 in [0, 1], mostly without labels."""

    name: str
    images: Tensor
    licence: str
    files: dict[str, str]  # name -> SHA-256, as it lies on the disk
    labels: Tensor | None = None  # (n,), 0 to 99


def load_public_images(
    folder: str | Path | None = None, *, num_images: int = 2000, size: int = 32, gray: bool = False, verify: bool = True
) -> PublicImages:
    """Returns images of CIFAR-100 without labels, as anchors of gradient embedding perturbation.

    Read are the 2,000 of this project's shared data or, where these are missing, the Python version's ``train``.

    Args:
        folder: The folder of all data, with ``cifar100_auxiliary/images_2000.u8.xz`` or ``cifar-100-python/train``.
        num_images: Number of images to take, from the first.
        size: Height and width, by bilinear interpolation with antialiasing; 28 for networks of MNIST.
        gray: Whether to mix the colors into one channel, 0.299 R + 0.587 G + 0.114 B.
        verify: Whether the file must be the published one.

    Raises:
        DataError: If the file is missing, truncated, changed or malformed; the message says where to get it.
        ValueError: If there are fewer images.
    """
    _check.whole("load_public_images", at_least=1, num_images=num_images, size=size)
    place, compact = (source.folder(folder, verify=verify) for source in (CIFAR100, AUXILIARY))
    if not compact.has("images_2000.u8.xz") and place.has("train"):
        file = place.read("train")
        pixels, _ = _read_batch(file, "fine_labels", 100)
    else:
        file = compact.read("images_2000.u8.xz")
        pixels = _read_pixels(file)
    _check.in_range("load_public_images", 0, len(pixels), num_images=num_images, hint=f"That is all of {file.path}.")
    x = resized(scaled(pixels[:num_images]), size=size, gray=gray)
    return PublicImages("CIFAR-100", x, LICENCE, digests(file))


def load_labeled_public_images(folder: str | Path | None = None, *, verify: bool = True) -> PublicImages | None:
    """Returns the 50,000 training images of CIFAR-100 with their labels, or None if there is no file of them.

    Args:
        folder: The folder of all data, with the Python version's ``cifar-100-python/train``.
        verify: Whether the file must be the published one. In either case the pickle may hold only arrays.

    Raises:
        DataError: If the file is truncated, changed or malformed.
    """
    place = CIFAR100.folder(folder, verify=verify)
    if not place.has("train"):
        return None
    file = place.read("train")
    x, y = images(*_read_batch(file, "fine_labels", 100)).tensors
    return PublicImages("CIFAR-100", x, LICENCE, digests(file), y)


def resized(x: Tensor, *, size: int, gray: bool) -> Tensor:
    """Returns images (n, 3, h, w) in [0, 1] with another size, by bilinear interpolation, and without color if asked.

    Gray is 0.299 R + 0.587 G + 0.114 B.
    """
    if gray:
        x = (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return x if size == x.shape[-1] else F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(0, 1)


def _read_batch(file: File, labels_name: str, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Returns images and labels of one pickled batch with rows of red, green and blue planes."""
    batch = unpickle(file)
    file.check(isinstance(batch, dict) and {"data", labels_name} <= batch.keys(), f"holds no data and {labels_name}")
    pixels, labels = batch["data"], _labels(file, batch[labels_name], num_classes)
    right = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
    file.check(right and pixels.shape == (len(labels), math.prod(SHAPE)), "holds no rows of 3072 bytes, one per label")
    return pixels.reshape(-1, *SHAPE), labels


def _labels(file: File, values: Any, num_classes: int) -> NDArray[np.int64]:
    """Returns the labels as integers; refuses values that are no labels."""
    labels = np.array(values if isinstance(values, np.ndarray) else [*values], object)
    are_labels = labels.ndim == 1 and all(isinstance(i, int) and 0 <= i < num_classes for i in labels.tolist())
    file.check(are_labels, f"has labels that are not 0 to {num_classes - 1}")
    return labels.astype(np.int64)


def _read_pixels(file: File) -> NDArray[np.uint8]:
    """Returns images stored as bytes, one after the other."""
    size = math.prod(SHAPE)
    file.check(
        len(file.content) % size == 0, f"is truncated or changed ({len(file.content)} bytes, no multiple of {size})"
    )
    return np.frombuffer(file.content, np.uint8).reshape(-1, *SHAPE)


def _undo_differences(x: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns images from the differences of neighboring pixels of the planes R-G, G and B-G, modulo 256."""
    x = x.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    x[:, 0] += x[:, 1]
    x[:, 2] += x[:, 1]
    return x


def _read_table(file: File) -> dict[str, NDArray[np.int64]]:
    """Returns the labels of both parts, and the indices of the inexact images."""
    try:
        with np.load(io.BytesIO(file.content), allow_pickle=False) as table:
            return {name: table[name].astype(np.int64) for name in ("train", "test", "lossy_train", "lossy_test")}
    except (EOFError, KeyError, ValueError, OSError, NotImplementedError, zipfile.BadZipFile) as error:
        file.refuse(f"is no table of labels ({error})")
