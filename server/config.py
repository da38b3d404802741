"""The service's configuration: one typed class, read from flags, DRAFTD_* environment variables, a TOML file and defaults.

Every setting carries its unit, range and meaning, for draftd.server.config_docs. It does not start anything.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from draftd.drafter.corpus_config import DEVICE
from draftd.drafter.params import MAX_DEPTH, MAX_K, DraftParams, Policy
from draftd.server.replicate.settings import NODE_NAME, STREAM_NAME, servers_of

ENV_PREFIX = "DRAFTD_"
OFF = "off"
_HOST = re.compile(r"\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


class ConfigError(Exception):
    """A setting is unknown, malformed or out of range; the message names the setting and where it came from."""


def _setting(default: Any, group: str, unit: str, description: str, **constraints: Any) -> Any:
    """A field with its documentation; `allowed` overrides the range derived from ge/le."""
    allowed = constraints.pop("allowed", "")
    return Field(default, description=description, json_schema_extra={"group": group, "unit": unit, "allowed": allowed}, **constraints)


class ServerConfig(BaseSettings):
    """Effective configuration of one service; immutable."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    socket: str = _setting(
        "",
        "Endpoints",
        "path",
        "Unix socket of the gRPC services, mode 0600, in a directory that only its owner can write to. "
        "Empty: $XDG_RUNTIME_DIR/draftd.sock, else /tmp/draftd-UID/draftd.sock.",
        allowed="a path of at most 100 bytes, or off",
    )
    listen: str = _setting(
        "",
        "Endpoints",
        "host:port",
        "Also serve gRPC over TCP here; needs tls_cert and tls_key, or insecure. Port 0 takes a free one.",
        allowed="host:port, or empty",
    )
    insecure: bool = _setting(False, "Endpoints", "", "Serve TCP without TLS: whoever is on the way can read all of it, tokens included.")
    tls_cert: Path | None = _setting(None, "Endpoints", "path", "PEM certificate chain of the TCP endpoint.", allowed="a file")
    tls_key: Path | None = _setting(None, "Endpoints", "path", "PEM private key of the TCP endpoint.", allowed="a file")
    tls_client_ca: Path | None = _setting(
        None,
        "Endpoints",
        "path",
        "PEM certificates of the authorities whose client certificates TCP accepts; a client without one is refused (mTLS).",
        allowed="a file",
    )
    http: str = _setting(
        "127.0.0.1:9464",
        "Endpoints",
        "host:port",
        "HTTP endpoint of the dashboard, /healthz, /readyz, /metrics, /v1/status and /v1/history. Port 0 takes a free one.",
        allowed="host:port, or off",
    )
    http_tls: bool = _setting(False, "Endpoints", "", "Serve HTTPS, with the certificates of TCP.")
    http_docs: bool = _setting(False, "Endpoints", "", "Serve the OpenAPI pages /docs and /openapi.json too.")
    max_message_bytes: int = _setting(
        16 * 2**20, "Endpoints", "bytes", "Largest gRPC message accepted; a larger one is RESOURCE_EXHAUSTED.", ge=2**16, le=2**30
    )

    token_file: Path | None = _setting(
        None,
        "Security",
        "path",
        "TOML file of tokens, as `draftd token` writes it; read again when it changes and on SIGHUP. With it, every call over TCP and HTTP "
        "needs a token, but for the probes. Its mode must be 0600 or 0640.",
        allowed="a file",
    )
    require_token: bool = _setting(False, "Security", "", "Calls over the Unix socket need a token too.")
    rate_requests: float = _setting(
        0.0, "Security", "requests/s", "Most requests of a principal whose token sets no limit of its own; 0 is no limit.", ge=0, le=1e9
    )
    rate_tokens: float = _setting(
        0.0, "Security", "tokens/s", "Most corpus tokens that such a principal sends; 0 is no limit.", ge=0, le=1e12
    )
    quota_attachments: int = _setting(
        0,
        "Security",
        "attachments",
        "Most live attachments of a principal whose token sets no limit of its own; 0 is no limit but max_attachments.",
        ge=0,
        le=4096,
    )
    quota_namespaces: int = _setting(
        0,
        "Security",
        "namespaces",
        "Such a principal makes no namespace where as many exist that its patterns fit; 0 is no limit but max_namespaces.",
        ge=0,
        le=4096,
    )
    http_hosts: str = _setting(
        "",
        "Security",
        "",
        "Names under which HTTP may be asked for, beside localhost, this machine's, the one in http, and addresses. A request by any other "
        "is refused, so that no web page gets at it by a name that it has point here. A leading dot is for all names below; * is any name.",
        allowed="host names, separated by commas",
    )

    device: str = _setting(
        "cpu",
        "Corpus",
        "",
        "Where the indexes are and drafting happens. A GPU needs PyTorch and Triton: pip install draftd[gpu]. With several GPUs each has a "
        "copy of every index, for the engines on it; the service drafts on the first.",
        allowed="cpu, cuda, cuda:N, or several cuda:N separated by commas",
    )
    device_memory: int = _setting(
        1024,
        "Corpus",
        "MiB",
        "GPU memory allocated at start for all indexes; refreshes and drafting take working memory beside it.",
        ge=1,
        le=2**20,
    )
    shm_root: Path | None = _setting(
        None,
        "Corpus",
        "path",
        "Directory in shared memory for the index and for the tensors of HANDLE engines. Empty: /dev/shm/draftd-UID.",
        allowed="a directory",
    )
    quota_tokens: int = _setting(
        4_194_304, "Corpus", "tokens", "Most tokens a namespace holds; the oldest documents leave first.", ge=4096, le=2**28
    )
    namespace_quotas: str = _setting(
        "",
        "Corpus",
        "",
        "Quotas of namespaces whose name fits a pattern with * and ?, in tokens; the first that fits counts, before quota_tokens.",
        allowed="pattern=tokens, separated by commas",
    )
    depth: int = _setting(
        MAX_DEPTH, "Corpus", "tokens", "Depth to which suffixes are sorted: longest match plus draft that can be seen.", ge=2, le=MAX_DEPTH
    )
    max_namespaces: int = _setting(256, "Corpus", "namespaces", "Most namespaces.", ge=1, le=4096)
    refresh_interval_ms: float = _setting(10.0, "Corpus", "ms", "Pause between refreshes of the index.", ge=0.5, le=1000.0)
    recent_tokens: int = _setting(
        262_144, "Corpus", "tokens", "Size of the recent segment at which it is merged into main.", ge=1024, le=2**26
    )
    live_tokens: int = _setting(
        131_072, "Corpus", "tokens", "Size of the live segment at which it is merged into recent.", ge=512, le=2**24
    )
    keep_generations: int = _setting(
        2**31 - 1,
        "Corpus",
        "generations",
        "Generations kept, the current one included, where AdvanceGeneration does not say.",
        ge=1,
        le=2**31 - 1,
    )

    data_dir: Path | None = _setting(
        None,
        "Persistence",
        "path",
        "Directory of the store, from which the corpus is restored at the start. Empty: nothing outlives the service.",
        allowed="a directory of this user's, or empty",
    )
    store_lag_ms: float = _setting(
        100.0, "Persistence", "ms", "Longest time that committed documents wait to be written together.", ge=1, le=60_000
    )
    durable_timeout_ms: int = _setting(
        10_000,
        "Persistence",
        "ms",
        "Longest time that wait_durable and Import wait for the disk before DEADLINE_EXCEEDED; what was sent is kept.",
        ge=1,
        le=600_000,
    )
    idle_namespace_s: float = _setting(
        0.0,
        "Persistence",
        "s",
        "A namespace that is unused for this long gives its memory back; the next call that names it restores it. 0: never.",
        ge=0,
        le=1e9,
    )

    replicate: str = _setting(
        "",
        "Replication",
        "URL",
        "Share committed documents with other services over these NATS servers with JetStream, of which one is enough. Needs pip install "
        "draftd[nats]. Empty: nothing is shared.",
        allowed="nats://host:port or tls://host:port, separated by commas; or empty",
    )
    replicate_stream: str = _setting(
        "DRAFTD",
        "Replication",
        "",
        "JetStream stream, made if it is missing; services that share have the same.",
        allowed="1 to 64 letters, digits and _ -",
    )
    node_name: str = _setting(
        "",
        "Replication",
        "",
        "Name of this node in the stream, the same over restarts and different from that of every other. Empty: the host's.",
        allowed="at most 253 letters, digits and . _ -",
    )
    replicate_namespaces: str = _setting(
        "",
        "Replication",
        "",
        "Share only namespaces whose name fits one of these patterns with * and ?. Empty: all.",
        allowed="patterns, separated by commas",
    )
    replicate_credentials: Path | None = _setting(
        None,
        "Replication",
        "path",
        "File with what NATS asks for, read at each connection: TOML with user and password, with token, or with nkey, the seed of a user; "
        "or a .creds file. Its mode must be 0600 or 0640.",
        allowed="a file",
    )
    replicate_tls_ca: Path | None = _setting(
        None, "Replication", "path", "PEM certificates of the authorities of tls:// servers. Empty: those of the system.", allowed="a file"
    )
    replicate_tls_cert: Path | None = _setting(
        None, "Replication", "path", "PEM certificate chain that this service shows to tls:// servers.", allowed="a file"
    )
    replicate_tls_key: Path | None = _setting(None, "Replication", "path", "Its PEM private key.", allowed="a file")
    replicate_max_bytes: int = _setting(
        2**30, "Replication", "bytes", "Size of the stream, if this service makes it; the oldest leave first.", ge=2**20, le=2**44
    )
    replicate_max_age_s: float = _setting(
        0.0, "Replication", "s", "Age at which messages leave the stream, if this service makes it. 0: never.", ge=0, le=1e9
    )

    max_k: int = _setting(64, "Limits", "tokens", "Longest draft that may be asked for.", ge=1, le=MAX_K)
    max_rows: int = _setting(1024, "Limits", "rows", "Most rows of one attachment.", ge=1, le=65_536)
    max_length: int = _setting(131_072, "Limits", "tokens", "Longest row or document.", ge=16, le=2**24)
    max_batch: int = _setting(1024, "Limits", "rows", "Most rows or documents in one request.", ge=1, le=65_536)
    max_attachments: int = _setting(256, "Limits", "attachments", "Most live attachments.", ge=1, le=4096)
    lease_ms: int = _setting(
        10_000,
        "Limits",
        "ms",
        "Lease of an attachment; it ends unless a call that names the attachment comes in time.",
        ge=100,
        le=3_600_000,
    )
    visible_timeout_ms: int = _setting(
        5000, "Limits", "ms", "Longest time that wait_visible waits before DEADLINE_EXCEEDED; what was sent is kept.", ge=1, le=600_000
    )

    policy: Policy = _setting(
        "calibrated",
        "Drafting",
        "",
        "Default of DraftParameters.policy: calibrated learns how often it is right; tree is the suffix tree's.",
    )
    tau: float = _setting(0.1, "Drafting", "probability", "Default of DraftParameters.tau, for calibrated.", ge=0.0, le=1.0)
    draft_k: int = _setting(16, "Drafting", "tokens", "Default of DraftParameters.k.", ge=1, le=MAX_K)
    draft_max_depth: int = _setting(64, "Drafting", "tokens", "Default of DraftParameters.max_depth; at most depth.", ge=2, le=MAX_DEPTH)
    draft_spec_factor: float = _setting(2.0, "Drafting", "", "Default of DraftParameters.spec_factor.", ge=0.0, le=1000.0)
    draft_spec_offset: float = _setting(0.0, "Drafting", "tokens", "Default of DraftParameters.spec_offset.", ge=-1000.0, le=1000.0)
    draft_min_token_prob: float = _setting(0.1, "Drafting", "probability", "Default of DraftParameters.min_token_prob.", ge=0.0, le=1.0)

    stop_grace_ms: int = _setting(5000, "Operation", "ms", "On SIGTERM, longest wait for requests in flight.", ge=0, le=600_000)
    otlp_endpoint: str = _setting(
        "",
        "Operation",
        "URL",
        "Send a span of every call to this OTLP/gRPC receiver. Needs OpenTelemetry: pip install draftd[otel]. Headers and certificates "
        "come from OTEL_EXPORTER_OTLP_... variables. Empty: no tracing.",
        allowed="http://host:port, https://host:port, or empty",
    )
    otlp_sample_ratio: float = _setting(
        1.0,
        "Operation",
        "",
        "Share of the traces that are kept; a call that belongs to a caller's trace follows the caller.",
        ge=0.0,
        le=1.0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Operation", "", "Least severe level logged.")
    log_format: Literal["auto", "console", "json"] = _setting(
        "auto", "Operation", "", "Log format on standard error; auto is console on a terminal, else json."
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError(f"{value!r} is not known; it must be cpu, cuda, cuda:N, or several cuda:N with commas")
        return value

    @field_validator("listen", "http")
    @classmethod
    def _host_port(cls, value: str) -> str:
        if value not in ("", OFF):
            parse_address(value)
        return value

    @field_validator("http_hosts")
    @classmethod
    def _hosts(cls, value: str) -> str:
        for name in filter(None, (part.strip() for part in value.split(","))):
            if not _HOST.fullmatch(name):
                raise ValueError(f"{name!r} is not a host name, a dot and a domain, or *")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        scheme, _, address = value.partition("://")
        if value:
            if scheme not in ("http", "https"):
                raise ValueError(f"{value!r} is not http://host:port or https://host:port")
            parse_address(address)
        return value

    @field_validator("replicate")
    @classmethod
    def _servers(cls, value: str) -> str:
        servers_of(value)
        return value

    @field_validator("replicate_stream")
    @classmethod
    def _stream(cls, value: str) -> str:
        if not STREAM_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not 1 to 64 letters, digits and _ -")
        return value

    @field_validator("node_name")
    @classmethod
    def _node(cls, value: str) -> str:
        if not NODE_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not at most 253 letters, digits and . _ -")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.http == "":
            raise ValueError("http: is empty; use host:port, or off")
        if self.listen == OFF:
            raise ValueError("listen: leave it empty to serve no TCP")
        if self.listen and not self.insecure and not (self.tls_cert and self.tls_key):
            raise ValueError("listen: TCP needs tls_cert and tls_key, or insecure")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert: tls_cert and tls_key go together")
        for name in ("tls_client_ca", "http_tls"):
            if getattr(self, name) and not self.tls_cert:
                raise ValueError(f"{name}: needs tls_cert and tls_key")
        if self.require_token and not self.token_file:
            raise ValueError("require_token: needs token_file")
        if self.insecure and self.tls_cert:
            raise ValueError("insecure: cannot be combined with tls_cert and tls_key")
        if self.socket == OFF and not self.listen:
            raise ValueError("socket: is off and listen is empty: there would be no gRPC endpoint")
        if len(os.fsencode(self.socket)) > 100:
            raise ValueError("socket: the path has more than 100 bytes, which the kernel does not take")
        if self.idle_namespace_s and not self.data_dir:
            raise ValueError("idle_namespace_s: needs data_dir, from which a namespace is restored")
        if bool(self.replicate_tls_cert) != bool(self.replicate_tls_key):
            raise ValueError("replicate_tls_cert: replicate_tls_cert and replicate_tls_key go together")
        for name in ("replicate_tls_ca", "replicate_tls_cert"):
            if getattr(self, name) and not self.replicate.startswith("tls://"):
                raise ValueError(f"{name}: needs replicate with tls:// servers")
        if self.replicate_credentials and not self.replicate:
            raise ValueError("replicate_credentials: needs replicate")
        self.quotas()
        if self.draft_k > self.max_k:
            raise ValueError(f"draft_k: {self.draft_k} is above max_k={self.max_k}")
        if self.draft_max_depth > self.depth:
            raise ValueError(f"draft_max_depth: {self.draft_max_depth} is above depth={self.depth}")
        return self

    def socket_path(self) -> Path | None:
        """Path of the Unix socket; None when it is off."""
        if self.socket == OFF:
            return None
        return Path(self.socket) if self.socket else default_socket()

    def shm_directory(self) -> Path:
        """The directory of shared memory."""
        return self.shm_root or Path(f"/dev/shm/draftd-{os.getuid()}")

    def quotas(self) -> tuple[tuple[str, int], ...]:
        """namespace_quotas as (pattern, tokens); ValueError if it is malformed or out of range."""
        pairs = []
        for part in filter(None, (part.strip() for part in self.namespace_quotas.split(","))):
            pattern, _, tokens = part.rpartition("=")
            if not pattern or not tokens.isdecimal() or not 4096 <= int(tokens) <= 2**28:
                raise ValueError(f"namespace_quotas: {part!r} is not pattern=tokens with 4096 to {2**28} tokens")
            pairs.append((pattern, int(tokens)))
        return tuple(pairs)

    def draft_params(self) -> DraftParams:
        """The service's default drafting parameters."""
        return DraftParams(
            k=self.draft_k,
            max_depth=self.draft_max_depth,
            spec_factor=self.draft_spec_factor,
            spec_offset=self.draft_spec_offset,
            min_token_prob=self.draft_min_token_prob,
            policy=self.policy,
            tau=self.tau,
        )


def default_socket() -> Path:
    """$XDG_RUNTIME_DIR/draftd.sock, else /tmp/draftd-UID/draftd.sock."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime_dir) / "draftd.sock" if runtime_dir else Path(f"/tmp/draftd-{os.getuid()}/draftd.sock")


def parse_address(address: str) -> tuple[str, int]:
    """Splits host:port ([::1]:80 for IPv6); ValueError if it is not one."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and, for each setting, where its value came from: flag, environment, file or default."""

    config: ServerConfig
    sources: dict[str, str]


def load_config(flags: Mapping[str, object], path: Path | None = None) -> LoadedConfig:
    """Merges flags (those that are not None) over the environment over the TOML file over the defaults; raises ConfigError."""
    from_file = _read_toml(path) if path else {}
    from_environment = EnvSettingsSource(ServerConfig)()
    given = {name: value for name, value in flags.items() if value is not None}
    layers = (("file", from_file), ("environment", from_environment), ("flag", given))
    merged: dict[str, Any] = {}
    sources = dict.fromkeys(ServerConfig.model_fields, "default")
    for source, values in layers:
        merged.update(values)
        sources.update(dict.fromkeys(values, source))
    try:
        return LoadedConfig(ServerConfig(**merged), sources)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, sources) for item in error.errors())) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    unknown = sorted(set(values) - set(ServerConfig.model_fields))
    if unknown:
        raise ConfigError(f"{path}: unknown setting {unknown[0]!r}")
    return values


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """One pydantic error as `name (source): what is wrong`."""
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    return f"{name} (from {sources.get(name, 'flag')}): {message}"
