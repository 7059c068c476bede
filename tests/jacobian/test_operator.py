# SPDX-License-Identifier: Apache-2.0
"""Compares the taped Jacobian with one backward per example."""

import pytest
import torch
from cases import CASES, losses_of
from oracle import (
    assert_exact,
    assert_jacobian_equals_rows,
    flat,
    length,
    one_backward_per_example,
    recorded_jacobian,
    rows_of_one_graph,
    rows_or_skip,
)
from parts import in_type
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.jacobian.recording import calls
from torch_privacy.jacobian.rows.norms import squared_norms

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def assert_rows_are_near(ours: Tensor, rows: Tensor, error: float) -> None:
    """Asserts equality up to ``error`` of each row's length, or a hundredth of the longest row's."""
    lengths = rows.norm(dim=1)
    off = (ours.double() - rows).norm(dim=1)
    assert (off <= error * lengths + error / 100 * lengths.max()).all(), f"off by {(off / lengths).max():.2g}"


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_jacobian_matches_one_backward_per_example(case):
    assert_exact(*CASES[case]())


def test_cases_have_a_fast_rule_unless_their_name_says_fallback(monkeypatch):
    """The fallback is exact, too: no other test shows that a rule is reached."""
    met, uses_of = [], calls.uses_of
    monkeypatch.setattr(calls, "uses_of", lambda again, *given: met.append(again.name) or uses_of(again, *given))
    wrong = {}
    for name, make in CASES.items():
        met.clear()
        model, x = make()
        with tp.record(model):
            losses_of(model, x)
        if bool(met) != name.startswith("by fallback: "):
            wrong[name] = [*met]
    assert wrong == {}


@pytest.mark.parametrize("case", CASES)
def test_jacobian_matches_in_float32(case):
    model, x = CASES[case]()
    rows = one_backward_per_example(model, x, losses_of)
    model, x = in_type(torch.float32, model, x)
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows.float(), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_every_method_of_every_op_gives_the_same_norms(case):
    model, x = CASES[case]()
    for block in recorded_jacobian(model, x, losses_of)._blocks:
        for op in block.ops:
            expected = op.rows().reshape(len(x), -1).square().sum(1)
            for method in op.methods():
                torch.testing.assert_close(
                    squared_norms(op, method), expected, msg=f"{type(op).__name__} {method.name}"
                )


@pytest.mark.parametrize("case", CASES)
def test_batch_of_one_matches_its_backward(case):
    model, x = CASES[case]()
    rows = one_backward_per_example(model, x[:1], losses_of, [x[:1]])
    jacobian = recorded_jacobian(model, x[:1], losses_of)
    torch.testing.assert_close(flat(jacobian.rows(), 1), rows, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(jacobian.squared_norms(), rows.square().sum(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flat(jacobian.weighted_sum(torch.full((1,), 2.0)), 0), 2 * rows[0], rtol=1e-9, atol=1e-9)


def runs_empty(model: nn.Module, x: Tensor) -> bool:
    """Returns whether torch itself can run the model and its backward without any example."""
    try:
        losses_of(model, x[:0]).sum().backward()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_empty_batch(case):
    model, x = CASES[case]()
    if not runs_empty(model, x):
        pytest.skip("torch itself cannot run this without examples")
    with tp.record(model) as tape:
        losses = losses_of(model, x[:0])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    jacobian = tape.jacobian(losses, may_miss=names)
    assert jacobian.squared_norms().shape == (0,)
    assert {name: part.shape[1:] for name, part in jacobian.rows().items()} == jacobian.shapes
    assert all(len(part) == 0 for part in jacobian.rows().values())
    assert all(not part.any() for part in jacobian.weighted_sum(torch.zeros(0)).values())
    v = {name: torch.randn(2, *shape) for name, shape in jacobian.shapes.items()}
    assert jacobian.project(v).shape == (0, 2)


# In one case most gradients are rounding of zero, and freezing the others leaves nothing to compare with.
SEVERAL = [case for case in CASES if len(list(CASES[case]()[0].parameters())) > 1]
SEVERAL.remove("normalised over equal entries")


@pytest.mark.parametrize("case", SEVERAL)
def test_frozen_parameters_leave_the_rows_of_the_others(case):
    model, x = CASES[case]()
    trained = [p for p in model.parameters() if p.requires_grad]
    for frozen in (trained[::2], trained[1::2]):
        for p in trained:
            p.requires_grad_(all(p is not other for other in frozen))
        if frozen and len(frozen) < len(trained):
            jacobian = recorded_jacobian(model, x, losses_of)
            assert list(jacobian.shapes) == [name for name, p in model.named_parameters() if p.requires_grad]
            rows = one_backward_per_example(model, x, losses_of)
            torch.testing.assert_close(flat(jacobian.rows(), 1), rows, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(jacobian.squared_norms(), rows.square().sum(1), rtol=1e-9, atol=1e-9)


# These refuse a bad example: entries that are not finite, or below rounding, cannot be assigned to an example.
REFUSED_WHEN_BAD = {case for case in CASES if case.startswith("irregular: ")} | {
    *(
        "matrix with every example's own call",
        "by fallback: images without a batch, one by one",
        "one parameter in two roles",
    ),
    "normalised over equal entries",
}
WITH_NUMBERS = [case for case in CASES if CASES[case]()[1].is_floating_point() and len(CASES[case]()[1]) > 1]


@pytest.mark.parametrize("case", WITH_NUMBERS)
def test_one_bad_example_leaves_the_norms_of_the_others(case):
    model, x = CASES[case]()
    others = torch.arange(len(x)) != 1
    rows = one_backward_per_example(model, x, losses_of)[others]
    x[1] = torch.inf
    try:
        jacobian = recorded_jacobian(model, x, losses_of)
    except tp.Refused:
        assert case in REFUSED_WHEN_BAD
        return
    torch.testing.assert_close(jacobian.squared_norms()[others], rows.square().sum(1), rtol=1e-9, atol=1e-12)
    total = jacobian.select(others).weighted_sum(torch.ones(len(rows)))
    torch.testing.assert_close(flat(total, 0), rows.sum(0), rtol=1e-9, atol=1e-9)


# Layouts that change with every batch: bfloat16 has too few digits to assign entries to examples, so it is refused.
TOO_COARSE = REFUSED_WHEN_BAD - {"normalised over equal entries"}


@pytest.mark.parametrize("case", sorted(TOO_COARSE))
def test_irregular_layouts_are_refused_or_right_in_bfloat16(case):
    for _ in range(3):
        torch.set_default_dtype(torch.float64)
        model, x = in_type(torch.bfloat16, *CASES[case]())
        rows = rows_of_one_graph(losses_of(model, x), model)
        try:
            jacobian = recorded_jacobian(model, x, losses_of)
        except tp.Refused:
            continue
        assert_rows_are_near(flat(jacobian.rows(), 1), rows, 0.15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_example_never_adds_more_than_the_clip_norm(case, dtype):
    """‖c₁ g₁‖ <= C with c₁ = min(1, C / ‖g₁‖), for the norms and the sum of a release."""
    if dtype is torch.bfloat16 and case in TOO_COARSE:
        return
    model, x = in_type(dtype, *CASES[case]())
    try:
        losses_of(model, x)
    except NotImplementedError as error:
        pytest.skip(f"torch itself: {error}")
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    jacobian = tape.jacobian(losses)
    norms = jacobian.squared_norms().sqrt()
    assert norms.dtype in (torch.float32, torch.promote_types(dtype, norms.dtype))
    clip_norm = norms[0].item() / 3
    c = tp.Flat(clip_norm).factors(norms)
    only_first = torch.where(torch.arange(len(x)) == 0, c, 0)
    assert length(jacobian.weighted_sum(only_first)) <= clip_norm * (1 + 1e-5)


HALF = [(case, torch.bfloat16) for case in CASES if case not in TOO_COARSE]
HALF += [(case, torch.float16) for case in list(CASES)[::4]] + [(case, torch.float16) for case in sorted(TOO_COARSE)]


@pytest.mark.parametrize(("case", "dtype"), HALF, ids=[f"{case}-{dtype}" for case, dtype in HALF])
def test_half_precision_parameters_give_the_rows_of_their_graph(case, dtype):
    """Rows equal single backwards in the same type, up to rounding; norms are those of the rows, in float32."""
    model, x = in_type(dtype, *CASES[case]())
    rows = rows_or_skip(model, x)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    jacobian = tape.jacobian(losses)  # unverified, because a native sum in this type is at times too coarse
    ours = flat(jacobian.rows(), 1).double()
    assert jacobian.squared_norms().dtype is (torch.float64 if case.startswith("chain: cast") else torch.float32)
    assert_rows_are_near(ours, rows, 0.15)
    torch.testing.assert_close(jacobian.squared_norms().double(), ours.square().sum(1), rtol=0.02, atol=0.01)


AUTOCAST = ["linear, rank 3", "convolutional network", "tied language model", "transformer layer", "conv1d, everything"]
AUTOCAST += ["einsum, split into heads", "embedding bag, mean", "by fallback: maximum"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast_rows_stay_near_the_exact_ones(case, dtype):
    model, x = in_type(torch.float32, *CASES[case]())
    rows = one_backward_per_example(model, x, losses_of)

    def half_way(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        return losses_of(lambda _: y.float(), x)

    jacobian = recorded_jacobian(model, x, half_way)
    ours = flat(jacobian.rows(), 1)
    assert jacobian.squared_norms().dtype is torch.float32
    assert all(part.dtype is torch.float32 for part in jacobian.weighted_sum(torch.ones(len(x))).values())
    assert ((ours - rows).norm(dim=1) < 0.05 * rows.norm(dim=1)).all()
    torch.testing.assert_close(jacobian.squared_norms(), ours.square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case]()[1].ndim in (4, 5) and "conv" in case])
def test_channels_last_changes_nothing(case):
    model, x = CASES[case]()
    rows = one_backward_per_example(model, x, losses_of)
    memory_format = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    x = x.contiguous(memory_format=memory_format)
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)
    for p in model.parameters():
        p.data = p.data.contiguous(memory_format=memory_format) if p.ndim == x.ndim else p.data
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)


def test_norms_are_the_same_in_chunks(monkeypatch):
    model, x = CASES["convolutional network"]()
    whole = recorded_jacobian(model, x, losses_of).squared_norms()
    monkeypatch.setattr("torch_privacy.jacobian.rows.norms.CHUNK_FLOATS", 50)
    torch.testing.assert_close(recorded_jacobian(model, x, losses_of).squared_norms(), whole)


def test_explain_names_every_parameter():
    model, x = CASES["tied language model"]()
    text = recorded_jacobian(model, x, losses_of).explain()
    assert all(name in text for name, _ in model.named_parameters())


def test_record_leaves_the_model_as_it_was():
    model, x = CASES["convolutional network"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recorded_jacobian(model, x, losses_of)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_recording_leaves_the_random_state_unchanged():
    model, x = CASES["convolutional network"]()
    state = torch.random.get_rng_state()
    recorded_jacobian(model, x, losses_of)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_project_needs_a_direction_for_every_parameter():
    model, x = CASES["linear, one position"]()
    with pytest.raises(ValueError, match=r"no direction for parameter 'bias'"):
        recorded_jacobian(model, x, losses_of).project({"weight": torch.zeros(1, 4, 3)})


def test_dropout_rows_are_those_of_the_masks_drawn():
    """The rows equal the gradients of single losses in the same graph, and so under the same masks."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    x = torch.randn(5, 3)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    rows = rows_of_one_graph(losses, model)
    assert_jacobian_equals_rows(tape.jacobian(losses), rows)


def test_activation_checkpointing_changes_nothing():
    model, x = CASES["convolutional network"]()
    plain = recorded_jacobian(model, x, losses_of).squared_norms()

    def checkpointed(model, x):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).reshape(len(x), -1)
        return (y.sin() * torch.linspace(0.5, 1.5, y.shape[1])).sum(1)

    torch.testing.assert_close(recorded_jacobian(model, x, checkpointed).squared_norms(), plain)
    with tp.record(model) as tape:
        y = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(tp.Refused, match="use_reentrant=False"):
        tape.jacobian(y.sum(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_sums_in_float32(dtype):
    torch.set_default_dtype(torch.float32)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.randn(6, 8)
    exact = recorded_jacobian(model, x, losses_of).squared_norms()
    with torch.autocast("cpu", dtype=dtype):
        jacobian = recorded_jacobian(model, x, losses_of)
    assert jacobian.squared_norms().dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in jacobian.weighted_sum(torch.ones(6)).values())
    torch.testing.assert_close(jacobian.squared_norms(), exact, rtol=0.05, atol=0)
