"""What an operator says to the plugin, in environment variables since vLLM has no place of its own for it, and what a request says."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import Policy

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_OPTIONS = {"draftd_namespace", "draftd_private", "draftd_off", "draftd_keep_prompt"}


@dataclass(frozen=True, slots=True)
class Settings:
    """How one engine attaches.

    Attributes:
        endpoint: gRPC target of the service.
        engine: Name of the engine, unique on the service.
        namespace: Namespace of requests that name no other: the model's.
        extra_namespaces: Further namespaces that requests may come to.
        attach_s: How long to wait for the service at the start, in seconds, before vLLM goes on without it.
        graphs: Replay a CUDA graph for a batch's draft instead of launching its kernels.
        policy: The rule to draft by.
    """

    endpoint: str
    engine: str
    namespace: str
    extra_namespaces: tuple[str, ...] = ()
    attach_s: float = 10.0
    graphs: bool = True
    policy: Policy = "calibrated"

    @staticmethod
    def of(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> Settings:
        """From the environment and vLLM's configuration.

        Raises:
            InvalidArgument: A variable has a value that cannot be.
        """
        model = vllm_config.model_config
        served = getattr(model, "served_model_name", None) or model.model
        served = served[0] if isinstance(served, list) else served
        rank = vllm_config.parallel_config.data_parallel_rank if vllm_config.parallel_config.data_parallel_size > 1 else None
        engine = environment.get("DRAFTD_VLLM_ENGINE") or f"vllm-{socket.gethostname()}-{os.getpid()}"
        extra = tuple(n for n in environment.get("DRAFTD_VLLM_NAMESPACES", "").split(",") if n)
        namespace = environment.get("DRAFTD_VLLM_NAMESPACE") or re.sub(r"[^A-Za-z0-9._:/-]", "_", str(served))[-128:]
        for name in (namespace, *extra):
            if not _NAME.fullmatch(name):
                raise InvalidArgument(
                    f"{name!r} is no namespace; it must be 1 to 128 letters, digits and . _ : / -", "DRAFTD_VLLM_NAMESPACES"
                )
        return Settings(
            environment["DRAFTD_ENDPOINT"],
            re.sub(r"[^A-Za-z0-9._:/-]", "_", engine if rank is None else f"{engine}-dp{rank}")[-128:],
            namespace,
            extra,
            _number(environment, "DRAFTD_VLLM_ATTACH_S", 10.0),
            environment.get("DRAFTD_VLLM_GRAPHS", "1") != "0",
            _policy(environment.get("DRAFTD_VLLM_POLICY") or "calibrated"),
        )

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces that a request may come to."""
        return (self.namespace, *self.extra_namespaces)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What becomes of one request.

    Attributes:
        off: No drafts from draftd, and nothing is kept.
        private: Drafts from its own tokens only, and nothing is kept.
        keep_prompt: Others may draft from its prompt too.
        namespace: Where it drafts from and is kept; one of the engine's.
        unlisted: The namespace that it should have come to, where that is none of the engine's; it is private then.
    """

    off: bool = False
    private: bool = False
    keep_prompt: bool = False
    namespace: str = ""
    unlisted: str = ""

    @staticmethod
    def of(settings: Settings, extra_args: Mapping[str, Any] | None, adapter: str, salt: str | None) -> RequestOptions:
        """From a request's `SamplingParams.extra_args`, the name of its LoRA adapter and the hash of its cache salt; empty without.

        The adapter and the salt choose the namespace where `draftd_namespace` does not. A namespace that the engine does not have
        must not become another, so the request is private then; also where nobody can say whether it has a salt.
        """
        given = extra_args or {}
        named = given.get("draftd_namespace")
        # Two adapters must not come to one namespace because of their names' odd characters.
        adapter = adapter if re.fullmatch(r"[A-Za-z0-9._:-]{0,48}", adapter) else hashlib.sha256(adapter.encode()).hexdigest()[:16]
        wanted = str(named) if named else settings.namespace + (f"/lora/{adapter}" if adapter else "") + (f"/salt/{salt}" if salt else "")
        listed = wanted in settings.namespaces and salt is not None
        return RequestOptions(
            off=_is_true(given.get("draftd_off")),
            private=_is_true(given.get("draftd_private")) or not listed,
            keep_prompt=_is_true(given.get("draftd_keep_prompt")),
            namespace=wanted if listed else settings.namespace,
            unlisted="" if wanted in settings.namespaces else wanted,
        )


def unknown_options(extra_args: Mapping[str, Any] | None) -> list[str]:
    """Names in a request's extra_args that look like draftd's and are not."""
    return sorted(name for name in extra_args or {} if name.startswith("draftd_") and name not in _OPTIONS)


def _is_true(value: Any) -> bool:
    """vLLM's HTTP server lets strings, numbers and booleans through."""
    return value in (True, 1) or (isinstance(value, str) and value.lower() in ("1", "true", "yes"))


def _policy(given: str) -> Policy:
    if given not in get_args(Policy):
        raise InvalidArgument(f"DRAFTD_VLLM_POLICY is {given!r}; it must be calibrated or tree", "DRAFTD_VLLM_POLICY")
    return cast(Policy, given)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    given = environment.get(name, "")
    try:
        value = float(given or default)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 600:
        raise InvalidArgument(f"{name} is {given!r}; it must be a number in [0, 600]", name)
    return value
