# SPDX-License-Identifier: Apache-2.0
"""Rewrites the training loops of a program for Opacus, for `translation`."""

from __future__ import annotations

import ast
import re

from .program import Program, called

LOG = (
    "the loop also gets rehearsals; leave them out of a log and of counts: `if not {training}.rehearsing`, after step."
)


def translate_loops(program: Program) -> None:
    """Rewrites every loop that calls ``backward`` and goes over a loader of ``make_private``."""
    for loop in list(program.find(ast.For)):
        assert isinstance(loop, ast.For)
        own = [call for call in program.calls("backward", within=loop) if _innermost(program, call) is loop]
        if not own:
            continue
        loader = _loader(program, loop)
        if loader is None:
            program.hint(loop, "iterate over the training, and call training.step(losses) with one loss per example.")
            continue
        name, training, is_parameter = loader
        steps = f"len({name})" if not is_parameter else f"round(1 / {training}.settings.sampling_probability)"
        for node in program.find(ast.expr, loop.iter):
            if isinstance(node, ast.Name | ast.Attribute) and program.of(node) == name:
                program.replace(node, f"chain.from_iterable(islice({training}.steps(), {steps}))")
                break
        _body(program, loop, own, training)


def _innermost(program: Program, node: ast.AST) -> ast.AST | None:
    """Returns the innermost ``for`` loop around a node."""
    while not isinstance(node, ast.For | ast.Module):
        node = program.parents[node]
    return node


def _loader(program: Program, loop: ast.For) -> tuple[str, str, bool] | None:
    """Returns the loader that a loop goes over, the name of its training there, and whether that is a parameter.

    A function that gets the loader as a parameter gets the training in its place.
    """
    function = program.function(loop)
    arguments = function.args if isinstance(function, ast.FunctionDef) else None
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments else []
    for node in program.find(ast.expr, loop.iter):
        name = program.of(node)
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        parameter = next((p for p in parameters if p.arg == name), None)
        if parameter is None and name in program.loaders:
            training = program.trainings.get(name) or next(iter(program.trainings.values()), "training")
            return name, training, False
        if parameter is not None and isinstance(function, ast.FunctionDef) and _pass(program, function, parameter):
            return name, "training", True
    return None


def _pass(program: Program, function: ast.FunctionDef, parameter: ast.arg) -> bool:
    """Renames a function's parameter for a loader to ``training``, and passes the training where it is called."""
    names = [p.arg for p in function.args.posonlyargs + function.args.args]
    position = names.index(parameter.arg) if parameter.arg in names else len(names)  # by keyword only
    passed: list[tuple[ast.expr, str]] = []
    calls = [c for c in program.calls(function.name) if isinstance(c.func, ast.Name)]
    for call in calls:
        keyword = next((k for k in call.keywords if k.arg == parameter.arg), None)
        value = keyword.value if keyword else call.args[position] if position < len(call.args) else None
        training = None if value is None else program.trainings.get(program.of(value))
        if value is None or training is None:
            return False
        passed.append((keyword or value, f"training={training}" if keyword else training))  # type: ignore[arg-type]
    if not calls:
        return False
    if any(old for old, _ in program.passed if old is function):
        return True
    program.passed.append((function, parameter.arg))
    for node, new in passed:
        program.replace(node, new)
    start, _ = program.span(parameter)
    program.edits.append((start, start + len(parameter.arg.encode()), "training"))
    for node in program.find(ast.Name, function):
        if isinstance(node, ast.Name) and node.id == parameter.arg and not _is_iterated(program, node):
            parent = program.parents[node]
            if isinstance(parent, ast.Call) and called(parent) == "len":
                program.replace(parent, "round(1 / training.settings.sampling_probability)")
            else:
                program.hint(node, f"{parameter.arg} was a loader of Opacus and is the training now.")
                program.replace(node, "training")
    return True


def _is_iterated(program: Program, node: ast.AST) -> bool:
    """True if a name stands in the iterable of a loop."""
    while not isinstance(node, ast.stmt):
        parent = program.parents[node]
        if isinstance(parent, ast.For) and parent.iter is node:
            return True
        node = parent
    return False


def _body(program: Program, loop: ast.For, backward: list[ast.Call], training: str) -> None:
    """Rewrites the losses, ``backward``, ``zero_grad`` and the steps in a loop."""
    first = backward[0].func
    loss = program.of(first.value) if isinstance(first, ast.Attribute) else ""
    made = _losses(program, loop, loss)
    if len(backward) > 1 or not loss.isidentifier() or not made:
        program.hint(
            loop,
            f"compute losses of shape (n,), one per example, and call {training}.step(losses) in place of backward.",
        )
        return
    counts = any(isinstance(n, ast.Name) and n.id == "enumerate" for n in ast.walk(loop.iter))
    logs = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id == loss and isinstance(n.ctx, ast.Load)]
    if counts or len(logs) > 1:
        program.hint(loop, LOG.format(training=training))
    handled: set[int] = set()
    released = False
    schedulers: list[ast.Expr] = []
    for call in program.calls("backward", "zero_grad", "step", "clip_grad_norm_", "clip_grad_value_", within=loop):
        statement = program.statement(call)
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            continue
        handled |= {id(node) for node in ast.walk(statement)}
        method, owner = called(call), program.of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if method == "step" and _is_optimizer(program, owner):
            released = True
            program.replace(statement, f"released = {training}.step({loss})")
        elif method == "step":
            schedulers.append(statement)
        else:
            program.remove(statement)
    for statement in schedulers:
        program.replace(
            statement, f"if released:  # once per step\n{' ' * (statement.col_offset + 4)}{program.of(statement)}"
        )
    if not released:
        program.hint(backward[0], f"call {training}.step({loss}) here.")
    for node in logs:
        if id(node) not in handled and not _is_assigned(program, node, loss):
            program.replace(node, f"{loss}.mean()")


def _is_optimizer(program: Program, name: str) -> bool:
    return name in program.optimizers or bool(re.search(r"opt", name, re.IGNORECASE))


def _is_assigned(program: Program, node: ast.AST, loss: str) -> bool:
    """True if a use of the loss makes the loss itself, as in ``loss = loss / 2``."""
    statement = program.statement(node)
    return isinstance(statement, ast.Assign) and program.of(statement.targets[0]) == loss


def _losses(program: Program, loop: ast.For, loss: str) -> bool:
    """Makes the loss of a loop one loss per example; returns whether that is certain."""
    for statement in program.find(ast.Assign, loop):
        assert isinstance(statement, ast.Assign)
        if program.of(statement.targets[0]) != loss or not isinstance(statement.value, ast.Call):
            continue
        call = statement.value
        name = program.of(call.func)
        if re.search(r"\b(functional|F)\.\w+$", name):
            return _without_mean(program, call)
        if isinstance(call.func, ast.Call):  # nn.CrossEntropyLoss()(output, target)
            return _without_mean(program, call.func)
        return _criterion(program, loop, name)
    return False


def _criterion(program: Program, loop: ast.For, name: str) -> bool:
    """Changes the definition of a criterion, if the training loop alone uses it."""
    function = program.function(loop)
    for scope in (function, program.tree, *program.find(ast.FunctionDef)):
        made = [
            statement
            for statement in program.find(ast.Assign, scope)
            if isinstance(statement, ast.Assign)
            and program.of(statement.targets[0]) == name
            and isinstance(statement.value, ast.Call)
            and called(statement.value).endswith("Loss")
        ]
        if not made:
            continue
        inside = {id(node) for node in ast.walk(loop)}
        home = program.function(made[0])
        others = [
            call
            for call in program.find(ast.Call, home)
            if isinstance(call, ast.Call) and program.of(call.func) == name and id(call) not in inside
        ]
        if others:
            program.hint(others[0], f"{name} gives one loss per example now; take .mean() here.")
        return _without_mean(program, made[0].value)  # type: ignore[arg-type]
    return False


def _without_mean(program: Program, call: ast.Call) -> bool:
    """Adds ``reduction="none"`` to a loss function; not if it has class weights or a reduction already."""
    if any(keyword.arg in ("reduction", "weight", "reduce", "size_average", None) for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute | ast.Name) and called(call).endswith("Loss") and call.args:
        return False  # the first argument may be class weights
    end = program.span(call)[1] - 1
    has_arguments = bool(call.args or call.keywords)
    program.edits.append((end, end, f'{", " if has_arguments else ""}reduction="none"'))
    return True
