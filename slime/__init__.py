"""slime: RL post-training. Ray orchestrates, Megatron-core trains, SGLang generates."""

__version__ = "0.3.1"
