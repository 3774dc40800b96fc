"""Flags: how many nodes and GPUs, who uses them, and how Ray is reached."""

from slime.utils.arguments.flag import Flag, FlagGroup, switch, tristate

GROUP = FlagGroup(
    "cluster",
    'Cluster: nodes, GPUs and who uses them (on a CPU machine a "GPU" is one CPU slot)',
    [
        Flag("--accelerator", str, "auto", "Device to train and generate on.", choices=("auto", "cuda", "cpu")),
        Flag("--actor-num-nodes", int, 1, "Nodes for training."),
        Flag("--actor-num-gpus-per-node", int, 8, "Training GPUs on each of these nodes."),
        Flag(
            "--rollout-num-gpus",
            int,
            None,
            "GPUs for all inference engines together. Follows from --colocate; 0 starts a router without engines.",
        ),
        Flag(
            "--rollout-num-gpus-per-engine", int, 1, "GPUs of one engine (tensor x pipeline parallel); may span nodes."
        ),
        Flag(
            "--num-gpus-per-node",
            int,
            8,
            "GPUs of one physical node, for placing engines. Set it when nodes have fewer.",
        ),
        switch("--colocate", "Train and generate on the same GPUs. On CUDA this turns both offloads on."),
        switch("--offload", "Short for --offload-train --offload-rollout."),
        tristate("--offload-train", "Move the trainer's memory off the GPU while engines generate (CUDA only)."),
        tristate("--offload-rollout", "Release the engines' memory while the trainer trains (CUDA only)."),
        Flag(
            "--distributed-backend",
            str,
            "nccl",
            "Backend of torch.distributed; gloo on a CPU machine.",
            choices=("nccl", "gloo"),
        ),
        Flag(
            "--distributed-timeout-minutes",
            int,
            10,
            "Time-out of collective operations and of forming the process group.",
        ),
        Flag(
            "--ray-address",
            str,
            None,
            "Ray cluster to join, host:port or auto. Default: the variable RAY_ADDRESS, else a local cluster.",
        ),
        Flag("--ray-startup-timeout", float, 45.0, "Seconds until Ray must offer the resources this run needs."),
        Flag(
            "--log-dir",
            str,
            None,
            "Directory of the engines' and router's log files. Default: SAVE/logs, else a temporary one.",
        ),
    ],
)
