"""Counts of parameters against the modules megatron-core really builds (meta device, faked ranks) and transformers."""

import multiprocessing
import re
from argparse import Namespace
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.helpers.shape_args import shape_args

BASE = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
MOE = "--moe-grouped-gemm --moe-router-dtype fp32 --moe-aux-loss-coeff 0 --moe-token-dispatcher-type alltoall "
SIGMOID = (
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss "
)
MLA = "--multi-latent-attention --qk-layernorm --untie-embeddings-and-output-weights "
DSA = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads {heads} --dsa-indexer-head-dim {dim} "
    "--dsa-indexer-topk 2048 --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3 --dsa-indexer-loss-coeff 0 "
    "--no-dsa-indexer-rotate-activation "
)
UNTIED = "--untie-embeddings-and-output-weights "
FULL = {
    "qwen3-4B": BASE + "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --vocab-size 151936",
    "qwen3-30B-A3B": BASE + MOE + UNTIED + "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm "
    "--vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768",
    "glm4.7-355B-A32B": BASE + MOE + SIGMOID + UNTIED + "--num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 "
    "--num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm "
    "--add-qkv-bias --vocab-size 151552 --num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536 "
    "--moe-shared-expert-intermediate-size 1536 --moe-layer-freq [0]*3+[1]*89",
    "deepseek-v3": BASE + MOE + SIGMOID + MLA + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --kv-channels 128 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --vocab-size 129280 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58",
    "glm5.2-744B-A40B": BASE + MOE + SIGMOID + MLA + DSA.format(heads=32, dim=128) + "--num-layers 78 "
    "--hidden-size 6144 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 192 --q-lora-rank 2048 "
    "--kv-lora-rank 512 --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 --vocab-size 154880 "
    "--make-vocab-size-divisible-by 16 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*75 --mtp-num-layers 1",
}
TINY = {
    "dense with biases and LayerNorm": "--num-layers 4 --hidden-size 48 --ffn-hidden-size 112 --num-attention-heads 4 "
    "--vocab-size 1000 --position-embedding-type rope --swiglu",
    "gated attention": BASE + UNTIED + "--num-layers 4 --hidden-size 48 --ffn-hidden-size 112 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --kv-channels 20 --qk-layernorm --attention-output-gate "
    "--apply-layernorm-1p --vocab-size 1000",
    "gated delta net": BASE + UNTIED + MOE + "--num-layers 4 --hidden-size 48 --ffn-hidden-size 112 "
    "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 20 --qk-layernorm "
    "--attention-output-gate --vocab-size 1000 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 12 "
    "--linear-value-head-dim 20 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 28 "
    "--moe-shared-expert-intermediate-size 36 --moe-shared-expert-gate",
    "dense queries, mla": BASE + MLA + "--num-layers 4 --hidden-size 48 --ffn-hidden-size 112 "
    "--num-attention-heads 4 --kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 20 "
    "--vocab-size 1000",
    "sparse": BASE + MOE + SIGMOID + MLA + DSA.format(heads=6, dim=28) + "--num-layers 8 --hidden-size 48 "
    "--ffn-hidden-size 112 --num-attention-heads 4 --q-lora-rank 36 --kv-lora-rank 24 --qk-head-dim 12 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 20 --vocab-size 1000 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 28 --moe-layer-freq [0]*2+[1]*6",
}
# (model, world size, layout flags, pipeline ranks to build)
CASES = [
    ("qwen3-4B", 8, "--tensor-model-parallel-size 8 --sequence-parallel", (0,)),
    ("qwen3-4B", 8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (0, 1)),
    (
        "qwen3-30B-A3B",
        16,
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1",
        (0,),
    ),
    (
        "glm4.7-355B-A32B",
        64,
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
        (0, 3),
    ),
    (
        "deepseek-v3",
        128,
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--decoder-last-pipeline-num-layers 13 --context-parallel-size 4 --expert-model-parallel-size 32 "
        "--expert-tensor-parallel-size 1",
        (0, 3),
    ),
    (
        "glm5.2-744B-A40B",
        256,
        "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 "
        "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 "
        "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
        (0, 4, 7),
    ),
    ("dense with biases and LayerNorm", 2, "--tensor-model-parallel-size 2", (0,)),
    (
        "gated attention",
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 2",
        (0, 1),
    ),
    (
        "gated delta net",
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2",
        (0,),
    ),
    ("dense queries, mla", 2, "--tensor-model-parallel-size 2", (0,)),
    ("sparse", 4, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6", (0, 1)),
]
NAMES = [f"{i}: {model}, {world} ranks, stage {r}" for i, (model, world, _, ranks) in enumerate(CASES) for r in ranks]


def _flags(model: str) -> list[str]:
    return (FULL | TINY)[model].split()


def build_all() -> dict[str, tuple[Namespace, dict[str, int], int]]:
    """Every case's (arguments, module -> elements, elements of router buffers), real modules on the meta device."""
    import torch

    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()
    from slime.backends.megatron_utils import torch_te

    torch_te.install()
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA, gdn.chunk_gated_delta_rule = True, common.torch_chunk_gated_delta_rule  # no kernel runs here
    torch.cuda.current_device = lambda: torch.device("meta")
    found = {}
    for number, (model, world, layout, ranks) in enumerate(CASES):
        for pp_rank in ranks:
            pp = int((re.search(r"--pipeline-model-parallel-size (\d+)", layout) or [0, 1])[1])
            args = _start(_flags(model) + layout.split(), world, pp_rank * world // pp)
            chunks = _build(args)
            elements: Counter[str] = Counter()
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    elements[_merged(name)] += parameter.numel()
            buffers = sum(b.numel() for c in chunks for n, b in c.named_buffers() if "expert" in n)
            kept = {k: v for k, v in vars(args).items() if isinstance(v, bool | int | float | str | list | None)}
            found[f"{number}: {model}, {world} ranks, stage {pp_rank}"] = (Namespace(**kept), dict(elements), buffers)
            _stop()
    return found


def _merged(name: str) -> str:
    return re.sub(r"(linear_fc[12]\.weight)\d+", r"\g<1>0", re.sub(r"layers\.\d+\.", "layers.*.", name))


def _start(flags: list[str], world: int, rank: int) -> Namespace:
    """Megatron's groups of `rank` among `world` ranks that do not exist."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slime.backends.megatron_utils.arguments import build_megatron_args
    from tests.helpers.trainer import trainer_args

    driver = trainer_args("qwen3", "", bf16=True)
    driver.hf_checkpoint = None
    driver.megatron_argv = [*flags, *"--bf16 --no-initialization --tokenizer-type NullTokenizer".split()]
    driver.megatron_argv += ["--tokenizer-model", "none"]
    args = build_megatron_args(driver, rank, world)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return args


def _stop() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _build(args: Namespace) -> list:
    """All chunks of this rank, with Megatron's own block specs, as slime's provider chooses them, and MTP layers."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.training.argument_utils import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    virtual = args.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        if config.experimental_attention_variant is not None:
            spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        mtp = get_gpt_mtp_block_spec(config, spec, True, vp_stage=vp_stage) if args.mtp_num_layers else None
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        with torch.device("meta"):
            model = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                mtp_block_spec=mtp,
                vp_stage=vp_stage,
            )
        chunks.append(model)
    return chunks


@pytest.fixture(scope="module")
def built():
    """In a process of its own: Megatron with the CPU shim and a fake process group must not leak into other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(build_all).result()


@pytest.mark.parametrize("case", NAMES)
def test_every_rank_holds_what_megatron_builds(built, case):
    """Tensor by tensor: a wrong split or a forgotten bias once made a plan fit that did not."""
    from slime.plan.parameters import Sizes, parameters_of_rank
    from slime.utils.layout.pipeline import pipeline_layout
    from slime.utils.model_shape import ModelShape

    args, elements, buffers = built[case]
    stage = int(case.rsplit(" ", 1)[1])
    parameters = parameters_of_rank(ModelShape.from_args(args), pipeline_layout(args), Sizes.from_args(args), stage)
    assert parameters.by_module() == elements
    assert parameters.total() == sum(elements.values())
    assert parameters.buffers == buffers


def _driver(model: str, *more: str) -> Namespace:
    """The model's flags and `more` over Megatron's defaults."""
    return shape_args([*_flags(model), *more])


@pytest.mark.parametrize(
    "model, billions, active",
    [
        ("qwen3-4B", 4.022, 4.022),
        ("qwen3-30B-A3B", 30.532, 3.04),
        ("glm4.7-355B-A32B", 352.798, 32.86),
        ("deepseek-v3", 671.026, 36.63),
        ("glm5.2-744B-A40B", 743.377, 40.30),
    ],
)
def test_public_sizes(model, billions, active):
    """The sizes the models are known by, without multi-token prediction; active: what a token is multiplied with."""
    from slime.plan.parameters import model_parameters
    from slime.utils.model_shape import ModelShape

    parameters = model_parameters(ModelShape.from_args(_driver(model)))
    assert parameters.total() == pytest.approx(billions * 1e9, abs=5e5)
    assert parameters.active() == pytest.approx(active * 1e9, abs=5e6)


def test_glm52_with_its_mtp_layer_is_the_753_billion_model():
    """Two public numbers, 744 and 753 billion: the difference is one layer of multi-token prediction with an indexer
    and experts of its own; its embedding and output matrix are the model's."""
    from slime.plan.parameters import model_parameters
    from slime.utils.model_shape import ModelShape

    shape = ModelShape.from_args(_driver("glm5.2-744B-A40B"))
    assert model_parameters(shape, mtp=True).total() == 753_329_921_024
    assert model_parameters(shape).total() == 743_377_000_704
    own = [layer.attention.indexer.own for layer in shape.layers]
    assert sum(own) == 21 and own[:8] == [True, True, True, False, False, False, True, False]
    assert shape.mtp_layer.attention.indexer.own


def test_a_sparse_model_without_megatron_flags_takes_its_config():
    """A launch script names the spec and a checkpoint; the indexer's sizes are in config.json alone."""
    from slime.plan.parameters import model_parameters
    from slime.utils.model_shape import ModelShape, ShapeError

    a = _driver("glm5.2-744B-A40B")
    for name in ("n_heads", "head_dim", "topk"):
        setattr(a, f"dsa_indexer_{name}", None)
    a.dsa_indexer_topk_freq, a.dsa_indexer_skip_topk_offset = 1, 0
    a.experimental_attention_variant, a.spec = None, ["slime_plugins.models.glm5.glm5", "get_glm5_spec"]
    with pytest.raises(ShapeError, match="--dsa-indexer-n-heads"):
        ModelShape.from_args(a)
    a.hf_config = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "num_hidden_layers": 78}
    a.hf_config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert model_parameters(ModelShape.from_args(a)).total() == 743_377_000_704


def test_frozen_parameters_have_no_gradients():
    """--freeze-params-name-list and --only-train-params-name-list are searched in Megatron's names; only wins."""
    from slime.plan.parameters import Sizes, parameters_of_rank
    from slime.utils.layout.chunks import Chunk, PipelineLayout
    from slime.utils.model_shape import ModelShape

    shape = ModelShape.from_args(_driver("qwen3-30B-A3B"))
    layout = PipelineLayout((Chunk(0, 0, tuple(range(48)), True, True, ()),), 1, 1)
    sizes = Sizes(tp=2, pp=1, cp=1, ep=4, etp=1, dp=4, edp=2)
    frozen = parameters_of_rank(shape, layout, sizes, 0, freeze=[r"experts\.linear_fc1", "embedding"])
    whole = parameters_of_rank(shape, layout, sizes, 0)
    fc1, embedding = 48 * 32 * 2 * 768 * 2048, 152064 * 2048 // 2  # padded to 128 x tp
    assert whole.total() == whole.trained() == frozen.total()
    assert whole.total() - frozen.trained() == fc1 + embedding
    assert whole.trained(expert=True) - frozen.trained(expert=True) == fc1
    second = parameters_of_rank(shape, layout, sizes, 0, only=[r"layers\.1\..*router"], freeze=["router"])
    assert second.trained() == 128 * 2048  # layer 1 of 48, not 10 .. 19: names are Megatron's, not patterns of ours
    stages = (Chunk(0, 0, tuple(range(20)), True, False, ()), Chunk(1, 0, tuple(range(20, 48)), False, True, ()))
    layout, sizes = PipelineLayout(stages, 2, 1), Sizes(tp=2, pp=2, cp=1, ep=4, etp=1, dp=4, edp=2)
    trained = [parameters_of_rank(shape, layout, sizes, rank, only=[r"layers\.47\..*router"]) for rank in (0, 1)]
    assert [stage.trained() for stage in trained] == [0, 128 * 2048]  # counted from the model's first layer


# Families whose Megatron modules are not here: transformers' model of the same (unequal) sizes, on the meta device.
HF_COMMON = {
    "vocab_size": 1000,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "tie_word_embeddings": False,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 28,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}
HF_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "decoder_sparse_step": 1}
MEGATRON_COMMON = (
    BASE
    + UNTIED
    + (
        "--num-layers 5 --hidden-size 48 --ffn-hidden-size 112 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --kv-channels 20 --vocab-size 1000 "
    )
)
GATED = "--qk-layernorm --attention-output-gate "
FAMILIES = {
    "glm4": (
        "Glm4",
        {"intermediate_size": 112, "attention_bias": True, "pad_token_id": 0},
        "--add-qkv-bias --spec slime_plugins.models.glm4",
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"intermediate_size": 28, "num_local_experts": 4, "num_experts_per_tok": 2},
        MOE + "--qk-layernorm --num-experts 4 --moe-ffn-hidden-size 28 --spec slime_plugins.models.minimax_m2",
    ),
    "qwen3_next": (
        "Qwen3Next",
        LINEAR | HF_MOE | {"shared_expert_intermediate_size": 36, "intermediate_size": 112},
        GATED + MOE + "--num-experts 4 --moe-ffn-hidden-size 28 --moe-shared-expert-intermediate-size 36 "
        "--moe-shared-expert-gate --spec slime_plugins.models.qwen3_next",
    ),
    "qwen3_5": ("Qwen3_5", LINEAR | {"intermediate_size": 112}, GATED + "--spec slime_plugins.models.qwen3_5"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_special_modules_count_as_in_transformers(family):
    """Norms behind attention and MLP, norms over all heads, gated delta nets: whole models, tensor sums equal."""
    import torch
    import transformers

    from slime.plan.parameters import model_parameters
    from slime.utils.model_shape import ModelShape

    name, values, flags = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**(HF_COMMON | values))
    with torch.device("meta"):
        reference = getattr(transformers, f"{name}ForCausalLM")(config)
    TINY[family] = MEGATRON_COMMON + flags
    a = _driver(family)
    a.hf_config = LINEAR if "linear_key_head_dim" in values else None
    counted = model_parameters(ModelShape.from_args(a))
    assert counted.total() == sum(p.numel() for p in reference.parameters())
