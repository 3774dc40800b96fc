"""The critic's arguments: what it takes from the command line, what its own entry changes, where it starts from."""

import json
from pathlib import Path

import pytest

from slime.utils.arguments.role_config import CRITIC, SHARED

PPO = {"advantage_estimator": "ppo", "lambd": 0.95}


def critic(case, overrides: str, actor: str = "{}") -> str:
    file = case.directory / "roles.yaml"
    file.write_text(
        f"megatron:\n  - {{name: p, role: actor, overrides: {actor}}}\n"
        f"  - {{name: v, role: critic, overrides: {overrides}}}\n"
    )
    return str(file)


def checkpoint(folder: Path, *steps: int | str, newest: int | str | None = None) -> str:
    """A Megatron directory with these iterations."""
    for step in steps:
        (folder / (f"iter_{step:07d}" if isinstance(step, int) else step)).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(steps[-1] if newest is None else newest))
    return str(folder)


def test_only_ppo_has_a_critic(case):
    assert case.args().critic_args is None
    args = case.args(**PPO)
    assert args.critic_args.critic_args is None and args.critic_args.lambd == 0.95
    with pytest.raises(AttributeError, match="read-only"):
        args.critic_args.lr = 1.0


@pytest.mark.parametrize("file", [True, False])
def test_a_critic_is_the_same_with_and_without_a_file(case, file):
    """Settings of the actor's loss and outputs used to reach a critic that had no entry: it then asked for log-probs
    of a reference model that it does not have."""
    flags = {
        "kl_coef": 0.1,
        "ref_load": str(case.hf),
        "custom_advantage_function_path": "tests.unit.loss.test_advantages.good_advantage",
        "save": str(case.directory / "out"),
        "save_interval": 1,
        "save_hf": str(case.directory / "hf_{rollout_id}"),
        "dump_details": str(case.directory / "dump"),
        "normalize_advantages": True,
    }
    args = case.args(**PPO, **flags, **({"megatron_config_path": critic(case, "{lr: 0.5}")} if file else {}))
    assert args.kl_coef == 0.1 and args.save_hf and args.custom_advantage_function_path and args.normalize_advantages
    mine = args.critic_args
    assert {name: getattr(mine, name) for name in CRITIC} == dict(CRITIC)
    assert mine.custom_advantage_function_path is None
    assert (args.lr, mine.lr) == (1e-6, 0.5 if file else 1e-6)


def test_each_role_has_its_own_values_and_what_follows_from_them(case):
    path = critic(case, "{lr: 1e-5, clip_grad: 0.5, adam_beta2: 0.9}", actor="{lr: 3e-6, eps_clip: 0.4}")
    args = case.args(**PPO, clip_grad=0.75, megatron_config_path=path)
    assert (args.lr, args.clip_grad, args.eps_clip_high) == (3e-6, 0.75, 0.4)
    assert (args.critic_args.lr, args.critic_args.clip_grad, args.critic_args.eps_clip_high) == (1e-5, 0.5, 0.2)
    assert args.critic_args.adam_beta2 == 0.9 != args.adam_beta2
    own = "{custom_advantage_function_path: tests.unit.loss.test_advantages.good_advantage}"
    args = case.args(**PPO, megatron_config_path=critic(case, own))
    assert args.custom_advantage_function_path is None and args.critic_args.custom_advantage_function_path


@pytest.mark.parametrize("key", [*SHARED, "loss-type", *CRITIC])
def test_what_both_roles_share_and_what_every_critic_is_cannot_be_overridden(case, key):
    problem = case.only_problem(**PPO, megatron_config_path=critic(case, f"{{{key}: 1}}"))
    assert f"roles.yaml: {key}: " in problem
    assert ("holds for both roles" in problem) == (key in SHARED)


def test_the_actors_overrides_of_what_both_share_hold_for_the_critic(case):
    """Cut up differently, the values of one sample would become another's."""
    path = critic(case, "{lr: 1e-5}", actor="{micro_batch_size: 4, context_parallel_size: 2, lr: 3e-6}")
    mine = case.args(**PPO, megatron_config_path=path).critic_args
    assert (mine.micro_batch_size, mine.context_parallel_size, mine.lr) == (4, 2, 1e-5)
    path = critic(case, "{}", actor="{advantage_estimator: ppo, num_critic_only_steps: 2}")
    args = case.args(megatron_config_path=path)
    assert args.num_critic_only_steps == args.critic_args.num_critic_only_steps == 2


def test_a_critic_has_the_actors_stages_without_prediction_layers(case):
    """Megatron counts the m of a layout: a critic, which has none of these layers, would not start."""
    stages = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2, "mtp_num_layers": 2}
    case.write_config(num_nextn_predict_layers=2)
    args = case.args(**PPO, **stages, pipeline_model_parallel_layout="Et*3|t*3m*2L")
    assert (args.pipeline_model_parallel_layout, args.mtp_num_layers) == ("Et*3|t*3m*2L", 2)
    assert (args.critic_args.pipeline_model_parallel_layout, args.critic_args.mtp_num_layers) == ("Et*3|t*3L", None)
    assert case.args(**PPO).critic_args.pipeline_model_parallel_layout is None
    case.write_config(num_nextn_predict_layers=1)
    args = case.args(**PPO, mtp_num_layers=3, mtp_use_repeated_layer=True)
    assert args.mtp_use_repeated_layer and not args.critic_args.mtp_use_repeated_layer


def test_mistakes_in_the_critics_values_are_found_before_anything_starts(case):
    problems = "\n".join(map(str, case.problems(**PPO, megatron_config_path=critic(case, "{lr: fast, lrr: 1}"))))
    assert "roles.yaml: lr: " in problems and "roles.yaml: lrr: is no setting of a training role" in problems
    assert "value nothing" not in problems
    problems = case.problems(**PPO, megatron_config_path=critic(case, "{num_query_groups: 5}"))
    assert "5 does not divide the 12 attention heads" in "\n".join(map(str, problems))


def test_checkpoints_of_the_roles_lie_apart(case):
    save = str(case.directory / "out")
    saving = {"save": save, "save_interval": 1}
    assert case.args(**PPO, **saving).critic_args.save == f"{save}/critic"
    other = case.args(**PPO, **saving, megatron_config_path=critic(case, "{save: elsewhere}"))
    assert (other.save, other.critic_args.save) == (save, "elsewhere")
    problem = case.only_problem(**PPO, **saving, megatron_config_path=critic(case, "{save: null}"))
    assert "--save is not given" in problem
    problem = case.only_problem(**PPO, **saving, megatron_config_path=critic(case, f"{{save: {save}}}"))
    assert "roles.yaml: save: " in problem and f"try: save: {save}/critic" in problem


def test_a_new_run_starts_both_from_the_same_weights(case):
    for load in ({}, {"load": str(case.directory / "nowhere")}):
        args = case.args(**PPO, **load)
        assert args.load == args.critic_args.load == str(case.hf)
        assert args.start_rollout_id == args.critic_args.start_rollout_id == 0 and args.critic_args.finetune


def test_a_resumed_critic_is_the_one_of_the_actors_step(case):
    """Saved first, the critic may be one checkpoint ahead of an actor whose save was interrupted."""
    load = checkpoint(case.directory / "out", 3, 5)
    checkpoint(case.directory / "out" / "critic", 3, 5, 7)
    mine = case.args(**PPO, load=load).critic_args
    assert (mine.load, mine.ckpt_step, mine.finetune, mine.start_rollout_id) == (f"{load}/critic", 5, False, None)
    checkpoint(case.directory / "out", newest=7)
    assert case.args(**PPO, load=load).critic_args.ckpt_step is None
    assert case.args(**PPO, load=load, ckpt_step=3).critic_args.ckpt_step == 3
    assert case.args(**PPO, load=f"{load}/iter_0000003").critic_args.ckpt_step == 3
    checkpoint(case.directory / "out", newest=6)
    problem = case.only_problem(**PPO, load=load)
    assert "the actor's checkpoint is 6" in problem and "its newest: 7" in problem and "--finetune" in problem
    mine = case.args(**PPO, load=load, finetune=True).critic_args
    assert (mine.load, mine.ckpt_step, mine.finetune) == (f"{load}/critic", None, True)
    assert case.args(**PPO, load=load, ckpt_step=3, finetune=True).critic_args.ckpt_step == 3


def test_before_the_actor_has_trained_only_the_critic_is_resumed(case):
    out = case.directory / "out"
    checkpoint(out / "critic", 2)
    args = case.args(**PPO, load=str(out), num_critic_only_steps=3)
    assert (args.load, args.critic_args.load, args.critic_args.finetune) == (str(case.hf), f"{out}/critic", False)


def test_an_actors_checkpoint_without_a_critic_gives_its_weights(case, caplog):
    load = checkpoint(case.directory / "grpo", 8)
    args = case.args(**PPO, load=load)
    assert (args.critic_args.load, args.critic_args.finetune, args.critic_args.no_load_optim) == (load, True, True)
    assert not args.finetune and "holds no critic: it starts from the weights of" in caplog.text
    own = checkpoint(case.directory / "value", 1)
    mine = case.args(**PPO, load=load, megatron_config_path=critic(case, f"{{load: {own}}}")).critic_args
    assert (mine.load, mine.finetune) == (own, False)


def test_both_roles_take_turns_on_the_gpus(case):
    """A critic makes the trainers move off their GPUs, also beside engines of their own; on a CPU nothing moves."""
    assert not case.args(**PPO).offload_train
    apart = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "num_gpus_per_node": 8}
    for extra, expected in (((), True), (("--no-offload-train",), False)):
        args = case.reading(*extra, dry_run=True, accelerator="cuda", **PPO, **apart).args
        assert (args.offload_train, args.critic_args.offload_train, args.offload_rollout) == (
            expected,
            expected,
            False,
        )
    grpo = case.reading(dry_run=True, accelerator="cuda", **apart).args
    assert not grpo.offload_train


@pytest.mark.parametrize(
    "flags", [("--loss-type", "sft_loss"), ("--disable-compute-advantages-and-returns",)], ids=lambda flags: flags[0]
)
def test_values_that_nothing_reads_are_refused(case, flags):
    assert "whose values nothing would read" in "\n".join(map(str, case.problems(*flags, **PPO)))


def test_arguments_with_a_critic_travel_to_other_processes(case):
    import pickle

    args = pickle.loads(pickle.dumps(case.args(**PPO)))
    assert args.critic_args.loss_type == "value_loss" and json.dumps(args.critic_args.lr)
