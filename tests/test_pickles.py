# SPDX-License-Identifier: Apache-2.0
"""Every place of the package that can read or write a pickle says why, in a comment ``# pickle: ...``."""

import ast
from pathlib import Path

import pytest

import torch_privacy
import torch_privacy_papers

PACKAGES = [Path(package.__path__[0]) for package in (torch_privacy, torch_privacy_papers)]
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
CALLS = {  # the last two parts of what is called
    "torch.load", "torch.save", "np.load", "np.save", "jit.load", "serialization.load", "hub.load",
    "hub.load_state_dict_from_url", "package.PackageImporter",
}  # fmt: skip
SUFFIXES = (".all_gather_object", ".gather_object", "_object_list", "to_pickle", "read_pickle")


def name_of(node: ast.expr) -> str:
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def found_in(text: str) -> list[int]:
    """Returns the lines that can read or write a pickle; ``np.load(..., allow_pickle=False)`` cannot."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            whole = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            inside = [name for name in whole if name.split(".")[0] in MODULES or name == "torch.multiprocessing"]
            lines += [node.lineno] * bool(inside)
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            plain = any(key.arg == "allow_pickle" and getattr(key.value, "value", 0) is False for key in node.keywords)
            plain |= name.startswith("safetensors.")
            is_one = ".".join(name.split(".")[-2:]) in CALLS or name.endswith(SUFFIXES)
            lines += [node.lineno] * (is_one and not plain)
    return lines


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f)", "np.load(f, allow_pickle=True)",
     "dist.broadcast_object_list(x)", "import multiprocessing.connection", "from marshal import loads"],
)  # fmt: skip
def test_what_reads_or_writes_pickles_is_found(code):
    assert found_in(code) == [1]
    assert found_in("np.load(f, allow_pickle=False); json.loads(f); model.load(f)") == []


def test_every_pickle_of_the_package_has_its_reason_beside_it():
    unexplained = []
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        text = path.read_text()
        lines = ["", *text.splitlines()]
        for line in found_in(text):
            if "# pickle: " not in lines[line] + lines[line - 1]:
                unexplained.append(f"{path.name}:{line} {lines[line].strip()}")
    assert unexplained == [], "say in a comment '# pickle: ...' why, or use JSON"
