"""Rules of experts and of the router that chooses them: each once broken, its message, and once kept."""

import pytest

from slime.utils.arguments.checks import experts
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

MOE, MLA = "qwen3-30B-A3B", "deepseek-v3"
PLAIN = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--num-query-groups")
RULES = {
    experts.check_experts: (
        Rule(
            "--expert-model-parallel-size 3",
            ("3 does not divide the 128 experts",),
            "--expert-model-parallel-size 4",
            model=MOE,
            others=True,
        ),
        Rule("--expert-model-parallel-size 2", ("2 spreads experts, and the model has none",)),
        Rule("--moe-grouped-gemm", ("--moe-grouped-gemm: describes experts",)),
        Rule(
            "--num-experts 8 --expert-tensor-parallel-size 2",
            ("2: experts with biases cannot be split",),
            without=(*PLAIN, "--hf-checkpoint"),
            others=True,
            kept="--hf-checkpoint {hf}",
        ),
    ),
    experts.check_router: (
        Rule(
            "--moe-router-topk 129",
            ("129 is more than the 128 experts",),
            "--moe-router-topk 8",
            model=MOE,
            others=True,
        ),
        Rule(
            "--moe-router-topk 1",
            ("softmax over one score is 1 whatever the score",),
            "--moe-router-topk 1 --moe-router-pre-softmax",
            model=MOE,
            config={"num_experts_per_tok": 1},
        ),
        Rule("--moe-router-score-function softmax", ("softmax takes no expert bias",), model=MLA, others=True),
        Rule(
            "--moe-router-bias-update-rate 0.001",
            ("0.001 would move the expert bias at every step",),
            "--moe-router-bias-update-rate 0",
            model=MLA,
        ),
        Rule("--moe-router-num-groups 5", ("5 does not divide the 256 experts",), model=MLA, others=True),
        Rule("--moe-router-group-topk 9", ("9 is more than --moe-router-num-groups 8",), model=MLA, others=True),
        Rule(
            "--moe-router-num-groups 128 --moe-router-group-topk 3",
            ("8 is more than --moe-router-group-topk 3 x 2 experts a group = 6",),
            model=MLA,
            others=True,
        ),
        Rule(
            "--moe-router-num-groups 16 --moe-router-group-topk 9",
            ("8 // --moe-router-group-topk 9 = 0",),
            model=MLA,
            others=True,
        ),
        Rule(
            "--moe-router-group-topk 2",
            ("2 groups are chosen, and --moe-router-num-groups does not say",),
            model=MOE,
            others=True,
        ),
        Rule(
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0",
            ("1 weights for the 2 losses",),
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0 0",
            model=MOE,
        ),
        Rule(
            "--moe-router-load-balancing-type sinkhorn",
            ("sinkhorn does not go with --moe-expert-capacity-factor 2",),
            "--moe-router-load-balancing-type none",
            model=MOE,
            also="--moe-expert-capacity-factor 2",
        ),
        Rule(
            "--moe-pad-expert-input-to-capacity",
            ("pads to a capacity",),
            "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
            model=MOE,
        ),
    ),
    experts.check_dispatcher: (
        Rule(
            "--moe-enable-deepep",
            ("DeepEP is part of the flex dispatcher, not of alltoall",),
            "--moe-enable-deepep --moe-token-dispatcher-type flex",
            model=MOE,
        ),
        Rule(
            "--moe-flex-dispatcher-backend hybridep",
            ("the one asks for deepep, the other for hybridep",),
            model=MOE,
            also="--moe-enable-deepep --moe-token-dispatcher-type flex",
        ),
        Rule(
            "--moe-flex-dispatcher-backend ncclep",
            ("ncclep is part of the flex dispatcher",),
            "--moe-flex-dispatcher-backend ncclep --moe-token-dispatcher-type flex",
            model=MOE,
        ),
        Rule(
            "--accelerator cpu",
            ("flex moves tokens between GPUs",),
            "--moe-token-dispatcher-type alltoall --accelerator cpu",
            model=MOE,
            also="--moe-token-dispatcher-type flex",
        ),
        Rule(
            "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
            ("DeepEP does not pad",),
            model=MOE,
            also="--moe-token-dispatcher-type flex",
        ),
        Rule("--moe-router-padding-for-quantization", ("pads for FP8, which is off",), model=MOE),
    ),
    experts.check_router_of_checkpoint: (
        Rule(
            "--moe-router-topk 7",
            ("--moe-router-topk: is 7, and num_experts_per_tok in config.json is 8",),
            "--moe-router-topk 8",
            model=MLA,
        ),
        Rule("--moe-router-num-groups 4", ("is 4, and n_group in config.json is 8",), model=MLA),
        Rule("--moe-router-group-topk 2", ("is 2, and topk_group in config.json is 4",), model=MLA),
        Rule(
            "--moe-router-topk-scaling-factor 1.5",
            ("is 1.5, and routed_scaling_factor in config.json is 2.5",),
            model=MLA,
        ),
        Rule(
            "--moe-router-score-function sqrtsoftplus",
            ("is sqrtsoftplus, and scoring_func in config.json is sigmoid",),
            model=MLA,
        ),
        Rule(
            "--moe-router-pre-softmax",
            ("norm_topk_prob true (softmax over the chosen experts)", "has the flag"),
            model=MOE,
        ),
    ),
    experts.check_expert_sizes_of_checkpoint: (
        Rule("--num-experts 64", ("--num-experts: is 64, and config.json has 128 experts",), model=MOE, others=True),
        Rule(
            "--moe-shared-expert-intermediate-size 4096",
            ("is 4096, and config.json has 1 shared experts x moe_intermediate_size 2048 = 2048",),
            model=MLA,
        ),
    ),
}


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)
