"""A critic in the plan: no GPUs of its own, but memory beside the actor's on the same devices and hosts."""

import pytest

from slime.plan.command import plan_of
from slime.plan.memory import PROCESS_HOST, SLEEPING_TRAINER

RUN = (
    "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --use-rotary-position-embeddings "
    "--position-embedding-type rope --hf-checkpoint /nowhere/Qwen3-4B --prompt-data /nowhere/p.jsonl --num-rollout 10 "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 9216 --rm-type math --label-key label "
    "--tensor-model-parallel-size 2 --sequence-parallel --rollout-num-gpus-per-engine 2"
).split()
APART = ("--rollout-num-gpus", "8")
PPO = ("--advantage-estimator", "ppo")


def both(*where: str):
    """The plans of the same run without and with a critic."""
    return [plan_of([*RUN, *where, *more], environ={})[0] for more in ((), PPO)]


@pytest.mark.parametrize("where", [("--colocate",), APART], ids=["colocated", "apart"])
def test_a_critic_sleeps_on_the_actors_gpus(where):
    grpo, ppo = both(*where)
    assert ppo.verdict == "starts" and ppo.cluster == grpo.cluster
    for without, with_critic in zip(grpo.phases, ppo.phases, strict=True):
        shared = with_critic.name != "generation" or "--colocate" in where
        assert with_critic.bytes - without.bytes == (SLEEPING_TRAINER if shared else 0), with_critic
    alone = 2 * grpo.host.offload if "--colocate" in where else 0
    assert ppo.host.offload > 0 and alone in (0, ppo.host.offload)
    assert ppo.host.processes - grpo.host.processes == 8 * PROCESS_HOST
    assert ppo.host.replicas == grpo.host.replicas


def test_a_critic_that_stays_awake_holds_what_an_actor_holds_between_steps():
    _, ppo = both("--colocate", "--no-offload-train")
    training = next(phase for phase in ppo.phases if phase.name == "training")
    assert dict(training.parts)["critic_beside"] == max(rank.resident for rank in ppo.training)
