"""`draftd config`: shows the effective configuration and where each value came from."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from draftd.server.cli.channel import wide_console
from draftd.server.cli.flags import with_config
from draftd.server.config import LoadedConfig, ServerConfig
from draftd.server.config_docs import documentation, groups, markdown


@with_config
def config(
    loaded: LoadedConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: value and source of each setting.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md.")] = False,
) -> None:
    """Show the effective configuration: every setting, its value, and whether a flag, the environment, the file or the default set it."""
    if as_markdown:
        typer.echo(markdown(), nl=False)
        return
    values = {name: getattr(loaded.config, name) for name in ServerConfig.model_fields}
    if as_json:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        typer.echo(json.dumps({name: {"value": plain[name], "source": loaded.sources[name]} for name in plain}, indent=2))
        return
    table = Table("setting", "value", "unit", "source", box=None, pad_edge=False)
    for group in groups():
        table.add_section()
        for name, info in ServerConfig.model_fields.items():
            about = documentation(info)
            if about["group"] == group:
                shown = _derived(name, loaded) if values[name] in (None, "") else str(values[name])
                source = loaded.sources[name]
                table.add_row(name, shown, str(about["unit"]), Text(source, style="" if source == "default" else "bold"))
    wide_console().print(table)


def _derived(name: str, loaded: LoadedConfig) -> str:
    """What an empty setting comes to."""
    if name == "socket":
        return str(loaded.config.socket_path())
    if name == "shm_root":
        return str(loaded.config.shm_directory())
    return "-"
