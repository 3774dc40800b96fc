"""`Sample`: the record of one generated response, the currency of the rollout side.

Knows nothing of datasets, engines or trainers; numpy and torch are imported only when replay data actually arrives.
"""

import base64
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class SpecInfo:
    """Speculative decoding counters, summed over the finished requests of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def accept_rate(self) -> float:
        """Accepted / drafted tokens; 0.0 before the first draft."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def accept_length(self) -> float:
        """Generated tokens per verification pass; 0.0 before the first pass."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: dict) -> None:
        """Add one request. Engines that do not speculate send no `spec_verify_ct` and change nothing.

        SGLang 0.5.17 calls the counters `spec_num_correct_drafts` / `spec_num_proposed_drafts`; earlier versions
        `spec_accept_token_num` / `spec_draft_token_num`.
        """
        if not meta_info.get("spec_verify_ct"):
            return
        self.spec_accept_token_num += _first_of(meta_info, "spec_num_correct_drafts", "spec_accept_token_num")
        self.spec_draft_token_num += _first_of(meta_info, "spec_num_proposed_drafts", "spec_draft_token_num")
        self.spec_verify_ct += meta_info["spec_verify_ct"]
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict:
        return dict(self.__dict__)

    @staticmethod
    def from_dict(data: dict) -> "SpecInfo":
        return SpecInfo(**data)


@dataclass
class PrefixCacheInfo:
    """Prompt tokens the engine found in its prefix cache, summed over the finished requests of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached / all prompt tokens; 0.0 before the first request."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: dict) -> None:
        self.cached_tokens += meta_info.get("cached_tokens") or 0
        self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0

    def to_dict(self) -> dict:
        return dict(self.__dict__)

    @staticmethod
    def from_dict(data: dict) -> "PrefixCacheInfo":
        return PrefixCacheInfo(**data)


class Status(Enum):
    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by a stop token or string
    TRUNCATED = "truncated"  # ended by the length limit
    ABORTED = "aborted"  # cut by the framework; generation can be resumed
    FAILED = "failed"  # recoverable failure in custom code


STATUS_OF_FINISH_TYPE = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}


@dataclass
class Sample:
    """One prompt and its response.

    Invariants (`validate`), with R = response_length:
      0 <= R <= len(tokens); len(loss_mask) == R, entries 0/1; len(rollout_log_probs) == R, finite;
      len(rollout_top_p_token_offsets) == R + 1, last offset == len(rollout_top_p_token_ids);
      rollout_routed_experts.shape[0] == len(tokens) - 1; len(teacher_log_probs) == R.
    """

    group_index: int | None = None  # prompt group; the key of group normalisation
    index: int | None = None  # running number of the sample
    rollout_id: int | None = None  # execution; siblings split from one execution share it

    prompt: str | list[dict] = ""
    tokens: list[int] = field(default_factory=list)  # prompt + response ids
    multimodal_inputs: dict | None = None  # {"images": [PIL.Image], "videos": ...}
    multimodal_train_inputs: dict | None = None  # processor tensors, e.g. pixel_values
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict = field(default_factory=dict)

    response: str = ""
    response_length: int = 0  # tokens after the first-turn prompt, tool and environment tokens included
    label: Any = None
    reward: Any = None  # number, or dict of numbers together with --reward-key
    loss_mask: list[int] | None = None  # 1 = train; absent = all ones
    weight_versions: list[str] = field(default_factory=list)  # engine weight version per finished request
    rollout_log_probs: list[float] | None = None  # 0.0 on non-trainable tokens
    rollout_top_p_token_ids: Any = None  # int32 tensor; kept ids of token i are ids[offsets[i]:offsets[i + 1]]
    rollout_top_p_token_offsets: Any = None  # int32 tensor [R + 1]
    rollout_routed_experts: Any = None  # int32 tensor [len(tokens) - 1, num_layers, topk]
    remove_sample: bool = False  # zero the loss mask at conversion; still counts in reward normalisation
    teacher_log_probs: Any = None

    Status = Status

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict | None = None
    session_id: str | None = None  # routing key
    non_generation_time: float = 0.0  # seconds spent outside generation

    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    # ---- serialisation ----

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of every attribute, also those set beyond the declared fields; status as its value string.

        Containers are shared with the sample, not copied.
        """
        data = dict(self.__dict__)
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sample":
        """Inverse of `to_dict`; keys that are no field become attributes. `data` is left as it is."""
        known = {name: data[name] for name in _FIELD_NAMES if name in data}
        if "status" in known:
            known["status"] = Status(known["status"])
        if isinstance(known.get("spec_info"), dict):
            known["spec_info"] = SpecInfo.from_dict(known["spec_info"])
        if isinstance(known.get("prefix_cache_info"), dict):
            known["prefix_cache_info"] = PrefixCacheInfo.from_dict(known["prefix_cache_info"])
        sample = cls(**known)
        for name, value in data.items():
            if name not in _FIELD_NAMES:
                setattr(sample, name, value)
        return sample

    # ---- reading ----

    @property
    def effective_response_length(self) -> int:
        """Trainable tokens: the mask's sum, or the whole response without a mask."""
        return int(sum(self.loss_mask)) if self.loss_mask is not None else self.response_length

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its `args.reward_key` entry.

        Raises ValueError if a reward key is given and the reward has no such entry.
        """
        if not args.reward_key:
            return self.reward
        if not isinstance(self.reward, dict):
            raise ValueError(
                f"{self._name()}: --reward-key {args.reward_key} needs a dict reward, got {_shown(self.reward)}; "
                f"drop the flag or return {{{args.reward_key!r}: number}} from the reward function"
            )
        if args.reward_key not in self.reward:
            raise ValueError(
                f"{self._name()}: --reward-key {args.reward_key} is not in the reward (keys: {_names(self.reward)})"
            )
        return self.reward[args.reward_key]

    def get_numeric_reward(self, args: Any) -> float:
        """`get_reward_value` as a finite float; ValueError naming the sample and what was found otherwise."""
        return check_reward_number(self.get_reward_value(args), self._name(), key=args.reward_key, reward=self.reward)

    # ---- writing ----

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append generated (trainable) or inserted (tool, environment) tokens and all that goes with them.

        tokens: n ids. log_probs: n natural logs for trainable tokens, None for the others (0.0 is stored).
        meta_info: the engine's answer; may carry nucleus ids (`top_p_token_ids` / `top_p_token_offsets`, n spans),
        `routed_experts` (int32 [len(tokens) - 1 - start, num_layers, moe_router_topk], replaces the rows from
        `routed_experts_start_len`; needs `args`), and with `finish_reason` the terminal facts: counters, weight
        version, status. A sample without loss mask gets ones for the response it already has.

        Raises ValueError, before anything is changed, when lengths disagree or trainable tokens would follow a
        response whose log-probs were never recorded.
        """
        tokens, meta_info = _as_list(tokens), meta_info or {}
        n, old_length = len(tokens), self.response_length
        new_log_probs = self._check_log_probs(n, log_probs, trainable)
        old_log_probs = self.rollout_log_probs
        if old_log_probs is None:
            if trainable and old_length > 0:
                raise ValueError(
                    f"{self._name()}: trainable tokens follow {old_length} response tokens without rollout_log_probs; "
                    "append those with their log_probs (or trainable=False) first"
                )
            old_log_probs = [0.0] * old_length
        nucleus = self._merged_nucleus(args, n, trainable, meta_info)
        experts = self._merged_routed_experts(args, len(self.tokens) + n, meta_info)
        status = _status_of(meta_info) if update_terminal_info else None

        old_mask = [1] * old_length if self.loss_mask is None else _as_list(self.loss_mask)
        self.tokens = _as_list(self.tokens) + tokens
        self.response_length = old_length + n
        self.loss_mask = old_mask + [int(trainable)] * n
        self.rollout_log_probs = _as_list(old_log_probs) + new_log_probs
        if text is not None:
            self.response += text
        if nucleus is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = nucleus
        if experts is not None:
            self.rollout_routed_experts = experts
        if status is not None:
            self.spec_info.add(meta_info)
            self.prefix_cache_info.add(meta_info)
            if "weight_version" in meta_info:
                self.weight_versions = [*self.weight_versions, meta_info["weight_version"]]
            self.status = status
        self._validate_lengths(routed_experts_final=False)

    # ---- checking ----

    def validate(self) -> None:
        """Check every invariant of the class docstring; ValueError names the sample and both numbers.

        A numeric reward must be finite; None and dict rewards are left to whoever reads them.
        """
        self._validate_lengths(routed_experts_final=True)
        if self.loss_mask is not None and any(m not in (0, 1) for m in _as_list(self.loss_mask)):
            raise ValueError(f"{self._name()}: loss_mask has entries other than 0 and 1")
        if self.rollout_log_probs is not None:
            bad = next((i for i, x in enumerate(_as_list(self.rollout_log_probs)) if not math.isfinite(x)), None)
            if bad is not None:
                raise ValueError(
                    f"{self._name()}: rollout_log_probs[{bad}] is {self.rollout_log_probs[bad]}, must be finite"
                )
        if self.rollout_top_p_token_offsets is not None:
            _check_offsets(_as_list(self.rollout_top_p_token_offsets), len(self.rollout_top_p_token_ids), self._name())
        if isinstance(self.reward, float) and not math.isfinite(self.reward):
            raise ValueError(f"{self._name()}: reward is {self.reward}, must be finite")

    def _validate_lengths(self, routed_experts_final: bool) -> None:
        r, total = self.response_length, len(self.tokens)
        if not 0 <= r <= total:
            raise ValueError(f"{self._name()}: response_length {r} must lie within 0..len(tokens) = {total}")
        for name, expected in (
            ("loss_mask", r),
            ("rollout_log_probs", r),
            ("rollout_top_p_token_offsets", r + 1),
            ("teacher_log_probs", r),
        ):
            value = getattr(self, name)
            if value is not None and len(value) != expected:
                raise ValueError(
                    f"{self._name()}: len({name}) is {len(value)}, must be {expected} for response_length {r}"
                )
        if (self.rollout_top_p_token_ids is None) != (self.rollout_top_p_token_offsets is None):
            raise ValueError(f"{self._name()}: rollout_top_p_token_ids and _offsets must be given together")
        if self.rollout_routed_experts is not None:
            rows, wanted = len(self.rollout_routed_experts), max(total - 1, 0)
            # Inserted tokens have no routes until the next generation, which sends them along with its own.
            if rows > wanted or (routed_experts_final and rows != wanted):
                raise ValueError(
                    f"{self._name()}: rollout_routed_experts has {rows} rows, must be len(tokens) - 1 = {wanted}"
                )

    def _name(self) -> str:
        return f"sample index={self.index} group_index={self.group_index}"

    # ---- parts of append_response_tokens ----

    def _check_log_probs(self, n: int, log_probs: Sequence[float] | None, trainable: bool) -> list[float]:
        if not trainable:
            if log_probs is not None:
                raise ValueError(f"{self._name()}: non-trainable tokens take no log_probs; 0.0 is stored for them")
            return [0.0] * n
        if log_probs is None:
            raise ValueError(f"{self._name()}: {n} trainable tokens need log_probs")
        log_probs = _as_list(log_probs)
        if len(log_probs) != n:
            raise ValueError(f"{self._name()}: {len(log_probs)} log_probs for {n} tokens")
        return log_probs

    def _merged_nucleus(self, args: Any, n: int, trainable: bool, meta_info: dict) -> tuple[Any, Any] | None:
        """(ids, offsets) after n more tokens, or None when nucleus replay is not in use for this sample."""
        ids = _first_present(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
        offsets = _first_present(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
        if (ids is None) != (offsets is None):
            raise ValueError(f"{self._name()}: the engine sent only one of top-p token ids and offsets")
        active = self.rollout_top_p_token_offsets is not None or getattr(args, "rollout_top_p", 1.0) != 1.0
        if not trainable:
            if not active:
                return None
            ids, offsets = [], [0] * (n + 1)
        elif ids is None:
            if self.rollout_top_p_token_offsets is not None and n > 0:
                raise ValueError(
                    f"{self._name()}: {n} trainable tokens came without top-p token ids, earlier ones had them"
                )
            ids, offsets = ([], [0] * (n + 1)) if self.rollout_top_p_token_offsets is not None else (None, None)
        if ids is None:
            return None

        import numpy as np
        import torch

        new_ids, new_offsets = _int32(ids), _int32(offsets)
        if len(new_offsets) != n + 1:
            raise ValueError(f"{self._name()}: {len(new_offsets)} top-p offsets for {n} tokens, must be {n + 1}")
        _check_offsets(new_offsets.tolist(), len(new_ids), self._name())
        old_ids, old_offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if old_offsets is None:
            if self.response_length and (self.loss_mask is None or any(self.loss_mask)):
                raise ValueError(
                    f"{self._name()}: top-p token ids start after {self.response_length} response tokens without them"
                )
            old_ids, old_offsets = [], [0] * (self.response_length + 1)
        old_ids, old_offsets = _int32(old_ids), _int32(old_offsets)
        return (
            torch.from_numpy(np.concatenate([old_ids, new_ids])),
            torch.from_numpy(np.concatenate([old_offsets, new_offsets[1:] + np.int32(len(old_ids))])),
        )

    def _merged_routed_experts(self, args: Any, total_tokens: int, meta_info: dict) -> Any | None:
        """int32 tensor [total_tokens - 1, num_layers, topk] with the engine's rows from its start on, or None."""
        routes = meta_info.get("routed_experts")
        if routes is None:
            return None
        if args is None:
            raise ValueError(f"{self._name()}: routed_experts can only be read with args (num_layers, topk)")

        import torch

        start = meta_info.get("routed_experts_start_len") or 0
        shape = (total_tokens - 1 - start, args.num_layers, args.moe_router_topk)
        flat = _int32(routes)
        if shape[0] < 0 or flat.size != math.prod(shape):
            raise ValueError(
                f"{self._name()}: routed_experts has {flat.size} entries, must be (tokens {total_tokens} - 1 - start "
                f"{start}) x num_layers {shape[1]} x topk {shape[2]} = {math.prod(shape)}"
            )
        new = torch.from_numpy(flat.reshape(shape))
        if start == 0:
            return new
        old = self.rollout_routed_experts
        if old is None or len(old) < start:
            raise ValueError(
                f"{self._name()}: routed_experts start at row {start}, {0 if old is None else len(old)} rows are known"
            )
        return torch.cat([torch.as_tensor(old)[:start], new])


_FIELD_NAMES = frozenset(f.name for f in fields(Sample))


def check_reward_number(value: Any, where: str, *, key: str | None = None, reward: Any = None) -> float:
    """`value` as float. Raises ValueError, naming `where` and the reward key, unless it is a finite number."""
    if getattr(value, "ndim", None) == 0:  # numpy or torch scalar
        value = value.item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    if isinstance(value, dict):
        raise ValueError(
            f"{where}: the reward is a dict; name one of its keys ({_names(value)}) with --reward-key, "
            "or reduce it with --custom-reward-post-process-path"
        )
    entry = f"reward[{key!r}]" if key else "reward"
    whole = f" in {_shown(reward)}" if key and reward is not None else ""
    raise ValueError(f"{where}: {entry} must be a finite number, got {_shown(value)}{whole}")


def _status_of(meta_info: dict) -> Status | None:
    reason = meta_info.get("finish_reason")
    if reason is None:  # an unfinished streaming chunk
        return None
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in STATUS_OF_FINISH_TYPE:
        raise ValueError(f"finish_reason type {kind!r} is unknown (known: {', '.join(STATUS_OF_FINISH_TYPE)})")
    return STATUS_OF_FINISH_TYPE[kind]


def _check_offsets(offsets: list[int], num_ids: int, where: str) -> None:
    if offsets[0] != 0 or offsets[-1] != num_ids or any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
        raise ValueError(f"{where}: top-p offsets must rise from 0 to the number of ids {num_ids}")


def _as_list(value: Any) -> list:
    """A list from a list, tuple, numpy array or tensor of any of our per-token fields."""
    if isinstance(value, list):
        return value
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _int32(value: Any) -> Any:
    """Flat int32 numpy array from a sequence, array, tensor, or base64 text of little-endian int32."""
    import numpy as np

    if isinstance(value, str | bytes):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4").copy()
    return np.asarray(value, dtype=np.int32).reshape(-1)


def _first_present(mapping: dict, *names: str) -> Any:
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def _first_of(mapping: dict, *names: str) -> int:
    value = _first_present(mapping, *names)
    return 0 if value is None else value


def _names(mapping: dict) -> str:
    return ", ".join(map(str, mapping)) or "none"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
