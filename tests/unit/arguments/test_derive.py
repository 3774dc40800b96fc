"""Values that follow from others."""

import json
import os

import pytest

from slime.utils.arguments.hf_config import megatron_checkpoint


def test_precision_follows_the_device_unless_chosen(case):
    for accelerator, flags, expected in [
        ("cpu", (), (False, False, True)),
        ("cpu", ("--bf16",), (True, False, False)),
        ("cuda", (), (True, False, False)),
        ("cuda", ("--fp16",), (False, True, False)),
        ("cuda", ("--fp32",), (False, False, True)),
    ]:
        args = case.args(*flags, accelerator=accelerator)
        assert (args.bf16, args.fp16, args.fp32) == expected, (accelerator, flags)


def test_backend_follows_the_device(case):
    assert case.args(accelerator="cpu").distributed_backend == "gloo"
    assert case.args(accelerator="cuda").distributed_backend == "nccl"


def test_auto_accelerator_is_resolved(case):
    assert case.args(accelerator="auto").accelerator in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("flags", "accelerator", "expected"),
    [
        (("--colocate",), "cuda", (True, True)),
        (("--colocate",), "cpu", (False, False)),
        (("--colocate", "--no-offload-train"), "cuda", (False, True)),
        ((), "cuda", (False, False)),
        (("--offload",), "cuda", (True, True)),
        (("--offload", "--no-offload-rollout"), "cuda", (True, False)),
        (("--colocate", "--debug-rollout-only"), "cuda", (False, False)),
    ],
)
def test_offload(case, flags, accelerator, expected):
    args = case.args(*flags, accelerator=accelerator)
    assert (args.offload_train, args.offload_rollout) == expected


def test_colocated_engines_take_the_trainers_gpus(case):
    args = case.args("--colocate", without=("--rollout-num-gpus",))
    assert args.rollout_num_gpus == 2 == args.world_size


def test_train_only_needs_no_engine_gpus(case):
    assert case.args("--debug-train-only", without=("--rollout-num-gpus",)).rollout_num_gpus == 0


@pytest.mark.parametrize(
    ("rollout_gpus", "expected"),
    [(16, (2, 8, 16)), (4, (1, 4, 4)), (0, (0, 0, 0)), (None, (1, 2, 2))],  # nodes, GPUs per node, rollout GPUs
)
def test_rollout_only_places_what_the_engines_need(case, rollout_gpus, expected):
    changed = {} if rollout_gpus is None else {"rollout_num_gpus": rollout_gpus}
    args = case.args("--debug-rollout-only", without=("--rollout-num-gpus",), **changed)
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node, args.rollout_num_gpus) == expected


def test_saved_rollouts_mean_training_only(case):
    assert case.args(load_debug_rollout_data="dump/{rollout_id}.pt").debug_train_only


def test_dump_details_sets_both_templates(case):
    args = case.args(dump_details="d")
    assert args.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert args.save_debug_train_data == "d/train_data/{rollout_id}_{rank}.pt"
    assert (
        case.args(dump_details="d", save_debug_rollout_data="mine_{rollout_id}.pt").save_debug_rollout_data
        == "mine_{rollout_id}.pt"
    )


def test_batch_size_follows_from_steps(case):
    args = case.args(without=("--global-batch-size",), num_steps_per_rollout=2)
    assert args.global_batch_size == 16
    assert case.args(num_steps_per_rollout=1).global_batch_size == 32  # both given, and they agree


def test_one_sample_per_prompt_has_no_group_deviation(case):
    args = case.args("--disable-rewards-normalization", n_samples_per_prompt=1, global_batch_size=8)
    assert args.grpo_std_normalization is False
    assert case.args().grpo_std_normalization is True


def test_fallbacks(case):
    args = case.args(
        eps_clip=0.3, reward_key="score", rollout_max_context_len=100, rollout_function_path="os.path.join"
    )
    assert args.eps_clip_high == 0.3
    assert args.eval_reward_key == "score"
    assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (99, 100)
    assert args.eval_function_path == "os.path.join"
    assert args.over_sampling_batch_size == 8
    assert case.args(eps_clip=0.3, eps_clip_high=0.4).eps_clip_high == 0.4


def test_a_megatron_checkpoint_resumes(case):
    path = case.megatron_checkpoint("ckpt")
    args = case.args(load=path)
    assert args.load == path and args.start_rollout_id is None
    assert not (args.finetune or args.no_load_optim or args.no_load_rng)


def test_a_single_iteration_directory_resumes(case):
    path = case.directory / "iter_0000007"
    path.mkdir()
    assert case.args(load=str(path)).finetune is False


def test_a_converted_checkpoint_is_found_by_its_own_directory(case):
    """`--load X_torch_dist/release` was taken for an empty place, and training started from the reference."""
    parent = case.directory / "X_torch_dist"
    (parent / "release").mkdir(parents=True)
    (parent / "latest_checkpointed_iteration.txt").write_text("release\n")
    load = str(parent / "release")
    assert case.args(load=load).load == load and megatron_checkpoint(load) == (parent, None)
    assert megatron_checkpoint(str(parent)) == (parent, None)
    (parent / "latest_checkpointed_iteration.txt").write_text("7")  # Megatron would load iteration 7 for it
    assert megatron_checkpoint(load) is None


def test_an_hf_checkpoint_starts_afresh(case):
    args = case.args(load=case.hf)
    assert args.load == str(case.hf) and args.start_rollout_id == 0
    assert args.finetune and args.no_load_optim and args.no_load_rng


def test_an_empty_load_falls_back_to_the_reference_and_its_step(case):
    reference = case.megatron_checkpoint("ref")
    (case.directory / "ref" / "iter_0000005").mkdir()
    args = case.args(load=case.directory / "new", ref_load=reference, ref_ckpt_step=5)
    assert (args.load, args.ckpt_step, args.start_rollout_id) == (reference, 5, 0)


def test_without_load_and_reference_training_starts_from_the_hf_checkpoint(case):
    assert case.args().load == str(case.hf)


def test_megatron_gets_slimes_decisions(case):
    args = case.args(tensor_model_parallel_size=2)
    assert args.use_distributed_optimizer and args.variable_seq_lengths
    assert (args.world_size, args.data_parallel_size) == (2, 1)
    assert (args.seq_length, args.max_position_embeddings, args.rope_type) == (4096, 4096, "rope")
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", str(case.hf))
    assert args.moe_token_dispatcher_type == "alltoall"
    assert case.reading("--multi-latent-attention", max_position_embeddings=77).args.rope_type == "yarn"
    assert args.lr == 1e-6 and args.clip_grad == 1.0 and args.micro_batch_size == 1


def test_engine_sizes_have_both_names(case):
    args = case.args("--sglang-pp-size", "2", rollout_num_gpus_per_engine=2)
    assert (args.sglang_pp_size, args.sglang_pipeline_parallel_size) == (2, 2)
    assert (args.sglang_tp_size, args.sglang_tensor_parallel_size) == (1, 1)


def test_environment_is_read_at_the_entry_point_and_flags_win(case):
    environ = {"RAY_ADDRESS": "10.0.0.1:6379", "WANDB_MODE": "offline", "SGLANG_PP_LAYER_PARTITION": "4,2"}
    args = case.args(environ=environ)
    assert args.sglang_pp_layer_partition == "4,2" and case.args().sglang_pp_layer_partition is None
    assert (args.ray_address, args.wandb_mode) == ("10.0.0.1:6379", "offline")
    args = case.args("--ray-address", "auto", "--wandb-mode", "online", environ=environ)
    assert (args.ray_address, args.wandb_mode) == ("auto", "online")
    assert case.args().ray_address is None


def test_logs_go_below_the_checkpoints(case):
    assert case.args(save="out").log_dir == os.path.join("out", "logs")
    assert case.args(save="out", log_dir="elsewhere").log_dir == "elsewhere"
    assert "slime-logs" in case.args().log_dir


def test_eval_data_from_the_command_line(case):
    path = str(case.directory / "train.jsonl")
    args = case.args("--eval-prompt-data", "held", path, eval_interval=2, eval_temperature=0)
    assert args.eval_prompt_data == ["held", path]
    (dataset,) = args.eval_datasets
    assert (dataset.name, dataset.path, dataset.temperature) == ("held", path, 0)


def test_eval_defaults_apply_to_every_data_set_and_its_own_values_win(case):
    path = str(case.directory / "train.jsonl")
    config = {
        "defaults": {"rm_type": "math", "stop": ["</s>"]},
        "datasets": [{"name": "a", "path": path}, {"name": "b", "path": path, "rm_type": "dapo"}],
    }
    file = case.directory / "eval.json"
    file.write_text(json.dumps(config))
    a, b = case.args(eval_config=file).eval_datasets
    assert (a.rm_type, a.stop, b.rm_type, b.stop) == ("math", ["</s>"], "dapo", ["</s>"])


def test_misspelt_eval_default_lists_the_valid_keys(case):
    file = case.directory / "eval.json"
    data = [{"name": "a", "path": str(case.directory / "train.jsonl")}]
    file.write_text(json.dumps({"defaults": {"temprature": 0.6}, "datasets": data}))
    text = case.only_problem(eval_config=file)
    assert "temprature" in text and "temperature" in text and text.startswith("--eval-config")
