"""The data source: order over epochs, groups given back, and a resume that goes on exactly where the run stopped."""

import pytest
import torch

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.utils.types import Sample
from tests.helpers.rollout_args import rollout_args, write_prompts

PROMPTS = [f"p{i}" for i in range(5)]
HERE = __name__


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *_, **__: None)


@pytest.fixture
def args(tmp_path):
    return rollout_args(
        prompt_data=write_prompts(tmp_path, PROMPTS),
        n_samples_per_prompt=2,
        save=str(tmp_path / "run"),
        rollout_shuffle=True,
    )


def drawn(source, n):
    return [(group[0].prompt, group[0].group_index, [s.index for s in group]) for group in source.get_samples(n)]


def test_groups_are_numbered_and_do_not_share_anything(args):
    args.rollout_shuffle = False
    source = RolloutDataSource(args)
    assert drawn(source, 2) == [("p0", 0, [0, 1]), ("p1", 1, [2, 3])]
    (group,) = source.get_samples(1)
    group[0].metadata["x"] = 1
    group[0].tokens.append(1)
    assert group[1].metadata == {} and group[1].tokens == [] and len(source) == 5
    for _ in range(2):
        source.get_samples(5)
    assert all(s.metadata == {} for g in source.get_samples(5) for s in g)


def test_one_call_may_go_through_several_epochs(args):
    """Twelve prompts of a dataset of five: two whole epochs, each a different permutation, and two more; drawn at once
    or one by one.
    """
    at_once = drawn(RolloutDataSource(args), 12)
    single = RolloutDataSource(args)
    assert [drawn(single, 1)[0] for _ in range(12)] == at_once
    prompts = [prompt for prompt, *_ in at_once]
    assert sorted(prompts[:5]) == sorted(prompts[5:10]) == PROMPTS
    assert prompts[:5] != prompts[5:10] and single.epoch_id == 2 and single.sample_offset == 2


def test_without_prompts_samples_are_empty():
    source = RolloutDataSource(rollout_args(n_samples_per_prompt=2))
    assert source.get_samples(1) == [[Sample(index=0, group_index=0), Sample(index=1, group_index=0)]]
    assert len(source) == 0


def test_what_is_given_back_comes_first(args):
    source = RolloutDataSourceWithBuffer(args)
    first = source.get_samples(3)
    source.add_samples(first[1:])
    assert source.get_buffer_length() == 2
    again = source.get_samples(3)
    assert again[:2] == first[1:] and again[2][0].group_index == 3 and source.get_buffer_length() == 0


def test_only_whole_groups_are_taken_back(args):
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(ValueError, match="--n-samples-per-prompt 2 samples, got 1"):
        source.add_samples([[Sample()]])
    with pytest.raises(NotImplementedError, match="RolloutDataSourceWithBuffer"):
        RolloutDataSource(args).add_samples([])


def last_first(args, rollout_id, buffer, num_samples):
    assert rollout_id is None
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def too_many(args, rollout_id, buffer, num_samples):
    return buffer


def test_buffer_filter(args):
    args.buffer_filter_path = f"{HERE}.last_first"
    source = RolloutDataSourceWithBuffer(args)
    a, b, c = source.get_samples(3)
    source.add_samples([a, b, c])
    assert source.get_samples(2) == [c, b]
    args.buffer_filter_path = f"{HERE}.too_many"
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(3))
    with pytest.raises(ValueError, match="returned 3 groups, at most 2"):
        source.get_samples(2)
    buffer = [[1], [2], [3]]
    assert pop_first(args, None, buffer, 2) == [[1], [2]] and buffer == [[3]]


def test_resume_is_exact(args):
    """After any number of draws and returns, a new source that loads the state goes on with the very same samples."""
    source = RolloutDataSourceWithBuffer(args)
    group = source.get_samples(7)[6]
    group[0].tokens = [1, 2, 3]
    group[0].append_response_tokens(tokens=[4], log_probs=[-0.3], text="x")
    group[0].status = Sample.Status.ABORTED
    group[1].rollout_routed_experts = torch.zeros(0, 2, 2, dtype=torch.int32)
    group[1].tokens = [9]
    group[1].custom_attribute = {"plain": (1, 2)}
    source.add_samples([group, [[Sample(index=90, rollout_id=1), Sample(index=91, rollout_id=1)], Sample(index=92)]])
    source.update_metadata({"round": 3})
    source.save(11)

    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(11)
    assert resumed.get_metadata() == {"round": 3}
    a, b = source.get_samples(9), resumed.get_samples(9)
    assert str(a) == str(b) and b[0][0].rollout_log_probs == [-0.3] and b[0][1].custom_attribute == {"plain": (1, 2)}
    assert [len(m) if isinstance(m, list) else 1 for m in b[1]] == [2, 1]
    assert drawn(source, 20) == drawn(resumed, 20)


def test_state_is_written_aside_and_renamed(args, monkeypatch, tmp_path):
    """A write that breaks off leaves the previous state and no rubbish."""
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(2)
    source.save(0)
    source.get_samples(2)

    def broken(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr("slime.rollout.debug_dump.os.fsync", broken)
        source.save(0)
    assert [p.name for p in (tmp_path / "run/rollout").iterdir()] == ["global_dataset_state_dict_0.pt"]
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.sample_offset == 2


def test_a_fresh_start_loads_nothing_and_a_missing_state_is_said(args, caplog, tmp_path):
    source = RolloutDataSource(args)
    source.load(-1)
    source.load(None)
    assert caplog.text == ""
    args.load = str(tmp_path / "elsewhere")
    source.load(3)
    assert "no data source state for rollout 3" in caplog.text and "elsewhere" in caplog.text
    assert source.sample_offset == 0


def test_another_dataset_on_resume_is_said(args, caplog, tmp_path):
    source = RolloutDataSource(args)
    source.get_samples(4)
    source.save(0)
    args.prompt_data = write_prompts(tmp_path, ["a", "b", "c"])
    resumed = RolloutDataSource(args)
    resumed.load(0)
    assert "saved with 5 prompts and now has 3" in caplog.text
    assert len(resumed.get_samples(2)) == 2
