"""The one error that a command reports to its user."""


class Failure(Exception):
    """Something did not work; printed on standard error in one line, exit code 1."""


class UsageFailure(Failure):
    """The command line is wrong; exit code 2."""
