"""Weights under names on the host: restoring gives back exactly what was there, and a backup is a copy."""

import pytest
import torch

from slime.backends.megatron_utils.tensor_backuper import TensorBackuper


def test_backup_and_restore_are_exact_and_independent():
    live = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16)}
    first = {name: tensor.clone() for name, tensor in live.items()}
    backuper = TensorBackuper(lambda: live.items(), pin=False)
    backuper.backup("actor")
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.add_(1)
    backuper.backup("ref")
    backuper.restore("actor")
    assert all(torch.equal(live[name], first[name]) for name in live)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses  # in place: optimizers hold views
    assert all(torch.equal(backuper.get("ref")[name], first[name] + 1) for name in live)
    assert backuper.tags == ("actor", "ref")


def test_an_unknown_tag_is_an_error():
    with pytest.raises(KeyError):
        TensorBackuper(lambda: [], pin=False).restore("nowhere")
