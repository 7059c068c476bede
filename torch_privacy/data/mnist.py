# SPDX-License-Identifier: Apache-2.0
"""Reads MNIST: 28x28 gray images of handwritten digits, in the idx format."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torch_privacy.data.dataset import Data, images
from torch_privacy.data.files import File, Source, digests, is_published

SOURCE = Source(
    name="MNIST",
    folders=("mnist", "MNIST/raw"),
    checksums={
        "train-images-idx3-ubyte.gz": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    origin="https://ossci-datasets.s3.amazonaws.com/mnist/",
    licence="none stated by Y. LeCun, C. Cortes and C. Burges; CC BY-SA 3.0 is what libraries quote",
)
UNSIGNED_BYTE = 0x08


def load_mnist(folder: str | Path | None = None, *, verify: bool = True) -> Data:
    """Returns MNIST: 60,000 and 10,000 images, float32 of shape (n, 1, 28, 28) in [0, 1], and the digits they show.

    Args:
        folder: The folder of all data, with the four idx files, gzipped or not, in ``mnist/``, ``MNIST/raw/`` or
            itself. Without it ``TORCH_PRIVACY_DATA`` names it, else ``../shared/data`` beside a checkout is taken.
        verify: Whether the files must be the published ones. Off, other data of 10 classes in this format are read,
            such as Fashion-MNIST; ``Data.name`` is then the name of their folder.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message names it and says where to get it.

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", 1998.
    """
    place = SOURCE.folder(folder, verify=verify)
    files = [place.read(name) for name in SOURCE.checksums]
    train, test = (_part(*pair) for pair in (files[:2], files[2:]))
    is_mnist = all(map(is_published, files, SOURCE.checksums.values()))
    name, licence = (SOURCE.name, SOURCE.licence) if is_mnist else (_name_of_own(files[0].path), "unknown")
    return Data(name, train, test, tuple(range(10)), licence, digests(*files))


def _name_of_own(path: Path) -> str:
    """Returns the name of the folder that holds the folder of data, such as ``fashion`` of ``fashion/mnist/...``."""
    parts = path.absolute().parent.parts
    named = next((folder for folder in SOURCE.folders if parts[-len(Path(folder).parts) :] == Path(folder).parts), "")
    return parts[len(parts) - len(Path(named).parts) - 1]


def read_idx(file: File, num_dimensions: int) -> NDArray[np.uint8]:
    """Returns the array in an idx file of bytes: two zeros, the type, the number of dimensions, the sizes, the entries.

    Raises:
        DataError: If the file is not of this form or not as long as its sizes say.
    """
    start = 4 + 4 * num_dimensions
    head = bytes([0, 0, UNSIGNED_BYTE, num_dimensions])
    file.check(
        file.content[:4] == head and len(file.content) >= start,
        f"is no idx file of bytes in {num_dimensions} dimensions",
    )
    shape = tuple(np.frombuffer(file.content, ">u4", num_dimensions, offset=4).tolist())
    length = start + math.prod(shape)
    file.check(
        len(file.content) == length, f"is truncated or changed ({len(file.content)} bytes, its head says {length})"
    )
    return np.frombuffer(file.content, np.uint8, offset=start).reshape(shape)


def _part(pixels: File, digits: File):
    """Returns one part's images and labels, which must agree in number."""
    x, y = read_idx(pixels, 3), read_idx(digits, 1)
    digits.check(len(x) == len(y), f"has {len(y)} labels for the {len(x)} images of {pixels.path.name}")
    digits.check(y.max(initial=0) < 10, "has labels above 9")
    return images(x[:, None], y)
