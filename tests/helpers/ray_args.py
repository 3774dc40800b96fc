"""Arguments of a small CPU run: every flag of slime's own at its default, and two trainers with two engines."""

from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.namespace import Args

SMALL_RUN = {
    "accelerator": "cpu",
    "actor_num_gpus_per_node": 2,
    "critic_args": None,
    "data_source_path": "slime.rollout.data_source.RolloutDataSource",
    "engine_start_timeout": 60.0,
    "eval_function_path": "tests.helpers.fake_run.evaluate",
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "n_samples_per_prompt": 2,
    "num_rollout": 3,
    "offload_rollout": False,
    "offload_train": False,
    "rollout_batch_size": 4,
    "rollout_function_path": "tests.helpers.fake_run.generate",
    "rollout_num_gpus": 2,
    "sglang_router_request_timeout_secs": 60,
    "sglang_server_concurrency": 8,
    "train_env_vars": {},
}


def make_args(**changes) -> Args:
    """`changes` win; names that are no flags are set too."""
    defaults = {flag.dest: flag.default for group in GROUPS for flag in group.flags}
    defaults |= {
        flag.dest: flag.kind == "off" for group in GROUPS for flag in group.flags if flag.kind in ("switch", "off")
    }
    return Args(**{**defaults, **SMALL_RUN, **changes})
