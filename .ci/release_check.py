# SPDX-License-Identifier: Apache-2.0
"""Checks that this commit can be released, as a user would meet it; `make release-check` runs it.

It clones the repository, builds wheel and sdist from the clone, installs the wheel without constraints in a bare
environment, runs README's blocks and the command there, and reads links, versions and licenses. Every check prints a
line; the exit code is 1 if one failed. It uploads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERMISSIVE = (
    "apache", "bsd", "mit", "psf", "python software foundation", "isc", "hpnd", "mozilla", "mpl", "unlicense", "zlib",
    "cc0", "0bsd", "public domain",
)  # fmt: skip
OF_THE_VENDOR = ("nvidia-", "cuda-", "triton")  # come with PyTorch for CUDA, under NVIDIA's terms
LICENSES = """
import json
from importlib.metadata import distributions
found = {}
for one in distributions():
    said = one.metadata
    found[said["Name"]] = [said.get("License-Expression") or "", (said.get("License") or "")[:80]]
    found[said["Name"]] += [text for text in said.get_all("Classifier") or () if text.startswith("License")]
print(json.dumps(found))
"""
PUBLIC_FILES = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")


class Failed(Exception):
    """Raised by a check, with what is wrong."""


def called(command: list[str | Path], cwd: Path, **environment: str) -> str:
    """Returns what a command prints; raises `Failed` with its end if it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command[:4]))} ...: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


class Release:
    """The commit, its clone, what was built of it, and the bare environment.

    Args:
        folder: where everything is made.
        python: with which the bare environment is made.
    """

    def __init__(self, folder: Path, python: str):
        self.clone, self.dist, self.python = folder / "clone", folder / "dist", python
        self.environment, self.elsewhere = folder / "bare", folder / "elsewhere"
        self.elsewhere.mkdir()

    @property
    def bin(self) -> Path:
        """The folder of the bare environment's programs."""
        return self.environment / ("Scripts" if os.name == "nt" else "bin")

    @property
    def project(self) -> dict:
        """The table ``project`` of pyproject.toml."""
        return tomllib.loads((self.clone / "pyproject.toml").read_text())["project"]

    def text(self, name: str) -> str:
        """Returns a file of the clone."""
        return (self.clone / name).read_text(encoding="utf-8")

    # The checks, in this order

    def clean_clone(self) -> str:
        """Clones the commit; what is not committed is not released."""
        called(["git", "clone", "--quiet", "--no-hardlinks", ROOT, self.clone], ROOT)
        changed = called(["git", "status", "--porcelain"], ROOT).strip()
        if changed:
            raise Failed(f"not committed: {' '.join(changed.split())[:300]}")
        return called(["git", "log", "-1", "--format=%h %s"], self.clone).strip()

    def same_version(self) -> str:
        """The version is the same in four files, and has no tag yet."""
        version = self.project["version"]
        places = {
            "torch_privacy/support/version.py": f'__version__ = "{version}"',
            "CHANGELOG.md": f"\n## {version}",
            "CITATION.cff": f"\nversion: {version}\n",
        }
        if wrong := [name for name, words in places.items() if words not in self.text(name)]:
            raise Failed(f"{version} of pyproject.toml is not in {', '.join(wrong)}")
        if f"v{version}" in called(["git", "tag"], self.clone).split():
            raise Failed(f"v{version} was tagged before")
        return version

    def built(self) -> str:
        """Builds the wheel from the clone and again from the sdist; both hold the same files."""
        called([sys.executable, "-m", "hatchling", "build", "-d", self.dist], self.clone)
        (wheel,), (sdist,) = self.dist.glob("*.whl"), self.dist.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(self.dist / "unpacked", filter="data")
            held = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
        (unpacked,) = (self.dist / "unpacked").iterdir()
        called([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", self.dist / "again"], unpacked)
        (again,) = (self.dist / "again").glob("*.whl")
        first, second = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, again))
        if first != second:
            raise Failed(f"the wheel of the sdist differs: {sorted(first ^ second)[:5]}")
        if lacking := [name for name in PUBLIC_FILES if name not in held]:
            raise Failed(f"the sdist lacks {', '.join(lacking)}")
        return f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}, {sdist.stat().st_size / 1e6:.1f} MB"

    def installed(self) -> str:
        """Installs the wheel in a bare environment, without constraints."""
        (wheel,) = self.dist.glob("*.whl")
        called([self.python, "-m", "venv", self.environment], self.elsewhere)
        called([self.bin / "python", "-m", "pip", "install", "--quiet", wheel], self.elsewhere)
        called([self.bin / "python", "-m", "pip", "check"], self.elsewhere)
        shown = (
            "import sys, torch, torch_privacy as tp; print(tp.__version__, sys.version.split()[0], torch.__version__)"
        )
        version, python, torch = called([self.bin / "python", "-c", shown], self.elsewhere).split()
        if version != self.project["version"]:
            raise Failed(f"it says to be {version}")
        return f"Python {python}, torch {torch}"

    def readme_runs(self) -> str:
        """Runs README's Python blocks outside of the clone; their outputs begin as printed."""
        blocks = re.findall(r"^```(python|text)\n(.*?)^```", self.text("README.md"), re.MULTILINE | re.DOTALL)
        program = "\n".join(code for language, code in blocks if language == "python")
        found = called([self.bin / "python", "-W", "error", "-c", program], self.elsewhere)
        for text in (text for language, text in blocks if language == "text"):
            if text.split()[0] not in found:
                raise Failed(f"README prints {text.strip()!r}, and it was {found.strip()!r}")
        return found.strip()

    def command_works(self) -> str:
        """Trains by the command, and verifies the run."""
        command = self.bin / "torch-privacy"
        called(
            [command, "train", "adult", "--epochs", "0.2", "--no-baseline", "--quiet", "--run", "run"], self.elsewhere
        )
        called([command, "verify", "run"], self.elsewhere)
        if not (self.elsewhere / "run" / "report.html").is_file():
            raise Failed("the run has no report")
        return called([command, "--version"], self.elsewhere).strip()

    def links_lead(self) -> str:
        """Every link inside the repository leads to a file of the clone, and to a heading of it."""
        pages = [*self.clone.glob("*.md"), *self.clone.glob("docs/*.md"), *self.clone.glob(".github/**/*.md")]
        count = 0
        for page in pages:
            for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
                path, _, anchor = link.partition("#")
                if re.match(r"\w+:", link):
                    continue
                count += 1
                target = page.parent / path if path else page
                if not target.exists():
                    raise Failed(f"{page.relative_to(self.clone)} links to {link}, which is not committed")
                if anchor and target.suffix == ".md" and anchor not in anchors(target):
                    raise Failed(f"{page.relative_to(self.clone)} links to {link}, which has no such heading")
        return f"{count} links on {len(pages)} pages"

    def licenses_allow(self) -> str:
        """Every package that comes along has a permissive license in its metadata."""
        found = json.loads(called([self.bin / "python", "-c", LICENSES], self.elsewhere))
        wrong = {
            name: words
            for name, words in found.items()
            if not name.startswith(OF_THE_VENDOR)
            and not any(known in text.lower() for text in words for known in PERMISSIVE)
        }
        if wrong:
            raise Failed(f"no permissive license is named by {wrong}")
        return f"{len(found)} packages"


CHECKS: tuple[tuple[str, Callable[[Release], str]], ...] = (
    ("clean clone", Release.clean_clone),
    ("version", Release.same_version),
    ("wheel and sdist", Release.built),
    ("links", Release.links_lead),
    ("bare environment", Release.installed),
    ("README's blocks", Release.readme_runs),
    ("command", Release.command_works),
    ("licenses", Release.licenses_allow),
)
NEEDS = {"bare environment": "wheel and sdist", "README's blocks": "bare environment", "command": "bare environment"}
NEEDS |= {"licenses": "bare environment"}


def anchors(page: Path) -> set[str]:
    """Returns the names by which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def outcomes(release: Release) -> Iterator[tuple[str, bool, str]]:
    """Yields each check's name, whether it passed, and what it found; skips what needs a failed one."""
    failed: set[str] = set()
    for name, check in CHECKS:
        if NEEDS.get(name) in failed:
            failed.add(name)
            yield name, False, f"not tried, for lack of: {NEEDS[name]}"
            continue
        try:
            yield name, True, check(release)
        except Failed as error:
            failed.add(name)
            yield name, False, str(error)


def main() -> int:
    """Runs all checks and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the bare environment")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passed = True
        for name, is_right, text in outcomes(Release(Path(folder), given.python)):
            print(f"{'ok' if is_right else 'FAILED':<7} {name:<17} {text}", flush=True)
            passed &= is_right
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
