"""Packed attention against a naive float64 loop over sequences, and the index plans it is made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.torch_te.attention_plan import groups_of, segments_of, zigzag_rows
from tests.helpers.gloo import run_ranks

CASES = {
    "gqa, ragged": {"lengths": (3, 17, 1, 16, 5, 5, 40), "heads": 4, "kv_heads": 2, "dim": 10, "value_dim": 10},
    "other value size": {"lengths": (9, 2, 31), "heads": 3, "kv_heads": 3, "dim": 12, "value_dim": 8},
    "many of a kind": {"lengths": (7,) * 20 + (6,) * 3, "heads": 2, "kv_heads": 1, "dim": 8, "value_dim": 8},
    "one": {"lengths": (23,), "heads": 2, "kv_heads": 2, "dim": 6, "value_dim": 6},
    "tokens behind the last": {"lengths": (4, 6), "tail": 3, "heads": 2, "kv_heads": 1, "dim": 6, "value_dim": 6},
    "not causal": {"lengths": (4, 11, 9), "causal": False, "heads": 2, "kv_heads": 1, "dim": 6, "value_dim": 6},
}


def _attention(case, cp=1):
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.torch_te.packed_attention import PackedAttention

    config = SimpleNamespace(
        attention_dropout=0.0,
        window_size=None,
        softmax_type="vanilla",
        apply_query_key_layer_scaling=False,
        qk_clip=False,
        log_max_attention_logit=False,
        context_parallel_size=cp,
        kv_channels=case["dim"],
    )
    mask = AttnMaskType.causal if case.get("causal", True) else AttnMaskType.no_mask
    return PackedAttention(config, 1, mask, "self")


def _inputs(case):
    tokens = sum(case["lengths"]) + case.get("tail", 0)
    generator = torch.Generator().manual_seed(0)
    shapes = ((case["heads"], case["dim"]), (case["kv_heads"], case["dim"]), (case["kv_heads"], case["value_dim"]))
    q, k, v = (torch.randn(tokens, *shape, generator=generator) for shape in shapes)
    return q, k, v, torch.randn(tokens, case["heads"] * case["value_dim"], generator=generator)


def _reference(case, q, k, v):
    """softmax(q k / sqrt(d)) v, sequence by sequence, head by head."""
    repeat = case["heads"] // case["kv_heads"]
    lengths = [*case["lengths"], *([case["tail"]] if "tail" in case else [])]
    outs = []
    for qs, ks, vs in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        heads = []
        for head in range(case["heads"]):
            scores = qs[:, head] @ ks[:, head // repeat].T / case["dim"] ** 0.5
            if case.get("causal", True):
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ vs[:, head // repeat])
        outs.append(torch.cat(heads, dim=-1))
    return torch.cat(outs)


def _with_gradients(function, inputs, grad, dtype):
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out = function(*inputs)
    out.backward(grad.to(dtype))
    return [out.detach(), *(t.grad for t in inputs)]


def _error(case, attention, params):
    """Largest relative error of output and gradients; the second round uses the plan kept on the params."""
    *inputs, grad = _inputs(case)
    wanted = _with_gradients(lambda q, k, v: _reference(case, q, k, v), inputs, grad, torch.float64)
    error = 0.0
    for _ in range(2):
        got = _with_gradients(
            lambda q, k, v: attention(q, k, v, None, packed_seq_params=params), inputs, grad, torch.float32
        )
        error = max(error, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)))
    return error


def _check_cases(rank, world_size):
    """Largest error of output and gradients per case."""
    from tests.helpers.tiny_megatron import Layout, packed_params, start

    start(Layout())
    errors = {}
    for name, case in CASES.items():
        errors[name] = _error(case, _attention(case), packed_params(case["lengths"]))
    return errors


def test_packed_equals_naive_loop_in_float64():
    (errors,) = run_ranks(_check_cases, 1)
    assert errors.keys() == CASES.keys()
    assert max(errors.values()) < 2e-6, errors


def _check_context_parallel(rank, world_size):
    """Zigzag shards of a pack, gathered again, against the whole pack in float64."""
    import torch.distributed as dist

    from tests.helpers.tiny_megatron import Layout, packed_params, start, zigzag

    start(Layout(cp=world_size))
    parts = 2 * world_size
    case = {"lengths": (3 * parts, parts, 0, 7 * parts), "heads": 4, "kv_heads": 2, "dim": 10, "value_dim": 6}
    lengths = case["lengths"]
    *inputs, grad = _inputs(case)
    attention = _attention(case, world_size)
    local = [zigzag(t, lengths, world_size, rank) for t in (*inputs, grad)]
    params = packed_params(lengths)
    got = _with_gradients(
        lambda q, k, v: attention(q, k, v, None, packed_seq_params=params), local[:3], local[3], torch.float32
    )
    wanted = _with_gradients(lambda q, k, v: _reference(case, q, k, v), inputs, grad, torch.float64)
    wanted = [zigzag(t, lengths, world_size, rank) for t in wanted]
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))
    dist.barrier()
    return error


def test_context_parallel_equals_the_whole_pack():
    """Also an empty sequence, and value heads of another size than the keys'."""
    assert max(run_ranks(_check_context_parallel, 2)) < 2e-6


def _check_refusals(rank, world_size):
    from tests.helpers.tiny_megatron import Layout, packed_params, start

    start(Layout())
    case = CASES["one"]
    messages = []
    q, k, v, _ = _inputs(case)
    for lengths in ((20, 9),):
        try:
            _attention(case)(q, k, v, None, packed_seq_params=packed_params(lengths))
        except ValueError as error:
            messages.append(str(error))
    from types import SimpleNamespace

    from slime.backends.megatron_utils.torch_te.packed_attention import _check_supported

    good = dict.fromkeys(("window_size",)) | {
        "softmax_type": "vanilla",
        "apply_query_key_layer_scaling": False,
        "qk_clip": False,
        "log_max_attention_logit": False,
    }
    for flag, value in (("window_size", (8, 0)), ("softmax_type", "learnable"), ("qk_clip", True)):
        try:
            _check_supported(SimpleNamespace(**(good | {flag: value})), "self")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_only_transformer_engine_has_is_refused():
    (messages,) = run_ranks(_check_refusals, 1)
    assert len(messages) == 4
    assert "cu_seqlens end at 29, but only 23" in messages[0]
    assert all("needs transformer_engine" in message for message in messages[1:])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_segments_of_all_ranks_cover_every_query_once(counts, cp):
    """Every rank holds as many queries, sees keys of its own sequence only, and zigzag rows are a permutation."""
    parts = 1 if cp == 1 else 2 * cp
    lengths = [count * parts for count in counts]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    last_keys = []
    for rank in range(cp):
        segments = segments_of(cu, cp, rank)
        assert sum(s.length for s in segments) == cu[-1] // cp
        assert [s.start for s in segments] == [sum(x.length for x in segments[:i]) for i in range(len(segments))]
        assert all(s.key_start in cu and s.length <= s.key_length for s in segments)
        last_keys += [s.key_end - 1 - i for s in segments for i in range(s.length)]
    assert sorted(last_keys) == list(range(cu[-1]))
    if cp > 1:
        assert sorted(zigzag_rows(cu, cp).tolist()) == list(range(cu[-1]))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.booleans())
def test_groups_hold_every_row_once_and_waste_little(lengths, causal):
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    groups = groups_of(segments_of(cu, 1, 0), None, causal)
    rows = torch.cat([group.query_rows[group.real] for group in groups])
    assert sorted(rows.tolist()) == list(range(cu[-1]))
    for group in groups:
        assert torch.equal(group.query_rows, group.key_rows)
        if not causal:
            assert bool(group.real.all())


def test_an_indivisible_sequence_names_the_next_length():
    with pytest.raises(ValueError, match=r"10 tokens cannot be cut in 2 \* cp 2 = 4 equal chunks; pad it to 12"):
        segments_of([0, 4, 14], 2, 0)
