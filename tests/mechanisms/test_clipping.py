# SPDX-License-Identifier: Apache-2.0
"""Tests that the bounds hold for every norm, and that one example moves the sum by at most the sensitivity."""

import math
import re
from pathlib import Path

import pytest
import torch
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy import privacy
from torch_privacy.mechanisms.clipping import (
    Adaptive,
    Automatic,
    ClippingRule,
    EachLayer,
    Flat,
    Groups,
    MicroBatches,
    PerLayer,
    median_norm,
)
from torch_privacy.privacy import NeighboringRelation

ADD_OR_REMOVE, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = ["scale", "body.0.weight", "body.0.bias", "body.2.weight", "head.weight"]

# name -> rule with bound C for its (first) group, and that group. A new rule of one group needs no other line here.
RULES = {
    "flat": lambda c: (Flat(c), "all"),
    "group": lambda c: (Groups({"a": c, "b": 2 * c}), "a"),
    "per layer": lambda c: (PerLayer(2 * c).bind(["a.w", "b.w", "c.w", "d.w"]), "c"),
    "each layer": lambda c: (EachLayer(c), "any"),
    "automatic": lambda c: (Automatic(c), "all"),
    "automatic, normalizing": lambda c: (Automatic(c, gamma=0.0), "all"),
    "automatic, tiny gamma": lambda c: (Automatic(c, gamma=1e-30), "all"),
    "adaptive": lambda c: (Adaptive(c, smallest=min(c, 1e-6)), "all"),
    "micro-batches": lambda c: (MicroBatches(c, 2), "all"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@draws(50)
@given(c=st.floats(1e-6, 1e6), norms=st.lists(st.floats(0), max_size=9))
def test_factor_times_norm_never_exceeds_the_bound(rule, dtype, c, norms):
    rule, group = RULES[rule](c)
    norms = torch.tensor(norms, dtype=dtype)
    factors = rule.factors(norms, group)
    assert factors.shape == norms.shape
    assert factors.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert (factors.isfinite() & (factors >= 0)).all()
    assert (factors[~norms.isfinite()] == 0).all()
    finite = norms.isfinite()
    assert (factors[finite].double() * norms[finite].double() <= c * (1 + 1e-5)).all()


@pytest.mark.parametrize("rule", RULES)
def test_norms_that_are_not_finite_get_the_factor_zero(rule):
    rule, group = RULES[rule](2.0)
    factors = rule.factors(torch.tensor([math.inf, math.nan, -math.inf, -math.nan]), group)
    assert factors.tolist() == [0.0] * 4


@draws(50)
@given(st.floats(1e-6, 1e6), st.lists(st.floats(0, 1e18), min_size=1, max_size=9))
def test_flat_leaves_a_gradient_within_the_bound_as_it_is(clip_norm, norms):
    norms = torch.tensor(norms, dtype=torch.float32)
    factors = Flat(clip_norm).factors(norms)
    assert (factors <= 1).all()
    assert (factors[norms < clip_norm * (1 - 1e-6)] == 1).all()
    assert Flat(clip_norm).factors(torch.zeros(1)) == 1


def test_factors_whose_digits_are_lost_or_that_overflow_are_zero():
    norms = torch.tensor([1e38, 2e38, 3e38], dtype=torch.float32)
    assert (Flat(1.1e-6).factors(norms) == 0).all()  # not subnormal numbers, half of which is rounding error
    assert Automatic(1e30, gamma=0.0).factors(torch.tensor([1e-9], dtype=torch.float32)) == 0


@pytest.mark.parametrize("bound", [1.0, 1e-21])
@pytest.mark.parametrize("rule", RULES)
def test_release_of_one_tiny_example_is_within_the_bound(rule, bound):
    """float32 loses the squares of most entries, so that the computed norm is a hundred times too small."""
    row = torch.full((1, 100_000), 2e-23, dtype=torch.float32)
    row[0, 0] = 1e-22
    rule, group = RULES[rule](bound)
    factors = rule.factors(row.square().sum(1).sqrt(), group)
    assert (factors[0].double() * row.double()).norm() <= bound * (1 + 1e-5)


def test_automatic_is_the_formula():
    norms = torch.tensor([0.0, 1e-11, 0.5, 3.0])
    torch.testing.assert_close(
        Automatic(2.0, gamma=0.5).factors(norms), torch.tensor([0.0, 0.0, 2.0, 2 / 3.5]), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        Automatic(2.0, gamma=0.0).factors(norms), torch.tensor([0.0, 0.0, 4.0, 2 / 3]), rtol=1e-12, atol=0
    )


# Sensitivity


def clipped_sum(rule: ClippingRule, rows: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Returns the clipped sum of rows (n, number of names, entries), one block of entries for each parameter."""
    total = torch.zeros_like(rows[0])
    for group, members in rule.groups(names).items():
        columns = [names.index(name) for name in members]
        factors = rule.factors(rows[:, columns].flatten(1).norm(dim=1), group)
        total[columns] = torch.tensordot(factors, rows[:, columns], 1)
    return total


SUMS = {  # those of one group, and others for the parameters of NAMES
    **{name: make(0.7)[0] for name, make in RULES.items() if make(0.7)[1] == "all" and name != "micro-batches"},
    "groups": Groups({"": 0.5, "body": 0.3, "body.2": 1.1}),
    "per layer": PerLayer(0.7),
    "each layer": EachLayer(0.7),
}


def test_every_rule_is_tested():
    rules = {rule for rule in ClippingRule.__subclasses__() if rule.__module__.startswith("torch_privacy.")}
    assert {type(rule) for rule in SUMS.values()} | {MicroBatches} == rules


@pytest.mark.parametrize("rule", SUMS)
def test_one_example_changes_the_clipped_sum_by_the_sensitivity_at_most(rule):
    rule = SUMS[rule].bind(NAMES)
    rows = torch.randn(9, len(NAMES), 4) * torch.logspace(-3, 3, 9)[:, None, None]
    total = clipped_sum(rule, rows, NAMES)
    for i in range(9):
        without = clipped_sum(rule, torch.cat([rows[:i], rows[i + 1 :]]), NAMES)
        assert (total - without).norm() <= rule.sensitivity(ADD_OR_REMOVE) * (1 + 1e-12)
        replaced = clipped_sum(rule, torch.cat([rows[:i], -rows[i : i + 1], rows[i + 1 :]]), NAMES)
        assert (total - replaced).norm() <= rule.sensitivity(REPLACE) * (1 + 1e-12)


@pytest.mark.parametrize("rule", SUMS)
def test_a_large_example_or_one_at_the_bound_changes_the_clipped_sum_by_all_of_the_sensitivity(rule):
    rule = SUMS[rule].bind(NAMES)
    rows = torch.ones(1, len(NAMES), 4)
    rows = [rows * (norm / rows.norm()) for norm in (1e9, rule.largest_norm())]
    changes = [(clipped_sum(rule, row, NAMES), clipped_sum(rule, -row, NAMES)) for row in rows]
    torch.testing.assert_close(max(here.norm().item() for here, _ in changes), rule.sensitivity(ADD_OR_REMOVE))
    torch.testing.assert_close(max((a - b).norm().item() for a, b in changes), rule.sensitivity(REPLACE))


@pytest.mark.parametrize("rule", SUMS)
def test_sensitivity_doubles_under_replacement_only(rule):
    rule = SUMS[rule].bind(NAMES)
    once = rule.sensitivity(ADD_OR_REMOVE)
    assert [rule.sensitivity(relation) for relation in NeighboringRelation] == [once, 2 * once, once]


# Groups


def test_groups_of_one_group_are_flat():
    norms = torch.rand(9) * 3
    assert torch.equal(Groups({"": 1.5}).bind(NAMES).factors(norms, ""), Flat(1.5).factors(norms))
    assert Groups({"": 1.5}).groups(NAMES) == {"": tuple(NAMES)}
    assert Flat(1.5).groups(NAMES) == {"all": tuple(NAMES)}
    assert Flat(1.5).bind(NAMES) == Flat(1.5)


def test_groups_take_the_longest_prefix_by_whole_words():
    rule = Groups({"body": 1.0, "body.2": 2.0, "": 3.0, "head.weight": 4.0})
    assert rule.bind(NAMES) == rule
    assert rule.groups([*NAMES, "bodyguard.weight", "body.20.weight"]) == {
        "body": ("body.0.weight", "body.0.bias", "body.20.weight"),
        "body.2": ("body.2.weight",),
        "": ("scale", "bodyguard.weight"),
        "head.weight": ("head.weight",),
    }


def test_groups_are_a_partition_also_of_some_of_the_names():
    for rule in SUMS.values():
        groups = rule.groups(NAMES)
        assert sorted(name for members in groups.values() for name in members) == sorted(NAMES)
        assert rule.bind(NAMES).groups(NAMES) == groups
        some = rule.bind(NAMES).groups(NAMES[:2])  # as if the other parameters were frozen later
        assert sorted(name for members in some.values() for name in members) == sorted(NAMES[:2])


def test_groups_list_all_parameters_that_nothing_matches():
    with pytest.raises(ValueError, match=r"no prefix in clip_norms matches 'scale', 'head.weight'\. Given are 'body'"):
        Groups({"body": 1.0}).bind(NAMES)


def test_groups_list_all_prefixes_that_match_nothing():
    with pytest.raises(ValueError, match=r"'bod', 'tail' in clip_norms matches no trained parameter"):
        Groups({"": 1.0, "bod": 1.0, "tail": 1.0}).bind(NAMES)
    with pytest.raises(ValueError, match=r"'body' in clip_norms matches no trained parameter as the longest"):
        Groups({"": 1.0, "body": 1.0, "body.0": 1.0, "body.2": 1.0}).bind(NAMES)


@pytest.mark.parametrize("clip_norms", [{}, 1.0, ["a"]])
def test_groups_want_a_mapping(clip_norms):
    with pytest.raises(ValueError, match=r"Groups: clip_norms=.* must map prefixes"):
        Groups(clip_norms)


def test_groups_name_the_bad_bound_and_the_unknown_group():
    with pytest.raises(ValueError, match=r"Groups: clip_norms\['b'\]=-1 must be greater than 0"):
        Groups({"a": 1.0, "b": -1})
    with pytest.raises(ValueError, match=r"group='all' must be one of 'a', 'b'"):
        Groups({"a": 1.0, "b": 1.0}).factors(torch.ones(2))


def test_groups_do_not_change_with_the_mapping_they_were_made_from():
    bounds = {"a": 1.0}
    rule = Groups(bounds)
    bounds["a"] = 100.0
    assert rule == Groups({"a": 1.0})
    assert hash(rule) == hash(Groups({"a": 1.0}))


def test_per_layer_shares_the_bound_equally_among_modules():
    assert PerLayer(2.0).bind(NAMES) == Groups(dict.fromkeys(["", "body.0", "body.2", "head"], 1.0))
    assert PerLayer(2.0).sensitivity(ADD_OR_REMOVE) == 2.0
    assert PerLayer(2.0).sensitivity(REPLACE) == 4.0
    for count in range(1, 40):
        bound = PerLayer(0.3).bind([f"{i}.weight" for i in range(count)])
        torch.testing.assert_close(bound.sensitivity(ADD_OR_REMOVE), 0.3, rtol=1e-14, atol=0)


def test_each_layer_is_the_rule_of_abadi_et_al():
    rule = EachLayer(4.0).bind(["0.weight", "0.bias", "2.weight", "2.bias"])
    assert rule == Groups({"0": 4.0, "2": 4.0})
    assert rule.sensitivity(ADD_OR_REMOVE) == pytest.approx(4 * math.sqrt(2), rel=1e-15)


def test_rules_ask_to_be_bound_first():
    with pytest.raises(ValueError, match=r"EachLayer\.sensitivity: .* Call rule\.bind"):
        EachLayer(4.0).sensitivity(ADD_OR_REMOVE)
    with pytest.raises(ValueError, match=r"PerLayer\.factors: .* Call rule\.bind"):
        PerLayer(4.0).factors(torch.ones(2))


# Adaptive


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_adaptive_finds_the_quantile_of_the_norms(quantile):
    norms = torch.rand(1001).exp()
    rule = Adaptive(clip_norm=0.01, target_quantile=quantile)
    for _ in range(300):
        rule = rule.updated(float(rule.count(norms)), expected_batch_size=1001)
    torch.testing.assert_close(rule.clip_norm, norms.quantile(quantile).item(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_adaptive_count_moves_by_half_for_many_rows_whatever_the_default_type(default):
    """As after ``torch.set_default_dtype``, with which large models are made: in bfloat16 the count moved by 4."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        counts = [float(Adaptive(1.0).count(torch.zeros(n, dtype=torch.float32))) for n in range(5990, 6000)]
    finally:
        torch.set_default_dtype(before)
    assert counts == [n / 2 for n in range(5990, 6000)]


def test_adaptive_count_moves_by_half_when_added_by_one_when_replaced():
    rule, norms = Adaptive(1.0), torch.tensor([0.5, 1.0, 1.5, math.inf, math.nan])
    assert rule.count(norms) == -0.5
    assert rule.count(norms[:0]) == 0
    changes = [abs(rule.count(norms) - rule.count(norms[torch.arange(5) != i])) for i in range(5)]
    assert max(changes) == min(changes) == rule.count_sensitivity(ADD_OR_REMOVE) == 0.5
    assert rule.count(torch.tensor([0.5])) - rule.count(torch.tensor([1.5])) == rule.count_sensitivity(REPLACE) == 1


@pytest.mark.parametrize("relation", NeighboringRelation)
@pytest.mark.parametrize(("z", "stddev"), [(0.5, 0.51), (1.0, 50.0), (3.0, 3.1)])
def test_adaptive_sum_and_count_together_are_one_release(z, stddev, relation):
    """Composed by the accountant, the two Gaussians cost the same as one with the joint multiplier."""
    rule = Adaptive(1.0, count_noise_stddev=stddev)
    gradient, count_stddev = rule.split(z, expected_batch_size=100, relation=relation)
    assert gradient > z
    assert count_stddev == stddev
    pair = [(privacy.Gaussian(gradient), 1), (privacy.Gaussian(stddev / rule.count_sensitivity(relation)), 1)]
    epsilon = privacy.compose([(privacy.Gaussian(z), 1)]).epsilon(1e-5).high
    assert privacy.compose(pair).epsilon(1e-5).high == pytest.approx(epsilon, rel=1e-6)


def test_adaptive_count_noise_is_a_twentieth_of_the_batch_by_default():
    assert Adaptive(1.0).split(1.0, 1000, ADD_OR_REMOVE) == (pytest.approx((1 - 1e-4) ** -0.5, rel=1e-12), 50.0)


def test_adaptive_refuses_a_count_noise_too_small_for_the_noise_multiplier():
    text = r"count_noise_stddev=0\.5 must be greater than 1, the noise multiplier 2 times the count's sensitivity"
    with pytest.raises(ValueError, match=text):
        Adaptive(1.0, count_noise_stddev=0.5).split(2.0, 100, ADD_OR_REMOVE)
    with pytest.raises(ValueError, match=r"must be greater than 0\.5"):
        Adaptive(1.0).split(1.0, 10, ADD_OR_REMOVE)


@draws(50)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(1e-3, 1e6))
def test_adaptive_stays_within_its_limits_whatever_the_noise(noisy_count, expected_batch_size):
    rule = Adaptive(1.0, smallest=0.1, largest=3.0)
    assert 0.1 <= rule.updated(noisy_count, expected_batch_size).clip_norm <= 3.0


@pytest.mark.parametrize("noisy_count", [math.nan, math.inf])
def test_adaptive_refuses_a_count_that_is_not_finite(noisy_count):
    with pytest.raises(ValueError, match=r"noisy_count=(nan|inf) must be a finite number"):
        Adaptive(1.0).updated(noisy_count, 10)


# Micro-batches


def micro_batched(rule: MicroBatches, rows: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    means = torch.stack([rows[group == j].mean(0) for j in group.unique()])
    return rule.factors(means.norm(dim=1)) @ means


@pytest.mark.parametrize("relation", NeighboringRelation)
def test_one_example_changes_the_micro_batches_by_the_sensitivity_at_most(relation):
    rule, rows, group = MicroBatches(0.7, 2), torch.randn(8, 5), torch.randint(3, (8,))
    with_others = torch.cat([rows[:1], 1e9 * rows[:1], -1e9 * rows[:1], torch.zeros(1, 5)])
    releases = [micro_batched(rule, torch.cat([other[None], rows[1:]]), group) for other in with_others]
    releases += [micro_batched(rule, rows[1:], group[1:])]
    for here in releases:
        for there in releases:
            assert (here - there).norm() <= rule.sensitivity(relation) * (1 + 1e-12)


@pytest.mark.parametrize("relation", NeighboringRelation)
def test_an_example_that_outweighs_its_micro_batch_reaches_the_sensitivity(relation):
    rule, rows, group = MicroBatches(0.7, 2), torch.tensor([[1e3], [2e3], [-1e9]]), torch.tensor([0, 1, 1])
    change = micro_batched(rule, rows[:2], group[:2]) - micro_batched(rule, rows, group)
    torch.testing.assert_close(change.item(), rule.sensitivity(relation))


def test_micro_batches_number_their_groups_by_public_numbers():
    counts = [MicroBatches(1.0, 16).num_groups(expected) for expected in (256, 100.0, 3)]
    assert counts == [16, 6, 1]


def test_micro_batches_of_one_are_refused():
    with pytest.raises(ValueError, match=r"size=1 must be at least 2\. .*use Flat"):
        MicroBatches(1.0, 1)
    with pytest.raises(ValueError, match=r"size=2\.0 must be an integer"):
        MicroBatches(1.0, 2.0)  # pyright: ignore[reportArgumentType]


# Settings, helper, documentation


@pytest.mark.parametrize("clip_norm", [0, -1.0, math.nan, math.inf, "1", True])
@pytest.mark.parametrize("rule", [Flat, PerLayer, EachLayer, Automatic, Adaptive, lambda c: MicroBatches(c, 2)])
def test_a_bad_clip_norm_is_refused(rule, clip_norm):
    with pytest.raises(ValueError, match=r"[A-Z]\w+: clip_norm="):
        rule(clip_norm)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Automatic(gamma=-0.1), r"Automatic: gamma=-0\.1 must be 0 or greater"),
        (lambda: Adaptive(1.0, target_quantile=1), r"Adaptive: target_quantile=1 must lie in \(0, 1\)"),
        (lambda: Adaptive(1.0, learning_rate=0), r"Adaptive: learning_rate=0 must be greater than 0"),
        (lambda: Adaptive(1.0, count_noise_stddev=0), r"Adaptive: count_noise_stddev=0 must be greater than 0"),
        (lambda: Adaptive(1.0, largest=0.5), r"Adaptive: clip_norm=1\.0 must lie in .* \[1e-06, 0\.5\]"),
    ],
)
def test_other_bad_settings_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_statement_is_plain_data():
    assert Flat(0.5).statement() == {"rule": "Flat", "clip_norm": 0.5}
    assert Groups({"a": 1.0}).statement() == {"rule": "Groups", "clip_norms": {"a": 1.0}}
    layers = PerLayer(1.0).bind(["a.weight", "a.bias", "b", "c.d", "e.f"])
    assert layers.statement() == {
        "rule": "PerLayer",
        "clip_norm": 1.0,
        "clip_norms": {"a": 0.5, "": 0.5, "c": 0.5, "e": 0.5},
    }
    assert Automatic().statement() == {"rule": "Automatic", "clip_norm": 1.0, "gamma": 0.01}
    assert Adaptive(1.0).statement()["target_quantile"] == 0.5


def test_median_norm_is_that_of_the_finite_norms():
    assert median_norm(torch.tensor([3.0, 1.0, math.inf, 2.0, math.nan])) == 2.0
    assert median_norm(torch.tensor([4.0, 1.0, 3.0, 2.0], dtype=torch.bfloat16)) == 2.0
    with pytest.raises(ValueError, match=r"norms of shape \(1,\) must hold at least one finite number"):
        median_norm(torch.tensor([math.nan]))


def test_example_of_the_documentation_gives_the_sensitivities_of_its_table():
    rules, *_ = python_blocks()
    shown: dict = {}
    exec(rules, shown)
    expected = [1.0, 1.0, 4 * math.sqrt(2), math.sqrt(1.25), 1.0, 0.1, 2.0]
    assert shown["sensitivities"] == pytest.approx(expected)


def test_importance_sampling_of_the_page_is_unbiased_with_less_variance():
    *_, block = python_blocks()
    shown: dict = {}
    exec(block, shown)
    torch.testing.assert_close(shown["weights"], 1 / (200 * shown["probabilities"][shown["drawn"]]))
    probabilities, parameters = shown["probabilities"], list(shown["model"].parameters())
    assert all(p.grad is not None for p in parameters)
    losses = torch.nn.functional.cross_entropy(shown["model"](shown["x"]), shown["y"], reduction="none")
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) for loss in losses
    ]
    drawn_rows = torch.stack(rows) / (200 * probabilities[:, None])  # contribution of one draw
    torch.testing.assert_close(probabilities @ drawn_rows, torch.stack(rows).mean(0))
    assert probabilities @ drawn_rows.square().sum(1) < torch.stack(rows).square().sum(1).mean()


def test_rule_of_one_s_own_in_the_documentation_trains(capsys):
    _, rule, *_ = python_blocks()
    torch.set_default_dtype(torch.float32)
    exec(rule, {"__name__": __name__})
    assert capsys.readouterr().out == "{'rule': 'Smooth', 'clip_norm': 1.0}\n"


def python_blocks() -> list[str]:
    page = Path(__file__).parents[2] / "docs/clipping.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_groups_follow_the_model_in_whichever_order_the_bounds_are_given():
    """A mapping made from a set has another order in each process, so that ranks would add other norms."""
    bounds, names = {"b": 0.1, "c": 0.7, "a": 0.3}, ["a.x", "b.x", "c.x", "b.y"]
    rules = [Groups(dict(some)) for some in (bounds.items(), reversed(bounds.items()))]
    groups = {"a": ("a.x",), "b": ("b.x", "b.y"), "c": ("c.x",)}
    assert [list(rule.groups(names).items()) for rule in rules] == [list(groups.items())] * 2
    assert len({rule.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE) for rule in rules}) == 1
