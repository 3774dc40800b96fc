"""Which models the engines serve, in which groups of servers: --sglang-config, --prefill-num-servers, or one group.

Reads and checks; starts nothing and knows neither Ray nor SGLang.
"""

import difflib
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime.utils.layout.engine_slots import GroupSize, PlacedEngine, place_engines
from slime.utils.layout.errors import LayoutError

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder", "encoder")
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
# ServerArgs fields that say where a server runs; placement decides them.
PLACED = ("host", "port", "nccl_port", "nnodes", "node_rank", "base_gpu_id", "gpu_id_step", "dist_init_addr")
FLAG = "--sglang-config"


class TopologyError(ValueError):
    """A topology that cannot be; `problems` holds all that was found, each as flags, what is wrong, a legal value."""

    def __init__(self, problems: Collection[LayoutError]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class ServerGroup:
    """Servers of one kind and size. overrides: ServerArgs field -> value, stronger than every flag.

    worker_type: "placeholder" keeps GPUs free, "encoder" computes image embeddings and never meets the router.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        """Engines it starts."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ServerModel:
    """One model behind one router. update_weights: it follows the trainer; else it stays as loaded."""

    name: str
    model_path: str | None
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on different servers."""
        return any(group.worker_type in ("prefill", "decode") for group in self.groups)


@dataclass(frozen=True)
class Topology:
    """All models, in the order in which they take GPUs. notices: what the file left open and how it was read."""

    models: tuple[ServerModel, ...]
    notices: tuple[str, ...] = ()
    size_key: str = "--rollout-num-gpus-per-engine"  # where an engine's size was given

    @property
    def groups(self) -> tuple[tuple[ServerModel, ServerGroup], ...]:
        """Every group with its model, in the order in which they take GPUs."""
        return tuple((model, group) for model in self.models for group in model.groups)

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups, placeholders included."""
        return sum(group.num_gpus for _, group in self.groups)

    def place(self, first_slot: int, gpus_per_node: int, whole_nodes: bool = True) -> tuple[PlacedEngine, ...]:
        """`place_engines` of these groups; PlacedEngine.group indexes `self.groups`."""
        sizes = [
            GroupSize(
                f"{model.name} ({group.worker_type})",
                group.num_gpus,
                group.num_gpus_per_engine,
                group.worker_type != "placeholder",
            )
            for model, group in self.groups
        ]
        return place_engines(sizes, first_slot, gpus_per_node, whole_nodes, self.size_key)


def topology(a: Namespace, known_overrides: Collection[str] | None = None) -> Topology:
    """The topology of a run's own engines: none where no engine is started, or where they run elsewhere already.

    known_overrides: the fields of ServerArgs, if they are known. Raises TopologyError with every problem, OSError if
    the file cannot be read.
    """
    ways = [
        (flag, value)
        for flag, value in (
            (FLAG, a.sglang_config),
            ("--prefill-num-servers", a.prefill_num_servers),
            ("--rollout-external-engine-addrs", a.rollout_external_engine_addrs),
        )
        if value is not None
    ]
    if len(ways) > 1:
        says = "each of them says which engines there are; give one"
        raise TopologyError([LayoutError(tuple(flag for flag, _ in ways), says)])
    if a.rollout_external_engine_addrs is not None or a.debug_train_only or a.load_debug_rollout_data:
        return Topology(())
    if a.sglang_config is not None:
        return parse_topology(_read(a.sglang_config), a, known_overrides)
    total, each = a.rollout_num_gpus or 0, a.rollout_num_gpus_per_engine
    if not total:
        groups: tuple[ServerGroup, ...] = ()
    elif a.prefill_num_servers is not None:
        groups = _disaggregated(a.prefill_num_servers, total, each)
    else:
        groups = (ServerGroup("regular", total, each),)
    return Topology((ServerModel("default", a.hf_checkpoint, True, groups),))


def parse_topology(content: Any, a: Namespace, known_overrides: Collection[str] | None = None) -> Topology:
    """The topology that the content of a --sglang-config file describes; arguments and errors as for `topology`.

    `sglang:` lists models; what a model leaves out is taken from --hf-checkpoint and --rollout-num-gpus-per-engine.
    """
    reader = _Reader(a, known_overrides)
    models = reader.models(content)
    if not reader.problems and a.rollout_num_gpus is not None:
        reader.check_sum(models, a.rollout_num_gpus)
    if reader.problems:
        raise TopologyError(reader.problems)
    return Topology(tuple(models), tuple(reader.notices), size_key=f"{FLAG} num_gpus_per_engine:")


def _read(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TopologyError([LayoutError((FLAG,), f"{path} is no YAML: {error}")]) from error


def _disaggregated(prefill_servers: int, total: int, each: int) -> tuple[ServerGroup, ...]:
    prefill = prefill_servers * each
    if prefill_servers < 1 or total - prefill < each:
        says = (
            f"{prefill_servers} prefill servers x {each} GPUs (--rollout-num-gpus-per-engine) = {prefill} of "
            f"{total} GPUs (--rollout-num-gpus); at least one server of each kind is needed"
        )
        legal = (
            f"--prefill-num-servers {max(1, total // each - 1)}"
            if total >= 2 * each
            else f"--rollout-num-gpus {2 * each}"
        )
        raise TopologyError([LayoutError(("--prefill-num-servers",), says, legal)])
    return ServerGroup("prefill", prefill, each), ServerGroup("decode", total - prefill, each)


class _Reader:
    """Reads one file and collects what is wrong with it, under the path of the key: sglang[0].server_groups[1]."""

    def __init__(self, a: Namespace, known_overrides: Collection[str] | None):
        self._a = a
        self._known_overrides = known_overrides
        self.problems: list[LayoutError] = []
        self.notices: list[str] = []

    def models(self, content: Any) -> list[ServerModel]:
        entries = content.get("sglang") if isinstance(content, Mapping) else None
        if not isinstance(entries, list) or not entries:
            self._problem("the file", "needs a top-level key `sglang` with a list of models")
            return []
        for key in content:
            if key != "sglang":
                self._problem(str(key), "stands beside `sglang`, where nothing is read")
        models = [self._model(f"sglang[{i}]", entry) for i, entry in enumerate(entries)]
        names = [model.name for model in models if model]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._problem("sglang", f"the name {name} occurs {names.count(name)} times; routers are found by it")
        found = [model for model in models if model]
        following = [model.name for model in found if model.update_weights]
        if found and not following:
            self.notices.append("no model has update_weights: true, so that the engines never see what was trained")
        if len(following) > 1:
            self.notices.append(f"only {following[0]} follows the trainer, not {', '.join(following[1:])}")
        return found

    def check_sum(self, models: list[ServerModel], total: int) -> None:
        groups = [(model.name, group) for model in models for group in model.groups]
        used = sum(group.num_gpus for _, group in groups)
        if used != total:
            terms = " + ".join(f"{group.num_gpus} {name} {group.worker_type}" for name, group in groups)
            says = f"{terms} = {used} GPUs, but --rollout-num-gpus is {total}"
            self.problems.append(LayoutError((FLAG, "--rollout-num-gpus"), says, f"--rollout-num-gpus {used}"))

    def _model(self, path: str, entry: Any) -> ServerModel | None:
        if not self._mapping(path, entry, MODEL_KEYS):
            return None
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            self._problem(f"{path}.name", f"is {name!r}, must be a text")
        each = self._gpus(f"{path}.num_gpus_per_engine", entry, self._a.rollout_num_gpus_per_engine)
        key = "engine_groups" if "engine_groups" in entry else "server_groups"
        if "engine_groups" in entry and "server_groups" in entry:
            self._problem(f"{path}.engine_groups", "is another name of server_groups; give one")
        entries = entry.get(key)
        if not isinstance(entries, list) or not entries:
            self._problem(f"{path}.{key}", f"is {entries!r}, must be a list of at least one group")
            entries = []
        groups = [
            self._group(f"{path}.{key}[{i}]", group, each or self._a.rollout_num_gpus_per_engine)
            for i, group in enumerate(entries)
        ]
        found = tuple(group for group in groups if group)
        self._check_kinds(path, found)
        model_path = self._model_path(path, entry, found)
        return ServerModel(str(name), model_path, self._update_weights(path, entry, name, model_path), found)

    def _group(self, path: str, entry: Any, default_each: int) -> ServerGroup | None:
        if not self._mapping(path, entry, GROUP_KEYS):
            return None
        before = len(self.problems)
        kind = entry.get("worker_type", "regular")
        if kind not in WORKER_TYPES:
            self._problem(
                f"{path}.worker_type",
                f"is {kind!r}, must be one of {', '.join(WORKER_TYPES)}{_near(kind, WORKER_TYPES)}",
            )
        total = self._gpus(f"{path}.num_gpus", entry, None)
        each = self._gpus(f"{path}.num_gpus_per_engine", entry, default_each)
        if total and each and total % each and kind != "placeholder":
            legal = max(each, total // each * each)
            self._problem(f"{path}.num_gpus", f"{total} GPUs make no whole engines of {each}", f"num_gpus: {legal}")
        overrides = self._overrides(f"{path}.overrides", entry.get("overrides"), each)
        if len(self.problems) > before:
            return None
        # A placeholder has no engines: it is as good as one of any size.
        return ServerGroup(kind, total, total if kind == "placeholder" else each, overrides)

    def _overrides(self, path: str, entry: Any, each: int | None) -> dict[str, Any]:
        if entry is None:
            return {}
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            self._problem(path, f"is {entry!r}, must map fields of SGLang's ServerArgs to values")
            return {}
        overrides = {}
        for key, value in entry.items():
            name = key.replace("-", "_")
            if name != key:
                self.notices.append(f"{path}.{key} is read as {name}")
            if name in overrides:
                self._problem(f"{path}.{key}", f"is given twice, as {name} too")
            if name in PLACED:
                self._problem(f"{path}.{key}", "is decided by where the server runs; leave it out")
            elif self._known_overrides is not None and name not in self._known_overrides:
                near = _near(name, self._known_overrides)
                self._problem(f"{path}.{key}", f"is no field of the installed SGLang's ServerArgs{near}")
            overrides[name] = value
        tp, pp = overrides.get("tp_size"), overrides.get("pp_size", getattr(self._a, "sglang_pp_size", 1))
        if isinstance(tp, int) and isinstance(pp, int) and each and tp * pp != each:
            says = f"tp_size {tp} x pp_size {pp} = {tp * pp}, but an engine has {each} GPUs"
            self._problem(f"{path}.tp_size", says, f"tp_size: {max(1, each // max(1, pp))}")
        return overrides

    def _check_kinds(self, path: str, groups: Collection[ServerGroup]) -> None:
        kinds = {group.worker_type for group in groups}
        if "regular" in kinds and kinds & {"prefill", "decode"}:
            self._problem(path, "mixes regular servers with prefill or decode servers; a router serves one kind")
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            if one in kinds and other not in kinds:
                self._problem(
                    path, f"has {one} servers but no {other} server, which the other half of a request needs"
                )
        if "encoder" in kinds and not kinds & {"regular", "prefill"}:
            self._problem(path, "has encoders but no regular or prefill server that would ask them")
        if groups and kinds == {"placeholder"}:
            self._problem(path, "has placeholders only, and a model needs a server")

    def _model_path(self, path: str, entry: Mapping, groups: Collection[ServerGroup]) -> str | None:
        default = entry.get("model_path") or self._a.hf_checkpoint
        paths = {group.overrides.get("model_path", default) for group in groups if group.worker_type != "placeholder"}
        if len(paths) > 1:
            shown = ", ".join(sorted(map(str, paths)))
            self._problem(path, f"its groups would serve different models: {shown}; make them models of their own")
        return next(iter(paths)) if len(paths) == 1 else default

    def _update_weights(self, path: str, entry: Mapping, name: Any, model_path: str | None) -> bool:
        given = entry.get("update_weights")
        if isinstance(given, bool):
            return given
        if given is not None:
            self._problem(f"{path}.update_weights", f"is {given!r}, must be true or false")
        follows = model_path == self._a.hf_checkpoint
        if not follows:
            self.notices.append(f"{name} serves {model_path}, not --hf-checkpoint: its weights stay as they are")
        return follows

    def _gpus(self, path: str, entry: Mapping, default: int | None) -> int | None:
        value = entry.get(path.rpartition(".")[2], default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._problem(path, f"is {value!r}, must be a number of GPUs >= 1")
            return None
        return value

    def _mapping(self, path: str, entry: Any, keys: tuple[str, ...]) -> bool:
        if not isinstance(entry, Mapping):
            self._problem(path, f"is {entry!r}, must map keys to values ({', '.join(keys)})")
            return False
        for key in entry:
            if key not in keys:
                self._problem(f"{path}.{key}", f"is unknown{_near(str(key), keys)}; keys: {', '.join(keys)}")
        return True

    def _problem(self, path: str, says: str, try_: str = "") -> None:
        self.problems.append(LayoutError((FLAG,), f"{path}: {says}", try_))


def _near(name: Any, names: Collection[str]) -> str:
    nearest = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
