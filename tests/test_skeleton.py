# SPDX-License-Identifier: Apache-2.0
import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["torch_privacy", "torch_privacy_papers"]  # of one wheel
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


EXTRAS = PROJECT["optional-dependencies"]
OF_USERS = [
    line for extra, lines in EXTRAS.items() if extra not in ("bench", "comparison", "docs", "test") for line in lines
]


def required():
    lines = [*EXTRAS["test"], *EXTRAS["docs"], *OF_USERS, *PROJECT["dependencies"]]
    return [re.split(r"[\[<>=]", line)[0].lower() for line in lines if not line.startswith("torch-privacy[")]


@pytest.mark.parametrize("name", [*required(), "hatchling", "editables"])
def test_constraints_pin_every_dependency(name):
    assert re.fullmatch(r"[0-9][0-9.]*", PINS[name])


@pytest.mark.thorough
def test_package_imports_only_what_it_declares():
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - set(PACKAGES)
    imported_as = {"scikit-learn": "sklearn"}
    needed, optional = (
        {imported_as.get(name, name.replace("-", "_")) for name in (re.split(r"[<>=]", line)[0] for line in lines)}
        for lines in (PROJECT["dependencies"], OF_USERS)
    )
    assert needed <= foreign <= needed | optional | {"triton"}  # PyTorch for CUDA brings it


def test_constraints_pin_the_torch_that_the_issue_names():
    assert PINS["torch"] == "2.13.0"


def test_version_is_the_same_everywhere():
    import torch_privacy

    assert torch_privacy.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_type_checkers_see_the_public_names():
    """They are written twice: where each is imported from, and again for type checkers, which run nothing."""
    import torch_privacy

    nodes = ast.walk(ast.parse((ROOT / "torch_privacy/__init__.py").read_text()))
    seen = {name.asname for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names if name.asname}
    assert seen - {"__version__", "huggingface"} == set(torch_privacy.__all__)


def test_source_files_name_their_license():
    paths = [path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*.py")]
    license_line = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [path for path in paths if not path.read_text().startswith(license_line)] == []


def test_no_delta_is_printed_to_the_nearest():
    """It is rounded up, by ``privacy.rounding.short``: to the nearest it may be one at which epsilon is larger."""
    nearest = re.compile(r"\bdelta:[.0-9]*[efg]\}")
    assert [path for path in (ROOT / "torch_privacy").rglob("*.py") if nearest.search(path.read_text())] == []


def test_readme_gives_the_test_command_that_ci_calls():
    assert "make test " in (ROOT / "README.md").read_text()
    assert re.search(r"^make test VENV=", (ROOT / ".ci/run").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("version_check", "message"),
    [("sys.version_info", "must be Python 3.11 or newer"), ("import ensurepip", "apt install python3-venv")],
)
def test_make_says_what_is_missing(tmp_path, version_check, message):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{version_check}"*) exit 1;; esac\n')
    python.chmod(0o755)
    command = ["make", "test", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def test_first_section_of_the_changelog_is_about_epsilon():
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Changes to a reported epsilon"


def test_the_wheel_holds_every_module():
    """A pattern in .gitignore, such as one for folders of runs, leaves files out of the wheel."""
    from hatchling.builders.wheel import WheelBuilder

    held = {Path(file.distribution_path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    modules = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules - held == set()


SENTENCES_NEVER_BEGIN_WITH = {"Of", "As", "By", "Those", "So", "What", "Whose", "Which", "How", "Whether"}


def test_docstrings_begin_with_sentences():
    """A headless clause ("Of the rows ...", "What meets what") must be read twice."""
    headless = re.compile(rf'^ *r?"""(?:{"|".join(SENTENCES_NEVER_BEGIN_WITH)})\b.*', re.MULTILINE)
    paths = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    assert [(path.name, line) for path in paths for line in headless.findall(path.read_text())] == []


WITHOUT_PAGES = """
import sys
for name in ("matplotlib", "rich", "typer", "transformers", "pandas", "sklearn"):
    sys.modules[name] = None  # as if it were not installed
import warnings
import torch
import torch_privacy as tp
data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
model = torch.nn.Linear(3, 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, expected_batch_size=8, num_steps=2,
        clipping=tp.Flat(1.0), noise_multiplier=1.0, delta=1e-3, run_folder=sys.argv[1])
    for x, y in training:
        training.step(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
assert any("no report" in str(one.message) for one in caught)
print(training.spent().epsilon.high > 0)
"""


@pytest.mark.thorough
def test_a_training_needs_neither_the_command_nor_its_page(tmp_path):
    call = [sys.executable, "-c", WITHOUT_PAGES, str(tmp_path / "run")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr
    assert {"results.json", "model.safetensors", "privacy.json"} <= {path.name for path in (tmp_path / "run").iterdir()}


def release_check():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_release_check_notices_other_versions_and_links_that_lead_nowhere(tmp_path):
    check = release_check()
    release = check.Release(tmp_path, sys.executable)
    subprocess.run(["git", "init", "-q", str(release.clone)], check=True)
    (release.clone / "torch_privacy" / "support").mkdir(parents=True)
    for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", "torch_privacy/support/version.py"):
        shutil.copy(ROOT / name, release.clone / name)
    assert release.same_version() == PROJECT["version"]
    (release.clone / "CITATION.cff").write_text("version: 9.9.9\n")
    with pytest.raises(check.Failed, match=r"is not in CITATION\.cff"):
        release.same_version()
    (release.clone / "CHANGELOG.md").write_text("# One\n[a](#one) [b](CITATION.cff) [c](https://x.org)")
    assert release.links_lead() == "2 links on 1 pages"
    for wrong in ("CHANGELOG.md#two", "missing.md"):
        (release.clone / "README.md").write_text(f"[x]({wrong})")
        with pytest.raises(check.Failed, match=re.escape(f"README.md links to {wrong}")):
            release.links_lead()
    assert {name for name, _ in check.CHECKS} >= {*check.NEEDS, *check.NEEDS.values()}
