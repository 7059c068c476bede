# SPDX-License-Identifier: Apache-2.0
import lzma
import shutil

import numpy as np
import pytest
import torch

from torch_privacy.data import DataError, load_adult
from torch_privacy.data.adult import SOURCE

SHIPPED = SOURCE.shipped
PARTS = {"train": (32561, 7841), "test": (16281, 3846)}  # people, high incomes: the published counts
CENSUS = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, \
United-States, <=50K
50, Self-emp-not-inc, 83311, Bachelors, 13, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 13, \
United-States, <=50K
54, ?, 180211, Some-college, 10, Married-civ-spouse, ?, Husband, Asian-Pac-Islander, Male, 0, 0, 60, South, >50K

"""  # persons 1, 2 and 28 of adult.data


@pytest.mark.parametrize("part", PARTS)
def test_load_adult_has_the_published_counts(part):
    data = load_adult()
    features, labels = getattr(data, part).tensors
    people, rich = PARTS[part]
    assert features.shape == (people, 123)
    assert labels.shape == (people,)
    assert int(labels.sum()) == rich
    assert features.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert set(features.unique().tolist()) == {0.0, 1.0}
    assert set(labels.unique().tolist()) == {0, 1}
    assert data.classes == ("<=50K", ">50K")


def test_load_adult_reads_the_first_line_as_written():
    features, labels = load_adult(test_fraction=0.1).train.tensors  # the file begins: -1 3:1 11:1 14:1 19:1 39:1 ...
    line = [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]
    assert (np.flatnonzero(features[0]) + 1).tolist() == line
    assert labels[0] == 0
    assert round(float(features.sum(1).mean()), 2) == 13.87


@pytest.mark.thorough
def test_load_adult_splits_at_random_as_the_papers_do():
    one, again, other = (load_adult(test_fraction=0.1, seed=seed) for seed in (1, 1, 2))
    assert (len(one.train), len(one.test)) == (29305, 3256)
    assert torch.equal(one.test.tensors[0], again.test.tensors[0])
    assert not torch.equal(one.test.tensors[0], other.test.tensors[0])
    assert list(one.files) == ["a9a.xz"]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("subfolder", ["adult", "."])
def test_load_adult_reads_another_folder(tmp_path, subfolder, monkeypatch):
    (tmp_path / subfolder).mkdir(exist_ok=True)
    shutil.copy(SHIPPED / "a9a.xz", tmp_path / subfolder)
    assert len(load_adult(tmp_path, test_fraction=0.1).train) == 29305
    monkeypatch.setenv("TORCH_PRIVACY_DATA", str(tmp_path))
    assert len(load_adult(test_fraction=0.1).train) == 29305


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
    with pytest.raises(
        DataError, match=r"a9a\.xz: is (empty|truncated or (changed|damaged)).* Put the original .*CC BY 4\.0"
    ):
        load_adult(tmp_path)


def test_load_adult_names_the_expected_place_when_missing(tmp_path, monkeypatch):
    expected = rf"{tmp_path}/adult/a9a\.xz: no such file\. Put the original .* licence: CC BY 4\.0.* in the package\."
    with pytest.raises(DataError, match=expected):
        load_adult(tmp_path)
    monkeypatch.setenv("TORCH_PRIVACY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=expected):
        load_adult()


def test_load_adult_reads_the_census_table_as_libsvm_does(tmp_path):
    (tmp_path / "adult.data").write_text(CENSUS)
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + CENSUS.replace("50K\n", "50K.\n"))
    data, libsvm = load_adult(tmp_path, verify=False), load_adult()
    persons = [0, 1, 27]
    for part in (data.train, data.test):
        assert torch.equal(part.tensors[0], libsvm.train.tensors[0][persons])
        assert torch.equal(part.tensors[1], libsvm.train.tensors[1][persons])


def test_load_adult_passes_over_a_line_of_names(tmp_path):
    (tmp_path / "adult.data").write_text("age,workclass\n".replace("workclass", ",".join("abcdefghijklmn")) + CENSUS)
    assert len(load_adult(tmp_path, test_fraction=0.5, verify=False).train) == 1


WRONG_TABLES = {
    "a column is missing": CENSUS.replace("39, ", "", 1),
    "a word is unknown": CENSUS.replace("Bachelors", "Bachelor", 1),
    "a number is none": CENSUS.replace("77516", "x", 1),
    "an income is unknown": CENSUS.replace("<=50K", "50K", 1),
    "the end is missing": CENSUS[:100],
}


@pytest.mark.parametrize("kind", WRONG_TABLES)
def test_load_adult_names_a_person_that_it_cannot_read(tmp_path, kind):
    (tmp_path / "adult.data").write_text(WRONG_TABLES[kind])
    with pytest.raises(DataError, match=r"adult\.data: person 1 is not described as in the census table"):
        load_adult(tmp_path, test_fraction=0.5, verify=False)


@pytest.mark.parametrize(
    ("content", "error"), [("\n", "holds no people"), ('39, "' + "x" * 200_000, "is no table of people")]
)
def test_load_adult_refuses_what_holds_no_table(tmp_path, content, error):
    (tmp_path / "adult.data").write_text(content)
    with pytest.raises(DataError, match=rf"adult\.data: {error}"):
        load_adult(tmp_path, test_fraction=0.5, verify=False)


@pytest.mark.parametrize("line", ["", "+2 3:1", "+1 3:2", "+1 0:1", "+1 124:1", "+1 3", "1 x:1"])
def test_load_adult_names_a_line_that_it_cannot_read(tmp_path, line):
    (tmp_path / "a9a").write_text(f"+1 3:1 123:1\n{line}\n-1 1:1\n")
    with pytest.raises(DataError, match=r"a9a: line 2 is not of the form"):
        load_adult(tmp_path, test_fraction=0.5, verify=False)


def test_load_adult_verifies_the_content_however_it_is_packed(tmp_path):
    content = lzma.decompress((SHIPPED / "a9a.xz").read_bytes())
    (tmp_path / "a9a").write_bytes(content)
    assert list(load_adult(tmp_path, test_fraction=0.1).files) == ["a9a"]
    (tmp_path / "a9a").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"a9a: is truncated or changed .*SHA256.*pass verify=False"):
        load_adult(tmp_path, test_fraction=0.1)


def test_notice_states_source_authors_and_licence():
    notice = (SHIPPED / "NOTICE").read_text()
    for words in ("Becker", "Kohavi", "CC BY 4.0", "Changes:", "UCI"):
        assert words in notice
