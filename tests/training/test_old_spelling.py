# SPDX-License-Identifier: Apache-2.0
"""Tests that former keywords are refused with a spelling that works, and `Performance` changes rounding alone."""

import pytest
import torch
from trainings import data, network, parameters_of, train, training_of

import torch_privacy as tp


def pad(items):
    return torch.utils.data.default_collate(items)


def subspace():
    return tp.AnchorSubspace(torch.randn(20, 3), 4)


OLD = {  # name -> a value
    "collate_fn": pad,
    "num_workers": 0,
    "views": 2,
    "assume_independent": "it's so",
    "budget": tp.Budget(3.0, 1e-3),
    "microbatch_size": 4,
    "memory_budget": 1.5,
    "clip_schedule": [1.0] * 6,
    "jacobian": None,
    "perturbation": None,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", OLD)
def test_former_keyword_is_refused_with_a_spelling_that_works(name):
    with pytest.raises(TypeError, match=f"PrivateTraining: {name}= is now ") as error:
        training_of(**{name: OLD[name]})
    new = str(error.value).partition(" is now ")[2].removesuffix(".").removesuffix(" in place of dataset")
    place, given = new.split("=", 1) if new.startswith(("clipping=", "performance=")) else ("dataset", new)
    filled = given.replace("=...", f"={name}").replace("(...)", "(subspace())")
    made = eval(filled, {"tp": tp, "dataset": data(), "subspace": subspace, name: OLD[name]})
    little_noise = {"noise_multiplier": 2.0} if name == "jacobian" else {}
    assert training_of(**{place: made}, **little_noise).settings


def test_former_keywords_are_refused_together():
    with pytest.raises(TypeError, match=r"views= is now tp.Examples.*; microbatch_size= is now performance=.*\)\.$"):
        training_of(views=2, microbatch_size=3)


def test_leave_to_train_with_little_noise_belongs_to_estimated_norms_alone():
    with pytest.raises(TypeError, match=r"not_for_release= is now a setting of clipping=tp.Sketched.*leave it out"):
        training_of(not_for_release=True)


def test_unknown_keyword_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'noise_multiplyer' .did you mean 'noise_multipl"):
        training_of(noise_multiplyer=1.0)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        training_of(zzz=1.0)
    with pytest.raises(TypeError, match=r"'compile' .here it is left out: compiled steps were slower"):
        training_of(compile=True)


def test_projections_without_a_clip_norm_are_refused_with_the_new_spelling():
    with pytest.raises(TypeError, match=r"clipping=tp.Sketched\(8, clip_norm=1.0\)"):
        tp.Sketched(8)
    with pytest.raises(ValueError, match="Sketched: clip_norm=0 must be greater than 0"):
        tp.Sketched(8, clip_norm=0)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("clipping", [tp.Flat(0.5), tp.PerLayer(0.5)], ids=["flat", "per layer"])
def test_performance_changes_no_release_but_by_rounding(clipping):
    usual = training_of(clipping=clipping)
    train(usual)
    before = torch.cat([p.detach().flatten() for p in network().parameters()])
    assert (parameters_of(usual) - before).norm() > 0.1
    for chosen in (tp.Performance(microbatch_size=1), tp.Performance(microbatch_size=5, memory_budget=1e-6)):
        other = training_of(clipping=clipping, performance=chosen)
        train(other)
        torch.testing.assert_close(parameters_of(other), parameters_of(usual), rtol=1e-12, atol=1e-12)
        assert other.ledger.events == usual.ledger.events


def test_performance_is_checked():
    with pytest.raises(ValueError, match="Performance: microbatch_size=0 must be an integer of at least 1"):
        tp.Performance(microbatch_size=0)
    with pytest.raises(ValueError, match="Performance: memory_budget=0 must be greater than 0"):
        tp.Performance(memory_budget=0)
    with pytest.raises(ValueError, match="performance=7 must be a Performance"):
        training_of(performance=7)


def test_examples_of_data_that_have_grown_are_refused():
    items = [data()[i] for i in range(40)]
    examples = tp.Examples(items, owners=range(40), per_owner=1)
    items.append(items[0])
    with pytest.raises(tp.Refused, match="the data set has 41 examples, and had 40 when their owners were read"):
        training_of(dataset=examples)


def test_examples_name_what_is_wrong_with_them():
    with pytest.raises(tp.Refused, match="dataset is a DataLoader"):
        tp.Examples(torch.utils.data.DataLoader(data()))
    with pytest.raises(ValueError, match="Examples: num_workers=-1 must be an integer of at least 0"):
        tp.Examples(data(), num_workers=-1)
    with pytest.raises(ValueError, match="Examples: collate_fn='pad' must be a function"):
        tp.Examples(data(), collate_fn="pad")
    with pytest.raises(tp.Refused, match="dataset is Examples itself"):
        tp.Examples(tp.Examples(data()))
    with pytest.raises(tp.Refused, match=r"tp.audit: dataset is Examples.*wrap what train\(dataset\) gets"):
        tp.audit(lambda dataset: None, tp.Examples(data()), tp.GradientCanaries(3))
