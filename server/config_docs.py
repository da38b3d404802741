"""What the settings say of themselves: for `--help`, `draftd config` and docs/configuration.md."""

from typing import Any

from pydantic.fields import FieldInfo

from draftd.server.config import ServerConfig


def groups() -> list[str]:
    """Names of the groups of settings, in order."""
    return list(dict.fromkeys(str(documentation(info)["group"]) for info in ServerConfig.model_fields.values()))


def documentation(info: FieldInfo) -> dict[str, Any]:
    """group, unit and allowed values of one setting."""
    extra = info.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def allowed_values(info: FieldInfo) -> str:
    """The range or the choices of a setting, for people."""
    written = str(documentation(info)["allowed"])
    if written:
        return written
    if info.annotation is bool:
        return "true, false"
    choices = getattr(info.annotation, "__args__", ())
    if choices:
        return ", ".join(str(choice) for choice in choices)
    low = next((item.ge for item in info.metadata if hasattr(item, "ge")), None)
    high = next((item.le for item in info.metadata if hasattr(item, "le")), None)
    return f"{low} to {high}"


def flag_name(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def markdown() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Every setting of `draftd serve` can be given as a flag, as an environment variable, or in a TOML file named by `--config`",
        "(or `DRAFTD_CONFIG`). A flag wins over the environment, the environment over the file, the file over the default. `draftd config`",
        "takes the same flags and shows every value and where it came from. This page is written by `draftd config --markdown`.",
        "",
        "The environment variable of a setting is its TOML key in capitals after `DRAFTD_`: `max_k` is `DRAFTD_MAX_K`.",
        "`DRAFTD_ENDPOINT` and `DRAFTD_CLIENT_...` are read by clients, not by the service: see docs/security.md.",
    ]
    for group in groups():
        lines += ["", f"## {group}", "", "| flag | TOML key | default | unit | allowed | meaning |", "|---|---|---|---|---|---|"]
        for name, info in ServerConfig.model_fields.items():
            about = documentation(info)
            if about["group"] == group:
                default = (
                    "" if info.default in (None, "") else f"`{str(info.default).lower() if info.annotation is bool else info.default}`"
                )
                lines.append(
                    f"| `{flag_name(name)}` | `{name}` | {default} | {about['unit']} | {allowed_values(info)} | {info.description} |"
                )
    return "\n".join(lines) + "\n"
