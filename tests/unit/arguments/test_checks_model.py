"""Rules of the model and of its parallel layout: each once broken, its message, and once kept.

The large models are those of tests/data/hf_configs: their facts come from config.json, the rules are about real sizes.
"""

import pytest

from slime.utils.arguments.checks import model, parallel, pipeline
from tests.helpers.rules import Rule, check_rule, each_rule, rule_name

MOE, MLA, DSA, GLM = "qwen3-30B-A3B", "deepseek-v3", "glm5.2-744B-A40B", "glm4.5-355B-A32B"
SP = "--sequence-parallel"
TP8 = f"--tensor-model-parallel-size 8 {SP}"
PP = "--pipeline-model-parallel-size"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
SPLIT = "--decoder-first-pipeline-num-layers {} --decoder-last-pipeline-num-layers {}"
PLAIN = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--num-query-groups")
GDN = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4"
RULES = {
    model.check_model: (
        Rule(
            "--hidden-size 49",
            ("--hidden-size: is 49, and hidden_size in config.json is 48", "try: --hidden-size 48"),
            "--hidden-size 48",
            others=True,
        ),
        Rule("--num-layers 7", ("num_hidden_layers in config.json is 6",), "--num-layers 6"),
        Rule("--num-layers 5", ("--num-layers: is 5",), "--num-layers 5 --debug-train-only"),
        Rule("--num-attention-heads 24", ("try: --num-attention-heads 12",), "--num-attention-heads 12"),
        Rule("--ffn-hidden-size 101", ("intermediate_size in config.json is 100",), "--ffn-hidden-size 100"),
        Rule("--num-query-groups 3", ("num_key_value_heads in config.json is 4",), "--num-query-groups 4"),
        Rule("--kv-channels 6", ("--kv-channels: is 6, and config.json gives 4",), "--kv-channels 4"),
        Rule("--num-experts 8", ("8 gives the model something that config.json does not describe",)),
        Rule("--add-qkv-bias", ("--add-qkv-bias: gives the model something that config.json does not describe",)),
        Rule(
            "--qk-layernorm", ("--qk-layernorm",), config={"model_type": "qwen2"}, kept_config={"model_type": "qwen3"}
        ),
        Rule(
            "--moe-ffn-hidden-size 769",
            ("--moe-ffn-hidden-size: is 769, and moe_intermediate_size in config.json is 768",),
            "--moe-ffn-hidden-size 768",
            model=MOE,
        ),
        Rule(
            "--moe-layer-freq [0]*4+[1]*44",
            ("--moe-layer-freq: is [0]*4+[1]*44, and decoder_sparse_step in config.json is 1",),
            "--moe-layer-freq [1]*48",
            model=MOE,
        ),
        Rule(
            "--qk-pos-emb-head-dim 32",
            ("--qk-pos-emb-head-dim: is 32, and qk_rope_head_dim in config.json is 64",),
            "--qk-pos-emb-head-dim 64",
            model=MLA,
        ),
    ),
    model.check_tied: (
        Rule(
            "--untie-embeddings-and-output-weights",
            ("config.json has tie_word_embeddings true, the command line has the flag", "leave --untie"),
            without=("--untie-embeddings-and-output-weights",),
            config={"tie_word_embeddings": True},
        ),
    ),
    model.check_dropout: (
        Rule(
            "--attention-dropout 0.1",
            ("--attention-dropout: is 0.1, must be 0", "the same policy"),
            "--attention-dropout 0",
        ),
        Rule("--hidden-dropout 0.2", ("--hidden-dropout: is 0.2",), "--hidden-dropout 0"),
    ),
    model.check_rotary: (
        Rule("--rotary-percent 1.5", ("--rotary-percent: is 1.5, must be within (0, 1]",), "--rotary-percent 1.0"),
        Rule(
            "--rotary-percent 0.3",
            ("0.3 x 4 (width of a head) = 1 dimensions, which do not pair up",),
            "--rotary-percent 0.5",
        ),
        Rule("--rotary-interleaved", ("latent attention has its own order",), model=MLA),
        Rule(
            "--position-embedding-type learned_absolute",
            ("is learned_absolute, and config.json describes rotary positions",),
            model=MOE,
        ),
    ),
    parallel.check_world: (
        Rule(
            "--context-parallel-size 3",
            ("tensor 1 x pipeline 1 x context 3 = 3 does not divide the 2 training GPUs", "--context-parallel-size 2"),
            "--context-parallel-size 2",
        ),
        Rule(
            f"{TP8} {PP} 4 --context-parallel-size 16 --expert-tensor-parallel-size 1",
            ("tensor 8 x pipeline 4 x context 16 = 512 does not divide the 256", "--context-parallel-size 8"),
            f"{TP8} {PP} 4 --context-parallel-size 8 --expert-tensor-parallel-size 1",
            model=GLM,
        ),
        Rule(
            "--expert-model-parallel-size 32",
            ("expert tensor 4 x expert 32 x pipeline 4 = 512 does not divide", "try: --expert-model-parallel-size 16"),
            "--expert-model-parallel-size 16",
            also=f"--tensor-model-parallel-size 4 {SP} {PP} 4",
            model=MOE,
        ),
    ),
    parallel.check_heads: (
        Rule(
            "--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8",
            ("8 does not divide the 12 attention heads", "try: --tensor-model-parallel-size 4"),
            "--tensor-model-parallel-size 4 --actor-num-gpus-per-node 8",
            others=True,
        ),
        Rule(
            "--tensor-model-parallel-size 6 --actor-num-gpus-per-node 6",
            ("neither a divisor nor a multiple of the 4 key/value groups", "try: --tensor-model-parallel-size 2"),
            "--tensor-model-parallel-size 2",
            others=True,
        ),
        Rule(
            "--num-query-groups 5",
            ("--num-query-groups: 5 does not divide the 12 attention heads",),
            "--num-query-groups 4",
            others=True,
        ),
        Rule("--group-query-attention", ("latent attention has no key/value groups",), model=MLA, others=True),
    ),
    parallel.check_linear_attention: (
        Rule(
            "--linear-num-value-heads 40",
            ("40 is not a multiple of --linear-num-key-heads 16",),
            "--linear-num-value-heads 32",
            also=GDN,
        ),
        Rule("--linear-num-key-heads 0", ("--linear-num-key-heads: is 0, must be at least 1",), also=GDN),
        Rule("--deterministic-mode", ("have no deterministic kernel",), also=GDN),
        Rule(
            "--linear-num-key-heads 5 --linear-num-value-heads 10",
            ("tensor 2 x context 1 = 2 does not divide the 5 heads",),
            "--linear-num-key-heads 4 --linear-num-value-heads 8",
            also="--linear-attention-freq 4 --tensor-model-parallel-size 2 --sequence-parallel",
        ),
        Rule(
            "--experimental-attention-variant gated_delta_net",
            ("--linear-attention-freq: is not given",),
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 4",
        ),
        Rule(
            "--linear-num-key-heads 3 --linear-num-value-heads 6",
            ("tensor 1 x context 2 = 2 does not divide the 3 heads of --linear-num-key-heads",),
            "--linear-num-key-heads 4 --linear-num-value-heads 8",
            also=f"{GDN} --context-parallel-size 2",
        ),
    ),
    parallel.check_widths: (
        Rule(
            "--expert-tensor-parallel-size 512",
            ("512 does not divide --moe-ffn-hidden-size 768: 768 / 512 = 1.5 columns a rank",),
            "--expert-tensor-parallel-size 2",
            also="--expert-model-parallel-size 1",
            model=MOE,
            others=True,
        ),
    ),
    parallel.check_vocabulary: (
        Rule("--padded-vocab-size 249", ("249 is below the vocabulary of 250 tokens",), "--padded-vocab-size 250"),
        Rule("--vocab-size 200", ("200 has no rows for all token ids", "try: --vocab-size 250"), "--vocab-size 250"),
        Rule("--make-vocab-size-divisible-by 0", ("--make-vocab-size-divisible-by: is 0",)),
        Rule(
            "--padded-vocab-size 251",
            ("251 is not a multiple of --tensor-model-parallel-size 2", "try: --padded-vocab-size 252"),
            "--padded-vocab-size 252",
            also="--tensor-model-parallel-size 2",
        ),
    ),
    parallel.check_sequence_parallel: (
        Rule(
            "",
            ("--num-experts 128 with --tensor-model-parallel-size 2 needs it",),
            SP,
            also="--tensor-model-parallel-size 2",
            model=MOE,
        ),
        Rule(
            "",
            ("sparse attention with --tensor-model-parallel-size 2 needs it",),
            SP,
            also="--tensor-model-parallel-size 2 --experimental-attention-variant dsa --dsa-indexer-topk 9",
        ),
        Rule(
            "",
            ("linear attention with --tensor-model-parallel-size 2 needs it",),
            SP,
            also="--tensor-model-parallel-size 2 --linear-attention-freq 4",
        ),
        Rule(
            "--tp-comm-overlap",
            ("--tp-comm-overlap: overlaps",),
            f"--tp-comm-overlap {SP}",
            also="--tensor-model-parallel-size 2",
        ),
    ),
    parallel.check_context_parallel: (
        Rule("--cp-comm-type ring", ("ring is unknown; known: p2p",), "--cp-comm-type all_gather"),
        Rule("--cp-comm-type p2p a2a", ("2 values, must be 1 or one for each of the 6 layers",), "--cp-comm-type p2p"),
    ),
    pipeline.check_stages: (
        Rule(
            f"{PP} 4 --actor-num-gpus-per-node 4",
            ("6 layers do not divide into 4 equal stages",),
            f"{PP} 3 --actor-num-gpus-per-node 3",
            also="--use-dynamic-batch-size --max-tokens-per-gpu 99",
        ),
        Rule(
            "--decoder-first-pipeline-num-layers 1",
            ("6 layers - 1 on the first stage = 5 do not divide into 3",),
            "--decoder-first-pipeline-num-layers 3",
            also=f"{PP} 4 --actor-num-gpus-per-node 4",
        ),
        Rule("--decoder-first-pipeline-num-layers 3", ("has no meaning with --pipeline-model-parallel-size 1",)),
        Rule(
            "--pipeline-model-parallel-layout Ettt|ttL",
            ("describes 5 decoder layers (t), --num-layers is 6",),
            "--pipeline-model-parallel-layout Ettt|tttL",
            also=f"{PP} 2",
        ),
        Rule(
            "--num-virtual-stages-per-pipeline-rank 2",
            ("2 does not divide the 3 layers of a pipeline stage",),
            "--num-virtual-stages-per-pipeline-rank 3",
            also=f"{PP} 2",
        ),
        Rule(
            f"{PP} 8",
            ("92 layers do not divide into 8 equal stages",),
            f"{PP} 8 {SPLIT.format(10, 10)}",
            model=GLM,
            also="--expert-model-parallel-size 32",
        ),
        Rule(
            "--microbatch-group-size-per-virtual-pipeline-stage 1",
            ("1 is less than --pipeline-model-parallel-size 2",),
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            also=f"{PP} 2 --num-virtual-stages-per-pipeline-rank 3",
        ),
    ),
    pipeline.check_expert_layers: (
        Rule(
            "--moe-layer-freq [1]*47",
            ("[1]*47 describes 47 layers, --num-layers is 48",),
            "--moe-layer-freq 1",
            model=MOE,
            others=True,
        ),
    ),
    pipeline.check_index_sharing: (
        Rule(
            f"{PP} 2",
            (
                "stage 1 on layer 39 (counted from 0) would start on a layer that reuses",
                "frequency 4, offset 3",
                "legal first/last stages for --pipeline-model-parallel-size 2: 38/40",
                "try: --decoder-first-pipeline-num-layers 38 --decoder-last-pipeline-num-layers 40",
            ),
            f"{PP} 2 {SPLIT.format(38, 40)}",
            model=DSA,
            also="--expert-model-parallel-size 32",
        ),
        Rule(
            f"{PP} 8 {SPLIT.format(15, 15)}",
            ("stage 1 on layer 15, stage 2 on layer 23", "14/16, 18/12"),
            f"{PP} 8 {SPLIT.format(14, 16)}",
            model=DSA,
            also="--expert-model-parallel-size 32",
        ),
        Rule(
            f"{PP} 4 {SPLIT.format(19, 19)}",
            ("18/20",),
            f"{PP} 4 {SPLIT.format(18, 20)}",
            model=DSA,
            also="--expert-model-parallel-size 32",
        ),
        Rule(
            "--pipeline-model-parallel-layout Et*39|t*39L",
            ("stage 1 on layer 39", "--pipeline-model-parallel-layout E"),
            "--pipeline-model-parallel-layout Et*38|t*40L",
            model=DSA,
            also=f"{PP} 2 --expert-model-parallel-size 32",
        ),
    ),
    pipeline.check_index_sharing_of_checkpoint: (
        Rule(
            "--dsa-indexer-skip-topk-offset 2",
            (
                "4 and 2 let layer 2 (counted from 0) reuse the top-k of an earlier layer",
                "by config.json the checkpoint has indexer weights there",
                "--dsa-indexer-skip-topk-offset 3",
            ),
            "--dsa-indexer-skip-topk-offset 3",
            model=DSA,
        ),
    ),
    pipeline.check_engine_stages: (
        Rule(
            "--sglang-pp-size 2",
            ("2: stage 1 on layer 39 (counted from 0) would start on a layer that reuses",),
            "--sglang-pp-size 1",
            model=DSA,
        ),
        Rule(
            "--sglang-pp-size 64",
            ("64 stages for 48 layers",),
            "--sglang-pp-size 16",
            model=MOE,
            also="--rollout-num-gpus-per-engine 64",
        ),
    ),
    pipeline.check_sparse_attention: (
        Rule("--dsa-indexer-topk 0", ("is 0, must be at least 1",), model=DSA),
        Rule("--dsa-indexer-n-heads -2", ("is -2, must be at least 1",), model=DSA, others=True),
        Rule(
            "--dsa-indexer-loss-coeff 0.5 --max-tokens-per-gpu 65536",
            ("64 heads / 1 x 65,536 tokens x 65,536 x context parallel 1 = 1099.5 GB each",),
            "--dsa-indexer-loss-coeff 0.5 --max-tokens-per-gpu 65536 --dsa-indexer-use-sparse-loss",
            model=DSA,
        ),
        Rule(
            "--dsa-kernel-backend tilelang --accelerator cpu",
            ("tilelang: its kernels need a GPU",),
            "--accelerator cpu",
            model=DSA,
            others=True,
        ),
        Rule(
            "--dsa-kernel-backend tilelang --kv-lora-rank 256",
            ("--kv-lora-rank 512 and --qk-pos-emb-head-dim 64, the model has 256 and 64",),
            "--dsa-kernel-backend tilelang",
            model=DSA,
            others=True,
        ),
        Rule(
            "--dsa-indexer-rope-interleaved",
            ("the checkpoint's indexer rotates halves",),
            model=DSA,
            config={"indexer_rope_interleave": False},
        ),
        Rule(
            "--dsa-indexer-loss-coeff -1",
            ("is -1, must be >= 0",),
            "--dsa-indexer-loss-coeff 1.0",
            model=DSA,
            also="--dsa-indexer-use-sparse-loss",
        ),
        Rule(
            "--dsa-indexer-loss-coeff 0.5 --freeze-indexer",
            ("--dsa-indexer-loss-coeff 0.5 trains the indexer, --freeze-indexer keeps it",),
            "--freeze-indexer",
            model=DSA,
            also="--dsa-indexer-use-sparse-loss",
        ),
        Rule(
            "--dsa-indexer-loss-coeff 0.5 --calculate-per-token-loss",
            ("divides every gradient by the response tokens", "not supported yet"),
            "--dsa-indexer-loss-coeff 0.5",
            model=DSA,
            also="--dsa-indexer-use-sparse-loss",
            kind="unsupported",
        ),
    ),
    pipeline.check_mtp: (
        Rule(
            "--enable-mtp-training",
            ("--mtp-num-layers is not given",),
            "--enable-mtp-training --mtp-num-layers 1",
            model=GLM,
        ),
        Rule(
            "--mtp-num-layers 2",
            ("2 is more than the checkpoint has: 1 (num_nextn", "; --mtp-use-repeated-layer runs it 2 times"),
            "--mtp-num-layers 1",
            model=GLM,
        ),
        Rule("--mtp-num-layers 1", ("1 is more than the checkpoint has: 0", "leave --mtp-num-layers out"), model=MOE),
        Rule(
            "--mtp-num-layers 2 --mtp-use-repeated-layer",
            ("2 is more than the checkpoint has: 0", "leave --mtp-num-layers out"),
            model=MOE,
        ),
        Rule(
            "--mtp-use-repeated-layer",
            ("runs one prediction layer --mtp-num-layers times, and that is not given",),
            "--mtp-use-repeated-layer --mtp-num-layers 3",
            model=DSA,
        ),
        Rule(
            "--mtp-use-repeated-layer --mtp-num-layers 3",
            ("runs one prediction layer 3 times, and the checkpoint has 2 different ones",),
            "--mtp-num-layers 2",
            model=GLM,
            config={"num_nextn_predict_layers": 2},
        ),
        Rule("--mtp-loss-scaling-factor -1", ("--mtp-loss-scaling-factor: is -1, must be >= 0",)),
        Rule(
            "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0",
            ("is 0: weight decay alone would move the prediction layers",),
            "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.1",
            model=DSA,
        ),
        Rule(
            "--mtp-num-layers 2",
            ("--mtp-num-layers: 2 with sparse attention", "try: --mtp-num-layers 1"),
            "--mtp-num-layers 1",
            model=DSA,
            config={"num_nextn_predict_layers": 2},
        ),
        Rule(
            "--overlap-grad-reduce",
            (f"--overlap-grad-reduce, --mtp-num-layers: with {PP} 4", "gets no gradient of its own"),
            model=GLM,
            also=f"{TP8} {PP} 4 --expert-tensor-parallel-size 1 --mtp-num-layers 1",
            kind="unsupported",
        ),
        Rule(
            f"{RECOMPUTE} 2",
            ("--recompute-num-layers, --enable-mtp-training: 2: Megatron recomputes",),
            f"{RECOMPUTE} 1",
            model=GLM,
            also="--enable-mtp-training --mtp-num-layers 1",
        ),
        Rule(
            "--enable-mtp-training",
            ("--pipeline-model-parallel-layout, --enable-mtp-training: puts the prediction layers (m)",),
            model=GLM,
            also=f"{PP} 2 --pipeline-model-parallel-layout Et*92m|L --mtp-num-layers 1",
            kind="unsupported",
        ),
        Rule(
            "--position-embedding-type yarn --mtp-num-layers 1",
            ("yarn does not go with --mtp-num-layers 1",),
            "--mtp-num-layers 1",
            model=GLM,
        ),
    ),
}


@pytest.mark.parametrize(("check", "rule"), each_rule(RULES), ids=rule_name)
def test_rule(case, check, rule):
    check_rule(case, check, rule)


def test_a_head_width_that_is_no_whole_number(case):
    """Megatron divides --hidden-size by the heads when no width is given; 50 / 12 only fails in the trainers."""
    args = case.args().replace(kv_channels=None, hidden_size=50)
    (problem,) = parallel.check_heads(args, {})
    assert "--kv-channels: is not given, and --hidden-size 50 / --num-attention-heads 12" in str(problem)


@pytest.mark.parametrize(("pp", "first", "last"), [(2, 38, 40), (4, 18, 20), (8, 14, 16), (16, 10, 12), (20, 2, 4)])
def test_the_published_splits_of_glm_are_legal(case, pp, first, last):
    """The splits that people train the 78 layers with; one layer more on the first stage is refused."""
    tokens = f"{PP} {pp} {SPLIT.format(first, last)}"
    wrong = f"{PP} {pp} {SPLIT.format(first + 1, last - 1)}"
    also = "--expert-model-parallel-size 1 --actor-num-nodes 40"
    rule = Rule(wrong, ("would start on a layer that reuses",), tokens, model=DSA, also=also, others=True)
    check_rule(case, pipeline.check_index_sharing, rule)
