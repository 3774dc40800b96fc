"""Arguments and environment of SGLang servers, against the parser of the installed SGLang's own table."""

import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest

from slime.backends.sglang_utils import server_args
from slime.backends.sglang_utils.server_args import (
    CPU_STUB,
    SERVER_PATH,
    build_server_args,
    server_env,
    to_command_line,
)
from slime.backends.sglang_utils.upstream_fields import server_fields


def make_args(**changes):
    values = dict(
        accelerator="cpu",
        hf_checkpoint="/no/such/checkpoint",
        sglang_overrides={},
        rollout_num_gpus_per_engine=1,
        seed=100,
        num_gpus_per_node=8,
        offload_rollout=False,
        fp16=False,
        bf16=False,
    )
    return Namespace(**{**values, **changes})


def build(args, **changes):
    return build_server_args(args, **{**dict(rank=0, host="127.0.0.1", port=15000), **changes})


def test_cpu_defaults_yield_to_the_user():
    fields = build(make_args(sglang_overrides={"max_total_tokens": 123, "dtype": "bfloat16"}))
    assert (fields["max_total_tokens"], fields["dtype"]) == (123, "bfloat16")
    assert (fields["device"], fields["attention_backend"], fields["sleep_on_idle"]) == ("cpu", "torch_native", True)


def test_cuda_gets_no_cpu_values():
    fields = build(make_args(accelerator="cuda", rollout_num_gpus_per_engine=4))
    assert not {"device", "max_total_tokens", "sleep_on_idle"} & fields.keys()
    assert (fields["dtype"], fields["attention_backend"]) == (
        "float32",
        "triton",
    )
    assert "attention_backend" not in build(make_args(accelerator="cuda", bf16=True))
    assert fields["tp_size"] == 4


def test_cpu_dtype_follows_the_trainer():
    assert build(make_args())["dtype"] == "float32"
    assert build(make_args(bf16=True))["dtype"] == "bfloat16"
    assert build(make_args(fp16=True))["dtype"] == "float16"


def test_seed_differs_between_engines():
    assert [build(make_args(), rank=rank)["random_seed"] for rank in (0, 1, 3)] == [100, 108, 124]


def test_overrides_beat_computed_values_beat_user_flags(caplog):
    args = make_args(accelerator="cuda", sglang_overrides={"base_gpu_id": 7, "log_level": "debug"})
    fields = build(args, base_gpu_id=2, overrides={"tp_size": 3, "log_level": "error"})
    assert (fields["base_gpu_id"], fields["tp_size"], fields["log_level"]) == (2, 3, "error")
    assert "base_gpu_id=2 is set by slime, not 7" in caplog.text


def test_pipeline_stages_divide_the_engine():
    assert build(make_args(rollout_num_gpus_per_engine=8, sglang_overrides={"pp_size": 2}))["tp_size"] == 4
    with pytest.raises(ValueError, match=r"pp-size 3 does not divide .* 8; try --sglang-pp-size 2"):
        build(make_args(rollout_num_gpus_per_engine=8, sglang_overrides={"pp_size": 3}))


@pytest.mark.parametrize("where", ["user", "group"])
def test_unknown_field_names_the_nearest(where):
    args = make_args(sglang_overrides={"mem_fraction_statik": 0.5} if where == "user" else {})
    with pytest.raises(ValueError, match="mem_fraction_statik.*nearest: mem_fraction_static"):
        build(args, overrides={"mem_fraction_statik": 0.5} if where == "group" else {})


def test_memory_saver_is_refused_on_the_cpu():
    with pytest.raises(ValueError, match="--offload-rollout needs CUDA"):
        build(make_args(offload_rollout=True))
    fields = build(make_args(accelerator="cuda", offload_rollout=True))
    assert fields["enable_memory_saver"] is True


def test_other_sglang_versions_are_refused_on_the_cpu_only(monkeypatch):
    monkeypatch.setattr(server_args.importlib.metadata, "version", lambda name: "0.5.99")
    build(make_args(accelerator="cuda"))
    with pytest.raises(ValueError, match="SGLang 0.5.99 .* pip install sglang==0.5.17"):
        build(make_args())


def sparse_model(directory, **config):
    """A directory with the part of a config.json that engines of sparse attention are told by."""
    base = {"model_type": "glm_moe_dsa", "index_topk": 64, "max_position_embeddings": 2048, "num_hidden_layers": 4}
    (directory / "config.json").write_text(json.dumps(base | config))
    return str(directory)


def test_sparse_attention_has_no_shorter_context_on_the_cpu(tmp_path):
    """It was served as dense attention, and refused beyond index_topk tokens."""
    fields = build(make_args(hf_checkpoint=sparse_model(tmp_path)))
    assert "context_length" not in fields and "json_model_override_args" not in fields


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("enable_hierarchical_cache", True, "--sglang-enable-hierarchical-cache True: glm_moe_dsa keeps index keys"),
        ("speculative_algorithm", "EAGLE", "--sglang-speculative-algorithm EAGLE: .* leave it away"),
        ("disaggregation_mode", "prefill", "--sglang-disaggregation-mode prefill: .* leave it away"),
        ("pp_size", 2, "--sglang-pp-size 2: .* does not hand on between stages; .* try --sglang-pp-size 1"),
    ],
)
def test_whatever_moves_cache_slots_is_refused_for_sparse_attention_on_the_cpu(tmp_path, field, value, says):
    """Index keys would stay behind, and tokens attend to the wrong ones without a word."""
    given = {"sglang_overrides": {field: value}, "rollout_num_gpus_per_engine": 2}
    with pytest.raises(ValueError, match=says):
        build(make_args(hf_checkpoint=sparse_model(tmp_path), **given))
    build(make_args(hf_checkpoint=sparse_model(tmp_path, index_topk=None), **given))
    build(make_args(hf_checkpoint=sparse_model(tmp_path), accelerator="cuda", **given))


def test_index_sharing_told_by_types_alone_is_told_to_sglang(tmp_path):
    """SGLang reads frequency or pattern; without them it would run indexers that have no weights."""
    types = ["full", "full", "shared", "full"]
    for accelerator in ("cpu", "cuda"):
        args = make_args(hf_checkpoint=sparse_model(tmp_path, indexer_types=types), accelerator=accelerator)
        assert json.loads(build(args)["json_model_override_args"]) == {"index_topk_pattern": "FFSF"}
        args.sglang_overrides = {"json_model_override_args": '{"index_topk": 8}'}
        given = json.loads(build(args)["json_model_override_args"])
        assert given == {"index_topk_pattern": "FFSF", "index_topk": 8}
    for config in ({"indexer_types": ["full"] * 4}, {"index_topk_freq": 2, "index_skip_topk_offset": 2}):
        args = make_args(hf_checkpoint=sparse_model(tmp_path, **config))
        assert "json_model_override_args" not in build(args)


def test_command_line_leaves_defaults_out():
    assert to_command_line({"port": 30000, "host": "127.0.0.1", "tp_size": 1, "model_path": "m"}) == [
        "--model-path",
        "m",
    ]


def test_command_line_spells_every_kind_of_value():
    fields = {
        "model_path": "m",
        "sleep_on_idle": True,
        "max_total_tokens": 5,
        "mem_fraction_static": 0.5,
        "dllm_fdfo": False,
        "lora_strict_loading": True,
        "extra_metric_labels": {"a": "b"},
        "custom_weight_loader": ["x.y", "z"],
        "json_model_override_args": '{"a": 1}',
        "served_model_name": "-odd",
    }
    assert to_command_line(fields) == [
        *("--model-path", "m", "--sleep-on-idle", "--max-total-tokens", "5", "--mem-fraction-static", "0.5"),
        *("--no-dllm-fdfo", "--lora-strict-loading", "--extra-metric-labels", '{"a": "b"}'),
        *("--custom-weight-loader", "x.y", "z", "--json-model-override-args", '{"a": 1}', "--served-model-name=-odd"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("no_such_field", 1, "has no field 'no_such_field'"),
        ("disable_cuda_graph", True, "cannot be given on SGLang's command line"),
        ("model_path", None, "cannot express None"),
    ],
)
def test_command_line_refuses_what_it_cannot_say(name, value, says):
    with pytest.raises(ValueError, match=says):
        to_command_line({name: value})


def test_fields_are_read_from_the_installed_sources():
    fields = server_fields()
    assert len(fields) > 300
    assert fields["model_path"].flag == "--model-path"
    assert fields["port"].default == 30000
    assert fields["dllm_fdfo"].negatable
    assert not fields["disable_cuda_graph"].has_flag


def test_cpu_environment_shadows_the_wheel_and_keeps_the_rest():
    environ = {"PYTHONPATH": "/mine", "HOME": "/h", "PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x"}
    env = server_env(make_args(), environ)
    assert env["PYTHONPATH"] == f"{CPU_STUB}:{SERVER_PATH}:/mine"
    assert (env["SGLANG_USE_CPU_ENGINE"], env["OMP_NUM_THREADS"], env["HOME"]) == ("1", "1", "/h")
    assert not {"PYTHONDONTWRITEBYTECODE", "PYTORCH_CUDA_ALLOC_CONF"} & env.keys()
    assert environ["PYTHONDONTWRITEBYTECODE"] == "1"


def test_cuda_environment_has_no_stub_and_outer_values_win():
    env = server_env(make_args(accelerator="cuda"), {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "true"})
    assert env["PYTHONPATH"] == str(SERVER_PATH) and "SGLANG_USE_CPU_ENGINE" not in env
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "true"
    assert env["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] == "false"


def test_tensor_parallel_on_the_cpu_binds_threads():
    env = server_env(make_args(), {}, tp_size=2)
    assert (env["SGLANG_CPU_OMP_THREADS_BIND"], env["SGLANG_NCCL_SO_PATH"]) == ("0|1", "/nonexistent")
    assert "SGLANG_NCCL_SO_PATH" not in server_env(make_args(), {}, tp_size=1)


def test_servers_cannot_import_megatron(tmp_path):
    """SGLang does when it can, for a debugging aid. Megatron then put the memory saver into a mode that cannot pause
    CUDA graphs, and every server that was to be offloaded died at start ("Only hook_mode=preload supports ...")."""
    code = "try: import megatron.core\nexcept ImportError as error: print(error)"
    env = server_env(make_args(accelerator="cuda"), os.environ)
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "not for server processes" in result.stdout
