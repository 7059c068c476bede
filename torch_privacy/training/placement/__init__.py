# SPDX-License-Identifier: Apache-2.0
"""Holds where the weights of a training are: in one process, on all ranks, or in shards."""

from .base import Placement as Placement
from .base import Ranked as Ranked
from .base import Whole as Whole
from .base import is_held as is_held
from .base import local_of as local_of
from .base import reshard as reshard
from .base import shard_of as shard_of
from .choose import placement_of as placement_of
