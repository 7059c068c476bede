# SPDX-License-Identifier: Apache-2.0
"""Provides one training step of other libraries, for ``step.py``: vmap, Opacus, BackPACK; and what all steps share."""

from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import torch
from models import Problem, per_example
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], int]  # runs one step, returns its number of examples
Maker = Callable[[Problem], Step]

DATA_BYTES = 2**28  # size of the data set that steps with everything sample from
VMAP_BYTES = 8 * 2**30  # vmap processes the batch in chunks if it would need more
VMAP_COPIES = 2.5  # ratio of a step's peak memory to the bytes of the rows, measured on the MLP


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(trained(model).values(), lr=1e-3)


def apply(optimizer: torch.optim.Optimizer) -> None:
    """Updates the weights and frees the gradients, so that no contender keeps memory between its steps."""
    optimizer.step()
    optimizer.zero_grad()


def clip_factors(norms: Tensor) -> Tensor:
    return (1 / norms).clamp(max=1)


def vmap(problem: Problem) -> Step:
    from torch.func import functional_call, grad
    from torch.func import vmap as over

    model, x, y = problem
    optimizer, parameters = sgd(model), trained(model)
    row_bytes = sum(p.nbytes for p in parameters.values())
    chunk = max(1, int(VMAP_BYTES / VMAP_COPIES / row_bytes))

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return per_example(functional_call(model, values, (x[None],)), y[None])[0]

    rows_of = over(grad(loss), in_dims=(None, 0, 0))

    def add_clipped(values: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
        rows = rows_of(values, x, y)
        c = clip_factors(norms_of(rows.values()))
        for name, p in parameters.items():
            part = torch.einsum("n,n...->...", c.to(p.dtype), rows.pop(name)) / len(problem.x)
            p.grad = part if p.grad is None else p.grad.add_(part)

    def step() -> int:
        values = {
            name: p.detach() for name, p in parameters.items()
        }  # without requires_grad, to record no second graph
        for part in zip(x.split(chunk), y.split(chunk), strict=True):
            add_clipped(values, *part)
        apply(optimizer)
        return len(x)

    return step


def norms_of(rows: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.flatten(1).float().square().sum(1) for part in rows]).sum(0).sqrt()


class Loss(nn.Module):
    """The loss as required by Opacus's ghost mode: a module with a ``reduction`` that Opacus switches."""

    reduction = "mean"

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = per_example(out, y)
        return losses.mean() if self.reduction == "mean" else losses


def repeated(problem: Problem) -> TensorDataset:
    """Returns a data set of many copies of the batch, from which steps with everything sample."""
    x, y = problem.x, problem.y
    copies = max(8, min(60_000 // len(x), DATA_BYTES // (x.nbytes + y.nbytes)))
    return TensorDataset(*(t.repeat(copies, *[1] * (t.ndim - 1)) for t in (x, y)))


def opacus(mode: str, *, with_loader: bool = False) -> Maker:
    """Returns the maker of a step of Opacus, on a fixed batch or on those of its loader with Poisson sampling."""

    def make(problem: Problem) -> Step:
        from opacus import PrivacyEngine
        from opacus.validators import ModuleValidator

        x, y = problem.x, problem.y
        model = ModuleValidator.fix(problem.model).to(x.device)  # replaces nn.LSTM by its own layer
        made: Any = PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            criterion=Loss(),  # type: ignore[arg-type]
            data_loader=DataLoader(repeated(problem) if with_loader else TensorDataset(x, y), batch_size=len(x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=with_loader,
            grad_sample_mode=mode,
        )
        private_model, private_optimizer, criterion = made[0], made[1], made[2] if mode == "ghost" else Loss()
        batches = chain.from_iterable(repeat(made[-1])) if with_loader else repeat((x, y))

        def step() -> int:
            xb, yb = next((x, y) for x, y in batches if len(x))  # its ghost clipping fails on an empty batch
            criterion(private_model(xb), yb).backward()
            apply(private_optimizer)
            return len(xb)

        return step

    return make


def backpack_rows(problem: Problem) -> Step:
    """Returns a step with rows by ``BatchGrad``, clipped and summed explicitly."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model, x, y = extend(problem.model), problem.x, problem.y
    optimizer, parameters = sgd(model), list(trained(model).values())

    def step() -> int:
        with backpack(BatchGrad()):
            per_example(model(x), y).sum().backward()
        check_all_have("grad_batch", model)
        c = clip_factors(norms_of(p.grad_batch for p in parameters))  # type: ignore[attr-defined]
        for p in parameters:
            p.grad = torch.einsum("n,n...->...", c.to(p.dtype), p.grad_batch) / len(x)  # type: ignore[attr-defined]
            del p.grad_batch  # type: ignore[attr-defined]
        apply(optimizer)
        return len(x)

    return step


def check_all_have(field: str, model: nn.Module) -> None:
    """Raises for layers that BackPACK silently ignores, because it has no rule for them."""
    without = {type(m).__name__ for m in model.modules() for p in m.parameters(False) if not hasattr(p, field)}
    if without:
        raise NotImplementedError(f"no {field} for {', '.join(sorted(without))}")


def backpack_norms(problem: Problem) -> Step:
    """Returns a step with norms by ``BatchL2Grad``, then a second backward of the weighted losses."""
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model, x, y = extend(problem.model), problem.x, problem.y
    optimizer, parameters = sgd(model), list(trained(model).values())

    def step() -> int:
        with backpack(BatchL2Grad()):
            losses = per_example(model(x), y)
            losses.sum().backward(retain_graph=True)
        check_all_have("batch_l2", model)
        squared = torch.stack([p.batch_l2.float() for p in parameters])  # type: ignore[attr-defined]
        optimizer.zero_grad()
        (clip_factors(squared.sum(0).sqrt()) * losses).sum().div(len(x)).backward()
        apply(optimizer)
        return len(x)

    return step
