"""`draftd token`: makes a token, and the entry of the token file that says what it may do."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from draftd.server.cli.failure import Failure, UsageFailure
from draftd.server.security.files import FileRefused, read_private
from draftd.server.security.tokens import MAX_FILE_BYTES, hash_of, new_token, parse


class RightChoice(StrEnum):
    """--right"""

    read = "read"
    write = "write"
    admin = "admin"


def token(
    name: Annotated[str, typer.Argument(help="Name of who gets it: letters, digits and . _ : / -", show_default=False)],
    right: Annotated[
        list[RightChoice],
        typer.Option("--right", "-r", help="What it may do; repeat it for more. An engine needs read and write.", show_default=False),
    ],
    namespace: Annotated[
        list[str],
        typer.Option("--namespace", "-n", help="In which namespaces, as a pattern: 'team-a/*', or '*' for all.", show_default=False),
    ],
    requests_per_s: Annotated[float | None, typer.Option(help="Most requests a second.", show_default=False)] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Most corpus tokens sent a second.", show_default=False)] = None,
    max_attachments: Annotated[int | None, typer.Option(help="Most live attachments.", show_default=False)] = None,
    max_namespaces: Annotated[
        int | None, typer.Option(help="Make no namespace where as many exist that --namespace fits.", show_default=False)
    ] = None,
    append: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the entry to this token file, which is made if need be.", show_default=False)
    ] = None,
) -> None:
    """Make a token. It is printed on standard output and kept nowhere; the entry for the service's token file has its hash only.

    Without --append the entry is printed on standard error.
    """
    secret = new_token()
    limits = {
        "requests_per_s": requests_per_s,
        "tokens_per_s": tokens_per_s,
        "max_attachments": max_attachments,
        "max_namespaces": max_namespaces,
    }
    entry = _entry(name, hash_of(secret), [r.value for r in right], namespace, limits)
    try:
        parse(entry.encode())
    except FileRefused as error:
        raise UsageFailure(str(error)) from None
    if append is None:
        typer.echo(entry, err=True, nl=False)
    else:
        _append(append, entry)
    typer.echo(secret)


def _entry(name: str, sha256: str, rights: list[str], namespaces: list[str], limits: Mapping[str, float | None]) -> str:
    lines = [
        f"[tokens.{_quoted(name)}]",
        f'sha256 = "{sha256}"',
        f"rights = [{', '.join(map(_quoted, dict.fromkeys(rights)))}]",
        f"namespaces = [{', '.join(map(_quoted, namespaces))}]",
    ]
    lines += [f"{limit} = {value}" for limit, value in limits.items() if value is not None]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML string."""
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return f'"{escaped}"'


def _append(path: Path, entry: str) -> None:
    """Adds an entry, by replacing the file as a whole: a service never reads half of it."""
    try:
        before = read_private(path, MAX_FILE_BYTES).decode() if path.exists() else ""
        content = f"{before.rstrip()}\n\n{entry}" if before.strip() else entry
        parse(content.encode())
    except (FileRefused, UnicodeDecodeError) as error:
        raise Failure(f"{path}: nothing was added: {error}") from None
    target = Path(os.path.realpath(path))
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        if target.exists():
            info = target.stat()
            os.chown(staging, info.st_uid, info.st_gid)
            staging.chmod(info.st_mode & 0o777)
        staging.replace(target)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise Failure(f"{path}: {error.strerror}") from None
