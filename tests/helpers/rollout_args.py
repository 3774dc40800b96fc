"""A complete set of rollout arguments with harmless values, and a tokenizer that needs no files, for tests of
slime.rollout.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

VOCAB_SIZE = 50


class CharTokenizer:
    """One token per character: its code modulo 50."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(char) % VOCAB_SIZE for char in text]

    def __len__(self) -> int:
        return VOCAB_SIZE


def rollout_args(url: str = "http://127.0.0.1:1", **changes: Any) -> Namespace:
    """Arguments of a small GRPO rollout against the router at `url`."""
    ip, port = url.removeprefix("http://").split(":")
    values = {
        "hf_checkpoint": "/nonexistent",
        "sglang_router_ip": ip,
        "sglang_router_port": int(port),
        "sglang_server_concurrency": 64,
        "sglang_router_request_timeout_secs": 60,
        "sglang_enable_deterministic_inference": False,
        "router_policy": None,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_global_dataset": True,
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 4,
        "n_samples_per_prompt": 3,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 16,
        "rollout_max_context_len": None,
        "rollout_max_prompt_len": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "rollout_stall_timeout": 20.0,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "custom_generate_function_path": None,
        "custom_rm_path": f"{__name__}.reward_is_response_length",
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "custom_rollout_log_function_path": None,
        "custom_eval_rollout_log_function_path": None,
        "rollout_sample_hook_path": [],
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "buffer_filter_path": None,
        "group_rm": False,
        "rm_type": None,
        "reward_key": None,
        "eval_reward_key": None,
        "eval_datasets": [],
        "eval_max_prompt_len": None,
        "eval_max_context_len": None,
        "prompt_data": None,
        "input_key": "prompt",
        "label_key": None,
        "tool_key": None,
        "metadata_key": "metadata",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "skip_malformed_rows": False,
        "loss_mask_type": "qwen",
        "load": None,
        "save": None,
        "save_debug_rollout_data": None,
        "load_debug_rollout_data": None,
        "load_debug_rollout_data_subsample": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "log_multi_turn": False,
        "log_passrate": False,
        "log_reward_category": None,
    }
    unknown = set(changes) - set(values)
    if unknown:
        raise ValueError(f"not an argument of rollout_args: {sorted(unknown)}")
    return Namespace(**(values | changes))


def write_prompts(folder: Path, prompts: list[str]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


async def reward_is_response_length(args: Namespace, sample: Any, **kwargs: Any) -> Any:
    """Custom reward; a list of samples gets a list."""
    if isinstance(sample, list):
        return [float(s.response_length) for s in sample]
    return float(sample.response_length)


class ListSource:
    """A data source over given groups; keeps what is given back in `returned`."""

    def __init__(self, groups: list[list[Sample]]):
        self.groups = list(groups)
        self._length = len(groups)
        self.returned: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        taken, self.groups = self.groups[:num_samples], self.groups[num_samples:]
        return taken

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    def __len__(self) -> int:
        return self._length


def groups_of(prompts: list[str], n: int) -> list[list[Sample]]:
    """One group of n samples per prompt with consecutive indices."""
    return [
        [Sample(index=g * n + i, group_index=g, prompt=prompt) for i in range(n)] for g, prompt in enumerate(prompts)
    ]
