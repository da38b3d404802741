"""The `draftd` command: registers every sub-command and turns failures into one line and an exit code."""

import os
import sys

import typer
from typer.exceptions import TyperException

from draftd.server.cli.bench import bench
from draftd.server.cli.channel import printable, with_credentials
from draftd.server.cli.config import config
from draftd.server.cli.documents import export, import_documents, ingest
from draftd.server.cli.draft import explain, propose
from draftd.server.cli.failure import Failure, UsageFailure
from draftd.server.cli.selftest import selftest
from draftd.server.cli.serve import serve
from draftd.server.cli.status import status
from draftd.server.cli.token import token
from draftd.server.cli.top import top
from draftd.server.replay.cli import replay
from draftd.server.version import version

app = typer.Typer(
    name="draftd",
    help="A drafter as a service for LLM speculative decoding: one corpus and one index a node, shared by every engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)
app.command("status")(with_credentials(status))
app.command("top")(top)
app.command("selftest")(selftest)
app.command("replay")(replay)
app.command("propose")(with_credentials(propose))
app.command("explain")(with_credentials(explain))
app.command("ingest")(with_credentials(ingest))
app.command("export")(with_credentials(export))
app.command("import")(with_credentials(import_documents))
app.command("token")(token)
app.command("config")(config)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftd {version()}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
) -> None:
    pass


def run() -> None:
    """Runs the command line and exits: 0 ok, 1 failure, 2 usage, 130 interrupted."""
    try:
        code = app(standalone_mode=False, prog_name=app.info.name)
    except Failure as failure:
        _fail(str(failure), 2 if isinstance(failure, UsageFailure) else 1)
    except TyperException as error:
        message = error.format_message()
        context = getattr(error, "ctx", None)
        _fail(f"{message} (see {context.command_path if context else 'draftd'} --help)" if message else "", error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away, as in `draftd export | head`; nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    if message:
        typer.echo("draftd: " + printable(" ".join(message.split())), err=True)
    sys.exit(code)
