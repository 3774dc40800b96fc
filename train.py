"""The synchronous loop: generate, train, save, push the weights, evaluate; again."""

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from slime.observability.logging_utils import configure_logging
from slime.observability.tracking import Tracking
from slime.plan.command import dry_run
from slime.ray.phases import Phases
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action

if TYPE_CHECKING:
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.rollout_client import RolloutClient

# Ray is imported inside functions: --help and mistakes in the arguments are answered without it.


def train(args: Namespace) -> None:
    """One run on the Ray cluster that this process is connected to."""
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models

    placements = create_placement_groups(args)
    manager, per_epoch = create_rollout_manager(args, placements["rollout"])
    if args.num_rollout is None:
        args = args.replace(num_rollout=args.num_epoch * per_epoch)
    tracking = Tracking(args)
    try:
        actor, critic, start_rollout_id = create_training_models(args, placements, manager)
        push_weights(args, manager, actor)
        models = [actor] if critic is None else [critic, actor]  # in this order: advantages need the critic's values

        eval_first = args.num_rollout == 0 or (start_rollout_id == 0 and not args.skip_eval_before_train)
        if args.eval_interval and eval_first:
            tracking.log(0, manager.eval(0), step_key="eval/step")  # eval/step counts the rollouts trained on before

        for rollout_id in range(start_rollout_id, args.num_rollout):
            phases = Phases()
            trained = models[:1] if rollout_id < args.num_critic_only_steps else models
            with phases("generate"):
                batch = manager.generate(rollout_id)
                if args.offload_rollout:
                    manager.offload()
            with phases("train"):
                metrics = dict(batch.metrics)
                for model in trained:
                    values = critic.values() if critic is not None and model is actor else None
                    metrics |= model.train(rollout_id, batch.data_refs, values)
            if should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout):
                with phases("save"):
                    # A checkpoint names itself the latest as its last act: what belongs to it must exist by then.
                    if args.rollout_global_dataset:
                        manager.save(rollout_id)
                    for model in trained:
                        metrics |= model.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
            with phases("sync"):
                if not args.offload_train:
                    for model in trained:
                        model.clear_memory()
                metrics |= push_weights(args, manager, actor)
            tracking.log(rollout_id, metrics | phases.metrics(), step_key="rollout/step")

            if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, args.num_rollout):
                tracking.log(rollout_id + 1, manager.eval(rollout_id), step_key="eval/step")

        for model in models:
            model.close()
        manager.dispose()
    except BaseException:
        tracking.close("failed")
        raise
    tracking.close("finished")


def push_weights(args: Namespace, manager: "RolloutClient", actor: "RayTrainGroup") -> dict[str, float]:
    """The engines generate with the trainer's weights afterwards. Returns metrics of the push."""
    if args.offload_rollout:
        manager.onload_weights()
    with manager.explaining_failures():
        metrics = actor.update_weights()
    if args.offload_rollout:
        manager.onload_kv()
    return metrics


if __name__ == "__main__":
    configure_logging()
    if "--dry-run" in sys.argv:
        sys.exit(dry_run())
    arguments = parse_args()
    if arguments.dry_run:  # told by --custom-config-path
        sys.exit(dry_run())

    from slime.ray.driver import run_driver

    sys.exit(run_driver(train, arguments))
