# SPDX-License-Identifier: Apache-2.0
"""Checks a model on one batch: ``check``, the requirements of training, and the rehearsals of its steps."""

from .checkup import EXACT as EXACT
from .checkup import NOT_CHECKED as NOT_CHECKED
from .checkup import REFUSED as REFUSED
from .checkup import Checkup as Checkup
from .checkup import ParameterUse as ParameterUse
from .checkup import Problem as Problem
from .checkup import Verdict as Verdict
from .examination import check as check
