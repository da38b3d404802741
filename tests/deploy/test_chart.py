"""The Helm chart: what it renders is valid under strict schemas, and lets engines map the index without privileges."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_args

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic.fields import FieldInfo

from draftd.server.config import ServerConfig, load_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/draftd"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES = (CHART / "values.yaml").read_text()
OLDEST_RELEASE = re.search(r">=([\d.]+)-0", (CHART / "Chart.yaml").read_text())[1]  # type: ignore[index]
CRDS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "crds").glob("*.json"))}

MONITORED: dict[str, Any] = {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "gpu": {"gpu": {"enabled": True}, "config": {"device": "cuda"}, "cache": {"hostPath": "/var/lib/draftd/kernels"}, **MONITORED},
    "insecure": {
        "tcp": {"enabled": True, "insecure": True},
        "http": {"hosts": ["draftd.example.com", ".internal"]},
        "networkPolicy": {"enabled": False},
    },
    "sidecar-cpu": {"mode": "sidecar", "engine": {"image": "engine:1"}, "replicas": 2, "data": {"type": "emptyDir"}, **MONITORED},
    "sidecar-claim": {"mode": "sidecar", "engine": {"image": "engine:1"}, "data": {"type": "claim", "claim": "corpus"}},
    "bare": {"prepareHostPaths": {"enabled": False}, "networkPolicy": {"metricsFrom": []}, "config": None},
    "replicated": {"replicate": {"servers": "nats://nats.nats:4222", "namespaces": "team-*"}},
    "replicated-sidecar": {
        "mode": "sidecar",
        "engine": {"image": "engine:1"},
        "replicate": {
            "servers": "tls://a:4222, tls://b:4222",
            "secretName": "nats",
            "credentials": True,
            "ca": True,
            "clientCertificate": True,
        },
    },
    "settings": {"config": {"draft_min_token_prob": 0.25, "http_docs": True, "log_level": "debug", "quota_tokens": 268_435_456}},
}
CASES |= {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "deploy/helm/examples").glob("*.yaml"))}

every_case = pytest.mark.parametrize("case", CASES)


@cache
def _rendered(case: str) -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values=CASES[case], name="draftd", namespace="inference")


def _objects(case: str) -> list[dict[str, Any]]:
    texts = [text for name, text in _rendered(case).items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def _one(case: str, *kinds: str) -> dict[str, Any]:
    (found,) = [document for document in _objects(case) if document["kind"] in kinds]
    return found


def _pod(case: str) -> dict[str, Any]:
    spec: dict[str, Any] = _one(case, "DaemonSet", "Deployment")["spec"]["template"]["spec"]
    return spec


def _containers(case: str) -> dict[str, dict[str, Any]]:
    pod = _pod(case)
    return {container["name"]: container for container in [*pod.get("initContainers", []), *pod["containers"]]}


def _mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def _environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container.get("env", []) if "value" in variable}


def _settings(case: str) -> dict[str, Any]:
    files = [document["data"] for document in _objects(case) if document["kind"] == "ConfigMap"]
    (text,) = [data["draftd.toml"] for data in files if "draftd.toml" in data]
    return tomllib.loads(text)


@every_case
def test_lint_is_clean(case: str) -> None:
    report = helm_python.lint(CHART, values=CASES[case], strict=True)
    assert report["total_charts_linted"] == 1
    assert not report["errors"]
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


@every_case
def test_objects_are_valid_under_strict_schemas(case: str) -> None:
    objects = _objects(case)
    assert {"ConfigMap", "Service"} < {document["kind"] for document in objects}
    for document in objects:
        if document["kind"] in CRDS:
            jsonschema.validate(document, CRDS[document["kind"]])
        else:
            # Claims of devices are younger than the oldest release that the chart supports.
            claims = "resourceClaims" in json.dumps(document) or document["kind"] == "ResourceClaimTemplate"
            for release in {"1.34.0" if claims else OLDEST_RELEASE, kubernetes_validate.latest_version()}:
                kubernetes_validate.validate(document, release, strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(set(names)) == len(names)


def test_every_kind_is_rendered_by_some_case() -> None:
    kinds = {document["kind"] for case in CASES for document in _objects(case)}
    wanted = {kind for path in (CHART / "templates").glob("*.yaml") for kind in re.findall(r"^kind: (\w+)", path.read_text(), re.MULTILINE)}
    assert kinds == wanted
    assert set(CRDS) < kinds


def test_every_value_is_explained() -> None:
    lines = VALUES.splitlines()
    unexplained = []
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        key = re.fullmatch(r"(|  )\w+:( .+)?", line)
        # A group may leave it to its members, and a member to its group.
        member_of_group = line.startswith("  ") and line.endswith(":")
        if key and not any(neighbour.lstrip().startswith("#") for neighbour in (above, below if line.endswith(":") else "")):
            unexplained += [] if member_of_group else [line]
    assert not unexplained


def test_every_value_is_in_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    defaults = yaml.safe_load(VALUES)
    assert set(SCHEMA["properties"]) - {"global"} == set(defaults)
    for name, about in SCHEMA["properties"].items():
        if about.get("additionalProperties") is False and name != "config":
            assert set(about["properties"]) - {"requests", "limits"} == set(defaults[name]) - {"requests", "limits"}, name


MADE_BY_THE_CHART = {
    *("socket", "shm_root", "http", "listen", "insecure", "tls_cert", "tls_key", "tls_client_ca", "http_hosts", "http_tls"),
    *("token_file", "require_token", "data_dir", "node_name"),
    *(name for name in ServerConfig.model_fields if name.startswith("replicate")),
}


def _schema_of(info: FieldInfo) -> dict[str, Any]:
    """What JSON Schema says of one setting: a pod whose setting is wrong does not start, and nobody sees why until it is deployed."""
    if info.annotation is bool:
        return {"type": "boolean"}
    if info.annotation in (int, float):
        (low,), (high,) = ([getattr(item, end) for item in info.metadata if hasattr(item, end)] for end in ("ge", "le"))
        return {"type": "integer" if info.annotation is int else "number", "minimum": low, "maximum": high}
    choices = [choice for choice in get_args(info.annotation) if isinstance(choice, str)]
    return {"enum": choices} if choices else {"type": "string"}


def test_schema_knows_every_setting_and_its_range() -> None:
    about = SCHEMA["properties"]["config"]
    fields = ServerConfig.model_fields
    assert fields.keys() >= MADE_BY_THE_CHART
    assert about["additionalProperties"] is False
    assert about["properties"] == {name: _schema_of(info) for name, info in fields.items() if name not in MADE_BY_THE_CHART}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "statefulset"}, "/mode"),
        ({"mode": "sidecar"}, "/engine/image"),
        ({"tcp": {"enabled": True}}, "/tls/secretName"),
        ({"tcp": {"enabled": True, "insecure": True}, "tls": {"secretName": "s"}}, "/tls/secretName"),
        ({"tls": {"clientCA": True}}, "/tls/secretName"),
        ({"http": {"tls": True}}, "/tls/secretName"),
        ({"tokens": {"required": True}}, "/tokens/secretName"),
        ({"data": {"type": "claim", "claim": "c"}}, "/data/type"),
        ({"mode": "sidecar", "engine": {"image": "e"}, "data": {"type": "hostPath"}}, "/data/type"),
        ({"mode": "sidecar", "engine": {"image": "e"}, "data": {"type": "claim", "claim": "c"}, "replicas": 2}, "/replicas"),
        ({"config": {"device": "cuda"}}, "/gpu/enabled"),
        ({"runAs": {"user": 0}}, "/runAs/user"),
        ({"config": {"socket": "/elsewhere"}}, "additional properties 'socket' not allowed"),
        ({"config": {"quota_token": 8192}}, "additional properties 'quota_token' not allowed"),
        ({"config": {"quota_tokens": [1]}}, "/config/quota_tokens"),
        ({"config": {"quota_tokens": "many"}}, "/config/quota_tokens"),
        ({"config": {"max_k": 65}}, "/config/max_k"),
        ({"config": {"policy": "forest"}}, "/config/policy"),
        ({"config": {"idle_namespace_s": 60}}, "/data/type"),
        ({"shm": {"hostPath": "/var/tmp/draftd"}}, "/shm/hostPath"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest"),
        ({"replicate": {"servers": "nats://user:password@a:4222"}}, "/replicate/servers"),
        ({"replicate": {"servers": "nats://a:4222", "secretName": "s", "ca": True}}, "/replicate/servers"),
        ({"replicate": {"servers": "nats://a:4222", "credentials": True}}, "/replicate/secretName"),
        ({"config": {"replicate": "nats://a:4222"}}, "additional properties 'replicate' not allowed"),
        ({"tokens": {"secretName": "s"}, "serviceMonitor": {"enabled": True}}, "/serviceMonitor/tokenSecret"),
        ({"unknown": True}, "unknown"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], named: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError, match=re.escape(named)):
        chart.render(values=values, name="draftd")


@every_case
def test_the_service_takes_the_settings(case: str, tmp_path: Path) -> None:
    file = tmp_path / "draftd.toml"
    file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in _settings(case).items()))
    loaded = load_config({}, file)
    given = {**yaml.safe_load(VALUES)["config"], **(CASES[case].get("config") or {})} if CASES[case].get("config", {}) is not None else {}
    for key, value in given.items():
        assert getattr(loaded.config, key) == value
    # By the name of the Service, as the host of an HTTP request, and by those that were given.
    name = _one(case, "Service")["metadata"]["name"]
    asked_for = [f"{name}{end}" for end in ("", ".inference", ".inference.svc", ".inference.svc.cluster.local")]
    assert loaded.config.http_hosts.split(",") == [*asked_for, *CASES[case].get("http", {}).get("hosts", [])]
    assert loaded.config.http == f"0.0.0.0:{_containers(case)['draftd']['ports'][0]['containerPort']}"
    assert set(_environment(_containers(case)["draftd"])) - {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} == {"DRAFTD_CONFIG"}
    mounted = _mounts(_containers(case)["draftd"])
    of_nats = ("replicate_credentials", "replicate_tls_ca", "replicate_tls_cert", "replicate_tls_key")
    files = [getattr(loaded.config, name) for name in ("tls_cert", "tls_key", "tls_client_ca", "token_file", *of_nats)]
    assert all(str(path.parent) in mounted for path in files if path)
    assert len([path for path in files if path]) == (4 if case in ("tls", "replicated-sidecar") else 0)


@pytest.mark.parametrize(("case", "field"), [("replicated", "spec.nodeName"), ("replicated-sidecar", "metadata.name")])
def test_node_has_a_name_in_the_stream_that_is_its_own(case: str, field: str) -> None:
    (name,) = [variable for variable in _containers(case)["draftd"]["env"] if variable["name"] == "DRAFTD_NODE_NAME"]
    assert name["valueFrom"]["fieldRef"]["fieldPath"] == field


def _is_prepared(case: str, volume: str) -> bool:
    return volume in _mounts(_containers(case)["prepare"]).values()


@every_case
def test_what_is_mounted_exists_and_what_exists_is_mounted(case: str) -> None:
    mounted = {name for container in _containers(case).values() for name in _mounts(container).values()}
    assert mounted == {volume["name"] for volume in _pod(case)["volumes"]}
    config = ServerConfig(**_settings(case))
    mounts = _mounts(_containers(case)["draftd"])
    paths = [config.socket_path(), config.shm_directory(), *([config.data_dir] if config.data_dir else [])]
    assert len(paths) == 2 + (CASES[case].get("data", {"type": "none"})["type"] != "none")
    for path in paths:
        assert path
        # A directory that the service makes itself: a volume's own may belong to root, or be open to everybody.
        assert case == "bare" or str(path) not in mounts or _is_prepared(case, mounts[str(path)]), path
        assert [mount for mount in mounts if Path(mount) in (path, *path.parents)], f"{path} is on the read-only root"
    assert len(str(config.socket_path())) < 100


@every_case
def test_containers_have_no_privileges(case: str) -> None:
    pod = _pod(case)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    for name, container in _containers(case).items():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        if name == "prepare":
            assert context["capabilities"]["add"] == ["CHOWN"]
            assert container["command"][0] == "chown"
        else:
            assert "add" not in context["capabilities"]
            assert "runAsUser" not in context
            assert "/tmp" in _mounts(container)


def test_root_prepares_exactly_the_directories_of_the_node_that_the_service_writes() -> None:
    for case in ("default", "gpu", "tls"):
        prepare, service = _containers(case)["prepare"], _containers(case)["draftd"]
        of_node = {volume["name"] for volume in _pod(case)["volumes"] if "hostPath" in volume}
        assert set(_mounts(prepare).values()) == of_node
        assert set(prepare["command"][2:]) == set(_mounts(prepare))
        assert of_node < set(_mounts(service).values())
    assert "prepare" not in _containers("bare")


def test_engine_and_sidecar_share_processes_memory_socket_user_and_gpu() -> None:
    pod = _pod("vllm-sidecar")
    service, engine = (_containers("vllm-sidecar")[name] for name in ("draftd", "engine"))
    assert pod["shareProcessNamespace"] is True
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for path in ("/dev/shm", "/run/draftd"):
        assert _mounts(service)[path] == _mounts(engine)[path]
        assert volumes[_mounts(service)[path]]["emptyDir"]["medium"] == "Memory"
    # Compiled code is not shared: whoever writes it decides what the other runs.
    assert not {_mounts(service)[path] for path in ("/tmp", "/var/cache/draftd")} & set(_mounts(engine).values())
    assert service["resources"]["claims"] == engine["resources"]["claims"] == [{"name": "gpu"}]
    assert pod["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": _one("vllm-sidecar", "ResourceClaimTemplate")["metadata"]["name"]}
    ]
    settings = _settings("vllm-sidecar")
    assert _environment(engine)["DRAFTD_ENDPOINT"] == "unix:" + settings["socket"]
    assert _environment(engine)["DRAFTD_SHM_ROOT"] == settings["shm_root"]


def test_sidecar_that_is_not_ready_keeps_no_engine_from_starting_or_being_reached() -> None:
    service = _containers("vllm-sidecar")["draftd"]
    assert service in _pod("vllm-sidecar")["initContainers"]
    assert service["restartPolicy"] == "Always"
    assert "startupProbe" not in service
    assert "readinessProbe" not in service
    assert service["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize(("case", "scheme"), [("default", "http"), ("tls", "https")])
def test_daemon_is_probed_and_scraped_where_it_answers(case: str, scheme: str) -> None:
    service = _containers(case)["draftd"]
    for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
        assert service[probe]["httpGet"] == {"path": path, "port": "http", "scheme": scheme.upper()}
    # Compiling the kernels takes well under this on a slow machine.
    assert service["startupProbe"]["periodSeconds"] * service["startupProbe"]["failureThreshold"] >= 120
    if case == "tls":
        endpoint = _one("tls", "ServiceMonitor")["spec"]["endpoints"][0]
        assert endpoint["scheme"] == scheme
        assert endpoint["authorization"]["credentials"] == {"name": "draftd-scraper", "key": "token"}


def test_tokens_are_open_to_no_others() -> None:
    (tokens,) = [volume["secret"] for volume in _pod("tls")["volumes"] if volume["name"] == "tokens"]
    assert tokens["defaultMode"] & 0o037 == 0


def test_notes_tell_engines_of_other_pods_what_the_daemonset_mounts() -> None:
    notes = next(text for name, text in _rendered("default").items() if name.endswith("NOTES.txt"))
    snippet = yaml.safe_load(notes[notes.index("  spec:") : notes.index("\n\nMetrics")])["spec"]
    (engine,) = snippet["containers"]
    settings = _settings("default")
    assert _environment(engine) == {"DRAFTD_ENDPOINT": "unix:" + settings["socket"], "DRAFTD_SHM_ROOT": settings["shm_root"]}
    of_daemon = {volume["hostPath"]["path"] for volume in _pod("default")["volumes"] if "hostPath" in volume}
    assert {volume["hostPath"]["path"] for volume in snippet["volumes"]} == of_daemon
    service_mounts = set(_mounts(_containers("default")["draftd"]))
    assert set(_mounts(engine)) <= service_mounts
    assert snippet["securityContext"]["runAsUser"] == _pod("default")["securityContext"]["runAsUser"]


@pytest.mark.parametrize(
    ("values", "blocked"),
    [
        ({}, ""),
        ({"replicate": {"servers": "nats://a:4222"}}, "NATS"),
        ({"config": {"otlp_endpoint": "http://collector:4317"}}, "the collector of traces"),
        ({"replicate": {"servers": "nats://a:4222"}, "networkPolicy": {"egress": [{}]}}, ""),
        ({"replicate": {"servers": "nats://a:4222"}, "networkPolicy": {"enabled": False}}, ""),
        ({"replicate": {"servers": "nats://a:4222"}, "mode": "sidecar", "engine": {"image": "e"}}, ""),
    ],
)
def test_notes_say_what_the_network_policy_keeps_the_service_from(values: dict[str, Any], blocked: str) -> None:
    with helm_python.Chart.load(CHART) as chart:
        notes = next(text for name, text in chart.render(values=values, name="draftd").items() if name.endswith("NOTES.txt"))
    said = [line for line in notes.splitlines() if "networkPolicy.egress" in line]
    assert said == ([f"The service cannot reach {blocked}: networkPolicy.egress is empty."] if blocked else [])


@every_case
def test_nobody_is_let_in_by_a_rule_without_peers(case: str) -> None:
    policies = [document["spec"] for document in _objects(case) if document["kind"] == "NetworkPolicy"]
    assert bool(policies) == CASES[case].get("networkPolicy", {}).get("enabled", True)
    ports = {port["name"] for container in _containers(case).values() for port in container.get("ports", [])}
    for policy in policies:
        for rule in policy["ingress"]:
            assert rule["from"]
            assert {port["port"] for port in rule["ports"]} <= ports
        assert ("Egress" in policy["policyTypes"]) == (policy.get("egress") == [])


def test_scraping_keeps_the_labels_that_alerts_and_dashboard_use() -> None:
    rules = _one("gpu", "ServiceMonitor")["spec"]["endpoints"][0]["relabelings"]
    assert {"targetLabel": "job", "replacement": "draftd"} in rules
    assert {"action": "labeldrop", "regex": "namespace"} in rules
    assert [rule["sourceLabels"] for rule in rules if rule.get("targetLabel") == "instance"]


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert _one("gpu", "PrometheusRule")["spec"] == alerts
    (dashboard,) = [document["data"]["draftd.json"] for document in _objects("gpu") if "draftd.json" in document.get("data", {})]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy/grafana/draftd.json").read_text())
    values = {"prometheusRule": {"enabled": True, "runbookBaseUrl": "https://example.com/draftd/"}}
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values=values, name="draftd")["draftd/templates/prometheusrule.yaml"]
    rule = yaml.safe_load(rendered)["spec"]["groups"][0]["rules"][0]
    assert rule["annotations"]["runbook_url"] == "https://example.com/draftd/docs/operations.md#draftddown"


def test_chart_is_packaged_with_what_its_links_lead_to(tmp_path: Path) -> None:
    with helm_python.Chart.load(CHART) as chart:
        archive = chart.save(tmp_path)
    with helm_python.Chart.load(archive) as chart:
        assert chart.render(values=MONITORED, name="draftd")["draftd/templates/prometheusrule.yaml"].count("alert:") > 10


def test_versions_are_those_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)
    assert _containers("default")["draftd"]["image"] == f"registry.example.com/draftd:{version}"
    assert _containers("gpu")["draftd"]["image"] == f"registry.example.com/draftd:{version}-cuda"
