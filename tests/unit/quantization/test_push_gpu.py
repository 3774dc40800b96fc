"""Trained bfloat16 weights in FP8 engines on a GPU: after a push an engine is what it had been, had it started so.

All engines start at the same time. Run with -s to see the progress.
"""

import json

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.directories import (
    dequantize_directory,
    quantize_directory,
)
from slime.backends.megatron_utils.megatron_to_hf.processors.fp8 import BlockFp8, ChannelFp8
from tests.helpers.engines import checksums, prompt_log_probs, running_engines, say
from tests.helpers.gloo import RankError, run_ranks
from tests.helpers.quantised_push import TRANSPORTS, Job, heard, push
from tests.helpers.tiny_models import make_tiny_model
from tests.unit.quantization.test_engine_loading import load

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

LENGTH = 96
_SIDES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
# The sides of latent attention are those of the published models: kernels know no others. 576 rows of keys and values
# end within a block, as there.
_LATENT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MODELS = {
    "qwen3": _SIDES | {"num_key_value_heads": 2, "head_dim": 128},
    "qwen3_moe": _SIDES
    | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 6,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [],
    },
    "deepseek_v3": _SIDES
    | _LATENT
    | {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# engine -> (model, format): those that take weights while they run, and those that cannot
TAKING = {"dense": ("qwen3", BlockFp8()), "moe": ("qwen3_moe", BlockFp8()), "latent": ("deepseek_v3", BlockFp8())}
REFUSING = {"channel": ("qwen3", ChannelFp8())}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """bf16/<model>/<seed>, served/<engine>: seed 1 quantised, and cast/<engine>: seed 0 quantised and cast back."""
    root = tmp_path_factory.mktemp("push")
    for name, sides in MODELS.items():
        for seed in (0, 1):
            made = make_tiny_model(name, root / f"float_{seed}", seed=seed, **sides)
            _in_bfloat16(made, root / "bf16" / name / str(seed))
    for engine, (model, format) in (TAKING | REFUSING).items():
        quantize_directory(root / "bf16" / model / "1", root / "served" / engine, format)
        if engine in TAKING:
            quantize_directory(root / "bf16" / model / "0", root / "quantised" / engine, format)
            dequantize_directory(root / "quantised" / engine, root / "cast" / engine)
    return root


def _in_bfloat16(source, target):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":  # transformers leaves out what SGLang asks for
        config |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (target / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def pushed(directories, tmp_path_factory):
    """({engine: its log-probs and checksums before any push}, what `push` has heard)."""
    models = {engine: directories / "served" / engine for engine in TAKING | REFUSING}
    with running_engines(models, tmp_path_factory.mktemp("logs")) as engines:
        began = {name: (prompt_log_probs(e.url, LENGTH), checksums(e.url)) for name, e in engines.items()}
        jobs = []
        for transports in (("tensor", "disk"), ("distributed",)):  # what needs most comes late
            for name in engines.keys() & TAKING.keys():
                weights = {seed: directories / "bf16" / TAKING[name][0] / seed for seed in ("0", "1")}
                jobs.append(Job(name, engines[name].url, models[name], weights, transports))
        for name in engines.keys() & REFUSING.keys():
            weights = {"0": directories / "bf16" / REFUSING[name][0] / "0"}
            jobs.append(Job(name, engines[name].url, models[name], weights, ["tensor"]))
        try:
            run_ranks(push, 1, jobs, directories / "scratch", LENGTH, "cuda", timeout=100.0)
        except RankError as error:  # the tests of what was done before go on
            say(str(error))
    return began, heard(directories / "scratch")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", TAKING)
def test_engine_is_what_it_would_be_from_its_start(pushed, directories, engine, transport):
    """The engine has started from the quantised weights 1. Pushes of 0 and of 1 from bfloat16: after 1 all its
    parameters have the bytes of the start and the prompt has its log-probs; after 0 it says what transformers says
    with those weights. Latent attention computes with matrices that the engine derives from kv_b_proj: one that was
    not derived anew would speak with the weights before."""
    assert engine in pushed[0], "the engine did not come up"
    began, bytes_at_start = pushed[0][engine]
    said_after, failure = pushed[1].get(engine, ({}, "no push was done"))
    assert (transport, "1") in said_after, failure
    reference = _of_transformers(directories / "cast" / engine)
    spread = (reference - reference.mean()).norm()
    for seed, wanted, tolerance in (("0", reference, 0.3), ("1", torch.tensor(began), 1e-3)):
        said = said_after[transport, seed]
        error = float((torch.tensor(said.log_probs) - wanted).norm() / spread)
        other = [name for name, value in bytes_at_start.items() if said.checksums.get(name) != value]
        say(f"{engine} by {transport}, weights {seed}: error {error:.4f}, {len(other)} parameters not as begun")
        assert bool(other) == (seed == "0"), other
        assert error < tolerance, seed
    assert float((torch.tensor(began) - reference).norm() / spread) > 0.6, "the two sets of weights must differ"


def _of_transformers(directory) -> torch.Tensor:
    ids = torch.arange(3, 3 + LENGTH, device="cuda")[None]
    with torch.no_grad():
        logits = load(directory).cuda()(ids).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()


@pytest.mark.parametrize("engine", REFUSING)
def test_engines_that_cannot_take_weights(pushed, engine):
    """Their kernels have repacked what the loader would fill, which is why launches with them are refused. When this
    fails, SGLang has learnt it, and the refusal can go."""
    assert engine in pushed[1], "the engine did not come up"
    said_after, failure = pushed[1][engine]
    assert failure is not None and "EngineError" in failure, said_after.keys()
