# SPDX-License-Identifier: Apache-2.0
"""Computes the rows themselves by ``vmap(grad)``, a chunk of examples at a time: the paper's "multiple" method.

It is exact for everything that ``torch.func`` can differentiate and batch, whether or not the ops have a rule on the
tape. It is slower than the tape, and needs the memory of the model for each example of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from torch_privacy.ops._base import in_sum_dtype
from torch_privacy.support.validate import Refused, whole

LossesOf = Callable[[nn.Module, Any], Tensor]
CHUNK_ROW_FLOATS = 2**26  # rows made at a time: 256 MiB of float32

# Words of torch's error -> what the model or losses_of does that vmap cannot follow.
CAUSES = {
    ".item()": "a number is taken out of a tensor (.item(), int(), float()) or `if` depends on a tensor's value",
    "data pointer": "a tensor is turned into a list or a NumPy array",
    "dynamic shape": "a shape depends on the data (nonzero, unique, a boolean mask)",
    "captured Tensor": "a tensor outside of the example, such as a buffer, is changed in place",
    "more elements than `self`": "an example's values are written in place into a tensor that all examples share",
    "broadcast shape": "an example's values are written in place into a tensor that all examples share",
    "running_mean": "running statistics are updated from the data",
    "autograd.Function": "an autograd.Function has no setup_context",
    "vmap staticmethod": "an autograd.Function has no vmap rule",
    "saved tensor hooks": "the graph is made with saved-tensor hooks, as by activation checkpointing",
    "yet support": "an op has no batching rule",
}


def vmapped_jacobian(
    model: nn.Module, losses_of: LossesOf, batch: Any, *, chunk_size: int | None = None
) -> VmappedJacobian:
    """Returns the Jacobian of the per-example losses in the model's trainable parameters, computed by ``vmap(grad)``.

    Args:
        model: must be functional in the sense of vmap; its parameters are those that require a gradient.
        losses_of: ``losses_of(model, batch) -> (n,)``. It is called with one example at a time, as a batch of one, so
            that a loss divided by the batch's size is divided by 1. It must use the model passed to it.
        batch: tensor (n, ...), or any nesting of tuples, lists and dicts of such tensors.
        chunk_size: examples per chunk; by default as many as have 2²⁶ numbers in their rows (256 MiB). The activations
            of a chunk need memory too.

    Guarantees:
        - Row i is the gradient of ``losses_of(model, batch of example i alone)``.
        - All answers of one object use the same random numbers (dropout masks), different for every example. One
          number is drawn from torch's random state, as their seed.
        - Parameters, buffers and gradients are unchanged.

    Raises:
        Refused: batch normalization that mixes examples; (raised by the answers) losses that are not (1,) for a batch
            of one or reach parameters other than through the model, anything that vmap cannot follow, and a model
            that was changed in between.
        ValueError: a batch that does not consist of tensors with n first.

    Example:
        >>> model, x = nn.Linear(3, 1), torch.randn(5, 3)
        >>> jacobian = vmapped_jacobian(model, lambda model, x: model(x).squeeze(1), x)
        >>> torch.allclose(jacobian.squared_norms(), x.square().sum(1) + 1)
        True
    """
    where = "vmapped_jacobian"
    _refuse_batch_norm(where, model)
    num_examples = _num_examples(where, batch)
    rows = _Rows(model, losses_of, tree_map(Tensor.detach, batch), num_examples, chunk_size)
    return VmappedJacobian(rows, torch.arange(num_examples, device="cpu"))


class VmappedJacobian:
    """The n x p matrix of per-example gradients, with the methods of `Jacobian`, from rows computed chunk by chunk.

    Every answer computes the rows again, unless one chunk holds them all; then they are kept. Answers are detached.

    Guarantees: as of `Jacobian`; ``weighted_sum`` adds up the same rows that ``squared_norms`` measured, so that the
    clip factors bound what is summed, whatever the rounding. Half precision is summed in float32.
    """

    def __init__(self, rows: _Rows, examples: Tensor):
        self._rows = rows
        self._examples = examples  # numbers in the batch, on the CPU
        self.num_examples = len(examples)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns name and shape of every parameter, in the model's order."""
        return {name: p.shape for name, p in self._rows.parameters.items()}

    @torch.no_grad()
    def squared_norms(self, names: tuple[str, ...] | None = None) -> Tensor:
        """Returns the squared norms of the rows (n,) over all parameters, or over those named."""
        wanted = [name for name in self.shapes if names is None or name in names]
        total = self._rows.zeros(self.num_examples)
        for at, rows in self._chunks():
            for name in wanted:
                total[at] += _flat(rows[name]).square().sum(1).to(total.dtype)
        return total

    @torch.no_grad()
    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """Returns Jᵀ c for weights c (n,): name -> a tensor of the parameter's shape."""
        total = {name: in_sum_dtype(torch.zeros_like(p)) for name, p in self._rows.parameters.items()}
        for at, rows in self._chunks():
            for name, part in rows.items():
                part = in_sum_dtype(part)
                total[name] += torch.tensordot(c[at].to(part.dtype), part, 1)
        return total

    @torch.no_grad()
    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        """Returns J v (n, k) for k directions given as name -> (k, *shape); every parameter must be named."""
        missing = sorted(set(self.shapes) - set(v))
        if missing:
            raise ValueError(f"VmappedJacobian.project: no direction for parameter {', '.join(map(repr, missing))}.")
        total = self._rows.zeros(self.num_examples, len(next(iter(v.values()))))
        for at, rows in self._chunks():
            for name, part in rows.items():
                total[at] += _flat(part).to(total.dtype) @ _flat(v[name]).to(total.dtype).T
        return total

    @torch.no_grad()
    def rows(self) -> dict[str, Tensor]:
        """Returns the rows themselves, name -> (n, *shape): n times the memory of the model."""
        total = {name: p.new_zeros(self.num_examples, *p.shape) for name, p in self._rows.parameters.items()}
        for at, rows in self._chunks():
            for name, part in rows.items():
                total[name][at] = part
        return total

    def select(self, index: Tensor | slice) -> VmappedJacobian:
        """Returns the rows of some of the examples; chunks, and so random numbers, stay those of the whole batch."""
        return VmappedJacobian(self._rows, self._examples[index.cpu() if isinstance(index, Tensor) else index])

    def explain(self) -> str:
        """Returns how the answers are computed, and the size of a chunk, as text."""
        rows, n = self._rows, self.num_examples
        floats = sum(shape.numel() for shape in self.shapes.values())
        return (
            f"rows of {n} examples by vmap(grad), {rows.chunk_size} at a time; {floats} numbers per row, "
            f"{floats * min(rows.chunk_size, n):.2g} per chunk, {'kept' if rows.one_chunk else 'recomputed'} for "
            "every answer"
        )

    def _chunks(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields, for each chunk, the positions (m,) of its rows here, and these rows, name -> (m, *shape)."""
        for start in self._rows.starts:
            inside = self._examples - start
            at = ((inside >= 0) & (inside < self._rows.chunk_size)).nonzero().flatten()
            if len(at):
                rows, index = self._rows(start), inside[at]
                whole_chunk = torch.equal(index, torch.arange(self._rows.length(start), device="cpu"))
                device = self._rows.device
                yield at.to(device), rows if whole_chunk else {k: r[index.to(device)] for k, r in rows.items()}


class _Rows:
    """Computes the rows of a chunk of the batch; called with the number of its first example."""

    def __init__(
        self, model: nn.Module, losses_of: LossesOf, batch: Any, num_examples: int, chunk_size: int | None
    ) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.chunk_size = self._default_chunk_size() if chunk_size is None else chunk_size
        whole("vmapped_jacobian", chunk_size=self.chunk_size, at_least=1)
        self._losses = _Losses(model, losses_of)
        self._batch = batch
        self._num_examples = num_examples
        self._seed = int(torch.randint(2**62, (), device="cpu"))
        self._versions = self._losses.versions()
        self._kept: dict[str, Tensor] | None = None
        self._verified = False

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters.values()), torch.device("cpu"))

    @property
    def starts(self) -> range:
        return range(0, self._num_examples, self.chunk_size)

    @property
    def one_chunk(self) -> bool:
        return len(self.starts) <= 1

    def length(self, start: int) -> int:
        return min(self.chunk_size, self._num_examples - start)

    def zeros(self, *shape: int) -> Tensor:
        """Returns zeros in the type of sums: the widest of the parameters', at least float32."""
        dtype = torch.float32
        for p in self.parameters.values():
            dtype = torch.promote_types(dtype, p.dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def __call__(self, start: int) -> dict[str, Tensor]:
        """Returns the rows of the examples from ``start`` to the end of their chunk, name -> (m, *shape)."""
        if self._kept is not None:
            return self._kept
        rows = self._make(start)
        if self.one_chunk:
            self._kept = rows
        return rows

    def _make(self, start: int) -> dict[str, Tensor]:
        if self._losses.versions() != self._versions:
            raise Refused(
                "vmapped_jacobian: the model was changed since, so that its rows have changed. Compute the answers "
                "before optimizer.step(), or call vmapped_jacobian again."
            )
        chunk = tree_map(lambda t: t[start : start + self.chunk_size], self._batch)
        trained = {name: p.detach() for name, p in self.parameters.items()}
        rows_of = vmap(grad_and_value(self._losses.of_one), in_dims=(None, 0), randomness="different")
        try:
            # Gradients stay on outside of vmap, to detect losses that reach the parameters another way.
            with _seeded(self._seed + start, self.device), torch.enable_grad():
                rows, losses = rows_of(trained, chunk)
        except Refused:
            raise
        except RuntimeError as error:
            self._losses.try_without_vmap(trained, chunk)
            raise Refused(_message(error)) from error
        if losses.requires_grad:
            raise Refused(
                "vmapped_jacobian: the losses reach a parameter other than through the model passed to losses_of, so "
                "its gradient would be missed. Use losses_of's argument, and detach or freeze anything else."
            )
        if not self._verified:
            self._losses.verify_first(self.parameters, chunk, rows)
            self._verified = True
        return rows

    def _default_chunk_size(self) -> int:
        return max(1, CHUNK_ROW_FLOATS // max(1, sum(p.numel() for p in self.parameters.values())))


class _Losses(nn.Module):
    """Makes ``losses_of`` the forward of a module, so that ``functional_call`` can replace the model's tensors."""

    def __init__(self, model: nn.Module, losses_of: LossesOf):
        super().__init__()
        self.model = model
        self._losses_of = losses_of

    def forward(self, batch: Any) -> Tensor:
        return self._losses_of(self.model, batch)

    def versions(self) -> list[int]:
        """Returns numbers that grow when a tensor of the model is written to."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [t._version for t in tensors if not t.is_inference()]

    def of_one(self, trained: Mapping[str, Tensor], example: Any, others: Mapping[str, Tensor] | None = None) -> Tensor:
        """Returns the loss, a scalar, of one example; buffers are passed so that replacements of them do not last."""
        return self._call({**(dict(self.model.named_buffers()) if others is None else others), **trained}, example)

    @torch.no_grad()
    def try_without_vmap(self, trained: Mapping[str, Tensor], chunk: Any) -> None:
        """Raises what an ordinary call with the first example raises, if anything: vmap is then not the cause."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self._call({**trained, **buffers}, tree_map(lambda t: t[0], chunk))

    def verify_first(self, parameters: Mapping[str, Tensor], chunk: Any, rows: Mapping[str, Tensor]) -> None:
        """Raises unless the first row equals an ordinary backward; skipped if the loss draws random numbers.

        Batched rules of torch can be wrong: that of torch.linalg.solve of a parameter is, in torch 2.13. But rounding
        alone can take another side of a kink in a batch (ReLU at 0, two equal maxima); then both rows are right. In
        float64 a wrong rule is still wrong, and a tie of float32 is none.
        """
        native = self._native_row(parameters, chunk)
        name = native and _differing(rows, native)
        if not name or self._equal_in_float64(parameters, chunk):
            return
        raise Refused(
            f"vmapped_jacobian: the row of parameter {name!r} differs from that of an ordinary backward: "
            "torch's vmap is wrong for one of the model's ops. Use torch_privacy.record instead."
        )

    def _native_row(
        self, parameters: Mapping[str, Tensor], chunk: Any, others: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor] | None:
        """Returns the first row by an ordinary backward; None if the loss draws random numbers or is a constant."""
        others = others or {name: b.clone() for name, b in self.model.named_buffers()}
        trained = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        before = torch.random.get_rng_state()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            loss = self.of_one(trained, tree_map(lambda t: t[0], chunk), others)
            drawn = not torch.equal(torch.random.get_rng_state(), before)
        if drawn or loss.grad_fn is None:
            return None
        row = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(trained.items(), row, strict=True)}

    def _equal_in_float64(self, parameters: Mapping[str, Tensor], chunk: Any) -> bool:
        """Returns whether both ways agree on the first row in float64; False where the model cannot be run so."""
        trained = {name: p.detach().double() for name, p in parameters.items()}
        others = {k: _double(t).clone() for k, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        two = tree_map(lambda t: _double(t[:2]), chunk)
        try:
            native = self._native_row(trained, two, others)
            rows = vmap(grad_and_value(partial(self.of_one, others=others)), in_dims=(None, 0))(trained, two)[0]
            return native is not None and not _differing(rows, native)
        except (RuntimeError, TypeError):
            return False

    def _call(self, tensors: Mapping[str, Tensor], example: Any) -> Tensor:
        named = {f"model.{name}": t for name, t in tensors.items()}
        losses = functional_call(self, named, (tree_map(lambda t: t.unsqueeze(0), example),))
        if not isinstance(losses, Tensor) or losses.shape != (1,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise Refused(
                f"vmapped_jacobian: losses of shape {shape} for a batch of one example: must be (1,), one loss per "
                "example. Pass reduction='none' to the loss function, and average the losses of one example's "
                "positions yourself, e.g. losses.view(n, -1).mean(1)."
            )
        return losses.squeeze(0)


def _differing(rows: Mapping[str, Tensor], native: Mapping[str, Tensor]) -> str | None:
    """Returns the first parameter that has a wrong gradient of example 0, beyond rounding; None if all agree."""
    for name, expected in native.items():
        row = in_sum_dtype(rows[name][0])
        if (row - in_sum_dtype(expected)).norm() > torch.finfo(expected.dtype).eps ** 0.5 * (1 + row.norm()):
            return name
    return None


def _double(tensor: Tensor) -> Tensor:
    """Returns real floating point numbers in float64, and others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def _flat(rows: Tensor) -> Tensor:
    """Returns rows (m, *shape) as (m, p), in the type of sums."""
    return in_sum_dtype(rows).reshape(len(rows), -1)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's random numbers on the CPU and the device, inside the context only."""
    accelerator = torch.get_device_module(device) if device.type != "cpu" else None
    devices: Iterable[torch.device] = [device] if accelerator else []
    with torch.random.fork_rng(devices, device_type=device.type if accelerator else "cuda"):
        torch.default_generator.manual_seed(seed)
        if accelerator:
            accelerator.manual_seed(seed)
        yield


def _num_examples(where: str, batch: Any) -> int:
    leaves = tree_leaves(batch)
    sizes = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        got = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else repr(t) for t in leaves) or "nothing"
        raise ValueError(
            f"{where}: batch holds {got}: must be tensors with the same n first, one tensor or a nesting of them. "
            "Bind anything else to losses_of before the call."
        )
    return sizes.pop()


def _refuse_batch_norm(where: str, model: nn.Module) -> None:
    offenders = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    if offenders:
        raise Refused(
            f"{where}: batch normalization by the batch's own statistics mixes examples, in module "
            f"{', '.join(map(repr, offenders))}. Replace it by LayerNorm or GroupNorm, or put it in eval mode, with "
            "running statistics."
        )


def _message(error: RuntimeError) -> str:
    said = str(error)
    cause = next(
        (cause for sign, cause in CAUSES.items() if sign in said), "the code does something vmap cannot follow"
    )
    return (
        f"vmapped_jacobian: {cause}, which vmap refuses ({said.splitlines()[0][:200]}). Record the model on the tape "
        "instead (torch_privacy.record), or write that step out of place and without reading values."
    )
