"""Blocking HTTP client of ONE SGLang server: health, pausing, cache, weights, memory.

Trainer ranks and engine actors use it to reach a server directly. It knows nothing about Ray, Megatron or routers.
"""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class EngineError(RuntimeError):
    """A server could not be reached, answered with an error status, or answered that the operation failed."""


@dataclass(frozen=True)
class EngineInfo:
    """Where one engine listens and which devices it occupies; picklable.

    rank: index among all engines. num_gpus: devices (CPU: slots) it spans. gpu_offset: index of its first device among
    the rollout devices. parallel_config: tp_size, pp_size, ep_size, moe_dp_size.
    """

    url: str
    rank: int
    num_gpus: int
    gpu_offset: int
    parallel_config: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _host_and_port(self.url)
        if self.num_gpus <= 0:
            raise ValueError(
                f"engine {self.rank} at {self.url} needs at least one device, got num_gpus={self.num_gpus}"
            )


class EngineClient:
    """One method per server endpoint. Every method raises EngineError unless the server confirms success.

    A connection is opened per call: calls are rare and large, so the object needs no lock between threads and no
    clean-up.
    """

    def __init__(self, url: str, timeout: float = 600.0, api_key: str | None = None) -> None:
        """url: http://host:port. timeout: seconds the server may stay silent during one call."""
        self.url = url.rstrip("/")
        self.timeout = timeout
        _host_and_port(self.url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def __repr__(self) -> str:
        return f"EngineClient({self.url!r})"

    # State of the server

    def health(self, timeout: float | None = None, endpoint: str = "/health") -> None:
        """Returns when the endpoint answers 200. /health: the server is up; /health_generate: it generated a token."""
        self._get(endpoint, timeout=timeout)

    def server_info(self) -> dict[str, Any]:
        """The server's arguments and its internal state."""
        return self._get_json("/server_info")

    def model_info(self) -> dict[str, Any]:
        """model_path, tokenizer_path, weight_version, model_type and more."""
        return self._get_json("/model_info")

    def weight_version(self) -> str:
        """The version label that came with the newest weights ("default" before the first update)."""
        return str(self.model_info()["weight_version"])

    def freeze_gc(self) -> None:
        """Python's garbage collector leaves alone from now on what the server's processes hold. To be called once the
        server is up: each flush of the cache collects garbage, and going through everything imported takes 0.5 s."""
        self._get("/freeze_gc")

    # Requests in flight

    def pause_generation(self, mode: str = "abort") -> None:
        """Stops generating. mode abort: running requests return what they have; retract: they start over later;
        in_place: they keep their cache."""
        self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})

    def abort_all(self) -> None:
        """Running and waiting requests return what they have, with finish_reason abort."""
        self._post("/abort_request", {"abort_all": True})

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empties the prefix cache; waits up to `timeout` seconds for requests in flight to end first."""
        start = time.monotonic()
        while True:
            status, answer = self._request("GET", "/flush_cache", None, None)
            if status == 200:
                return
            if time.monotonic() - start > timeout:
                raise EngineError(
                    f"{self.url}/flush_cache still refuses after {timeout:g} s (requests in flight?): {_short(answer)}"
                )
            time.sleep(0.2)

    # Weights

    def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        load_format: str | None = None,
        weight_version: str | int | None = None,
        flush_cache: bool = False,
    ) -> None:
        """serialized: one base64 string per TP rank of the engine. load_format: None or "flattened_bucket".

        flush_cache False keeps the prefix cache, computed with the old weights: `flush_cache()` before the first call.
        """
        self._post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(serialized),
                "load_format": load_format,
                "flush_cache": flush_cache,
                **_version(weight_version),
            },
        )

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins the process group through which weights will be broadcast; returns once everybody joined.

        rank_offset: group rank of the engine's first device. backend: "nccl" or "gloo".
        """
        self._post(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | int | None = None,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Receives the named tensors over the group, in order, and loads them. dtypes: "bfloat16", ...

        flush_cache: see update_weights_from_tensor.
        """
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must be equally many")
        self._post(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
                "shapes": [list(shape) for shape in shapes],
                "group_name": group_name,
                "load_format": load_format,
                "flush_cache": flush_cache,
                **_version(weight_version),
            },
        )

    def update_weights_from_disk(
        self, model_path: str, weight_version: str | int | None = None, load_format: str | None = None
    ) -> None:
        """Loads a Hugging Face directory that the server's hosts can read; the prefix cache is emptied too."""
        body = {"model_path": str(model_path), **_version(weight_version)}
        if load_format is not None:
            body["load_format"] = load_format
        self._post("/update_weights_from_disk", body)

    def weights_checksum(self) -> dict[str, Any]:
        """{"ranks": [{"checksums": {name: hex}, ...} per device], "per_engine_checksum": hex}; the server's names."""
        return self.weights_checker("checksum")

    def weights_checker(self, action: str) -> dict[str, Any]:
        """action: checksum, snapshot, reset_tensors or compare (with the snapshot)."""
        return self._post("/weights_checker", {"action": action})

    # Memory

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Frees device memory of an idle server. tags: of weights, kv_cache, cuda_graph; None means all of them."""
        self.flush_cache()
        self._post("/release_memory_occupation", _tags(tags))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Takes the device memory of these tags back; contents of weights and cache are undefined until rewritten."""
        self._post("/resume_memory_occupation", _tags(tags))

    # HTTP

    def _get(self, endpoint: str, timeout: float | None = None) -> str:
        status, answer = self._request("GET", endpoint, None, timeout)
        if status != 200:
            raise EngineError(f"{self.url}{endpoint} answered HTTP {status}: {_short(answer)}")
        return answer

    def _get_json(self, endpoint: str) -> dict[str, Any]:
        return self._parse(endpoint, self._get(endpoint))

    def _post(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer as a dict ({} for an empty or null answer)."""
        status, answer = self._request("POST", endpoint, body, None)
        if status != 200:
            raise EngineError(f"{self.url}{endpoint} answered HTTP {status}: {_short(answer)}")
        parsed = self._parse(endpoint, answer) if answer.strip() else {}
        if parsed.get("success", True) is not True:
            raise EngineError(f"{self.url}{endpoint} reports failure: {_short(answer)}")
        return parsed

    def _parse(self, endpoint: str, answer: str) -> dict[str, Any]:
        try:
            parsed = json.loads(answer)
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.url}{endpoint} answered no JSON: {_short(answer)}") from error
        if parsed is None:
            return {}
        if not isinstance(parsed, dict):
            raise EngineError(f"{self.url}{endpoint} should answer a JSON object, got: {_short(answer)}")
        return parsed

    def _request(
        self, method: str, endpoint: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> tuple[int, str]:
        timeout = self.timeout if timeout is None else timeout
        return http_request(method, self.url + endpoint, body, timeout, self._headers)


def http_request(
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """One blocking call with a JSON body: (HTTP status, answer text). EngineError if nobody answers in `timeout` s.

    Proxy settings of the environment are not consulted: engines and routers are in the same cluster.
    """
    host, port = _host_and_port(url)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    payload = None if body is None else json.dumps(body).encode()
    headers = {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
    path = url[url.index("/", len("http://")) :] if "/" in url[len("http://") :] else "/"
    try:
        connection.request(method, path, body=payload, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except TimeoutError as error:
        raise EngineError(f"{url} did not answer in {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ValueError(f"an engine url must look like http://127.0.0.1:15000, got {url!r}")
    return parts.hostname, parts.port


def _tags(tags: Sequence[str] | None) -> dict[str, list[str]]:
    return {} if tags is None else {"tags": list(tags)}


def _version(weight_version: str | int | None) -> dict[str, str]:
    return {} if weight_version is None else {"weight_version": str(weight_version)}


def _short(answer: str, limit: int = 2000) -> str:
    text = answer.strip()
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
