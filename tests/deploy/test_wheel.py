"""The wheel: it holds every package and the .proto file, installs beside nothing else, and the client needs no extra.

Dependencies are borrowed from the running environment through a .pth file, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("client", "drafter", "proto", "server")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src", *PACKAGES)

# Top-level modules of the [server] and [transformers] extras.
EXTRA = (
    "fastapi grpc_channelz grpc_health grpc_reflection prometheus_client psutil pydantic pydantic_settings rich starlette structlog "
    "tokenizers transformers typer uvicorn uvloop zstandard"
)

WITHOUT_EXTRA = f"""
import importlib, pkgutil, sys
for name in "{EXTRA}".split():
    sys.modules[name] = None
import draftd.client, draftd.drafter
for package in (draftd.client, draftd.drafter):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers", "triton"):  # which an engine brings along
                raise
print(draftd.client.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of an earlier build gets in or stays behind."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    command: list[str | Path] = [*pip, out, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("draftd-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that holds the wheel."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], timeout=60, check=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--no-deps", "--no-index", wheel]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = next(home.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/", env=environment)


def test_holds_every_module_of_every_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"draftd/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".pyi", ".proto", ".html", ".css", ".js"} and "__pycache__" not in path.parts
    }
    assert wanted - held == set()
    assert {"draftd/__init__.py", "draftd/py.typed", "draftd/proto/draftd/v1/draftd.proto"} <= held
    assert not [name for name in held if name.startswith(("tests/", "bench/"))]
    assert [name for name in held if name.endswith("licenses/LICENSE")]


def test_command_line_runs(installed: Path) -> None:
    done = _run(installed / "draftd", "--help")
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_client_needs_no_extra(installed: Path) -> None:
    done = _run(installed / "python", "-c", WITHOUT_EXTRA)
    assert done.returncode == 0, done.stderr
    assert str(installed.parent) in done.stdout
