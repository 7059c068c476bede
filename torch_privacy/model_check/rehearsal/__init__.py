# SPDX-License-Identifier: Apache-2.0
"""Shows by repeated runs that examples do not depend on each other."""
