# SPDX-License-Identifier: Apache-2.0
"""Runs the command as ``python -m torch_privacy.cli``."""

from torch_privacy.cli import main

if __name__ == "__main__":
    main()
