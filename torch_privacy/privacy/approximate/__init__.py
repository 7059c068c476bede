# SPDX-License-Identifier: Apache-2.0
"""The numbers of papers and other libraries, each by its name: approximations and loose bounds; `compose` is exact."""
