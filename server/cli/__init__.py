"""The `draftd` command line, one file a command group."""
