# SPDX-License-Identifier: Apache-2.0
"""Rewrites a program that uses Opacus for `PrivateTraining`; what is not certain becomes a comment at its line."""

from __future__ import annotations

import ast

from .program import MARK, Program, called
from .translated_loop import translate_loops

IMPORTS = {"opacus.validators": "torch_privacy.opacus.validators", "opacus.layers": "torch_privacy.opacus.layers"}
NOT_NEEDED = {"PrivacyEngine", "BatchMemoryManager"}
MAKE = ("make_private", "make_private_with_epsilon")
MADE = {  # argument of make_private -> of PrivateTraining
    "noise_multiplier": "noise_multiplier",
    "target_epsilon": "target_epsilon",
    "target_delta": "delta",
}
DROPPED = {"grad_sample_mode", "wrap_model", "rand_on_empty", "batch_first", "criterion"}
HINTS = {  # method or attribute of Opacus -> what to do
    "get_privacy_spent": "training.spent(delta).epsilon.high is the certified epsilon; there is no order alpha.",
    "save_checkpoint": "save model, optimizer and training.state_dict(), which is secret.",
    "load_checkpoint": "load model, optimizer and training.load_state_dict(state); for a file of Opacus see "
    "torch_privacy.opacus.from_opacus and privacy.releases_from_opacus.",
    "_module": "the model is not wrapped; leave ._module out.",
    "grad_sample": "per-example gradients are not formed.",
    "attach_step_hook": "has no counterpart; use what training.step returns.",
}
UNCERTAIN_ARGUMENTS = {
    "clipping": "see tp.EachLayer, tp.PerLayer, tp.Groups and tp.Adaptive.",
    "poisson_sampling": "batches are always Poisson samples.",
    "noise_generator": "the noise always comes from AES with a secret key.",
    "loss_reduction": "the update is always divided by the expected batch size.",
}


def translated(source: str, name: str = "the program") -> str:
    """Returns a program for Opacus as one for `PrivateTraining`, with comments where it must be finished by hand.

    Args:
        source: text of the program; nothing of it is run.
        name: of the program, for messages.

    Raises:
        ValueError: it is no Python, or never calls ``make_private``.
    """
    try:
        program = Program(source if source.endswith("\n") else source + "\n")
    except SyntaxError as error:
        raise ValueError(f"from-opacus: {name} is no Python 3: line {error.lineno}: {error.msg}.") from error
    if not list(program.calls(*MAKE)):
        raise ValueError(f"from-opacus: {name} never calls make_private or make_private_with_epsilon.")
    program = _without_managers(program)
    _engines(program)
    for call in program.calls(*MAKE):
        _make(program, call)
    translate_loops(program)
    _imports(program)
    _uses(program)
    return str(program)


def _without_managers(program: Program) -> Program:
    """Takes every ``with BatchMemoryManager(...) as loader:`` off, and remembers its limit."""
    limits: dict[str, str] = {}
    for node in program.find(ast.With):
        assert isinstance(node, ast.With)
        call = node.items[0].context_expr
        if not isinstance(call, ast.Call) or called(call) != "BatchMemoryManager":
            continue
        given = {keyword.arg: program.of(keyword.value) for keyword in call.keywords}
        loader, limit, new = given.get("data_loader"), given.get("max_physical_batch_size"), node.items[0].optional_vars
        if len(node.items) > 1 or loader is None or limit is None or not isinstance(new, ast.Name):
            program.hint(node, "give PrivateTraining microbatch_size= in place of BatchMemoryManager.")
            continue
        limits[loader] = limit
        _dedent(program, node)
        for name in program.find(ast.Name, node):
            if isinstance(name, ast.Name) and name.id == new.id and name is not new:
                program.replace(name, loader)
    without = Program(str(program))
    without.limits = limits
    return without


def _dedent(program: Program, node: ast.With) -> None:
    """Removes the line of a ``with``, and moves its block to the left; lines within texts stay."""
    first = node.body[0]
    program.edits.append((program.starts[node.lineno - 1], program.starts[first.lineno - 1], ""))
    inside = {
        line
        for part in ast.walk(node)
        if isinstance(part, ast.Constant | ast.JoinedStr)
        for line in range(part.lineno + 1, (part.end_lineno or part.lineno) + 1)
    }
    shift = first.col_offset - node.col_offset
    for number in range(first.lineno, (node.end_lineno or node.lineno) + 1):
        begin = program.starts[number - 1]
        if number not in inside and program.text[begin : begin + shift] == b" " * shift:
            program.edits.append((begin, begin + shift, ""))


def _engines(program: Program) -> None:
    for call in program.calls("PrivacyEngine"):
        statement = program.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            program.engines.add(program.of(statement.targets[0]))
            program.remove(statement)


def _make(program: Program, call: ast.Call) -> None:
    """Puts a `PrivateTraining` in the place of ``make_private``."""
    statement = program.statement(call)
    targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
    given = {keyword.arg or "**": program.of(keyword.value) for keyword in call.keywords}
    needed = ("module", "optimizer", "data_loader", "max_grad_norm")
    if (
        not isinstance(targets, ast.Tuple)
        or len(targets.elts) not in (3, 4)
        or any(name not in given for name in needed)
    ):
        program.hint(call, "make a tp.PrivateTraining here; docs/from-opacus.md shows the arguments.")
        return
    names = [program.of(target) for target in (targets.elts[0], targets.elts[1], targets.elts[-1])]
    loader = given["data_loader"]
    owner = f"{names[2].rpartition('.')[0]}." if "." in names[2] else ""
    training = f"{owner}training"
    program.trainings[names[2]] = training
    program.loaders.add(names[2])
    program.optimizers.add(names[1])
    indent = " " * statement.col_offset
    lines = [
        f"{new} = {old}"
        for new, old in zip(names, (given["module"], given["optimizer"], loader), strict=True)
        if new != old
    ]
    loader = names[2]
    epochs = given.get("epochs") or _epochs(program)
    if epochs is None:
        program.hint(call, "num_steps= needs the number of epochs times len(loader).")
    limit = program.limits.get(loader) or next(iter(program.limits.values()), None)
    arguments = [
        f"expected_batch_size=len({loader}.dataset) / len({loader})",
        f"num_steps={epochs or 'EPOCHS'} * len({loader})",
        f"clipping=tp.Flat({given['max_grad_norm']})",
        *(f"{ours}={given[theirs]}" for theirs, ours in MADE.items() if theirs in given),
        *([] if limit is None else [f"microbatch_size={limit}"]),
        f"collate_fn={loader}.collate_fn",
        f"num_workers={loader}.num_workers",
    ]
    lines.append(f"{training} = tp.PrivateTraining(")
    lines.append(f"    {names[0]}, {names[1]}, {loader}.dataset,")
    lines += [f"    {argument}," for argument in arguments] + [")"]
    if isinstance(call.func, ast.Attribute) and (engine := program.of(call.func.value)) in program.engines:
        lines.append(f"{engine} = {training}")
    if len(targets.elts) == 4 and "criterion" in given and program.of(targets.elts[2]) != given["criterion"]:
        lines.append(f"{program.of(targets.elts[2])} = {given['criterion']}")
    program.replace(statement, f"\n{indent}".join(lines))
    if isinstance(program.parents[statement], ast.If):
        program.hint(call, f"{training} exists only where this `if` holds; without privacy keep the loop as it was.")
    for name in sorted(given.keys() - {*needed, *MADE, *DROPPED, "epochs"}):
        text = UNCERTAIN_ARGUMENTS.get(name, "see docs/from-opacus.md.")
        program.hint(call, f"{name}{'' if name == '**' else '='}{given[name]} was left out: {text}")


def _epochs(program: Program) -> str | None:
    """Returns E of the only ``for ... in range(E)``, or ``range(1, E + 1)``, around ``backward``."""
    trains = {
        function.name
        for function in program.find(ast.FunctionDef)
        if isinstance(function, ast.FunctionDef) and list(program.calls("backward", within=function))
    }
    found: set[str] = set()
    for loop in program.find(ast.For):
        assert isinstance(loop, ast.For)
        ranges = [call for call in program.calls("range", within=loop.iter)]
        if len(ranges) != 1 or not list(program.calls("backward", *trains, within=loop)):
            continue
        bounds = ranges[0].args
        if len(bounds) == 1:
            found.add(program.of(bounds[0]))
        elif len(bounds) == 2 and program.of(bounds[0]) == "1" and isinstance(bounds[1], ast.BinOp):
            if isinstance(bounds[1].op, ast.Add) and program.of(bounds[1].right) == "1":
                found.add(program.of(bounds[1].left))
    innermost = [text for text in found if "epoch" in text.lower()] or [*found]
    return innermost[0] if len(innermost) == 1 else None


def _imports(program: Program) -> None:
    """Replaces the imports of Opacus."""
    done = False
    for node in program.find(ast.ImportFrom | ast.Import):  # type: ignore[arg-type]
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name  # type: ignore[union-attr]
        if module.split(".")[0] != "opacus":
            continue
        assert isinstance(node, ast.Import | ast.ImportFrom)
        kept = [alias for alias in node.names if alias.name not in NOT_NEEDED]
        lines = [] if done else ["from itertools import chain, islice", "", "import torch_privacy as tp"]
        done = True
        if module in IMPORTS:
            lines.append(f"from {IMPORTS[module]} import {', '.join(ast.unparse(alias) for alias in kept)}")
        elif kept and module != "opacus":
            lines.append(f"{MARK} {ast.unparse(node)} has no counterpart; see docs/from-opacus.md.")
        indent = " " * node.col_offset
        if lines:
            program.replace(node, f"\n{indent}".join(lines))
        else:
            program.remove(node)


def _uses(program: Program) -> None:
    """Translates ``get_epsilon``, and leaves a comment at what else comes from Opacus."""
    for call in program.calls("get_epsilon"):
        assert isinstance(call.func, ast.Attribute)
        engine = program.of(call.func.value).removesuffix(".accountant")
        delta = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "delta"), None)
        if delta is None or len(call.args) + len(call.keywords) != 1:
            program.hint(call, "training.spent(delta).epsilon.high is the certified epsilon.")
        else:
            program.replace(call, f"{engine}.spent({program.of(delta)}).epsilon.high")
    for node in program.find(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if node.attr in HINTS:
            program.hint(node, HINTS[node.attr])
