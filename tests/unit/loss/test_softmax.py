"""Row statistics and gradients of a chunk of logits in plain torch, and the GPU's kernels in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.loss.softmax_checks import check_gradient, check_statistics

SHAPES = ((5, 70, 70), (4, 33, 0), (3, 4100, 4099), (6, 130, 100))
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_equals_float64(dtype, keep):
    for rows, width, valid in SHAPES:
        check_statistics(rows, width, valid, keep, dtype, "cpu")
        check_gradient(rows, width, valid, keep, dtype, "cpu")


def test_kernels_equal_float64_in_the_interpreter():
    """The kernels' own code without a GPU: a process of its own, since Triton decides when a kernel is defined."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__], check=True, cwd=ROOT, env=environment, timeout=120)


def interpret():
    from slime.backends.megatron_utils.loss import softmax_kernels

    for dtype in (torch.float32, torch.bfloat16):
        for keep in (False, True):
            for rows, width, valid in SHAPES:
                check_statistics(rows, width, valid, keep, dtype, "cpu", softmax_kernels)
                check_gradient(rows, width, valid, keep, dtype, "cpu", softmax_kernels)


if __name__ == "__main__":
    interpret()
