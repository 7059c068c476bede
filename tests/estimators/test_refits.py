# SPDX-License-Identifier: Apache-2.0
"""Fits to the same data: refused with the price of a search, or counted."""

import json
import pickle
import re
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.ensemble import BaggingClassifier
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.sklearn import PrivateClassifier, PrivateScaler, PublicScaler, refits

PRICE = r"10 fits like this one cost epsilon = (\d+\.\d+) together; .* costs (\d+\.\d+): tp.search_privately"


@pytest.fixture(autouse=True)
def no_earlier_fits(monkeypatch):
    monkeypatch.setattr(refits._KNOWN, "fits", [])


def data(n=40, seed=None):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(n, 3))
    return x, (x[:, 0] > 0).astype(int)


def classifier(**changed):
    settings = {"classes": [0, 1], "hidden_units": (), "epochs": 1, "batch_size": 20, "delta": 1e-4}
    return PrivateClassifier(**(settings | changed))


def price(fitted):
    releases = [(privacy.event_from_dict(one["event"]), one["count"]) for one in fitted.statement_["releases"]]
    return privacy.compose(releases).epsilon(1e-4)


SEARCHES = {
    "grid": lambda one: GridSearchCV(one, {"learning_rate": [0.1, 0.2]}, cv=2),
    "random search": lambda one: RandomizedSearchCV(one, {"learning_rate": [0.1, 0.2]}, n_iter=1, cv=2),
    "grid over a pipeline": lambda one: GridSearchCV(
        make_pipeline(PublicScaler(), one), {"publicscaler__bounds": [(-1, 1), (-2, 2)]}, cv=2
    ),
    "ensemble": lambda one: BaggingClassifier(one, n_estimators=2),
    "grid in threads": lambda one: GridSearchCV(one, {"learning_rate": [0.1, 0.2]}, cv=2, error_score="raise"),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("search", SEARCHES)
def test_a_grid_is_refused_before_its_first_fit_with_the_price_of_a_search(search):
    x, y = data()
    with pytest.raises(ValueError, match=PRICE):
        SEARCHES[search](classifier()).fit(x, y)
    assert refits._KNOWN.fits == []


def test_copied_rows_are_refused_where_fits_count():
    x, y = data(n=80, seed=0)
    counted = classifier(refits="count")
    with pytest.raises(tp.Refused, match="they were copied, as by BaggingClassifier"):
        BaggingClassifier(counted, n_estimators=2, random_state=0).fit(x, y)
    with pytest.raises(tp.Refused, match="they were copied, as by BaggingClassifier"):
        PrivateScaler(noise_multiplier=10.0).fit(np.repeat(x, 2, axis=0))
    assert refits._KNOWN.fits == []
    BaggingClassifier(counted, n_estimators=2, bootstrap=False).fit(x, y)
    other_people = np.round(x)  # of few kinds
    classifier().fit(other_people, y)


def test_cross_validation_is_refused_by_name():
    x, y = data()
    with pytest.raises(ValueError, match="is a clone, as cross_val_score"):
        cross_val_score(classifier(), x, y, cv=2)


@pytest.mark.thorough
def test_prices_named_are_certified():
    x, y = data()
    with pytest.raises(tp.Refused) as refused:
        clone(classifier(epsilon=1.5)).fit(x, y)
    fitted = classifier(epsilon=1.5).fit(x, y)
    ((event, steps),) = [(privacy.event_from_dict(one["event"]), one["count"]) for one in fitted.statement_["releases"]]
    ten = privacy.compose([(event, 10 * steps)]).epsilon_high(1e-4)
    search = privacy.compose([(privacy.Repeated(((event, steps),), 10.0, "logarithmic"), 1)]).epsilon_high(1e-4)
    found = re.search(PRICE, str(refused.value))
    assert found is not None
    for named, exact in zip(found.groups(), (ten, search), strict=True):
        assert float(named) - 1e-3 <= exact <= float(named)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("how", ["the same estimator", "another", "some rows", "as float32", "in another order"])
def test_a_further_fit_to_the_same_rows_is_refused(how):
    x, y = data()
    first = classifier().fit(x, y)
    again = {"some rows": x[20:], "as float32": x.astype(np.float32), "in another order": x[::-1]}.get(how, x)
    with pytest.raises(tp.Refused, match=PRICE):
        (first if how == "the same estimator" else classifier(learning_rate=0.5)).fit(again, y[: len(again)])
    assert len(refits._KNOWN.fits) == 1


@pytest.mark.filterwarnings("ignore:PrivateScaler.fit. nothing stands out")
@pytest.mark.parametrize("choice", ["refuse", "count"])
@pytest.mark.parametrize("scale", ["public", "private", "both"])
def test_a_fit_to_scaled_rows_is_one_to_the_same_data(scale, choice):
    """Rows in another scale were other rows, so that the second fit was not counted."""
    x, y = data()
    private = PrivateScaler((-50, 50), noise_multiplier=9.0, delta=1e-4, refits="count")
    public = PublicScaler((-60, 60))
    scalers = {"public": [public], "private": [private], "both": [public, private]}[scale]
    first = make_pipeline(*scalers, classifier(refits="count")).fit(x, y)[-1]
    again = classifier(refits=choice, learning_rate=0.5)
    if choice == "refuse":
        with pytest.raises(tp.Refused, match="was fitted before to rows"):
            again.fit(x[::-1], y)
        return
    again.fit(x[::-1], y)
    assert again.statement_["fits"] == len(refits._KNOWN.fits) == 2 + (scale != "public")
    assert again.spent_.epsilon.high > first.spent_.epsilon.high


def test_a_fit_to_other_rows_is_no_second_fit():
    classifier().fit(*data())
    classifier().fit(*data())
    assert len(refits._KNOWN.fits) == 2


def test_a_fit_that_released_nothing_does_not_count():
    x, y = data()
    for mistake in ({"classes": [0]}, {"clip_norm": -1}, {"module": lambda d, k: None}, {"prior_releases": [3]}):
        with pytest.raises(ValueError, match=r"must be|y has"):
            classifier(**mistake).fit(x, y)
    assert refits._KNOWN.fits == []
    classifier().fit(x, y)


@pytest.mark.thorough
def test_classes_that_were_looked_for_in_vain_count():
    x, y = data(80)
    with pytest.raises(ValueError, match="0 classes found"):
        classifier(classes=None).fit(x, np.arange(80) % 4)
    with pytest.raises(tp.Refused, match="fitted before"):
        classifier().fit(x, y)
    fitted = classifier(refits="count").fit(x, y)
    assert fitted.spent_.epsilon == price(fitted)
    assert [type(event).__name__ for event, _ in refits._KNOWN.fits[0].releases] == ["Gaussian", "KnownProfile"]


def test_an_interrupted_fit_counts_the_steps_that_it_made(monkeypatch):
    x, y = data()

    class Interrupting:
        calls = 0

        def __call__(self, optimizer, *_):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt

    def optimizer(parameters, lr):
        made = torch.optim.SGD(parameters, lr=lr)
        made.register_step_post_hook(Interrupting())
        return made

    with pytest.raises(KeyboardInterrupt):
        classifier(epochs=4, optimizer=optimizer).fit(x, y)
    ((_, count),) = refits._KNOWN.fits[0].releases
    assert count == 2
    with pytest.raises(tp.Refused, match="fitted before"):
        classifier().fit(x, y)


class TestCount:
    @pytest.mark.thorough
    def test_the_last_statement_covers_all_fits(self):
        x, y = data()
        one = classifier(refits="count").fit(x, y)
        two = classifier(refits="count", epsilon=1.0, epochs=2).fit(x[:30], y[:30])
        assert two.statement_["fits"] == 2
        both = [*refits._KNOWN.fits[0].releases, *refits._KNOWN.fits[1].releases]
        expected = privacy.compose(both).epsilon(1e-4)
        assert two.spent_.epsilon == expected == price(two)
        assert two.statement_["epsilon"] == {"low": expected.low, "high": expected.high}
        assert one.spent_.epsilon.high < expected.high
        assert "for 2 fits" in str(two.spent_)

    @pytest.mark.thorough
    def test_a_grid_ends_with_the_price_of_all_its_fits(self):
        x, y = data()
        grid = GridSearchCV(classifier(refits="count"), {"learning_rate": [0.1, 0.2]}, cv=2, error_score="raise")
        grid.fit(x, y)
        best = grid.best_estimator_
        assert best.statement_["fits"] == len(refits._KNOWN.fits) == 5
        assert best.spent_.epsilon == price(best)
        assert best.spent_.epsilon.high > 4

    def test_a_fit_that_is_not_private_makes_the_whole_not_private(self):
        x, y = data()
        classifier(refits="count", test_seed=1).fit(x, y)
        fitted = classifier(refits="count").fit(x, y)
        assert fitted.statement_["private"] is False
        assert str(fitted.spent_).startswith("NOT PRIVATE (test_seed")

    def test_a_run_folder_would_state_less(self, tmp_path):
        x, y = data()
        classifier(refits="count").fit(x, y)
        with pytest.raises(tp.Refused, match="1 earlier fits"):
            classifier(refits="count", run_folder=tmp_path / "run").fit(x, y)
        assert len(refits._KNOWN.fits) == 1

    def test_threads_are_counted(self):
        x, y = data()
        fits = [classifier(refits="count") for _ in range(3)]
        threads = [threading.Thread(target=one.fit, args=(x, y)) for one in fits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(one.statement_.get("fits", 1) for one in fits) == 3


class TestElsewhere:
    """An estimator from another process; this one cannot know what it was fitted to."""

    @pytest.mark.parametrize("choice", ["refuse", "count"])
    def test_is_refused(self, choice, monkeypatch):
        x, y = data()
        sent = pickle.dumps(classifier(refits=choice))
        assert pickle.loads(sent).fit(x, y).n_iter_ == 2  # back in the same process
        monkeypatch.setattr(refits._KNOWN, "fits", [])
        monkeypatch.setattr(refits, "_PROCESS", "1 another")
        with pytest.raises(tp.Refused, match="made in another process"):
            pickle.loads(sent).fit(x, y)

    def test_is_refused_after_a_fork(self, monkeypatch):
        x, y = data()
        monkeypatch.setattr("os.getpid", lambda: 1)
        with pytest.raises(tp.Refused, match="made in another process"):
            classifier().fit(x, y)

    def test_is_taken_where_the_data_need_no_protection(self, monkeypatch):
        x, y = data()
        sent = pickle.dumps(classifier(refits="separate"))
        monkeypatch.setattr(refits, "_PROCESS", "1 another")
        pickle.loads(sent).fit(x, y).fit(x, y)


@pytest.mark.thorough
def test_a_run_folder_holds_one_fit(tmp_path):
    x, y = data()
    fitted = classifier(run_folder=tmp_path / "run").fit(x, y)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(fitted.module_.state_dict()[name], weight) for name, weight in weights.items())
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert written["epsilon"] == fitted.statement_["epsilon"]
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(tp.Refused, match="has a ledger already"):
        classifier(run_folder=tmp_path / "run").fit(*data())


@pytest.mark.filterwarnings("ignore:PrivateClassifier.fit")
def test_a_run_folder_would_not_say_that_a_scaler_was_fitted(tmp_path):
    x, y = data()
    with pytest.raises(tp.Refused, match=r"lack: NOT PRIVATE \(column"):
        classifier(run_folder=tmp_path / "run", bounds=(-3, 3)).fit(StandardScaler().fit_transform(x), y)
    assert not (tmp_path / "run").exists()


def test_digests_of_rows_say_nothing_about_them():
    x, _ = data()
    first = refits.digests(x)
    assert len(set(first.tolist())) == 40
    assert first[::-1].tolist() == refits.digests(x[::-1]).tolist()
    assert refits.digests(np.zeros((1, 2))).tolist() == refits.digests(-np.zeros((1, 2))).tolist()
