"""`draftd selftest`: can engines on this machine map a service's index, or share their tensors with it, and if not, why."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from draftd.client.abilities import EVERYWHERE, HANDLE_CPU, MAPPED_CPU, Finding, container, reasons_against, service, shared_memory
from draftd.client.config import default_shm_root
from draftd.client.gpus import gpus, handle, load_driver, mapped
from draftd.server.cli.channel import JsonOption, endpoint_or_default, wide_console
from draftd.server.cli.failure import UsageFailure

_STATES = {True: ("ok", "green"), False: ("NO", "bold red"), None: ("-", "dim")}
CPU, ALL, CUDA = "cpu", "auto", "cuda"


def selftest(
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint",
            envvar="DRAFTD_ENDPOINT",
            help="Service to look at: unix:/path. Default: the service's default socket, where none need answer.",
            show_default=False,
        ),
    ] = "",
    device: Annotated[str, typer.Option("--device", help="What must work: cpu, cuda (at least one GPU), or auto: all that is here.")] = ALL,
    shm_root: Annotated[
        Path | None,
        typer.Option("--shm-root", envvar="DRAFTD_SHM_ROOT", help="The service's directory in shared memory.", show_default=False),
    ] = None,
    socket_owner: Annotated[
        int | None,
        typer.Option(
            "--socket-owner", envvar="DRAFTD_CLIENT_SOCKET_OWNER", help="Also trust a Unix socket of this user.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether this machine can do the transports `mapped` and `handle`, on the CPU and on each GPU, and why not.

    Run it where the engine runs: in its container, as its user. It exits with 1 if something that was asked for cannot be done.
    """
    if device not in (CPU, CUDA, ALL):
        raise UsageFailure(f"--device is {device!r}; it must be cpu, cuda or auto")
    root = shm_root or default_shm_root()
    findings = [*container(), *shared_memory(root)]
    looked = service(endpoint_or_default(endpoint), socket_owner, root)
    if endpoint and looked[0].ok is None:
        # A service that was named has to be there.
        looked[0] = Finding(looked[0].name, False, looked[0].text, EVERYWHERE)
    devices, of_gpus = gpus(load_driver())
    findings += [*looked, *of_gpus]
    wanted = [] if device == CUDA else [MAPPED_CPU, HANDLE_CPU]
    wanted += [] if device == CPU else [ability(name) for name in devices for ability in (mapped, handle)]
    verdicts = {ability: reasons_against(ability, findings) for ability in wanted}
    ok = not any(verdicts.values()) and (device != CUDA or bool(devices))
    if as_json:
        said = {ability: {"possible": not why, "reasons": why} for ability, why in verdicts.items()}
        shown = {"ok": ok, "abilities": said, "findings": [_plain(finding) for finding in findings]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        _print(findings, verdicts)
        if not devices and device != CPU:
            typer.echo("no GPU that CUDA sees", err=device == CUDA)
    if not ok:
        raise typer.Exit(1)


def _plain(finding: Finding) -> dict[str, object]:
    return asdict(finding) | {"needed_for": list(finding.needed_for)}


def _print(findings: Sequence[Finding], verdicts: dict[str, list[str]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        word, style = _STATES[finding.ok]
        table.add_row(finding.name, Text(word, style=style), finding.text)
    table.add_section()
    for ability, why in verdicts.items():
        word, style = _STATES[not why]
        table.add_row(Text(ability, style="bold"), Text(word, style=style), "; ".join(why) or "works here")
    wide_console().print(table)
