# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 1 in numbers: what each method can train, and what it costs."""

import pytest
import torch

from torch_privacy.runs.rows import EXACT, Context
from torch_privacy_papers.bu2021 import common as jl
from torch_privacy_papers.bu2021 import summary

RECORDED = {"dense", "convolutions", "LSTM"}
EVERY = {*summary.NETWORKS_TRIED}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("vanilla", EVERY),
        ("multiple", RECORDED | {"derivative"}),
        ("ours, exact", EVERY),
        ("JL(1)", EVERY),
        ("JL(1), double vjp", EVERY),
    ],
)
def test_methods_train_the_networks_that_the_notes_say(method, expected):
    torch.set_default_dtype(torch.float32)  # as in the experiment; vmap has no rule for an LSTM in float64
    assert {name for name in summary.NETWORKS_TRIED if summary.supports(method, name)} == expected


def test_a_method_has_its_certified_price_and_ratios(monkeypatch):
    seconds = {"non-private": 2.0, "JL(30)": 9.0}
    monkeypatch.setattr(summary, "_measured", lambda quick: (seconds, {"non-private": 100, "JL(30)": 120}))
    monkeypatch.setattr(summary, "supports", lambda method, network: network != "LSTM")
    found = {name: summary.numbers_of(name, Context(True, 0, None)) for name in ("non-private", "JL(30)", "vanilla")}
    assert EXACT not in found["non-private"]
    assert found["JL(30)"][summary.TIME] == pytest.approx(4.5)
    assert found["JL(30)"][summary.MEMORY] == pytest.approx(1.2)
    assert found["JL(30)"][summary.NETWORKS] == 4
    assert summary.TIME not in found["vanilla"]
    low, high = summary.epsilon("JL(30), double vjp")  # 0.9545: an independent lattice
    assert low <= 0.9545 <= high + 1e-4
    assert summary.epsilon("vanilla").high == pytest.approx(0.86454, abs=1e-4)


def test_every_method_shown_exists():
    assert set(summary.SHOWN) <= set(jl.METHODS)
