# SPDX-License-Identifier: Apache-2.0
"""Loops written for Opacus: the same weights as with PrivateTraining's own loop, and refusals that name the cure."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from migrating import (
    DELTA,
    assert_same_weights,
    epsilon_of,
    examples,
    made_private,
    natively_trained,
    network,
    sgd,
    trained,
)
from opacus.schedulers import ExponentialNoise, StepGradClip
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy import Refused, privacy
from torch_privacy.opacus import BatchMemoryManager, DPOptimizer, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:delta=")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_weights_are_those_of_the_native_loop(optimizer) -> None:
    engine, model, returned, loader = made_private(optimizer=optimizer)
    assert len(loader) == 6
    turns = trained(model, returned, loader, epochs=4)
    training, reference = natively_trained(24, optimizer=optimizer)
    assert_same_weights(model, reference)
    assert engine.training.step_count == 24 < turns  # and rehearsals
    assert epsilon_of(engine) == training.profile().epsilon(DELTA).high
    assert engine.accountant.history == [(1.0, 1 / 6, 24)]


def test_the_module_is_the_users_own_and_the_optimizer_an_optimizer() -> None:
    own = network()
    _, model, optimizer, loader = made_private(model=own)
    assert model is own
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.original_optimizer.param_groups
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size) == (1.0, 1.0, 10.0)
    assert (optimizer.accumulated_iterations, optimizer.loss_reduction, len(optimizer.params)) == (1, "mean", 4)
    assert loader.sample_rate == pytest.approx(1 / 6)
    trained(model, optimizer, loader)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == own[0].weight.shape
    optimizer.load_state_dict(optimizer.state_dict())


SCHEDULERS = {
    "chained": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "closed form": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "with a last step": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=13),
    "of others": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(("name", "on_original"), [*zip(SCHEDULERS, itertools.cycle([False, True]))])
def test_schedulers_count_steps_not_rehearsals(name: str, on_original: bool) -> None:
    make = SCHEDULERS[name]
    _, model, optimizer, loader = made_private()
    scheduler = make(optimizer.original_optimizer if on_original else optimizer)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
    _, reference = natively_trained(12, after_step=lambda own: make(own).step)
    assert scheduler.last_epoch == 12
    assert_same_weights(model, reference)


@pytest.mark.thorough
def test_a_scheduler_may_advance_once_in_an_epoch() -> None:
    _, model, optimizer, loader = made_private()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        trained(model, optimizer, loader)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


@pytest.mark.thorough
def test_microbatches_of_the_memory_manager_are_one_step() -> None:
    engine, model, optimizer, loader = made_private()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sizes = []
    for _ in range(2):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as small:
            assert len(small) == 15  # expected
            for x, y in small:
                sizes.append(len(x))
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
    _, reference = natively_trained(
        12,
        performance=tp.Performance(microbatch_size=4),
        after_step=lambda own: torch.optim.lr_scheduler.ExponentialLR(own, 0.9).step,
    )
    assert max(sizes) == 4
    assert scheduler.last_epoch == engine.training.step_count == 12
    assert_same_weights(model, reference)


def test_the_limit_may_change_between_epochs_without_new_noise() -> None:
    engine, model, optimizer, loader = made_private()
    trained(model, optimizer, loader)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as small:
        trained(model, optimizer, small)
    assert engine.accountant.history == [(1.0, 1 / 6, 12)]
    assert len(engine.training.ledger) == 12
    with pytest.raises(Refused, match="BatchMemoryManager: data_loader and optimizer must be those"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=made_private()[2])


def test_loader_without_a_limit_keeps_that_of_performance() -> None:
    engine, model, optimizer, loader = made_private(performance=tp.Performance(microbatch_size=4))
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert max(sizes) == engine.training.settings.performance.microbatch_size == 4
    assert engine.training.step_count == 6


def test_sums_are_not_divided() -> None:
    _, model, optimizer, loader = made_private(loss_reduction="sum")
    trained(model, optimizer, loader, loss_of=nn.CrossEntropyLoss(reduction="sum"))

    def undivided(own_model: nn.Module) -> torch.optim.Optimizer:
        own = sgd(own_model)

        def scale(*_: object) -> None:
            for p in own_model.parameters():
                p.grad.mul_(10.0)

        own.register_step_pre_hook(scale)
        return own

    _, reference = natively_trained(6, optimizer=undivided)
    assert_same_weights(model, reference)


def test_sequences_are_averaged_by_example() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (40, 4), generator=generator)
    labels = tokens.roll(1, 1)
    labels[::3, 2:] = -100
    data = TensorDataset(tokens, labels)

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    _, model, optimizer, loader = made_private(model=model_of(), data=data)
    trained(model, optimizer, loader, loss_of=lambda out, y: F.cross_entropy(out.view(-1, 7), y.view(-1)))

    def losses_of(out, y):
        losses = F.cross_entropy(out.view(-1, 7), y.view(-1), reduction="none").view(len(y), 4)
        return losses.sum(1) / (y != -100).sum(1).clamp(min=1)

    _, reference = natively_trained(4, losses_of, model=model_of(), data=data)
    assert_same_weights(model, reference)


def test_time_first_is_refused_unless_it_is_said() -> None:
    data = TensorDataset(torch.randn(40, 3, 6), torch.randint(3, (40, 3)))

    def loss_of(out, y):  # flattened with time first
        return F.cross_entropy(out.transpose(0, 1).reshape(-1, 3), y.T.reshape(-1))

    _, model, optimizer, loader = made_private(data=data, batch_first=False)
    trained(model, optimizer, loader, loss_of=loss_of)
    _, reference = natively_trained(4, lambda out, y: F.cross_entropy(out.mT, y, reduction="none").mean(1), data=data)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    _, model, optimizer, loader = made_private(data=data)
    with pytest.raises(Refused, match=r"depend on each other|cannot be separated"):
        trained(model, optimizer, loader, loss_of=loss_of)


def test_a_model_may_compute_its_own_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x, labels):
            logits = self.inner(x)
            return {"loss": nn.CrossEntropyLoss()(logits, labels), "logits": logits}

    _, model, optimizer, loader = made_private(model=WithLoss())
    for x, y in loader:
        model(x, labels=y)["loss"].backward()
        optimizer.step()
    assert_same_weights(model.inner, natively_trained(6)[1])


def test_clipping_by_layer_and_adaptive_clipping() -> None:
    bounds = [0.5, 0.1, 0.4, 0.2]
    _, model, optimizer, loader = made_private(max_grad_norm=bounds, clipping="per_layer")
    trained(model, optimizer, loader)
    names = [name for name, _ in model.named_parameters()]
    _, reference = natively_trained(6, clipping=tp.Groups(dict(zip(names, bounds, strict=True))))
    assert_same_weights(model, reference)
    assert optimizer.max_grad_norm == pytest.approx(sum(b * b for b in bounds) ** 0.5)

    _, model, optimizer, loader = made_private(
        clipping="adaptive", target_unclipped_quantile=0.6, clipbound_learning_rate=0.3, max_clipbound=5.0,
        min_clipbound=0.1, unclipped_num_std=2.0,
    )  # fmt: skip
    trained(model, optimizer, loader)
    rule = tp.Adaptive(1.0, target_quantile=0.6, learning_rate=0.3, count_noise_stddev=2.0, smallest=0.1, largest=5.0)
    assert_same_weights(model, natively_trained(6, clipping=rule)[1])
    with pytest.raises(ValueError, match=r"clipping='adaptive' needs .*max_clipbound"):
        made_private(clipping="adaptive")
    with pytest.raises(ValueError, match="a bound for each of the 4 trained parameters"):
        made_private(clipping="per_layer")


def test_ghost_clipping_returns_the_criterion_and_no_wrapping_an_object_to_clean_up() -> None:
    model, data, criterion = network(), examples(), nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model, optimizer=sgd(model), data_loader=DataLoader(data, batch_size=10), criterion=criterion,
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost", test_seed=4,
    )  # fmt: skip
    assert made[0] is model
    assert made[2] is criterion
    for x, y in made[3]:
        made[2](model(x), y).backward()
        made[1].step()
    assert_same_weights(model, natively_trained(6)[1])
    hooks, _, _ = made_private(wrap_model=False)[1:]
    hooks.cleanup()


def test_a_closure_makes_the_step() -> None:
    _, model, optimizer, loader = made_private()
    for x, y in loader:

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with torch.no_grad():
            assert optimizer.step(closure) > 0
    assert_same_weights(model, natively_trained(6)[1])


def test_evaluation_in_the_loop_is_left_alone() -> None:
    _, model, optimizer, loader = made_private()
    held_out, labels = examples().tensors
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            assert float(F.cross_entropy(model(held_out), labels)) > 0
        model.train()
    assert_same_weights(model, natively_trained(6)[1])


def test_empty_batches_are_made_without_the_loop() -> None:
    data = TensorDataset(*(t[:8] for t in examples().tensors))
    engine, model, optimizer, loader = made_private(data=data, batch_size=1)
    for _ in range(3):
        for x, y in loader:
            assert len(x)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert engine.training.step_count % len(loader) == 0
    assert engine.training.step_count == 24
    assert_same_weights(model, natively_trained(24, data=data, batch_size=1)[1])


def test_a_hook_runs_before_every_update() -> None:
    engine, model, optimizer, loader = made_private()
    seen: list[float] = []
    optimizer.attach_step_hook(lambda o: seen.append(float(o.params[0].grad.norm())))
    trained(model, optimizer, loader)
    assert len(seen) == engine.training.step_count == 6
    assert min(seen) > 0


def looped(loader, body) -> None:
    for x, y in loader:
        body(x, y)


def test_nothing_is_left_behind_by_break_or_errors() -> None:
    _, model, optimizer, loader = made_private()
    for _ in loader:
        break
    assert not _get_current_function_mode_stack()

    def fails(x, y):
        F.cross_entropy(model(x), y).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        looped(loader, fails)
    assert kept.tb is not None  # its frame is alive
    assert not _get_current_function_mode_stack()
    trained(model, optimizer, loader)
    assert_same_weights(model, natively_trained(6)[1])


def test_a_step_needs_backward_and_a_batch_needs_a_step() -> None:
    _, model, optimizer, loader = made_private()
    with pytest.raises(Refused, match=r"DPOptimizer.step\(\) was called without loss.backward\(\)"):
        looped(loader, lambda x, y: optimizer.step())
    with pytest.raises(Refused, match=r"went on to the next batch without optimizer.step\(\).*not accumulated"):
        looped(loader, lambda x, y: F.cross_entropy(model(x), y).backward())

    def twice(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(Refused, match=r"called twice for one batch.*gradient accumulation"):
        looped(loader, twice)
    with pytest.raises(Refused, match=r"without loss.backward\(\)"):
        optimizer.step()
    assert_same_weights(model, network())


def test_a_newer_pass_ends_an_older_one() -> None:
    _, model, optimizer, loader = made_private()
    older = iter(loader)
    next(older)
    trained(model, optimizer, loader)
    with pytest.raises(Refused, match="a newer pass"):
        next(older)


def test_own_optimizers_and_scalers_are_refused() -> None:
    _, model, optimizer, loader = made_private()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(Refused, match="GradScaler"):
        looped(loader, lambda x, y: scaler.scale(F.cross_entropy(model(x), y)).backward())

    def own_step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.original_optimizer.step()

    with pytest.raises(Refused, match=r"optimizer.step\(\) was called inside of the loop"):
        looped(loader, own_step)


def test_noise_and_clip_schedulers_are_refused_by_name() -> None:
    _, _, optimizer, _ = made_private()
    noise = ExponentialNoise(optimizer, gamma=0.9)  # its first step keeps the noise
    with pytest.raises(Refused, match=r"noise_multiplier = 0.9: .*ExponentialNoise.*noise_schedule=lambda step"):
        noise.step()
    clip = StepGradClip(optimizer, step_size=1, gamma=0.9)
    with pytest.raises(Refused, match=r"max_grad_norm = 0.9: .*ExponentialGradClip.*clip_schedule=lambda step"):
        clip.step()
    with pytest.raises(Refused, match=r"p\.grad_sample"):
        _ = optimizer.grad_samples
    with pytest.raises(ValueError, match="noise_schedule and clip_schedule need epochs"):
        made_private(noise_schedule=lambda step: 1.0)


@pytest.mark.thorough
def test_planned_noise_and_clip_schedulers_may_stay() -> None:
    schedules = {
        "noise_schedule": lambda step: 0.9 ** (step // 6),
        "clip_schedule": lambda step: 0.5 ** (step // 6),
    }
    engine, model, optimizer, loader = made_private(epochs=3, **schedules)
    noise, clip = ExponentialNoise(optimizer, gamma=0.9), StepGradClip(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        trained(model, optimizer, loader)
        noise.step()
        clip.step()
    clipping = tp.Flat(1.0).scheduled(schedules.pop("clip_schedule"))
    training, reference = natively_trained(18, clipping=clipping, **schedules)
    assert_same_weights(model, reference)
    assert engine.accountant.history == [(pytest.approx(0.9**epoch), pytest.approx(1 / 6), 6) for epoch in range(3)]
    assert epsilon_of(engine) == training.profile().epsilon(DELTA).high


NOT_KEPT = {
    "poisson_sampling": ({"poisson_sampling": False}, "poisson_sampling=False"),
    "noise_generator": ({"noise_generator": torch.Generator()}, "noise_generator=.*test_seed"),
    "grad_sample_mode": ({"grad_sample_mode": "fast"}, "grad_sample_mode='fast' must be one of 'hooks'"),
    "loss_reduction": ({"loss_reduction": "none"}, "loss_reduction='none'"),
    "clipping": ({"clipping": "automatic"}, "clipping='automatic'"),
    "a list for flat clipping": ({"max_grad_norm": [1.0]}, "clipping='per_layer' takes"),
    "epochs": ({"epochs": 0}, "epochs=0"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_arguments_that_are_not_kept_are_refused(name: str) -> None:
    arguments, message = NOT_KEPT[name]
    with pytest.raises(ValueError, match=message):
        made_private(**arguments)


def test_misspelt_arguments_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"unexpected arguments \['max_grad_norms'\] \(did you mean 'max_grad_norm'\?\)"
    ):
        made_private(max_grad_norms=1.0)
    with pytest.raises(ValueError, match="accountant='moments'"):
        PrivacyEngine(accountant="moments")
    PrivacyEngine(accountant="gdp", secure_mode=True)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


LOADERS = {
    "weighted": (
        lambda d: DataLoader(d, 10, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 60, 60)),
        "WeightedRandomSampler",
    ),
    "subset": (lambda d: DataLoader(d, 10, sampler=torch.utils.data.SubsetRandomSampler(range(9))), "Subset"),
    "replacement": (lambda d: DataLoader(d, 10, sampler=torch.utils.data.RandomSampler(d, True)), "RandomSampler"),
    "batches": (lambda d: DataLoader(d, batch_sampler=[[0, 1]]), "batch_sampler of its own"),
    "single": (lambda d: DataLoader(d, batch_size=None), "no batch_size"),
    "stream": (lambda d: DataLoader(Stream(), batch_size=2), "IterableDataset"),
    "worker_init_fn": (lambda d: DataLoader(d, 10, num_workers=1, worker_init_fn=print), "worker_init_fn"),
    "no loader": (lambda d: d, "must be a torch.utils.data.DataLoader"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_sample_otherwise_are_refused(name: str) -> None:
    make, message = LOADERS[name]
    model = network()
    with pytest.raises(Refused, match=message):
        PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=make(examples()), noise_multiplier=1.0, max_grad_norm=1.0
        )


def test_what_opacus_wrapped_is_refused() -> None:
    import opacus

    model, data = network(), examples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=DataLoader(data, 10), noise_multiplier=1, max_grad_norm=1
        )
    with pytest.raises(Refused, match="no loader of Opacus"):
        PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    for module, own in ((wrapped, sgd(model)), (model, optimizer)):
        with pytest.raises(Refused, match=r"(GradSampleModule|DPOptimizer) comes from Opacus"):
            PrivacyEngine().make_private(
                module=module, optimizer=own, data_loader=DataLoader(data, 10), noise_multiplier=1, max_grad_norm=1
            )


def test_coupled_examples_are_refused_in_the_loop() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(Refused, match="batch normalization"):
        made_private(model=model)
    _, model, optimizer, loader = made_private()
    with pytest.raises(Refused, match=r"depend on each other|cannot be separated"):
        trained(model, optimizer, loader, loss_of=lambda out, y: F.cross_entropy(out - out.mean(0), y))
    assert_same_weights(model, network())


def test_an_assumption_leaves_rehearsals_out() -> None:
    engine, model, optimizer, loader = made_private(assume_independent="a linear model without normalization")
    assert trained(model, optimizer, loader) == 6
    assert engine.training.statement()["independence"]["shown_by"] == "assumption"
    assert not engine.rehearsing


def test_the_ledger_is_written_and_the_optimizer_cannot_be_copied(tmp_path) -> None:
    import copy

    engine, model, optimizer, loader = made_private(run_folder=tmp_path)
    trained(model, optimizer, loader)
    assert privacy.Ledger.load(tmp_path / "ledger.jsonl").events == engine.training.ledger.events
    with pytest.raises(Refused, match="DPOptimizer cannot be copied"):
        copy.deepcopy(optimizer)
    assert isinstance(optimizer, DPOptimizer)
    assert "SGD" in repr(optimizer)
