# SPDX-License-Identifier: Apache-2.0
"""One example adds at most the clip norm to the sum before the noise, for every network and every type."""

from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracle import length
from parts import trained
from real_models import MODELS, QUIET, Batch, RealModel, part
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape

pytestmark = QUIET

TYPES = ["float32", "float32 under autocast", "bfloat16", "float16", "float64"]
SHARE = 0.37  # not a power of two, so that multiplying by it rounds
BUDGETS = [1e-9, 100]  # keep what needs the least memory, or what is fastest


def module_at(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmarks = module_at(Path(__file__).parents[2] / "benchmarks/models.py")


def of_classes(module: nn.Module, batch: Batch) -> Tensor:
    return benchmarks.per_example(module(batch["x"]), batch["y"])


def benchmark(make: Callable, **sizes: int) -> RealModel:
    module, x, y = make(batch=2, **sizes)
    return RealModel(module, {"x": x, "y": y}, of_classes)


LARGE = {"gpt2_small", "gpt2_small_lora", "encoder"}  # 100 million parameters: a case takes minutes
SMALL_GPT = {"positions": 16, "width": 32}
SMALLER = {"mlp": {"width": 100}, "bilstm_imdb": {"positions": 20}}
SMALLER |= {"gpt": SMALL_GPT, "gpt_tied": {"positions": 16}, "gpt_last_token": {"positions": 16}}
NETWORKS: dict[str, Callable[[], RealModel]] = {
    **MODELS,
    **{
        f"benchmark {make.__name__}": partial(benchmark, make, **SMALLER.get(make.__name__, {}))
        for make in benchmarks.ON_CPU
        if make.__name__ not in LARGE
    },
}
# The grouped product of torch has no float64, and in half precision needs widths in multiples of 16 bytes.
CASES = [(name, kind) for name in NETWORKS for kind in TYPES if "float32" in kind or "grouped_mm" not in name]


def made(name: str, kind: str) -> RealModel:
    """Returns the network in a type, or with losses under autocast to bfloat16."""
    torch.set_default_dtype(torch.float32)
    real, (kind, *under_autocast) = NETWORKS[name](), kind.split(" ", 1)
    dtype = getattr(torch, kind)
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in real.batch.items()}

    def losses(module: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(under_autocast)):
            return real.losses(module, batch)

    return RealModel(real.module.to(dtype), batch, losses)


def own_gradient(real: RealModel, batch: Batch) -> dict[str, Tensor]:
    """Computes the gradient by an ordinary backward."""
    parameters = trained(real.module)
    total = real.losses(real.module, batch).sum()
    gradients = torch.autograd.grad(total, [*parameters.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def released(real: RealModel, batch: Batch, clip_norm: float, memory_budget: float) -> dict[str, Tensor]:
    """Returns the clipped sum as training computes it."""
    parameters = trained(real.module)
    constants = [*real.module.buffers(), *(p for p in real.module.parameters() if not p.requires_grad)]

    def clip(jacobian: tp.Jacobian, group: str) -> dict[str, Tensor]:
        return jacobian.weighted_sum(tp.Flat(clip_norm).factors(jacobian.squared_norms().sqrt()))

    tape = Tape(parameters, constants, Layouts(), 1)
    tape.note_inputs(batch)
    with tape:
        losses = real.losses(real.module, batch)
    return tape.clipped_sum(losses, {"all": tuple(parameters)}, clip, memory_budget=memory_budget)


@pytest.mark.parametrize(("name", "kind"), CASES[::4])
def test_one_example_adds_no_more_than_the_clip_norm(name, kind):
    """The clip norm is a part of a gradient's norm, to be reached and not exceeded, alone and in a batch."""
    real = made(name, kind)
    one = part(real.batch, 0)
    try:
        own_gradient(real, real.batch)
        clip_norm = SHARE * length(own_gradient(real, one))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch itself: {str(error).splitlines()[0]}")  # LSTM under autocast, processor without AVX-512
    for memory_budget in BUDGETS if kind == "float32" else BUDGETS[:1]:
        assert_reached([length(released(real, one, clip_norm, memory_budget))], clip_norm)
    with tp.record(real.module) as tape:
        losses = real.losses(real.module, real.batch)
    jacobian = tape.jacobian(losses)
    norms = jacobian.squared_norms().sqrt()
    clip_norm = SHARE * norms.median().item()
    factors = tp.Flat(clip_norm).factors(norms)
    assert_reached([length(jacobian.weighted_sum(c)) for c in factors.diag()], clip_norm)


def assert_reached(lengths: list[float], clip_norm: float) -> None:
    assert 0 < clip_norm * (1 - 1e-5) < max(lengths) <= clip_norm * (1 + 1e-5) < float("inf")
