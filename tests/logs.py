"""Where logs of services in the tests' own process go, where a test does not say."""

import sys

import structlog


def log_to_stderr() -> None:
    """To standard error: on standard output they would be among what a command prints that runs beside them."""
    structlog.reset_defaults()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__), cache_logger_on_first_use=False)
