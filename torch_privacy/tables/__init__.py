# SPDX-License-Identifier: Apache-2.0
"""Trains on tables as people have them: reading, schemas, private learning of what a schema leaves open, a model.

Needs pandas, pyarrow and opendp: ``pip install 'torch-privacy[tables]'``.
"""

from .defaults import Defaults as Defaults
from .defaults import defaults as defaults
from .encode import Encoded as Encoded
from .encode import Encoder as Encoder
from .foresight import doubt_of as doubt_of
from .learn import learn as learn
from .learnt import Learnt as Learnt
from .learnt import TableError as TableError
from .model import TableModel as TableModel
from .model import losses as losses
from .model import new_model as new_model
from .read import read_table as read_table
from .read import rows_of as rows_of
from .schema import Column as Column
from .schema import Schema as Schema
from .scores import scores_of_classes as scores_of_classes
from .scores import scores_of_numbers as scores_of_numbers
from .shape import Shape as Shape
from .shape import shape_of as shape_of
from .split import split as split
from .synthesis import Synthesizer as Synthesizer
from .synthesis import synthesize as synthesize
from .threshold import Threshold as Threshold
