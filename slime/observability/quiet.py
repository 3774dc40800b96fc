"""Messages of libraries that mean nothing here, named one by one; whatever else these libraries say is shown."""

import logging
import os
import sys
import warnings

# What slime decides or does on purpose, by the beginning of the message and the module that warns. Apex: the trainer
# itself says once what it does without.
_TRAINER_WARNINGS = (
    ("", UserWarning, r"(megatron|mbridge)\b"),
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning, r"torch\.distributed\.checkpoint\b"),
    ("The argument order of load has been changed", UserWarning, r"torch\.distributed\.checkpoint\b"),
    ("Please use DTensor instead", FutureWarning, r"torch\.distributed\.checkpoint\b"),
)


def quieten_driver() -> None:
    """Ray's advice on its own token, and its colours where nobody sees them. Call before Ray starts."""
    _drop("ray._private.authentication.authentication_token_setup", "Token authentication is enabled")
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def quieten_trainer(accelerator: str) -> None:
    """Remarks at the import of torch extensions and Megatron, and at loading a checkpoint. Call before those."""
    if accelerator == "cpu":
        _drop("torch.utils.cpp_extension", "No CUDA runtime is found")
    logging.getLogger("megatron.core.distributed.fsdp").setLevel(logging.WARNING)
    for message, category, module in _TRAINER_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def _drop(logger: str, beginning: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(beginning))
