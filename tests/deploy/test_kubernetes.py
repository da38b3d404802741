"""The Kubernetes manifest: valid under strict schemas, and the properties without which an engine could not map the index."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "deploy/kubernetes"
SIDECAR = MANIFESTS / "sidecar.yaml"


def _pod() -> dict[str, Any]:
    deployment: dict[str, Any] = yaml.safe_load(SIDECAR.read_text())
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def _container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in [*_pod()["initContainers"], *_pod()["containers"]] if c["name"] == name)
    return found


def _environment(name: str) -> dict[str, str]:
    return {e["name"]: e["value"] for e in _container(name)["env"]}


def test_schema() -> None:
    tool = Path(sys.executable).parent / "kubernetes-validate"
    done = subprocess.run([tool, "--strict", SIDECAR], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomization_names_both_images() -> None:
    done = subprocess.run(["kubectl", "kustomize", MANIFESTS], capture_output=True, text=True, timeout=60, check=True)
    pod = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]
    images = [c["image"] for c in [*pod["initContainers"], *pod["containers"]]]
    assert all(image.startswith("registry.example.com/") and ":" in image for image in images)


def test_engine_and_service_share_memory_socket_and_user() -> None:
    volumes = {v["name"]: v for v in _pod()["volumes"]}
    for path, medium in (("/dev/shm", "Memory"), ("/run/draftd", "Memory")):
        names = {m["name"] for c in ("draftd", "engine") for m in _container(c)["volumeMounts"] if m["mountPath"] == path}
        assert len(names) == 1, path
        assert volumes[names.pop()]["emptyDir"]["medium"] == medium
    assert _pod()["securityContext"]["runAsUser"] > 0
    assert all("runAsUser" not in _container(c)["securityContext"] for c in ("draftd", "engine"))


def test_the_engine_dials_the_socket_that_the_service_binds() -> None:
    assert _environment("engine")["DRAFTD_ENDPOINT"] == "unix:" + _environment("draftd")["DRAFTD_SOCKET"]


@pytest.mark.parametrize("name", ["draftd", "engine"])
def test_containers_have_no_privileges(name: str) -> None:
    context = _container(name)["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    # What is read-only needs somewhere to write.
    assert any(m["mountPath"] == "/tmp" for m in _container(name)["volumeMounts"])


def test_service_starts_before_the_engine_and_is_probed_where_it_listens() -> None:
    service = _container("draftd")
    assert service in _pod()["initContainers"]
    assert service["restartPolicy"] == "Always"
    port = next(p["containerPort"] for p in service["ports"] if p["name"] == "http")
    assert _environment("draftd")["DRAFTD_HTTP"] == f"0.0.0.0:{port}"
    assert service["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert service["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}


def test_settings_of_the_service_exist() -> None:
    from draftd.server.config import ENV_PREFIX, ServerConfig

    names = {name.removeprefix(ENV_PREFIX).lower() for name in _environment("draftd") if name.startswith(ENV_PREFIX)}
    assert names
    assert names <= set(ServerConfig.model_fields)
