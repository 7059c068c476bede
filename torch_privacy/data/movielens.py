# SPDX-License-Identifier: Apache-2.0
"""Reads MovieLens: the ratings of movies by users, in stars."""

import csv
import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from torch_privacy.data.dataset import Data, random_split, rows
from torch_privacy.data.files import File, Source, digests

LICENCE = "GroupLens: research use, no commercial use without permission; see the README beside the data"
SMALL = Source(
    name="MovieLens latest-small",
    folders=("movielens", "ml-latest-small"),
    checksums={
        "ratings.csv.xz": "sha256:aa289ca83157595d0df6aea1be6a4ded676ddc4385472e8313a8ed9805352646",
        "movies.csv.xz": "sha256:5a5f32dd9bb3797b8e728a1b98958789d2b13f294a69fdfbc5727f8a9611aa07",
    },
    origin="https://grouplens.org/datasets/movielens/latest/",
    licence=LICENCE,
)
MILLION = Source(
    name="MovieLens 1M",
    folders=("ml-1m", "movielens/ml-1m", "movielens"),
    checksums={
        "ratings.dat": "md5:a89aa3591bc97d6d4e0c89459ff39362",
        "movies.dat": "md5:ef9fd9ff8d1b33faf73e2122c371e910",
    },
    origin="https://grouplens.org/datasets/movielens/1m/",
    licence=LICENCE + "; may not be redistributed",
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HALF_STARS = tuple(0.5 * i for i in range(1, 11))
STARS = tuple(float(i) for i in range(1, 6))


def load_movielens(
    folder: str | Path | None = None, *, test_fraction: float = 0.2, seed: int = 0, verify: bool = True
) -> Data:
    """Returns MovieLens, split at random: ids of user and movie, int64 of shape (n, 2), and the rating as a class.

    ``ml-1m`` is taken where it is found (1,000,209 ratings of 1 to 5 stars by 6,040 users), else ``latest-small``
    (100,836 ratings of 0.5 to 5 stars by 610 users, which GroupLens calls a data set for development).

    Args:
        folder: The folder of all data, with ``ratings.dat`` and ``movies.dat`` in ``ml-1m/``, or ``ratings.csv`` and
            ``movies.csv`` in ``movielens/`` or ``ml-latest-small/``. Without it ``TORCH_PRIVACY_DATA`` names it, else
            ``../shared/data`` beside a checkout is taken.
        test_fraction: Share of the ratings to hold out; the paper's is 0.2.
        seed: Public seed of the split.
        verify: Whether the files must be the published ones. Off, the other data sets in these formats are read.

    Returns:
        Data with the stars of each label in ``classes``, and the numbers of users and of movies in ``num_ids``.
        Movies are numbered in the order of the catalog, so that nothing about them comes from ratings.

    Raises:
        DataError: If a file is missing, truncated, changed or malformed; the message names it and says where to get it.

    Source: F. M. Harper, J. A. Konstan, "The MovieLens datasets: history and context", ACM TiiS 5(4), 2015.
    """
    place, classes, separator = MILLION.folder(folder, verify=verify), STARS, "::"
    if not place.has("ratings.dat"):
        place, classes, separator = SMALL.folder(folder, verify=verify), HALF_STARS, ","
    ratings, movies = (place.read(name) for name in place.source.checksums)
    table, catalog = _read_ratings(ratings, separator), _read_catalog(movies, separator)
    users, user = np.unique(table[:, 0].astype(np.int64), return_inverse=True)
    movie = _number("movie", table[:, 1], catalog, ratings, f"known to {movies.path.name}")
    label = _number("the stars", table[:, 2], np.array(classes), ratings, "of the scale")
    split = random_split(len(table), test_fraction=test_fraction, seed=seed)
    pairs, labels = torch.from_numpy(np.stack([user, movie], 1)), torch.from_numpy(label)
    train, test = (rows(pairs, labels, chosen) for chosen in split)
    return Data(
        name=place.source.name,
        train=train,
        test=test,
        classes=classes,
        licence=place.source.licence,
        files=digests(ratings, movies),
        num_ids=(len(users), len(catalog)),
        not_covered=("which users have rated anything at all",),
    )


def _read_ratings(file: File, separator: str) -> NDArray[np.float64]:
    """Returns rows of user, movie, stars and time; skips a first line of names."""
    text = file.content.removeprefix(BYTE_ORDER_MARK).lstrip().replace(separator.encode(), b",")
    head = 0 if text[:1].isdigit() else text.find(b"\n") + 1 or len(text)
    file.check(bool(text[head:].strip()), "holds no ratings")
    try:
        table = np.loadtxt(io.BytesIO(text[head:]), delimiter=",", ndmin=2)
    except ValueError as error:
        file.refuse(f"is no table of ratings, or is truncated ({str(error).partition(';')[0].rstrip('.')})")
    whole = table.shape[1] == 4 and np.isfinite(table).all() and (table[:, :2] % 1 == 0).all()
    file.check(bool(whole), "has not four columns of numbers: user, movie, rating, time")
    return table


def _read_catalog(file: File, separator: str) -> NDArray[np.int64]:
    """Returns the movies' ids in increasing order."""
    lines = io.StringIO(file.content.decode("latin1"), newline="")
    fields = csv.reader(lines) if separator == "," else (line.split(separator) for line in lines)
    try:
        catalog = np.unique([int(movie) for movie, *_ in fields if movie != "movieId"])
    except (ValueError, csv.Error) as error:
        file.refuse(f"is no table of movies ({error})")
    file.check(len(catalog) > 0, "holds no movies")
    return catalog


def _number(what: str, values: NDArray, known: NDArray, file: File, where: str) -> NDArray[np.int64]:
    """Returns the index of each value among the known ones, which are sorted."""
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    for wrong in np.flatnonzero(known[place] != values)[:1]:
        file.refuse(f"rating {wrong + 1} has {what} {values[wrong]:g}, which is not one of the {len(known)} {where}")
    return place.astype(np.int64)
