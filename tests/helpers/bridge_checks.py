"""Checks of bridges that share two ranks (Megatron takes longer to import than all of them to run).

Each `check_*` function takes (rank, {model: directory}, scratch directory) and asserts. The first that fails on a rank
ends all: the other rank would wait for it for ever.
"""

import json
import logging
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.bridge_runs import built, built_in_turn, exported, load, packed_logits, reference_logits

WORLD = 2
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
LAYOUTS = {
    "alone": (),
    "tp2": (*TP2, "--expert-tensor-parallel-size", "1"),
    "tp2 etp2": TP2,
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "ep2": EP2,
    "tp2 ep2": (*TP2, *EP2, "--expert-tensor-parallel-size", "1"),
}
# Each kind of parameter in each kind of layout, without all combinations.
EVERYWHERE = ("pp2", "ep2", "tp2 ep2")
ALSO = {"qwen3_moe": ("alone", "tp2"), "qwen2_moe": ("tp2 etp2",), "deepseek_v3": ("alone", "tp2 etp2")}
ONLY = {"qwen3_tied": ("alone", "pp2", "tp2 etp2"), "deepseek_v32": ("alone",), "qwen2": ("pp2",)}
Paths = dict[str, Path]


def run_checks(rank: int, world_size: int, models: Paths, scratch: Path, names: Sequence[str]) -> None:
    """The checks `names`, in order."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    for name in names:
        directory = scratch / name / str(rank)
        directory.mkdir(parents=True)
        globals()[name](rank, models, directory)


def check_names() -> list[str]:
    return [name for name in globals() if name.startswith("check_") and name != "check_names"]


def check_weights_survive_every_layout_and_logits_equal_transformers(rank: int, models: Paths, scratch: Path) -> None:
    from safetensors.torch import load_file

    for layout, flags in LAYOUTS.items():
        here = {n: p for n, p in models.items() if layout in (ONLY.get(n) or (*EVERYWHERE, *ALSO.get(n, ())))}
        for name, args, chunks in built_in_turn(rank, WORLD, here, flags):
            load(args, chunks, models[name])
            _assert_same(exported(args, chunks), load_file(models[name] / "model.safetensors"), f"{name} {layout}")
            if layout != "pp2":
                tokens, wanted = reference_logits(models[name])
                assert wanted.abs().max() > 0.5
                error = (packed_logits(chunks[0], tokens, args.vocab_size) - wanted).abs().max()
                assert error < 1e-5, (name, layout, error)


def check_an_indexer_that_rotates_neighbouring_pairs(rank: int, models: Paths, scratch: Path) -> None:
    """GLM-5 rotates (0, 1), (2, 3), .. where the reference rotates (0, n / 2), (1, n / 2 + 1), ..: the same function
    of weights whose rotated rows are shuffled accordingly. The wrong pairs would choose other tokens: refused."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _copy(models["glm_moe_dsa"], scratch / "glm_moe_dsa", indexer_rope_interleave=True)
    weights, rotated, dim = load_file(path / "model.safetensors"), 8, 20
    order = [*torch.arange(rotated).view(2, -1).t().flatten().tolist(), *range(rotated, dim)]
    for name, tensor in weights.items():
        if ".indexer." in name and "weights_proj" not in name:
            weights[name] = tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokens, wanted = reference_logits(models["glm_moe_dsa"])
    with built(rank, WORLD, "glm_moe_dsa", path, ("--dsa-indexer-rope-interleaved",)) as (args, chunks):
        load(args, chunks, path)
        error = (packed_logits(chunks[0], tokens, args.vocab_size) - wanted).abs().max()
        assert error < 1e-5, error


def check_training_is_the_same_in_every_layout(rank: int, models: Paths, scratch: Path) -> None:
    """GRPO steps: routed experts on other ranks, latent attention cut by TP. Equal weights mean equal gradients."""
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import GRPO, SMOOTH_ADAM, open_trainer, train_rollouts

    for name, layout in {"qwen2_moe": "ep2", "deepseek_v3": "tp2 ep2", "glm_moe_dsa": "pp2"}.items():
        path, found = models[name], {}
        for flags in (LAYOUTS["alone"], LAYOUTS[layout]):
            args = trainer_args(name, path, *SMOOTH_ADAM, *flags, ref_load=str(path), **GRPO)
            with open_trainer(args, rank, WORLD, with_ref=True) as trainer:
                metrics = train_rollouts(trainer, range(1))
                found[flags] = (metrics, exported(trainer.args, trainer._state.model))
        logging.disable(logging.INFO)
        (alone, before), (cut, after) = found.values()
        assert alone[0]["train/grad_norm"] > 0.1
        for key, value in alone[0].items():
            assert abs(cut[0][key] - value) < 1e-5 * (1 + abs(value)), (name, key)
        for key, tensor in before.items():
            assert (after[key] - tensor).abs().max() < 1e-5, (name, layout, key)


def check_engines_receive_the_experts_of_all_ranks(rank: int, models: Paths, scratch: Path) -> None:
    """By every transport: each tensor once, the two projections that engines fuse in one request."""
    from safetensors.torch import load_file

    from tests.helpers.fake_engine import FakeEngine

    path = models["deepseek_v3"]
    on_disk = load_file(path / "model.safetensors")
    shared = _of_rank_0(scratch)
    common = {"update_weight_mode": "full", "update_weight_transport": "nccl", "update_weight_buffer_size": 20_000}
    common |= {"update_weight_disk_dir": str(shared), "update_weight_disk_keep_files": False, "colocate": False}
    transports = ({"colocate": True}, {}, {"update_weight_transport": "disk"})
    with built(rank, WORLD, "deepseek_v3", path, LAYOUTS["tp2 ep2"]) as (args, chunks):
        from slime.backends.megatron_utils.update_weight import choose_updater
        from slime.utils.engine_client import EngineInfo

        load(args, chunks, path)
        for flags in transports:
            with FakeEngine() as engine:  # of rank 0; the other rank's stays idle
                updater = choose_updater(Namespace(**(vars(args) | common | flags)), chunks)
                updater.connect([EngineInfo(_of_rank_0(engine.url), 0, 1, 0)])
                updater.update_weights()
                updater.close()
                if rank == 0:
                    _assert_same(engine.weights, on_disk, str(flags))
                    assert len([call for call in engine.calls if call.startswith("update_weights")]) > 5 or flags


def check_routing_biases_stay_exact_in_half_precision(rank: int, models: Paths, scratch: Path) -> None:
    """A bfloat16 model once held rounded biases until its first step, and routed otherwise than the engines."""
    import torch
    from safetensors.torch import load_file

    path = models["glm4_moe"]
    with built(rank, WORLD, "glm4_moe", path, EP2, bf16=True) as (args, chunks):
        from megatron.core.transformer.module import Float16Module

        wrapped = [Float16Module(chunk.config, chunk) for chunk in chunks]
        load(args, wrapped, path)
        back = exported(args, wrapped)
    wanted = load_file(path / "model.safetensors")
    exact = {key: tensor for key, tensor in wanted.items() if key.endswith("e_score_correction_bias")}
    assert len(exact) == 3 and not any(torch.equal(t, t.bfloat16().float()) for t in exact.values())
    _assert_same(back, {key: tensor.bfloat16() for key, tensor in wanted.items()} | exact, "bfloat16")


def check_a_prediction_layer_is_numbered_after_the_last_layer(rank: int, models: Paths, scratch: Path) -> None:
    """With --mtp-num-layers it is loaded and exported, bit by bit; without, its tensors are known left-overs."""
    import torch
    from safetensors.torch import load_file, save_file

    for name, layout in {"glm4_moe": "pp2", "glm_moe_dsa": "tp2 ep2"}.items():
        path = _copy(models[name], scratch / name, num_nextn_predict_layers=1)
        on_disk = load_file(path / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        source = 2 if name == "glm_moe_dsa" else 3  # a layer with an indexer of its own, as the prediction layer has
        last = {
            key.replace(f"layers.{source}.", "layers.4."): torch.randn(tensor.shape, generator=generator)
            for key, tensor in on_disk.items()
            if f"layers.{source}." in key
        }
        hidden = on_disk["model.norm.weight"].numel()
        prefix = "model.layers.4."
        last |= {f"{prefix}{norm}.weight": torch.randn(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
        last[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
        parts = ("embed_tokens", "shared_head.head")
        copies = {f"{prefix}{part}.weight": on_disk["lm_head.weight"].clone() for part in parts}
        if rank == 0:  # both ranks read the same file
            save_file({**on_disk, **last, **copies}, path / "model.safetensors", metadata={"format": "pt"})
        path = _of_rank_0(path)
        if rank:
            on_disk = load_file(path / "model.safetensors")
            last = {key: on_disk.pop(key) for key in [*on_disk] if key.startswith(prefix) and key not in copies}
            for key in copies:
                del on_disk[key]
        flags = LAYOUTS[layout]
        with built(rank, WORLD, name, path, flags) as (args, chunks):
            load(args, chunks, path)
            _assert_same(exported(args, chunks), on_disk, name)
        with built(rank, WORLD, name, path, (*flags, "--mtp-num-layers", "1")) as (args, chunks):
            load(args, chunks, path)
            _assert_same(exported(args, chunks), {**on_disk, **last}, f"{name} with prediction layer")


def check_mimos_prediction_layers_have_names_of_their_own(rank: int, models: Paths, scratch: Path) -> None:
    """A Qwen2 with layers under model.mtp_layers, whose projection reads (hidden state, embedding)."""
    import torch
    from safetensors.torch import load_file, save_file

    path = _copy(models["qwen2"], scratch / "mimo", model_type="mimo", num_nextn_predict_layers=1)
    weights, hidden = load_file(path / "model.safetensors"), 48
    layer = {key: tensor for key, tensor in weights.items() if "layers.1." in key}
    prefix = "model.mtp_layers.0."
    weights |= {key.replace("model.layers.1.", prefix): torch.randn(tensor.shape) for key, tensor in layer.items()}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{prefix}{norm}.weight": torch.randn(hidden) for norm in norms}
    weights[f"{prefix}input_proj.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    path = _of_rank_0(path)
    weights = load_file(path / "model.safetensors")
    with built(rank, WORLD, "qwen2", path, (*LAYOUTS["tp2 etp2"], "--mtp-num-layers", "1")) as (args, chunks):
        load(args, chunks, path)
        _assert_same(exported(args, chunks), weights, "mimo")


def check_one_registry_knows_bridge_and_table(rank: int, models: Paths, scratch: Path) -> None:
    """Both directions read one table; mbridge finds the same class."""
    from mbridge.core import AutoBridge
    from mbridge.core.bridge import _MODEL_REGISTRY

    from slime.backends.megatron_utils.megatron_to_hf import family_of
    from slime_plugins.mbridge import bridge_class, supported_model_types

    types = supported_model_types()
    assert {"llama", "qwen3", "glm4_moe", "glm_moe_dsa", "deepseek_v32", "kimi_k2", "mimo", "minimax_m2"} <= set(types)
    assert set(types) <= set(AutoBridge.list_supported_models())
    for model_type in types:
        assert family_of(model_type) is bridge_class(model_type).family, model_type
        assert _MODEL_REGISTRY[model_type] is bridge_class(model_type)
    message = _message(lambda: bridge_class("glm_moe_dsas"))
    assert "did you mean glm_moe_dsa?" in message and "known: deepseek_v3, " in message, message


def check_what_does_not_fit_is_named(rank: int, models: Paths, scratch: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "qwen2_moe"
    path = _copy(models[name], scratch / name)
    weights = load_file(path / "model.safetensors")
    expert, embedding = "model.layers.1.mlp.experts.5.up_proj.weight", weights["model.embed_tokens.weight"]

    def said(changed: dict[str, Any], args: Any, chunks: list) -> str:
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        return _message(lambda: load(args, chunks, path))

    with built(rank, WORLD, name, path, EP2) as built_model:
        missing = said({key: tensor for key, tensor in weights.items() if key != expert}, *built_model)
        assert f"has no tensor {expert}" in missing, missing
        narrow = said(weights | {expert: weights[expert][:, :-1].contiguous()}, *built_model)
        assert expert in narrow and "(40, 47)" in narrow and "do not describe" in narrow, narrow
        extra = "model.layers.1.mlp.experts.8.up_proj.weight"
        left = said(weights | {extra: embedding.clone()}, *built_model)
        assert left.startswith("1 tensors of") and f"have no place in the model: {extra};" in left, left
        buffers = said(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": embedding[0].clone()}, *built_model)
        assert buffers == "", buffers
    with built(rank, WORLD, name, path, (*EP2, "--num-layers", "3", "--moe-layer-freq", "[1]*3")) as built_model:
        fewer = said(weights, *built_model)
        assert "model.layers.3.input_layernorm.weight" in fewer, fewer
    with built(rank, WORLD, name, path, (*EP2, "--num-query-groups", "1")) as built_model:
        wide = said(weights, *built_model)
        assert "linear_qkv" in wide and "self_attn.k_proj" in wide, wide


def check_a_quantised_checkpoint_is_dequantised(rank: int, models: Paths, scratch: Path) -> None:
    """FP8 in blocks of 16 x 32 that do not divide the matrices; the scale multiplies in float32. On the way back they
    are quantised again."""
    import torch
    from safetensors.torch import load_file, save_file

    name = "qwen3_moe"
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
    path = _copy(models[name], scratch / name, quantization_config=config)
    stored, wanted = {}, {}
    for key, tensor in load_file(path / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            stored[key] = wanted[key] = tensor
            continue
        rows, columns = tensor.shape
        scale = 0.001 + torch.rand(-(-rows // 16), -(-columns // 32))
        quantised = (tensor * 100).to(torch.float8_e4m3fn)
        stored |= {key: quantised, f"{key}_scale_inv": scale}
        each = [[float(scale[row // 16, column // 32]) for column in range(columns)] for row in range(rows)]
        wanted[key] = (quantised.float() * torch.tensor(each)).to(torch.bfloat16).float()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    path = _of_rank_0(path)
    with built(rank, WORLD, name, path, LAYOUTS["tp2 ep2"]) as (args, chunks):
        load(args, chunks, path)
        args.hf_checkpoint = str(models[name])  # an unquantised one
        back = exported(args, chunks)
        args.hf_checkpoint = str(path)
        again = exported(args, chunks)
        if rank == 0:
            from slime.backends.megatron_utils.megatron_to_hf.processors import quantize

            _assert_same(back, wanted, name)
            assert again.keys() == stored.keys()
            expected = dict(quantize(wanted.items(), config))
            for key in again:
                assert torch.equal(again[key].float(), expected[key].float()), key


def check_mbridges_own_interface_builds_loads_and_exports(rank: int, models: Paths, scratch: Path) -> None:
    """mbridge 0.15.1 alone cannot build a model with megatron-core 0.19, nor export experts without a group of their
    own under TP."""
    import torch
    from safetensors.torch import load_file

    for name, layout in {"glm4_moe": "tp2", "glm_moe_dsa": "tp2 ep2", "qwen3_tied": "pp2"}.items():
        path = models[name]
        tokens, wanted = reference_logits(path)
        with built(rank, WORLD, name, path, LAYOUTS[layout]) as (args, ours):
            from mbridge import AutoBridge
            from mbridge.core.util import unwrap_model

            from slime_plugins.mbridge import BaseBridge

            bridge = AutoBridge.from_pretrained(str(path), dtype=torch.float32, make_vocab_size_divisible_by=256)
            assert isinstance(bridge, BaseBridge)
            fields = ("num_layers", "hidden_size", "num_moe_experts", "moe_layer_freq", "layernorm_epsilon")
            theirs = unwrap_model(ours[0]).config
            assert all(getattr(bridge.config, field) == getattr(theirs, field) for field in fields)
            models_ = bridge.get_model(str(path))
            if layout != "pp2":
                error = (packed_logits(models_[0], tokens, args.vocab_size) - wanted).abs().max()
                assert error < 1e-5, (name, error)
            with torch.no_grad():
                back = {key: tensor.clone() for key, tensor in bridge.export_weights(models_)}
            _assert_same(back, load_file(path / "model.safetensors"), name)


def _assert_same(found: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    import torch

    assert found.keys() == wanted.keys(), (what, sorted(found.keys() ^ wanted.keys())[:5])
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), (what, key)


def _copy(path: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(path, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


def _of_rank_0(value: Any) -> Any:
    """What rank 0 has for the same purpose; a directory is complete then."""
    import torch.distributed as dist

    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _message(call: Callable[[], None]) -> str:
    """What the ValueError says on the rank that met it; other ranks name that rank."""
    import torch.distributed as dist

    said = ""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        said = str(error)
    everywhere: list[str] = [""] * WORLD
    dist.all_gather_object(everywhere, said)
    assert len({bool(text) for text in everywhere}) == 1, everywhere
    return max(everywhere, key=lambda text: not text.startswith("rank "))
