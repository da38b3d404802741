"""What holds for the repository as a whole: links, commands that the documents name, versions, and which package may import which.

It reads files only and starts nothing.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"build", "dist", "__pycache__"}
TEXT = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", ".proto", ".lock", ".txt", ""}


def _files() -> Iterator[Path]:
    """Files of the checkout, without what tools make; symlinks are not followed."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            f for f in folders if f not in GENERATED and not f.endswith(".egg-info") and (f == ".ci" or not f.startswith("."))
        )
        # In a worktree of git it is a file.
        yield from (Path(folder) / name for name in sorted(names) if name != ".git")


def _markdown() -> list[Path]:
    return [path for path in _files() if path.suffix == ".md"]


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("document", _markdown(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            if anchor not in {_anchor(h) for h in headings}:
                broken.append(target)
    assert not broken


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_make_targets_in_documents_exist() -> None:
    named = {
        (str(document.relative_to(ROOT)), target)
        for document in _markdown()
        for target in re.findall(r"`make ([a-z][a-z-]*)|^(?:\$ )?make ([a-z][a-z-]*)", document.read_text(), flags=re.MULTILINE)
        for target in target
        if target
    }
    assert named, "no document names a make target"
    assert {target for _, target in named} <= _make_targets()


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_commands_in_readme_exist() -> None:
    from draftd.server.cli.app import app

    named = set(re.findall(r"`draftd ([a-z]+)", (ROOT / "README.md").read_text()))
    assert {command.name for command in app.registered_commands} == named


def test_files_named_in_readme_and_contributing_exist() -> None:
    missing = []
    for document in ("README.md", "CONTRIBUTING.md"):
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", (ROOT / document).read_text()):
            if "/" in name and not (ROOT / name).exists():
                missing.append(f"{document}: {name}")
    assert not missing


def test_version_is_the_newest_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == version


def test_lock_pins_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["server"], *extras["bench"], *extras["dev"]]
    names = {re.split(r"[\[<>=!~ ;]", w, maxsplit=1)[0].lower().replace("_", "-") for w in wanted} - {"draftd"}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9.-]+(\[[a-z,-]+\])?==\S+", line) for line in lines)
    assert names <= {line.partition("==")[0] for line in lines}


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.~$}])/(?:work|root|home|Users)/\w")
    found = []
    for path in _files():
        if path.suffix in TEXT and not path.is_symlink():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


FORBIDDEN = {
    "proto": ("draftd.drafter", "draftd.server", "draftd.client"),
    "drafter": ("draftd.server", "draftd.client", "draftd.proto", "grpc", "google.protobuf"),
    "client": ("draftd.server",),
}


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file of draftd imports, wherever in it."""
    package = ["draftd", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_layers(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in _imports(path)
        if any(name == f or name.startswith(f + ".") for f in FORBIDDEN[package])
    ]
    assert not wrong
