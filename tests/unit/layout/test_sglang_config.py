"""The topology of engines: every shape of the file, every mistake named with its key, sums against the GPUs."""

from argparse import Namespace

import pytest
import yaml

from slime.utils.sglang_config import ServerGroup, Topology, TopologyError, parse_topology, topology

FIELDS = {"tp_size", "pp_size", "dp_size", "ep_size", "mem_fraction_static", "model_path", "enable_dp_attention"}


def make_args(**changes) -> Namespace:
    values = {
        "sglang_config": None,
        "prefill_num_servers": None,
        "rollout_external_engine_addrs": None,
        "debug_train_only": False,
        "load_debug_rollout_data": None,
        "rollout_num_gpus": 16,
        "rollout_num_gpus_per_engine": 4,
        "hf_checkpoint": "/models/actor",
        "sglang_pp_size": 1,
    }
    return Namespace(**{**values, **changes})


def model(**changes) -> dict:
    return {"name": "actor", "server_groups": [{"worker_type": "regular", "num_gpus": 16}], **changes}


def read(*models: dict, **changes) -> Topology:
    return parse_topology({"sglang": list(models)}, make_args(**changes), FIELDS)


def problems(content, **changes) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse_topology(content, make_args(**changes), FIELDS)
    assert all(problem.flags[0] == "--sglang-config" for problem in caught.value.problems)
    return [problem.says for problem in caught.value.problems]


def test_a_file_with_two_models(tmp_path):
    """The GLM-5.2 launcher's shape, and a frozen reward model beside it."""
    text = """
    sglang:
      - name: actor
        server_groups:
          - {worker_type: prefill, num_gpus: 4, overrides: {dp-size: 4, enable_dp_attention: true}}
          - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 8}
      - name: judge
        model_path: /models/judge
        num_gpus_per_engine: 2
        engine_groups:
          - {num_gpus: 2}
          - {worker_type: placeholder, num_gpus: 2}
    """
    (tmp_path / "engines.yaml").write_text(text)
    found = topology(make_args(sglang_config=str(tmp_path / "engines.yaml")), FIELDS)
    actor, judge = found.models
    assert actor.disaggregated and actor.update_weights and actor.model_path == "/models/actor"
    assert actor.groups == (
        ServerGroup("prefill", 4, 4, {"dp_size": 4, "enable_dp_attention": True}),
        ServerGroup("decode", 8, 8),
    )
    assert not judge.disaggregated and not judge.update_weights and judge.model_path == "/models/judge"
    assert [(g.worker_type, g.num_gpus_per_engine, g.num_engines) for g in judge.groups] == [
        ("regular", 2, 1),
        ("placeholder", 2, 0),
    ]
    assert found.num_gpus == 16
    assert [notice.split(" ")[0] for notice in found.notices] == [
        "sglang[0].server_groups[0].overrides.dp-size",
        "judge",
    ]


def test_without_a_file_there_is_one_group():
    found = topology(make_args())
    assert [(m.name, m.groups) for m in found.models] == [("default", (ServerGroup("regular", 16, 4),))]


def test_prefill_servers_leave_the_rest_to_decode():
    groups = topology(make_args(prefill_num_servers=1)).models[0].groups
    assert groups == (ServerGroup("prefill", 4, 4), ServerGroup("decode", 12, 4))


@pytest.mark.parametrize("servers", [0, 4, 5])
def test_prefill_servers_that_leave_nothing_to_decode_are_refused(servers):
    with pytest.raises(TopologyError, match=f"{servers} prefill servers x 4 GPUs .* = {4 * servers} of 16") as caught:
        topology(make_args(prefill_num_servers=servers))
    assert caught.value.problems[0].try_ == "--prefill-num-servers 3"


@pytest.mark.parametrize(
    "changes, models",
    [
        ({"rollout_num_gpus": 0}, ["default"]),
        ({"rollout_external_engine_addrs": ["10.0.0.1:30000"]}, []),
        ({"debug_train_only": True, "prefill_num_servers": 1}, []),
        ({"load_debug_rollout_data": "/dump.pt"}, []),
    ],
)
def test_modes_without_engines_of_their_own(changes, models):
    found = topology(make_args(**changes))
    assert [m.name for m in found.models] == models and found.groups == ()


def test_one_flag_says_which_engines_there_are():
    with pytest.raises(TopologyError, match="--sglang-config, --prefill-num-servers: each of them"):
        topology(make_args(sglang_config="x.yaml", prefill_num_servers=1))


def test_a_file_that_is_missing_or_no_yaml(tmp_path):
    with pytest.raises(FileNotFoundError):
        topology(make_args(sglang_config=str(tmp_path / "none.yaml")))
    (tmp_path / "bad.yaml").write_text("sglang: [")
    with pytest.raises(TopologyError, match="bad.yaml is no YAML"):
        topology(make_args(sglang_config=str(tmp_path / "bad.yaml")))
    (tmp_path / "code.yaml").write_text("sglang: !!python/object/apply:os.system ['false']")
    with pytest.raises(TopologyError, match="is no YAML"):
        topology(make_args(sglang_config=str(tmp_path / "code.yaml")))


def group(**changes) -> dict:
    return model(server_groups=[{"num_gpus": 16, **changes}])


@pytest.mark.parametrize(
    "entry, message",
    [
        (model(servergroups=[]), "sglang[0].servergroups: is unknown; did you mean server_groups?"),
        (model(name=""), "sglang[0].name: is '', must be a text"),
        (model(server_groups=[]), "sglang[0].server_groups: is [], must be a list of at least one group"),
        (model(engine_groups=[{"num_gpus": 16}]), "sglang[0].engine_groups: is another name of server_groups"),
        (model(update_weights="yes"), "sglang[0].update_weights: is 'yes', must be true or false"),
        ("actor", "sglang[0]: is 'actor', must map keys to values"),
        (group(worker_type="prefil"), "sglang[0].server_groups[0].worker_type: is 'prefil', must be one of regular"),
        (group(num_gpus=0), "server_groups[0].num_gpus: is 0, must be a number of GPUs >= 1"),
        (group(num_gpus="16"), "server_groups[0].num_gpus: is '16', must be a number of GPUs >= 1"),
        (group(num_gpus=True), "server_groups[0].num_gpus: is True, must be"),
        (group(num_gpus=14), "server_groups[0].num_gpus: 14 GPUs make no whole engines of 4"),
        (group(gpus=4), "server_groups[0].gpus: is unknown; did you mean num_gpus?"),
        (group(overrides=[1]), "server_groups[0].overrides: is [1], must map fields"),
        (group(overrides={"mem_fraction": 0.8}), "overrides.mem_fraction: is no field of the installed SGLang's"),
        (group(overrides={"mem_fraction": 0.8}), "did you mean mem_fraction_static?"),
        (group(overrides={"node_rank": 0}), "overrides.node_rank: is decided by where the server runs"),
        (group(overrides={"dp-size": 1, "dp_size": 2}), "overrides.dp_size: is given twice"),
        (group(overrides={"tp_size": 8}), "tp_size 8 x pp_size 1 = 8, but an engine has 4 GPUs"),
        (group(worker_type="prefill"), "sglang[0]: has prefill servers but no decode server"),
        (group(worker_type="decode"), "sglang[0]: has decode servers but no prefill server"),
        (group(worker_type="encoder"), "sglang[0]: has encoders but no regular or prefill server"),
        (group(worker_type="placeholder"), "sglang[0]: has placeholders only"),
    ],
)
def test_every_mistake_names_its_key(entry, message):
    """An unknown key was dropped without a word, and a run came up without what it asked for."""
    found = problems({"sglang": [entry]})
    assert any(message in says for says in found), found


@pytest.mark.parametrize("content", [None, [], {}, {"models": []}, {"sglang": []}, {"sglang": {"name": "actor"}}])
def test_a_file_without_models(content):
    assert any("needs a top-level key `sglang`" in says for says in problems(content))


def test_all_mistakes_are_found_at_once():
    found = problems({"sglang": [model(), model(size=1), group(num_gpus=-1)], "router": {}})
    assert len(found) == 4 and any("the name actor occurs 3 times" in says for says in found), found


def test_kinds_that_do_not_mix():
    groups = [{"worker_type": kind, "num_gpus": 4} for kind in ("regular", "prefill", "decode", "regular")]
    assert problems({"sglang": [model(server_groups=groups)]}) == [
        "sglang[0]: mixes regular servers with prefill or decode servers; a router serves one kind"
    ]


def test_gpus_must_add_up():
    groups = [{"worker_type": "prefill", "num_gpus": 4}, {"worker_type": "decode", "num_gpus": 8}]
    with pytest.raises(TopologyError) as caught:
        read(model(server_groups=groups))
    problem = caught.value.problems[0]
    assert problem.says == "4 actor prefill + 8 actor decode = 12 GPUs, but --rollout-num-gpus is 16"
    assert problem.try_ == "--rollout-num-gpus 12"


def test_groups_of_a_model_serve_one_checkpoint():
    groups = [{"num_gpus": 8}, {"num_gpus": 8, "overrides": {"model_path": "/models/other"}}]
    assert (
        "would serve different models: /models/actor, /models/other"
        in problems({"sglang": [model(server_groups=groups)]})[0]
    )
    moved = read(model(server_groups=[{"num_gpus": 16, "overrides": {"model_path": "/models/other"}}]))
    assert moved.models[0].model_path == "/models/other" and not moved.models[0].update_weights
    assert any("never see what was trained" in notice for notice in moved.notices)


def test_only_the_first_model_follows_the_trainer():
    halves = [{"num_gpus": 8}]
    found = read(model(server_groups=halves), model(name="twin", server_groups=halves))
    assert found.notices == ("only actor follows the trainer, not twin",)
    explicit = read(model(server_groups=halves), model(name="twin", update_weights=False, server_groups=halves))
    assert explicit.notices == () and not explicit.models[1].update_weights


def test_encoders_beside_regular_servers_are_fine():
    groups = [{"worker_type": "encoder", "num_gpus": 4}, {"worker_type": "regular", "num_gpus": 12}]
    assert read(yaml.safe_load(yaml.safe_dump(model(server_groups=groups)))).num_gpus == 16
