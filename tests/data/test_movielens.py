# SPDX-License-Identifier: Apache-2.0
import lzma

import pytest
import torch

from torch_privacy.data import DataError, load_movielens

RATINGS = "userId,movieId,rating,timestamp\r\n7,30,4.5,964982703\r\n7,10,0.5,964982703\r\n9,30,5.0,1\r\n12,20,3.0,2\r\n"
MOVIES = 'movieId,title,genres\r\n30,"A, B (1998)",Drama\r\n10,Bl\u00e5 (1999),Comedy\r\n20,C,Drama\r\n40,D,Drama\r\n'
RATINGS_1M = "7::30::4::978300760\n7::10::1::978302109\n9::30::5::1\n12::20::3::2\n"
MOVIES_1M = "30::A, B (1998)::Drama\n10::Bl\u00e5 (1999)::Comedy\n20::C: D::Drama\n40::E::Drama\n"
EXPECTED = {(0, 2), (0, 0), (1, 2), (2, 1)}  # users 7, 9, 12 and movies 10, 20, 30, 40 by their places


def write_small(folder, ratings=RATINGS, movies=MOVIES):
    (folder / "ratings.csv").write_bytes(ratings.encode())
    (folder / "movies.csv.xz").write_bytes(lzma.compress(movies.encode()))


def write_million(folder, ratings=RATINGS_1M, movies=MOVIES_1M):
    (folder / "ratings.dat").write_bytes(ratings.encode("latin1"))
    (folder / "movies.dat").write_bytes(movies.encode("latin1"))


def read_all(folder):
    """Every rating: the pair of user and movie, and the stars."""
    data = load_movielens(folder, test_fraction=0.25, verify=False)
    assert (len(data.train), len(data.test)) == (3, 1)
    assert data.train.tensors[0].dtype == data.train.tensors[1].dtype == torch.int64
    assert data.num_ids == (3, 4)
    rows = [*zip(*data.train.tensors, strict=True), *zip(*data.test.tensors, strict=True)]
    return {tuple(pair.tolist()): data.classes[label] for pair, label in rows}


def test_load_movielens_reads_commas(tmp_path):
    write_small(tmp_path)
    assert read_all(tmp_path) == {(0, 2): 4.5, (0, 0): 0.5, (1, 2): 5.0, (2, 1): 3.0}


def test_load_movielens_reads_colons(tmp_path):
    (tmp_path / "ml-1m").mkdir()
    write_million(tmp_path / "ml-1m")
    write_small(tmp_path)  # the larger set is taken
    assert read_all(tmp_path) == {(0, 2): 4, (0, 0): 1, (1, 2): 5, (2, 1): 3}


def test_load_movielens_numbers_movies_by_the_catalog_alone(tmp_path):
    """An unrated movie has a number, too: what is rated says nothing about the numbers."""
    write_small(tmp_path, RATINGS.replace("9,30,5.0,1\r\n", "").replace("12,20,3.0,2", "12,40,3.0,2"))
    data = load_movielens(tmp_path, test_fraction=0.4, verify=False)
    assert data.num_ids == (2, 4)
    assert max(*data.train.tensors[0][:, 1].tolist(), *data.test.tensors[0][:, 1].tolist()) == 3
    assert data.not_covered == ("which users have rated anything at all",)


WRONG_RATINGS = {
    "empty": ("", "holds no ratings"),
    "only names": ("userId,movieId,rating,timestamp\n", "holds no ratings"),
    "names cut short": ("userId,mov", "holds no ratings"),
    "a row cut short": (RATINGS[:-6], "is no table of ratings, or is truncated"),
    "no numbers": (RATINGS.replace("4.5", "good"), "is no table of ratings"),
    "three columns": ("1,2,3\n4,5,6\n", "has not four columns of numbers"),
    "half a user": (RATINGS.replace("\n9,", "\n9.5,"), "has not four columns of numbers"),
    "nobody": (RATINGS.replace("\n9,", "\nnan,"), "has not four columns of numbers"),
    "an unknown movie": (RATINGS.replace(",20,", ",21,"), "rating 4 has movie 21, .* the 4 known to movies.csv"),
    "six stars": (RATINGS.replace("5.0", "6.0"), "rating 3 has the stars 6, which is not one of the 10 of the scale"),
}


@pytest.mark.parametrize("kind", WRONG_RATINGS)
def test_load_movielens_refuses_wrong_ratings(tmp_path, kind):
    content, error = WRONG_RATINGS[kind]
    write_small(tmp_path, content)
    with pytest.raises(DataError, match=rf"ratings\.csv: .*{error}.* Put the original ratings\.csv\.xz"):
        load_movielens(tmp_path, verify=False)


@pytest.mark.parametrize("front", ["\ufeff", " ", "\n"])
def test_load_movielens_loses_no_rating_to_what_stands_before_it(tmp_path, front):
    headless = RATINGS.split("\n", 1)[1]
    write_small(tmp_path, headless)
    expected = read_all(tmp_path)
    write_small(tmp_path, front + headless)
    assert read_all(tmp_path) == expected


def test_load_movielens_refuses_half_stars_with_colons(tmp_path):
    write_million(tmp_path, RATINGS_1M.replace("::4::", "::4.5::"))
    with pytest.raises(DataError, match=r"ratings\.dat: rating 1 has the stars 4\.5, which .* the 5 of the scale"):
        load_movielens(tmp_path, verify=False)


@pytest.mark.parametrize(("movies", "error"), [("", "no movies"), ("movieId,title\nx,A\n", "no table of movies")])
def test_load_movielens_refuses_a_wrong_catalog(tmp_path, movies, error):
    write_small(tmp_path, movies=movies)
    with pytest.raises(DataError, match=rf"movies\.csv\.xz: .*{error}"):
        load_movielens(tmp_path, verify=False)


def test_load_movielens_verifies_its_files(tmp_path):
    write_million(tmp_path)
    with pytest.raises(DataError, match=r"ratings\.dat: is truncated or changed .* may not be redistributed"):
        load_movielens(tmp_path)
