# SPDX-License-Identifier: Apache-2.0
"""A step with noise of one's own costs what its event does, and no list of releases hides the assumption."""

import pytest

from torch_privacy import privacy

ZERO_OUT, REPLACE_ONE = privacy.NeighboringRelation.REPLACE_SPECIAL, privacy.NeighboringRelation.REPLACE_ONE
INNER = privacy.SubsampledGaussian(1.0, 0.05)
CLAIM = "Mine() hides every change up to its sensitivity, as its author claims"


def test_a_claimed_step_has_the_price_of_its_event_and_its_assumption():
    claimed = privacy.Claimed(INNER, "Mine()", ZERO_OUT)
    ours, theirs = privacy.compose([(claimed, 50)]), privacy.compose([(INNER, 50)])
    assert ours.epsilon(1e-5) == theirs.epsilon(1e-5)
    assert ours.delta(1.0) == theirs.delta(1.0)
    assert ours.assumptions == [CLAIM]
    assert ours.neighboring_relation is ZERO_OUT
    assert (ours.sampler, ours.unit) == ("Poisson", "example")
    assert privacy.Claimed(privacy.Gaussian(1.0, unit="customer"), "Mine()").unit == "customer"


def test_the_assumption_stays_with_repeated_runs_and_inner_assumptions():
    run = ((privacy.Claimed(INNER, "Mine()"), 3),)
    search = privacy.Repeated(run, 3.0)
    assert CLAIM in search.assumption
    assert "only the best run is released" in search.assumption
    inner = privacy.Repeated(((INNER, 1),), 3.0)
    assert privacy.Claimed(inner, "Mine()").assumption == f"{CLAIM}; {inner.assumption}"


@pytest.mark.parametrize("relation", [REPLACE_ONE, ZERO_OUT])
def test_an_event_for_another_relation_is_refused(relation):
    inner = privacy.SubsampledGaussian(1.0, 0.05, relation)
    with pytest.raises(ValueError, match="and add/remove one example is asked for"):
        privacy.Claimed(inner, "Mine()")
    if relation is REPLACE_ONE:
        with pytest.raises(ValueError, match="priced for replace one example, and replace one example is asked for"):
            privacy.Claimed(inner, "Mine()", relation)


EPOCH = privacy.BallsAndBins(1.0, 5)


@pytest.mark.parametrize(
    "inner", [EPOCH, privacy.LaterBatch(EPOCH), privacy.BandedGaussian(1.0, 0.1, 4), privacy.Claimed(INNER, "Mine()")]
)
def test_an_event_that_is_not_of_one_independent_step_is_refused(inner):
    with pytest.raises(ValueError, match="must be that of one step with independent noise"):
        privacy.Claimed(inner, "Mine()")


def test_no_price_is_known_for_a_person_with_several_examples():
    with pytest.raises(ValueError, match="no known price for a person"):
        privacy.for_group(privacy.Claimed(INNER, "Mine()"), 2)
