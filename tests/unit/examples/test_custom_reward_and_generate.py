"""The example's two functions in a whole rollout against a server that answers like the router and an engine."""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.rollout import data_source, eval_rollout, generate_state
from slime.rollout.base_types import flatten_samples
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import convert_samples_to_train_data
from slime.utils.arguments import build_args
from slime.utils.async_utils import run
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.types import Sample
from tests.helpers.fake_generation_engine import FakeEngine, Reply
from tests.helpers.rollout_args import ListSource, rollout_args
from tools.make_quickstart import make_checkpoint, make_tokenizer

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "custom_reward_and_generate"
REWARD, GENERATE = f"{EXAMPLE}/reward.py:reward_func", f"{EXAMPLE}/generate.py:generate"
HINT = "<|user|>wrong, check your answer<|assistant|>"
TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Adder:
    """Answers a prompt with the texts it was given for it, one after the other (after HINT: the second)."""

    def __init__(self, answers: dict[str, list[str]]):
        self._answers = answers

    def __call__(self, input_ids: list[int], sampling_params: dict) -> Reply:
        turns = TOKENIZER.decode(input_ids).split("<|user|>")[1:]
        question = turns[0].split("<|assistant|>")[0]
        return Reply(ids(self._answers[question][len(turns) - 1]))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    for module in (generate_state, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: TOKENIZER)
    SingletonMeta.clear_all_instances()
    eval_rollout._datasets.clear()
    with FakeEngine(vocab_size=len(TOKENIZER)) as fake:
        yield fake
        run(close_http_client())
    SingletonMeta.clear_all_instances()


def group(index: int, question: str, label: str) -> list[Sample]:
    prompt = f"<|user|>{question}<|assistant|>"
    return [Sample(index=index, group_index=index, prompt=prompt, label=label)]


def rollout(engine: FakeEngine, groups: list[list[Sample]], **changes) -> list[Sample]:
    args = rollout_args(
        engine.url,
        custom_generate_function_path=GENERATE,
        custom_rm_path=REWARD,
        rollout_batch_size=len(groups),
        over_sampling_batch_size=len(groups),
        n_samples_per_prompt=1,
        rollout_max_response_len=4,
        **changes,
    )
    samples = flatten_samples(generate_rollout(args, 0, ListSource(groups)).samples)
    assert convert_samples_to_train_data(args, samples)["round_number"] == [
        s.metadata["round_number"] for s in samples
    ]
    return samples


def test_a_wrong_answer_gets_a_second_try_at_half_the_reward(engine):
    engine.reply = Adder(
        {"37+58=": ["95<|end|>"], "44+9=": ["63<|end|>", "53<|end|>"], "60+61=": ["1<|end|>", "131<|end|>"]}
    )
    right, corrected, wrong = rollout(
        engine, [group(0, "37+58=", "95"), group(1, "44+9=", "53"), group(2, "60+61=", "121")]
    )
    assert [s.reward for s in (right, corrected, wrong)] == pytest.approx([1.0, 0.5, 0.5 * 0.5 * 2 / 3])
    assert right.metadata["answers"] == ["95"] and corrected.metadata["answers"] == ["63", "53"]
    assert TOKENIZER.decode(right.tokens) == right.prompt + "95<|end|>"
    assert TOKENIZER.decode(corrected.tokens) == corrected.prompt + f"63<|end|>{HINT}53<|end|>"
    hint = len(ids(HINT))
    assert right.loss_mask == [1, 1, 1]
    assert corrected.loss_mask == [1, 1, 1] + [0] * hint + [1, 1, 1]
    assert corrected.rollout_log_probs[3 : 3 + hint] == [0.0] * hint and all(corrected.rollout_log_probs[:3])
    assert all(s.status is Sample.Status.COMPLETED for s in (right, corrected, wrong))
    assert len(engine.requests) == 1 + 2 + 2


def test_an_answer_that_was_cut_gets_no_second_try(engine):
    engine.reply = Adder({"37+58=": ["123456<|end|>"]})
    (sample,) = rollout(engine, [group(0, "37+58=", "95")])
    assert sample.status is Sample.Status.TRUNCATED and sample.metadata["answers"] == ["1234"]
    assert sample.reward == 0.0 and len(engine.requests) == 1


def test_an_evaluation_has_one_try(engine, tmp_path):
    """The hint gives the label away in part, so held-out rewards do not profit from it."""
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "44+9=", "label": "53"}\n')
    config = EvalDatasetConfig(
        "held_out", str(path), n_samples_per_eval_prompt=2, temperature=1.0, top_p=1.0, top_k=-1, max_response_len=4,
        input_key="prompt", label_key="label", metadata_key="metadata", apply_chat_template=True,
    )  # fmt: skip
    engine.reply = Adder({"44+9=": ["63<|end|>"]})
    args = rollout_args(
        engine.url, custom_generate_function_path=GENERATE, custom_rm_path=REWARD, eval_datasets=[config]
    )
    output = generate_rollout(args, 0, ListSource([]), evaluation=True)
    assert output.data["held_out"]["rewards"] == [0.25, 0.25] and len(engine.requests) == 2


def test_half_a_response_is_refused(engine):
    sample = group(0, "37+58=", "95")[0]
    sample.append_response_tokens(tokens=[9], log_probs=[-0.5], text="4")
    with pytest.raises(ValueError, match="sample 0 is half generated"):
        run(load_function(GENERATE)(rollout_args(engine.url), sample, {"max_new_tokens": 4}))


@pytest.mark.parametrize(
    "answer, label, value",
    [
        ("95", "95", 1.0),
        (" 95<|end|>", "95", 1.0),
        ("94", "95", 0.25),
        ("131", "121", 1 / 3),
        ("121", "95", 0.0),
        ("9", "95", 0.0),
        ("ninety", "95", 0.0),
        ("", "95", 0.0),
    ],
)
def test_credit_counts_right_digits_of_numbers_of_the_right_length(answer, label, value):
    reward = load_function(REWARD)
    sample = Sample(response=answer, label=label)
    assert run(reward(None, sample)) == pytest.approx(value)
    assert run(reward(None, [sample, Sample(response=label, label=label)])) == pytest.approx([value, 1.0])


def test_run_script_is_a_valid_command_line(tmp_path):
    """A stand-in for Python prints what it is given; the real parser and all checks accept it."""
    quickstart, python = tmp_path / "quickstart", tmp_path / "venv" / "bin" / "python"
    make_checkpoint(quickstart / "sft-hf", seed=1)
    for name in ("train", "heldout"):
        (quickstart / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    python.parent.mkdir(parents=True)
    python.write_text(f'#!{sys.executable}\nimport sys\nprint("\\0".join(sys.argv[1:]), end="")\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {
        "PATH": "/usr/bin:/bin",
        "SLIME_VENV": str(tmp_path / "venv"),
        "QUICKSTART": str(quickstart),
        "OUT": str(tmp_path / "out"),
    }
    command = ["bash", str(EXAMPLE / "run.sh"), "--lr", "1e-4"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    script, *argv = result.stdout.split("\0")
    args = build_args(argv, environ={})
    assert script == "train.py" and args.lr == 1e-4 and args.global_batch_size == 64 * 8
    assert callable(load_function(args.custom_rm_path)) and callable(load_function(args.custom_generate_function_path))

    environment["QUICKSTART"] = str(tmp_path / "elsewhere")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "run scripts/run-quickstart.sh first" in result.stderr
