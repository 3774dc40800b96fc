"""Packed attention on a GPU: the variable-length flash kernel against the naive float64 loop."""

import time

import pytest
import torch

pytestmark = pytest.mark.gpu

CASES = {
    "gqa 128": {"lengths": (3, 170, 1, 16, 500), "heads": 8, "kv_heads": 2, "dim": 128},
    "mha 64, tail": {"lengths": (40, 25), "tail": 7, "heads": 4, "kv_heads": 4, "dim": 64},
    "mla 256": {"lengths": (90, 33, 5), "heads": 4, "kv_heads": 4, "dim": 256},
    "odd head size": {"lengths": (90, 33, 5), "heads": 4, "kv_heads": 2, "dim": 20},
    "not causal": {"lengths": (90, 33, 5), "heads": 4, "kv_heads": 2, "dim": 64, "causal": False},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_equals_naive_loop_in_float64(name, dtype):
    """Output and gradients, from inputs that the dtype holds exactly."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.unit.megatron.test_packed_attention import _attention, _inputs, _reference, _with_gradients

    case = CASES[name] | {"value_dim": CASES[name]["dim"]}
    *inputs, grad = (t.to(dtype).cuda() for t in _inputs(case))
    cu = torch.tensor([0, *case["lengths"]]).cumsum(0).to(torch.int32).cuda()
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    attention = _attention(case)
    got = _with_gradients(lambda q, k, v: attention(q, k, v, None, packed_seq_params=params), inputs, grad, dtype)
    wanted = _with_gradients(lambda q, k, v: _reference(case, q, k, v), inputs, grad, torch.float64)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < tolerance


def test_context_parallel_plan_on_one_gpu():
    """Every CP rank's queries against the gathered keys, without a process group: the plan alone is the same code."""
    from slime.backends.megatron_utils.torch_te import packed_attention
    from tests.helpers.tiny_megatron import zigzag
    from tests.unit.megatron.test_packed_attention import _inputs, _reference

    lengths, cp = (24, 8, 80), 4
    case = {"lengths": lengths, "heads": 4, "kv_heads": 2, "dim": 64, "value_dim": 64}
    q, k, v = (t.bfloat16().cuda() for t in _inputs(case)[:3])
    wanted = _reference(case, q.double(), k.double(), v.double())
    gathered = [torch.cat([zigzag(t, lengths, cp, rank) for rank in range(cp)]).unsqueeze(1) for t in (k, v)]
    cu = (0, *torch.tensor(lengths).cumsum(0).tolist())
    for rank in range(cp):
        plan = packed_attention.Plan(cu, cp, rank, True, q.device)
        local = zigzag(q, lengths, cp, rank).unsqueeze(1)
        assert packed_attention._flash_can(local, *gathered, 0.0)
        out = packed_attention._flash(plan, local, *gathered, 64**-0.5).flatten(1)
        right = zigzag(wanted, lengths, cp, rank)
        assert float((out - right).norm() / right.norm()) < 1e-2


def test_many_short_sequences_cost_one_launch():
    """512 sequences of 8 to 20 tokens take milliseconds, not one launch a sequence."""
    from slime.backends.megatron_utils.torch_te import packed_attention

    lengths = torch.randint(8, 21, (512,)).tolist()
    cu = (0, *torch.tensor(lengths).cumsum(0).tolist())
    shapes = ((8, 64), (4, 64), (4, 64))
    q, k, v = (torch.randn(cu[-1], 1, *s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    plan = packed_attention.Plan(cu, 1, 0, True, q.device)
    for _ in range(3):
        packed_attention._flash(plan, q, k, v, 0.125).sum().backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        packed_attention._flash(plan, q, k, v, 0.125).sum().backward()
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 50
    print(f"forward + backward of 512 short sequences: {milliseconds:.2f} ms")
    assert milliseconds < 20
