# SPDX-License-Identifier: Apache-2.0
"""Tests that callbacks see the exact numbers of each step, change no release, and leave a training whole."""

import json
import logging
import sys
from unittest import TestCase

import numpy as np
import pytest
import torch
from oracle import one_backward_per_example
from parts import own_batches
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from trainings import (
    RULES,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    groups_of,
    network,
    parameters_of,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy.training.loop import PrivateTraining


class Kept(tp.Callback):
    """Keeps what it is told; reads the numbers at once, or never."""

    def __init__(self, reads=True):
        self.reads, self.steps, self.ends = reads, [], 0

    def after_step(self, training, step):
        assert step.step == training.step_count
        self.steps.append((step.step, step.not_private, step.learning_rates) if self.reads else (step.step,))

    def at_end(self, training):
        self.ends += 1


class Raises(tp.Callback):
    def __init__(self, at):
        self.at = at

    def after_step(self, training, step):
        if step.step == self.at:
            raise OSError("disk full")


def rows_of(training, x, y):
    pairs = list(zip(x.split(1), y.split(1), strict=True))
    return one_backward_per_example(training.model, x, cross_entropy_of_pair, pairs)


def numbers(losses, norms, clipped):
    q10, q50, q90 = np.quantile(norms, (0.1, 0.5, 0.9))
    share = float(np.mean(clipped))
    return {"loss": losses.mean().item(), "share_clipped": share, "norm_q10": q10, "norm_q50": q50, "norm_q90": q90}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("rule", [*RULES, "flat in microbatches", "groups in microbatches"])
def test_numbers_are_those_of_one_backward_per_example(rule):
    settings = {"performance": tp.Performance(microbatch_size=3)} if rule.endswith(" in microbatches") else {}
    rule = RULES[rule.removesuffix(" in microbatches")][0]
    kept = Kept()
    training = training_of(clipping=rule, callbacks=[kept], **settings)
    expected, parts, step = [], [], 0
    for x, y in own_batches(training, cross_entropy):
        rows = rows_of(training, x, y)
        losses = cross_entropy(training.model, x, y)
        current = training.clipping
        training.step(losses)
        if training.rehearsing:  # it ran new code, and comes again
            continue
        parts.append((x, losses.detach(), rows))
        if training.step_count == step:
            continue
        losses, rows = (torch.cat([part[k] for part in parts]) for k in (1, 2))
        if isinstance(rule, tp.MicroBatches):
            count = rule.num_groups(8)
            groups = groups_of(training, step, len(rows), count)
            rows = torch.stack([rows[groups == groups[i]].mean(0) for i in range(len(rows))])
        names = [name for name, _ in training.model.named_parameters()]
        sizes = [p.numel() for p in training.model.parameters()]
        of_parameters = dict(zip(names, rows.split(sizes, dim=1), strict=True))
        clipped = torch.zeros(len(rows), dtype=torch.bool)
        bound = current.bind(names)
        for group, members in bound.groups(names).items():
            norms = torch.cat([of_parameters[name] for name in members], 1).norm(dim=1)
            clipped |= bound.factors(norms, group) < 1
        expected.append(numbers(losses, rows.norm(dim=1).numpy(), clipped.numpy()))
        parts, step = [], step + 1
    assert [number for number, _, _ in kept.steps] == [1, 2, 3, 4, 5, 6]
    for (_, found, _), exact in zip(kept.steps, expected, strict=True):
        assert found == pytest.approx(exact, rel=1e-9)
    assert any(0 < exact["share_clipped"] for exact in expected)
    assert kept.ends == 1


def test_views_count_as_one_example():
    kept = Kept()
    training = training_of(examples={"views": 2}, callbacks=[kept], num_steps=1)
    for x, y in own_batches(training, lambda model, x, y: cross_entropy(model, x, y).view(-1, 2)):
        losses = cross_entropy(training.model, x, y)
        rows = rows_of(training, x, y).view(len(x) // 2, 2, -1).mean(1)
        training.step(losses.view(-1, 2))
        norms = rows.norm(dim=1)
        assert kept.steps[0][1] == pytest.approx(numbers(losses.detach(), norms.numpy(), (norms > 0.5).numpy()))


def test_examples_that_are_left_out_of_the_sum_are_in_no_number():
    x, y = data().tensors
    x = x.clone()
    x[::4] = torch.nan
    kept = Kept()
    training = training_of(dataset=TensorDataset(x, y), callbacks=[kept], num_steps=2)
    for x, y in own_batches(training, cross_entropy):
        fine = ~x.isnan().any(1)
        losses, norms = cross_entropy(training.model, x, y).detach(), rows_of(training, x[fine], y[fine]).norm(dim=1)
        training.step(cross_entropy(training.model, x, y))
        exact = numbers(losses[fine], norms.numpy(), (norms > 0.5).numpy())
        assert kept.steps[-1][1] == pytest.approx(exact)
    assert training.num_non_finite > 0


def test_empty_batches_are_told_without_numbers():
    kept = Kept()
    training = training_of(expected_batch_size=0.5, num_steps=12, callbacks=[kept])
    train(training)
    assert [step for step, _, _ in kept.steps] == list(range(1, 13))
    empty = [not len(training._state.releases.draws.indices(step)) for step in range(12)]
    assert [not found for _, found, _ in kept.steps] == empty
    assert any(empty)
    assert not all(empty)


def test_learning_rates_are_those_of_the_step_not_of_the_next():
    kept = Kept()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(training_of(model, optimizer=optimizer, scheduler=scheduler, callbacks=[kept], num_steps=3))
    assert [rates for _, _, rates in kept.steps] == [(1.0,), (0.5,), (0.25,)]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clipping": tp.Sketched(16, clip_norm=0.5), "noise_multiplier": 2.0},
        {"expected_batch_size": 0.5, "num_steps": 12},
    ],
    ids=["plain", "sketched", "empty batches"],
)
def test_callbacks_change_no_release(settings):
    kept, alone, watched = Kept(), training_of(**settings), None
    train(alone)
    watched = training_of(callbacks=[kept], **settings)
    train(watched)
    assert torch.equal(parameters_of(alone), parameters_of(watched))
    assert alone.ledger.state_dict() == watched.ledger.state_dict()
    assert len(kept.steps) == len(alone)


def gep_of(callbacks=(), residual=True):
    torch.manual_seed(0)
    auxiliary = torch.randn(30, 3)
    subspace = tp.AnchorSubspace(auxiliary, 4, ["0", "2"])
    made = tp.GEP(subspace, tp.Flat(0.3), tp.Flat(0.2), 0.5) if residual else tp.BGEP(subspace, tp.Flat(0.3))
    return training_of(clipping=made, callbacks=callbacks, num_steps=2)


@pytest.mark.parametrize("residual", [True, False], ids=["gep", "bgep"])
def test_gep_quotes_norms_of_gradients_and_bgep_those_of_embeddings(residual):
    kept = Kept()
    training, alone = gep_of([kept], residual), gep_of(residual=residual)
    train(alone)
    for x, y in own_batches(training, cross_entropy):
        norms = rows_of(training, x, y).norm(dim=1).numpy()
        training.step(cross_entropy(training.model, x, y))
        found = kept.steps[-1][1]
        if residual:
            assert found["norm_q50"] == pytest.approx(np.median(norms))
            assert found["share_clipped"] >= np.mean(norms > 0.5)
        else:
            assert 0 < found["norm_q50"] < np.median(norms)
    assert torch.equal(parameters_of(alone), parameters_of(training))


def test_epsilon_so_far_is_that_of_the_releases_and_is_marked_if_it_does_not_hold():
    seen = []

    class Reads(tp.Callback):
        def after_step(self, training, step):
            seen.append((step.epsilon, training.spent().epsilon.high, step.warning))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"expected_batch_size": 8, "num_steps": 3, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    train(PrivateTraining(model, optimizer, data(), delta=1e-3, callbacks=[Reads()], **settings))
    assert all(epsilon == spent and warning is None for epsilon, spent, warning in seen)
    assert sorted(epsilon for epsilon, _, _ in seen) == [epsilon for epsilon, _, _ in seen]
    seen.clear()
    train(training_of(callbacks=[Reads()], delta=1e-3))
    assert "test_seed" in seen[0][2]


@pytest.mark.parametrize("batch_size", [8, 0.05], ids=["examples", "empty batch"])
def test_a_callback_that_raises_leaves_the_training_whole(batch_size):
    kept, alone = Kept(), training_of(expected_batch_size=batch_size)
    train(alone)
    training = training_of(expected_batch_size=batch_size, callbacks=[Raises(at=3), kept])
    with pytest.raises(OSError, match="disk full") as caught:
        train(training)
    assert "Raises.after_step, after step 3 was made, recorded and paid" in caught.value.__notes__[0]
    assert training.step_count == len(training.ledger) == 3
    train(training)
    assert [step for step, _, _ in kept.steps] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(parameters_of(alone), parameters_of(training))


def test_a_step_that_is_begun_anew_is_told_once():
    kept = Kept()
    training = training_of(callbacks=[kept], performance=tp.Performance(microbatch_size=3))
    for number, (x, y) in enumerate(own_batches(training, cross_entropy)):
        training.step(cross_entropy(training.model, x, y))
        if number == 4:
            break
    train(training)
    alone = Kept()
    train(training_of(callbacks=[alone], performance=tp.Performance(microbatch_size=3)))
    assert kept.steps == alone.steps


@pytest.mark.parametrize("rule", ["flat", "gep"])
@pytest.mark.parametrize("batch_size", [8, 1])  # of 1: some batches are empty
def test_the_private_gradient_of_each_step_is_the_one_that_moved_the_weights(rule, batch_size):
    class Gradients(tp.Callback):
        def __init__(self):
            self.logs, self.weights = [], []

        def after_step(self, training, step):
            assert all(p.grad is None for p in training.model.parameters())
            self.logs.append(step)
            self.weights.append(parameters_of(training).clone())

    kept = Gradients()
    clipping = {"flat": tp.Flat(0.3), "gep": tp.GEP(tp.AnchorSubspace(torch.randn(20, 3), 6, ["0", "2"]))}[rule]
    training = training_of(clipping=clipping, callbacks=[kept], expected_batch_size=batch_size, num_steps=12)
    before, rate = parameters_of(training).clone(), training.optimizer.param_groups[0]["lr"]
    train(training)
    assert len(kept.logs) == 12
    for log, after in zip(kept.logs, kept.weights, strict=True):
        assert list(log.private_gradient) == [name for name, _ in training.model.named_parameters()]
        moved = torch.cat([part.flatten() for part in log.private_gradient.values()])
        torch.testing.assert_close(after, before - rate * moved)
        before = after


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match=r"derived from tp\.Callback"):
        training_of(callbacks=[print])
    with pytest.raises(ValueError, match=r"derived from tp\.Callback"):
        training_of(callbacks=[tp.LoggingCallback])


def test_statement_names_the_logs():
    assert not any("callbacks" in item for item in training_of().statement()["not_covered"])
    statement = training_of(callbacks=[Kept(), tp.LoggingCallback()]).statement()
    assert any("Kept, LoggingCallback" in item for item in statement["not_covered"])
    json.dumps(statement)


# Ranks


def told(rank, placement, settings):
    model = network()
    model = DistributedDataParallel(model) if placement == "ddp" else model
    if placement == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    kept = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(training_of(model, optimizer=optimizer, callbacks=[kept], **settings))
    return kept.steps


def fails_on_one(rank):
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    callbacks = [Raises(at=2 if rank else 100)]
    training = training_of(model, optimizer=optimizer, callbacks=callbacks)
    try:
        train(training)
    except (OSError, tp.Refused) as error:
        return str(error), training.step_count
    return "", training.step_count


def on_one_rank_only(rank):
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training_of(model, optimizer=optimizer, callbacks=[] if rank else [Kept()])


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("placement", "settings"),
    [
        ("ddp", {}),
        ("fsdp", {"performance": tp.Performance(microbatch_size=3)}),
        ("ddp", {"expected_batch_size": 1, "num_steps": 12}),
        ("ddp", {"clipping": tp.MicroBatches(0.5, 4), "examples": {"views": 1}}),
    ],
    ids=["ddp", "sharded", "empty parts", "micro-batches"],
)
def test_every_rank_is_told_the_numbers_of_the_whole_batch(ranks2, placement, settings):
    first, second = ranks2.run(told, placement, settings)
    alone = told(0, "", settings)
    assert first == second
    assert len(first) == len(alone)
    for (step, found, rates), (expected_step, expected, expected_rates) in zip(first, alone, strict=True):
        assert (step, rates) == (expected_step, expected_rates)
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_callback_that_raises_on_one_rank_stops_all(ranks2):
    (first, steps), (second, others) = ranks2.run(fails_on_one)
    assert "disk full" in first
    assert "disk full" in second
    assert steps == others == 2


def test_callbacks_on_one_rank_only_are_refused(ranks2):
    from gloo_pool import RanksFailed

    with pytest.raises(RanksFailed, match="the ranks differ in callbacks"):
        ranks2.run(on_one_rank_only)


# Logging and TensorBoard


def test_logging_callback_writes_one_line_per_so_many_steps():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"expected_batch_size": 8, "num_steps": 5, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    callbacks = [tp.LoggingCallback(every=2)]
    training = PrivateTraining(model, optimizer, data(), delta=1e-3, callbacks=callbacks, **settings)
    with TestCase().assertLogs("torch_privacy.training", logging.INFO) as seen:
        train(training)
    lines = [record.getMessage() for record in seen.records]
    assert [line.split(":")[0] for line in lines] == ["step 2 of 5", "step 4 of 5", "step 5 of 5"]
    spent = tp.privacy.compose([(training.event, 2)]).epsilon_high(1e-3)
    shown = float(lines[0].split("epsilon <= ")[1].split()[0])
    assert spent <= shown < spent + 0.01
    assert "; not private: loss " in lines[0]
    assert ", share_clipped " in lines[0]
    with TestCase().assertLogs("torch_privacy.training", logging.INFO) as seen:
        train(training_of(callbacks=[tp.LoggingCallback(every=6, logger="torch_privacy.training")], delta=1e-3))
    assert "NOT PRIVATE" in seen.records[0].getMessage()


def test_logging_callback_computes_nothing_if_nobody_listens(monkeypatch):
    logging.getLogger("torch_privacy.training").setLevel(logging.WARNING)
    monkeypatch.setattr(tp.StepLog, "not_private", property(lambda self: pytest.fail("read")))
    train(training_of(callbacks=[tp.LoggingCallback(every=1)]))
    logging.getLogger("torch_privacy.training").setLevel(logging.NOTSET)


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


@pytest.mark.thorough
def test_tensorboard_callback_writes_the_numbers_under_marked_tags(tmp_path):
    kept = Kept()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"expected_batch_size": 8, "num_steps": 5, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
    callbacks = [tp.TensorBoardCallback(tmp_path / "log", every=2), kept]
    training = PrivateTraining(model, optimizer, data(), delta=1e-3, callbacks=callbacks, **settings)
    train(training)
    found = events_of(tmp_path / "log")
    exact = {"loss", "share_clipped", "norm_q10", "norm_q50", "norm_q90"}
    assert found.keys() == {"epsilon", "learning_rate"} | {f"not_private/{name}" for name in exact}
    assert [step for step, _ in found["epsilon"]] == [2, 4, 5]
    spent = training.spent().epsilon.high
    assert spent <= found["epsilon"][-1][1] == pytest.approx(spent, rel=2e-7)  # in single precision, rounded up
    for name in exact:
        of_steps = {step: values[name] for step, values, _ in kept.steps}
        assert dict(found[f"not_private/{name}"]) == pytest.approx({k: of_steps[k] for k in (2, 4, 5)}, rel=1e-6)


def test_tensorboard_callback_marks_the_epsilon_of_a_test_and_leaves_a_writer_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        train(training_of(callbacks=[tp.TensorBoardCallback(writer, every=6)], delta=1e-3))
        writer.add_scalar("own", 1.0, 0)
    found = events_of(tmp_path)
    assert "not_private/epsilon" in found
    assert "epsilon" not in found
    assert "own" in found


def test_tensorboard_callback_names_its_extra_and_refuses_other_writers(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a folder or a SummaryWriter"):
        tp.TensorBoardCallback(3)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"torch-privacy\[tensorboard\]"):
        tp.TensorBoardCallback(tmp_path)


def test_with_owners_an_example_has_the_gradient_of_its_owner():
    kept, ids = Kept(), torch.arange(40) // 4
    training = training_of(
        examples={"owners": ids, "per_owner": 2}, expected_batch_size=4, num_steps=3, callbacks=[kept]
    )
    x = data().tensors[0]
    for batch, y in own_batches(training, cross_entropy):
        owner_of = [int(ids[(x == row).all(1).nonzero()[0, 0]]) for row in batch]
        rows = rows_of(training, batch, y)
        means = {o: rows[[k for k, other in enumerate(owner_of) if other == o]].mean(0) for o in set(owner_of)}
        norms = torch.stack([means[o] for o in owner_of]).norm(dim=1)
        losses = cross_entropy(training.model, batch, y).detach()
        training.step(cross_entropy(training.model, batch, y))
        assert kept.steps[-1][1] == pytest.approx(numbers(losses, norms.numpy(), (norms > 0.5).numpy()))
