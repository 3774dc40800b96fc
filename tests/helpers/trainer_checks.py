"""Checks of the one-rank trainer that share one process (Megatron takes longer to import than all of them to run).

Each `check_*` function takes (hf directory, scratch directory) and asserts; `run_checks` reports each one's traceback.
"""

import copy
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.tiny_models import megatron_flags
from tests.helpers.trainer import make_rollout, rank_share, trainer_args
from tests.helpers.trainer_runs import GRPO, hf_log_probs, hf_weights, open_trainer, train_rollouts

SFT = {"loss_type": "sft_loss", "compute_advantages_and_returns": False}
HERE = "tests.helpers.trainer_checks"
calls: list[tuple[str, tuple]] = []


def check_names() -> list[str]:
    return [name for name in globals() if name.startswith("check_") and name != "check_names"]


def run_checks(rank: int, world_size: int, hf: str, scratch: str) -> dict[str, str | None]:
    """Traceback (or None) of every check."""
    results = {}
    for name in check_names():
        directory = Path(scratch) / name
        directory.mkdir()
        calls.clear()
        try:
            globals()[name](hf, directory)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    return results


def check_rope_of_a_packed_row_equals_megatrons_loop(hf: str, scratch: Path) -> None:
    from slime.utils.accelerator import get_accelerator

    get_accelerator("cpu").prepare_trainer()  # the first check: megatron's own function is still in its place
    import torch
    from megatron.core.models.common.embeddings import rope_utils

    from slime.backends.megatron_utils import packed_rope

    reference = rope_utils._apply_rotary_pos_emb_thd
    assert reference is not packed_rope.apply_rotary_pos_emb_thd
    for cp_size in (1, 2, 4):
        for lengths in ((8, 24, 16), (8,), (16, 16)):
            cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
            for positions in (max(lengths), 64, sum(lengths)):
                freqs = torch.randn(positions, 1, 1, 6)
                for cp_rank in range(cp_size):
                    group = SimpleNamespace(size=lambda n=cp_size: n, rank=lambda r=cp_rank: r)
                    t = torch.randn(sum(lengths) // cp_size, 3, 10)
                    expected = reference(t, cu_seqlens, freqs, cp_group=group)
                    got = packed_rope.apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group)
                    assert torch.equal(got, expected), (cp_size, lengths, positions, cp_rank)


def check_sft_learns(hf: str, scratch: Path) -> None:
    with open_trainer(trainer_args("qwen3", hf, lr=3e-3, **SFT), 0, 1) as trainer:
        assert trainer.start_rollout_id == 0 and trainer.dp_rank == 0 and trainer.is_main_rank
        assert trainer.parallel_config == {
            "dp_size": 1,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        data = make_rollout(0)
        share = rank_share(trainer.args, trainer.parallel_config, 0, data)
        before = copy.deepcopy(share)
        losses = [trainer.train(i, share)["train/loss"] for i in range(30)]
        metrics = trainer.train(30, share)
    assert losses[0] > 5 and losses[-1] < 0.2 * losses[0], losses
    assert all(isinstance(value, float) for value in metrics.values())
    for key in ("perf/train_time", "perf/actor_train_time", "perf/train_wait_time", "perf/actor_train_tok_per_s"):
        assert metrics[key] > 0, key
    assert (
        metrics["perf/actor_train_tflops"] > 0 and "perf/actor_train_mfu" not in metrics
    )  # nobody knows a CPU's peak
    assert metrics["rollout/response_lengths"] == sum(data["response_lengths"]) / 8
    assert str(before) == str(share), "the rollout data were changed in place"


def check_speed_is_the_models_operations_over_time(hf: str, scratch: Path) -> None:
    """A device, of two; only response tokens pass the head; against the peak of the device's name."""
    from slime.backends.megatron_utils.arguments import build_megatron_args
    from slime.backends.megatron_utils.train_metrics import performance_metrics
    from slime.utils.flops import ModelFlops
    from slime.utils.model_shape import ModelShape

    args = build_megatron_args(trainer_args("qwen3", hf), 0, 2)
    flops = ModelFlops.of(ModelShape.from_args(args))
    metrics = performance_metrics(args, {"actor_train": 4.0, "log_probs": 0.5}, [10, 20], 12, "NVIDIA H200")
    assert metrics["perf/log_probs_tflops"] == flops.forward([10, 20], 12) / 2 / 0.5 / 1e12
    assert metrics["perf/actor_train_tflops"] == 3 * flops.forward([10, 20], 12) / 2 / 4 / 1e12
    assert metrics["perf/actor_train_mfu"] == metrics["perf/actor_train_tflops"] / 989
    assert metrics["perf/actor_train_tok_per_s"] == 30 / 2 / 4


def check_log_probs_equal_transformers(hf: str, scratch: Path) -> None:
    """Packing, rotary positions, weights and the gathering of results by sample, against one-by-one transformers."""
    import torch

    from slime.backends.megatron_utils.data import prepare_rollout_data

    values = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "balance_by_flops": True, "balance_data": True}
    with open_trainer(trainer_args("qwen3", hf, data_pad_size_multiplier=16, **values), 0, 1) as trainer:
        data = make_rollout(3, samples=16)
        trainer.args.global_batch_size = 16
        share = rank_share(trainer.args, trainer.parallel_config, 0, data)
        assert share["num_microbatches"][0] > 2
        prepared = prepare_rollout_data(trainer.args, share, torch.device("cpu"))
        from slime.backends.megatron_utils.data import make_data_iterators

        got = trainer._core._log_probs(prepared, make_data_iterators(prepared), "ref_")
    assert list(got) == ["ref_log_probs"]
    everything = hf_log_probs(hf, data)
    for position, mine in zip(share["partition"], got["ref_log_probs"], strict=True):
        torch.testing.assert_close(mine, everything[position], atol=1e-4, rtol=0)


def check_skipping_the_log_prob_pass_changes_nothing(hf: str, scratch: Path) -> None:
    from slime.backends.megatron_utils import trainer_core

    def train(reusable: Any) -> tuple[list[dict[str, float]], list[str]]:
        original, trainer_core.log_probs_reusable = trainer_core.log_probs_reusable, reusable
        try:
            hook = {"custom_megatron_before_log_prob_hook_path": f"{HERE}.before_log_prob"}
            with open_trainer(trainer_args("qwen3", hf, use_tis=True, **hook), 0, 1) as trainer:
                calls.clear()
                return train_rollouts(trainer, range(2)), [name for name, _ in calls]
        finally:
            trainer_core.log_probs_reusable = original

    skipped, passes = train(trainer_core.log_probs_reusable)
    computed, more_passes = train(lambda *args: False)
    assert passes == [] and len(more_passes) == 2
    for mine, other in zip(skipped, computed, strict=True):
        for key, value in mine.items():
            assert abs(value - other[key]) <= 1e-5 * max(1, abs(value)), key


def check_reference_stays_and_follows_its_interval(hf: str, scratch: Path) -> None:
    values = GRPO | {"global_batch_size": 8, "ref_load": hf}
    with open_trainer(trainer_args("qwen3", hf, **values), 0, 1, with_ref=True) as trainer:
        metrics = train_rollouts(trainer, range(3))
    kl = [m["train/kl_loss"] for m in metrics]
    assert abs(kl[0]) < 1e-8 < kl[1] < kl[2], kl
    with open_trainer(trainer_args("qwen3", hf, ref_update_interval=2, **values), 0, 1, with_ref=True) as trainer:
        kl = [m["train/kl_loss"] for m in train_rollouts(trainer, range(3))]
    assert kl[1] > 1e-8 and abs(kl[2]) < 1e-8, kl


def check_only_the_chosen_parameters_train(hf: str, scratch: Path) -> None:
    import numpy as np

    for lists, trained in (
        ({"only_train_params_name_list": [r"layers\.1\.mlp\.linear_fc2", "output_layer"]}, {"down_proj", "lm_head"}),
        ({"freeze_params_name_list": ["embedding", r"layers\.[0-3]\.", "final_layernorm"]}, {"lm_head"}),
    ):
        with open_trainer(trainer_args("qwen3", hf, **SFT, **lists), 0, 1) as trainer:
            before = hf_weights(trainer)
            train_rollouts(trainer, range(2))
            after = hf_weights(trainer)
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert {name.split(".")[-2] for name in changed} == trained, changed


def check_lists_that_leave_nothing_to_train_are_refused(hf: str, scratch: Path) -> None:
    """The run went on without a word, and nothing changed."""
    from slime.backends.megatron_utils.initialize import shutdown_megatron

    for lists in ({"only_train_params_name_list": ["nosuch"]}, {"freeze_params_name_list": ["layer", "embedding"]}):
        try:
            with open_trainer(trainer_args("qwen3", hf, **SFT, **lists), 0, 1):
                raise AssertionError(lists)
        except ValueError as error:
            assert "leaves no parameter of anything to train" in str(error)
            shutdown_megatron() and next(iter(lists.values()))[0] in str(error)


def check_recomputed_layers_behind_a_frozen_embedding_train(hf: str, scratch: Path) -> None:
    """A checkpointed layer whose input asks for no gradient has no backward pass: the decoder stayed as it was."""
    import numpy as np

    frozen = {"freeze_params_name_list": ["embedding", r"layers\.0\."]}
    found = {}
    for method in ("", "uniform", "block"):
        flags = ("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", "2")
        args = trainer_args("qwen3", hf, *(flags if method else ()), **SFT, **frozen)
        with open_trainer(args, 0, 1) as trainer:
            (metrics,) = train_rollouts(trainer, range(1))
            found[method] = metrics["train/grad_norm"], hf_weights(trainer)
    norm, weights = found.pop("")
    for method, (other_norm, other) in found.items():
        assert abs(other_norm - norm) < 1e-5 * norm, (method, other_norm, norm)
        for name, weight in weights.items():
            assert np.abs(other[name] - weight).max() < 1e-5, (method, name)


def check_hooks_are_called(hf: str, scratch: Path) -> None:
    paths = {
        "custom_megatron_init_path": f"{HERE}.after_init",
        "custom_megatron_before_log_prob_hook_path": f"{HERE}.before_log_prob",
        "custom_megatron_before_train_step_hook_path": f"{HERE}.before_train_step",
        "rollout_data_postprocess_path": f"{HERE}.postprocess",
        "custom_model_provider_path": f"{HERE}.model_provider",
    }
    args = trainer_args("qwen3", hf, global_batch_size=4, ref_load=hf, **paths)
    with open_trainer(args, 0, 1, with_ref=True) as trainer:
        train_rollouts(trainer, range(1))
        names = [name for name, _ in calls]
        expected = ["init", "model", "log_prob ref_", "log_prob ", "postprocess", "step 0 0", "step 0 1"]
        assert names == expected, names
        assert calls[5][1][3] is trainer._state.model and calls[5][1][4] is trainer._state.optimizer
        rollout_data = calls[4][1][2]
        assert len(rollout_data["advantages"]) == 8 and "ref_log_probs" in rollout_data


def check_bf16_trains_like_fp32(hf: str, scratch: Path) -> None:
    losses = {}
    for bf16 in (False, True):
        with open_trainer(trainer_args("qwen3", hf, bf16=bf16, **SFT), 0, 1) as trainer:
            losses[bf16] = [m["train/loss"] for m in train_rollouts(trainer, range(4))]
    for plain, rounded in zip(losses[False], losses[True], strict=True):
        assert plain != rounded and abs(plain - rounded) < 0.02 * plain, losses


def check_debug_dump_holds_what_was_trained(hf: str, scratch: Path) -> None:
    import torch

    template = str(scratch / "dump_{rollout_id}_{rank}.pt")
    with open_trainer(trainer_args("qwen3", hf, global_batch_size=4, save_debug_train_data=template), 0, 1) as trainer:
        train_rollouts(trainer, range(1))
    dump = torch.load(scratch / "dump_0_0.pt", weights_only=False)
    data = make_rollout(0, without_response=7)
    assert dump["format_version"] == 2 and len(dump["samples"]) == 8
    for index, sample in enumerate(dump["samples"]):
        assert sample["rollout_position"] == sample["sample_index"] == index
        assert torch.equal(sample["tokens"], data["tokens"][index])
        for key in ("log_probs", "advantages", "rollout_log_probs"):
            assert len(sample[key]) == data["response_lengths"][index], key


def check_without_rollouts_there_is_no_optimizer(hf: str, scratch: Path) -> None:
    with open_trainer(trainer_args("qwen3", hf, num_rollout=0), 0, 1) as trainer:
        assert trainer._state.optimizer is None and trainer.start_rollout_id == 0
        data = make_rollout(0)
        error = error_of(ValueError, trainer.train, 0, rank_share(trainer.args, trainer.parallel_config, 0, data))
    assert "--num-rollout" in error


def check_hf_weights_round_trip_through_save_hf(hf: str, scratch: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    args = trainer_args("qwen3", hf, save_hf=str(scratch / "hf_{rollout_id}"), **SFT)
    with open_trainer(args, 0, 1) as trainer:
        train_rollouts(trainer, range(1))
        assert trainer.save_model(0)["perf/save_model_time"] > 0
        weights = hf_weights(trainer)
    index = sorted((scratch / "hf_0").glob("*.safetensors"))
    saved = {name: array for file in index for name, array in load_file(file).items()}
    assert saved.keys() == weights.keys()
    assert all(np.array_equal(saved[name], weights[name]) for name in saved)
    with open_trainer(trainer_args("qwen3", hf, load=str(scratch / "hf_0")), 0, 1) as trainer:
        reloaded = hf_weights(trainer)
        assert trainer.start_rollout_id == 0
    assert all(np.array_equal(reloaded[name], weights[name]) for name in weights)


def check_bad_data_are_named(hf: str, scratch: Path) -> None:
    with open_trainer(trainer_args("qwen3", hf), 0, 1) as trainer:
        for key, spoil, expected in (
            ("loss_masks", lambda mask: mask[:-1], "sample 5: "),
            ("rollout_log_probs", lambda values: values[:-1], "per-token values"),
        ):
            data = make_rollout(0)
            data[key][5] = spoil(data[key][5])
            share = rank_share(trainer.args, trainer.parallel_config, 0, data)
            assert expected in error_of(ValueError, trainer.train, 0, share)
        data = make_rollout(0)
        data["rewards"][5] = float("nan")
        share = rank_share(trainer.args, trainer.parallel_config, 0, data)
        error = error_of(FloatingPointError, trainer.train, 7, share)
        assert "sample 5" in error and "rollout 7 step 0" in error, error


def check_a_sample_without_response_trains_nothing(hf: str, scratch: Path) -> None:
    """In a micro-batch of its own or packed with others, under every loss: all numbers are finite, and the weights
    after two steps do not depend on what the sample's prompt says.
    """
    import math

    import numpy as np

    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
    terms = GRPO | {"use_tis": True, "normalize_advantages": True, "use_opsm": True, "entropy_coef": 0.1}
    cases: list[dict[str, Any]] = [
        SFT,
        {"calculate_per_token_loss": True},
        packed | terms | {"advantage_estimator": "gspo"},
        terms | {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "use_tis": False},
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "normalize_advantages": True},
    ]
    for values in cases:
        with_ref = bool(values.get("use_kl_loss") or values.get("kl_coef"))
        weights = []
        for token in (5, 77):
            with open_trainer(trainer_args("qwen3", hf, ref_load=hf, **values), 0, 1, with_ref=with_ref) as trainer:
                for rollout_id in range(2):
                    data = make_rollout(rollout_id, without_response=3)
                    data["tokens"][3][:] = token
                    share = rank_share(trainer.args, trainer.parallel_config, 0, data)
                    metrics = trainer.train(rollout_id, share)
                    assert all(math.isfinite(value) for value in metrics.values()), (values, metrics)
                weights.append(hf_weights(trainer))
        assert metrics["train/grad_norm"] > 0
        assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0]), values


def check_nothing_to_start_from(hf: str, scratch: Path) -> None:
    args = trainer_args("qwen3", scratch / "absent", load=str(scratch))
    error = error_of(ValueError, open_trainer(args, 0, 1).__enter__)
    assert "--load" in error and "--hf-checkpoint" in error
    from slime.backends.megatron_utils.initialize import shutdown_megatron

    shutdown_megatron()  # the constructor failed after Megatron was up; a process would end here


def check_arguments(hf: str, scratch: Path) -> None:
    from megatron.training.argument_utils import core_transformer_config_from_args

    from slime.backends.megatron_utils.arguments import build_megatron_args, megatron_only

    def build(*flags: str, world_size: int = 1, **values: Any) -> Any:
        return build_megatron_args(trainer_args("qwen3", hf, *flags, **values), 0, world_size)

    args = build("--lr", "0.5", lr=2e-6, seed=7, eval_interval=5, bf16=True)
    assert (args.lr, args.seed, args.eval_interval, args.save_interval) == (2e-6, 7, 5, None)
    assert args.bf16 and str(args.params_dtype) == "torch.bfloat16"
    assert args.padded_vocab_size == 256 and args.vocab_size == 250
    assert args.variable_seq_lengths and args.use_distributed_optimizer and args.dist_ckpt_optim_fully_reshardable
    assert args.train_iters == 100 * 8 // 8 and args.data_parallel_size == 1
    assert not (args.gradient_accumulation_fusion or args.apply_rope_fusion or args.masked_softmax_fusion)
    assert not hasattr(megatron_only(args), "advantage_estimator") and megatron_only(args).num_layers == 4

    assert build("--context-parallel-size", "2", world_size=2).seq_length == 512  # max_position_embeddings, not 4096
    args = build("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "100", world_size=4)
    assert args.padded_vocab_size == 400 and args.data_parallel_size == 2

    assert build("--context-parallel-size", "2", world_size=2, allgather_cp=True).cp_comm_type == ["all_gather"]
    assert build("--context-parallel-size", "2", world_size=2).cp_comm_type == ["p2p"]

    yarn = ("--yarn-beta-fast", "3", "--yarn-original-max-position-embeddings", "77")
    latent = trainer_args("qwen3", hf, "--multi-latent-attention", *yarn)
    latent.megatron_argv.remove("--group-query-attention")
    config = core_transformer_config_from_args(build_megatron_args(latent, 0, 1))
    assert (config.beta_fast, config.beta_slow, config.original_max_position_embeddings) == (3, 1, 77)

    assert build("--padded-vocab-size", "320").padded_vocab_size == 320
    assert "250" in error_of(ValueError, build, "--padded-vocab-size", "128")
    assert "--no-such" in error_of(ValueError, build, "--no-such-flag")
    assert "--async-save" in error_of(ValueError, build, "--async-save", "--use-persistent-ckpt-worker")
    assert "divisible" in error_of(ValueError, build, "--tensor-model-parallel-size", "3", world_size=4)


def check_model_arguments_are_optional(hf: str, scratch: Path) -> None:
    """config.json alone gives Megatron the arguments that the model's flags, typed out, give it."""
    from slime.backends.megatron_utils.arguments import build_megatron_args
    from slime.utils.arguments import build_args

    prompts = scratch / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    run = f"--accelerator cpu --hf-checkpoint {hf} --prompt-data {prompts} --label-key label --rm-type math"
    run += " --num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8"
    run += " --rollout-max-response-len 16 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    typed, derived = (
        build_megatron_args(build_args([*run.split(), *flags], environ={}), 0, 1)
        for flags in (megatron_flags("qwen3"), [])
    )
    assert derived.num_layers == 4 and derived.kv_channels == 20 and derived.rotary_base == 10000
    differing = {
        name: (getattr(typed, name), getattr(derived, name))
        for name in typed.megatron_names
        if getattr(typed, name) != getattr(derived, name)
    }
    # bounds of positions, which rotary ones do not have
    assert differing.keys() == {"max_position_embeddings", "seq_length", "encoder_seq_length"}, differing


def error_of(kind: type[Exception], function: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the error that function raises; AssertionError when it raises none of this kind."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised no {kind.__name__}")


def after_init(args: Any) -> None:
    calls.append(("init", (args,)))


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    calls.append((f"log_prob {store_prefix}", (args, model)))


def before_train_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    calls.append((f"step {rollout_id} {step_id}", (args, rollout_id, step_id, model, optimizer, scheduler)))


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    calls.append(("postprocess", (args, rollout_id, rollout_data)))


def model_provider(pre_process: bool, post_process: bool) -> Any:
    """A provider of one's own that happens to build the usual model; it does not take vp_stage."""
    from megatron.training import get_args

    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    calls.append(("model", ()))
    args = copy.copy(get_args())
    args.custom_model_provider_path = None
    return get_model_provider_func(args)(pre_process=pre_process, post_process=post_process)
