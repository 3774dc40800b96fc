"""Every transport brings exactly the checkpoint's tensors to every engine, in the right order of calls."""

from contextlib import ExitStack

import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_megatron import Layout
from tests.helpers.tiny_models import make_tiny_model

TRANSPORTS = {
    "tensor": {"colocate": True},
    "distributed": {"colocate": False},
    "disk": {"update_weight_transport": "disk"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_model("qwen3_tied", tmp_path_factory.mktemp("hf"), num_hidden_layers=2)


def _push(rank, world_size, path, layout, urls, directory):
    """Two updates by every transport; engine i of transport t is urls[t][i]. Returns the metrics of the second."""
    from tests.helpers.tiny_megatron import load, make_args, start

    start(layout)
    from slime.backends.megatron_utils.update_weight import choose_updater
    from slime.utils.engine_client import EngineInfo

    _, chunks = load(path, layout)
    metrics = {}
    for transport, flags in TRANSPORTS.items():
        args = make_args(path, layout, update_weight_disk_dir=directory, **flags)
        updater = choose_updater(args, chunks)
        updater.connect([EngineInfo(url, i, 1, i) for i, url in enumerate(urls[transport])])
        updater.update_weights()
        metrics[transport] = updater.update_weights()
        updater.close()
    return metrics


@pytest.mark.parametrize(("world_size", "layout"), [(1, Layout()), (2, Layout(pp=2)), (2, Layout(tp=2))])
def test_engines_receive_the_checkpoint(checkpoint, tmp_path, world_size, layout):
    """Tied embeddings, a padded vocabulary and (PP) a second copy of the embedding: none of it reaches an engine."""
    import torch
    from safetensors.torch import load_file

    wanted = load_file(checkpoint / "model.safetensors")
    with ExitStack() as stack:
        engines = {name: [stack.enter_context(FakeEngine()) for _ in range(2)] for name in TRANSPORTS}
        urls = {name: [engine.url for engine in pair] for name, pair in engines.items()}
        results = run_ranks(_push, world_size, checkpoint, layout, urls, str(tmp_path))
    total = sum(tensor.nbytes for tensor in wanted.values())
    for name, pair in engines.items():
        for engine in pair:
            assert engine.weights.keys() == wanted.keys(), name
            assert all(torch.equal(engine.weights[key], tensor) for key, tensor in wanted.items()), name
            assert engine.version == "2" and not engine.paused
            once = [call for call in engine.calls if not call.endswith("_group")][: len(engine.calls) // 2]
            assert once[:2] == ["pause_generation", "flush_cache"]
            assert once.count("continue_generation") == 1
        for metrics in results:
            assert metrics[name]["perf/update_weights_version"] == 2
            assert metrics[name]["perf/update_weights_bytes"] >= total
    assert len([call for call in engines["tensor"][0].calls if call.startswith("update_weights")]) > 4, (
        "one bucket only"
    )
    assert list(tmp_path.iterdir()) == [], "published versions are removed after loading"


def _payload_globals(rank, world_size):
    """(names that unpickling a payload looks up, the tensors it gives), in a process with all of Megatron loaded."""
    import base64
    import io
    import pickle

    import torch

    from tests.helpers.tiny_megatron import start

    start(Layout())
    import megatron.training.checkpointing  # noqa: F401  (replaces functions of torch)

    from slime.backends.megatron_utils.update_weight.from_tensor import serialize_values

    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    bucket = [("a", whole.t()), ("b", whole[1:2]), ("c", torch.tensor(2.5)), ("d", torch.tensor([1, 2]))]
    payload = base64.b64decode(serialize_values(bucket))
    names = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    loaded = Recorder(io.BytesIO(payload)).load()
    assert [name for name, _ in loaded] == ["a", "b", "c", "d"]
    assert all(got.equal(sent) and got.dtype == sent.dtype for (_, got), (_, sent) in zip(loaded, bucket, strict=True))
    assert len(payload) < 2000, "a view must not carry the storage behind it"
    return names


def test_payloads_use_only_names_that_an_engine_accepts():
    """SGLang's unpickler refuses every module but a few; Megatron's replacements in torch must not leak in."""
    (names,) = run_ranks(_payload_globals, 1)
    assert names
    assert all(name.startswith(("torch.", "builtins.", "functools.")) for name in names), names


def _push_to_a_failing_engine(rank, world_size, path, layout, url, flags):
    from tests.helpers.tiny_megatron import load, make_args, start

    start(layout)
    from slime.backends.megatron_utils.update_weight import choose_updater
    from slime.utils.engine_client import EngineInfo

    _, chunks = load(path, layout)
    updater = choose_updater(make_args(path, layout, **flags), chunks)
    updater.connect([EngineInfo(url, 0, 1, 0)])
    try:
        updater.update_weights()
    except RuntimeError as error:  # EngineError is one
        return str(error)
    return None


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_failed_update_raises_on_all_ranks_and_leaves_the_engine_paused(checkpoint, transport):
    """An engine with part of the weights must not serve."""
    with FakeEngine(fail_at=f"update_weights_from_{transport}") as engine:
        flags = TRANSPORTS[transport]
        messages = run_ranks(_push_to_a_failing_engine, 2, checkpoint, Layout(pp=2), engine.url, flags)
    assert all("was told to fail" in message for message in messages)
    assert engine.paused
