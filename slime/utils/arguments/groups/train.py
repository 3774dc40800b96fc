"""Flags: the training backend, precision, weight synchronisation and which parameters are trained."""

from slime.utils.arguments.flag import Flag, FlagGroup, json_object, switch

GROUP = FlagGroup(
    "train",
    "Training backend and weight synchronisation",
    [
        Flag("--train-backend", str, "megatron", "Training backend.", choices=("megatron",)),
        switch(
            "--fp32",
            "Train in 32-bit floats. Default: bf16 on CUDA (fp16 with --fp16), fp32 on a CPU unless --bf16 is given.",
        ),
        Flag(
            "--qwen-gdn-backend",
            str,
            "fla",
            "Kernel of the gated delta net.",
            choices=("fla", "flashqla"),
            supported=False,
        ),
        Flag(
            "--train-env-vars",
            json_object,
            {},
            "JSON object of environment variables for the trainers; wins over all others.",
        ),
        Flag(
            "--update-weight-mode",
            str,
            "full",
            "What a weight update sends: all weights or the changes.",
            choices=("full", "delta"),
            unsupported_choices=("delta",),
        ),
        Flag(
            "--update-weight-transport",
            str,
            "nccl",
            "How weights reach engines that do not share the trainers' GPUs.",
            choices=("nccl", "disk"),
        ),
        switch(
            "--release-train",
            "End the trainers after each weight update and rebuild them from a checkpoint.",
            supported=False,
        ),
        Flag("--update-weight-disk-dir", str, None, "Shared directory for --update-weight-transport disk."),
        switch("--update-weight-disk-keep-files", "Keep the published checkpoints of --update-weight-transport disk."),
        Flag(
            "--update-weight-delta-encoding",
            str,
            "xor",
            "Encoding of changes.",
            choices=("xor", "overwrite"),
            supported=False,
        ),
        Flag(
            "--update-weight-delta-checksum",
            str,
            "xxh3-128",
            "Checksum of changes.",
            choices=("xxh3-128", "blake3", "adler32"),
            supported=False,
        ),
        Flag(
            "--custom-update-weight-post-write-path",
            str,
            None,
            "Hook f(args, version_dir, rollout_engines) called on every rank after weight files are written.",
            supported=False,
        ),
        Flag(
            "--update-weight-local-checkpoint-dir",
            str,
            None,
            "Host-local HF checkpoint kept up to date by the engines.",
            supported=False,
        ),
        Flag(
            "--update-weight-buffer-size", int, 536870912, "Bytes of one bucket of weights on its way to the engines."
        ),
        Flag(
            "--custom-model-provider-path",
            str,
            None,
            "Function f(pre_process, post_process[, vp_stage]) that builds the model.",
        ),
        switch(
            "--recompute-loss-function",
            "Recompute the loss function's activations in the backward pass to save memory.",
        ),
        Flag(
            "--log-probs-chunk-size",
            int,
            -1,
            "Rows of logits that exist at once, in the log-prob pass and in training; -1: as many as 1 GiB holds, at "
            "most 8192.",
        ),
        Flag(
            "--only-train-params-name-list",
            str,
            None,
            "Train only parameters whose name in the whole model matches a regular expression.",
            nargs="*",
        ),
        Flag(
            "--freeze-params-name-list",
            str,
            None,
            "Freeze parameters whose name in the whole model matches a regular expression.",
            nargs="*",
        ),
        switch(
            "--freeze-indexer",
            "Keep the indexer of sparse attention as it is, which is the default: only --dsa-indexer-loss-coeff "
            "trains it.",
        ),
        switch(
            "--allgather-cp",
            "Context parallelism gathers keys and values instead of passing them around; the cut stays zigzag. Models "
            "with sparse attention need it and get it by themselves.",
        ),
    ],
)
