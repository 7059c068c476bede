# SPDX-License-Identifier: Apache-2.0
"""Per-example losses of an ordinary loop: each equals the loss function on that example alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from torch_privacy import Refused
from torch_privacy.opacus.catcher import LossCatcher
from torch_privacy.opacus.losses import LOSSES

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # of KLDivLoss
N, T, C = 4, 3, 5
torch.manual_seed(0)
SCORES, SEQUENCE = torch.randn(N, C), torch.randn(N, T, C)
LABELS, TOKENS = torch.randint(C, (N,)), torch.randint(C, (N, T))
SHARES = torch.rand(N, C)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])

# name -> (criterion, input, what it gets besides); each criterion is called with the first dimension of all cut, too
CRITERIA = {
    "cross entropy": (nn.CrossEntropyLoss(), SCORES, (LABELS,)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), SCORES, (LABELS,)),
    "probabilities": (nn.CrossEntropyLoss(), SCORES, (SHARES.softmax(1),)),
    "an ignored label": (nn.CrossEntropyLoss(ignore_index=int(LABELS[1])), SCORES, (LABELS,)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), SCORES, (LABELS,)),
    "sum with class weights": (nn.CrossEntropyLoss(torch.rand(C), reduction="sum"), SCORES, (LABELS,)),
    "positions": (nn.CrossEntropyLoss(), SEQUENCE.mT, (TOKENS,)),
    "nll": (nn.NLLLoss(), SCORES.log_softmax(1), (LABELS,)),
    "mse": (nn.MSELoss(), SEQUENCE, (torch.randn(N, T, C),)),
    "l1": (nn.L1Loss(), SCORES, (SHARES,)),
    "smooth l1": (nn.SmoothL1Loss(), SCORES, (SHARES,)),
    "huber": (nn.HuberLoss(delta=0.3), SCORES, (SHARES,)),
    "bce": (nn.BCELoss(), SCORES.sigmoid(), (SHARES,)),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=torch.rand(C)), SCORES, (SHARES,)),
    "bce on a column": (nn.BCEWithLogitsLoss(), SCORES[:, :1], (SHARES[:, :1],)),
    "kl, mean": (nn.KLDivLoss(reduction="mean"), SCORES.log_softmax(1), (SHARES,)),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), SCORES.log_softmax(1), (SHARES,)),
    "poisson": (nn.PoissonNLLLoss(), SCORES, (SHARES,)),
    "gaussian": (nn.GaussianNLLLoss(), SCORES, (SHARES, SHARES + 0.1)),
    "soft margin": (nn.SoftMarginLoss(), SCORES, (SHARES.round() * 2 - 1,)),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), SCORES, (SHARES.round(),)),
    "multilabel margin": (nn.MultiLabelMarginLoss(), SCORES, (torch.tensor([[0, 2, -1, 0, 0]] * N),)),
    "multi margin": (nn.MultiMarginLoss(weight=torch.rand(C)), SCORES, (LABELS,)),
    "hinge": (nn.HingeEmbeddingLoss(), SCORES, (SHARES.round() * 2 - 1,)),
    "ranking": (nn.MarginRankingLoss(0.5), SCORES[:, 0], (SCORES[:, 1], SIGNS)),
    "cosine": (nn.CosineEmbeddingLoss(), SCORES, (SHARES, SIGNS)),
    "triplet": (nn.TripletMarginLoss(), SCORES, (SHARES, SHARES.flip(1))),
    "triplet with distance": (nn.TripletMarginWithDistanceLoss(), SCORES, (SHARES, SHARES.flip(1))),
}


def caught(reduction: str = "mean") -> LossCatcher:
    catcher = LossCatcher(reduction)
    catcher.open()
    return catcher


def taken(criterion, given: Tensor, others: tuple) -> tuple[Tensor, LossCatcher]:
    """Returns the loss that a loop sees, after its backward, and what was caught."""
    catcher = caught("sum" if getattr(criterion, "reduction", "mean") == "sum" else "mean")
    try:
        loss = criterion(given, *others)
        loss.backward()
    finally:
        catcher.close()
    return loss, catcher


@pytest.mark.parametrize("name", CRITERIA)
def test_each_loss_is_that_of_its_example_alone(name: str) -> None:
    criterion, given, others = CRITERIA[name]
    given = given.detach().double().requires_grad_()
    others = tuple(o.double() if o.is_floating_point() else o for o in others)
    criterion = criterion.double()
    expected = torch.stack([criterion(given[i : i + 1], *(o[i : i + 1] for o in others)) for i in range(N)])
    expected = expected.nan_to_num()  # the mean of no label
    loss, catcher = taken(criterion, given, others)
    torch.testing.assert_close(loss, criterion(given, *others), rtol=1e-12, atol=0)
    losses = catcher.backward_loss.of_examples(N, batch_first=True, verified=True)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(losses.sum(), given)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), given)[0], rtol=1e-12, atol=1e-15)


def test_every_loss_function_has_a_case_or_a_test_of_its_own() -> None:
    seen: set = set()

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        for criterion, given, others in CRITERIA.values():
            criterion.float()(given, *others)
    assert LOSSES - seen == {F.ctc_loss}


def test_ctc_losses_are_divided_by_their_own_lengths() -> None:
    scores = torch.randn(8, N, C, requires_grad=True).log_softmax(2)
    targets, lengths = torch.randint(1, C, (N, T)), torch.tensor([3, 2, 1, 3])
    loss, catcher = taken(nn.CTCLoss(), scores, (targets, torch.full((N,), 8), lengths))
    torch.testing.assert_close(loss, F.ctc_loss(scores, targets, torch.full((N,), 8), lengths))
    losses = catcher.backward_loss.of_examples(N, batch_first=True, verified=True)
    one = [
        F.ctc_loss(scores[:, i : i + 1], targets[i : i + 1], torch.tensor([8]), lengths[i : i + 1]) for i in range(N)
    ]
    torch.testing.assert_close(losses, torch.stack(one))


@pytest.mark.parametrize("batch_first", [True, False])
def test_flattened_positions_are_averaged_by_example_over_its_own_labels(batch_first: bool) -> None:
    tokens = TOKENS.clone()
    tokens[1, 1:] = -100
    scores = SEQUENCE.clone().requires_grad_()
    shown = (scores, tokens) if batch_first else (scores.transpose(0, 1), tokens.T)
    loss, catcher = taken(nn.CrossEntropyLoss(), shown[0].reshape(-1, C), (shown[1].reshape(-1),))
    torch.testing.assert_close(loss, F.cross_entropy(scores.reshape(-1, C), tokens.reshape(-1)))
    losses = catcher.backward_loss.of_examples(N, batch_first=batch_first, verified=True)
    torch.testing.assert_close(losses, torch.stack([F.cross_entropy(scores[i], tokens[i]) for i in range(N)]))


def test_losses_with_time_first_are_told_apart_by_batch_first() -> None:
    given, target = torch.randn(T, N, C, requires_grad=True), torch.randn(T, N, C)
    _, catcher = taken(nn.MSELoss(), given, (target,))
    losses = catcher.backward_loss.of_examples(N, batch_first=False, verified=True)
    torch.testing.assert_close(losses, (given - target).square().mean((0, 2)))
    with pytest.raises(
        Refused, match=r"mse_loss gave losses of shape \(3, 4, 5\) for a batch of 4 .*batch_first=False"
    ):
        catcher.backward_loss.of_examples(N, batch_first=True, verified=True)


def test_flattened_positions_are_refused_where_no_rehearsal_shows_their_order() -> None:
    _, catcher = taken(nn.CrossEntropyLoss(), SEQUENCE.reshape(-1, C).requires_grad_(), (TOKENS.reshape(-1),))
    with pytest.raises(Refused, match="assume_independent"):
        catcher.backward_loss.of_examples(N, batch_first=True, verified=False)


SCALED = {
    "divided": (lambda loss: loss / 2, 0.5),
    "times": (lambda loss: 3 * loss, 3.0),
    "in place": (lambda loss: loss.div_(4), 0.25),
    "augmented": (lambda loss: loss.__imul__(0.5), 0.5),
    "twice, shifted": (lambda loss: (loss * 2 - 1) * 2 + 1, 4.0),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_loss_times_a_number_scales_the_losses(name: str) -> None:
    change, factor = SCALED[name]
    given = SCORES.clone().requires_grad_()
    _, catcher = taken(lambda out, y: change(F.cross_entropy(out, y)), given, (LABELS,))
    losses = catcher.backward_loss.of_examples(N, batch_first=True, verified=True)
    torch.testing.assert_close(losses, factor * F.cross_entropy(given, LABELS, reduction="none"))


def test_the_mean_of_losses_without_reduction_is_known() -> None:
    given = SCORES.clone().requires_grad_()
    loss, catcher = taken(lambda out, y: F.cross_entropy(out, y, reduction="none").mean(), given, (LABELS,))
    torch.testing.assert_close(loss, F.cross_entropy(given, LABELS))
    losses = catcher.backward_loss.of_examples(N, batch_first=True, verified=True)
    assert torch.equal(losses, F.cross_entropy(given, LABELS, reduction="none"))


W = torch.ones(C)
REFUSED = {
    "by hand": (lambda out, y: (out - 1).square().mean(), "none of torch's loss functions returned.*grad_sample"),
    "two": (lambda out, y: F.cross_entropy(out, y) + F.mse_loss(out, out.detach()), "changed by '(__add__|add)'"),
    "penalty": (lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().sum(), "weight_decay"),
    "scaled by a tensor": (
        lambda out, y: F.cross_entropy(out, y) * torch.tensor(2.0**16),
        "changed by 'mul'.*GradScaler",
    ),
    "power": (lambda out, y: F.cross_entropy(out, y) ** 2, "changed by"),
    "class weights": (lambda out, y: F.cross_entropy(out, y, weight=W), "cross_entropy.*divides by the weights of all"),
    "class weights of nll": (lambda out, y: F.nll_loss(out, y, W), "nll_loss.*divides by the weights of all"),
    "no mean": (lambda out, y: F.cross_entropy(out, y, reduction="none"), "one loss per element"),
    "masked": (
        lambda out, y: (F.cross_entropy(out, y, reduction="none") * (y > 0)).mean(),
        "none of torch's|changed by",
    ),
    "sum": (lambda out, y: F.cross_entropy(out, y, reduction="sum"), "loss_reduction='mean'"),
    "legacy": (lambda out, y: F.mse_loss(out, out.detach(), size_average=True), "size_average"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_are_not_known_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    catcher = caught()
    try:
        loss = make(SCORES.clone().requires_grad_(), LABELS)
        with pytest.raises(Refused, match=message):
            loss.backward()
        assert catcher.backward_loss is None
    finally:
        catcher.close()


def test_other_ways_of_backward_are_refused() -> None:
    given = SCORES.clone().requires_grad_()
    catcher = caught()
    try:
        loss = F.cross_entropy(given, LABELS)
        with pytest.raises(Refused, match="create_graph"):
            loss.backward(create_graph=True)
        with pytest.raises(Refused, match="several losses"):
            torch.autograd.backward([loss, loss])
        with pytest.raises(Refused, match=r"another way than by loss\.backward"):
            torch.autograd.grad(loss, given, allow_unused=True)
        loss.backward(retain_graph=True)
        with pytest.raises(Refused, match="called twice"):
            loss.backward()
    finally:
        catcher.close()
    with pytest.raises(Refused, match="after its step was made"):
        loss.backward()


def test_what_needs_no_gradient_is_left_alone() -> None:
    catcher = caught()
    try:
        with torch.no_grad():
            loss = F.cross_entropy(SCORES.clone().requires_grad_(), LABELS)
        plain = F.cross_entropy(SCORES, LABELS, weight=W)
    finally:
        catcher.close()
    assert not loss.requires_grad
    assert plain == F.cross_entropy(SCORES, LABELS, weight=W)


def test_modes_that_the_loop_enters_stay() -> None:
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    catcher, counting = caught(), Counting()
    with counting:
        catcher.close()
        assert _get_current_function_mode_stack() == [counting]
    assert not _get_current_function_mode_stack()
