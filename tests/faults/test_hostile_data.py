# SPDX-License-Identifier: Apache-2.0
"""Files of strangers: bombs are not unpacked, and nothing in a pickle runs."""

import bz2
import gzip
import lzma
import pickle
import random
import resource
from pathlib import Path

import numpy as np
import pytest

from torch_privacy.data import files
from torch_privacy.data.arrays import unpickle
from torch_privacy.data.files import DataError, File, unpack

PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
GOOD = {"data": np.arange(12, dtype=np.uint8).reshape(3, 4), "labels": [1, 2, 3]}


def read(content: bytes) -> object:
    return unpickle(File(Path("batch"), "", content, "Get another."))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("suffix", PACK)
def test_a_bomb_is_not_unpacked(suffix, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 2**20)
    assert unpack(suffix, PACK[suffix](b"a" * 2**20)) == b"a" * 2**20
    bomb = PACK[suffix](b"a" * 2**27)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="its content is larger than 1048576 bytes"):
        unpack(suffix, bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: half of the bomb


@pytest.mark.parametrize("protocol", range(2, 5))
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", ">i4", "bool"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_protocol_are_read(protocol, dtype, order):
    array = np.asarray(np.arange(12).reshape(3, 4), dtype, order=order)
    found = read(pickle.dumps({"x": array, "y": [1, "a", None]}, protocol=protocol))
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["x"], array)
    assert found["x"].dtype == array.dtype
    assert found["y"] == [1, "a", None]


class Runs:
    """Writes a file when it is unpickled in the ordinary way."""

    def __reduce__(self):
        return open, ("/tmp/torch_privacy_was_here", "w")


HOSTILE = {
    "code": pickle.dumps(GOOD | {"x": Runs()}),
    "an array of objects": pickle.dumps({"x": np.array([Runs], object)}),
    "too few bytes": pickle.dumps(GOOD, protocol=2).replace(b"K\x03K\x04", b"K\x7fK\x04"),
    "a memo of 2 GiB": b"\x80\x02}r\xff\xff\xff\x7fU\x04data",
    "a text of 2 GiB": b"\x80\x02T\xff\xff\xff\x7fa.",
    "no end": b"\x80\x02" + b"(" * 100_000,
    "itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_or_harmless(case):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if case == "itself":
        assert isinstance(read(HOSTILE[case]), list)
    else:
        with pytest.raises(DataError, match="is no pickle of arrays"):
            read(HOSTILE[case])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


def test_damaged_pickles_are_refused_or_give_arrays():
    """Any of many changed bytes; the reader in C crashed the process on some."""
    content, chance = pickle.dumps(GOOD, protocol=2), random.Random(3)
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 5))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            read(bytes(damaged))
        except DataError:
            pass
