"""DeepSeek sparse attention (DSA), served as dense MLA.

The indexer of SGLang 0.5.17 needs GPU kernels, and asking for the device's capability already raises. While a request
holds at most `index_topk` tokens the indexer selects all of them, so dense MLA gives the same numbers;
`server_args` refuses contexts longer than that.
"""

import types


def fix_config_probe(module: types.ModuleType) -> None:
    module.is_deepseek_dsa = lambda config: False
