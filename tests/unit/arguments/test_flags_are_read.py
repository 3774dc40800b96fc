"""No flag is accepted that nothing reads: a supported flag's attribute appears in the code, or Megatron reads it."""

import re
from pathlib import Path

from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables

ROOT = Path(__file__).resolve().parents[3]
PARSED_ONLY = {"train_backend", "rollout_data_transport"}  # one supported value, which is what the code does


def test_every_supported_flag_is_read():
    tables = ROOT / "slime" / "utils" / "arguments"
    readers = [path for path in (ROOT / "slime").rglob("*.py") if tables not in path.parents]
    readers += [ROOT / "train.py", tables / "derive.py", tables / "__init__.py"]
    words = {word for path in readers for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    megatron = Grammar(load_tables()).megatron_options
    unread = [
        flag.name
        for group in GROUPS
        for flag in group.flags
        if flag.supported and not {flag.dest} & (words | PARSED_ONLY) and flag.name not in megatron
    ]
    assert not unread, f"nothing reads {unread}: implement them or mark the rows supported=False"
