"""Every rule once broken and once kept; the message names flag, value, arithmetic and a legal value."""

import pytest

from slime.utils.arguments.validate import CHECKS

MOE = ("--num-experts", "8", "--moe-ffn-hidden-size", "20", "--moe-layer-freq", "[1]*6")

# rule: (tokens that break it, words of the only problem, tokens that keep it)
RULES = {
    "range": (
        ("--micro-batch-size", "0"),
        ("--micro-batch-size: is 0, must be at least 1",),
        ("--micro-batch-size", "1"),
    ),
    "range from 0": (("--num-rollout", "-1"), ("--num-rollout: is -1",), ("--num-rollout", "0")),
    "temperature": (
        ("--rollout-temperature", "0"),
        ("--rollout-temperature: is 0, must be > 0", "try: --rollout-temperature 1.0"),
        ("--rollout-temperature", "0.1"),
    ),
    "negative temperature": (("--rollout-temperature", "-1"), ("is -1",), ()),
    "eval temperature": (("--eval-temperature", "-0.5"), ("is -0.5, must be >= 0",), ("--eval-temperature", "0")),
    "top p": (
        ("--rollout-top-p", "0.9"),
        ("0.9 is not supported yet: the trainer would need the tokens", "try: --rollout-top-p 1"),
        ("--rollout-top-p", "1.0"),
    ),
    "eval top p": (("--eval-top-p", "1.5"), ("--eval-top-p: is 1.5",), ("--eval-top-p", "1")),
    "top k": (
        ("--rollout-top-k", "5"),
        ("5 is not supported yet: the trainer would need the tokens", "try: --rollout-top-k -1"),
        ("--rollout-top-k", "-1"),
    ),
    "eval top k": (("--eval-top-k", "0"), ("-1 (off)",), ("--eval-top-k", "5")),
    "min p of the engines": (
        ("--sglang-preferred-sampling-params", '{{"min_p": 0.1}}'),
        ("--sglang-preferred-sampling-params: min_p 0.1 is not supported",),
        ("--sglang-preferred-sampling-params", '{{"ignore_eos": true}}'),
    ),
    "a group to compare with": (
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8"),
        ("1 with --advantage-estimator grpo", "a group of one is 0", "--disable-rewards-normalization"),
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8", "--disable-rewards-normalization"),
    ),
    "a group to compare with, for supervised training": (
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8", "--advantage-estimator", "gspo"),
        ("--n-samples-per-prompt: 1 with --advantage-estimator gspo",),
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8", "--loss-type", "sft_loss"),
    ),
    "a group to compare with, made by the user": (
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8"),
        ("--n-samples-per-prompt",),
        ("--n-samples-per-prompt", "1", "--global-batch-size", "8", "--custom-reward-post-process-path", "os.getcwd"),
    ),
    "attention dropout": (
        ("--attention-dropout", "0.1"),
        ("--attention-dropout: is 0.1, must be 0", "the same policy", "try: --attention-dropout 0"),
        ("--attention-dropout", "0.0"),
    ),
    "hidden dropout": (("--hidden-dropout", "0.2"), ("--hidden-dropout: is 0.2",), ("--hidden-dropout", "0")),
    "backend of the device": (
        ("--distributed-backend", "nccl"),
        ("--distributed-backend: nccl is not supported with --accelerator cpu", "try: --distributed-backend gloo"),
        ("--distributed-backend", "gloo"),
    ),
    "KL in rewards that have none": (
        ("--kl-coef", "0.01", "--ref-load", "{hf}"),
        ("0.01 has no effect with --advantage-estimator grpo", "try: --use-kl-loss --kl-loss-coef 0.01"),
        (
            "--kl-coef",
            "0.01",
            "--ref-load",
            "{hf}",
            "--advantage-estimator",
            "reinforce_plus_plus",
            "--normalize-advantages",
        ),
    ),
    "KL with a custom advantage": (
        ("--kl-coef", "0.01", "--ref-load", "{hf}"),
        ("--kl-coef",),
        ("--kl-coef", "0.01", "--ref-load", "{hf}", "--custom-advantage-function-path", "os.path.join"),
    ),
    "two KL terms": (
        ("--kl-coef", "0.01", "--kl-loss-coef", "0.02", "--use-kl-loss", "--ref-load", "{hf}"),
        ("--kl-coef, --kl-loss-coef: 0.01 and 0.02",),
        ("--kl-loss-coef", "0.02", "--use-kl-loss", "--ref-load", "{hf}"),
    ),
    "reinforce++ normalises": (
        ("--advantage-estimator", "reinforce_plus_plus_baseline"),
        ("try: --normalize-advantages",),
        ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"),
    ),
    "rollout log-probs or TIS": (
        ("--use-rollout-logprobs", "--use-tis"),
        ("--use-rollout-logprobs, --use-tis",),
        ("--use-tis",),
    ),
    "mismatch metrics": (
        ("--get-mismatch-metrics",),
        ("--custom-tis-function-path",),
        ("--get-mismatch-metrics", "--custom-tis-function-path", "os.path.join"),
    ),
    "TIS bounds": (
        ("--use-tis", "--tis-clip-low", "3"),
        ("3 is above --tis-clip 2",),
        ("--use-tis", "--tis-clip-low", "1"),
    ),
    "custom loss": (
        ("--loss-type", "custom_loss"),
        ("--custom-loss-function-path",),
        ("--loss-type", "custom_loss", "--custom-loss-function-path", "os.path.join"),
    ),
    "dual clip": (("--eps-clip-c", "1"), ("--eps-clip-c: is 1, must be > 1",), ("--eps-clip-c", "3")),
    "clip range": (("--eps-clip-high", "-0.1"), ("--eps-clip-high: is -0.1",), ("--eps-clip-high", "0.3")),
    "log-prob chunks": (("--log-probs-chunk-size", "0"), ("must be -1",), ("--log-probs-chunk-size", "7")),
    "train or freeze": (
        ("--only-train-params-name-list", "a", "--freeze-params-name-list", "b"),
        ("--only-train-params-name-list, --freeze-params-name-list",),
        ("--freeze-params-name-list", "b"),
    ),
    "one precision": (("--bf16", "--fp32"), ("--fp32, --bf16: give one",), ("--fp32",)),
    "group reward in evaluation": (
        ("--group-rm", "--eval-interval", "2", "--eval-prompt-data", "a", "{data}"),
        ("--group-rm, --eval-interval",),
        ("--group-rm",),
    ),
    "whole optimizer steps": (
        ("--global-batch-size", "12"),
        ("8 x --n-samples-per-prompt 4 = 32", "not a multiple of 12: 8 of each rollout", "try: --global-batch-size 8"),
        ("--global-batch-size", "16"),
    ),
    "steps divide the rollout": (
        ("--num-steps-per-rollout", "5"),
        ("32 responses do not divide into 5 steps", "try: --num-steps-per-rollout 4"),
        ("--num-steps-per-rollout", "1"),
    ),
    "steps agree with the batch size": (
        ("--num-steps-per-rollout", "4"),
        ("32 responses / 4 steps = 8 per step, but --global-batch-size is 32", "try: --global-batch-size 8"),
        ("--num-steps-per-rollout", "4", "--global-batch-size", "8"),
    ),
    "static micro-batches": (
        ("--micro-batch-size", "3"),
        ("32 is not a multiple of --micro-batch-size 3 x 2 data-parallel ranks = 6",),
        ("--micro-batch-size", "4"),
    ),
    "a sample for every rank": (
        ("--global-batch-size", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
        ("1 samples < 2 data-parallel ranks = 2",),
        ("--global-batch-size", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
    ),
    "dynamic batches have a size": (
        ("--use-dynamic-batch-size",),
        ("--max-tokens-per-gpu",),
        ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
    ),
    "balance by FLOPs": (
        ("--balance-by-flops",),
        ("needs --use-dynamic-batch-size",),
        ("--balance-by-flops", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"),
    ),
    "over-sampling": (
        ("--over-sampling-batch-size", "7"),
        ("7 is less than --rollout-batch-size 8",),
        ("--over-sampling-batch-size", "9"),
    ),
    "room for a response": (
        ("--rollout-max-context-len", "100", "--rollout-max-prompt-len", "100"),
        ("100 leaves no room", "100 - 1 = 99"),
        ("--rollout-max-context-len", "100", "--rollout-max-prompt-len", "99"),
    ),
    "layout tiles the world": (
        ("--context-parallel-size", "3"),
        ("tensor 1 x pipeline 1 x context 3 = 3 does not divide the 2 training GPUs",),
        ("--context-parallel-size", "2"),
    ),
    "expert layout tiles the world": (
        (*MOE, "--expert-model-parallel-size", "4"),
        ("expert tensor 1 x expert 4 x pipeline 1 = 4 does not divide the 2", "try: --expert-model-parallel-size 2"),
        (*MOE, "--expert-model-parallel-size", "2"),
    ),
    "heads": (
        ("--tensor-model-parallel-size", "8", "--actor-num-gpus-per-node", "8"),
        ("8 does not divide the 12 attention heads", "try: --tensor-model-parallel-size 6"),
        ("--tensor-model-parallel-size", "4", "--actor-num-gpus-per-node", "8"),
    ),
    "key/value groups": (
        ("--tensor-model-parallel-size", "6", "--actor-num-gpus-per-node", "6"),
        ("neither a divisor nor a multiple of the 4 key/value groups",),
        ("--tensor-model-parallel-size", "12", "--actor-num-gpus-per-node", "12"),
    ),
    "vocabulary": (
        ("--tensor-model-parallel-size", "2", "--padded-vocab-size", "251"),
        ("251 is not a multiple", "try: --padded-vocab-size 252"),
        ("--tensor-model-parallel-size", "2", "--padded-vocab-size", "252"),
    ),
    "experts under TP need SP": (
        (*MOE, "--tensor-model-parallel-size", "2"),
        ("try: --sequence-parallel",),
        (*MOE, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "experts divide": (
        (*MOE, "--num-experts", "9", "--expert-model-parallel-size", "2"),
        ("2 does not divide the 9 experts", "try: --expert-model-parallel-size 1"),
        (*MOE, "--num-experts", "10", "--expert-model-parallel-size", "2"),
    ),
    "top-k of the router": (
        (*MOE, "--moe-router-topk", "9"),
        ("9 is more than the 8 experts",),
        (*MOE, "--moe-router-topk", "8"),
    ),
    "equal stages": (
        ("--pipeline-model-parallel-size", "4", "--actor-num-gpus-per-node", "4"),
        ("6 layers = 6 do not divide into 4 equal stages", "try: --pipeline-model-parallel-size 3"),
        (
            "--pipeline-model-parallel-size",
            "3",
            "--actor-num-gpus-per-node",
            "3",
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            "9",
        ),
    ),
    "uneven stages": (
        (
            "--pipeline-model-parallel-size",
            "4",
            "--actor-num-gpus-per-node",
            "4",
            "--decoder-first-pipeline-num-layers",
            "1",
        ),
        ("6 layers - 1 on the first stage = 5 do not divide into 3",),
        ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"),
    ),
    "first stage without stages": (
        ("--decoder-first-pipeline-num-layers", "3"),
        ("--decoder-first-pipeline-num-layers: has no meaning",),
        ("--decoder-first-pipeline-num-layers", "2", "--pipeline-model-parallel-size", "2"),
    ),
    "all-gather CP": (
        ("--allgather-cp", "--context-parallel-size", "2"),
        ("not supported yet with --context-parallel-size 2",),
        ("--allgather-cp",),
    ),
    "something is left to run": (
        ("--debug-rollout-only", "--debug-train-only"),
        ("--debug-rollout-only, --debug-train-only",),
        ("--debug-train-only",),
    ),
    "offload on a CPU": (("--offload-train",), ("--offload-train: moves GPU memory",), ("--no-offload-train",)),
    "offload short form on a CPU": (
        ("--offload",),
        ("--offload: moves GPU memory",),
        ("--offload", "--accelerator", "cuda"),
    ),
    "whole engines": (
        ("--rollout-num-gpus", "5", "--rollout-num-gpus-per-engine", "2"),
        ("5 GPUs do not make whole engines of 2", "try: --rollout-num-gpus 4"),
        ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"),
    ),
    "engines fill nodes": (
        ("--rollout-num-gpus", "12", "--rollout-num-gpus-per-engine", "12"),
        ("12 GPUs do not fill whole nodes of 8", "try: --rollout-num-gpus-per-engine 8"),
        ("--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine", "16"),
    ),
    "engines do not straddle nodes": (
        ("--rollout-num-gpus", "12", "--rollout-num-gpus-per-engine", "3"),
        ("an engine of 3 GPUs would straddle two nodes of 8", "try: --rollout-num-gpus-per-engine 2"),
        ("--rollout-num-gpus", "6", "--rollout-num-gpus-per-engine", "3"),
    ),
    "engine pipeline": (
        ("--sglang-pp-size", "2", "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "3"),
        ("--sglang-pp-size: 2 does not divide the 3 GPUs of an engine",),
        ("--sglang-pp-size", "2", "--rollout-num-gpus-per-engine", "2"),
    ),
    "engine data parallel": (
        ("--sglang-dp-size", "2"),
        ("try: --sglang-enable-dp-attention",),
        ("--sglang-dp-size", "2", "--sglang-enable-dp-attention"),
    ),
    "disk transport": (
        ("--update-weight-transport", "disk"),
        ("try: --update-weight-disk-dir",),
        ("--update-weight-transport", "disk", "--update-weight-disk-dir", "w"),
    ),
    "time-outs": (
        ("--ray-startup-timeout", "0"),
        ("--ray-startup-timeout: is 0, must be > 0",),
        ("--ray-startup-timeout", "1"),
    ),
    "hf checkpoint": (
        ("--hf-checkpoint", "nowhere", "--load", "{hf}"),
        ("--hf-checkpoint: nowhere is not a directory",),
        ("--hf-checkpoint", "{hf}"),
    ),
    "prompt data": (
        ("--prompt-data", "nowhere.jsonl@[0:5]"),
        ("--prompt-data: nowhere.jsonl does not exist",),
        ("--prompt-data", "{data}@[0:5]"),
    ),
    "eval data": (
        ("--eval-prompt-data", "held", "nowhere.jsonl"),
        ("held: nowhere.jsonl does not exist",),
        ("--eval-prompt-data", "held", "{data}"),
    ),
    "eval interval needs data": (
        ("--eval-interval", "5"),
        ("try: --eval-prompt-data",),
        ("--eval-interval", "5", "--eval-prompt-data", "held", "{data}"),
    ),
    "reference": (
        ("--use-kl-loss",),
        ("--ref-load: is not given, and --use-kl-loss",),
        ("--use-kl-loss", "--ref-load", "{hf}"),
    ),
    "reference exists": (
        ("--use-kl-loss", "--ref-load", "nowhere", "--load", "{hf}"),
        ("nowhere is neither a Megatron checkpoint",),
        ("--use-kl-loss", "--ref-load", "{hf}", "--load", "{hf}"),
    ),
    "saving has a place": (("--save-interval", "2"), ("try: --save",), ("--save-interval", "2", "--save", "out")),
    "templates": (
        ("--save-hf", "out/{{step}}"),
        ("out/{step} is no template", "{rollout_id}"),
        ("--save-hf", "out/{{rollout_id}}"),
    ),
    "dumps do not overwrite each other": (
        ("--save-debug-rollout-data", "x.pt", "--save-debug-train-data", "x.pt"),
        ("both are x.pt",),
        ("--save-debug-rollout-data", "x.pt", "--save-debug-train-data", "y.pt"),
    ),
    "sub-sample": (
        ("--load-debug-rollout-data-subsample", "1.5", "--load-debug-rollout-data", "x{{rollout_id}}.pt"),
        ("(0, 1]",),
        ("--load-debug-rollout-data-subsample", "0.5", "--load-debug-rollout-data", "x{{rollout_id}}.pt"),
    ),
    "saved rollout exists": (
        ("--load-debug-rollout-data", "nowhere.pt"),
        ("nowhere.pt does not exist",),
        ("--load-debug-rollout-data", "{data}"),
    ),
    "plug-in's module exists": (
        ("--custom-rm-path", "no_such_package.rewards.score"),
        ("--custom-rm-path: no_such_package.rewards.score", "No module named 'no_such_package'"),
        ("--custom-rm-path", "json.decoder.no_such_name"),
    ),
    "plug-in's module exists in its package": (
        ("--custom-loss-function-path", "json.rewards.score", "--loss-type", "custom_loss"),
        ("there is no module 'json.rewards'", "try: --custom-loss-function-path package.module.name"),
        (),
    ),
    "plug-in's file exists": (
        ("--custom-generate-function-path", "{hf}/agent.py:generate"),
        ("agent.py does not exist",),
        ("--custom-generate-function-path", __file__ + ":anything"),
    ),
    "model agrees: size": (
        ("--hidden-size", "49"),
        ("--hidden-size: is 49, and hidden_size in config.json is 48", "try: --hidden-size 48"),
        ("--hidden-size", "48"),
    ),
    "model agrees: layers": (("--num-layers", "7"), ("num_hidden_layers in config.json is 6",), ()),
    "model agrees: heads": (("--num-attention-heads", "24"), ("try: --num-attention-heads 12",), ()),
    "model agrees: ffn": (("--ffn-hidden-size", "101"), ("intermediate_size in config.json is 100",), ()),
    "model agrees: norm": (("--norm-epsilon", "1e-5"), ("--norm-epsilon: is 1e-05", "try: --norm-epsilon 1e-06"), ()),
    "model agrees: rope": (
        ("--rotary-base", "10000"),
        ("rope_theta in config.json is 1e+06", "try: --rotary-base 1000000"),
        (),
    ),
}


def filled(case, tokens):
    return [token.format(hf=case.hf, data=case.directory / "train.jsonl") for token in tokens]


@pytest.mark.parametrize("name", RULES)
def test_rule(case, name):
    broken, words, kept = RULES[name]
    text = case.only_problem(*filled(case, broken))
    for word in words:
        assert word in text
    case.args(*filled(case, kept))


def test_batch_of_zero_steps_names_the_four_numbers(case):
    flags = {"num_rollout": 2, "rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 256}
    text = case.only_problem(**flags)
    for part in ("--rollout-batch-size 8", "--n-samples-per-prompt 8", "--num-rollout 2", "128 in all", "// 256 = 0"):
        assert part in text
    assert case.args(**{**flags, "global_batch_size": 64}).global_batch_size == 64


def test_evaluation_only_needs_no_batches(case):
    data = str(case.directory / "train.jsonl")
    without = ("--global-batch-size", "--prompt-data", "--rollout-max-response-len")
    problem = case.only_problem("--eval-prompt-data", "held", data, without=without, num_rollout=0, eval_interval=1)
    assert problem.startswith("--rollout-max-response-len: ")
    more = ("--eval-prompt-data", "held", data, "--eval-max-response-len", "9")
    args = case.args(*more, without=without, num_rollout=0, eval_interval=1)
    assert args.num_rollout == 0


@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("--rollout-batch-size", "is required"),
        ("--global-batch-size", "try: --global-batch-size 32"),
        ("--num-rollout", "the length of the run"),
        ("--rollout-max-response-len", "try: --rollout-max-response-len 1024"),
        ("--rollout-num-gpus", "--colocate"),
        ("--prompt-data", "nothing to train on"),
        ("--num-layers", "try: --num-layers 6"),
        ("--untie-embeddings-and-output-weights", "tie_word_embeddings false"),
    ],
)
def test_required_flag(case, missing, word):
    text = case.only_problem(without=(missing,))
    assert missing in text and word in text


def test_hf_checkpoint_is_required(case):
    text = "\n".join(map(str, case.problems(without=("--hf-checkpoint",))))
    assert "--hf-checkpoint: is not given" in text


def test_epochs_need_the_global_data_set(case):
    assert case.args(without=("--num-rollout",), num_epoch=2).num_epoch == 2
    text = case.only_problem("--disable-rollout-global-dataset", without=("--num-rollout",), num_epoch=2)
    assert "--disable-rollout-global-dataset" in text


def test_tied_embeddings(case):
    case.write_config(tie_word_embeddings=True)
    assert "leave --untie-embeddings-and-output-weights out" in case.only_problem()
    case.args(without=("--untie-embeddings-and-output-weights",))


def test_rope_parameters_win_over_rope_theta(case):
    case.write_config(rope_parameters={"rope_theta": 5e5})
    assert "try: --rotary-base 500000" in case.only_problem()
    case.args(rotary_base=500000)


def test_text_config_is_the_model(case):
    case.write_config(text_config={"hidden_size": 64})
    assert "hidden_size in config.json is 64" in case.only_problem()


def test_dense_ffn_of_an_all_expert_model_is_not_compared(case):
    case.write_config(num_experts=8, moe_intermediate_size=20, intermediate_size=999)
    case.args(*MOE)
    assert "intermediate_size" in case.only_problem(*MOE, "--moe-layer-freq", "[0]*1+[1]*5")
    assert "--moe-ffn-hidden-size: is 21" in case.only_problem(*MOE, "--moe-ffn-hidden-size", "21")


def test_broken_config_names_file_and_line(case):
    (case.hf / "config.json").write_text('{\n"hidden_size": \n}')
    assert "config.json:3" in case.only_problem()


def test_rollout_only_needs_no_model(case):
    case.args("--debug-rollout-only", hidden_size=49, without=("--num-layers", "--global-batch-size"))


def test_interleaved_pipeline_multiplies_the_micro_batch_unit(case):
    layout = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "3")
    text = case.only_problem(*layout, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "9", global_batch_size=1)
    assert "1 samples < 1 data-parallel ranks x 2 micro-batches per virtual stage = 2" in text
    case.args(*layout, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "9", global_batch_size=2)


def test_training_alone_needs_no_response_length(case):
    case.args("--debug-train-only", without=("--rollout-max-response-len",))


def test_there_is_no_dropout_unless_asked_for(case):
    """Megatron's own default is 0.1."""
    args = case.args()
    assert args.attention_dropout == args.hidden_dropout == 0.0


def test_checks_change_nothing(case):
    args = case.args()
    for check in CHECKS:
        assert list(check(args, {})) == []  # an assignment to the frozen arguments would raise
