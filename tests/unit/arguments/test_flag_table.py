"""The command line is a contract: every flag with its type and default, held against a list written independently."""

import argparse

import pytest

from slime.utils.arguments.flag import Flag, json_object
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import OWNED_SGLANG_FIELDS, load_tables

# flag, type, default. Types: int, float, str; `switch` (False unless given), `tri` (--x / --no-x, None unless given),
# `off DEST` (turns DEST from True to False), `json`; `type+` takes one or more values, `type*` any number, `type each`
# may be repeated; a|b is a choice. Default `-` is None, `required` has to be given.
CONTRACT = """
--actor-num-nodes                 int                1
--actor-num-gpus-per-node         int                8
--rollout-num-gpus                int                -
--rollout-num-gpus-per-engine     int                1
--num-gpus-per-node               int                8
--colocate                        switch             False
--offload                         switch             False
--offload-train                   tri                -
--offload-rollout                 tri                -
--distributed-backend             nccl|gloo          nccl
--distributed-timeout-minutes     int                10

--train-backend                   megatron           megatron
--qwen-gdn-backend                fla|flashqla       fla
--train-env-vars                  json               {}
--update-weight-mode              full|delta         full
--update-weight-transport         nccl|disk          nccl
--release-train                   switch             False
--update-weight-disk-dir          str                -
--update-weight-disk-keep-files   switch             False
--update-weight-delta-encoding    xor|overwrite      xor
--update-weight-delta-checksum    xxh3-128|blake3|adler32 xxh3-128
--custom-update-weight-post-write-path str           -
--update-weight-local-checkpoint-dir str             -
--custom-model-provider-path      str                -
--recompute-loss-function         switch             False
--log-probs-chunk-size            int                -1
--only-train-params-name-list     str*               -
--freeze-params-name-list         str*               -
--freeze-indexer                  switch             False
--allgather-cp                    switch             False

--hf-checkpoint                   str                -
--model-name                      str                -
--rollout-function-path           str                slime.rollout.sglang_rollout.generate_rollout
--rollout-temperature             float              1.0
--rollout-top-p                   float              1.0
--rollout-top-k                   int                -1
--rollout-max-context-len         int                -
--rollout-max-prompt-len          int                -
--rollout-max-response-len        int                -
--rollout-skip-special-tokens     switch             False
--rollout-stop                    str+               -
--rollout-stop-token-ids          int+               -
--rollout-shuffle                 switch             False
--rollout-seed                    int                42
--over-sampling-batch-size        int                -
--dynamic-sampling-filter-path    str                -
--partial-rollout                 switch             False
--mask-offpolicy-in-partial-rollout switch           False
--custom-generate-function-path   str                -
--rollout-sample-hook-path        str each           []
--custom-rollout-log-function-path str               -
--custom-eval-rollout-log-function-path str          -
--buffer-filter-path              str                -
--update-weight-buffer-size       int                536870912
--update-weights-interval         int                1
--keep-old-actor                  switch             False
--rollout-data-postprocess-path   str                -
--rollout-data-transport          object-store|nixl  object-store
--rollout-external-engine-addrs   str+               -

--use-fault-tolerance             switch             False
--rollout-health-check-interval   float              30.0
--rollout-health-check-timeout    float              30.0
--rollout-health-check-first-wait float              0.0

--num-rollout                     int                -
--num-epoch                       int                -
--disable-rollout-global-dataset  off rollout_global_dataset True
--data-source-path                str                slime.rollout.data_source.RolloutDataSourceWithBuffer
--prompt-data                     str                -
--apply-chat-template             switch             False
--apply-chat-template-kwargs      json               {}
--input-key                       str                input
--label-key                       str                -
--multimodal-keys                 json               -
--metadata-key                    str                metadata
--tool-key                        str                tools
--start-rollout-id                int                -
--rollout-batch-size              int                required
--n-samples-per-prompt            int                1
--global-batch-size               int                -
--num-steps-per-rollout           int                -
--micro-batch-size                int                1
--balance-data                    switch             False
--balance-by-flops                switch             False
--use-dynamic-batch-size          switch             False
--max-tokens-per-gpu              int                -
--log-probs-max-tokens-per-gpu    int                -

--eval-function-path              str                -
--eval-interval                   int                -
--eval-prompt-data                str+               -
--eval-config                     str                -
--skip-eval-before-train          switch             False
--eval-input-key                  str                -
--eval-label-key                  str                -
--eval-tool-key                   str                -
--n-samples-per-eval-prompt       int                1
--eval-temperature                float              -
--eval-top-p                      float              -
--eval-top-k                      int                -
--eval-max-response-len           int                -
--eval-max-prompt-len             int                -
--eval-min-new-tokens             int                -
--eval-max-context-len            int                -

--ref-load                        str                -
--ref-ckpt-step                   int                -
--load                            str                -
--save                            str                -
--save-interval                   int                -
--async-save                      switch             False
--no-save-optim                   switch             False
--save-hf                         str                -
--seed                            int                1234
--clip-grad                       float              1.0
--calculate-per-token-loss        switch             False
--lr                              float              1e-06
--num-critic-only-steps           int                0
--megatron-config-path            str                -
--eps-clip                        float              0.2
--eps-clip-high                   float              -
--eps-clip-c                      float              -
--value-clip                      float              0.2
--kl-coef                         float              0.0
--loss-type                       policy_loss|sft_loss|custom_loss policy_loss
--custom-loss-function-path       str                -
--kl-loss-type                    k1|k2|k3|low_var_kl k1
--advantage-estimator             grpo|gspo|cispo|reinforce_plus_plus|reinforce_plus_plus_baseline|ppo grpo
--disable-compute-advantages-and-returns off compute_advantages_and_returns True
--custom-advantage-function-path  str                -
--use-kl-loss                     switch             False
--kl-loss-coef                    float              0.0
--use-unbiased-kl                 switch             False
--ref-update-interval             int                -
--entropy-coef                    float              0.0
--gamma                           float              1.0
--lambd                           float              1.0
--normalize-advantages            switch             False
--disable-grpo-std-normalization  off grpo_std_normalization True
--disable-rewards-normalization   off rewards_normalization True
--use-rollout-entropy             switch             False
--get-mismatch-metrics            switch             False
--reset-optimizer-states          switch             False
--use-stateless-adam              switch             False
--use-rollout-logprobs            switch             False
--use-tis                         switch             False
--tis-clip                        float              2.0
--tis-clip-low                    float              0.0
--custom-tis-function-path        str                -
--custom-pg-loss-reducer-function-path str           -
--use-routing-replay              switch             False
--use-rollout-routing-replay      switch             False
--use-opsm                        switch             False
--opsm-delta                      float              0.0001

--use-opd                         switch             False
--opd-type                        sglang|megatron    -
--opd-kl-coef                     float              1.0
--opd-teacher-load                str                -
--opd-teacher-ckpt-step           int                -

--use-wandb                       switch             False
--wandb-mode                      online|offline|disabled -
--wandb-dir                       str                -
--wandb-key                       str                -
--wandb-host                      str                -
--wandb-team                      str                -
--wandb-group                     str                -
--wandb-project                   str                -
--wandb-run-id                    str                -
--disable-wandb-random-suffix     off wandb_random_suffix True
--wandb-always-use-train-step     switch             False
--log-multi-turn                  switch             False
--log-passrate                    switch             False
--log-reward-category             str                -
--log-correct-samples             switch             False
--use-tensorboard                 switch             False
--tb-project-name                 str                -
--tb-experiment-name              str                -

--save-debug-rollout-data         str                -
--load-forge-rollout-data         str                -
--load-debug-rollout-data-subsample float            -
--save-debug-train-data           str                -
--dump-details                    str                -
--memory-snapshot-dir             str                .
--memory-snapshot-num-steps       int                -
--memory-recorder                 torch|memray       torch
--record-memory-history           switch             False
--profile-target                  train_overall|train_actor|train_log_probs+ ['train_overall']
--check-weight-update-equal       switch             False
--debug-rollout-only              switch             False
--debug-train-only                switch             False
--load-debug-rollout-data         str                -

--http-proxy                      str                -
--use-distributed-post            switch             False
--rm-type                         str                -
--reward-key                      str                -
--eval-reward-key                 str                -
--group-rm                        switch             False
--rm-url                          str                -
--custom-rm-path                  str                -
--custom-reward-post-process-path str                -
--custom-convert-samples-to-train-data-path str      -
--rollout-buffer-url              str                -
--fetch-trajectory-retry-times    int                -1
--rollout-task-type               str                math
--min-batch-collection-ratio      float              1.0
--loss-mask-type                  qwen|qwen3|qwen3_5|distill_qwen qwen
--data-pad-size-multiplier        int                128
--rollout-sample-filter-path      str                -
--rollout-all-samples-process-path str               -
--mtp-num-layers                  int                -
--mtp-loss-scaling-factor         float              0.2
--enable-mtp-training             switch             False
--ci-test                         switch             False
--ci-disable-kl-checker           switch             False
--ci-train-rollout-logprob-abs-diff-threshold float  0.1
--ci-save-grad-norm               str                -
--ci-load-grad-norm               str                -
--custom-megatron-init-path       str                -
--custom-megatron-before-log-prob-hook-path str      -
--custom-megatron-before-train-step-hook-path str    -
--megatron-deepgemm-forward-layers int+              -
--megatron-deepgemm-forward-modules str+             -
--megatron-deepgemm-moe-forward-layers int+          -
--megatron-deepgemm-moe-forward-modules str+         -
--custom-config-path              str                -
--padded-vocab-size               int                -

--sglang-router-ip                str                -
--sglang-router-port              int                -
--sglang-router-request-timeout-secs int             14400
--sglang-server-concurrency       int                512
--prefill-num-servers             int                -
--sglang-config                   str                -
"""

# Model descriptions that launch scripts pass and Megatron's own parser does not know.
SCRIPT_FLAGS = ("--post-self-attn-layernorm", "--post-mlp-layernorm", "--use-gated-attention")


def rows() -> list[tuple[str, str, str]]:
    found = []
    for line in filter(None, CONTRACT.splitlines()):
        flag, *kind, default = line.split()
        found.append((flag, " ".join(kind), default))
    return found


def described(flag: Flag) -> tuple[str, str]:
    """The row in the notation of the list above."""
    default = "required" if flag.required else "-" if flag.default is None else str(flag.default)
    if flag.kind in ("switch", "tristate", "off"):
        return {"switch": "switch", "tristate": "tri", "off": f"off {flag.dest}"}[flag.kind], default
    kind = "|".join(flag.choices) if flag.choices else {json_object: "json"}.get(flag.type) or flag.type.__name__
    return kind + (flag.nargs or "") + (" each" if flag.kind == "append" else ""), default


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return Grammar(load_tables())


@pytest.mark.parametrize(("option", "kind", "default"), rows(), ids=[row[0] for row in rows()])
def test_flag_has_its_type_and_default(grammar, option, kind, default):
    flag = grammar.slime_options[option]
    assert described(flag) == (kind, default)


def test_the_list_is_complete():
    """A flag that is neither in the list nor one of this project's own would be a typo in a table."""
    own = {
        *("--accelerator", "--ray-address", "--ray-startup-timeout", "--log-dir", "--fp32", "--skip-malformed-rows"),
        *("--metrics-jsonl", "--progress", "--rollout-stall-timeout", "--engine-start-timeout", *SCRIPT_FLAGS),
    }
    listed = {row[0] for row in rows()}
    flags = {flag.name for group in GROUPS if group.name != "plan" for flag in group.flags}
    assert flags == listed | own
    assert len(listed) == len(rows()) == 229


def test_an_attribute_exists_for_every_flag(case):
    args = case.args("--debug-train-only")
    for option, kind, _ in rows():
        dest = kind.removeprefix("off ") if kind.startswith("off ") else option[2:].replace("-", "_")
        assert hasattr(args, dest), option


def test_engine_options_carry_a_prefix_and_those_slime_owns_are_left_out(grammar):
    owned = (
        "model_path config trust_remote_code random_seed enable_memory_saver tp_size port nnodes node_rank "
        "dist_init_addr gpu_id_step base_gpu_id nccl_port skip_server_warmup enable_return_routed_experts"
    )
    assert set(OWNED_SGLANG_FIELDS) == set(owned.split())
    dests = {flag.dest for flag in grammar.tables.sglang.flags}
    assert not dests & {f"sglang_{field}" for field in OWNED_SGLANG_FIELDS}
    for flag in grammar.tables.sglang.flags:
        assert all(option.startswith(("--sglang-", "--no-sglang-")) for option in flag.options), flag.options
        assert not any("sglang-sglang" in option for option in flag.options), flag.options
        assert flag.dest.startswith("sglang_") and not flag.dest.startswith("sglang_sglang_")


def test_router_options_keep_their_prefix_and_three_defaults_differ(grammar):
    by_name = {flag.name: flag for flag in grammar.tables.router.flags}
    assert all(name.startswith("--router-") for name in by_name)
    changed = {
        "--router-log-level": "warn",
        "--router-balance-abs-threshold": 10,
        "--router-balance-rel-threshold": 1.2,
    }
    assert {name: by_name[name].default for name in changed} == changed


def test_slimes_defaults_win_over_megatrons(case):
    """Megatron's own are lr None, seed 1234, clip-grad 1.0, eval-interval 1000, micro-batch-size None."""
    args = case.args()
    assert (args.lr, args.seed, args.clip_grad, args.micro_batch_size) == (1e-6, 1234, 1.0, 1)
    assert (args.eval_interval, args.save_interval, args.mtp_loss_scaling_factor) == (None, None, 0.2)
    assert args.distributed_timeout_minutes == 10


def test_every_row_can_be_registered_and_its_default_survives(grammar):
    """argparse passes text defaults through the type function: none may change on the way."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in grammar.slime_options.values():
        if flag.name == flag.options[0] and not parser._option_string_actions.get(flag.name):
            flag.add_to(parser)
    empty = parser.parse_args([])
    for flag in grammar.slime_options.values():
        assert getattr(empty, flag.dest) == flag.default, flag.name
