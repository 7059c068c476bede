# SPDX-License-Identifier: Apache-2.0
"""Scores on test rows: their values by scikit-learn, their errors by simulation, and what they warn of."""

import numpy as np
import pytest
from sklearn import metrics

from torch_privacy.tables import Threshold, scores_of_classes, scores_of_numbers

NAMES = ["no", "yes"]


def drawn(seed: int, n: int = 400, classes: int = 2, repeated: int = 1):
    """Returns calibrated probabilities and classes; each row comes ``repeated`` times."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.2, (n, classes)) + np.linspace(1.5, 0, classes)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(classes, p=row) for row in p])
    return p.repeat(repeated, 0), y.repeat(repeated)


def by_name(scores):
    return {one["name"]: one for one in scores["measures"]}


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_of_classes_are_those_of_scikit_learn(classes):
    p, y = drawn(0, classes=classes)
    found = by_name(scores_of_classes(p, y, [str(i) for i in range(classes)]))
    expected = {
        "accuracy": metrics.accuracy_score(y, p.argmax(1)),
        "balanced accuracy": metrics.balanced_accuracy_score(y, p.argmax(1)),
        "AUC": metrics.roc_auc_score(y, p if classes > 2 else p[:, 1], multi_class="ovr"),
        "log loss": metrics.log_loss(y, p),
    }
    assert {name: found[name]["value"] for name in expected} == pytest.approx(expected)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("repeated", [1, 4])
def test_errors_of_scores_are_those_of_repetitions_also_with_several_rows_of_a_person(repeated):
    owners = np.arange(100).repeat(repeated)
    sets = [drawn(seed, 100, repeated=repeated) for seed in range(300)]
    found = [by_name(scores_of_classes(p, y, NAMES, owners=owners)) for p, y in sets]
    found_numbers = [by_name(scores_of_numbers(p[:, 0], y, owners=owners)) for p, y in sets]
    for part in (found, found_numbers):
        for name in part[0]:
            if name != "calibration error":  # its gaps are never 0, and its error is that at given signs
                spread, stated = np.std([one[name]["value"] for one in part]), [one[name]["error"] for one in part]
                assert np.mean(stated) == pytest.approx(spread, rel=0.15), name


def test_a_model_that_never_says_yes_is_called_no_better_or_gets_a_threshold():
    rng = np.random.default_rng(1)
    chance = rng.beta(0.5, 20, 5000)
    y = (rng.random(5000) < chance).astype(int)
    useless = np.full(5000, y.mean())
    of_useless = scores_of_classes(np.stack([1 - useless, useless], 1), y, NAMES)
    assert ["no better than the base rate" in text for text in of_useless["warnings"]] == [True]
    p = np.stack([1 - chance, chance], 1)
    of_rare = scores_of_classes(p, y, NAMES)
    assert len(of_rare["warnings"]) == 1
    assert f"--threshold 'yes={y.mean():.2g}'" in of_rare["warnings"][0]
    decided = scores_of_classes(p, y, NAMES, threshold=Threshold.parse(f"yes={y.mean():.2g}", NAMES))
    assert not decided["warnings"]
    assert by_name(decided)["balanced accuracy"]["value"] > by_name(of_rare)["balanced accuracy"]["value"] + 0.1
    assert by_name(decided)["AUC"] == by_name(of_rare)["AUC"]


def test_a_gain_within_two_errors_is_called_not_shown_and_not_absent():
    rng = np.random.default_rng(11)
    z = rng.normal(size=300)
    y = (rng.random(300) < 1 / (1 + np.exp(3 - 0.7 * z))).astype(int)
    yes = 1 / (1 + np.exp(3 - z))
    found = scores_of_classes(np.stack([1 - yes, yes], 1), y, NAMES)
    loss = by_name(found)["log loss"]
    assert 0 < loss["baseline"] - loss["value"] < 2 * loss["gain_error"]
    assert "300 test rows do not show that the model is better than the base rate" in found["warnings"][0]
    x = rng.normal(size=60)
    weak = scores_of_numbers(0.15 * x, 0.2 * x + rng.normal(size=60))
    square = by_name(weak)["R²"]
    assert 0 < square["value"] < 2 * square["error"]
    assert "60 test rows do not show that the model is better than a constant" in weak["warnings"][0]


def test_a_regression_no_better_than_the_mean_is_called_so():
    y = np.random.default_rng(2).normal(5, 2, 300)
    assert "no better than a constant" in scores_of_numbers(np.full(300, 5.0), y)["warnings"][0]
    assert not scores_of_numbers(y + 0.5, y)["warnings"]


def test_targets_that_are_all_equal_are_said_to_show_nothing():
    """Bounds that lie beside the targets clip all of them to one end."""
    found = scores_of_numbers(np.array([1.0, 2.0, 2.0]), np.full(3, 2.0))
    assert "R²" not in {one["name"] for one in found["measures"]}
    assert found["warnings"][0].startswith("All 3 test rows have the same target, 2, so that scores say nothing.")


@pytest.mark.parametrize(
    ("text", "classes", "said"),
    [
        ("0.2", ["a", "b", "c"], "names no class"),
        ("maybe=0.2", NAMES, "'maybe' is none of 'no', 'yes'"),
        ("yes=2", NAMES, "a probability in (0, 1]"),
        ("0.2", [], "this one is a number"),
    ],
)
def test_threshold_refused(text, classes, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace("]", r"\]")):
        Threshold.parse(text, classes)


def test_threshold_alone_is_that_of_yes_whatever_the_order():
    assert Threshold.parse("0.2", NAMES) == Threshold(1, 0.2)
    assert Threshold.parse("0.2", ["Yes", "no"]) == Threshold(0, 0.2)
