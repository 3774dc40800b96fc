"""How each plug-in is called: what `hooks.py` holds a function's signature against."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "awaited", "either"]


@dataclass(frozen=True)
class Call:
    """One call. positional: how many values are passed by position, `names` what they are; keywords: passed by name.

    optional: passed by name only to functions that declare them. kind: a "plain" call uses the result at once, an
    "awaited" one awaits it, "either" awaits what can be awaited.
    """

    names: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    kind: Kind = "plain"

    def __str__(self) -> str:
        words = [*self.names, *(f"{name}=..." for name in self.keywords)]
        return f"f({', '.join(words)})"


_ROLLOUT = Call(("args", "rollout_id", "data_source"), ("evaluation",))
_TIS = ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
_OPTIMIZER_STEP = ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler")

CALLS: dict[str, Call] = {
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "custom_generate_function_path": Call(
        ("args", "sample", "sampling_params"), optional=("evaluation",), kind="awaited"
    ),
    "rollout_sample_hook_path": Call(("args", "sample"), optional=("rollout_id", "evaluation"), kind="either"),
    "custom_rm_path": Call(("args", "sample"), kind="awaited"),
    "dynamic_sampling_filter_path": Call(("args", "group")),
    "buffer_filter_path": Call(("args", "rollout_id", "buffer", "num_samples")),
    "rollout_sample_filter_path": Call(("args", "groups")),
    "rollout_all_samples_process_path": Call(("args", "all_groups", "data_source")),
    "custom_reward_post_process_path": Call(("args", "samples")),
    "custom_convert_samples_to_train_data_path": Call(("args", "samples")),
    "custom_rollout_log_function_path": Call(
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    ),
    "custom_eval_rollout_log_function_path": Call(("rollout_id", "args", "data", "extra_metrics")),
    "rollout_data_postprocess_path": Call(("args", "rollout_id", "rollout_data")),
    "custom_advantage_function_path": Call(("args", "rollout_data")),
    "custom_loss_function_path": Call(("args", "batch", "logits", "sum_of_sample_mean")),
    "custom_tis_function_path": Call((), _TIS),
    "custom_pg_loss_reducer_function_path": Call(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
    ),
    "custom_model_provider_path": Call((), ("pre_process", "post_process"), optional=("vp_stage",)),
    "custom_megatron_init_path": Call(("args",)),
    "custom_megatron_before_log_prob_hook_path": Call(("args", "model", "store_prefix")),
    "custom_megatron_before_train_step_hook_path": Call(_OPTIMIZER_STEP),
    "custom_update_weight_post_write_path": Call(("args", "version_dir", "rollout_engines")),
}
# --spec names the function by module and attribute.
SPEC = Call(("args", "config", "vp_stage"))
# A class: how it is made, and the methods that are called.
DATA_SOURCE = Call(("args",))
DATA_SOURCE_METHODS: dict[str, Call] = {
    "get_samples": Call(("num_samples",)),
    "add_samples": Call(("samples",)),
    "save": Call(("rollout_id",)),
    "load": Call(("rollout_id",)),
}
