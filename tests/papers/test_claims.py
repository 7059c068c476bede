# SPDX-License-Identifier: Apache-2.0
"""Claims of the papers against values that were computed once by other code (lattice, Monte Carlo, dp-accounting)."""

import pytest

from torch_privacy.runs.rows import EXACT, Context
from torch_privacy_papers import claims
from torch_privacy_papers.claims import CLAIM, STATED_DELTA, TRUE_DELTA, VALID

ROWS = {row.name: row for row in claims.rows(quick=False)}
KNOWN = {  # row -> claimed, valid, certified, true delta at the claim; None where it is not known or there is none
    "strong composition, 400 epochs": (24.245, 82.35, 2.033065, None),
    "two layers, sigma 2": (7.967, 8.616, 7.2944, None),
    "CLT, sigma 0.7, 45 epochs": (5.0662, None, 5.639683, 4.863e-5),
    "CLT, sigma 0.638, 70 epochs": (8.6971, None, 9.476696, 4.226e-5),
    "CLT, one epoch of Figure A.1": (2.3222, None, 2.743269, None),
    "CLT, Adult": (10.199, None, 11.807306, None),
}


def numbers_of(name):
    return ROWS[name].compute(Context(quick=True, seed=0, data=None))


@pytest.mark.parametrize("name", KNOWN)
def test_claim_is_computed_as_the_paper_does_and_priced_as_it_is(name):
    numbers, (claimed, valid, exact, delta) = numbers_of(name), KNOWN[name]
    assert numbers[CLAIM] == pytest.approx(claimed, abs=6e-4)
    assert numbers[VALID] == (valid if valid is None else pytest.approx(valid, abs=6e-3))
    assert numbers[EXACT].low <= exact + 5e-5
    assert numbers[EXACT].high == pytest.approx(exact, abs=5e-5)
    if delta is not None:
        assert numbers[TRUE_DELTA].low == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(
    ("data", "target", "published"),
    [("MNIST", 2, 3.33), ("MNIST", 8, 1.93), ("CIFAR-10", 5, 2.24), ("SVHN", 2, 0.87), ("SVHN", 8, 0.60)],
)
def test_noise_is_that_of_the_published_code(data, target, published):
    assert claims.code_noise(data, target, releases=2) == pytest.approx(published, abs=8e-3)


@pytest.mark.thorough
def test_gep_costs_twice_its_claim_where_sampling_is_rare():
    numbers = numbers_of("GEP, SVHN, epsilon 8")
    assert numbers[CLAIM] == pytest.approx(8, abs=1e-4)
    assert 18.44 < numbers[EXACT].low < numbers[VALID]  # 18.44 with the noise rounded up to 0.60
    plain = numbers_of("GP and B-GEP, SVHN, epsilon 8")
    assert plain[CLAIM] == pytest.approx(8, abs=1e-4)
    assert plain[EXACT].high < 8


@pytest.mark.thorough
def test_one_projection_has_no_privacy_at_the_printed_epsilon():
    numbers = numbers_of("JL(1), MNIST")
    assert numbers[EXACT].low < 4.24e11 < numbers[EXACT].high  # a bracket of the accounting, computed independently
    assert numbers[TRUE_DELTA].low > 0.87


def test_padded_text_has_an_eighth_of_the_noise():
    """Against the norm of such a gradient, position by position and word by word."""
    rows = [(word if word < 128 else 128, 1 / 256) for word in range(256)]  # the last 128 words are padding
    computed = sum(size**2 for _, size in rows)
    sums = {}
    for word, size in rows:
        sums[word] = sums.get(word, 0) + size
    ratio = (sum(size**2 for size in sums.values()) / computed) ** 0.5
    assert claims.padding_ratio() == pytest.approx(ratio)
    assert 8 < ratio < 8.1


def test_every_kind_of_claim_is_counted():
    def run(name, holds):
        numbers = {STATED_DELTA: 1e-5, TRUE_DELTA: {"low": 0, "high": 1e-6 if holds else 1e-4}}
        return {"row": name, "runs": [{"numbers": numbers}]}

    results = {"rows": [run("CLT, one", False), run("CLT, two", True), run("GEP, SVHN, epsilon 2", True)]}
    assert list(claims.findings(results)) == ["Claims that hold: CLT, 1 of 2; GEP, 1 of 1."]
