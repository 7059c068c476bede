# SPDX-License-Identifier: Apache-2.0
"""The taped Jacobian against one backward per example."""

import pytest
import torch
from cases import CASES, losses_of
from oracle import assert_jacobian_equals_rows, one_backward_per_example, recorded_jacobian

import torch_privacy as tp
from torch_privacy._plan import squared_norms

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.mark.parametrize("case", CASES)
def test_jacobian_matches_one_backward_per_example(case):
    model, x = CASES[case]()
    rows = one_backward_per_example(model, x, losses_of, list(x.split(1)))
    assert_jacobian_equals_rows(recorded_jacobian(model, x, losses_of), rows)


@pytest.mark.parametrize("case", CASES)
def test_jacobian_matches_in_float32(case):
    model, x = CASES[case]()
    rows = one_backward_per_example(model, x, losses_of, list(x.split(1)))
    model.float()
    x = x.float() if x.is_floating_point() else x
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


def test_norms_are_the_same_in_chunks(monkeypatch):
    model, x = CASES["convolutional network"]()
    whole = recorded_jacobian(model, x, losses_of).squared_norms()
    monkeypatch.setattr("torch_privacy._plan.CHUNK_FLOATS", 50)
    torch.testing.assert_close(recorded_jacobian(model, x, losses_of).squared_norms(), whole)


def test_gram_is_computed_again_where_positions_cancel():
    """Two positions with nearly opposite gradients: the Gram sum loses all digits in float32, the row does not."""
    x = torch.ones(4, 2, 50)
    b = torch.ones(4, 2, 50)
    b[:, 1] = -1 + 1e-5
    op = tp.ops.linear.Linear(x.float(), b.float())
    torch.testing.assert_close(op._gram(), op._rows_norms(), rtol=1e-5, atol=0)


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


def test_recording_takes_nothing_from_the_random_state():
    model, x = CASES["convolutional network"]()
    state = torch.random.get_rng_state()
    recorded_jacobian(model, x, losses_of)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_project_wants_a_direction_for_every_parameter():
    model, x = CASES["linear, one position"]()
    with pytest.raises(ValueError, match=r"no direction for parameter 'bias'"):
        recorded_jacobian(model, x, losses_of).project({"weight": torch.zeros(1, 4, 3)})


def test_dropout_rows_are_those_of_the_masks_drawn():
    """The same masks in both: the native gradient of every single loss, from the same graph."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    x = torch.randn(5, 3)
    with tp.record(model) as tape:
        losses = losses_of(model, x)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    expected = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in rows])
    assert_jacobian_equals_rows(tape.jacobian(losses), expected)


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
