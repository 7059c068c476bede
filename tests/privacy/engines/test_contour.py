# SPDX-License-Identifier: Apache-2.0
"""The contour engine against closed forms, the lattice, other accountants, and its own certificates."""

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from drawn import draws
from exact_profile import exact_delta
from hypothesis import assume, given
from hypothesis import strategies as st
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from torch_privacy import privacy
from torch_privacy.privacy.engines import contour
from torch_privacy.privacy.engines.contour_tail import log_bound_beyond
from torch_privacy.privacy.engines.curve import ClosedFormCurve, Unresolved
from torch_privacy.privacy.engines.fft import LatticeEngine
from torch_privacy.privacy.engines.tilt import refined, term, tilted
from torch_privacy.privacy.pairs.base import UNIT
from torch_privacy.privacy.pairs.gaussian import ReplaceOneGaussianPair, SubsampledGaussianPair
from torch_privacy.privacy.pairs.mixture import SubsampledMixturePair
from torch_privacy.privacy.pairs.subsampled import log_mixture
from torch_privacy.privacy.summary import equal_releases

MNIST = 256 / 60000

TO_TEN_DIGITS = [  # noise, steps, epsilon at q = 256 / 60000, delta = 1e-5
    (0.6, 1000, "3.817107536"),
    (0.6, 10_000, "9.076485506"),
    (0.6, 100_000, "34.145515192"),
    (0.6, 1_000_000, "186.173086837"),
    (1.1, 1000, "0.598685144"),
    (1.1, 10_000, "1.977902463"),
    (1.1, 100_000, "7.270792856"),
    (1.1, 1_000_000, "31.586728024"),
    (2.0, 1000, "0.245642421"),
    (2.0, 10_000, "0.843812122"),
    (2.0, 100_000, "3.009404709"),
    (2.0, 1_000_000, "11.730315562"),
]


@pytest.mark.parametrize(("noise", "steps", "expected"), TO_TEN_DIGITS)
def test_speed_table_of_the_notes_to_its_nine_decimals(noise, steps, expected):
    low, high = privacy.compose([(privacy.SubsampledGaussian(noise, MNIST), steps)], "contour").epsilon(1e-5)
    assert high - low <= 1e-9 * high
    assert low == pytest.approx(float(expected), abs=1.5e-9)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_full_batches_match_their_closed_form(delta):
    steps = [(SubsampledGaussianPair(0.05, 1.0), 400)]  # together one Gaussian of mu = 1
    exact = ClosedFormCurve(SubsampledGaussianPair(1.0, 1.0), swapped=False).epsilon(delta)
    for swapped in (False, True):
        low, high = contour.curve(steps, swapped=swapped).epsilon(delta)
        assert low - 1e-10 <= exact.high
        assert exact.low <= high + 1e-10
        assert high - low <= 1e-8


PAIRS = {
    "Gaussian": lambda noise, q, r: SubsampledGaussianPair(1 / noise, q),
    "replace": lambda noise, q, r: ReplaceOneGaussianPair(1 / noise, q),
    "JL": lambda noise, q, r: SubsampledMixturePair(r, noise, q),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("pair", PAIRS)
@draws(8)
@given(
    st.floats(0.5, 5), st.floats(-3.5, -0.3), st.integers(16, 128), st.floats(2, 4.5), st.floats(-10, -2), st.booleans()
)
def test_contour_and_lattice_agree_wherever_both_run(pair, noise, log_q, projections, log_steps, log_delta, swapped):
    steps = [(PAIRS[pair](noise, 10**log_q, projections), int(10**log_steps))]
    try:
        low, high = contour.curve(steps, swapped=swapped).epsilon(10**log_delta)
    except Unresolved:
        return  # the lattice answers there
    below, above = LatticeEngine(steps).curve(swapped=swapped).epsilon(10**log_delta)
    assert low <= high
    assert low <= above + 1e-10 * (1 + above)
    assert high >= below - 1e-10 * (1 + below)


@draws(10)
@given(st.floats(0.5, 5), st.floats(-3, -0.3), st.floats(2.5, 5), st.floats(-9, -0.5), st.booleans())
def test_delta_and_epsilon_of_one_curve_are_inverse(noise, log_q, log_steps, log_delta, swapped):
    delta = 10**log_delta
    try:
        curve = contour.curve([(SubsampledGaussianPair(1 / noise, 10**log_q), int(10**log_steps))], swapped=swapped)
        target = curve.epsilon(delta).high
        low, high = curve.delta(target)
    except Unresolved:
        return  # the lattice answers there
    assert low <= high <= low * (1 + 1e-5)
    assert low <= delta * (1 + 1e-9)
    if target > 0:  # where delta does not exceed delta(0)
        assert high >= delta * (1 - 1e-5)


def test_both_directions_mirror_each_other():
    """δ_add(-ε) = 1 - e^-ε + e^-ε δ_remove(ε): two different integrals of the same pair."""
    steps = [(SubsampledGaussianPair(1.0, 0.01), 2000)]
    remove, add = (contour.curve(steps, swapped=swapped) for swapped in (False, True))
    for epsilon in (0.3, 1.0, 2.0):
        expected = -np.expm1(-epsilon) + np.exp(-epsilon) * remove.delta(epsilon).high
        assert add.delta(-epsilon).low - 1e-9 <= expected <= add.delta(-epsilon).high + 1e-9


@draws(25)
@given(
    st.lists(st.tuples(st.floats(0.5, 5), st.floats(-3.5, 0), st.floats(0, 5)), min_size=1, max_size=3),
    st.floats(-1, 1),
    st.booleans(),
    st.floats(1, 1.3),
)
def test_certificate_lies_above_the_characteristic_function(pairs, log_c, swapped, beyond):
    terms = [
        term(SubsampledGaussianPair(1 / noise, 10**log_q), int(10**times), swapped) for noise, log_q, times in pairs
    ]
    parts = [tilted(one, 10**log_c) for one in terms]
    start = beyond * (60 / sum(part.times * part.variance for part in parts)) ** 0.5
    try:
        bound = log_bound_beyond(terms, parts, 10**log_c, start, -30.0)
    except Unresolved:
        return
    for frequency in start * np.concatenate([np.linspace(1, 2, 40), np.geomspace(2, 100, 60)]):
        try:
            fine = [refined(one, part, 10**log_c, frequency)[0] for one, part in zip(terms, parts, strict=True)]
        except Unresolved:
            break
        assert sum(part.times * part.log_size(frequency) for part in fine) <= bound + 1e-6


def test_errors_are_relative_to_the_characteristic_function_itself():
    """Far out, where it is small, the same rounding is a larger part of it."""
    part = tilted(term(SubsampledGaussianPair(1.0, 0.3), 9, swapped=False), 0.5)
    spacing = 0.5
    log_size, angle, error = part.log_phi_at_multiples(spacing, 200)
    phi = np.exp(log_size + 1j * angle)
    assert np.abs(phi).min() < 0.1
    assert (error * np.abs(phi) >= (1 - 1e-9) * part.phi_error(spacing * np.arange(200), np.abs(phi - 1))).all()


def test_few_steps_and_unsmooth_pairs_are_left_to_the_lattice():
    with pytest.raises(Unresolved):
        contour.curve([(SubsampledGaussianPair(1.0, 0.01), 2)], swapped=False).epsilon(1e-5)
    low, high = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 2)]).epsilon(1e-5)
    assert 0 < low <= high <= low * 1.001


@pytest.mark.thorough
def test_ten_noise_levels_match_the_notes_and_any_order():
    events = [(privacy.SubsampledGaussian(1.0 + i / 10, 0.01), 2000) for i in range(10)]
    forward, backward = privacy.compose(events).epsilon(1e-5), privacy.compose(events[::-1]).epsilon(1e-5)
    assert forward.high == pytest.approx(backward.high, rel=1e-10)
    witness = PLDAccountant()
    for event, count in events:
        single = dp_event.GaussianDpEvent(event.noise_multiplier)
        witness.compose(dp_event.PoissonSampledDpEvent(event.sampling_probability, single), count)
    assert forward.low <= witness.get_epsilon(1e-5) <= forward.high * 1.001


def test_ten_million_steps_are_one_more_question():
    low, high = privacy.compose([(privacy.SubsampledGaussian(4.0, 1e-3), 10_000_000)]).epsilon(1e-6)
    approximate = privacy.clt(equal_releases(4.0, 1e-3, 10_000_000)).epsilon(1e-6)
    assert low <= high <= low * (1 + 1e-8)
    assert high == pytest.approx(approximate, rel=0.01)


@pytest.mark.thorough
@draws(12)
@given(st.floats(-0.5, 1.3), st.floats(-5, 0), st.floats(0, 6), st.floats(-12, -3))
def test_pld_accountant_is_never_below_us(log_noise, log_q, log_steps, log_delta):
    noise, q, steps, delta = 10**log_noise, 10**log_q, int(10**log_steps), 10**log_delta
    low, high = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(delta)
    assert 0 <= low <= high < np.inf
    assume(high < 8)  # beyond, the witness takes minutes
    witness = PLDAccountant()
    witness.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(noise)), steps)
    above = witness.get_epsilon(delta)
    assert low <= above * (1 + 1e-7) + 1e-9  # full batches: it was seen 7e-9 below the closed form
    assert above <= high + 0.02 * high + 1e-4 * steps**0.5 + 1e-3  # its discretisation


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Assuming that true epsilon:UserWarning")
@draws(6)
@given(st.floats(0.6, 3), st.floats(-3, -1), st.integers(100, 1000), st.floats(-8, -3))
def test_prv_accountant_brackets_what_we_bracket(noise, log_q, steps, log_delta):
    q, delta = 10**log_q, 10**log_delta
    low, high = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(delta)
    assume(high < 8)  # beyond, the witness's lower end was seen 3e-5 above what dp-accounting's PLD proves from above
    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=q)
    witness = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.05, delta_error=delta / 1000, eps_max=60
    )
    below, _, above = witness.compute_epsilon(delta=delta, num_self_compositions=[steps])
    assert below <= high
    assert low <= above


@pytest.mark.parametrize("projections", [10**5, 10**7])
def test_many_projections_still_cost_at_least_exact_norms(projections):
    exact = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 2000)]).epsilon(1e-5)
    low, high = privacy.compose([(privacy.SubsampledJL(1.0, projections, 0.01), 2000)]).epsilon(1e-5)
    assert low <= exact.high + 10.1 / projections  # their difference of the notes, 10.04 / r
    assert exact.low + 10.0 / projections <= high <= low * 1.0001


def assert_delta_is_never_missed(noise: float, q: float, steps: int, epsilon: float, swapped: bool):
    exact = exact_delta(noise, q, steps, epsilon, swapped=swapped)
    if exact is None:
        return
    low, high = contour.curve([(SubsampledGaussianPair(1 / noise, q), steps)], swapped=swapped).delta(epsilon)
    assert low * (1 - 1e-15) <= exact <= high * (1 + 1e-15)  # the oracle is rounded to a float


@pytest.mark.parametrize(
    ("noise", "q", "steps", "epsilon"),
    [(1.0, 0.5, 50, 18.028075815922154), (1.0, 1 - 2**-53, 50, 40.0), (3.0, 1 - 2**-53, 1000, 60.0)],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_upper_bound_on_delta_is_above_thirty_digits(noise, q, steps, epsilon, swapped):
    assert exact_delta(noise, q, steps, epsilon, swapped=swapped) is not None
    assert_delta_is_never_missed(noise, q, steps, epsilon, swapped)


@pytest.mark.thorough
@draws(12)
@given(st.floats(0.5, 10), st.floats(-3, 0), st.floats(1.5, 6), st.floats(-12, -1), st.booleans())
def test_bracket_of_delta_contains_thirty_digits(noise, log_q, log_steps, log_delta, swapped):
    q, steps = 10**log_q, int(10**log_steps)
    try:
        epsilon = contour.curve([(SubsampledGaussianPair(1 / noise, q), steps)], swapped=swapped).epsilon(10**log_delta)
        assert_delta_is_never_missed(noise, q, steps, epsilon.high, swapped)
    except Unresolved:
        return  # the lattice answers there


@pytest.mark.parametrize("q", [1e-7, 0.3, 0.7, 1 - 2**-30, 1 - 2**-53])
def test_log_mixture_is_exact_to_forty_roundings(q):
    u = np.concatenate([-np.geomspace(1e-9, 800, 60), np.geomspace(1e-9, 800, 60)])
    losses = log_mixture(u, q)
    with mpmath.workdps(40):
        exact = [mpmath.log1p(mpmath.mpf(q) * mpmath.expm1(mpmath.mpf(at))) for at in u.tolist()]
    for value, truth in zip(losses.tolist(), exact, strict=True):
        assert abs(value - truth) <= 40 * UNIT * abs(truth)
