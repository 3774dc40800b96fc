"""What is hidden is hidden by its own words; everything else that the same libraries say still appears."""

import os
import subprocess
import sys

import pytest

DRIVER = """
import logging, os
from slime.observability.quiet import quieten_driver
quieten_driver()
logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
logger.warning("Token authentication is enabled for this Ray cluster. Set RAY_AUTH_MODE=disabled to opt out.")
logger.warning("Token authentication is disabled for this Ray cluster.")
print(os.environ["RAY_COLOR_PREFIX"])
"""
TRAINER = """
import logging, sys, warnings
from slime.observability.quiet import quieten_trainer
logging.basicConfig(level=logging.INFO, format="%(message)s")
quieten_trainer(sys.argv[1])
logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found, using CUDA_HOME=%s", "/usr")
logging.getLogger("torch.utils.cpp_extension").warning("another remark")
logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp").info("Detected Megatron Core")
logging.getLogger("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp").error("fsdp error")
for words, category, module in (
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning, "torch.distributed.checkpoint.utils"),
    ("The argument order of load has been changed. Please", UserWarning, "torch.distributed.checkpoint.logger"),
    ("Please use DTensor instead and we are", FutureWarning, "torch.distributed.checkpoint.planner_helpers"),
    ("Apex is not installed", UserWarning, "megatron.core.optimizer"),
    ("shown 1", UserWarning, "torch.distributed.checkpoint.utils"),
    ("shown 2", FutureWarning, "torch.distributed.checkpoint.utils"),
    ("Please use DTensor instead: shown 3", FutureWarning, "elsewhere"),
    ("shown 4", RuntimeWarning, "megatron.core.optimizer"),
):
    warnings.warn_explicit(words, category, "file.py", 1, module)
"""


def run(code: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """stdout and stderr, neither of them a terminal."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_COLOR_PREFIX"} | environment
    command = [sys.executable, "-W", "default", "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()


def test_driver():
    assert run(DRIVER) == ("0", "Token authentication is disabled for this Ray cluster.")
    assert run(DRIVER, RAY_COLOR_PREFIX="1")[0] == "1"


@pytest.mark.parametrize(
    "accelerator, about_cuda", [("cpu", []), ("cuda", ["No CUDA runtime is found, using CUDA_HOME=/usr"])]
)
def test_trainer(accelerator, about_cuda):
    lines = [line.removeprefix("file.py:1: ") for line in run(TRAINER, accelerator)[1].splitlines()]
    assert lines == [
        *about_cuda,
        "another remark",
        "fsdp error",
        "UserWarning: shown 1",
        "FutureWarning: shown 2",
        "FutureWarning: Please use DTensor instead: shown 3",
        "RuntimeWarning: shown 4",
    ]
