"""Puts trainers and engines on devices and starts both: the placement group, its order, and who sits where.

Imports stay light (no torch): the driver loads this before anything else.
"""

import ipaddress
import logging
import socket
from argparse import Namespace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from slime.ray.actor_group import RayTrainGroup
from slime.ray.cluster import explain_slots, slots
from slime.ray.placement import Placement
from slime.ray.rollout_client import RolloutClient
from slime.ray.utils import add_default_ray_env_vars, wait_for

logger = logging.getLogger(__name__)


def create_placement_groups(args: Namespace) -> dict[str, Placement]:
    """The slots of the trainers ("actor"; a "critic" shares them) and of the engines ("rollout"), in one group.

    Raises TimeoutError if Ray has enough devices in all but does not hand them over within args.ray_startup_timeout.
    """
    total, offset = slots(args)
    everything = _reserve(args, total)
    trains = not args.debug_rollout_only
    generates = not (args.debug_train_only or args.load_debug_rollout_data)
    trainers = everything.part(0, args.actor_num_nodes * args.actor_num_gpus_per_node if trains else 0)
    return {
        "actor": trainers,
        "critic": trainers,
        "rollout": everything.part(offset, (args.rollout_num_gpus or 0) if generates else 0),
    }


def create_rollout_manager(args: Namespace, placement: Placement) -> tuple[RolloutClient, int | None]:
    """Starts the rollout manager, which begins to start its engines at once, without waiting for them.

    Returns (manager, rollouts per epoch); the second is None when --num-rollout fixes the number of rollouts.
    """
    manager = RolloutClient(args, placement)
    return manager, None if args.num_rollout is not None else manager.get_num_rollout_per_epoch()


def create_training_models(
    args: Namespace, placements: dict[str, Placement], manager: RolloutClient
) -> tuple[RayTrainGroup, RayTrainGroup | None, int]:
    """Starts the trainers, waits for them and for the engines, and introduces them to each other.

    Returns (actor, critic or None, id of the first rollout to run). Trainers and engines start side by side, except
    where they share GPUs: there an engine sizes its cache by the free memory, so it goes first and then makes room,
    and a critic starts once the actor has made room.

    Raises ValueError when actor and critic do not fit: other layouts, or checkpoints of other rollouts.
    """
    shares_gpus = args.colocate and args.accelerator == "cuda"
    if shares_gpus:
        manager.wait_until_started()
        if args.offload_rollout:
            manager.offload()
    with_ref = args.kl_coef != 0 or args.use_kl_loss
    actor = RayTrainGroup(args, placements["actor"], role="actor", with_ref=with_ref)
    critic = _critic(args, placements)
    waited_for = actor.start() | ({} if shares_gpus else manager.starting())
    if critic is not None and args.accelerator == "cpu":
        waited_for |= critic.start()
    started = wait_for(waited_for, "starting trainers and engines")
    loaded_rollout_id = actor.started(started)
    if critic is not None:
        if args.accelerator == "cuda":
            started = wait_for(critic.start(), "starting the critic")
        loaded_rollout_id = _first_rollout(args, loaded_rollout_id, critic.started(started))
        if critic.parallel_config != actor.parallel_config:
            raise ValueError(
                f"the actor is laid out as {actor.parallel_config}, the critic as {critic.parallel_config}: "
                "take what differs out of the critic's overrides in --megatron-config-path"
            )
    start_rollout_id = loaded_rollout_id if args.start_rollout_id is None or critic else args.start_rollout_id

    if actor.parallel_config is not None:
        manager.set_train_parallel_config(actor.parallel_config)
    if args.rollout_global_dataset and start_rollout_id > 0:
        manager.load(start_rollout_id - 1)
    actor.connect_engines(manager.engines())
    return actor, critic, start_rollout_id


def _critic(args: Namespace, placements: dict[str, Placement]) -> RayTrainGroup | None:
    """The critic's trainers, if there is one and it trains; not started."""
    if args.critic_args is None or args.num_rollout == 0 or args.debug_rollout_only:
        return None
    settings = args.critic_args.replace(num_rollout=args.num_rollout)  # epochs have become rollouts by now
    return RayTrainGroup(settings, placements["critic"], role="critic")


def _first_rollout(args: Namespace, actor: int, critic: int) -> int:
    """The first rollout to run, by the first ones that the roles would train on by their checkpoints.

    One of them may be new: the critic, or the actor as long as only the critic trains. Raises ValueError otherwise.
    """
    if actor == critic or critic == 0 or (actor == 0 and critic <= args.num_critic_only_steps):
        return max(actor, critic)
    raise ValueError(
        f"the actor's checkpoint continues at rollout {actor}, the critic's at {critic} (--num-critic-only-steps "
        f"{args.num_critic_only_steps}): give both a checkpoint of the same rollout (--ckpt-step, or load and "
        "ckpt_step of the roles in --megatron-config-path), or say where to continue with --start-rollout-id"
    )


def sort_key(node: str, gpu_id: int | str) -> tuple:
    """Orders slots by node address, then device, both as numbers: device 2 before 10, 10.0.0.9 before 10.0.0.10.

    A node known by name is resolved; failing that, its characters are its number.
    """
    try:
        address = tuple(ipaddress.ip_address(node).packed)
    except ValueError:
        try:
            address = tuple(ipaddress.ip_address(socket.gethostbyname(node)).packed)
        except OSError:
            address = tuple(ord(character) for character in node)
    device = (0, int(gpu_id), "") if str(gpu_id).isdecimal() else (1, 0, str(gpu_id))
    return (address, device)


def _reserve(args: Namespace, total: int) -> Placement:
    if total == 0:
        return Placement(None, (), (), ())
    cuda = args.accelerator == "cuda"
    pg = placement_group([{"GPU": 1, "CPU": 1} if cuda else {"CPU": 1}] * total, strategy="PACK")
    if not pg.wait(timeout_seconds=args.ray_startup_timeout):
        kind = "GPU" if cuda else "CPU"
        have, free = (int(view().get(kind, 0)) for view in (ray.cluster_resources, ray.available_resources))
        raise TimeoutError(
            f"Ray did not hand over {total} {kind}s ({explain_slots(args)}) within {args.ray_startup_timeout:g} s: "
            f"it has {have}, {free} of them free; end the run that holds the others, or raise --ray-startup-timeout"
        )
    found = _probe_gpus(pg, total, args.ray_startup_timeout) if cuda else _number_cpus(pg, total)
    order = sorted(range(total), key=lambda bundle: sort_key(*found[bundle]))
    nodes, gpu_ids = zip(*(found[bundle] for bundle in order), strict=True)
    logger.info("slots: %s", ", ".join(f"{node}/{gpu_id}" for node, gpu_id in zip(nodes, gpu_ids, strict=True)))
    return Placement(pg, tuple(order), gpu_ids, nodes)


def _number_cpus(pg: PlacementGroup, total: int) -> list[tuple[str, int]]:
    """(node address, number on that node) of each bundle; CPUs have no ids, so they are counted."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of_bundle = placement_group_table(pg)["bundles_to_node_id"]
    counts: dict[str, int] = {}
    found = []
    for bundle in range(total):
        node = addresses[node_of_bundle[bundle]]
        found.append((node, counts.get(node, 0)))
        counts[node] = counts.get(node, 0) + 1
    return found


class _Probe:
    def where(self) -> tuple[str, int | str]:
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()[0]


def _probe_gpus(pg: PlacementGroup, total: int, timeout: float) -> list[tuple[str, int | str]]:
    """(node address, physical GPU id) of each bundle, asked by a short-lived actor on each."""
    environment = {"env_vars": add_default_ray_env_vars("cuda")}
    everything = Placement(pg, tuple(range(total)), tuple(range(total)), ("",) * total)
    probes = [
        ray.remote(_Probe)
        .options(num_gpus=1, num_cpus=0, runtime_env=environment, scheduling_strategy=everything.strategy(bundle))
        .remote()
        for bundle in range(total)
    ]
    refs = {f"bundle {bundle}": probe.where.remote() for bundle, probe in enumerate(probes)}
    found = wait_for(refs, "asking each bundle for its GPU", timeout=max(timeout, 120.0))
    for probe in probes:
        ray.kill(probe)
    return list(found.values())
