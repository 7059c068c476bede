# SPDX-License-Identifier: Apache-2.0
"""Provides the contract of every ``Op`` as inherited tests; a subclass supplies an op and its explicit rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from torch_privacy.jacobian.rows.norms import squared_norms
from torch_privacy.ops import Op

SIZES = [0, 1, 2, 5]  # batch sizes


class OpContract(ABC):
    """Tests one kind of op; ``forms`` are the names of its shapes."""

    kind: ClassVar[type[Op]]
    forms: ClassVar[list[str]]

    def __init_subclass__(cls) -> None:
        cls.pytestmark = [pytest.mark.parametrize("form", cls.forms)]

    @abstractmethod
    def make(self, n: int, form: str) -> Op:
        """Returns an op of n examples from random tensors."""

    @abstractmethod
    def spelled_out(self, op: Any) -> Tensor:
        """Returns the rows (n, *shape) by the formula in the op's docstring, entry by entry or by autograd."""

    def partners(self, n: int, form: str) -> list[Op]:
        """Returns ops of the same tensor that this kind can merge; their own contract checks their rows."""
        return [self.make(n, form)]

    def strangers(self, n: int, form: str) -> list[Op]:
        """Returns ops that this kind must refuse to merge."""
        return [UnknownOp()]

    @pytest.mark.parametrize("n", SIZES)
    def test_rows_are_those_of_the_formula(self, form: str, n: int) -> None:
        op = self.make(n, form)
        assert isinstance(op, self.kind)
        assert op.num_examples == n
        assert_answers_of(op, self.spelled_out(op))

    @pytest.mark.parametrize("n", SIZES)
    def test_merged_rows_are_the_sum(self, form: str, n: int) -> None:
        op = self.make(n, form)
        for other in self.partners(n, form):
            merged = op.merge(other)
            assert merged is not None
            assert_answers_of(merged, op.rows() + other.rows())
            again = merged.merge(op)
            assert again is not None
            assert_answers_of(again, 2 * op.rows() + other.rows())

    def test_what_has_no_common_form_is_not_merged(self, form: str) -> None:
        assert all(self.make(3, form).merge(other) is None for other in self.strangers(3, form))

    @pytest.mark.parametrize("index", [slice(1, 4), slice(0, 0), slice(None, None, 2), [3, 1, 1], [True, False] * 2])
    def test_selected_rows_are_those_rows(self, form: str, index: Any) -> None:
        op = self.make(4, form)
        index = torch.tensor(index) if isinstance(index, list) else index
        assert_answers_of(op.select(index), op.rows()[index])

    @pytest.mark.parametrize("floats", [1, 30, 1000])
    def test_norms_are_the_same_in_chunks(self, form: str, floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
        op = self.make(5, form)
        expected = op.rows().flatten(1).square().sum(1) if op.shape else op.rows().square()
        monkeypatch.setattr("torch_privacy.jacobian.rows.norms.CHUNK_FLOATS", floats)
        for method in op.methods():
            torch.testing.assert_close(squared_norms(op, method), expected, msg=method.name)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_answers_have_the_type_of_the_op(self, form: str, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)
        op = self.make(3, form)
        assert op.dtype is dtype
        answers = [op.rows(), op.weighted_sum(torch.rand(3)), op.project(torch.randn(2, *op.shape)), squared_norms(op)]
        assert {answer.dtype for answer in answers} == {dtype}

    def test_no_answer_changes_the_op(self, form: str) -> None:
        op = self.make(3, form)
        before = [tensor.clone() for tensor in tensors_of(op)]
        assert_answers_of(op, op.rows().clone())
        assert all(map(torch.equal, tensors_of(op), before))

    def test_methods_have_names_of_their_own_and_prices(self, form: str) -> None:
        methods = self.make(3, form).methods()
        assert len({method.name for method in methods}) == len(methods) > 0
        assert all(min(method.flops, method.floats) >= 0 for method in methods)


class UnknownOp(Op):
    """An op without any rule."""

    num_examples, shape, dtype = 3, torch.Size(), torch.float64  # type: ignore[assignment]
    methods = rows = project = weighted_sum = select = None  # type: ignore[assignment]


def tensors_of(op: Op) -> list[Tensor]:
    """Returns the tensors that an op holds, including those of ops inside it."""
    found: list[Tensor] = []
    for field in fields(op):  # type: ignore[arg-type]
        value = getattr(op, field.name)
        found += [value] if isinstance(value, Tensor) else tensors_of(value) if is_dataclass(value) else []
    return found


def assert_answers_of(op: Op, rows: Tensor) -> None:
    """Asserts that all methods of an op agree with its rows (n, *shape)."""
    n, size = len(rows), op.shape.numel()
    flat = rows.reshape(n, size)
    assert op.shape == rows.shape[1:]
    torch.testing.assert_close(op.rows(), rows)
    c, v = torch.randn(n), torch.randn(3, *op.shape)
    torch.testing.assert_close(op.weighted_sum(c), (c @ flat).view(op.shape))
    torch.testing.assert_close(op.project(v), flat @ v.reshape(3, size).T)
    left, right = torch.randn([*op.shape[:1], 1][0]), torch.randn(op.shape[1:])
    torch.testing.assert_close(op.project_outer(left, right), flat @ torch.outer(left, right.flatten()).flatten())
    for method in op.methods():
        torch.testing.assert_close(squared_norms(op, method), flat.square().sum(1), msg=method.name)
        answer = method.compute(op)
        assert answer.shape == (rows.shape if method.rows else (n,)), method.name
        if method.rows:
            torch.testing.assert_close(answer, rows, msg=method.name)
