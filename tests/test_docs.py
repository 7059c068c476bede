# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows must run: Python blocks as printed, commands as far as they take seconds, links, names.

A page's Python blocks run in order in one namespace, as a reader pastes them; those of ALONE each in one of its own.
A block that prints is followed by a block of text with its output, in which ``...`` stands for anything.
"""

import argparse
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from inspect import isclass, isfunction
from itertools import groupby
from pathlib import Path
from unittest.mock import Mock, patch

import nbformat
import pytest
import torch
import torch.distributed.run
import typer.main
from accelerate.commands.launch import launch_command_parser
from hugging import offline
from oracle import assert_exact, recorded_jacobian
from parts import Calls, Hidden, losses_of
from run_folders import write_own
from torch import Tensor

import torch_privacy as tp
from torch_privacy import cli
from torch_privacy.ops import OPS
from torch_privacy.privacy.events import base as events

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
PAGES.sort()

LANGUAGES = {"python", "pycon", "bash", "text"}
ANY = float("inf")
REGISTRIES = [OPS, *(value for name, value in vars(events).items() if name.isupper() and isinstance(value, dict))]
VARY = {  # (page, first word of an output) whose numbers depend on random draws or on rounding -> relative tolerance
    ("README.md", "epsilon"): 1e-3,  # calibrated: 1.999 or 2.000
    ("docs/index.md", "epsilon"): 1e-3,
    ("docs/pca.md", "epsilon"): 1e-3,
    ("docs/first-model.md", "epsilon"): 1e-3,
    ("docs/first-model.md", "accuracy"): 0.02,  # of the noise
    ("docs/sklearn.md", "accuracy"): 0.1,
    ("docs/check.md", "parameter"): ANY,  # which example was found, its loss
    ("docs/gep.md", "tensor"): ANY,  # medians of norms at random weights
}
ALONE = {"docs/papers.md"}  # pages with blocks that a reader takes without those above
OFFLINE = {"docs/huggingface.md": offline}  # page -> replaces what it downloads
SECONDS = {"epsilon", "delta", "calibrate", "tradeoff", "plan"}  # subcommands that are run as shown
# Not run, but their options are checked: train, search, reproduce NAME, explain and report take minutes or need a run;
# `compare` asks other libraries (a slow test runs it); make and pip download; benchmarks take minutes.
# A program.py is the one that the page shows.
OTHER_COMMANDS = {"cd", "pip", "export", "bash", "program.py", "tensorboard"}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    text: str
    line: int
    output: str | None  # of the text block that follows at once


def blocks(page: str) -> list[Block]:
    content = (ROOT / page).read_text()
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL))
    found = []
    for fence, following in zip(fences, [*fences[1:], None], strict=False):
        output = None
        if following and following[1] == "text" and not content[fence.end() : following.start()].strip():
            output = following[2]
        found.append(Block(page, fence[1], fence[2], content.count("\n", 0, fence.start()) + 1, output))
    return found


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_its_language(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def assert_shown(printed: str, shown: str, tolerance: float = 0.0) -> None:
    """Raises unless texts are equal, numbers within the tolerance; dots match anything, spaces any number of spaces."""
    parts = re.split(rf"(\.\.\.|{NUMBER}|\s+)", shown.strip())
    kinds = [(r"\.\.\.", ".*?"), (NUMBER, f"({NUMBER})"), (r"\s+", r"\s+")]
    pattern = "".join(next((to for kind, to in kinds if re.fullmatch(kind, p)), re.escape(p)) for p in parts)
    found = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    assert found, f"printed:\n{printed}\nshown:\n{shown}"
    numbers = [part for part in parts if re.fullmatch(NUMBER, part)]
    for here, there in zip(found.groups(), numbers, strict=True):
        close = here == there or tolerance == ANY or abs(float(here) - float(there)) <= tolerance * abs(float(there))
        assert close, f"{here} is printed, {there} shown:\n{printed}"


@pytest.mark.thorough(but=2)
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated")  # Lightning's own call
@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("page", pages_with("python", "pycon"))
def test_python_of_the_page_runs_as_printed(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    names: dict = {"__name__": "page"}
    with ExitStack() as stack:
        for registry in REGISTRIES:  # that pages add to
            stack.enter_context(patch.dict(registry))
        if page in OFFLINE:
            stack.enter_context(OFFLINE[page]())
        for block in blocks(page):
            if block.language == "pycon":
                run_session(block, names)
            elif block.language == "python":
                names = {"__name__": "page"} if page in ALONE else names
                exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), names)
                printed = capsys.readouterr().out
                assert not printed or block.output is not None, f"{page}, line {block.line}: prints {printed!r}"
                if block.output is not None:
                    assert_shown(printed, block.output, VARY.get((page, re.split(r"\W", block.output)[0]), 0.0))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Proactor event loop")
@pytest.mark.parametrize("path", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_it_prints(path, monkeypatch):
    """Every cell runs, and what the reader sees has the same kinds of outputs."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    printed, ran = nbformat.read(path, 4).cells, import_module("_notebooks").executed(path).cells
    assert [kinds_of_outputs(cell) for cell in printed] == [kinds_of_outputs(cell) for cell in ran]


def kinds_of_outputs(cell):
    """Returns the kinds of a cell's outputs; lines that come after a pause are another output of the same kind."""
    kinds = [(output.output_type, *sorted(output.get("data", ()))) for output in cell.get("outputs", ())]
    return [kind for kind, _ in groupby(kinds)]


def run_session(block: Block, names: dict) -> None:
    """Runs an interactive session and compares each answer."""
    test = doctest.DocTestParser().get_doctest(block.text, names, block.page, str(ROOT / block.page), block.line)
    complaints: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=complaints.append, clear_globs=False)
    assert not complaints, "".join(complaints)
    names.update(test.globs)


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_of_the_page_are_valid(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_own(tmp_path / "runs/adult")  # the run that pages price
    for block in blocks(page):
        if block.language == "bash":
            for words in commands(block.text):
                check_command(words)
                if words[0] == "torch-privacy" and words[1] in SECONDS:
                    assert cli.run(words[1:]) == 0
                    printed = capsys.readouterr().out
                    if block.output is not None:
                        assert_shown(printed, block.output)


@pytest.mark.thorough
def test_table_of_accountants_is_what_its_command_prints():
    """But for the times in its last column, and the widths of columns that follow from them."""
    (block,) = (
        block for block in blocks("docs/accounting.md") if block.output and "torch-privacy compare" in block.text
    )
    ((_, *arguments),) = commands(block.text)
    code = "import sys; from torch_privacy.cli import run; run(sys.argv[1:])"  # alone, as elsewhere warnings are errors
    wide = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, check=True, text=True, env=wide
    )
    assert cells_without_times(shown.stdout) == cells_without_times(block.output or "")


def cells_without_times(table: str) -> list[list[str]]:
    return [re.split(" {2,}", line.strip())[:-1] for line in table.splitlines()]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell script, without assignments in front."""
    text = re.sub(r"<<'END'\n.*?^END$", "", text.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((k for k, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
            command, words = words[:end], words[end + 1 :]
            yield command[next(k for k, word in enumerate(command) if "=" not in word) :]


def check_command(words: list[str]) -> None:
    """Raises unless the command exists and takes these options."""
    program, *arguments = words
    if program in ("torch-privacy", "torch_privacy"):  # the latter after torchrun's -m
        subcommand(arguments[0]).make_context(arguments[0], arguments[1:])
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program in ("python", ".venv/bin/python"):
        check_script(arguments)
    elif program == "srun":
        check_command(arguments)
    elif program in LAUNCHERS:
        launched = LAUNCHERS[program](arguments)
        check_command([launched.training_script, *launched.training_script_args])
    else:
        assert program in OTHER_COMMANDS, f"{words}: a command that no test knows"


def torchrun(arguments: list[str]) -> argparse.Namespace:
    """What torchrun makes of its arguments."""
    return torch.distributed.run.get_args_parser().parse_args(arguments)


def accelerate(arguments: list[str]) -> argparse.Namespace:
    """What accelerate makes of its arguments."""
    assert arguments[0] == "launch"
    return launch_command_parser().parse_args(arguments[1:])


LAUNCHERS = {"torchrun": torchrun, "accelerate": accelerate}


def subcommand(name: str):
    return typer.main.get_command(cli.app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]


def check_script(arguments: list[str]) -> None:
    """The script is there and names each option; code from standard input and modules pass."""
    if arguments[0] not in ("-", "-m"):
        source = (ROOT / arguments[0]).read_text()
        for option in arguments[1:]:
            assert not option.startswith("--") or f'"{option.split("=")[0]}"' in source, (arguments, option)


INLINE = r"`((?:\w+=\S+ )?(?:torch-privacy|python (?:benchmarks|docs)/|make )[^`]*)`"


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_prose_have_their_options(page):
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(INLINE, prose):
        (words,) = commands(re.sub(r"\s+", " ", found))
        if words[0] != "torch-privacy":
            check_command(words)
        elif len(words) > 1 and not words[1].startswith("--"):
            known = {option for parameter in subcommand(words[1]).params for option in parameter.opts}
            assert {word for word in words[2:] if word.startswith("--")} <= known | {"--help"}, words


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_the_page_points_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page} links to {link}"


REFERENCE = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
PACKAGES = [
    "privacy",
    "privacy.tradeoff",
    "data",
    "mechanisms.gep",
    "jacobian",
    "training",
    "mechanisms.estimated_norms",
    "sklearn",
    "opacus",
]


def public_names(package: str) -> list[str]:
    """Classes and functions of its own that a package offers."""
    values = vars(import_module(f"torch_privacy.{package}"))
    own = {name: value for name, value in values.items() if name[0] != "_" and (isclass(value) or isfunction(value))}
    return [name for name, value in own.items() if value.__module__.startswith("torch_privacy.")]


def test_reference_names_public_modules_only():
    assert not [path for path in REFERENCE if any(part.startswith("_") for part in path.split("."))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_the_reference_page(package):
    shown = {path.rpartition(".")[2] for path in REFERENCE}
    assert set(public_names(package)) <= shown


def test_names_of_the_package_are_on_the_reference_page_as_such():
    assert {f"torch_privacy.{name}" for name in tp.__all__ if name != "privacy"} <= REFERENCE


def test_every_event_has_a_section():
    """Under its name, with an example that makes one."""
    sections = re.split(r"^#{2,3} ", (ROOT / "docs/events.md").read_text(), flags=re.MULTILINE)
    by_name = {section.split("\n", 1)[0].strip("` "): section for section in sections}
    for name in events.EVENTS:
        assert f"{name}(" in by_name[name], name


def register_ops_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> dict:
    (block,) = (block for block in blocks("docs/jacobian.md") if "RECORDERS" in block.text)
    names: dict = {"__name__": "an_op_of_ones_own"}
    exec(block.text, names)
    for function, recorder in names["RECORDERS"].items():
        monkeypatch.setitem(OPS, function, recorder)
    return names


LERPS = {  # whether the rule of the documentation knows the form
    "by a number": (True, lambda m, x: torch.lerp(x, m.p, 0.3)),
    "by keyword": (True, lambda m, x: x.lerp(end=m.p, weight=0.3)),
    "by a tensor": (True, lambda m, x: torch.lerp(x, m.p, x.sigmoid())),
    "from a parameter": (False, lambda m, x: torch.lerp(m.p, x, 0.3)),
    "by a parameter": (False, lambda m, x: torch.lerp(x, x.sin(), m.p)),
    "to a parameter by itself": (False, lambda m, x: torch.lerp(x, m.p, m.p)),
}


@pytest.mark.parametrize("form", LERPS)
def test_op_of_the_documentation_is_exact(form, monkeypatch):
    register_ops_of_the_documentation(monkeypatch)
    known, forward = LERPS[form]
    if known:
        fallback = Mock(side_effect=AssertionError("the op's own rule was passed over"))
        monkeypatch.setattr("torch_privacy.jacobian.recording.calls.replay", fallback)
    assert_exact(Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4))


def test_op_of_the_documentation_notices_a_change_in_place(monkeypatch):
    register_ops_of_the_documentation(monkeypatch)

    def forward(m: Calls, x: Tensor) -> Tensor:
        scale = x.sigmoid().detach()
        y = torch.lerp(torch.zeros_like(x), m.p, scale)
        scale.mul_(2)
        return y

    with pytest.raises(tp.Refused, match="an input of 'lerp' was changed in place"):
        recorded_jacobian(Calls(forward, p=torch.randn(4)), torch.randn(5, 6, 4), losses_of)


def test_function_of_ones_own_is_taken_as_the_documentation_says(monkeypatch):
    @torch.library.custom_op("torch_privacy_tests::hidden", mutates_args=())
    def hidden(x: Tensor, w: Tensor) -> Tensor:
        return x * w * w

    hidden.register_autograd(Hidden.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    x = torch.randn(5, 3)
    assert_exact(Calls(lambda m, x: Hidden.apply(x, m.w), w=torch.randn(3)), x)
    model = Calls(lambda m, x: hidden(x, m.w), w=torch.randn(3))
    assert_exact(model, x)
    recorder = Mock(return_value=iter(()))  # knows nothing after all
    monkeypatch.setitem(OPS, torch.ops.torch_privacy_tests.hidden.default, recorder)
    assert_exact(model, x)
    recorder.assert_called_once()
