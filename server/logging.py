"""Structured logs on standard error: one event a line, JSON or readable text.

Events carry names and numbers, never tokens: documents are other people's text.
"""

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor


def configure_logging(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Sets up structlog for this process; `auto` is console on a terminal, else JSON."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
