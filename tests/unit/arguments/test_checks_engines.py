"""Rules of GPUs and of engines: each once broken, its message, and once kept."""

import ast

import pytest

from slime.utils.arguments.checks import engines, resources, serving
from slime.utils.arguments.checks.engine_shape import SPANNING_BACKENDS, EngineModel, EngineShape
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name
from tests.helpers.upstream_source import source_of

MOE, MLA, DSA, GLM, DENSE = "qwen3-30B-A3B", "deepseek-v3", "glm5.2-744B-A40B", "glm4.5-355B-A32B", "qwen3-4B"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
INT4 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
EACH, EP = "--rollout-num-gpus-per-engine", "--sglang-ep-size"
DP = "--sglang-enable-dp-attention --sglang-dp-size"
APART = ("--colocate", "--rollout-num-gpus")
EAGLE = "--sglang-speculative-algorithm EAGLE"
STEPS, TOPK = "--sglang-speculative-num-steps", "--sglang-speculative-eagle-topk"
DRAFTS = "--sglang-speculative-num-draft-tokens"
RULES = {
    resources.check_modes: (
        Rule(
            "--debug-rollout-only --debug-train-only",
            ("--debug-rollout-only, --debug-train-only",),
            "--debug-train-only",
        ),
    ),
    resources.check_offload: (
        Rule("--offload-train", ("--offload-train: moves GPU memory",), "--no-offload-train"),
        Rule("--offload", ("--offload: moves GPU memory",)),
    ),
    resources.check_distributed_backend: (
        Rule(
            "--distributed-backend nccl",
            ("nccl is not supported with --accelerator cpu", "--distributed-backend gloo"),
        ),
    ),
    resources.check_rollout_gpus: (
        Rule(
            "",
            ("without --colocate the engines need GPUs of their own",),
            "--colocate",
            without=("--rollout-num-gpus",),
        ),
        Rule(
            "--rollout-num-gpus 5",
            ("5 GPUs do not make whole engines of 2", "try: --rollout-num-gpus 4"),
            "--rollout-num-gpus 4",
            also=f"{EACH} 2",
        ),
        Rule(
            f"--rollout-num-gpus 12 {EACH} 12",
            ("12 GPUs do not fill whole nodes of 8", "per-engine 4"),
            f"--rollout-num-gpus 16 {EACH} 16",
            others=True,
            also="--sglang-attention-backend triton",
            model="",
            config={
                "num_attention_heads": 48,
                "num_key_value_heads": 16,
                "hidden_size": 192,
                "intermediate_size": 96,
                "head_dim": 4,
            },
            without=(
                "--num-layers",
                "--hidden-size",
                "--num-attention-heads",
                "--ffn-hidden-size",
                "--num-query-groups",
                "--group-query-attention",
            ),
        ),
        Rule(
            f"--rollout-num-gpus 12 {EACH} 3",
            ("an engine of 3 GPUs would straddle two nodes of 8",),
            f"--rollout-num-gpus 12 {EACH} 2",
            others=True,
        ),
    ),
    resources.check_shared_gpus: (
        Rule(
            "--num-gpus-per-node 4",
            ("8 training GPUs on a node of 4 (--num-gpus-per-node)", "--num-gpus-per-node 8"),
            "--num-gpus-per-node 8",
            model=DENSE,
        ),
        Rule(
            "--rollout-num-gpus 264",
            ("264 with --colocate is more than the 256 GPUs with trainers",),
            "--rollout-num-gpus 128",
            model=DENSE,
        ),
    ),
    resources.check_topology: (
        Rule(
            "--prefill-num-servers 32",
            ("32 prefill servers x 8 GPUs (--rollout-num-gpus-per-engine) = 256 of 256", "--prefill-num-servers 31"),
            "--prefill-num-servers 31",
            model=DENSE,
        ),
        Rule(
            "--sglang-config {dir}/wrong.yaml",
            ("sglang[0].server_groups[0].worker_typ: is unknown; did you mean worker_type",),
            "--sglang-config {dir}/right.yaml",
            model=DENSE,
            others=True,
        ),
        Rule(
            "--sglang-config {dir}/few.yaml",
            ("--sglang-config, --rollout-num-gpus", "= 8 GPUs, but --rollout-num-gpus is 256"),
            "--sglang-config {dir}/right.yaml",
            model=DENSE,
        ),
        Rule(
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 {EACH} 8",
            ("an engine would take GPUs 4 to 11 of the run, which lie on nodes 0 and 1",),
            f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 {EACH} 4",
            model=DENSE,
            without=APART,
        ),
    ),
    resources.check_weight_transport: (
        Rule(
            "--update-weight-transport disk",
            ("disk needs a directory",),
            "--update-weight-transport disk --update-weight-disk-dir {dir}",
        ),
        Rule(
            "--update-weight-mode delta",
            ("delta publishes files, and --update-weight-transport is nccl",),
            others=True,
        ),
        Rule(
            "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir {dir} --colocate",
            ("engines on the trainers' GPUs read the weights themselves",),
            also="--update-weight-local-checkpoint-dir {dir}",
        ),
        Rule("--release-train", ("rebuilds the trainers from a checkpoint",), others=True),
        Rule("--release-train --save {dir}/out", ("needs full weights as files, not full over nccl",)),
    ),
    resources.check_time_outs: (
        Rule("--ray-startup-timeout 0", ("--ray-startup-timeout: is 0, must be > 0",), "--ray-startup-timeout 1"),
    ),
    engines.check_engine_parallel: (
        Rule(
            "--sglang-pp-size 2",
            ("2 does not divide the 3 GPUs of an engine",),
            "--sglang-pp-size 3",
            also=f"--rollout-num-gpus 3 {EACH} 3",
            others=True,
        ),
        Rule(
            "--sglang-dp-size 2", ("2 inside one engine means data-parallel attention",), f"{DP} 2", also=f"{EACH} 2"
        ),
        Rule(
            f"{DP} 3",
            ("3 does not divide the 8 tensor-parallel ranks", "try: --sglang-dp-size 2"),
            f"{DP} 4",
            model=MOE,
        ),
        Rule(
            f"{DP} 4 --sglang-attn-cp-size 4",
            ("4 x --sglang-dp-size 4 = 16 does not divide the 8",),
            f"{DP} 4 --sglang-attn-cp-size 2",
            model=MOE,
        ),
        Rule(
            "--sglang-enable-dp-lm-head",
            ("splits the output layer as data-parallel attention does",),
            f"--sglang-enable-dp-lm-head {DP} 2",
            also=f"{EACH} 2",
        ),
        Rule(
            "--sglang-moe-dense-tp-size 2",
            ("2 must be 1 or 8, the tensor-parallel ranks",),
            "--sglang-moe-dense-tp-size 1",
            model=MLA,
        ),
    ),
    engines.check_engine_experts: (
        Rule(
            f"{EP} 3",
            ("3 does not divide the 8 tensor-parallel ranks of an engine", "try: --sglang-ep-size 2"),
            f"{EP} 4",
            model=MOE,
        ),
        Rule(
            f"{EACH} 64 {EP} 64",
            (
                "160 experts do not spread evenly over 64 expert-parallel ranks",
                "try: --sglang-ep-num-redundant-experts 32",
            ),
            f"{EACH} 64 {EP} 32",
            model=GLM,
            also=f"{DP} 8",
        ),
        Rule(
            "--sglang-moe-a2a-backend deepep",
            ("deepep exchanges tokens between experts, and the model has none",),
            model=DENSE,
        ),
        Rule("--sglang-moe-dp-size 3", ("3 x 1 expert-parallel ranks = 3",), "--sglang-moe-dp-size 2", model=MOE),
        Rule(
            "--sglang-enable-eplb",
            ("moves experts between expert-parallel ranks, of which there is one",),
            f"--sglang-enable-eplb {EP} 8",
            model=MOE,
        ),
        Rule(
            f"{EACH} 512 --rollout-num-gpus 512 --actor-num-nodes 64 {DP} 128",
            ("768 columns of an expert do not divide into 512",),
            f"{EACH} 512 --rollout-num-gpus 512 --actor-num-nodes 64 {DP} 128 {EP} 128",
            model=MOE,
            others=True,
        ),
    ),
    engines.check_engine_split: (
        Rule(
            f"{EACH} 16",
            ("12 attention heads and 4 key/value heads do not split over 16 ranks",),
            f"{EACH} 4",
            also="--rollout-num-gpus 16",
            others=True,
        ),
        Rule(
            f"{EACH} 64",
            ("32 attention heads and 4 key/value heads do not split over 64 ranks of an engine", "--sglang-dp-size 2"),
            f"{EACH} 64 {DP} 2",
            model=MOE,
            also=f"{EP} 64",
        ),
        Rule(
            f"{EACH} 8",
            (
                "8 ranks of an engine do not divide the 100 columns of a dense layer",
                "try: --rollout-num-gpus-per-engine 4",
            ),
            f"{EACH} 4",
            also="--rollout-num-gpus 8",
            others=True,
        ),
    ),
    engines.check_quantised_engines: (
        Rule(
            "",
            ("--hf-checkpoint: config.json says quant_method compressed-tensors", "convert_hf_to_fp8.py"),
            model=DENSE,
            config=INT4,
            kept_config=FP8,
            kind="unsupported",
        ),
        Rule(
            "",
            ("--hf-checkpoint: config.json says one scale a weight",),
            "--debug-rollout-only",
            model=DENSE,
            config={"quantization_config": {"quant_method": "fp8"}},
            kind="unsupported",
        ),
        Rule(
            "",
            ("--hf-checkpoint: config.json says activation_scheme static",),
            model=DENSE,
            config={"quantization_config": FP8["quantization_config"] | {"activation_scheme": "static"}},
            kept_config=FP8,
            kind="unsupported",
        ),
        Rule(
            "--accelerator cpu",
            ("--hf-checkpoint: config.json says quant_method fp8", "on the CPU", "tools/fp8_cast_bf16.py"),
            model=DENSE,
            config=FP8,
            kind="unsupported",
        ),
        Rule(
            "--sglang-quantization fp8",
            ("--sglang-quantization: fp8: engines that quantise", "leave it out"),
            "--sglang-quantization fp8",
            model=DENSE,
            kept_config=FP8,
            kind="unsupported",
        ),
    ),
    engines.check_engine_fp8_blocks: (
        Rule(
            f"{EACH} 32",
            (
                "1536 / 32 = 48 is not a multiple of 128",
                "legal TP (without EP): 1, 2, 3, 4, 6, 12",
                "try: --sglang-ep-size 8",
            ),
            f"{EACH} 32 {EP} 8",
            model=GLM,
            config=FP8,
            also="--sglang-moe-dense-tp-size 1",
        ),
        Rule(
            f"{EACH} 32",
            ("2048 / 32 = 64 is not a multiple of 128", "legal TP (without EP): 1, 2, 4, 8, 16"),
            f"{EACH} 16",
            model=MLA,
            config=FP8,
            also="--sglang-moe-dense-tp-size 1",
        ),
        Rule("", ("moe_intermediate_size 768 / 8 = 96", "try: --sglang-ep-size 4"), f"{EP} 4", model=MOE, config=FP8),
        Rule(
            f"{EACH} 8",
            ("intermediate_size 9728 / 8 = 1216 is not a multiple of 128", "legal TP: 1, 2, 4, 19"),
            f"{EACH} 4",
            model=DENSE,
            config=FP8,
        ),
        Rule(
            f"{EACH} 128 {EP} 128",
            ("queries: 24576 / 128 = 192 is not a multiple of 128", "--sglang-dp-size 2"),
            f"{EACH} 128 {EP} 128 {DP} 2",
            model=MLA,
            config=FP8,
            also="--sglang-moe-dense-tp-size 1",
        ),
    ),
    serving.check_engine_memory: (
        Rule(
            "--sglang-mem-fraction-static 1.2", ("is 1.2, must be within (0, 1)",), "--sglang-mem-fraction-static 0.8"
        ),
        Rule("--sglang-page-size 0", ("--sglang-page-size: is 0, must be at least 1",)),
        Rule("--sglang-schedule-conservativeness -1", ("is -1, must be >= 0",)),
        Rule(
            "--sglang-chunked-prefill-size 100",
            ("100 is not a multiple of --sglang-page-size 64", "prefill-size 128"),
            "--sglang-chunked-prefill-size -1",
            also="--sglang-page-size 64",
        ),
        Rule(
            "--sglang-chunked-prefill-size 192",
            ("192 / 2 data-parallel ranks = 96 is not", "prefill-size 256"),
            "--sglang-chunked-prefill-size 128",
            also=f"--sglang-page-size 64 {EACH} 2 {DP} 2",
        ),
    ),
    serving.check_engine_options: (
        Rule(
            "--sglang-disable-cuda-graph-padding --sglang-enable-torch-compile", ("each batch size would be compiled",)
        ),
        Rule("--sglang-enable-two-batch-overlap", ("overlaps the exchange of tokens",), model=MOE),
        Rule(
            "--sglang-moe-a2a-backend flashinfer",
            ("flashinfer needs data-parallel attention over all 8 ranks",),
            f"--sglang-moe-a2a-backend flashinfer {DP} 8",
            model=MOE,
        ),
        Rule(
            "--sglang-ep-dispatch-algorithm static",
            ("static picks another copy of an expert on each rank",),
            model=MOE,
        ),
        Rule("--sglang-retraction-policy priority", ("priority needs requests that have one",)),
        Rule("--sglang-enable-prefill-cp", ("needs --sglang-cp-strategy",)),
        Rule(
            "--sglang-disaggregation-mode prefill", ("leaves the other half of each request to nobody",), others=True
        ),
        Rule("--sglang-kv-cache-dtype fp8_e4m3", ("fp8_e4m3 needs a GPU",)),
    ),
    serving.check_speculative: (
        Rule(
            f"{STEPS} 3",
            ("tunes speculative decoding",),
            f"{EAGLE} {STEPS} 3 {TOPK} 1 {DRAFTS} 4",
            model=GLM,
            others=True,
        ),
        Rule("--sglang-speculative-algorithm EAGEL", ("EAGEL is unknown; known: EAGLE",), EAGLE, model=GLM),
        Rule(
            f"{STEPS} 3",
            ("eagle-topk: is not given, and --sglang-speculative-num-steps is",),
            f"{STEPS} 3 {TOPK} 1",
            model=GLM,
            also=EAGLE,
        ),
        Rule(
            f"{DRAFTS} 4",
            ("num-steps: is not given, and --sglang-speculative-num-draft-tokens is",),
            model=GLM,
            also=EAGLE,
        ),
        Rule(
            f"{STEPS} 3 {TOPK} 4",
            ("of the tree of --sglang-speculative-eagle-topk 4 over 3 steps",),
            f"{STEPS} 3 {TOPK} 4 {DRAFTS} 8",
            model=GLM,
            also=EAGLE,
        ),
        Rule(f"{STEPS} 0 {TOPK} 1 {DRAFTS} 1", ("num-steps: is 0, must be at least 1",), model=GLM, also=EAGLE),
        Rule(
            "--sglang-attention-backend flashmla",
            ("works with flashinfer, fa3 and triton only",),
            "--sglang-attention-backend fa3",
            model=GLM,
            also=f"{EAGLE} {STEPS} 3 {TOPK} 4 {DRAFTS} 8 --sglang-page-size 64",
        ),
        Rule(
            "--sglang-speculative-algorithm EAGLE3",
            ("EAGLE3 drafts with a model of its own",),
            "--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path {dir}",
            model=MOE,
        ),
        Rule(
            EAGLE,
            ("drafts with the checkpoint's own layers, and config.json has none",),
            model=GLM,
            config={"num_nextn_predict_layers": 0},
        ),
        Rule("--sglang-pp-size 2", ("EAGLE does not go with --sglang-pp-size 2",), model=GLM, also=EAGLE),
        Rule(
            "--sglang-speculative-algorithm NGRAM",
            ("NGRAM does not go with it; leave one of the two out",),
            model=GLM,
            also=f"{DP} 8",
        ),
    ),
}
TOPOLOGY = "sglang: [{{name: default, server_groups: [{{{key}: regular, num_gpus: {gpus}, num_gpus_per_engine: 8}}]}}]"


@pytest.fixture(autouse=True)
def topologies(case):
    for name, key, gpus in (("right", "worker_type", 256), ("wrong", "worker_typ", 256), ("few", "worker_type", 8)):
        (case.directory / f"{name}.yaml").write_text(TOPOLOGY.format(key=key, gpus=gpus))


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_engines_of_another_room_have_no_rules_here(case):
    """Training alone starts no engine: whatever is said about engines then breaks nothing."""
    more = (EACH, "3", "--sglang-pp-size", "2", "--sglang-mem-fraction-static", "7")
    case.args("--debug-train-only", *more, without=("--rollout-num-gpus",))


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "a2a", "shape"),
    [
        (8, 1, 1, "none", (8, 8, 8, 1, 8)),
        (32, 4, 32, "none", (32, 8, 32, 32, 1)),
        (64, 64, 64, "deepep", (64, 1, 64, 64, 1)),
        (64, 8, 1, "deepep", (64, 8, 64, 64, 1)),
    ],
)
def test_ranks_of_an_engine(case, tp, dp, ep, a2a, shape):
    """A backend that exchanges tokens spreads the experts over all ranks, whatever --sglang-ep-size says."""
    args = case.args().replace(
        rollout_num_gpus_per_engine=tp,
        sglang_dp_size=dp,
        sglang_enable_dp_attention=dp > 1,
        sglang_ep_size=ep,
        sglang_moe_a2a_backend=a2a,
    )
    found = EngineShape.of(args)
    assert (found.tp, found.attention_tp, found.dense_tp, found.ep, found.expert_tp) == shape


def test_without_the_checkpoint_the_trainers_model_stands_in(case):
    """On a laptop there is no config.json; heads and experts of the engines are then those of the flags."""
    args = case.args().replace(hf_config=None)
    assert EngineModel.of(args).heads == 12 and EngineModel.of(args).groups == 4
    assert list(engines.check_engine_split(args.replace(rollout_num_gpus_per_engine=16), {}))


def test_what_spans_the_ranks_is_what_sglang_says():
    """The list is SGLang's own; with an older copy the checks would count the ranks of an expert wrongly."""
    tree = ast.parse(source_of("sglang", "srt/arg_groups/overrides.py"))
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert set(SPANNING_BACKENDS) == ast.literal_eval(assigned["_A2A_EP_SPANNING_BACKENDS"].args[0])


@pytest.mark.parametrize("width", [512, 768, 1408, 1536, 2048, 5120])
def test_expert_blocks_are_whole_exactly_where_division_says_so(case, width):
    """Experts of 1536 columns over 32 ranks leave 48 of a 128-block each: SGLang says so after minutes of loading."""
    args = case.args().replace(
        hf_config={"num_experts": 64, "moe_intermediate_size": width, **FP8}, sglang_moe_dense_tp_size=1
    )
    legal = [tp for tp in range(1, width + 1) if width % tp == 0 and (width // tp) % 128 == 0]
    for ranks in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64):
        (*problems,) = engines.check_engine_fp8_blocks(args.replace(rollout_num_gpus_per_engine=ranks), {})
        assert bool(problems) == (width % ranks == 0 and ranks not in legal), ranks
        if problems:
            assert f"legal TP (without EP): {', '.join(map(str, legal)) or 'none'}" in problems[0].says
