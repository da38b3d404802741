"""vLLM's entry point: puts draftd behind the speculative method `ngram_gpu` of the one vLLM release whose insides are known.

It runs in each of vLLM's processes and does nothing without DRAFTD_ENDPOINT. Modules are changed when vLLM imports them, not before.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KNOWN_RELEASE = "0.33"
"""The vLLM release, without the patch number, that this was written against and tested with."""

# A child of vLLM's own logger, which is the one that vLLM's configuration shows.
log = logging.getLogger("vllm.plugins.draftd")


def register() -> None:
    """What vLLM calls in each process: arranges for draftd, once, if DRAFTD_ENDPOINT is set and the release is known."""
    if not os.environ.get("DRAFTD_ENDPOINT") or any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    release = installed_release()
    if not is_known(release):
        log.warning("draftd does not know vLLM %s, only %s: vLLM runs as it is, without draftd", release, KNOWN_RELEASE)
        return
    AfterImport(
        {
            "vllm.v1.core.sched.scheduler": _change_scheduler,
            "vllm.v1.worker.gpu.model_runner": _change_runner,
            "vllm.v1.worker.gpu.spec_decode.ngram.speculator": _change_speculator,
        }
    ).install()


def installed_release() -> str:
    """vLLM's version, or `?` if nothing says which it is."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("vllm"), "__version__", "?"))


def is_known(release: str) -> bool:
    """Whether the insides of a release, such as `0.33.0+cu130`, are known."""
    return release == KNOWN_RELEASE or release.startswith(KNOWN_RELEASE + ".")


class AfterImport(MetaPathFinder):
    """Changes modules right after they were imported for the first time.

    Importing them earlier would cost seconds in processes that never need them.

    Args:
        changes: By module name, what to do with the module.
    """

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def install(self) -> None:
        """Changes the modules that are imported already, and each other one when it is."""
        sys.meta_path.insert(0, self)
        for name in self._changes:
            if name in sys.modules:
                self._change(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module as Python finds it, with the change behind its execution; None for modules that stay as they are."""
        if name not in self._changes:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        loader.exec_module = exec_module
        return spec

    def _change(self, module: ModuleType) -> None:
        try:
            self._changes[module.__name__](module)
        except Exception as error:  # noqa: BLE001 -- vLLM must start whatever is wrong here; it says so
            log.error("draftd cannot change %s, so nothing is drafted from it: %r", module.__name__, error)


def _change_scheduler(module: ModuleType) -> None:
    from draftd.client.vllm.scheduler import hook_scheduler

    hook_scheduler(module.Scheduler)


def _change_runner(module: ModuleType) -> None:
    from draftd.client.vllm.runner import hook_runner

    hook_runner(module.GPUModelRunner)


def _change_speculator(module: ModuleType) -> None:
    from draftd.client.vllm.speculator import speculator_maker

    module.__dict__["NgramGPUSpeculator"] = speculator_maker(module.NgramGPUSpeculator)
