# SPDX-License-Identifier: Apache-2.0
"""Converts the census bureau's table of Adult to the 123 binary features that LIBSVM calls a9a."""

import csv
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torch_privacy.data.files import File

AGE, EDUCATION, HOURS = (25, 32, 40, 49), (8, 9, 10, 12), (34, 39, 40, 47)  # the last number of each bin but one
FINAL_WEIGHT = (106640, 158660, 196337, 259870)  # of the census bureau, for the person
WORKCLASSES = "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked"
EDUCATIONS = (
    "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th 10th "
    "Doctorate 5th-6th Preschool"
)
MARITAL = "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
OCCUPATIONS = (
    "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners Machine-op-inspct "
    "Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces"
)
RELATIONSHIPS = "Wife Own-child Husband Not-in-family Other-relative Unmarried"
RACES = "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"
COUNTRIES = (
    "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan Greece South "
    "China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
    "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia "
    "El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
)
LABELS = {"<=50K": 0, ">50K": 1}
Column = tuple[int, Callable[[str], int | None]]  # how many features, and which of them a field sets, None for none


def _bins(*ends: int) -> Column:
    """Encodes numbers by bin: up to the first end, up to the second, ..., above the last."""
    return len(ends) + 1, lambda field: int(np.searchsorted(ends, int(field)))


def _names(names: str) -> Column:
    """Encodes names with one feature each; an unknown entry, ``?``, sets none."""
    place: dict[str, int | None] = {name: i for i, name in enumerate(names.split())}
    return len(place), (place | {"?": None}).__getitem__


COLUMNS: tuple[Column, ...] = (
    _bins(*AGE),
    _names(WORKCLASSES),
    _bins(*FINAL_WEIGHT),
    _names(EDUCATIONS),
    _bins(*EDUCATION),
    _names(MARITAL),
    _names(OCCUPATIONS),
    _names(RELATIONSHIPS),
    _names(RACES),
    _names("Female Male"),
    _bins(0),  # capital gain
    _bins(0),  # capital loss
    _bins(*HOURS),
    _names(COUNTRIES),
)
STARTS = np.cumsum([0] + [size for size, _ in COLUMNS])  # first feature of each column; the last is their number, 123


def encode(file: File) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns features (n, 123) and labels (n,) of a table with 14 attributes and the income in each line.

    The bins are those of J. Platt (1998): about a fifth of the training people each. They are constants of the
    encoding here, nothing is counted. ``adult.test`` opens with a line of remarks and ends its incomes with a full
    stop; copies of the files that open with a line of column names are read, too.
    """
    lines = csv.reader(file.content.decode("ascii", "replace").splitlines(), skipinitialspace=True)
    try:
        people = [[field.strip() for field in line] for line in lines if len(line) > 1]
    except csv.Error as error:
        file.refuse(f"is no table of people ({error})")
    if people and people[0][0].lower() == "age":
        del people[0]
    file.check(bool(people), "holds no people")
    features, labels = np.zeros((len(people), STARTS[-1]), np.float32), np.zeros(len(people), np.int64)
    for i, person in enumerate(people):
        try:
            *attributes, income = person
            for (_, feature), start, field in zip(COLUMNS, STARTS[:-1], attributes, strict=True):
                column = feature(field)
                if column is not None:
                    features[i, start + column] = 1
            labels[i] = LABELS[income.removesuffix(".")]
        except (KeyError, ValueError):
            file.refuse(f"person {i + 1} is not described as in the census table: {', '.join(person)[:120]!r}")
    return features, labels
