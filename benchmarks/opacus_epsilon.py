# SPDX-License-Identifier: Apache-2.0
"""Epsilon of the same history by Opacus' three accountants and by ours: ``python benchmarks/opacus_epsilon.py``."""

from __future__ import annotations

import warnings

from opacus.accountants import create_accountant

from torch_privacy import privacy

DELTA = 1e-5
REFERENCE = {  # (noise multiplier, sampling probability, steps) -> as on docs/from-opacus.md, delta = 1e-5
    (1.1, 1 / 235, 3525): {"rdp": 1.2794, "prv": 1.1422, "gdp": 1.0755, "ours": 1.1321},
    (0.7, 1 / 118, 4720): {"rdp": 8.8123, "prv": 7.9194, "gdp": 7.0891, "ours": 7.9089},
    (1.0, 0.01, 1000): {"rdp": 2.1014, "prv": 1.8384, "gdp": 1.6177, "ours": 1.8282},
}


def row(noise_multiplier: float, sampling_probability: float, num_steps: int) -> dict[str, float]:
    """Returns the epsilon of a history by each accountant; ours is the certified upper end."""
    found: dict[str, float] = {}
    for name in ("rdp", "prv", "gdp"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GDP, and of RDP's largest order
            accountant = create_accountant(mechanism=name)
            accountant.history = [(noise_multiplier, sampling_probability, num_steps)]
            found[name] = float(accountant.get_epsilon(delta=DELTA))
    event = privacy.SubsampledGaussian(noise_multiplier, sampling_probability)
    return {**found, "ours": privacy.compose([(event, num_steps)]).epsilon(DELTA).high}


if __name__ == "__main__":
    for setting in REFERENCE:
        print(setting, {name: f"{value:.4f}" for name, value in row(*setting).items()})
