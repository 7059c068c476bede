# SPDX-License-Identifier: Apache-2.0
"""Readers of the data sets that the experiments use: files in, numpy arrays out, no torch and no network."""

from torch_privacy.data.adult import load_adult as load_adult
from torch_privacy.data.files import DataError as DataError
from torch_privacy.data.files import random_split as random_split
