"""Keeps Megatron out of server processes, whose PYTHONPATH has this directory first.

sglang 0.5.17 imports megatron.core for a debugging aid when it can (sglang.srt.debug_utils.dumper). megatron-core
0.19.2 then switches the process's torch_memory_saver to a mode that cannot pause CUDA graphs, and costs seconds.
"""

raise ImportError("megatron is not for server processes")
