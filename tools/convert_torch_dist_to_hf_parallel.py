"""tools/convert_torch_dist_to_hf.py with several files at a time: the same flags, the same result, more memory.

Each worker reads, converts and writes one file after the other.
"""

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="All other flags are those of tools/convert_torch_dist_to_hf.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--load-max-workers", type=int, default=2, help="workers at least")
    parser.add_argument("--save-max-workers", type=int, default=16, help="workers at most: one a file")
    options, rest = parser.parse_known_args(argv)
    workers = max(options.load_max_workers, options.save_max_workers)
    tool = Path(__file__).with_name("convert_torch_dist_to_hf.py")
    os.execv(sys.executable, [sys.executable, str(tool), *rest, "--max-workers", str(workers)])


if __name__ == "__main__":
    main()
