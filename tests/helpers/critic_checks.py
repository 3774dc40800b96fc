"""Checks of a critic on one rank that share one process; each `check_*` takes (hf directory, scratch directory)."""

import math
import traceback
from pathlib import Path
from typing import Any

from tests.helpers.critic_runs import PPO, critic_args, open_role, share_of, stored_weights, train
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.trainer import make_rollout, trainer_args
from tests.helpers.trainer_runs import hf_weights

NORM = "decoder.final_layernorm.weight"
# Megatron cannot save the state of an optimizer that has made no step.
WEIGHTS = "--no-save-optim"
HEAD = {"output_layer.weight", "output_layer.bias"}


def check_names() -> list[str]:
    return [name for name in globals() if name.startswith("check_") and name != "check_names"]


def run_checks(rank: int, world_size: int, hf: str, scratch: str) -> dict[str, str | None]:
    """Traceback (or None) of every check."""
    results = {}
    for name in check_names():
        directory = Path(scratch) / name
        directory.mkdir()
        try:
            globals()[name](hf, directory)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    return results


def check_values_loss_and_gradient_equal_transformers(hf: str, scratch: Path) -> None:
    """One rollout, one step: V of a token is w h + b at the position before it; the returns are naive GAE's, the loss
    the mean over samples of each one's masked mean of (V - R)^2, and its gradient reaches the whole model."""
    import torch

    with open_role(critic_args(hf, **(PPO | {"global_batch_size": 8, "lr": 0.0}))) as critic:
        head = critic._state.model[0].module.output_layer
        weight, bias = head.weight.detach().double(), head.bias.detach().double()
        assert bias == 0 and 0.01 < weight.std() < 0.03
        (metrics,), kept = train(critic, range(1))
        order = share_of(critic, 0)["partition"]
    data = make_rollout(0, without_response=7)
    values, loss, norm = reference_step(hf, data, weight, bias)
    for index, got in zip(order, kept[0]["values"], strict=True):
        assert str(got.dtype) == "float32" and len(got) == data["response_lengths"][index]
        torch.testing.assert_close(torch.from_numpy(got).double(), values[index], rtol=0, atol=1e-5)
    assert math.isclose(metrics["train/critic-value_loss"], loss, rel_tol=1e-5)
    assert math.isclose(metrics["train/critic-grad_norm"], norm, rel_tol=1e-4)
    assert metrics["train/critic-value_clipfrac"] == 0 and math.isfinite(metrics["rollout/returns"])


def reference_step(hf: str, data: dict[str, Any], weight: Any, bias: Any) -> tuple[list[Any], float, float]:
    """(values, loss, norm of its gradient) in float64 by transformers, sample by sample."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64).eval()
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    leaves += [parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"]
    values, loss = [], torch.zeros((), dtype=torch.float64)
    for tokens, n, mask, reward in zip(
        data["tokens"], data["response_lengths"], data["loss_masks"], data["rewards"], strict=True
    ):
        hidden = model.model(tokens[None]).last_hidden_state[0]
        value = (hidden @ weight.T + bias)[len(tokens) - n - 1 : -1, 0]
        values.append(value.detach())
        returns = naive_returns(value.tolist(), mask.tolist(), reward)
        terms = [(value[t] - returns[t]) ** 2 for t in range(n) if mask[t]]
        loss = loss + sum(terms) / max(len(terms), 1) / len(data["tokens"])
    gradients = torch.autograd.grad(loss, leaves)
    return values, float(loss), math.sqrt(sum(float(g.square().sum()) for g in gradients))


def naive_returns(values: list[float], mask: list[int], reward: float) -> list[float]:
    """A + V, the reward on the last unmasked token, masked tokens left out of the recurrence."""
    actions = [t for t, unmasked in enumerate(mask) if unmasked]
    returns, running, following = list(values), 0.0, 0.0
    for t in reversed(actions):
        got = reward if t == actions[-1] else 0.0
        running = got + PPO["gamma"] * following - values[t] + PPO["gamma"] * PPO["lambd"] * running
        following, returns[t] = values[t], running + values[t]
    return returns


def check_the_value_loss_falls(hf: str, scratch: Path) -> None:
    settings = PPO | {"global_batch_size": 8, "lr": 3e-3, "value_clip": 10.0, "lambd": 1.0, "gamma": 1.0}
    with open_role(critic_args(hf, **settings)) as critic:
        share = share_of(critic, 0)
        metrics = [critic.train(i, share) for i in range(25)]
    losses = [row["train/critic-value_loss"] for row in metrics]
    assert losses[-1] < 0.2 * losses[0], losses
    assert all(isinstance(value, float) for value in metrics[-1].values())
    for phase in ("train", "values", "critic_train", "train_wait", "data_preprocess"):
        assert metrics[-1][f"perf/critic-{phase}_time"] > 0, phase
    names = {name for name in metrics[-1] if name.startswith(("train/", "perf/"))}
    assert all(name.split("/")[1].startswith("critic-") for name in names), names


def check_the_head_trains_whatever_is_frozen(hf: str, scratch: Path) -> None:
    """Lists that freeze parameters are written for the actor's model, and a head of random values is of no use."""
    import numpy as np

    for lists, trained in (
        ({"only_train_params_name_list": ["no_such_parameter"]}, HEAD),
        (
            {"freeze_params_name_list": ["embedding", "layers", "output_layer"]},
            HEAD | {"decoder.final_layernorm.weight"},
        ),
    ):
        weights = []
        for rollouts in (0, 2):
            save = str(scratch / f"{len(trained)}_{rollouts}")
            with open_role(critic_args(hf, WEIGHTS, save=save, **(PPO | lists))) as critic:
                train(critic, range(rollouts))
                critic.save_model(0)
            weights.append(stored_weights(Path(save) / "iter_0000000"))
        before, after = weights
        assert {name for name in before if not np.array_equal(before[name], after[name])} == trained


def check_it_starts_from_an_actors_checkpoint(hf: str, scratch: Path) -> None:
    """The body is the actor's, the head new; as a resumed critic such a checkpoint is refused. Also when the actor's
    output layer is its embedding."""
    import numpy as np

    for name in ("qwen3", "qwen3_tied"):
        model = hf if name == "qwen3" else str(make_tiny_model(name, scratch))
        save = str(scratch / f"{name}_actor")
        with open_role(trainer_args(name, model, save=save, lr=0.1)) as actor:
            train(actor, range(1))
            actor.save_model(0)
            expected = stored_weights(Path(save) / "iter_0000000")
            assert not HEAD & expected.keys() - {"output_layer.weight"}
        mine = str(scratch / f"{name}_critic")
        with open_role(critic_args(model, WEIGHTS, load=save, save=mine, finetune=True, **PPO)) as critic:
            assert critic.start_rollout_id == 0
            critic.save_model(0)
            got = stored_weights(Path(mine) / "iter_0000000")
        with open_role(critic_args(model, WEIGHTS, save=f"{mine}_new", **PPO)) as critic:
            critic.save_model(0)
            new = stored_weights(Path(f"{mine}_new") / "iter_0000000")
        assert got.keys() == expected.keys() | HEAD
        for key, value in got.items():
            assert np.array_equal(value, new[key] if key in HEAD else expected[key]), key
        assert not np.array_equal(got[NORM], new[NORM])
        error = error_of(ValueError, open_role(critic_args(model, load=save, **PPO)).__enter__)
        assert "no value head" in error and "finetune" in error
        shut_down()


def check_it_resumes_exactly(hf: str, scratch: Path) -> None:
    """Head, optimizer and schedule go on as if nothing had happened; with finetune the head comes along, and a new
    optimizer."""
    import numpy as np

    save = str(scratch / "critic")
    settings = PPO | {"save": save, "load": save}
    decay = ("--lr-decay-style", "linear", "--lr-decay-iters", "20")
    with open_role(critic_args(hf, *decay, **settings)) as critic:
        train(critic, range(2))
        critic.save_model(1)
        expected = train(critic, range(2, 4))[0]
    with open_role(critic_args(hf, *decay, **settings)) as critic:
        assert critic.start_rollout_id == 2
        assert train(critic, range(2, 4))[0] == expected
    again = str(scratch / "again")
    with open_role(critic_args(hf, WEIGHTS, *decay, **(settings | {"save": again, "finetune": True}))) as critic:
        assert critic.start_rollout_id == 0
        critic.save_model(0)
    saved, loaded = (stored_weights(Path(save) / "iter_0000001"), stored_weights(Path(again) / "iter_0000000"))
    assert all(np.array_equal(saved[key], loaded[key]) for key in saved)


def check_the_actor_learns_from_values_and_exports_no_head(hf: str, scratch: Path) -> None:
    """Without a critic's values PPO cannot go on; with them the reference's KL penalty is in the actor's returns."""
    with open_role(critic_args(hf, **PPO)) as critic:
        (of_critic,), kept = train(critic, range(1))
    for kl_coef in (0.0, 0.5):
        args = trainer_args("qwen3", hf, kl_coef=kl_coef, ref_load=hf, **(PPO | {"global_batch_size": 8}))
        with open_role(args, with_ref=kl_coef > 0) as actor:
            (first,), _ = train(actor, range(1), kept)
            (second,), _ = train(actor, range(1), kept)
            assert first["rollout/values"] == of_critic["rollout/values"]
            assert math.isclose(first["rollout/returns"], of_critic["rollout/returns"], abs_tol=1e-6)
            assert (second["rollout/returns"] == first["rollout/returns"]) == (kl_coef == 0)
            assert "lm_head.weight" in hf_weights(actor)
            if kl_coef == 0:
                assert "values" in error_of(ValueError, actor.train, 0, share_of(actor, 0))


def check_roles_and_losses_belong_together(hf: str, scratch: Path) -> None:
    from slime.backends.megatron_utils.actor import MegatronTrainer

    for role, args in (("critic", trainer_args("qwen3", hf)), ("actor", critic_args(hf)), ("judge", critic_args(hf))):
        assert repr(role) in error_of(ValueError, MegatronTrainer, args, role)
    with open_role(critic_args(hf, **(PPO | {"num_rollout": 0}))) as critic:
        assert "--num-rollout" in error_of(ValueError, critic.train, 0, share_of(critic, 0))


def shut_down() -> None:
    """After a constructor that failed when Megatron was up; a process would end there."""
    from slime.backends.megatron_utils.initialize import shutdown_megatron

    shutdown_megatron()


def error_of(kind: type[Exception], function: Any, *args: Any) -> str:
    """The message of the error that function raises; AssertionError when it raises none of this kind."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised no {kind.__name__}")
