"""Rotary frequencies: megatron-core with the flags of a config.json == transformers with the config itself."""

import pytest
import torch

from slime.utils.model_facts import ConfigError, megatron_args
from tests.helpers.model_configs import config_of


@pytest.fixture(scope="module")
def embeddings():
    """megatron-core's two rotary modules."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return RotaryEmbedding, YarnRotaryEmbedding


def reference(name: str) -> tuple[torch.Tensor, float]:
    """(frequencies [dim / 2], attention factor) as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = config_of(name)
    kind = raw.pop("model_type").replace("kimi_k2", "deepseek_v3")
    config = CONFIG_MAPPING[kind](**raw)
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device="cpu")


@pytest.mark.parametrize("name", ["llama3.1-8B-Instruct", "llama3.2-3B-Instruct"])
def test_llama3(name, embeddings):
    """The 3B model has factor 32 where Megatron's default is 8: a script that passed it as --rotary-scaling-factor, a
    flag of YaRN, trained with 8."""
    args = megatron_args(config_of(name))
    module = embeddings[0](
        kv_channels=args["--kv-channels"],
        rotary_percent=1.0,
        rotary_base=args["--rotary-base"],
        rope_scaling=args["--use-rope-scaling"],
        rope_scaling_factor=args["--rope-scaling-factor"],
        use_cpu_initialization=True,
    )
    torch.testing.assert_close(module.inv_freq, reference(name)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "kimi-k2-thinking"])
def test_yarn(name, embeddings, monkeypatch):
    """Kimi-K2's beta_fast is not the one that Megatron assumes: without its flag, frequencies differ by up to 32."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # the module moves its buffers there
    args = megatron_args(config_of(name))
    module = embeddings[1](
        kv_channels=args["--qk-pos-emb-head-dim"],
        rotary_base=args["--rotary-base"],
        scaling_factor=args["--rotary-scaling-factor"],
        original_max_position_embeddings=args.get("--yarn-original-max-position-embeddings", 4096),
        beta_fast=args.get("--yarn-beta-fast", 32),
        beta_slow=args.get("--yarn-beta-slow", 1),
        mscale=args["--mscale"],
        mscale_all_dim=args["--mscale-all-dim"],
        use_cpu_initialization=True,
    )
    table, concentration = module.get_emb(2)
    frequencies, factor = reference(name)
    torch.testing.assert_close(table[1, 0, 0, : len(frequencies)], frequencies, rtol=1e-5, atol=0)
    assert concentration == pytest.approx(factor)


def test_llama_scaling_that_megatron_does_not_compute():
    config = config_of("llama3.1-8B-Instruct")
    config["rope_scaling"]["high_freq_factor"] = 8.0
    with pytest.raises(ConfigError, match="high_freq_factor is 8.0; Megatron assumes 4"):
        megatron_args(config)


def test_both_spellings_are_one():
    """transformers 5 saves rope_parameters where version 4 saved rope_theta and rope_scaling."""
    for name in ("deepseek-v3", "llama3.2-3B-Instruct", "glm4-9B", "qwen3-8B"):
        old, new = config_of(name), config_of(name)
        scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
        loose = {key: new.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in new}
        new["rope_parameters"] = {**scaling, **loose}
        assert megatron_args(old) == megatron_args(new)


def test_positions_that_differ_between_layers():
    config = config_of("qwen3-8B")
    del config["rope_theta"]
    config["rope_parameters"] = {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"}}
    with pytest.raises(ConfigError, match="differs between layers"):
        megatron_args(config)
