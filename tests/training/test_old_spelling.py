# SPDX-License-Identifier: Apache-2.0
"""Tests that former keywords are refused with a spelling that works, and `Performance` changes rounding alone."""

import re

import pytest
import torch
from trainings import data, network, parameters_of, train, training_of

import torch_privacy as tp


def pad(items):
    return torch.utils.data.default_collate(items)


def subspace():
    return tp.AnchorSubspace(torch.randn(20, 3), 4)


OLD = {
    "examples": (
        {"collate_fn": pad, "views": 2, "num_workers": 0, "assume_independent": "it's so"},
        {},
        'tp.Examples(dataset, collate_fn=pad, views=2, num_workers=0, assume_independent="it\'s so")',
    ),
    "owners": (
        {"owners": [i // 2 for i in range(40)], "per_owner": 2, "owner_name": "user"},
        {"owners": [i // 2 for i in range(40)]},
        "tp.Examples(dataset, owners=owners, per_owner=2, owner_name='user')",
    ),
    "budget": (
        {"budget": tp.Budget(3.0, 1e-3)},
        {"budget": tp.Budget(3.0, 1e-3)},
        "tp.Examples(dataset, budget=budget)",
    ),
    "performance": (
        {"microbatch_size": 4, "memory_budget": 1.5},
        {},
        "performance=tp.Performance(microbatch_size=4, memory_budget=1.5)",
    ),
    "a schedule": (
        {"clip_schedule": [1.0] * 6},
        {"clip_schedule": [1.0] * 6},
        "clipping=tp.Flat(clip_norm=0.5).scheduled(clip_schedule)",
    ),
    "projections": (
        {"jacobian": tp.Sketched(4, clip_norm=1.0), "not_for_release": True},
        {},
        "clipping=tp.Sketched(4, clip_norm=0.5, not_for_release=True)",
    ),
    "a subspace": ({"perturbation": tp.BGEP(subspace())}, {}, "clipping=tp.BGEP(...)"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", OLD)
def test_former_keyword_is_refused_with_a_spelling_that_works(name):
    old, names, new = OLD[name]
    with pytest.raises(TypeError, match=f"{next(iter(old))}=.* moved.*{re.escape(new)}"):
        training_of(**old)
    copied = new.replace("...", "subspace()").removeprefix("performance=").removeprefix("clipping=")
    made = eval(copied, {"tp": tp, "pad": pad, "dataset": data(), "subspace": subspace, **names})
    place = {"tp.E": "dataset", "tp.P": "performance"}.get(copied[:4], "clipping")
    assert training_of(**{place: made}).settings


def test_keywords_of_all_places_are_refused_together():
    with pytest.raises(
        TypeError, match=r"Examples\(dataset, views=2\) in place of dataset and performance=.* and clipping="
    ):
        training_of(views=2, microbatch_size=3, clip_schedule=[1.0])


def test_leave_to_train_with_little_noise_belongs_to_estimated_norms_alone():
    with pytest.raises(
        TypeError, match=r"^PrivateTraining: not_for_release= is a setting of tp.Sketched.*Leave it out"
    ):
        training_of(not_for_release=True)
    with pytest.raises(TypeError, match=r"views= has moved.*\(dataset, views=2\) .* not_for_release= is a setting"):
        training_of(views=2, not_for_release=True)
    with pytest.raises(TypeError, match=r"clipping=tp.Sketched\(num_projections=4, .*not_for_release=True\)\."):
        training_of(clipping=tp.Sketched(4, clip_norm=0.5), not_for_release=True)


def test_unknown_keyword_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'noise_multiplyer' .did you mean 'noise_multipl"):
        training_of(noise_multiplyer=1.0)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        training_of(zzz=1.0)


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
