# SPDX-License-Identifier: Apache-2.0
"""A scaler that learns privately: its sensitivity, what it finds, and its release beside those of estimators."""

import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.sklearn import PrivateClassifier, PrivateScaler, PublicScaler, private_scaler, refits


@pytest.fixture(autouse=True)
def no_earlier_fits(monkeypatch):
    monkeypatch.setattr(refits._KNOWN, "fits", [])


def data(n=3000, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.normal(40, 10, n), rng.lognormal(0, 1, n), rng.uniform(-1, 1, n)], 1)


BOUNDS = ([0, 0, -100], [10_000, 1e6, 100])


def scaler(**changed):
    return PrivateScaler(**({"bounds": BOUNDS, "epsilon": 0.5, "delta": 1e-5} | changed))


def classifier(**changed):
    return PrivateClassifier(**({"classes": [0, 1], "hidden_units": (), "epochs": 1, "delta": 1e-5} | changed))


def exact_histograms(monkeypatch, rows):
    """Returns the counts that get noise, without it, and the standard deviations of the noise."""
    seen = []
    monkeypatch.setattr(
        private_scaler.Noise,
        "add_to",
        lambda self, step, sums, stddev: seen.append((step, sums["counts"].numpy().copy(), stddev)),
    )
    scaler(noise_multiplier=0.01, epsilon=None, refits="separate").fit(rows)
    return seen


ROWS = {  # the row that neighboring tables differ by
    "ordinary": ([40.0, 1.0, 0.5], 3),
    "beyond the bounds": ([1e300, -5.0, 1e9], 3),
    "infinite": ([np.inf, np.inf, -np.inf], 3),
    "missing": ([np.nan, np.nan, np.nan], 0),
    "missing in part": ([40.0, np.nan, 0.5], 2),
}


@pytest.mark.filterwarnings("ignore:PrivateScaler.fit")
@pytest.mark.parametrize("case", ROWS)
def test_histograms_of_neighboring_tables_differ_by_no_more_than_the_sensitivity(case, monkeypatch):
    row, columns = ROWS[case]
    rows = np.vstack([data(100), [row] * 5])  # often enough that the tables have the same bins
    more, fewer = exact_histograms(monkeypatch, rows), exact_histograms(monkeypatch, rows[:-1])
    assert [step for step, _, _ in more] == [0, 1]
    for (_, a, stddev), (_, b, same) in zip(more, fewer, strict=True):
        assert abs(a - b).sum() == columns
        assert np.linalg.norm(a - b) <= math.sqrt(3)
        assert stddev == same == pytest.approx(0.01 * math.sqrt(2) * math.sqrt(3))
        assert stddev >= 0.01 * math.sqrt(2) * math.sqrt(3)


@pytest.mark.filterwarnings("ignore:NOT PRIVATE")
@pytest.mark.parametrize("beyond", [101.0, 1e4, 1e300, np.inf])
def test_values_beyond_the_bounds_count_as_the_bound(beyond):
    x = np.random.default_rng(0).uniform(20, 60, size=(4000, 1))
    x[:1500] = 100.0
    outside = np.where(x == 100.0, beyond, x)
    a, b = (PrivateScaler((0, 100), epsilon=0.5, test_seed=1, refits="separate").fit(rows) for rows in (x, outside))
    assert a.release_ == b.release_
    assert a.center_ == b.center_
    assert a.center_ + a.scale_ > 95
    np.testing.assert_array_equal(a.transform(x), b.transform(outside))


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_a_value_far_beyond_narrow_bounds_makes_no_warning(value):
    """A warning of an overflow says that such a row is there, at no price."""
    rows = np.full((300, 1), 5e-10)
    rows[7] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler(bounds=(0, 1e-9), epsilon=10.0).fit_transform(rows)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e9])
def test_what_is_found_depends_on_the_unit_of_the_values_alone_by_a_factor(unit):
    x = data() * unit
    fitted = scaler(bounds=tuple(np.array(end) * unit for end in BOUNDS)).fit(x)
    assert fitted.is_learned_.all()
    assert np.isnan(fitted.log_unit_).tolist() == [True, False, True]
    scaled = fitted.transform(x)
    assert (abs(np.median(scaled, 0)) < 0.4).all()
    assert ((scaled.std(0) > 0.25) & (scaled.std(0) < 0.8)).all()
    assert abs(scaled).max() <= 1
    assert np.isnan(fitted.transform(np.full((1, 3), np.nan))).all()


@pytest.mark.parametrize("bounds", [(-1, 0), (0, 1), (-1, 1), (0, 1e-7), (-1e308, 1e308)])
def test_values_that_are_all_0_are_scaled_to_one_number(bounds):
    fitted = PrivateScaler(bounds, epsilon=0.5).fit(np.zeros((2000, 1)))
    assert (fitted.scale_ > 0).all()
    assert len(np.unique(fitted.transform(np.zeros((3, 1))))) == 1
    assert np.isfinite(fitted.transform([[-np.inf], [np.inf]])).all()


def test_bounds_are_the_scale_where_nothing_stands_out():
    x = data(60)
    with pytest.warns(UserWarning, match="nothing stands out of the noise in '0', '1', '2'"):
        fitted = scaler(epsilon=0.05).fit(x)
    np.testing.assert_allclose(fitted.transform(x), PublicScaler(BOUNDS).fit_transform(x), atol=1e-12)
    assert not fitted.is_learned_.any()


def test_epsilon_is_met_by_one_gaussian_release():
    fitted = scaler().fit(data())
    assert 0.49 < fitted.spent_.epsilon.high <= 0.5
    assert fitted.release_.event == privacy.Gaussian(fitted.release_.event.noise_multiplier)
    assert "NOT PRIVATE" in str(scaler(test_seed=1, refits="separate").fit(data()).spent_)


class TestBesideAnEstimator:
    def test_one_epsilon_covers_both_in_a_pipeline(self):
        x, one = data(), scaler()
        fitted = make_pipeline(one, classifier(epsilon=2.0, prior_releases=[one])).fit(x, x[:, 0] > 40)[-1]
        releases = [(privacy.event_from_dict(each["event"]), each["count"]) for each in fitted.statement_["releases"]]
        assert releases[0] == (one.release_.event, 1)
        assert privacy.compose(releases).epsilon(1e-5) == fitted.spent_.epsilon
        assert 1.9 < fitted.spent_.epsilon.high <= 2.0

    def test_a_release_that_is_not_counted_is_refused(self):
        x, one = data(), scaler()
        with pytest.raises(tp.Refused, match=r"a PrivateScaler was fitted .* prior_releases=\[scaler\]"):
            make_pipeline(one, classifier()).fit(x, x[:, 0] > 40)
        with pytest.raises(tp.Refused, match="a PrivateScaler was fitted"):
            classifier(bounds=BOUNDS).fit(x, x[:, 0] > 40)
        assert len(refits._KNOWN.fits) == 1

    def test_fits_that_are_counted_cover_it(self):
        x, one = data(), scaler()
        fitted = make_pipeline(one, classifier(refits="count")).fit(x, x[:, 0] > 40)[-1]
        both = [release for fit in refits._KNOWN.fits for release in fit.releases]
        assert both[0] == (one.release_.event, 1)
        assert fitted.spent_.epsilon == privacy.compose(both).epsilon(1e-5)
        assert fitted.spent_.epsilon.high > 2.0

    def test_one_that_is_not_fitted_cannot_be_counted(self):
        x = data(40)
        with pytest.raises(tp.Refused, match="prior_releases has a PrivateScaler that is not fitted"):
            classifier(prior_releases=[scaler()]).fit(x, x[:, 0] > 40)

    def test_clones_and_further_fits_are_refused(self):
        x, one = data(), scaler()
        with pytest.raises(tp.Refused, match=r"PrivateScaler.fit: the estimator is a clone"):
            clone(one).fit(x)
        one.fit(x)
        with pytest.raises(tp.Refused, match="fitted before to rows"):
            one.fit(x)

    def test_the_budget_of_the_data_is_drawn_from(self, tmp_path):
        x = data()
        budget = tp.Budget.open(tmp_path / "budget", epsilon=0.6, delta=1e-5)
        scaler(budget=budget).fit(x)
        assert 0.49 < budget.spent().high <= 0.5
        with pytest.raises(tp.Refused, match="budget"):
            scaler(budget=budget, refits="separate").fit(x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": None}, "give exactly one of the two"),
        ({"noise_multiplier": 5.0}, "give exactly one of the two"),
        ({"epsilon": -1.0}, "epsilon=-1.0 must be greater than 0"),
        ({"delta": 0.1}, "must be below 1/n"),
        ({"bounds": (3, 3)}, "low < high"),
        ({"refits": "again"}, "must be one of"),
    ],
)
def test_wrong_arguments_are_refused_and_release_nothing(changed, message):
    with pytest.raises(ValueError, match=message):
        scaler(**changed).fit(data(50))
    assert refits._KNOWN.fits == []


def test_after_missing_values_were_refused_the_release_of_the_scaler_is_used_and_not_made_again():
    rows = np.random.default_rng(41).normal(40, 12, (1000, 2))
    rows[5, 0] = np.nan
    labels = rows[:, 1] > 40
    first = PrivateScaler((0, 1000), epsilon=0.3)
    last = PrivateClassifier(epsilon=2.0, classes=[False, True], prior_releases=[first], epochs=1)
    with pytest.raises(ValueError, match=r"What PrivateScaler has released is not lost: .*FrozenEstimator\(scaler\)"):
        make_pipeline(first, last).fit(rows, labels)
    release, fill = first.release_, SimpleImputer(strategy="constant", fill_value=0)
    pipeline = make_pipeline(FrozenEstimator(first), fill, last).fit(rows, labels)
    assert first.release_ is release
    assert last.statement_["releases"][0]["event"]["type"] == "Gaussian"
    assert pipeline.predict(rows).shape == (1000,)
