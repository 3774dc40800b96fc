"""EngineClient against a scripted HTTP server: what goes over the wire, and what counts as failure."""

import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.utils.engine_client import EngineClient, EngineError, EngineInfo


class Script:
    """answers: endpoint -> list of (status, text), the last one repeats. Records method, path, body, authorization."""

    def __init__(self):
        self.answers, self.calls = {}, []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                script.calls.append(
                    (self.command, self.path, json.loads(body) if body else None, self.headers.get("Authorization"))
                )
                answers = script.answers.get(self.path.partition("?")[0], [(200, '{"success": true, "message": ""}')])
                status, text = answers.pop(0) if len(answers) > 1 else answers[0]
                if status == 0:  # hang up
                    self.close_connection = True
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = respond

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def script():
    script = Script()
    yield script
    script.server.shutdown()
    script.server.server_close()


def test_every_operation_sends_what_sglang_expects(script):
    client = EngineClient(script.url + "/", timeout=5)
    client.pause_generation()
    client.continue_generation()
    client.abort_all()
    client.update_weights_from_tensor(["AA==", "BB=="], "flattened_bucket", 7)
    client.init_weights_update_group("10.0.0.1", 29500, 1, 3, "slime-pp_0", "gloo")
    client.update_weights_from_distributed(["w"], ["torch.float32"], [(2, 3)], "slime-pp_0", weight_version=8)
    client.destroy_weights_update_group("slime-pp_0")
    client.update_weights_from_disk("/ckpt", weight_version="9")
    client.resume_memory_occupation(["weights"])
    client.resume_memory_occupation()
    group = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    tensors = {"serialized_named_tensors": ["AA==", "BB=="], "load_format": "flattened_bucket"}
    weights = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "slime-pp_0"}
    assert [(method, path, body) for method, path, body, _ in script.calls] == [
        ("POST", "/pause_generation", {"mode": "abort"}),
        ("POST", "/continue_generation", {}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/update_weights_from_tensor", tensors | {"flush_cache": False, "weight_version": "7"}),
        ("POST", "/init_weights_update_group", group | {"group_name": "slime-pp_0", "backend": "gloo"}),
        (
            "POST",
            "/update_weights_from_distributed",
            weights | {"load_format": None, "flush_cache": False, "weight_version": "8"},
        ),
        ("POST", "/destroy_weights_update_group", {"group_name": "slime-pp_0"}),
        ("POST", "/update_weights_from_disk", {"model_path": "/ckpt", "weight_version": "9"}),
        ("POST", "/resume_memory_occupation", {"tags": ["weights"]}),
        ("POST", "/resume_memory_occupation", {}),
    ]


def test_garbage_collection_is_frozen_with_one_call(script):
    EngineClient(script.url).freeze_gc()
    assert [call[:3] for call in script.calls] == [("GET", "/freeze_gc", None)]
    script.answers["/freeze_gc"] = [(500, "no")]
    with pytest.raises(EngineError, match="/freeze_gc answered HTTP 500: no"):
        EngineClient(script.url).freeze_gc()


def test_memory_is_released_after_a_flush(script):
    EngineClient(script.url).release_memory_occupation(["kv_cache"])
    assert [call[:3] for call in script.calls] == [
        ("GET", "/flush_cache", None),
        ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}),
    ]


def test_flush_is_repeated_while_requests_are_in_flight(script):
    script.answers["/flush_cache"] = [(400, "busy"), (400, "busy"), (200, "Cache flushed.")]
    EngineClient(script.url).flush_cache(timeout=30)
    assert len(script.calls) == 3


def test_flush_gives_up_with_the_servers_words(script):
    script.answers["/flush_cache"] = [(400, "Flush cache failed.")]
    with pytest.raises(EngineError, match=rf"{script.url}/flush_cache still refuses after 0.3 s.*Flush cache failed"):
        EngineClient(script.url).flush_cache(timeout=0.3)


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (400, '{"success": false, "message": "bad path"}', "answered HTTP 400: .*bad path"),
        (200, '{"success": false, "message": "no such group"}', "reports failure: .*no such group"),
        (200, "<html>", "answered no JSON: <html>"),
        (200, "[1]", "should answer a JSON object"),
        (0, "", "cannot be reached"),
    ],
)
def test_failures_name_url_endpoint_and_answer(script, status, text, says):
    script.answers["/update_weights_from_disk"] = [(status, text)]
    with pytest.raises(EngineError, match=f"{script.url}/update_weights_from_disk {says}"):
        EngineClient(script.url).update_weights_from_disk("/ckpt")


@pytest.mark.parametrize("text", ["null", "", '{"status": "ok"}'])
def test_answers_without_a_verdict_are_success(script, text):
    script.answers["/pause_generation"] = [(200, text)]
    EngineClient(script.url).pause_generation("retract")


def test_health_wants_status_200(script):
    client = EngineClient(script.url)
    script.answers["/health"] = [(503, ""), (200, "")]
    with pytest.raises(EngineError, match="/health answered HTTP 503"):
        client.health()
    client.health()


def test_nobody_listening_is_an_engine_error():
    with pytest.raises(EngineError, match="http://127.0.0.1:9/health cannot be reached"):
        EngineClient("http://127.0.0.1:9").health()


def test_silence_is_bounded(script):
    blocked = threading.Event()
    script.server.RequestHandlerClass.do_GET = lambda self: blocked.wait(10)
    with pytest.raises(EngineError, match="/server_info did not answer in 0.2 s"):
        EngineClient(script.url, timeout=0.2).server_info()
    blocked.set()


def test_api_key_travels_as_bearer_token(script):
    script.answers["/model_info"] = [(200, '{"weight_version": "12"}')]
    assert EngineClient(script.url, api_key="secret").weight_version() == "12"
    assert script.calls[0][3] == "Bearer secret"


def test_unequal_lists_are_refused_before_anything_is_sent(script):
    with pytest.raises(ValueError, match="2 names, 1 dtypes and 2 shapes"):
        EngineClient(script.url).update_weights_from_distributed(["a", "b"], ["float32"], [[1], [1]], "g")
    assert script.calls == []


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://host:1", "http://host"])
def test_urls_must_be_complete(url):
    with pytest.raises(ValueError, match="must look like http://127.0.0.1:15000"):
        EngineClient(url)
    with pytest.raises(ValueError, match="must look like"):
        EngineInfo(url=url, rank=0, num_gpus=1, gpu_offset=0)


def test_engine_info_pickles():
    info = EngineInfo("http://[::1]:15000", 3, 2, 4, {"tp_size": 2})
    assert pickle.loads(pickle.dumps(info)) == info
