"""Model facts against independent readers of the same config.json: transformers' classes, the models' own rules."""

import copy
import json

import pytest

from slime.utils.layout.moe_layers import moe_layer_pattern
from slime.utils.model_facts import ConfigError, UnknownModelType, megatron_args, supported_model_types
from tests.helpers.model_configs import CONFIGS, config_of

# One checkpoint for each table, composite ones by their text_config.
EXAMPLES = [
    "qwen2.5-7B",
    "qwen3-8B",
    "llama3.2-3B-Instruct",
    "mimo-7B-rl",
    "qwen3-235B-A22B",
    "minimax-m2",
    "glm4-9B",
    "glm4.5-355B-A32B",
    "glm4.7-30B-A3B",
    "glm5.2-744B-A40B",
    "deepseek-v3",
    "moonlight",
    "kimi-k2",
    "qwen3-next-80B-A3B",
    "qwen3.5-4B",
    "qwen3.5-35B-A3B",
]

# Fields that say nothing about the trained language model: tokens, training history, generation, engines, other parts.
SILENT = set(
    """
    attention_dropout auto_map aux_loss_alpha bos_token_id eos_token_id pad_token_id dtype torch_dtype ep_size
    index_share_for_mtp_iteration initializer_range max_window_layers sliding_window mamba_ssm_dtype
    mtp_num_hidden_layers mtp_transformer_layers mtp_use_dedicated_embeddings num_mtp_modules use_mtp
    output_router_logits pretraining_tp quantization_config router_aux_loss_coef seq_aux transformers_version use_cache
    rope_parameters.mrope_interleaved rope_parameters.mrope_section architectures
    """.split()
)
# Silent in some families only. Multi-latent attention: keys and values have no heads of their own, and the heads' size
# is the sum of its parts. MTP layers are a launcher's choice but in MiMo.
LATENT = {"num_key_value_heads", "head_dim", "partial_rotary_factor"}
MTP = {"num_nextn_predict_layers"}
POSITIONS = {"max_position_embeddings"}
SILENT_IN = {
    "qwen2": POSITIONS,
    "qwen3": POSITIONS,
    "mimo": set(),
    "llama": set(),
    "glm4": set(),
    "qwen3_moe": POSITIONS,
    "minimax_m2": POSITIONS,
    "glm4_moe": POSITIONS | MTP,
    "glm4_moe_lite": POSITIONS | MTP | LATENT,
    "glm_moe_dsa": POSITIONS | MTP | LATENT,
    "deepseek_v3": POSITIONS | MTP | LATENT,
    "kimi_k2": POSITIONS | MTP | LATENT,
    "qwen3_next": POSITIONS | {"use_sliding_window"},
    "qwen3_5_text": POSITIONS,
    "qwen3_5_moe_text": POSITIONS,
}


def leaves(config: dict, prefix: str = "") -> list[str]:
    """Dotted names of all values, one level into rope dictionaries."""
    names = []
    for key, value in config.items():
        if isinstance(value, dict) and key.startswith("rope_"):
            names += [f"{prefix}{key}.{inner}" for inner in value]
        elif value is not None:
            names.append(prefix + key)
    return names


def other(value):
    """A different value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value * 2 if value else 3
        case float():
            return value * 0.5
        case str():
            return value + "x"
        case list():
            return [*value[:-1], other(value[-1])] if value else [1]
        case dict():
            return value | {"other": 1}
    raise TypeError(type(value))


def changed(config: dict, name: str) -> dict:
    config = copy.deepcopy(config)
    *path, key = name.split(".")
    place = config
    for step in path:
        place = place[step]
    place[key] = other(place[key])
    return config


def outcome(config: dict) -> str:
    try:
        return json.dumps(megatron_args(config))
    except ConfigError as error:
        return f"error: {error}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_field_is_read_or_known_to_be_silent(name):
    """A new field of a checkpoint (another activation, a norm, a pattern) must not be passed over in silence: each
    field changes the arguments or is refused, except those listed as saying nothing, which change nothing."""
    config = config_of(name)
    config = config.get("text_config", config)
    silent = SILENT | SILENT_IN[config["model_type"]]
    before = outcome(config)
    assert not before.startswith("error")
    unread = {leaf for leaf in leaves(config) if outcome(changed(config, leaf)) == before}
    assert unread == silent.intersection(leaves(config))


def test_every_table_has_an_example():
    types = {config_of(name).get("text_config", config_of(name))["model_type"] for name in EXAMPLES}
    composites_and_aliases = {"kimi_k25", "qwen3_5", "qwen3_5_moe"}
    assert set(supported_model_types()) == types | composites_and_aliases | {"deepseek_v32", "qwen2_moe"}


@pytest.fixture(scope="module")
def transformers_config():
    """transformers_config(raw) -> its class's language model; MiMo and Kimi are read as what they derive from."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parents = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}

    def read(raw: dict):
        raw = copy.deepcopy(raw)
        kind = raw.pop("model_type")
        return CONFIG_MAPPING[parents.get(kind, kind)](**raw).get_text_config()

    return read


def first(config, *names: str, absent=None):
    return next((value for name in names if (value := getattr(config, name, None)) is not None), absent)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_same_as_transformers(name, transformers_config):
    """transformers fills in class defaults and renames fields on its own; both readings describe the same model."""
    args, theirs = megatron_args(config_of(name)), transformers_config(config_of(name))
    same = {
        "--num-layers": theirs.num_hidden_layers,
        "--hidden-size": theirs.hidden_size,
        "--vocab-size": theirs.vocab_size,
        "--num-attention-heads": theirs.num_attention_heads,
        "--norm-epsilon": theirs.rms_norm_eps,
        "--ffn-hidden-size": first(theirs, "intermediate_size", "moe_intermediate_size"),
        "--rotary-base": theirs.rope_parameters["rope_theta"],
    }
    if "--multi-latent-attention" in args:
        same |= {
            "--q-lora-rank": theirs.q_lora_rank,
            "--kv-lora-rank": theirs.kv_lora_rank,
            "--qk-head-dim": theirs.qk_nope_head_dim,
            "--qk-pos-emb-head-dim": theirs.qk_rope_head_dim,
            "--v-head-dim": theirs.v_head_dim,
        }
        kind = theirs.rope_parameters["rope_type"]
        factor = theirs.rope_parameters["factor"] if kind == "yarn" else 1
        assert args.get("--rotary-scaling-factor", 1.0) == factor
    else:
        head = first(theirs, "head_dim", absent=theirs.hidden_size // theirs.num_attention_heads)
        same |= {
            "--num-query-groups": theirs.num_key_value_heads,
            "--kv-channels": head,
        }
        rotated = getattr(theirs, "rotary_dim", head)  # stated by MiniMax-M2 alone
        share = theirs.rope_parameters.get("partial_rotary_factor", rotated / head)
        assert args.get("--rotary-percent", 1.0) == share
    for flag, value in same.items():
        assert args.get(flag) == value, flag
    tied = config_of(name).get("tie_word_embeddings", theirs.tie_word_embeddings)
    assert ("--untie-embeddings-and-output-weights" in args) == (not tied)


MIXTURES = [name for name in sorted(CONFIGS) if "--num-experts" in megatron_args(config_of(name))]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_those_of_transformers(name, transformers_config):
    args, theirs = megatron_args(config_of(name)), transformers_config(config_of(name))
    experts = ("n_routed_experts", "num_local_experts", "num_experts")
    assert args["--num-experts"] == first(theirs, *experts)
    assert args["--moe-router-topk"] == theirs.num_experts_per_tok
    assert args["--moe-ffn-hidden-size"] == first(theirs, "moe_intermediate_size", "intermediate_size")
    shared = first(theirs, "shared_expert_intermediate_size", absent=0)
    shared = shared or first(theirs, "n_shared_experts", absent=0) * first(theirs, "moe_intermediate_size", absent=0)
    assert args.get("--moe-shared-expert-intermediate-size", 0) == shared
    assert args.get("--moe-router-topk-scaling-factor", 1.0) == first(theirs, "routed_scaling_factor", absent=1.0)
    layers = theirs.num_hidden_layers
    dense = first(theirs, "first_k_dense_replace", absent=0)
    assert moe_layer_pattern(args["--moe-layer-freq"], layers) == tuple(i >= dense for i in range(layers))
    types = getattr(theirs, "mlp_layer_types", None)
    if types is not None:
        assert [kind == "sparse" for kind in types] == [i >= dense for i in range(layers)]


@pytest.mark.parametrize(
    "name, absent",
    [
        ("minimax-m2", {"qk_norm_type", "rotary_dim", "num_local_experts"}),
        ("glm4-9B", {"max_position_embeddings", "partial_rotary_factor", "rms_norm_eps"}),
        ("glm4.5-106B-A12B", {"attention_bias", "head_dim", "partial_rotary_factor", "rope_theta"}),
        ("glm4.7-30B-A3B", {"first_k_dense_replace", "partial_rotary_factor"}),
        ("deepseek-v3", {"max_position_embeddings"}),
        ("qwen3.5-35B-A3B", {"max_position_embeddings"}),
        ("qwen3.5-9B", {"max_position_embeddings"}),
        ("glm5-744B-A40B", {"indexer_rope_interleave"}),
        ("qwen3-next-80B-A3B", {"max_position_embeddings", "intermediate_size", "partial_rotary_factor"}),
    ],
)
def test_config_is_the_published_one(name, absent):
    """The defaults of a configuration class are the values of the checkpoint it was written for. `absent`: fields that
    the class has under another name, or with a default that is not that checkpoint's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = config_of(name)
    raw = raw.get("text_config", raw)
    defaults = CONFIG_MAPPING[raw["model_type"]]()
    config = {key: value for key, value in raw.items() if isinstance(value, int | float)}
    silent = SILENT | {"num_nextn_predict_layers"} | absent
    for key in config.keys() - silent:
        if hasattr(defaults, key):
            assert config[key] == getattr(defaults, key), key


def test_computing_layers_are_those_of_transformers(transformers_config):
    """GLM-5.2: 21 of 78 layers have an indexer. An off-by-one in the offset asks the checkpoint for other weights."""
    args = megatron_args(config_of("glm5.2-744B-A40B"))
    theirs = transformers_config(config_of("glm5.2-744B-A40B")).indexer_types
    freq, offset = args["--dsa-indexer-topk-freq"], args["--dsa-indexer-skip-topk-offset"]
    ours = ["shared" if max(layer - offset, 0) % freq else "full" for layer in range(1, 79)]
    assert ours == theirs and ours.count("full") == 21
    assert args["--dsa-indexer-rope-interleaved"] is True
    assert megatron_args(config_of("glm5-744B-A40B"))["--dsa-indexer-topk-freq"] == 1


def test_linear_layers_are_those_of_transformers(transformers_config):
    for name in ("qwen3-next-80B-A3B", "qwen3.5-27B", "qwen3.5-35B-A3B"):
        args, theirs = megatron_args(config_of(name)), transformers_config(config_of(name))
        full = [i for i in range(theirs.num_hidden_layers) if (i + 1) % args["--linear-attention-freq"] == 0]
        assert full == [i for i, kind in enumerate(theirs.layer_types) if kind == "full_attention"]
        assert args["--linear-num-value-heads"] == theirs.linear_num_value_heads


def test_unequal_linear_layers_become_a_list():
    config = config_of("qwen3-next-80B-A3B")
    del config["full_attention_interval"]
    config |= {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 3,
    }
    assert megatron_args(config)["--linear-attention-freq"] == "[1]*1+[0]*1+[1]*3"


def test_deepseek_v32():
    """DeepSeek-V3.2 is V3 with the sparse attention of GLM-5, an indexer in every layer, rotated by halves."""
    config = config_of("deepseek-v3") | {"model_type": "deepseek_v32"}
    config |= {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    args, v3 = megatron_args(config), megatron_args(config_of("deepseek-v3"))
    assert v3.items() <= args.items()
    assert args["--experimental-attention-variant"] == "dsa" and args["--dsa-indexer-n-heads"] == 64
    assert "--dsa-indexer-rope-interleaved" not in args


def test_kimi_k25_is_read_from_its_text_config():
    text = config_of("kimi-k2-thinking")
    whole = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    assert megatron_args(whole) == megatron_args(text)


def test_minimax_under_its_first_model_type():
    """MiniMax-M2 was published as model_type minimax, which is also the name of an older, other architecture."""
    config = config_of("minimax-m2") | {"model_type": "minimax"}
    assert megatron_args(config) == megatron_args(config_of("minimax-m2"))
    with pytest.raises(UnknownModelType, match="minimax is unknown"):
        megatron_args(config | {"architectures": ["MiniMaxForCausalLM"]})


def test_no_router_moves_its_bias():
    """Megatron's default update rate of 0.001 would move the experts' bias at every step, away from the engines'."""
    for name in MIXTURES:
        args = megatron_args(config_of(name))
        if "--moe-router-enable-expert-bias" in args:
            assert args["--moe-router-bias-update-rate"] == 0


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("qwen3-8B", {"rms_norm_eps": None}, "rms_norm_eps is missing, and qwen3 models need it"),
        ("qwen3-8B", {"hidden_size": "4096"}, "hidden_size is '4096', not a whole number"),
        ("qwen3-8B", {"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu' to be trained here: --swiglu"),
        ("qwen3-8B", {"rope_theta": None}, "rope_theta is missing"),
        ("qwen3-8B", {"rope_theta": 0.5}, "takes a whole number"),
        ("qwen3-8B", {"rope_parameters": {"rope_theta": 5}}, "rope_theta is stated twice, as 1000000 and as 5"),
        ("qwen3-8B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "is yarn; qwen3 models are trained with defa"),
        ("qwen3-8B", {"num_key_value_heads": 5}, "is 5, which does not divide 32 attention heads"),
        ("qwen3-8B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob is False, must be True"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', must be 'sigmoid'"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group is 9, not between 1 and n_group 8"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("glm5-744B-A40B", {"qk_rope_head_dim": 192}, "qk_head_dim 256 - qk_nope_head_dim 192 = 64"),
        ("glm5-744B-A40B", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has 3 entries for 78 layers"),
        ("glm5-744B-A40B", {"first_k_dense_replace": 2}, "has 'dense' for layer 2, first_k_dense_replace 2"),
        ("glm5.2-744B-A40B", {"indexer_types": ["full"] * 77}, "describes 77 layers, num_hidden_layers is 78"),
        ("glm5.2-744B-A40B", {"index_skip_topk_offset": 2}, "disagree on layer 2"),
        ("glm5.2-744B-A40B", {"index_skip_topk_offset": None}, "index_topk_freq=4 but no index_skip_topk_offset"),
        ("qwen3-next-80B-A3B", {"layer_types": ["full_attention"] * 48}, "full_attention_interval is 4, and layer_ty"),
        ("minimax-m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}, "rotary_dim is 64 of head_dim, 0.5"),
    ],
)
def test_what_cannot_be_described_is_refused(name, change, says):
    """Each of these would otherwise train another model than the checkpoint, without an error."""
    with pytest.raises(ConfigError) as error:
        megatron_args(config_of(name) | change, source="/models/x/config.json")
    assert says in str(error.value) and str(error.value).startswith("/models/x/config.json: ")


def test_composite_that_contradicts_itself():
    config = config_of("qwen3.5-4B") | {"tie_word_embeddings": False}
    with pytest.raises(ConfigError, match="tie_word_embeddings is False, and True in text_config"):
        megatron_args(config)
    del config["tie_word_embeddings"]
    assert "--untie-embeddings-and-output-weights" not in megatron_args(config)


def test_indexer_types_alone():
    """A config that lists its layers is described by the frequency and offset that Megatron has instead."""
    config = config_of("glm5.2-744B-A40B")
    del config["index_topk_freq"], config["index_skip_topk_offset"]
    args = megatron_args(config)
    assert (args["--dsa-indexer-topk-freq"], args["--dsa-indexer-skip-topk-offset"]) == (4, 3)
    config["indexer_types"][3] = "full"
    with pytest.raises(ConfigError, match="follows no"):
        megatron_args(config)


def test_experts_in_some_layers_of_qwen():
    config = config_of("qwen3-30B-A3B") | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert megatron_args(config)["--moe-layer-freq"] == "[0]*1+[1]*1+[0]*3+[1]*1"
    assert "--moe-router-pre-softmax" in megatron_args(config | {"norm_topk_prob": False})


def test_unknown_type_lists_the_nearest_first():
    with pytest.raises(UnknownModelType, match="did you mean glm4_moe or .*known: glm4_moe,.*qwen3"):
        megatron_args({"model_type": "glm4_mo"})
