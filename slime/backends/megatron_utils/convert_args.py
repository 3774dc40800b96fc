"""The trainer's namespace for a conversion: the model of a config.json, laid out over the processes that convert.

Read as a training command line is, but for the rules that only a run has.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.arguments import build_megatron_args
from slime.utils.arguments.checkpoint_facts import apply_checkpoint_facts
from slime.utils.arguments.checks.model import check_model
from slime.utils.arguments.flag import ArgumentsError, Problem
from slime.utils.arguments.parser import CommandLine, Grammar
from slime.utils.arguments.upstream import load_tables
from slime.utils.layout.index_sharing import IndexSharing, index_sharing, legal_splits
from slime.utils.model_facts import load_config
from slime.utils.model_facts.script import ORDER
from slime.utils.safetensors_io import CheckpointError

if TYPE_CHECKING:
    from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# Of a training run's batches and steps a conversion knows nothing.
_NO_RUN = {
    "accelerator": "cpu",
    "num_rollout": 0,
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 1,
    "global_batch_size": 1,
    "micro_batch_size": 1,
    "eval_interval": None,
    "save_interval": None,
    "load": None,
    "save": None,
    "use_cpu_initialization": False,
    "perform_initialization": False,
}
# What a checkpoint's arguments say of its model beside the facts of a config.json.
_ALSO_STORED = (
    *("mtp_num_layers", "mtp_use_repeated_layer", "spec", "bf16", "fp16", "params_dtype", "moe_grouped_gemm"),
)
_EMBEDDING = "embedding.word_embeddings.weight"


def conversion_args(
    hf_directory: Path, argv: Sequence[str] = (), rank: int = 0, world_size: int = 1
) -> tuple[Namespace, list[str]]:
    """(the trainer's namespace, differences) for the model of `hf_directory` on `world_size` processes.

    argv: Megatron's model arguments where they are given, parallel sizes, dtype. What is left open follows from
    config.json: the model, its dtype (bfloat16 for quantised weights), and the layout (`pipeline_layout`).
    differences: lines of what argv states otherwise than config.json. ArgumentsError or ValueError for what cannot be.
    """
    grammar = Grammar(load_tables())
    try:
        line = grammar.read(["--hf-checkpoint", str(hf_directory), *argv])
    except ValueError as error:  # a value that does not read as its flag's type
        raise ArgumentsError([Problem((), str(error))]) from error
    line, facts, differences = apply_checkpoint_facts(line, grammar)
    values = line.values | _NO_RUN | _dtype(line, hf_directory)
    draft = Namespace(**values, hf_config=facts.hf_config, model_type=facts.model_type, checkpoint_facts=facts.values)
    # a family that cannot be trained yet may well be converted: whether it has a bridge is seen later
    problems = [problem for problem in line.problems if problem.kind == "rule"]
    problems += check_model(draft, line.given)
    if problems:
        raise ArgumentsError(problems)
    for name, value in _layout(draft, line.given, world_size).items():
        setattr(draft, name, value)
    draft.megatron_argv = line.megatron_argv
    return build_megatron_args(draft, rank, world_size), differences


def stored_model_args(hf_directory: Path, reader: "TorchDistReader") -> Namespace:
    """The trainer's namespace for the model of a Megatron checkpoint, on one process.

    hf_directory: the model's Hugging Face directory; where the two differ, the checkpoint's own arguments hold.
    CheckpointError for a checkpoint without arguments.
    """
    stored = reader.common().get("args")
    if stored is None:
        raise CheckpointError(f"{reader.path} does not hold the arguments of its training")
    args, _ = conversion_args(hf_directory)
    flags = Grammar(load_tables()).options
    names = {flags[option].dest for option in ORDER if option in flags} | set(_ALSO_STORED)
    for name in names & vars(stored).keys():
        setattr(args, name, getattr(stored, name))
    if _EMBEDDING in reader.keys:
        args.padded_vocab_size = reader.shape(_EMBEDDING)[0]
    return args


def _dtype(line: CommandLine, hf_directory: Path) -> dict[str, bool]:
    """The dtype switches: the command line's, else the checkpoint's own dtype."""
    chosen = [name for name in DTYPES.values() if name in line.given and line.values[name]]
    if not chosen:
        config = load_config(hf_directory)[0]
        parts = (config, config.get("text_config") or {})
        said = [part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
        quantized = any("quantization_config" in part for part in parts)
        chosen = ["bf16" if quantized or not said else DTYPES.get(str(said[0]), "bf16")]
    return {name: name in chosen for name in DTYPES.values()}


def _layout(draft: Namespace, given: Mapping[str, str], world_size: int) -> dict[str, Any]:
    """Pipeline stages where none are asked for; sequence parallelism, which costs nothing here, where MoE needs it."""
    tp = draft.tensor_model_parallel_size
    values: dict[str, Any] = {"sequence_parallel": tp > 1}
    if "pipeline_model_parallel_size" in given or world_size == 1:
        return values
    experts = (draft.expert_tensor_parallel_size or tp) * draft.expert_model_parallel_size
    model = max(tp * draft.context_parallel_size, experts)
    if world_size % model:
        flags = ("--tensor-model-parallel-size", "--expert-model-parallel-size")
        raise ArgumentsError(
            [
                Problem(
                    flags, f"{model} ranks hold one pipeline stage, which does not divide the {world_size} processes"
                )
            ]
        )
    stages, first, last = pipeline_layout(draft.num_layers, world_size // model, index_sharing(draft))
    values["pipeline_model_parallel_size"] = stages
    values["decoder_first_pipeline_num_layers"], values["decoder_last_pipeline_num_layers"] = first, last
    return values


def pipeline_layout(
    num_layers: int, most: int, sharing: IndexSharing | None = None
) -> tuple[int, int | None, int | None]:
    """(pipeline stages, layers of the first stage, of the last) for a conversion by `most` groups of processes.

    As many stages as there are groups, ceil(layers / stages) layers each and the last what is left; where nothing is
    left, the next smaller divisor of `most`. With sparse attention whose layers share indices every stage must begin
    with a layer that computes them. None: equal to the stages between.
    """
    for stages in range(most, 1, -1):
        if most % stages:
            continue
        if sharing is not None and not all(sharing.computes):
            splits = legal_splits(sharing, num_layers, stages)
            if splits:
                return stages, *splits[0]
            continue
        last = num_layers - -(-num_layers // stages) * (stages - 1)
        if last > 0:
            return stages, None, None if last * stages == num_layers else last
    return 1, None, None


def directory_of_checkpoint(path: Path, tracker: str) -> Path:
    """The directory with the weights: `path` itself (iter_<n>, release), or what the tracker in it names.

    CheckpointError when there is neither.
    """
    if (path / "metadata.json").is_file():
        return path
    if not (path / tracker).is_file():
        raise CheckpointError(f"{path} is no Megatron checkpoint: neither {tracker} nor metadata.json is there")
    newest = (path / tracker).read_text().strip()
    directory = path / (newest if newest == "release" else f"iter_{int(newest):07d}")
    if not (directory / "metadata.json").is_file():
        raise CheckpointError(
            f"{path / tracker} names {directory.name}, which is not a complete torch_dist checkpoint"
        )
    return directory
