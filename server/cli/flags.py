"""Command-line flags made from the fields of ServerConfig, so that a setting is declared once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from draftd.server.cli.failure import UsageFailure
from draftd.server.config import ConfigError, LoadedConfig, ServerConfig, load_config
from draftd.server.config_docs import allowed_values, documentation, flag_name

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="DRAFTD_CONFIG", help="TOML file of settings.", dir_okay=False, exists=True, show_default=False),
]


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that takes `loaded: LoadedConfig` one flag a setting, and --config."""

    def call(config_file: Path | None = None, **arguments: Any) -> None:
        own = {name: arguments.pop(name) for name in list(arguments) if name not in ServerConfig.model_fields}
        command(load(arguments, config_file), **own)

    parameters = [parameter for name, parameter in inspect.signature(command, eval_str=True).parameters.items() if name != "loaded"]
    parameters.append(_parameter("config_file", ConfigFile))
    parameters += [_parameter(name, _annotation(name, info)) for name, info in ServerConfig.model_fields.items()]
    call.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__ = command.__doc__
    return call


def load(flags: dict[str, object], path: Path | None) -> LoadedConfig:
    """load_config, whose error is one of usage."""
    try:
        return load_config(flags, path)
    except ConfigError as error:
        raise UsageFailure(str(error)) from None


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(name: str, info: FieldInfo) -> Any:
    about = documentation(info)
    kind: Any = info.annotation
    flags = [flag_name(name)]
    if kind is bool:
        flags = [f"{flag_name(name)}/--no-{name.replace('_', '-')}"]
        text = info.description or ""
    else:
        kind = kind if kind in (int, float) else str
        default = "" if info.default in (None, "") else f"; default {info.default}"
        # A range is in a unit; words say for themselves what they are.
        allowed = about["allowed"] or " ".join(part for part in (allowed_values(info), about["unit"]) if part)
        text = f"{info.description} ({allowed}{default})"
    # What stands in brackets would be taken for a style.
    option = typer.Option(*flags, help=escape(text), show_default=False, rich_help_panel=str(about["group"]), metavar=None)
    return Annotated[kind | None, option]
