"""Writes docs/{en,zh}/reference/arguments.md from the tables of flags: `python tools/make_argument_reference.py`.

The Chinese sentences are in docs/zh/reference/arguments.yaml, each beside the English one it translates.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from slime.utils.arguments.flag import Flag, FlagGroup, type_name
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.upstream import OWNED_SGLANG_FIELDS, ROUTER_DEFAULTS

ROOT = Path(__file__).resolve().parents[1]
TRANSLATIONS = ROOT / "docs" / "zh" / "reference" / "arguments.yaml"
COMMAND = "python tools/make_argument_reference.py"

# Keys are words of the page; each language has all of them.
WORDS = {
    "en": {
        "header": ("flag", "type", "default", "meaning"),
        "switch": "switch",
        "tristate": "switch, `--no-...`",
        "off": "switch",
        "append": "{}, repeatable",
        "list": "list of {}",
        "required": "required",
        "off_when": "sets `{}` to false",
        "not_yet": "**Not supported yet.** ",
        "not_yet_values": " Not supported yet: {}.",
        "deprecated": "Deprecated: {}.",
        "owned_header": ("SGLang setting", "what decides it"),
        "router_header": ("flag", "default"),
    },
    "zh": {
        "header": ("参数", "类型", "默认值", "含义"),
        "switch": "开关",
        "tristate": "开关，`--no-...` 关闭",
        "off": "开关",
        "append": "{}，可重复",
        "list": "{} 列表",
        "required": "必填",
        "off_when": "把 `{}` 设为 false",
        "not_yet": "**尚未支持。**",
        "not_yet_values": "尚未支持的取值：{}。",
        "deprecated": "已弃用：{}。",
        "owned_header": ("SGLang 设置", "由什么决定"),
        "router_header": ("参数", "默认值"),
    },
}

PROSE = {
    "en": """<!-- Written by {command}; change the tables in slime/utils/arguments/groups instead. -->

# Command line

All flags of `python train.py`. This page holds slime's own; Megatron's, SGLang's and the router's flags are too many
for a page and differ between versions, so the program lists them itself:

```bash
python train.py --help                # slime's flags
python train.py --help rollout        # one group of them
python train.py --help megatron       # all flags of the installed megatron-core
python train.py --help sglang         # all flags of the installed SGLang, as --sglang-...
python train.py --help router         # all flags of the installed router, as --router-...
python train.py --help temperature    # every flag with that word
```

## How flags are read

- An unknown flag is an error that names the nearest known ones. Abbreviations are not accepted. A flag that is given
  twice takes the last value, and a notice says so when the values differ.
- All problems are reported at once, each with the flag, its value, the rule and a legal value; then the program ends
  with code 2.
- A flag that this version does not implement is refused with "not supported yet"; [the list](#not-supported-yet) is
  at the end of this page.
- A later source wins: defaults, `config.json` of `--hf-checkpoint` (the model's shape), the command line,
  `--custom-config-path`, `--megatron-config-path`. All values exist before any other value is derived from them.
- `--hf-checkpoint` describes the model: layers, sizes, heads, experts, norms, rotary base and so on follow from its
  `config.json` and need not be given. What is given wins, and each difference is printed at the start
  (`rotary-base: config 1000000, command line 10000`). Where a difference cannot be meant, as for the hidden size, it
  is an error.
- The variables RAY_ADDRESS and WANDB_MODE stand in for their flags; SGLANG_PP_LAYER_PARTITION, SGLang's own, is read
  for the checks.

A file for `--custom-config-path` holds `name: value` lines; names are those of the flags, with underscores, and take
their types; other names become attributes of `args` for plug-ins. A file for `--megatron-config-path` holds what is
for one training role alone; what a critic takes over from the command line otherwise is in [PPO](../advanced/ppo.md):

```yaml
megatron:
  - name: policy
    role: actor
    overrides:
      lr: 2e-6
      clip_grad: 0.5
  - name: value
    role: critic
    overrides:
      lr: 1e-5
```
""",
    "zh": """<!-- 由 {command} 生成；请修改 slime/utils/arguments/groups 中的表。 -->

# 命令行参数

`python train.py` 的全部参数。本页列出 slime 自己的参数；Megatron、SGLang 和路由器的参数太多，且随版本变化，
由程序自己列出：

```bash
python train.py --help                # slime's flags
python train.py --help rollout        # one group of them
python train.py --help megatron       # all flags of the installed megatron-core
python train.py --help sglang         # all flags of the installed SGLang, as --sglang-...
python train.py --help router         # all flags of the installed router, as --router-...
python train.py --help temperature    # every flag with that word
```

## 参数如何读取

- 未知的参数会报错，并给出最接近的已知参数；不接受缩写。同一参数给出两次时以最后一次为准，若两次的值不同会有提示。
- 所有问题一次报全，每个问题都写明参数、取值、规则和一个合法的取值；随后程序以返回码 2 结束。
- 本版本尚未实现的参数会被拒绝，并提示 “not supported yet”；[清单](#尚未支持)在本页末尾。
- 后面的来源优先：默认值、`--hf-checkpoint` 的 `config.json`（模型结构）、命令行、`--custom-config-path`、
  `--megatron-config-path`。所有取值都先确定，再由它们推导其他取值。
- `--hf-checkpoint` 描述模型：层数、各维度、注意力头、专家、归一化、rotary base 等都来自它的 `config.json`，
  不必再给出。命令行上给出的优先，每处差异在启动时打印一次
  （`rotary-base: config 1000000, command line 10000`）。不可能是有意为之的差异（例如 hidden size）是错误。
- 环境变量 RAY_ADDRESS 和 WANDB_MODE 可代替对应的参数；SGLang 自己的 SGLANG_PP_LAYER_PARTITION 会在校验时读取。

`--custom-config-path` 的文件由 `name: value` 行组成；名字就是参数名（用下划线），并采用该参数的类型；其他名字成为
`args` 的属性，供插件使用。`--megatron-config-path` 的文件写只对某一个训练角色有效的设置；
critic 默认沿用命令行上的哪些设置，见 [PPO](../advanced/ppo.md)：

```yaml
megatron:
  - name: policy
    role: actor
    overrides:
      lr: 2e-6
      clip_grad: 0.5
  - name: value
    role: critic
    overrides:
      lr: 1e-5
```
""",
}

UPSTREAM = {
    "en": """## Flags of Megatron, SGLang and the router

Megatron's flags keep their names. slime decides some of them whatever is given: the distributed optimizer is on,
dropout is 0, micro-batches have variable lengths, and the all-gather dispatcher of experts becomes all-to-all.
Megatron's own parser and validation run once more in the trainers and have the last word.

SGLang's flags carry the prefix `--sglang-`; names and values that the installed version calls deprecated are accepted
with a notice that names the current one. These are slime's and cannot be given:
""",
    "zh": """## Megatron、SGLang 和路由器的参数

Megatron 的参数沿用原名。其中一些由 slime 决定，与命令行无关：始终使用分布式优化器，dropout 为 0，micro-batch 长度
可变，专家的 all-gather 分发器改为 all-to-all。训练进程中 Megatron 自己的解析与校验还会再执行一次，并有最终决定权。

SGLang 的参数带前缀 `--sglang-`；已安装版本标为弃用的名字和取值仍然接受，并提示当前的名字。下列设置由 slime 决定，
不能给出：
""",
}
ROUTER = {
    "en": "The router's flags carry the prefix `--router-`. Defaults that differ from the router's own:",
    "zh": "路由器的参数带前缀 `--router-`。与路由器自身不同的默认值：",
}
NOT_YET = {
    "en": "## Not supported yet\n\n"
    "These are refused until the feature behind them is there. A plan (`--dry-run`) shows them and goes on.\n",
    "zh": "## 尚未支持\n\n在对应的功能完成之前，下列参数会被拒绝；规划（`--dry-run`）会列出它们并继续。\n",
}


class Translations:
    """The Chinese sentence of each English one. KeyError naming the flag when it is missing or out of date."""

    def __init__(self, file: Path = TRANSLATIONS):
        self._pairs: Mapping[str, list[str]] = yaml.safe_load(file.read_text(encoding="utf-8"))

    def of(self, key: str, english: str) -> str:
        """The translation of what `key` (a flag, or `group NAME`) says."""
        known, chinese = self._pairs.get(key, ("", ""))
        if known != english:
            reason = f"translates {known!r}" if known else "is missing"
            raise KeyError(f"{TRANSLATIONS.name}: {key} {reason}; needed is {english!r}")
        return chinese

    def unused(self, keys: Iterable[str]) -> list[str]:
        """Entries that translate nothing."""
        return sorted(self._pairs.keys() - set(keys))


def page(language: str, groups: Iterable[FlagGroup] = GROUPS, translations: Translations | None = None) -> str:
    """The page in "en" or "zh", ending in a line break."""
    groups, translations = list(groups), translations or Translations()
    parts = [PROSE[language].format(command=COMMAND)]
    for group in groups:
        title = group.title if language == "en" else translations.of(f"group {group.name}", group.title)
        parts.append(f"## {title}\n\n" + _group_table(group, language, translations))
    words = WORDS[language]
    owned = [
        (f"`{option}`", why if language == "en" else translations.of(f"owned {option}", why))
        for option, why in owned_settings(groups).items()
    ]
    parts.append(UPSTREAM[language] + "\n" + _table(words["owned_header"], owned))
    router = [(f"`--router-{name.replace('_', '-')}`", f"`{value}`") for name, value in ROUTER_DEFAULTS.items()]
    parts.append(ROUTER[language] + "\n\n" + _table(words["router_header"], router))
    parts.append(NOT_YET[language] + "\n" + "\n".join(_unsupported(groups)) + "\n")
    return "\n".join(parts)


def keys(groups: Iterable[FlagGroup] = GROUPS) -> list[str]:
    """Everything that needs a translation."""
    found = [f"owned {option}" for option in owned_settings(groups)]
    for group in groups:
        found += [f"group {group.name}", *(flag.name for flag in group.flags)]
        found += [f"deprecated {flag.name}" for flag in group.flags if flag.deprecated]
    return found


def owned_settings(groups: Iterable[FlagGroup]) -> dict[str, str]:
    """SGLang's settings that cannot be given -> what decides them; a name that is a flag of slime's is left out."""
    options = {f"--sglang-{name.replace('_', '-')}": why for name, why in OWNED_SGLANG_FIELDS.items()}
    own = {flag.name for group in groups for flag in group.flags}
    return {option: why for option, why in options.items() if option not in own}


def _group_table(group: FlagGroup, language: str, translations: Translations) -> str:
    rows = []
    for flag in group.flags:
        names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
        rows.append((names, _type(flag, language), _default(flag, language), _meaning(flag, language, translations)))
    return _table(WORDS[language]["header"], rows)


def _type(flag: Flag, language: str) -> str:
    words = WORDS[language]
    if flag.kind in ("switch", "off", "tristate"):
        return words[flag.kind]
    one = " / ".join(f"`{choice}`" for choice in flag.choices) if flag.choices else type_name(flag.type)
    if flag.kind == "append":
        return words["append"].format(one)
    return words["list"].format(one) if flag.nargs else one


def _default(flag: Flag, language: str) -> str:
    words = WORDS[language]
    if flag.required:
        return words["required"]
    if flag.kind == "off":
        return words["off_when"].format(flag.dest)
    if flag.kind in ("switch", "tristate") or flag.default is None:
        return "-"
    if isinstance(flag.default, list):
        return " ".join(f"`{item}`" for item in flag.default) or "-"
    return f"`{flag.default}`"


def _meaning(flag: Flag, language: str, translations: Translations) -> str:
    words = WORDS[language]
    text = flag.help if language == "en" else translations.of(flag.name, flag.help)
    if flag.deprecated:
        why = flag.deprecated if language == "en" else translations.of(f"deprecated {flag.name}", flag.deprecated)
        text += " " + words["deprecated"].format(why) if language == "en" else words["deprecated"].format(why)
    if not flag.supported:
        text = words["not_yet"] + text
    if flag.supported and flag.unsupported_choices:
        text += words["not_yet_values"].format(", ".join(f"`{choice}`" for choice in flag.unsupported_choices))
    return text


def _unsupported(groups: Iterable[FlagGroup]) -> list[str]:
    lines = []
    for group in groups:
        found = [f"`{flag.name}`" for flag in group.flags if not flag.supported]
        for flag in group.flags:
            if flag.supported:
                found += [f"`{flag.name} {choice}`" for choice in flag.unsupported_choices]
        if found:
            lines.append(f"- {group.name}: " + ", ".join(found))
    return lines


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both pages."""
    translations = Translations()
    unused = translations.unused(keys())
    if unused:
        sys.exit(f"{TRANSLATIONS.name} translates what is not in the tables any more: {', '.join(unused)}")
    for language in ("en", "zh"):
        file = ROOT / "docs" / language / "reference" / "arguments.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(language, translations=translations), encoding="utf-8")


if __name__ == "__main__":
    main()
