# SPDX-License-Identifier: Apache-2.0
import shutil

import numpy as np
import pytest

from torch_privacy.data import DataError, load_adult, random_split
from torch_privacy.data.adult import SHIPPED

PARTS = {"train": (32561, 7841), "test": (16281, 3846)}  # people, high incomes: the published counts


@pytest.mark.parametrize("part", PARTS)
def test_load_adult_has_the_published_counts(part):
    features, labels = load_adult(part=part)
    people, rich = PARTS[part]
    assert features.shape == (people, 123)
    assert labels.shape == (people,)
    assert int(labels.sum()) == rich
    assert features.dtype == np.float32
    assert labels.dtype == np.int64
    assert set(np.unique(features)) == {0.0, 1.0}
    assert set(np.unique(labels)) == {0, 1}


def test_load_adult_reads_the_first_line_as_written():
    features, labels = load_adult()  # the file begins: -1 3:1 11:1 14:1 19:1 39:1 ...
    assert (np.flatnonzero(features[0]) + 1).tolist() == [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]
    assert labels[0] == 0
    assert round(float(features.sum(1).mean()), 2) == 13.87


@pytest.mark.parametrize("subfolder", ["adult", "."])
def test_load_adult_reads_another_folder(tmp_path, subfolder, monkeypatch):
    (tmp_path / subfolder).mkdir(exist_ok=True)
    shutil.copy(SHIPPED / "a9a.xz", tmp_path / subfolder)
    assert load_adult(tmp_path)[0].shape == (32561, 123)
    monkeypatch.setenv("TORCH_PRIVACY_DATA", str(tmp_path))
    assert load_adult()[0].shape == (32561, 123)


def damage(path, kind):
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "changed":
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("kind", ["truncated", "changed", "empty"])
def test_load_adult_refuses_a_damaged_file(tmp_path, kind):
    path = tmp_path / "a9a.xz"
    shutil.copy(SHIPPED / "a9a.xz", path)
    damage(path, kind)
    with pytest.raises(DataError, match=r"a9a\.xz: is truncated or changed .* Put the original .*CC BY 4\.0"):
        load_adult(tmp_path)


def test_load_adult_names_the_expected_place_when_missing(tmp_path, monkeypatch):
    expected = rf"{tmp_path}/adult/a9a\.xz: no such file\. Put the original .* \(licence: CC BY 4\.0"
    with pytest.raises(DataError, match=expected):
        load_adult(tmp_path)
    monkeypatch.setenv("TORCH_PRIVACY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=expected):
        load_adult()


def test_load_adult_refuses_an_unknown_part():
    with pytest.raises(ValueError, match="part='valid' must be one of 'train', 'test'"):
        load_adult(part="valid")


def test_notice_states_source_authors_and_licence():
    notice = (SHIPPED / "NOTICE").read_text()
    for words in ("Becker", "Kohavi", "CC BY 4.0", "Changes:", "UCI"):
        assert words in notice


def test_random_split_has_the_papers_sizes_and_names_every_row_once():
    train, test = random_split(32561, test_fraction=0.1, seed=0)
    assert (len(train), len(test)) == (29305, 3256)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(32561))


def test_random_split_depends_on_the_seed_alone():
    one, again, other = (random_split(1000, test_fraction=0.1, seed=seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
