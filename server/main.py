"""Entry point of the `draftd` console script; everything is in `draftd.server.cli`."""

import os

# Read when gRPC is loaded: its core would add lines of its own to errors that are reported in one.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from draftd.server.cli.app import run


def main() -> None:
    """Runs the command line and exits: 0 ok, 1 failure, 2 usage."""
    run()


if __name__ == "__main__":
    main()
