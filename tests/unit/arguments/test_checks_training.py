"""Rules of number formats, optimizer, activations and overlap: each once broken, its message, and once kept."""

import pytest

from slime.utils.arguments.checks import optimizer, overlap, precision, recompute
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

MOE, MLA, DENSE = "qwen3-30B-A3B", "deepseek-v3", "qwen3-4B"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
FULL = "--recompute-granularity full"
UNIFORM = "--recompute-method uniform --recompute-num-layers 1"
AWARE, OFFLOAD = "--use-precision-aware-optimizer", "--optimizer-cpu-offload"
EP_OVERLAP = "--overlap-moe-expert-parallel-comm"
RULES = {
    precision.check_precision: (
        Rule("--bf16 --fp32", ("--fp32, --bf16: give one",), "--fp32"),
        Rule("--fp32-residual-connection", ("all of this run is in 32 bits",), "--fp32-residual-connection --bf16"),
        Rule("--fp16-lm-cross-entropy", ("goes with --fp16 only",), "--fp16-lm-cross-entropy --fp16"),
        Rule(
            "--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            ("--grad-reduce-in-bf16, --accumulate-allreduce-grads-in-fp32: the one adds up",),
            "--grad-reduce-in-bf16",
        ),
    ),
    precision.check_fp8: (
        Rule(
            "--fp8-param-gather",
            ("--fp8-param-gather: tunes FP8, which is off",),
            f"--fp8-param-gather {FP8}",
            model=DENSE,
        ),
        Rule("--fp4-format e2m1", ("--fp8-format, --fp4-format: give one",), model=DENSE, also=FP8),
        Rule("--accelerator cpu", ("needs the FP8 units of a GPU",), model=DENSE, also=FP8, others=True),
        Rule(
            "--fp32",
            ("FP8 products go with 16-bit training", "try: give --bf16"),
            "--bf16",
            model=DENSE,
            also=FP8,
            without=("--bf16",),
        ),
        Rule(
            "--transformer-impl local",
            ("local has no FP8",),
            "--transformer-impl transformer_engine",
            model=DENSE,
            also=FP8,
        ),
        Rule(
            "--fp8-recipe custom",
            ("custom needs --fp8-quantizer-factory",),
            "--fp8-recipe tensorwise",
            model=DENSE,
            also="--fp8-format e4m3",
        ),
        Rule("--fp8-output-proj", ("goes with --fp8-recipe mxfp8, not blockwise",), model=DENSE, also=FP8),
        Rule(
            "--fp8-recipe delayed",
            ("delayed scaling applies to every layer",),
            "--fp8-recipe blockwise",
            model=DENSE,
            also="--fp8-format e4m3 --first-last-layers-bf16",
        ),
        Rule(
            "--num-layers-at-start-in-bf16 37",
            ("is 37, must be within 0..36 (--num-layers 36 / 1 stages)",),
            "--num-layers-at-start-in-bf16 36",
            model=DENSE,
            also=f"{FP8} --first-last-layers-bf16",
        ),
        Rule(
            OFFLOAD,
            ("with --fp8-recipe blockwise the optimizer must be on the GPU",),
            model=DENSE,
            also=f"{FP8} --fp8-param-gather {AWARE}",
        ),
    ),
    precision.check_fp8_blocks: (
        Rule(
            "--expert-tensor-parallel-size 4",
            (
                "--moe-ffn-hidden-size: 768 / 4 = 192 is not a multiple of 128, the block of --fp8-recipe blockwise",
                "sizes that fit: 1, 2, 3, 6",
                "try: --expert-tensor-parallel-size 2",
            ),
            "--expert-tensor-parallel-size 2",
            model=MOE,
            also=FP8,
        ),
        Rule(
            "--tensor-model-parallel-size 8 --sequence-parallel",
            ("--ffn-hidden-size: 9728 / 8 = 1216 is not a multiple of 128", "try: --tensor-model-parallel-size 4"),
            "--tensor-model-parallel-size 4",
            model=DENSE,
            also=FP8,
        ),
        Rule(
            "--data-pad-size-multiplier 64",
            ("64 tokens are not a multiple of 128", "try: --data-pad-size-multiplier 128"),
            "--data-pad-size-multiplier 256",
            model=DENSE,
            also=FP8,
        ),
    ),
    optimizer.check_optimizer: (
        Rule("--optimizer muon", ("muon does not work on the distributed optimizer",), kind="unsupported"),
        Rule("--use-stateless-adam --optimizer sgd --no-save-optim", ("sgd is not adam",)),
        Rule("--use-stateless-adam", ("leaves no optimizer states to save",), "--use-stateless-adam --no-save-optim"),
        Rule(f"--use-stateless-adam --no-save-optim {OFFLOAD} {AWARE}", ("there are no states to keep on the CPU",)),
    ),
    optimizer.check_optimizer_offload: (
        Rule(
            OFFLOAD,
            ("works only together with the precision-aware optimizer", f"try: {AWARE}"),
            f"{OFFLOAD} {AWARE}",
            model=MOE,
        ),
        Rule(
            "--optimizer-offload-fraction 1.5",
            ("is 1.5, must be within [0, 1]",),
            "--optimizer-offload-fraction 0.5",
            also=f"{OFFLOAD} {AWARE}",
        ),
        Rule(
            f"--overlap-cpu-optimizer-d2h-h2d {AWARE}",
            ("overlaps copies between CPU and GPU",),
            f"--overlap-cpu-optimizer-d2h-h2d {AWARE} {OFFLOAD}",
            model=MOE,
        ),
        Rule("--use-torch-optimizer-for-cpu-offload", ("chooses the optimizer of the CPU",), model=MOE, others=True),
    ),
    optimizer.check_optimizer_formats: (
        Rule(
            "--exp-avg-dtype bf16",
            ("bf16 needs the precision-aware optimizer",),
            f"--exp-avg-dtype bf16 {AWARE}",
            model=MOE,
        ),
        Rule(f"{AWARE} --optimizer sgd", ("sgd is not adam",), model=MOE),
        Rule(AWARE, ("needs Transformer Engine's Adam",), f"{AWARE} {OFFLOAD}"),
        Rule(
            "--main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
            ("the one keeps gradients in 16 bits",),
            "--main-grads-dtype bf16",
            model=MOE,
            also=AWARE,
        ),
        Rule("--main-params-dtype fp16", ("fp16 master weights beside bf16 ones",), model=MOE, also=AWARE),
    ),
    optimizer.check_learning_rate: (
        Rule("--lr -1", ("--lr: is -1, must be >= 0",), "--lr 0"),
        Rule("--lr 1e-6 --min-lr 1e-5", ("1e-05 is above --lr 1e-06",), "--lr 1e-5 --min-lr 1e-6"),
        Rule("--lr 1e-6 --lr-warmup-init 1e-5", ("--lr-warmup-init: 1e-05 is above",), "--lr 1e-6 --lr-warmup-init 0"),
        Rule("--train-samples 100", ("counts samples, and slime's runs count rollouts",)),
        Rule("--lr-warmup-samples 9", ("--lr-warmup-samples: counts samples", "--lr-warmup-iters 10")),
        Rule("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", ("give one of the two",), "--lr-warmup-fraction 0.1"),
        Rule("--lr-warmup-fraction 1", ("is 1, must be within [0, 1)",), "--lr-warmup-fraction 0.5"),
        Rule(
            "--lr-decay-style WSD",
            ("WSD decays over the last iterations",),
            "--lr-decay-style WSD --lr-wsd-decay-iters 1",
        ),
        Rule(
            "--lr-warmup-iters 3",
            (
                "3 is not less than the 3 iterations of the run (3 rollouts x 8 x 4 samples // --global",
                "try: --lr-warmup-iters 2",
            ),
            "--lr-warmup-iters 2",
        ),
    ),
    optimizer.check_weight_decay: (
        Rule(
            "--start-weight-decay 0.1",
            ("0.1 with --weight-decay-incr-style constant",),
            "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        ),
        Rule("--weight-decay-incr-style cosine", ("cosine goes from --start-weight-decay to --end-weight-decay",)),
        Rule("--clip-grad -1", ("--clip-grad: is -1",), "--clip-grad 0"),
    ),
    recompute.check_recompute: (
        Rule(f"{FULL} --recompute-num-layers 1", ("--recompute-method: is not given",), f"{FULL} {UNIFORM}"),
        Rule(
            f"{FULL} --recompute-method block",
            ("--recompute-num-layers: is not given", "1..6 layers"),
            f"{FULL} --recompute-method block --recompute-num-layers 6",
        ),
        Rule(
            "--recompute-num-layers 0",
            ("is 0, must be within 1..6",),
            "--recompute-num-layers 2",
            also=f"{FULL} --recompute-method uniform",
        ),
        Rule(f"{FULL} {UNIFORM} --recompute-activations", ("the one means selective",), f"{FULL} {UNIFORM}"),
        Rule(
            "--recompute-method uniform",
            ("--recompute-granularity is not given, so nothing is recomputed",),
            f"{FULL} {UNIFORM}",
        ),
        Rule(
            "--recompute-num-layers 1",
            ("1 goes with full recomputation",),
            "--recompute-modules core_attn",
            also="--recompute-granularity selective",
        ),
        Rule(
            "--recompute-modules attn",
            ("attn is unknown; known: core_attn",),
            "--recompute-modules layernorm",
            also="--recompute-granularity selective",
        ),
        Rule(
            "--recompute-modules moe_act",
            ("moe_act is part of the experts' grouped product",),
            "--recompute-modules mlp",
            also="--recompute-granularity selective",
        ),
        Rule(
            "--recompute-modules mla_up_proj",
            ("mla_up_proj is part of latent attention",),
            model=MOE,
            also="--recompute-granularity selective",
        ),
        Rule(
            "--recompute-modules shared_experts",
            ("shared experts that overlap with communication",),
            model=MLA,
            also="--recompute-granularity selective --moe-shared-expert-overlap",
        ),
        Rule(
            "--fp8-recipe delayed",
            ("not recomputed under delayed scaling",),
            "--fp8-recipe blockwise",
            model=DENSE,
            also="--fp8-format e4m3 --recompute-granularity selective --recompute-modules layernorm",
        ),
        Rule("--distribute-saved-activations", ("of which there is one",), also=f"{FULL} {UNIFORM}"),
        Rule(
            "--moe-layer-recompute",
            ("full recomputation includes the layers of experts",),
            model=MOE,
            also=f"{FULL} {UNIFORM}",
        ),
        Rule(
            "--distribute-saved-activations --sequence-parallel",
            ("sequence parallelism has spread them already",),
            "--distribute-saved-activations",
            also=f"{FULL} {UNIFORM} --tensor-model-parallel-size 2",
        ),
    ),
    recompute.check_activation_offload: (
        Rule("--cpu-offloading-num-layers 6", ("is 6, must be within 0..5",), "--cpu-offloading-num-layers 5"),
        Rule(
            "--pipeline-model-parallel-size 2",
            ("1 does not go with --pipeline-model-parallel-size 2",),
            also="--cpu-offloading-num-layers 1",
        ),
        Rule(f"{FULL} {UNIFORM}", ("either recomputed or kept on the CPU",), also="--cpu-offloading-num-layers 1"),
        Rule(
            "--offload-modules core_attn",
            ("chooses what --fine-grained-activation-offloading moves",),
            "--offload-modules core_attn --fine-grained-activation-offloading",
        ),
        Rule("--fine-grained-activation-offloading", ("--offload-modules: is not given",)),
        Rule(
            "--offload-modules attn",
            ("attn is unknown; known: core_attn",),
            "--offload-modules core_attn",
            also="--fine-grained-activation-offloading",
        ),
        Rule(
            "--offload-modules attn_proj",
            ("attn_proj's input is core_attn's output",),
            "--offload-modules attn_proj core_attn",
            also="--fine-grained-activation-offloading",
        ),
        Rule(
            "--cpu-offloading-num-layers 1",
            ("whole layers or chosen modules",),
            also="--fine-grained-activation-offloading --offload-modules core_attn",
        ),
        Rule(
            "--recompute-granularity selective --recompute-modules moe",
            ("moe_act would be recomputed with the whole expert layer",),
            model=MOE,
            also="--fine-grained-activation-offloading --offload-modules moe_act",
        ),
        Rule(
            "--transformer-impl local",
            ("is not part of --transformer-impl local",),
            also="--fine-grained-activation-offloading --offload-modules core_attn",
        ),
    ),
    overlap.check_overlap: (
        Rule(
            "--overlap-param-gather",
            ("builds on the overlapped reduction",),
            "--overlap-param-gather --overlap-grad-reduce",
        ),
        Rule("--overlap-param-gather-with-optimizer-step", ("does not go with distributed checkpoints",)),
        Rule("--overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication", ("the one extends what",)),
        Rule(
            "--defer-embedding-wgrad-compute",
            ("--pipeline-model-parallel-size is 1",),
            "--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2",
        ),
        Rule("--delay-wgrad-compute", ("fills the time of the experts' communication",), model=MOE, others=True),
    ),
    overlap.check_expert_overlap: (
        Rule(
            "--expert-model-parallel-size 1",
            ("hides communication between expert-parallel ranks",),
            "--expert-model-parallel-size 8",
            model=MOE,
            also=EP_OVERLAP,
        ),
        Rule(
            "--pipeline-model-parallel-size 2",
            ("with --pipeline-model-parallel-size 2 it needs virtual stages",),
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            model=MOE,
            also=f"{EP_OVERLAP} --expert-model-parallel-size 8",
        ),
        Rule(
            f"{FULL} {UNIFORM}",
            ("whole layers are recomputed",),
            model=MOE,
            also=f"{EP_OVERLAP} --expert-model-parallel-size 8",
        ),
        Rule(
            "--moe-shared-expert-overlap",
            ("give one of the two",),
            model=MLA,
            also=f"{EP_OVERLAP} --expert-model-parallel-size 8",
        ),
        Rule(
            "--fp32",
            ("goes with 16-bit training",),
            "--bf16",
            model=MOE,
            without=("--bf16",),
            also=f"{EP_OVERLAP} --expert-model-parallel-size 8",
        ),
        Rule(
            "--mtp-num-layers 2",
            ("2: at most 1 layer",),
            "--mtp-num-layers 1",
            model=MLA,
            also=f"{EP_OVERLAP} --expert-model-parallel-size 8",
            config={"num_nextn_predict_layers": 2},
        ),
    ),
    overlap.check_megatron_features: (
        Rule("--use-megatron-fsdp", ("is not supported yet", "distributed optimizer only"), kind="unsupported"),
        Rule(
            "--rampup-batch-size 8 8 100",
            ("every optimizer step has --global-batch-size responses",),
            kind="unsupported",
        ),
        Rule("--ckpt-format torch", ("torch is not supported yet", "writes torch_dist"), kind="unsupported"),
        Rule("--cuda-graph-impl local", ("a new shape each time",), kind="unsupported"),
        Rule("--transformer-impl local", ("local is not supported yet",), kind="unsupported"),
        Rule("--attention-backend local", ("local needs Megatron's local layers",), "--attention-backend flash"),
    ),
}


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_what_is_unsupported_is_a_flag_of_megatrons(case):
    """A name that no longer exists would protect nobody."""
    args = case.args()
    assert not [dest for dest in overlap.UNSUPPORTED if not hasattr(args, dest)]
