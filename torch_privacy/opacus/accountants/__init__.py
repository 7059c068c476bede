# SPDX-License-Identifier: Apache-2.0
"""Has the names of Opacus' ``accountants`` that programs import: one accountant, which certifies, for all of them."""

from functools import partial

from ..accountant import Accountant

RDPAccountant = partial(Accountant, "rdp")
PRVAccountant = partial(Accountant, "prv")
GaussianAccountant = partial(Accountant, "gdp")
IAccountant = create_accountant = Accountant
