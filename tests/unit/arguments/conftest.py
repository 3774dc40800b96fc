"""A small legal command line, and the ways to run it: accepted with changes, or refused with problems."""

import json
from pathlib import Path

import pytest

from slime.utils.arguments import ArgumentsError, Reading, build_args, read_args

# Unequal sizes everywhere; 8 prompts x 4 responses = 32 per rollout, one optimizer step.
MODEL = {
    "--num-layers": "6",
    "--hidden-size": "48",
    "--num-attention-heads": "12",
    "--ffn-hidden-size": "100",
    "--norm-epsilon": "1e-6",
    "--rotary-base": "1000000",
    "--untie-embeddings-and-output-weights": None,
    "--group-query-attention": None,
    "--num-query-groups": "4",
}
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 250,
}


class CommandLineCase:
    """A legal command line in a scratch directory, run with flags changed, added or removed."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.hf = directory / "hf"
        self.hf.mkdir()
        self.write_config()
        (directory / "train.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
        self.flags = {
            "--accelerator": "cpu",
            "--hf-checkpoint": str(self.hf),
            "--prompt-data": str(directory / "train.jsonl"),
            "--num-rollout": "3",
            "--rollout-batch-size": "8",
            "--n-samples-per-prompt": "4",
            "--global-batch-size": "32",
            "--rollout-max-response-len": "16",
            "--actor-num-gpus-per-node": "2",
            "--rollout-num-gpus": "2",
            **MODEL,
        }

    def write_config(self, **changes) -> None:
        """Write the checkpoint's config.json with some values changed."""
        (self.hf / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))

    def megatron_checkpoint(self, name: str) -> str:
        """A directory that counts as a Megatron checkpoint."""
        path = self.directory / name
        path.mkdir()
        (path / "latest_checkpointed_iteration.txt").write_text("7")
        return str(path)

    def argv(self, *more: str, without: tuple[str, ...] = (), **changed: object) -> list[str]:
        """Tokens: `changed` sets or removes (None) flags by dest name, `more` is appended as it is."""
        flags = {flag: value for flag, value in self.flags.items() if flag not in without}
        for dest, value in changed.items():
            flags["--" + dest.replace("_", "-")] = None if value is True else str(value)
        tokens = [token for flag, value in flags.items() for token in ((flag,) if value is None else (flag, value))]
        return [*tokens, *more]

    def args(self, *more: str, environ: dict | None = None, **changed):
        """Parse; the command line must be legal."""
        return build_args(self.argv(*more, **changed), environ=environ or {})

    def reading(self, *more: str, dry_run: bool = False, without: tuple[str, ...] = (), **changed) -> Reading:
        """Parse without asking whether the command line is legal."""
        return read_args(self.argv(*more, without=without, **changed), environ={}, dry_run=dry_run)

    def problems(self, *more: str, **changed) -> list:
        """Parse; the command line must be refused. Returns the problems."""
        with pytest.raises(ArgumentsError) as caught:
            self.args(*more, **changed)
        return caught.value.problems

    def only_problem(self, *more: str, **changed) -> str:
        """Parse; there must be exactly one problem. Returns its text."""
        problems = self.problems(*more, **changed)
        assert len(problems) == 1, [str(problem) for problem in problems]
        return str(problems[0])


@pytest.fixture
def case(tmp_path) -> CommandLineCase:
    return CommandLineCase(tmp_path)
