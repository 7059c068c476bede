# SPDX-License-Identifier: Apache-2.0
"""Private estimators: the weights of the plain loop, statements, bounds, classes, pipelines."""

import inspect
import io
import json
import pickle
import re
import warnings

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.runs.report import render as report
from torch_privacy.sklearn import PrivateClassifier, PrivateRegressor, PrivateScaler, PublicScaler
from torch_privacy.sklearn.classes import find_classes

QUICK = {"epochs": 3, "batch_size": 20, "refits": "separate", "random_state": 0, "test_seed": 7}


def data(n=60, d=3, seed=0):
    x = np.random.default_rng(seed).uniform(-1, 1, size=(n, d))
    return x, (x[:, 0] + x[:, 1] > 0).astype(int)


def classifier(**changed):
    return PrivateClassifier(**({"classes": [0, 1], "hidden_units": 4} | QUICK | changed))


def network(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 4, dtype=torch.float32), nn.ReLU(), nn.Linear(4, 2, dtype=torch.float32)]
    return nn.Sequential(*layers)


def trained_by_hand(x, y, num_steps, decay, **settings):
    seed = int(np.random.RandomState(0).randint(np.iinfo(np.int32).max))
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    average = None if decay is None else tp.MovingAverage(model, optimizer, decay)
    rows = torch.tensor(x, dtype=torch.float32)
    training = tp.PrivateTraining(
        model, optimizer, TensorDataset(rows, torch.tensor(y)), num_steps=num_steps, test_seed=7, **settings
    )
    for inputs, labels in training:
        training.step(F.cross_entropy(model(inputs), labels, reduction="none"))
    return (model if average is None else average.model).state_dict(), training


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("average", [None, 0.1])
def test_weights_are_those_of_the_plain_loop_bit_for_bit(average):
    x, y = data()
    fitted = classifier(average=average, clip_norm=0.7, epochs=10).fit(x, y)
    decay = None if average is None else 1 - 1 / 3.0  # a tenth of 30 steps
    settings = {"expected_batch_size": 20, "clipping": tp.Flat(0.7), "target_epsilon": 2.0, "delta": 1e-5}
    weights, training = trained_by_hand(x, y, 30, decay, **settings)
    assert fitted.n_iter_ == 30
    assert all(torch.equal(fitted.module_.state_dict()[name], weight) for name, weight in weights.items())
    assert str(fitted.spent_) == str(training.spent())
    assert fitted.statement_["epsilon"] == training.statement()["epsilon"]


@pytest.mark.thorough
def test_squared_errors_are_of_targets_scaled_by_their_bounds():
    x, _ = data()
    y = 5 + 4 * x[:, 0]
    fitted = PrivateRegressor(target_bounds=(0, 10), hidden_units=(), average=None, **QUICK).fit(x, y)
    seed = int(np.random.RandomState(0).randint(np.iinfo(np.int32).max))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(3, 1, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor((y - 5) / 5, dtype=torch.float32))
    training = tp.PrivateTraining(
        model, optimizer, dataset, expected_batch_size=20, num_steps=9, clipping=tp.Flat(1.0), target_epsilon=2.0,
        delta=1e-5, test_seed=7,
    )  # fmt: skip
    for inputs, targets in training:
        training.step((model(inputs)[:, 0] - targets).square())
    assert torch.equal(fitted.module_[0].weight, model.weight)
    expected = 5 + 5 * model.double()(torch.tensor(x, dtype=torch.float32).double()).detach().numpy()[:, 0]
    np.testing.assert_allclose(fitted.predict(x), expected, rtol=1e-12)
    assert fitted.predict(1e9 * x).max() <= 10


@pytest.mark.thorough
def test_statement_says_what_was_public():
    x, y = data()
    fitted = classifier(test_seed=None).fit(x, y)
    statement = fitted.statement_
    assert statement["private"] is True
    assert {"classes", "names and bounds of the features", "num_examples"} <= set(statement["treated_as_public"])
    assert any("StandardScaler" in text for text in statement["not_covered"])
    assert any("refits='separate'" in text for text in statement["not_covered"])
    assert statement["target_epsilon"] == 2.0
    assert fitted.spent_.epsilon.high <= 2.0
    assert statement["epsilon"]["high"] == fitted.spent_.epsilon.high
    json.dumps(statement)
    assert "NOT PRIVATE" in str(classifier().fit(x, y).spent_)


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "delta"), [(60, 1e-5), (40_000, 1 / 400_000)])
def test_delta_follows_from_the_number_of_examples(n, delta):
    x, y = data(n)
    fitted = classifier(batch_size=n // 2, epochs=1).fit(x, y)
    assert fitted.spent_.delta == delta


@pytest.mark.thorough
def test_features_are_clipped_to_their_bounds():
    x, y = data()
    low, high = np.array([-2.0, -1, 0]), np.array([2.0, 1, 5])
    outside = x.copy()
    outside[0] = [9, -9, -9]
    with pytest.warns(UserWarning, match="lie outside of bounds"):
        one = classifier(bounds=(low, high)).fit(outside, y)
    clipped = np.clip(outside, low, high)
    other = classifier(bounds=(low, high)).fit(clipped, y)
    np.testing.assert_array_equal(one.predict_proba(outside), other.predict_proba(clipped))
    piped = make_pipeline(PublicScaler((low, high)), classifier()).fit(outside, y)
    np.testing.assert_array_equal(piped.predict_proba(outside), other.predict_proba(clipped))


def test_targets_outside_of_their_bounds_are_clipped_with_a_warning():
    """They were clipped without a word, so that narrow bounds looked like a bad fit."""
    x, _ = data()
    y = x[:, 0].copy()
    y[0] = 99
    regressor = PrivateRegressor(epsilon=2.0, target_bounds=(-9, 9), bounds=(-9, 9), epochs=1, refits="separate")
    with pytest.warns(UserWarning, match=r"values of y lie outside of target_bounds=\(-9, 9\) and are clipped"):
        regressor.fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor.fit(x, np.clip(y, -9, 9))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"module": torch.nn.Linear(3, 2)}, "module=Linear(...) is a network: must be a function of the numbers"),
        ({"optimizer": lambda parameters: None}, "cannot be called as optimizer(parameters, lr=learning_rate) (got an"),
        ({"clipping": tp.Flat}, "clipping=<class 'torch_privacy.mechanisms.clipping.Flat'> must be a clipping rule"),
    ],
    ids=["module", "optimizer", "clipping"],
)
def test_what_cannot_make_network_or_optimizer_or_clip_is_refused_before_classes_are_paid_for(wrong, words):
    """The errors were those of Python within this library, after epsilon was spent on the classes."""
    x, y = data(seed=len(words))
    one = PrivateClassifier(epsilon=2.0, bounds=(-9, 9), **wrong)
    with pytest.raises(ValueError, match=re.escape(words)):
        one.fit(x, y)
    assert PrivateClassifier(epsilon=2.0, bounds=(-9, 9), classes="public", epochs=1).fit(x, y).spent_.epsilon.high <= 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"average": 0.0}, "average=0.0 must lie in"),
        ({"learning_rate": -1.0}, "Invalid learning rate"),
        ({"hidden_units": 0}, "hidden_units=0 must be"),
        ({"module": lambda d, k: nn.Sequential(nn.Linear(d, k), nn.BatchNorm1d(k))}, "batch normalization"),
        ({"clipping": tp.Groups({"other": 1.0})}, "no prefix in clip_norms matches"),
        (
            {"prior_releases": [privacy.Release(privacy.Gaussian(1.0), "x")]},
            "leaves nothing for the training: prior_releases and",
        ),
    ],
    ids=["average", "rate", "width", "batch norm", "groups", "prior releases"],
)
def test_mistakes_are_seen_before_classes_are_paid_for(wrong, words, monkeypatch):
    def never(*_):
        raise AssertionError("released")

    monkeypatch.setattr("torch_privacy.sklearn.classifier.find_classes", never)
    x, y = data(n=100, seed=len(words))
    with pytest.raises((ValueError, tp.Refused), match=words):
        PrivateClassifier(epsilon=2.0, **wrong).fit(x, y)
    monkeypatch.undo()
    PrivateClassifier(epsilon=2.0, classes=[0, 1], epochs=1).fit(x, y)  # the first fit is forgotten


def test_a_scaler_fitted_to_the_data_is_noticed():
    x, y = data()
    signs = np.sign(x[:, :1] - np.median(x[:, :1]))
    piped = make_pipeline(StandardScaler(), classifier(bounds=(-4, 4), test_seed=None))
    with pytest.warns(UserWarning, match="StandardScaler"):
        piped.fit(x, y)
    assert piped[-1].statement_["private"] is False
    assert str(piped[-1].spent_).startswith("NOT PRIVATE (column '0'")
    assert float(piped[-1].spent_) == float("inf")
    assert classifier(test_seed=None).fit(np.hstack([signs, x]), y).statement_["private"] is True


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "frame", [lambda x: pd.DataFrame(x, columns=["a", "b", "c"]), lambda x: x.astype(np.float32), lambda x: x.tolist()]
)
def test_frames_and_float32_and_lists_are_taken(frame):
    x, y = data()
    given = frame(x)
    fitted = classifier().fit(given, pd.Series(y))
    assert torch.equal(fitted.module_[0].weight, classifier().fit(x, y).module_[0].weight)
    assert fitted.predict(given).tolist() == fitted.predict(given).tolist()
    if isinstance(given, pd.DataFrame):
        assert fitted.feature_names_in_.tolist() == ["a", "b", "c"]


def test_sparse_features_are_refused():
    x, y = data()
    with pytest.raises(TypeError, match="dense data is required"):
        classifier().fit(sparse.csr_matrix(x), y)


@pytest.mark.parametrize("through", ["pickle", "joblib"])
def test_a_fitted_estimator_goes_through_a_file(through):
    x, y = data()
    fitted = classifier(module=nn.Linear, random_state=1).fit(x, y)
    if through == "pickle":
        again = pickle.loads(pickle.dumps(fitted))
    else:
        file = io.BytesIO()
        joblib.dump(fitted, file)
        again = joblib.load(io.BytesIO(file.getvalue()))
    np.testing.assert_array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert again.statement_ == fitted.statement_
    assert str(again.spent_) == str(fitted.spent_)
    assert clone(again).get_params() == fitted.get_params()


@pytest.mark.thorough
def test_modules_rules_and_optimizers_of_ones_own():
    x, y = data()
    make = lambda d, k: nn.Sequential(nn.Linear(d, 5), nn.Dropout(0.5), nn.Linear(5, k))  # noqa: E731
    settings = {"module": make, "clipping": tp.Automatic(), "optimizer": torch.optim.SGD, "learning_rate": 0.5}
    fitted = classifier(**settings).fit(x, y)
    assert fitted.statement_["clipping"]["rule"] == "Automatic"
    np.testing.assert_array_equal(fitted.predict_proba(x), fitted.predict_proba(x))  # without dropout
    with pytest.raises(ValueError, match="outputs of shape"):
        classifier(module=lambda d, k: nn.Linear(d, k + 1)).fit(x, y)
    with pytest.raises(ValueError, match=r"must be a function .* returns an nn.Module"):
        classifier(module=lambda d, k: None).fit(x, y)


class TestClasses:
    @pytest.mark.thorough
    def test_those_with_enough_examples_are_found_and_paid_for(self):
        x, _ = data(400)
        y = np.array(["a"] * 200 + ["b"] * 199 + ["only one"])
        fitted = classifier(classes=None, epsilon=2.0, test_seed=None, epochs=1, batch_size=100).fit(x, y)
        assert fitted.classes_.tolist() == ["a", "b"]
        releases = [(privacy.event_from_dict(one["event"]), one["count"]) for one in fitted.statement_["releases"]]
        assert [type(event).__name__ for event, _ in releases] == ["Gaussian", "KnownProfile", "SubsampledGaussian"]
        assert 1.9 < privacy.compose(releases).epsilon_high(1e-5) == fitted.spent_.epsilon.high <= 2.0
        assert "classes" not in fitted.statement_["treated_as_public"]
        assert fitted.statement_["classes"]["threshold"] > 30
        assert set(fitted.predict(x)) <= {"a", "b"}

    @pytest.mark.thorough(but=1)
    @pytest.mark.parametrize("way", ["two sums", "estimated norms"])
    def test_they_and_steps_that_cost_more_than_a_plain_one_meet_the_target_together(self, way):
        x, _ = data(400)
        if way == "two sums":
            subspace = tp.AnchorSubspace(TensorDataset(torch.randn(20, 3).float(), torch.arange(20) % 2), 3)
        clipping = tp.GEP(subspace) if way == "two sums" else tp.Sketched(32, clip_norm=1.0)
        one = classifier(classes=None, clipping=clipping, hidden_units=(), epochs=1, batch_size=100).fit(x, x[:, 0] > 0)
        assert 1.9 < one.spent_.epsilon.high <= 2.0

    def test_an_only_example_is_found_with_the_chance_that_is_priced(self, monkeypatch):
        noise = privacy.calibrate(0.5, 0.2, sampling_probability=1.0, num_steps=1)
        monkeypatch.setattr(privacy, "calibrate", lambda *_, **__: noise)
        y = np.array([0] * 100 + [1])
        found = sum(1 in find_classes(y, 2.0, 2.0, seed).classes for seed in range(400)) / 400
        assert abs(found - 0.2) < 4 * (0.16 / 400) ** 0.5

    def test_two_searches_that_find_the_same_classes_are_two_releases(self):
        found = [find_classes(np.array([0, 1] * 200), 2.0, 1e-5, None).releases for _ in range(2)]
        assert len({release.fingerprint for releases in found for release in releases}) == 4

    @pytest.mark.parametrize("kind", [str, bytes])
    def test_the_length_of_a_label_that_is_not_found_stays_secret(self, kind):
        """The type of the classes was as wide as the longest label of one example."""
        ys = [np.array(["a"] * 200 + ["b"] * 199 + rare).astype(kind) for rare in (["a rare diagnosis"], [])]
        found = [find_classes(y, 2.0, 1e-5, 0).classes for y in ys]
        assert found[0].tolist() == found[1].tolist() == ys[0][[0, 200]].tolist()
        assert found[0].dtype == found[1].dtype

    @pytest.mark.parametrize("rare", [2.0, "two", True], ids=repr)
    def test_a_label_of_another_type_is_refused(self, rare):
        """All classes became 0.0 and 1.0, or texts, by one example."""
        x, _ = data(400)
        with pytest.raises(tp.Refused, match="labels of the types"):
            classifier(classes=None).fit(x, [0, 1] * 199 + [1, rare])

    @pytest.mark.parametrize("rare", [np.str_("b"), None, 1], ids=["numpy", "missing", "number"])
    def test_a_label_of_another_type_in_an_array_of_objects_is_refused(self, rare):
        """One class became a text of numpy by one example; None was an error of sorting."""
        x, _ = data(400)
        y = np.array(["a", "b"] * 199 + ["a", rare], object)
        with pytest.raises(tp.Refused, match="labels of the types"):
            classifier(classes=None).fit(x, y)
        if rare != "b":
            with pytest.raises(ValueError, match="Give labels of one type"):
                classifier(classes=["a", "b"]).fit(x, y)

    @pytest.mark.thorough
    def test_an_example_of_a_class_that_is_not_found_has_no_influence(self):
        """The example is in batches, and its gradient is zero."""
        x, _ = data(300)
        y = np.array([0] * 150 + [1] * 149 + [2])
        one = classifier(classes=None, epochs=1).fit(x, y)
        x[-1] = 0.5
        other = classifier(classes=None, epochs=1).fit(x, y)
        assert one.classes_.tolist() == [0, 1]
        np.testing.assert_array_equal(one.predict_proba(x), other.predict_proba(x))

    def test_too_few_examples_say_what_to_do(self):
        x, _ = data(80)
        few = np.arange(80) % 4  # 20 examples of each
        with pytest.raises(ValueError, match=r"0 classes found.*has cost epsilon 0\.\d+ .*classes=\[\.\.\.\]"):
            classifier(classes=None).fit(x, few)

    def test_they_are_not_looked_for_where_not_even_two_equal_ones_would_be_found(self, monkeypatch):
        def never(*_):
            raise AssertionError("released")

        monkeypatch.setattr("torch_privacy.sklearn.classifier.find_classes", never)
        x, y = data(20, seed=99)
        with pytest.raises(tp.Refused, match=r"about 39 examples .* 20 in all. Nothing was released.*classes=\[\.\."):
            PrivateClassifier(epsilon=2.0).fit(x, y)
        monkeypatch.undo()
        PrivateClassifier(epsilon=2.0, classes=[0, 1], epochs=1).fit(x, y)  # the first fit is forgotten

    @pytest.mark.parametrize(
        ("classes", "words"),
        [([0], "y has 1, which"), ([0, 0, 1], "class twice"), ("all", 'must be "public"'), ([0, 1, 2], None)],
    )
    def test_declared_ones_hold(self, classes, words):
        x, y = data()
        if words is None:
            assert classifier(classes=classes).fit(x, y).predict_proba(x).shape == (60, 3)
        else:
            with pytest.raises(ValueError, match=words):
                classifier(classes=classes).fit(x, y)

    def test_those_of_the_data_may_count_as_public(self):
        x, y = data()
        fitted = classifier(classes="public").fit(x, np.array(["no", "yes"])[y])
        assert fitted.classes_.tolist() == ["no", "yes"]
        assert "classes" in fitted.statement_["treated_as_public"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"epsilon": 0}, "epsilon=0 must be greater"),
        ({"delta": 0.1}, r"delta=0.1 must lie in \(0, 0.0166667\)"),
        ({"batch_size": 61}, "batch_size=61 must lie in"),
        ({"average": 2.0}, "average=2.0 must lie in"),
        ({"bounds": (1, 0)}, "low < high"),
        ({"bounds": ([0, 0], [1, 1])}, "one number for each of 3 features"),
        ({"refits": "yes"}, "refits='yes' must be one of"),
        ({"hidden_units": (4, 0)}, "hidden_units=0 must be"),
        ({"clip_norm": -1}, "clip_norm=-1.0"),
    ],
)
def test_mistakes_are_named(changed, words):
    x, y = data()
    with pytest.raises(ValueError, match=words):
        classifier(**changed).fit(x, y)


def test_what_scikit_learn_offers_elsewhere_is_refused():
    x, y = data()
    with pytest.raises(tp.Refused, match="sample_weight"):
        classifier().fit(x, y, sample_weight=np.ones(60))
    with pytest.raises(TypeError, match="unexpected keyword argument 'weights'"):
        classifier().fit(x, y, weights=1)
    assert not hasattr(classifier(), "partial_fit")
    with pytest.raises(AttributeError, match="microbatch_size"):
        classifier().partial_fit(x, y)
    with pytest.raises(tp.Refused, match="target_bounds"):
        PrivateRegressor(**QUICK).fit(x, y)


@pytest.mark.parametrize("targets", [np.array([None, *range(19)], object), ["one", *range(19)]], ids=["None", "text"])
def test_a_target_that_is_no_number_is_one_clear_error(targets):
    """An example without one was trained on with no gradient, and nothing said so."""
    with pytest.raises(ValueError, match="targets that are missing or no numbers"):
        PrivateRegressor(target_bounds=(0, 20), **QUICK).fit(np.zeros((20, 1)), targets)


@pytest.mark.parametrize("estimator", [PrivateClassifier, PrivateRegressor, PrivateScaler])
def test_unknown_arguments_are_named_with_a_reason_or_the_one_that_is_meant(estimator):
    with pytest.raises(TypeError, match=r"there is no class_weight=: .* predict_proba .* Leave it out\."):
        estimator(class_weight="balanced")
    with pytest.raises(TypeError, match=rf"{estimator.__name__}: unexpected .* 'epsilo'\. Did you mean epsilon=\?"):
        estimator(epsilo=1.0)
    with pytest.raises(TypeError, match=r"'xyz'\. There are .*bounds"):
        estimator(xyz=1.0)
    assert "epsilon" in inspect.signature(estimator).parameters


@pytest.mark.thorough
def test_digits_are_learned_at_epsilon_2():
    x, y = load_digits(return_X_y=True)
    fitted = PrivateClassifier(bounds=(0, 16), classes=range(10), refits="separate", random_state=0)
    assert fitted.fit(x[:1400], y[:1400]).score(x[1400:], y[1400:]) > 0.8
    assert fitted.spent_.epsilon.high <= 2.0


def test_fit_draws_once_from_the_budget_and_is_refused_where_it_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "render", lambda folders: "a page")
    x, y = data()
    budget = tp.Budget.open(tmp_path / "people.budget", epsilon=3, delta=1e-4)
    own = {"budget": budget, "delta": 1e-4, "test_seed": None}
    fitted = classifier(run_folder=tmp_path / "1", epsilon=2.0, **own).fit(x, y)
    (drawn,) = budget.state.runs
    assert (drawn.status, drawn.ledger) == ("settled", str(tmp_path / "1" / "ledger.jsonl"))
    assert budget.spent().high == fitted.spent_.epsilon.high
    assert fitted.statement_["data_budget"]["epsilon_drawn"] == budget.spent().high
    with pytest.raises(tp.Refused, match=r"does not fit into .* Nothing was read or released"):
        classifier(run_folder=tmp_path / "2", epsilon=2.5, **own).fit(x, y)
    with pytest.raises(tp.Refused, match="so the training needs run_folder="):
        classifier(epsilon=0.5, **own).fit(x, y)
    with pytest.raises(tp.Refused, match="budget= needs the classes"):
        classifier(classes=None, run_folder=tmp_path / "3", epsilon=0.5, **own).fit(x, y)
    with pytest.raises(tp.Refused, match="has a ledger already"):
        classifier(run_folder=tmp_path / "1", epsilon=0.5, **own).fit(x, y)
    assert len(budget.state.runs) == 1


@pytest.mark.parametrize("estimator", [PrivateClassifier(classes=[0, 1]), PublicScaler()])
def test_missing_values_do_not_lead_to_an_imputer_that_learns(estimator):
    rows = np.where(np.eye(4) > 0, np.nan, 0.5)
    with pytest.raises(ValueError, match="contains NaN") as refused:
        estimator.fit(rows, [0, 1, 0, 1])
    assert "SimpleImputer(strategy='constant', fill_value=0)" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_probabilities_are_better_than_those_of_the_shares_of_the_classes_by_default():
    """The log loss was 0.74 with the clip norm 1, the default before; the shares of the classes have 0.69."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, size=(2500, 8))
    y = (rng.random(2500) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(int)
    fitted = PrivateClassifier(epsilon=1.0, classes=[0, 1], test_seed=1, random_state=0).fit(x[:1500], y[:1500])
    of_truth = fitted.predict_proba(x[1500:])[np.arange(1000), y[1500:]]
    assert -np.log(of_truth).mean() < 0.63
