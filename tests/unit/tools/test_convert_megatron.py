"""Hugging Face -> torch_dist -> Hugging Face: bit for bit, in every layout; wrong input is named and replaces nothing.

The conversions run in two sets of processes, once for all tests, since Megatron takes longer to import than they do.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime.backends.megatron_utils.convert_args import pipeline_layout
from slime.backends.megatron_utils.convert_process import Place, place_of
from slime.utils.layout.index_sharing import IndexSharing
from tests.helpers import convert_checks
from tests.helpers.convert_checks import back, differences, forth, prepare, weights_of
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_models import TINY_MODELS, make_tiny_model
from tests.unit.quantization.test_safetensors_io import largest_file
from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

ROOT = Path(__file__).resolve().parents[3]
TP2 = ("--tensor-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
# made by two processes: (tiny model, flags, pipeline stages that must come of it)
LAYOUTS = [
    ("qwen3_tied", (), 2),
    ("deepseek_v3", (), 2),
    ("qwen3_moe", EP2, 1),
    ("qwen3_next", TP2, 1),
    ("qwen3", ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"), 2),
    ("with_prediction", ("--pipeline-model-parallel-size", "2", "--mtp-num-layers", "1"), 2),
]


def message_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "no error"


def two_processes(rank, world_size, root):
    """The arguments stored with each checkpoint, and whether trainers started from checkpoints hold their weights."""
    prepare()
    from slime.backends.megatron_utils.torch_dist_stream import TorchDistReader
    from tests.helpers.trainer import trainer_args
    from tests.helpers.trainer_runs import hf_weights, open_trainer

    stages = []
    for number, (name, flags, _) in enumerate(LAYOUTS):
        target = root / f"megatron_{number}"
        forth(root / "hf" / name, target, *flags, rank=rank, world_size=world_size)
        stages.append(TorchDistReader(target / "release").common()["args"].pipeline_model_parallel_size)
    started = {}
    for name, flags, load in (
        ("qwen3_tied", ("--pipeline-model-parallel-size", "2"), root / "hf" / "qwen3_tied"),
        ("qwen3_moe", EP2, root / "hf" / "qwen3_moe"),
        ("qwen3_tied", TP2, root / "megatron_0"),
    ):
        wanted = weights_of(root / "hf" / name)
        with open_trainer(trainer_args(name, root / "hf" / name, *flags, load=str(load)), rank, world_size) as trainer:
            held = hf_weights(trainer)
            equal = all((held[key] == wanted[key].numpy()).all() for key in wanted)
            started[f"{name} from {load.name}"] = (
                trainer.start_rollout_id,
                sorted(held.keys() ^ wanted.keys()),
                equal,
            )
    return stages, started


def one_process(rank, world_size, root):
    """{what: differences or message} of everything that one process does."""
    prepare()
    found = {}
    for number, (name, _, _) in enumerate(LAYOUTS):
        back(root / f"megatron_{number}", root / "hf" / name, root / f"from_two_{number}")
        found[f"two processes {number}"] = differences(
            weights_of(root / "hf" / name), weights_of(root / f"from_two_{number}")
        )
    for name in TINY_MODELS:
        hf = root / "hf" / name
        forth(hf, root / f"one_{name}")
        back(
            root / f"one_{name}" / "release", hf, root / f"back_{name}", "--chunk-size", "150000", "--max-workers", "2"
        )
        found[name] = differences(weights_of(hf), weights_of(root / f"back_{name}"))
    found |= other_formats(root) | bad_input(root) | bad_output(root) | missing_tensors(root)
    found |= convert_checks.quantised_input(root) | convert_checks.transformer_engine_keys(root)
    return found | convert_checks.memory(root)


def other_formats(root):
    """bfloat16 with a float32 router bias; experts that the origin holds in one tensor a layer."""
    import torch
    from safetensors.torch import save_file

    found = {}
    for name in ("bfloat16", "packed"):
        source = root / "hf" / ("deepseek_v3" if name == "bfloat16" else "qwen3_5_moe")
        hf = root / name
        shutil.copytree(source, hf)
        weights = weights_of(hf)
        if name == "bfloat16":
            weights = {key: t if key.endswith("bias") else t.bfloat16() for key, t in weights.items()}
            config = json.loads((hf / "config.json").read_text())
            (hf / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        else:
            for layer in range(4):
                prefix = f"model.layers.{layer}.mlp.experts."
                parts = {part: [] for part in ("gate", "up", "down")}
                for expert in range(8):
                    for part, tensors in parts.items():
                        tensors.append(weights.pop(f"{prefix}{expert}.{part}_proj.weight"))
                gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
                weights |= {
                    f"{prefix}gate_up_proj": torch.stack(gate_up),
                    f"{prefix}down_proj": torch.stack(parts["down"]),
                }
        save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
        forth(hf, root / f"one_{name}")
        back(root / f"one_{name}", hf, root / f"back_{name}", "--max-workers", "2")
        found[name] = differences(weights, weights_of(root / f"back_{name}"))
    return found


def bad_input(root):
    """What is said of wrong Hugging Face directories and arguments, with an older checkpoint in place."""
    from safetensors.torch import save_file

    hf, save = root / "bad", root / "one_qwen3"
    before = snapshot(save)
    name, weights = "model.layers.1.self_attn.o_proj.weight", weights_of(root / "hf" / "qwen3")

    def spoiled(change):
        shutil.rmtree(hf, ignore_errors=True)
        shutil.copytree(root / "hf" / "qwen3", hf)
        change()
        return message_of(forth, hf, save)

    def write(tensors):
        save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})

    def index():
        listed = dict.fromkeys([*weights, "model.layers.9.x.weight"], "model.safetensors")
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    found = {
        "cut off": spoiled(lambda: os.truncate(hf / "model.safetensors", 300_000)),
        "index": spoiled(index),
        "missing": spoiled(lambda: write({key: t for key, t in weights.items() if key != name})),
        "shape": spoiled(lambda: write(weights | {name: weights[name][:, :-1].contiguous()})),
        "left over": spoiled(lambda: write(weights | {"model.extra.weight": weights[name].clone()})),
        "wrong argument": message_of(forth, root / "hf" / "qwen3", save, "--hidden-size", "64"),
        "unknown flag": message_of(forth, root / "hf" / "qwen3", save, "--num-layer", "4"),
    }
    with largest_file(200_000):
        found["disk full"] = message_of(forth, root / "hf" / "qwen3", save)
    found["untouched"] = snapshot(save) == before
    return found


def snapshot(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def bad_output(root):
    """A directory of a training run, a replaced release; a damaged or foreign Megatron checkpoint."""
    found = {}
    run = root / "run"
    (run / "iter_0000007").mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    hf = root / "hf" / "qwen3_tied"
    found["training run"] = message_of(forth, hf, run)
    forth(hf, run, force=True)
    (run / ".release.partial").mkdir()  # of a conversion that was killed
    (run / ".release.partial" / "__0_0.distcp").write_bytes(b"half")
    forth(hf, run)
    found["forced"] = sorted(path.name for path in run.iterdir())
    existing = root / "back_qwen3_tied"
    found["exists"] = message_of(back, run, hf, existing)
    back(run, hf, existing, "--force")
    found["replaced"] = differences(weights_of(hf), weights_of(existing))
    found["other model"] = message_of(back, run, root / "hf" / "qwen3", root / "never")
    found["no checkpoint"] = message_of(back, hf, hf, root / "never")
    with largest_file(100_000):
        found["disk full there"] = message_of(back, run, hf, root / "never")
    (file,) = (run / "release").glob("*.distcp")
    with file.open("r+b") as damaged:  # the second half of its zip archives
        damaged.seek(file.stat().st_size // 2)
        damaged.write(bytes(file.stat().st_size // 2))
    found["damaged checkpoint"] = message_of(back, run, hf, root / "never")
    os.truncate(file, file.stat().st_size - 1000)
    found["cut off checkpoint"] = message_of(back, run, hf, root / "never")
    found["never"] = (root / "never").exists()
    return found


def missing_tensors(root):
    """The origin has a prediction layer and a tensor that nobody knows; the checkpoint has neither."""
    from safetensors.torch import save_file

    hf, extra = root / "with_more", "model.layers.4.eh_proj.weight"
    shutil.copytree(root / "hf" / "glm4_moe", hf)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    weights = weights_of(hf)
    weights[extra] = weights["model.norm.weight"].clone()
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    back(root / "one_glm4_moe", hf, root / "without")
    back(root / "one_glm4_moe", hf, root / "with", "-a")
    found = {
        "without": differences(weights, weights_of(root / "without")),
        "with": differences(weights, weights_of(root / "with")),
    }
    save_file(weights | {"model.extra": weights[extra].clone()}, hf / "model.safetensors", metadata={"format": "pt"})
    found["unknown tensor"] = message_of(back, root / "one_glm4_moe", hf, root / "never")
    return found


def add_prediction_layer(hf):
    """A fifth layer like the fourth, with the norms and the projection of a prediction layer."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(hf / "glm4_moe", hf / "with_prediction")
    config = json.loads((hf / "glm4_moe" / "config.json").read_text())
    (hf / "with_prediction" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    weights = weights_of(hf / "glm4_moe")
    hidden, prefix = config["hidden_size"], "model.layers.4."
    weights |= {key.replace("layers.3.", "layers.4."): -t for key, t in weights.items() if "layers.3." in key}
    weights |= {f"{prefix}{norm}.weight": torch.randn(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(weights, hf / "with_prediction" / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("convert")
    for name in TINY_MODELS:
        make_tiny_model(name, directory / "hf")
    add_prediction_layer(directory / "hf")
    return directory


@pytest.fixture(scope="module")
def of_two(root):
    return run_ranks(two_processes, 2, root)


@pytest.fixture(scope="module")
def of_one(root, of_two):
    return run_ranks(one_process, 1, root)[0]


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[name + " ".join(flags) for name, flags, _ in LAYOUTS])
def test_two_processes_write_what_one_reads_back(of_two, of_one, number):
    """Stages, tensor and expert shards, virtual stages: a shard that lies at another's place would come back wrong."""
    assert of_one[f"two processes {number}"] == []
    assert [stages[number] for stages, _ in of_two] == [LAYOUTS[number][2]] * 2


@pytest.mark.parametrize("name", [*TINY_MODELS, "bfloat16", "packed"])
def test_round_trip_is_exact(of_one, name):
    """Names, dtypes and bits; a router bias once came back in bfloat16, experts under names that nobody loads."""
    assert of_one[name] == []


def test_memory_is_that_of_a_few_tensors(of_one):
    """Both directions of 100 MB in one file take less than half of it: the model is never in memory."""
    whole, there, again, same = of_one["memory"]
    assert whole > 80e6 and same == []
    assert there < 0.5 and again < 0.5, (there, again)


@pytest.mark.parametrize("name", ["fp8 blocks", "int4 experts"])
def test_quantised_directories_convert_as_their_bfloat16_cast(of_one, name):
    """The same bits as casting first; scales are used with their weights, and the result says that it is plain."""
    assert of_one[name][:3] == ([], [], None) and of_one[name][3] > 20


def test_a_language_model_beside_a_vision_tower(of_one):
    assert of_one["beside vision"] == []


def test_extra_states_of_transformer_engine_are_passed_over(of_one):
    """Neither the export nor a training start takes them for weights that have no place in the model. The other way
    round Megatron refuses a checkpoint that lacks them unless --dist-ckpt-strictness log_unexpected is given."""
    found = of_one["extra state"]
    assert found["keys"] >= 4 * 5 and found["exported"] == [] and found["trained"] == []
    assert "_extra_state" in found["refused"] and found["taken"] == [0]


def test_training_starts_from_a_directory_or_a_conversion(of_two):
    """--load takes a Hugging Face directory (tied over two stages, experts over two ranks) and a converted one."""
    for _, started in of_two:
        assert started == {
            "qwen3_tied from qwen3_tied": (0, [], True),
            "qwen3_moe from qwen3_moe": (0, [], True),
            "qwen3_tied from megatron_0": (0, [], True),
        }


@pytest.mark.parametrize(
    "what, words",
    [
        ("cut off", ["model.safetensors", "it is cut off or damaged"]),
        ("index", ["model.layers.9.x.weight", "no file has it"]),
        ("missing", ["model.layers.1.self_attn.o_proj.weight"]),
        ("shape", ["(48, 80)", "(48, 79)", "model.layers.1.self_attn.o_proj.weight"]),
        ("left over", ["model.extra.weight", "no place in the model"]),
        ("wrong argument", ["--hidden-size", "64", "48"]),
        ("unknown flag", ["--num-layer", "--num-layers"]),
        ("disk full", ["rank 0 cannot write to", "File too large"]),
        ("disk full there", ["never.partial-", "cannot write", "File too large"]),
        ("damaged checkpoint", [".distcp", "is damaged"]),
        ("training run", ["the newest: 7", "--force"]),
        ("exists", ["back_qwen3_tied", "--force"]),
        ("other model", ["lm_head.weight", "are not in"]),
        ("no checkpoint", ["latest_checkpointed_iteration.txt"]),
        ("cut off checkpoint", [".distcp", "it is cut off"]),
        ("unknown tensor", ["model.extra", "--add-missing-from-origin-hf"]),
    ],
)
def test_what_is_wrong_is_named(of_one, what, words):
    assert all(word in of_one[what] for word in words), of_one[what]


def test_failures_replace_nothing(of_one):
    """Eight failed conversions into a directory with a good checkpoint: every byte of it is as before, no more."""
    assert of_one["untouched"] and not of_one["never"]
    assert of_one["forced"] == ["iter_0000007", "latest_checkpointed_iteration.txt", "release"]
    assert of_one["replaced"] == []


def test_tensors_that_were_not_trained(of_one):
    """A prediction layer is left out with a word about it, or copied on request."""
    assert of_one["without"] == ["model.layers.4.eh_proj.weight"] and of_one["with"] == []


def test_result_loads_in_transformers(of_one, root):
    """Files, index and config belong together: transformers finds every weight, and no other."""
    from transformers import AutoModelForCausalLM

    path = root / "back_qwen3_moe"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights_of(path).values())
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reference = AutoModelForCausalLM.from_pretrained(root / "hf" / "qwen3_moe").state_dict()
    assert differences(reference, model.state_dict()) == []


def test_one_command_for_both_directions(of_one, root):
    """convert_to_hf.py finds out what its input is, and the tools say in one sentence what is wrong."""
    command = [sys.executable, str(ROOT / "tools/convert_to_hf.py"), "--output-dir", str(root / "command")]
    origin = ["--origin-hf-dir", str(root / "hf" / "qwen3_tied")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    wrong = [*command, "--input-dir", str(root / "hf" / "qwen3_tied"), "--to", "hf"]
    done = subprocess.run(wrong, capture_output=True, text=True)  # before any import of Megatron
    assert done.returncode == 2 and "is a checkpoint in hf already" in done.stderr
    command += ["--input-dir", str(root / "megatron_0"), *origin]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert differences(weights_of(root / "hf" / "qwen3_tied"), weights_of(root / "command")) == []


def test_tools_end_with_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="--hf-checkpoint .* is no directory with a config.json"):
        convert_hf_to_torch_dist.main(["--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "out")])
    paths = ["--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--origin-hf-dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="--origin-hf-dir .* is no directory with a config.json"):
        convert_torch_dist_to_hf.main(paths)
    with pytest.raises(SystemExit, match="2"):
        convert_torch_dist_to_hf.parse_args([*paths, "--chunk-size", "0"])


def test_place_among_the_processes():
    torchrun = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "12345"}
    assert place_of(torchrun) == Place(3, 16, "node0", 12345)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    assert place_of(slurm) == Place(5, 8, "10.0.0.1", 12355)
    assert place_of({}) == Place(0, 1, "localhost", 12355)


@pytest.mark.parametrize(
    "layers, groups, expected",
    [
        (92, 16, (16, None, 2)),  # 15 stages of 6
        (36, 4, (4, None, None)),  # even
        (5, 4, (2, None, 2)),  # 4 stages of 2 would leave the last one empty
        (4, 3, (1, None, None)),  # 3 stages likewise, and 3 has no other divisor
        (28, 64, (4, None, None)),  # 8 stages of 4 likewise
    ],
)
def test_stages_of_a_conversion(layers, groups, expected):
    """As many stages as there are processes, unless the last would be empty. Every layer is in a stage."""
    stages, first, last = pipeline_layout(layers, groups)
    assert (stages, first, last) == expected
    middle = -(-layers // stages)
    assert middle * (stages - 1) + (last or middle) == layers


def test_stages_begin_where_indices_are_computed():
    """GLM-5.2's layers 0-2 and every fourth from 2 on compute indices; a stage cannot begin with another."""
    sharing = IndexSharing(tuple(layer < 3 or (layer - 2) % 4 == 0 for layer in range(78)))
    stages, first, last = pipeline_layout(78, 8, sharing)
    middle = (78 - first - last) // (stages - 2)
    assert stages == 8 and all(sharing.computes[first + middle * number] for number in range(stages - 1))
