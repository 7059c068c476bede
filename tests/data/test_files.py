# SPDX-License-Identifier: Apache-2.0
"""Finding, unpacking and verifying files; what all readers do with folders and damaged files."""

import bz2
import gzip
import hashlib
import lzma

import numpy as np
import pytest

from torch_privacy.data import (
    DataError,
    HashedWords,
    files,
    load_cifar10,
    load_imdb,
    load_mnist,
    load_movielens,
    load_public_images,
    load_svhn,
    random_split,
)
from torch_privacy.data.files import Source, digests

CONTENT = b"some content\n" * 100
SUM = hashlib.md5(CONTENT).hexdigest()
SOURCE = Source("Some data", ("some", "other"), {"a.txt.gz": f"md5:{SUM}", "b.txt": None}, "https://a.b", "CC0")
PACKINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
READERS = {  # name -> (reader, the file that it asks for first, what it says of the licence)
    "MNIST": (load_mnist, "mnist/train-images-idx3-ubyte.gz", "CC BY-SA 3.0"),
    "CIFAR-10": (load_cifar10, "cifar-10-batches-py/data_batch_1", "research use"),
    "CIFAR-100": (load_public_images, "cifar100_auxiliary/images_2000.u8.xz", "research use"),
    "SVHN": (load_svhn, "svhn/train_32x32.mat", "non-commercial"),
    "MovieLens": (load_movielens, "movielens/ratings.csv.xz", "no commercial use"),
    "IMDb": (lambda *a: load_imdb(*a, vocabulary=HashedWords(10)), "imdb/imdb_train.tsv.xz", "research use"),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("subfolder", ["some", "other", "."])
def test_file_is_found_and_unpacked(tmp_path, packing, subfolder):
    (tmp_path / subfolder).mkdir(exist_ok=True)
    path = tmp_path / subfolder / f"a.txt{packing}"
    path.write_bytes(PACKINGS[packing](CONTENT))
    file = SOURCE.folder(tmp_path).read("a.txt.gz")
    assert (file.path, file.content) == (path, CONTENT)
    assert digests(file) == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


def test_file_that_something_unpacked_but_did_not_rename_is_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(CONTENT)
    assert SOURCE.folder(tmp_path).read("a.txt.gz").content == CONTENT


@pytest.mark.parametrize("packing", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("kind", ["truncated", "changed"])
def test_damaged_packing_is_named_with_the_cure(tmp_path, packing, kind):
    packed = PACKINGS[packing](CONTENT)
    middle = len(packed) // 2
    wrong = (
        packed[:-5] if kind == "truncated" else packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :]
    )
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(wrong)
    cure = rf"Put the original a\.txt\.gz at {tmp_path}/some/a\.txt\.gz \(from https://a\.b; licence: CC0\)\."
    with pytest.raises(DataError, match=rf"{path}: is truncated or (damaged|changed).*{cure}"):
        SOURCE.folder(tmp_path).read("a.txt.gz")


def test_changed_content_is_refused_unless_it_is_not_verified(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=rf"truncated or changed \(1299 bytes of content, MD5 .* expected {SUM[:12]}"):
        SOURCE.folder(tmp_path).read("a.txt.gz")
    assert SOURCE.folder(tmp_path, verify=False).read("a.txt.gz").content == CONTENT[:-1]


def test_content_without_a_published_checksum_passes(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"anything")
    assert SOURCE.folder(tmp_path).read("b.txt").content == b"anything"


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(CONTENT)

    def unreadable(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", unreadable)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)\. Put the original"):
        SOURCE.folder(tmp_path).read("a.txt.gz")


@pytest.mark.parametrize("folder", ["/no\0where", "x" * 300, "/dev/null"])
def test_folder_that_cannot_be_looked_into_holds_nothing(folder):
    with pytest.raises(DataError, match=r": no such folder\. Put the original a\.txt\.gz at"):
        SOURCE.folder(folder).read("a.txt.gz")


def test_folder_is_the_argument_then_the_variable_then_the_shared_one(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARED", tmp_path / "shared")
    monkeypatch.delenv("TORCH_PRIVACY_DATA", raising=False)
    with pytest.raises(
        DataError, match=r"Some data: no folder .* Get a\.txt\.gz, b\.txt from https://a\.b .*: CC0.*--data"
    ):
        SOURCE.folder(None)
    (tmp_path / "shared").mkdir()
    assert SOURCE.folder(None).path == tmp_path / "shared"
    monkeypatch.setenv("TORCH_PRIVACY_DATA", "/named")
    assert str(SOURCE.folder(None).path) == "/named"
    assert str(SOURCE.folder("/chosen").path) == "/chosen"
    assert "~" not in str(SOURCE.folder("~/chosen").path)


@pytest.mark.parametrize("name", READERS)
def test_reader_says_where_to_get_missing_data(tmp_path, name):
    read, path, licence = READERS[name]
    with pytest.raises(DataError, match=rf"{tmp_path}/{path}: no such file\. Put the original .* licence: .*{licence}"):
        read(tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_reader_says_how_to_name_a_folder(tmp_path, name, monkeypatch):
    read, _, licence = READERS[name]
    monkeypatch.setattr(files, "SHARED", tmp_path / "shared")
    monkeypatch.delenv("TORCH_PRIVACY_DATA", raising=False)
    with pytest.raises(
        DataError, match=rf"{name}.*: no folder of data is named\. Get .*{licence}.* TORCH_PRIVACY_DATA"
    ):
        read()


def test_random_split_has_the_papers_sizes_and_names_every_row_once():
    train, test = random_split(32561, test_fraction=0.1, seed=0)
    assert (len(train), len(test)) == (29305, 3256)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(32561))


def test_random_split_depends_on_the_seed_alone():
    one, again, other = (random_split(1000, test_fraction=0.1, seed=seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("content", [b"", b"<html>404</html>"])
def test_file_of_another_kind_is_named_empty_or_changed(tmp_path, content):
    (tmp_path / "a.txt.gz").write_bytes(content)
    said = "is empty" if not content else r"is truncated or changed \(16 bytes"
    with pytest.raises(DataError, match=rf"{tmp_path / 'a.txt.gz'}: {said}.*Put the original a\.txt\.gz at"):
        SOURCE.folder(tmp_path).read("a.txt.gz")
