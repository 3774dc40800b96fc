"""Which arguments and which environment an SGLang server gets, on any device.

Pure functions of the parsed arguments; nothing is started and sglang is not imported here.
"""

import importlib.metadata
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.upstream_fields import NO_DEFAULT, UpstreamField, check_known, server_fields
from slime.utils.layout.index_sharing import index_sharing_of_config

logger = logging.getLogger(__name__)

SERVER_PATH = Path(__file__).parent / "server_path"
CPU_STUB = Path(__file__).parent / "cpu_stub"
CPU_SGLANG_VERSION = "0.5.17"
CPU_MAX_TOTAL_TOKENS = 65536
CPU_SPARSE_REFUSED = ("enable_hierarchical_cache", "disaggregation_mode", "speculative_algorithm")

ENGINE_ENV = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    # seconds; at the default of 5 a server closes idle connections under the requests of a busy client or router
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
}
DROPPED_ENV = (
    # the memory saver excludes expandable segments
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    # a server imports thousands of modules in each of its three processes: compiling them anew is most of a start
    "PYTHONDONTWRITEBYTECODE",
)


def build_server_args(
    args: Namespace,
    *,
    rank: int,
    host: str,
    port: int,
    nccl_port: int | None = None,
    dist_init_addr: str | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    base_gpu_id: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """ServerArgs fields of one engine on one node. ValueError for a field that the installed SGLang lacks.

    rank: index among all engine processes. overrides: ServerArgs field -> value, stronger than everything else. Then
    come the values computed here, then the user's `--sglang-*` flags, then defaults for the CPU.
    """
    overrides = dict(overrides or {})
    user = dict(args.sglang_overrides)
    check_known(overrides, server_fields(), "ServerArgs")
    check_known(user, server_fields(), "ServerArgs")

    computed = _computed_fields(args, rank, user, overrides)
    computed |= {"host": host, "port": port, "nnodes": nnodes, "node_rank": node_rank, "base_gpu_id": base_gpu_id}
    computed |= {"nccl_port": nccl_port} if nccl_port is not None else {}
    computed |= {"dist_init_addr": dist_init_addr} if dist_init_addr is not None else {}
    for name in sorted(user.keys() & computed.keys()):
        if user[name] != computed[name]:
            logger.warning("engine %d: %s=%r is set by slime, not %r", rank, name, computed[name], user[name])

    defaults = _cpu_defaults(args) if args.accelerator == "cpu" else _gpu_defaults(args, computed)
    fields = defaults | user | computed | overrides
    lacking = sorted((defaults | computed).keys() - server_fields().keys())
    if lacking:
        logger.info("this SGLang has no %s; left out", ", ".join(lacking))
    fields = {name: value for name, value in fields.items() if name not in lacking}
    config = _config_of(fields)
    fields |= _index_sharing(config, fields)
    if args.accelerator == "cpu":
        _check_cpu(config, fields)
    return fields


def _computed_fields(
    args: Namespace, rank: int, user: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """What slime decides for every engine."""
    given = {**user, **overrides}
    pp_size = given.get("pp_size", 1)
    num_gpus = args.rollout_num_gpus_per_engine
    if num_gpus % pp_size:
        raise ValueError(
            f"--sglang-pp-size {pp_size} does not divide --rollout-num-gpus-per-engine {num_gpus}; "
            f"try --sglang-pp-size {max(size for size in range(1, pp_size + 1) if num_gpus % size == 0)}"
        )
    fields = {
        "model_path": args.hf_checkpoint,
        "trust_remote_code": True,
        "random_seed": args.seed + rank * args.num_gpus_per_node,
        "enable_memory_saver": bool(args.offload_rollout),
        "gpu_id_step": 1,
        "tp_size": num_gpus // pp_size,
        "pp_size": pp_size,
        "dp_size": given.get("dp_size", 1),
        "ep_size": given.get("ep_size", 1),
        "skip_server_warmup": True,
        "enable_draft_weights_cpu_backup": True,
        "enable_metrics": True,
    }
    if getattr(args, "use_rollout_routing_replay", False):
        fields["enable_return_routed_experts"] = True
    return fields


def _gpu_defaults(args: Namespace, computed: Mapping[str, Any]) -> dict[str, Any]:
    """Values for CUDA; each of them can be overruled by its `--sglang-*` flag."""
    defaults: dict[str, Any] = {"dtype": _dtype(args)}
    if defaults["dtype"] == "float32":
        defaults["attention_backend"] = "triton"  # the others compute in half precision only
    if computed["enable_memory_saver"]:
        # a captured prefill graph would keep pointers into memory that the memory saver gives back
        defaults["cuda_graph_backend_prefill"] = "disabled"
    return defaults


def _dtype(args: Namespace) -> str:
    """Engines compute in the trainer's precision: SGLang's "auto" would serve an fp32 checkpoint in half precision."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def _cpu_defaults(args: Namespace) -> dict[str, Any]:
    """Values for a machine without a GPU; each of them can be overruled by its `--sglang-*` flag."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": _dtype(args),
        # the default sizes the cache by free memory: many gigabytes and seconds for nothing
        "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
        # an idle scheduler would otherwise keep a core busy that the trainer needs
        "sleep_on_idle": True,
    }


def _check_cpu(config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """What SGLang on the CPU cannot do, said before anything is started. config: the model's config.json."""
    installed = importlib.metadata.version("sglang")
    if installed != CPU_SGLANG_VERSION:
        raise ValueError(
            f"SGLang {installed} is installed, but serving on the CPU is adapted to {CPU_SGLANG_VERSION}; "
            f"pip install sglang=={CPU_SGLANG_VERSION}"
        )
    if fields["enable_memory_saver"]:
        raise ValueError(
            "--offload-rollout needs CUDA (SGLang's memory saver hooks the CUDA driver) and --accelerator is cpu; "
            "leave it away"
        )
    if config.get("index_topk") is not None:
        _check_cpu_sparse_attention(config, fields)


def _check_cpu_sparse_attention(config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """The index keys of sparse attention are beside SGLang's cache on the CPU: what moves its slots loses them."""
    says = f"{config.get('model_type')} keeps index keys for its sparse attention, which the CPU engine"
    if fields["pp_size"] > 1:
        raise ValueError(
            f"--sglang-pp-size {fields['pp_size']}: {says} does not hand on between stages; leave it away or try "
            f"--sglang-pp-size 1"
        )
    for name in CPU_SPARSE_REFUSED:
        value, default = fields.get(name), server_fields()[name].default
        if value is not None and value != default:
            flag = server_fields()[name].flag.removeprefix("--")
            raise ValueError(f"--sglang-{flag} {value}: {says} does not move along; leave it away")


def _config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the engine's model; empty for a name on the Hub."""
    file = Path(fields["model_path"]) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _index_sharing(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """Which layers reuse another's top-k, for a config that has it in indexer_types alone, which SGLang does not read.

    It would run indexers without weights in all other layers.
    """
    if config.get("index_topk_freq") is not None or config.get("index_topk_pattern") is not None:
        return {}
    sharing = index_sharing_of_config(config) if "num_hidden_layers" in config else None
    if sharing is None or all(sharing.computes):
        return {}
    pattern = "".join("F" if computes else "S" for computes in sharing.computes)
    given = json.loads(fields.get("json_model_override_args") or "{}")
    return {"json_model_override_args": json.dumps({"index_topk_pattern": pattern, **given})}


def to_command_line(fields: Mapping[str, Any]) -> list[str]:
    """`--flag value` tokens for `python -m sglang.launch_server`; values equal to SGLang's default are left out.

    ValueError for an unknown field, a field without a flag, and a value that no flag can express.
    """
    known = server_fields()
    check_known(fields, known, "ServerArgs")
    return [token for name, value in fields.items() for token in _tokens(known[name], value)]


def _tokens(field: UpstreamField, value: Any) -> list[str]:
    if field.default is not NO_DEFAULT and type(field.default) is type(value) and field.default == value:
        return []
    if not field.has_flag:
        raise ValueError(f"ServerArgs.{field.name} cannot be given on SGLang's command line (value {value!r})")
    if field.annotation in ("bool", "Optional[bool]"):
        if value is True:
            return [field.flag]
        if value is False and field.negatable:
            return ["--no-" + field.flag.removeprefix("--")]
        if value is False and not field.default:
            return []
    if value is None or isinstance(value, bool):
        raise ValueError(f"ServerArgs.{field.name}: SGLang's flag {field.flag} cannot express {value!r}")
    if isinstance(value, str):
        return _pair(field.flag, value)
    if field.takes_json or isinstance(value, Mapping):
        return _pair(field.flag, json.dumps(value))
    if isinstance(value, list | tuple):
        return [field.flag, *map(str, value)] if value else []
    return _pair(field.flag, str(value))


def _pair(flag: str, value: str) -> list[str]:
    """One token when the value itself looks like a flag, which argparse would not take for a value."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def server_env(args: Namespace, environ: Mapping[str, str], tp_size: int = 1) -> dict[str, str]:
    """Environment of a server process, from the environment of the process that starts it.

    Values already set win over the engine defaults, except where the CPU engine cannot do without.
    """
    env = {**ENGINE_ENV, **environ}
    for name in DROPPED_ENV:
        env.pop(name, None)
    first = [SERVER_PATH] if args.accelerator != "cpu" else [CPU_STUB, SERVER_PATH]
    env["PYTHONPATH"] = ":".join([*map(str, first), *filter(None, [env.get("PYTHONPATH")])])
    if args.accelerator != "cpu":
        return env
    env |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        # several processes compute at the same time; more threads than cores makes them a hundred times slower
        "OMP_NUM_THREADS": "1",
    }
    if tp_size > 1:
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in range(tp_size)))
        env["SGLANG_NCCL_SO_PATH"] = "/nonexistent"  # PyNccl then switches itself off
    return env
