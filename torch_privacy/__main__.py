# SPDX-License-Identifier: Apache-2.0
"""Runs the command as ``python -m torch_privacy``, as ``torchrun -m torch_privacy`` does on each rank."""

from torch_privacy.cli import main

if __name__ == "__main__":
    main()
