"""Scheduler and detokenizer as forks of the server process, instead of interpreters started anew.

SGLang 0.5.17 spawns them, because CUDA does not survive a fork. Without CUDA a fork is safe at that moment (the
server has no other thread yet) and spares each of them the imports, 11 to 13 s of CPU time out of a start of 37 s, and
their memory.
"""

import types
from typing import Any


def fix_engine(module: types.ModuleType) -> None:
    set_envs_and_config = module._set_envs_and_config

    def _set_envs_and_config(server_args: Any) -> None:
        set_envs_and_config(server_args)
        module.mp.set_start_method("fork", force=True)

    module._set_envs_and_config = _set_envs_and_config
