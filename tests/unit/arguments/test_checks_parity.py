"""What the checks refuse for Megatron's sake Megatron refuses, and what they let through it takes.

Each rule here is run twice: by the check, and by megatron-core's own configuration object made of the same arguments.
"""

import dataclasses
import warnings

import pytest
import test_checks_experts
import test_checks_model
import test_checks_training

from slime.utils.arguments.checks import experts, overlap, parallel, precision, recompute
from tests.helpers.rules import rule_arguments, rule_name

# Rules that megatron-core's configuration knows too; the others are slime's, SGLang's, or Megatron's loop's.
TABLES = {**test_checks_experts.RULES, **test_checks_model.RULES, **test_checks_training.RULES}
SHARED = (
    experts.check_experts,
    experts.check_router,
    experts.check_dispatcher,
    parallel.check_heads,
    parallel.check_linear_attention,
    precision.check_fp8,
    recompute.check_recompute,
    recompute.check_activation_offload,
    overlap.check_expert_overlap,
)
# Rules of these checks that megatron-core does not have: why slime has them.
OWN = {
    "--expert-model-parallel-size 3": "megatron divides when it builds the layer",
    "--moe-router-bias-update-rate 0.001": "a rule of reinforcement learning",
    "--moe-router-topk 129": "torch.topk fails in the first forward pass",
    "--moe-router-num-groups 128 --moe-router-group-topk 3": "torch.topk picks from masked experts",
    "--moe-router-num-groups 16 --moe-router-group-topk 9": "groups would all score 0",
    "--moe-grouped-gemm": "without experts it is ignored",
    "--num-query-groups 5": "megatron divides when it builds the layer",
    "--accelerator cpu": "there are no GPUs to move tokens between",
    "--fp32": "Transformer Engine takes FP8 beside 16 bits only",
    "--transformer-impl local": "checked by the training arguments",
    "--optimizer-cpu-offload": "checked by the training arguments",
    "--linear-num-key-heads 0": "megatron divides when it builds the layer",
    "--linear-num-key-heads 5 --linear-num-value-heads 10": "slime's layers, without Megatron's name for the variant",
    "--deterministic-mode": "refused by slime's layers",
    "--linear-attention-freq": "checked by the layer specs",
    "--group-query-attention": "checked by the training arguments",
    "--recompute-num-layers 0": "no layer would be recomputed",
    "--recompute-method uniform": "it would be ignored",
    "--recompute-method uniform --recompute-num-layers 1": "it would be ignored",
    "--distribute-saved-activations": "checked by the training arguments",
    "--offload-modules core_attn": "it would be ignored",
}
FUSIONS = (
    *("apply_rope_fusion", "bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"),
    *("moe_permute_fusion", "moe_router_fusion", "bias_dropout_fusion", "use_te_activation_func"),
)


def cases():
    rules = [(check, rule) for check in SHARED for rule in TABLES[check] if rule.kind == "rule"]
    return [(check, rule) for check, rule in rules if rule.broken not in OWN and "--hf-checkpoint" not in rule.without]


@pytest.fixture
def refusal(monkeypatch):
    """Function: arguments -> what megatron-core says against them, "" when it takes them."""
    import torch
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    # the rules are about a machine with a recent Transformer Engine
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *args, **kwargs: True)
    names = {field.name for field in dataclasses.fields(MLATransformerConfig) if field.init}

    def refusal_of(args) -> str:
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        given |= {
            "num_moe_experts": args.num_experts,
            "pipeline_dtype": torch.float32,
            **dict.fromkeys(FUSIONS, False),
        }
        given |= {"num_query_groups": parallel.kv_groups(args), "variable_seq_lengths": True}
        given |= {
            "moe_layer_freq": 1,
            "virtual_pipeline_model_parallel_size": args.num_virtual_stages_per_pipeline_rank,
        }
        given |= {"recompute_granularity": "selective"} if args.recompute_activations else {}
        given |= {"fp8_param": args.fp8_param_gather}
        given |= {"cpu_offloading": args.cpu_offloading_num_layers > 0, "cp_comm_type": None}
        given = {name: value for name, value in given.items() if name in names and value is not None}
        kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
        known = {field.name for field in dataclasses.fields(kind) if field.init}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kind(**{name: value for name, value in given.items() if name in known})
            except (AssertionError, ValueError) as error:
                return str(error) or type(error).__name__
        return ""

    return refusal_of


@pytest.mark.parametrize(("check", "rule"), cases(), ids=rule_name)
def test_megatron_agrees(case, refusal, check, rule):
    broken, kept = rule_arguments(case, rule)
    assert refusal(broken), "megatron-core takes what the check refuses"
    assert not refusal(kept)
