"""Logging of a slime process: one line format, set once by the process's entry point."""

import logging


def configure_logging(level: int = logging.INFO) -> None:
    """Root logger to stderr as `[time] file:line - message`. A second call changes nothing."""
    logging.basicConfig(level=level, format="[%(asctime)s] %(filename)s:%(lineno)d - %(message)s")
    for chatty in ("httpx", "httpcore", "urllib3", "matplotlib", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
