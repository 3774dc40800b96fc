"""Every launcher: the flags it passes, the environment it asks for, and that shellcheck has nothing to say."""

import ast
import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from slime.plan.command import plan_of
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import cache_dir, load_tables
from tests.helpers.fake_cluster import ROOT, FakeCluster, env_vars_of, flags_of

ADAM = """--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.98"""
HOST_ADAM = f"""{ADAM} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"""
MISC = """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32 --attention-backend flash"""
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
PARALLEL = """--sequence-parallel --tensor-model-parallel-size {} --pipeline-model-parallel-size {}
    --context-parallel-size {} --expert-model-parallel-size {} --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu {}"""
DATA = "--input-key prompt --label-key label --apply-chat-template --rollout-shuffle"
GRPO = """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28"""
FILTER = """--over-sampling-batch-size 256 --dynamic-sampling-filter-path
    slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std --num-steps-per-rollout 4"""
EAGLE = """--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps {}
    --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens {}"""


def nodes(number: int, gpus: int = 8) -> str:
    return f"--actor-num-nodes {number} --actor-num-gpus-per-node {gpus} --colocate"


def checkpoints(base: str, hf: str, dist: str, own: str = "") -> str:
    text = f"--hf-checkpoint {base}/{hf} --ref-load {base}/{dist}"
    return text + (f" --load {base}/{own} --save {base}/{own} --save-interval 20" if own else "")


def rollout(prompts: int, length: int, number: int = 3000, reward: str = "deepscaler", temperature: str = "1") -> str:
    return f"""--prompt-data BASE/dapo-math-17k/dapo-math-17k.jsonl {DATA} --rm-type {reward} --num-rollout {number}
        --rollout-batch-size {prompts} --n-samples-per-prompt 8 --rollout-max-response-len {length}
        --rollout-temperature {temperature}"""


def evaluation(path: str, samples: int, length: int, interval: int = 20, top_p: str = "1") -> str:
    return f"""--eval-interval {interval} --eval-prompt-data aime BASE/{path} --n-samples-per-eval-prompt {samples}
        --eval-max-response-len {length} --eval-top-p {top_p}"""


def numbers(last: int) -> str:
    return "--sglang-cuda-graph-bs-decode 1 2 4 8 " + " ".join(str(size) for size in range(16, last + 1, 8))


AIME = "aime-2024/aime-2024.jsonl"
NEXT = "Qwen3-Next-80B-A3B-Thinking"
# The model script, then the flags of each array, then the environment beyond what every launch sets.
LAUNCHERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "run-glm5.2-744B-A40B.sh": (
        "glm5.2-744B-A40B",
        [
            nodes(32) + " --no-check-for-nan-in-loss-and-grad --update-weight-buffer-size 2147483648",
            checkpoints("BASE", "GLM-5.2-FP8", "GLM-5.2_torch_dist", "GLM-5.2_slime"),
            rollout(8, 65536, temperature="1.0") + " --global-batch-size 64",
            PARALLEL.format(4, 8, 8, 32, 8192),
            "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16",
            "--data-pad-size-multiplier 1024 --log-probs-chunk-size 16384",
            "--advantage-estimator grpo --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28",
            "--use-tis --tis-clip-low 0.5 --tis-clip 2.0",
            HOST_ADAM,
            """--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.70 --sglang-enable-dp-attention
            --sglang-ep-size 64 --sglang-dp-size 64 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
            --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto --sglang-page-size 64
            --sglang-kv-cache-dtype fp8_e4m3 --sglang-dsa-decode-backend flashmla_kv
            --sglang-dsa-prefill-backend flashmla_sparse --sglang-attention-backend dsa
            --sglang-cuda-graph-max-bs-decode 8 --sglang-disable-overlap-schedule --sglang-max-running-requests 512
            --sglang-watchdog-timeout 3600 --sglang-speculative-draft-attention-backend dsa""",
            EAGLE.format(4, 5),
            f"{MISC} --moe-token-dispatcher-type alltoall",
        ],
        {
            "GLOO_SOCKET_IFNAME": "eth1",
            "TP_SOCKET_IFNAME": "eth1",
            "NCCL_SOCKET_IFNAME": "eth1",
            "NCCL_P2P_LEVEL": "NVL",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_NET_GDR_LEVEL": "2",
            "NCCL_IB_QPS_PER_CONNECTION": "2",
            "NCCL_IB_TC": "160",
            "NCCL_IB_TIMEOUT": "22",
            "NCCL_PXN_DISABLE": "0",
            "NCCL_MIN_CTAS": "4",
            "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
            "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
            "MC_IB_PCI_RELAXED_ORDERING": "1",
            "MLP_SKIP_SORT_RDMA": "true",
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64",
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "true",
            "NVSHMEM_DISABLE_NCCL": "1",
        },
    ),
    "run-glm4.7-355B-A32B.sh": (
        "glm4.5-355B-A32B",
        [
            nodes(8),
            checkpoints("BASE", "GLM-4.7-355B-A32B", "GLM-4.7-355B-A32B_torch_dist/"),
            rollout(128, 32768) + f" {FILTER} --balance-data --rollout-stop-token-ids 151329 151336 151338",
            evaluation("rl_data/aime-2024.jsonl", 8, 32768),
            PARALLEL.format(8, 4, 2, 16, 16384) + " --allgather-cp",
            "--advantage-estimator gspo --entropy-coef 0.00 --eps-clip 1e-4 --eps-clip-high 2e-4 --use-tis",
            HOST_ADAM,
            """--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention
            --sglang-dp-size 4 --sglang-ep-size 32 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1""",
            EAGLE.format(3, 4),
            f"{MISC} {FLEX}",
        ],
        {"GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1", "NVSHMEM_DISABLE_NCCL": "1"},
    ),
    "run-deepseek-r1.sh": (
        "deepseek-v3",
        [
            nodes(16),
            checkpoints("BASE", "DeepSeek-R1/", "DeepSeek-R1_torch_dist/", "DeepSeek-R1_slime/"),
            rollout(128, 32768) + f" {FILTER} --balance-data",
            evaluation("rl_data/aime-2024.jsonl", 8, 32768),
            PARALLEL.format(8, 4, 4, 32, 16384) + " --decoder-last-pipeline-num-layers 13 --allgather-cp",
            GRPO,
            HOST_ADAM,
            """--rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7 --sglang-ep-size 64
            --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
            --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto --sglang-server-concurrency 1024""",
            EAGLE.format(3, 4),
            f"{MISC} {FLEX}",
        ],
        {
            "NVSHMEM_DISABLE_NCCL": "1",
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/sgl-workspace/nvshmem/install/lib/",
        },
    ),
    "run-qwen3-next-80B-A3B.sh": (
        "qwen3-next-80B-A3B",
        [
            nodes(4),
            checkpoints("BASE", NEXT, f"{NEXT}_torch_dist", f"{NEXT}_slime/"),
            rollout(8, 32768) + " --global-batch-size 64 --balance-data",
            evaluation(AIME, 8, 32768),
            PARALLEL.format(2, 4, 2, 8, 8192) + " --decoder-last-pipeline-num-layers 9 --allgather-cp",
            "--advantage-estimator gspo --entropy-coef 0.00 --eps-clip 4e-4",
            HOST_ADAM,
            "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.8 --sglang-ep-size 8",
            f"{numbers(128)} --sglang-max-running-requests 256",
            EAGLE.format(3, 4),
            f"{MISC} {FLEX}",
        ],
        {"GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1", "NVSHMEM_DISABLE_NCCL": "1"},
    ),
    "run-qwen3-4B.sh": (
        "qwen3-4B",
        [
            nodes(1) + " --num-gpus-per-node 8",
            checkpoints("BASE", "Qwen3-4B", "Qwen3-4B_torch_dist", "Qwen3-4B_slime/"),
            rollout(32, 8192) + " --global-batch-size 256 --balance-data",
            evaluation(AIME, 16, 16384),
            PARALLEL.format(2, 1, 1, 1, 9216),
            GRPO,
            ADAM,
            "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7",
            MISC,
        ],
        {},
    ),
    "run-qwen3-30B-A3B.sh": (
        "qwen3-30B-A3B",
        [
            nodes(1),
            checkpoints("BASE", "Qwen3-30B-A3B", "Qwen3-30B-A3B_torch_dist", "Qwen3-30B-A3B_slime/"),
            rollout(32, 8192) + " --global-batch-size 256 --balance-data",
            evaluation(AIME, 16, 16384),
            PARALLEL.format(4, 1, 1, 8, 20480),
            GRPO,
            HOST_ADAM,
            f"--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 {numbers(256)}",
            MISC,
        ],
        {},
    ),
    "low_precision/run-kimi-k2-Thinking-int4.sh": (
        "kimi-k2-thinking",
        [
            nodes(32) + " --update-weight-buffer-size 2147483648 --no-check-for-nan-in-loss-and-grad",
            "--plan-gpu-memory-gb 141",
            checkpoints("BASE", "Kimi-K2-Thinking/", "Kimi-K2_thinking_torch_dist/", "Kimi-K2-thinking_slime/"),
            rollout(128, 16384, 100, "math", "0.8") + f" {FILTER} --balance-data",
            evaluation(AIME, 16, 16384, interval=10, top_p="0.7"),
            PARALLEL.format(8, 8, 4, 32, 16384) + " --decoder-last-pipeline-num-layers 5 --allgather-cp",
            f"{GRPO} --use-tis",
            HOST_ADAM,
            "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-ep-size 8",
            "--sglang-server-concurrency 1024 --sglang-quantization compressed-tensors",
            MISC,
        ],
        {
            "NVSHMEM_DISABLE_NCCL": "1",
            "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1",
            "OPEN_TRAINING_INT4_GROUP_SIZE": "32",
        },
    ),
}
FOUND = sorted(
    path.relative_to(ROOT / "scripts").as_posix()
    for path in (ROOT / "scripts").rglob("run-*.sh")
    if "slime_launch" in path.read_text()
)
SHELL = sorted({*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("tests/*.sh"), *ROOT.glob(".ci/*")})
SETTINGS = {"BASE_DIR": "/base", "MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "eth1"}


def tokens_of(cluster: FakeCluster, script: str, *words: str, **variables: str) -> list[str]:
    """What a dry run would hand to train.py."""
    result = cluster.run(f"scripts/{script}", *words, DRY_RUN="1", **variables)
    assert result.returncode == 0, result.stderr
    entry, *tokens, last = json.loads(result.stdout)
    assert entry == str(ROOT / "train.py") and last == "--dry-run"
    return tokens


def model_args(model: str) -> list[str]:
    """The array of scripts/models, from bash itself."""
    text = f'source scripts/models/{model}.sh; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    return subprocess.check_output(["bash", "-c", text], cwd=ROOT, text=True).split("\0")[:-1]


def expected_tokens(script: str) -> list[str]:
    text = " ".join(LAUNCHERS[script][1]).replace("BASE/", "/base/").replace("SCRIPTS/", f"{ROOT}/scripts/")
    return shlex.split(text)


@cache
def grammar() -> Grammar:
    return Grammar(load_tables())


def test_every_launcher_is_described_here():
    assert sorted(LAUNCHERS) == FOUND


@pytest.mark.parametrize("script", FOUND)
def test_flags(cluster, script):
    """Exactly these flags and values, after those of the model; the caller's own come last and win."""
    tokens = tokens_of(cluster, script, "--num-rollout", "7", "--debug-train-only", **SETTINGS)
    model = model_args(LAUNCHERS[script][0])
    assert model and tokens[: len(model)] == model
    assert tokens[-3:] == ["--num-rollout", "7", "--debug-train-only"]
    assert flags_of(tokens[len(model) : -3]) == flags_of(expected_tokens(script))
    assert not cluster.calls("ray")


@pytest.mark.parametrize("script", FOUND)
def test_environment_of_a_run(cluster, script):
    cluster.set("job-ends", "succeeded")
    cluster.set("topology", "GPU0 X NV18")
    result = cluster.run(f"scripts/{script}", SLIME_RAY_STARTED="1", **SETTINGS)
    assert result.returncode == 0, result.stderr
    no_proxy = "localhost,127.0.0.1,0.0.0.0,10.0.0.1"
    always = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    (submission,) = cluster.calls("ray", "job", "submit")
    assert env_vars_of(submission) == always | LAUNCHERS[script][2]


@pytest.mark.parametrize("script", FOUND)
def test_every_flag_exists_and_is_current(cluster, script):
    """No unknown flag, no name or value that upstream has replaced, and no flag given twice within a launcher."""
    tokens = tokens_of(cluster, script, **SETTINGS)
    assert [problem for problem in grammar().read(tokens).problems if problem.kind != "unsupported"] == []
    own = tokens[len(model_args(LAUNCHERS[script][0])) :]
    assert grammar().read(own).notices == []
    flags = [token for token in own if token.startswith("--")]
    assert len(flags) == len(set(flags))
    assert "--moe-enable-deepep" not in own and "nsa" not in own


@pytest.mark.parametrize("script", FOUND)
def test_the_plan_finds_nothing_illegal(cluster, script):
    """What a launcher asks for breaks no rule, fits into its GPUs, and has an effect."""
    plan, _ = plan_of(tokens_of(cluster, script, **SETTINGS), environ={})
    assert plan.problems == ()
    assert plan.verdict in ("starts", "not supported yet"), plan.reasons
    assert [notice for notice in plan.notices if "no effect" in notice or "deprecated" in notice] == []


def test_a_dry_run_prints_the_plan(cluster):
    """The whole way once: bash, the real train.py, no Ray, no GPU, and the exit code of the verdict."""
    script, dry = "scripts/run-qwen3-4B.sh", {"DRY_RUN": "1", "SLIME_PYTHON": sys.executable}
    dry["XDG_CACHE_HOME"] = str(cache_dir().parent)  # HOME is another one here
    result = cluster.run(script, **dry)
    assert result.returncode == 0 and "starts" in result.stdout, result.stderr
    result = cluster.run(script, "--tensor-model-parallel-size", "3", **dry)
    assert result.returncode == 2 and "--tensor-model-parallel-size" in result.stdout, result.stderr
    assert not cluster.calls("ray")


def test_wrong_flags_are_refused_before_ray_starts(cluster):
    """A typing error once cost the start of Ray on 32 nodes. The real tool says it in the words of the run; files of
    this machine prove nothing where RAY_ADDRESS names a cluster."""
    (cluster.bin / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # beside it, a stand-in for ray
    real = {"XDG_CACHE_HOME": str(cache_dir().parent), **SETTINGS}
    script, wrong = "scripts/run-qwen3-4B.sh", ("--tensor-model-parallel-size", "3", "--clip-gard", "1")
    result = cluster.run(script, *wrong, **real)
    assert result.returncode == 2 and "nothing was started" in result.stderr
    said = ("train.py: ", "--clip-gard: unknown", "--tensor-model-parallel-size", "/base/Qwen3-4B is not a directory")
    assert [words for words in said if words not in result.stderr] == []
    assert not cluster.calls("ray") and not cluster.run_dir.exists()
    result = cluster.run(script, *wrong, **real, RAY_ADDRESS="10.0.0.7:6379")
    assert result.returncode == 2 and "--clip-gard" in result.stderr and "is not a directory" not in result.stderr
    assert not cluster.calls("ray")
    cluster.set("job-ends", "succeeded")
    result = cluster.run(script, **real, RAY_ADDRESS="10.0.0.7:6379")
    assert result.returncode == 0 and cluster.calls("ray", "job", "submit"), result.stderr


def test_the_check_gets_the_flags_and_the_environment_of_the_run(cluster):
    """It answers for the job, so it sees what the job will see; an entry point of one's own is left to itself."""
    cluster.set("job-ends", "succeeded")
    script = cluster.directory / "mine.sh"
    lines = f'set -euo pipefail\nsource {ROOT}/scripts/lib/launch.sh\nRUNTIME_ENV=({{}})\nslime_launch "$@"\n'
    script.write_text(lines.format("RAY_AUTH_MODE=of-the-run"))
    assert cluster.run(script, "train.py", "--a", "two words", "").returncode == 0
    (check,) = cluster.calls("python3")
    assert check["argv"] == [str(ROOT / "tools/plan.py"), "--check", "--", "--a", "two words", ""]
    assert check["env"]["RAY_AUTH_MODE"] == "of-the-run"
    assert cluster.run(script, "mine.py", "--a").returncode == 0 and len(cluster.calls("python3")) == 1
    script.write_text(lines.format("2BAD=1"))
    starts = len(cluster.calls("ray", "start"))
    result = cluster.run(script, "train.py")
    assert result.returncode == 2 and "'2BAD=1' is not NAME=value" in result.stderr
    assert len(cluster.calls("ray", "start")) == starts


@pytest.mark.parametrize("script", FOUND)
def test_a_required_variable_is_named(cluster, script):
    """A run without BASE_DIR or MASTER_ADDR must not start; a dry run plans with the name in its place."""
    text = (ROOT / "scripts" / script).read_text()
    required = [name for name in ("BASE_DIR", "MASTER_ADDR") if f"${{{name}:?" in text]
    for name in required:
        others = {other: value for other, value in SETTINGS.items() if other != name}
        result = cluster.run(f"scripts/{script}", **others)
        assert result.returncode != 0 and f"{name}: set it to" in result.stderr
    if required:
        result = cluster.run(f"scripts/{script}", DRY_RUN="1")
        assert result.returncode == 0
        assert all(f"slime: {name} is not set: planning with {name}=" in result.stderr for name in required)
    assert not cluster.calls("ray")


@pytest.mark.parametrize("script", FOUND)
def test_paths_with_spaces_stay_whole(cluster, script):
    tokens = flags_of(tokens_of(cluster, script, **SETTINGS | {"BASE_DIR": "/my base"}))
    assert tokens["--hf-checkpoint"][0].startswith("/my base/") and len(tokens["--hf-checkpoint"]) == 1
    assert tokens["--prompt-data"] == ["/my base/dapo-math-17k/dapo-math-17k.jsonl"]


def test_the_older_name_of_the_base_directory(cluster):
    tokens = flags_of(tokens_of(cluster, "run-qwen3-next-80B-A3B.sh", BASE_FOLDER="/older", MASTER_ADDR="10.0.0.1"))
    assert tokens["--hf-checkpoint"] == [f"/older/{NEXT}"]


def test_sizes_can_be_set(cluster):
    tokens = flags_of(tokens_of(cluster, "run-qwen3-4B.sh", NUM_GPUS="4"))
    assert tokens["--actor-num-gpus-per-node"] == tokens["--num-gpus-per-node"] == ["4"]
    assert tokens["--hf-checkpoint"] == ["/root/Qwen3-4B"]
    sizes = {"ACTOR_NUM_NODES": "16", "CP_SIZE": "4"}
    tokens = flags_of(tokens_of(cluster, "run-qwen3-next-80B-A3B.sh", **SETTINGS, **sizes))
    assert tokens["--actor-num-nodes"] == ["16"] and tokens["--context-parallel-size"] == ["4"]
    tokens = flags_of(tokens_of(cluster, "run-glm4.7-355B-A32B.sh", **SETTINGS, ACTOR_NUM_GPUS_PER_NODE="4"))
    assert tokens["--actor-num-gpus-per-node"] == ["4"]


def test_the_engines_of_glm52(cluster):
    """A file of engines brings the transfer between its groups along.

    One prefill and three decode engines on the 256 GPUs; their settings are fields of the installed SGLang."""
    file = "scripts/configs/glm5.2-744B-A40B-engines.yaml"
    alike = flags_of(tokens_of(cluster, "run-glm5.2-744B-A40B.sh", **SETTINGS))
    apart = flags_of(tokens_of(cluster, "run-glm5.2-744B-A40B.sh", **SETTINGS, SGLANG_CONFIG_FILE=file))
    assert {flag: words for flag, words in apart.items() if flag not in alike} == {
        "--sglang-config": [file],
        "--sglang-disaggregation-transfer-backend": ["mooncake"],
        "--sglang-disaggregation-ib-device": [",".join(f"mlx5_{number}" for number in range(100, 108))],
    }
    text = (ROOT / file).read_text()
    (model,) = yaml.safe_load(text)["sglang"]
    prefill, decode = model["server_groups"]
    shared = {
        "dp_size": 64,
        "ep_size": 64,
        "enable_dp_attention": True,
        "enable_dp_lm_head": True,
        "moe_dense_tp_size": 1,
    }
    assert (prefill["worker_type"], prefill["num_gpus"], prefill["num_gpus_per_engine"]) == ("prefill", 64, 64)
    assert prefill["overrides"] == shared | {
        "load_balance_method": "follow_bootstrap_room",
        "chunked_prefill_size": 131072,
        "max_running_requests": 512,
        "deepep_mode": "auto",
    }
    assert (decode["worker_type"], decode["num_gpus"], decode["num_gpus_per_engine"]) == ("decode", 192, 64)
    assert decode["overrides"] == shared | {
        "load_balance_method": "round_robin",
        "max_running_requests": 768,
        "cuda_graph_max_bs_decode": 12,
        "deepep_mode": "low_latency",
        "moe_runner_backend": "deep_gemm",
        "disable_overlap_schedule": True,
    }
    assert {*prefill["overrides"], *decode["overrides"]} <= fields_of_server_args()


def fields_of_server_args() -> set[str]:
    """Read from the source: importing it takes 10 s."""
    (package,) = [Path(path) for path in sys.path if (Path(path) / "sglang/srt/server_args.py").is_file()][:1]
    tree = ast.parse((package / "sglang/srt/server_args.py").read_text())
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    return {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}


def test_shellcheck_is_content():
    program = str(Path(sys.executable).parent / "shellcheck")  # of the test extra
    result = subprocess.run([program, "-f", "gcc", *map(str, SHELL)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert len(SHELL) > 50


def test_scripts_parse_and_are_strict():
    """bash itself reads every script; nothing ends processes by name or hides an exit code."""
    for path in SHELL:
        subprocess.run(["bash", "-n", str(path)], check=True)
        text = path.read_text()
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        assert not any(word in code for word in ("pkill", "killall", "ray stop", "kill -9")), path
        assert "set -euo pipefail" in code or path.parent.name in ("models", "lib"), path
