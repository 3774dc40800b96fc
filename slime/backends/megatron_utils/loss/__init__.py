"""Training mathematics: log-probabilities, advantages and losses on packed, parallel micro-batches.

The names below are the ones trainers and plug-ins import.
"""

from slime.backends.megatron_utils.loss.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.loss.corrections import icepop_function, vanilla_tis_function
from slime.backends.megatron_utils.loss.dispatch import NonFiniteLossError, loss_function
from slime.backends.megatron_utils.loss.kl import compute_approx_kl
from slime.backends.megatron_utils.loss.log_probs import get_log_probs_and_entropy, get_values
from slime.backends.megatron_utils.loss.policy import policy_loss_function
from slime.backends.megatron_utils.loss.supervised import sft_loss_function, value_loss_function

__all__ = [
    "NonFiniteLossError",
    "compute_advantages_and_returns",
    "compute_approx_kl",
    "get_log_probs_and_entropy",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]
