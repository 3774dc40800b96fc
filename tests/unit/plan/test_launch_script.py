"""The reader of launch scripts gives the tokens that bash passes to train.py, or says what only a run can tell."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.plan.launch_script import LaunchScriptError, read_launch_script

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = sorted(
    path
    for path in [*ROOT.glob("scripts/run-*.sh"), *ROOT.glob("scripts/low_precision/*.sh")]
    if "slime_launch" in path.read_text()
)
ENVIRONMENT = {"HOME": "/home/somebody", "PATH": os.environ["PATH"], "GIVEN": "from outside", "EMPTY": ""}
# In bash the launching function prints what it was given; the reader does not look at its body.
HEAD = "slime_launch() { printf '%s\\0' \"${@:2}\"; }\n"

# Each is the body of a script that ends with a launch; the reader must agree with bash about the tokens.
CONSTRUCTS = {
    "quotes": """slime_launch train.py 'a b' "c d" e\\ f "it's" 'say "x"' "a\\"b" "a\\$b" \\
   "back\\\\slash" "keep\\n" a"b"'c'""",
    "empty words": """E=; slime_launch train.py "" '' $E "$E" ${EMPTY} "${EMPTY}" x""",
    "splitting": """V='  a  b '; A=("x y" z)
slime_launch train.py $V "$V" p${V}q ${A[@]} "${A[@]}" "pre${A[@]}post" ${A[*]}""",
    "defaults": """slime_launch train.py ${UNSET:-d} "${GIVEN:-d}" ${EMPTY:-e} "${EMPTY-f}" ${UNSET:-a \\
   b} "${UNSET:-"a b"}" ${UNSET:+no}${GIVEN:+yes}""",
    "assigning default": """: "${X:=made}"; slime_launch train.py "$X" """,
    "arrays grow": """A=(1 2); A+=(3 "4 5"); A=("${A[@]}" 6); B=()
slime_launch train.py "${A[@]}" "${B[@]}" ${#A[@]} ${A[1]} $A""",
    "texts grow": """V=a; V+=b; V="$V c"; slime_launch train.py "$V" """,
    "comments and continued lines": """A=(
   --one 1   # a remark with 'a quote
   # --two 2

   --three \\
      3
)
slime_launch train.py \\
   "${A[@]}" \\
   --color '#fff' a#b   # end
""",
    "arithmetic": """N=7
slime_launch train.py $((1024 * 1024 * 2)) $((N / 2)) $((-N / 2)) $((-N % 4)) $(($N + ${N})) $((2**5 - \\
   (3+1))) $((N > 3 && N < 5)) $((1 << 63)) $((1 << 65)) $((3 ** 50)) $((9223372036854775807 + 1))""",
    "sequences": """slime_launch train.py $(seq 16 8 40) $(seq 3) "$(seq 2 3)" $(seq 3 -1 1) $(seq 5 4)""",
    "echo": """slime_launch train.py $(echo a b) "$(echo "c  d")" """,
    "directory of the script": """D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
slime_launch train.py "$D" "${D##*/}" """,
    "trimming": """P=/a/b.tar.gz; slime_launch train.py ${P%.gz} ${P%%.*} ${P#*/} ${P##*/}""",
    "conditions": """N=9
if [ "$N" -gt 8 ]; then A=(big); elif [ "$N" -gt 4 ]; then A=(middle); else A=(small); fi
if [[ -n ${UNSET:-} || $N == 9* ]]; then A+=(nine); fi
[ -z "$EMPTY" ] && A+=(empty)
[[ $GIVEN == from* && $N != 8 ]] || A+=(never)
! [ "$N" = 8 ] && A+=(not-eight)
slime_launch train.py "${A[@]}" """,
    "loops": """A=(); for x in 1 "2 3" $(seq 4 5); do A+=("n$x"); done
for ((i = 0; i < 3; i++)); do if ((i != 1)); then A+=($i); fi; done
slime_launch train.py "${A[@]}" """,
    "pattern of layers": """N=5; arr=()
for ((i=0; i<N; i++)); do if (( i < 2 )); then arr+=(0); else arr+=(1); fi; done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
slime_launch train.py --moe-layer-freq "$FREQ" "[0]*3+[1]*58" """,
    "functions": """V=1; W=1
f() { local V=2; W=$V; A=("$@" $#); shift; B=${1:-none}; return 0; W=9; }
f a "b c"
slime_launch train.py $V $W "${A[@]}" "$B" """,
    "subshells keep their changes": """V=1; (V=2); V=3 | true; { V=4; }; slime_launch train.py $V""",
    "here documents": """cat > /dev/null <<TEXT
slime_launch train.py not this one; A=(
TEXT
cat <<-'END' > /dev/null
	$((
	END
slime_launch train.py after""",
    "other commands": """export A=1 B="two words"; readonly C=3; unset B; set -e; true && D=4; false || E=5
mkdir -p /tmp 2>/dev/null; slime_launch train.py $A ${B:-gone} $C $D $E > >(cat) 2>&1""",
    "program in a variable": """PY=python3; python3() { :; }; slime_launch train.py --x $PY""",
    "indirection": """name=GIVEN; other=NEW; empty=MISSING; printf -v "$other" '%s' "a b"
if [[ -z ${!empty:-} ]]; then X=1; fi
slime_launch train.py "${!name}" "${!other}" ${!name:+set} $X""",
    "assignments before a command": """f() { A=("${X:-none}" "$Y"); X=9; }
Y=1; X=2 f; slime_launch train.py "${A[@]}" "${X:-gone}" """,
    "tilde": """A=(~/models "~/no" a~b); slime_launch train.py "${A[@]}" """,
    "ansi quotes": """slime_launch train.py $'plain' """,
}


def by_bash(path: Path) -> list[str]:
    """What bash hands over, for a script that begins with HEAD."""
    done = subprocess.run(["bash", path.name], cwd=path.parent, env=ENVIRONMENT, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def by_reader(path: Path, **kw) -> list[str]:
    script = read_launch_script(Path(path.name), environ=ENVIRONMENT, directory=path.parent, **kw)
    return list(script.commands[-1].tokens)


def write(directory: Path, body: str, head: str = HEAD) -> Path:
    path = directory / "run.sh"
    path.write_text(head + body + "\n")
    return path


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_construct_means_what_it_means_in_bash(name, tmp_path, monkeypatch):
    """Each way in which launchers put arguments together gives bash's tokens, spaces and empty words included."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, CONSTRUCTS[name])
    tokens = by_bash(path)
    assert tokens, "the construct must hand something over"
    assert by_reader(path) == tokens


TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(TEXTS, min_size=1, max_size=30), double=st.booleans())
def test_any_text_survives_quoting(tokens, double, tmp_path, monkeypatch):
    """Whatever a user puts between quotes, in an array or in a default, arrives unchanged."""
    monkeypatch.chdir(tmp_path)
    quoted = [_double(text) if double else shlex.quote(text) for text in tokens]
    body = "A=(\n" + "".join(f"   {text}\n" for text in quoted) + ")\n"
    body += "".join(f"V{i}={text}\n" for i, text in enumerate(quoted))
    body += 'slime_launch train.py "${A[@]}" ' + " ".join(f'"${{V{i}}}"' for i in range(len(tokens)))
    path = write(tmp_path, body)
    assert by_reader(path) == tokens * 2 == by_bash(path)


def _double(text: str) -> str:
    return '"' + "".join("\\" + c if c in '"\\$`' else c for c in text) + '"'


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_the_launchers_are_read_as_bash_runs_them(path, tmp_path):
    """A plan made from the text of a launcher is the plan of the command that it really starts."""
    printer = tmp_path / "python"
    printer.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    printer.chmod(0o755)
    environ = {"HOME": "/root", "PATH": os.environ["PATH"], "DRY_RUN": "1", "BASE_DIR": "/shared/a dir"}
    environ |= {"MASTER_ADDR": "10.0.0.1", "SLIME_PYTHON": str(printer)}
    done = subprocess.run(["bash", str(path)], cwd=ROOT, env=environ, capture_output=True, check=True)
    program, *tokens, dry_run = done.stdout.decode().split("\0")[:-1]
    command = read_launch_script(path, environ=environ, directory=ROOT).commands[-1]
    assert Path(program).name == command.program and dry_run == "--dry-run"
    assert list(command.tokens) == tokens


@pytest.mark.parametrize("knob", [{}, {"MODEL_ARGS_NUM_LAYERS": "7", "MODEL_ARGS_ROTARY_BASE": "123"}], ids=str)
def test_every_model_file_is_read_as_bash_sources_it(knob, tmp_path):
    """Files that source another one with a changed variable, and the variables a user may set, included."""
    models = sorted((ROOT / "scripts" / "models").glob("*.sh"))
    assert len(models) > 30
    for model in models:
        path = write(tmp_path, f'source {model}\nslime_launch train.py "${{MODEL_ARGS[@]}}"')
        environ = ENVIRONMENT | knob
        done = subprocess.run(["bash", str(path)], env=environ, capture_output=True, check=True)
        script = read_launch_script(path, environ=environ, directory=tmp_path)
        assert list(script.commands[-1].tokens) == done.stdout.decode().split("\0")[:-1], model.name


def test_sourced_files_and_their_directory(tmp_path):
    """A model file next to the launcher is found from wherever the launcher is started."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text('MODEL_ARGS=(--num-layers "${LAYERS:-3}")\nreturn 0\nMODEL_ARGS=()\n')
    path = write(
        tmp_path,
        'HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)\nsource "$HERE/models/tiny.sh"\n'
        'ray job submit --address=x -- python3 "$HERE/train.py" "${MODEL_ARGS[@]}"',
        head="",
    )
    script = read_launch_script(path, environ={"LAYERS": "4"}, directory=Path("/"))
    assert script.commands[0].tokens == ("--num-layers", "4")
    assert script.commands[0].where == f"{path}:3"


def test_what_a_run_alone_can_tell_is_an_error_only_where_it_matters(tmp_path):
    """An NVLink probe in the environment does not stop a plan; the same probe as an argument does, with its line."""
    probe = 'LINKS=$(nvidia-smi topo -m | grep -c NV)\nif [ "$LINKS" -gt 0 ]; then NVLS=1; else NVLS=0; fi\n'
    harmless = write(tmp_path, probe + 'ray job submit --env="$NVLS" -- python3 train.py --lr 1', head="")
    assert by_reader(harmless) == ["--lr", "1"]
    harmful = write(tmp_path, probe + 'python3 train.py --lr 1 --seed "$NVLS"', head="")
    with pytest.raises(LaunchScriptError, match=r"run\.sh:3: .*NVLS is set under a condition that only a run can"):
        by_reader(harmful)
    assert by_reader(harmful, settings={"NVLS": "1"}) == ["--lr", "1", "--seed", "1"]
    after = write(tmp_path, 'X=0\nnvidia-smi && X=1\nmkdir logs || exit 1\npython3 train.py --seed "$X"', head="")
    with pytest.raises(LaunchScriptError, match=r"run\.sh:4: .*X is set under a condition"):
        by_reader(after)
    direct = write(tmp_path, 'python3 train.py --seed "$(date +%s)"', head="")
    with pytest.raises(LaunchScriptError, match=r"run\.sh:1: .*`\$\(date \+%s\)` at run\.sh:1"):
        by_reader(direct)


def test_required_variables_get_a_placeholder_and_a_note(tmp_path):
    """On a laptop nobody has the cluster's BASE_DIR: the plan goes on and says what it put in its place."""
    path = write(
        tmp_path, 'set -u\nD=${BASE_DIR:?the shared directory}\npython train.py --save "$D/x" --load "$OTHER"'
    )
    script = read_launch_script(path, environ={})
    assert script.commands[0].tokens == ("--save", "<BASE_DIR>/x", "--load", "<OTHER>")
    assert any("BASE_DIR is required and not set" in note for note in script.notes)
    script = read_launch_script(path, environ={}, settings={"BASE_DIR": "/data", "OTHER": "o"})
    assert script.commands[0].tokens == ("--save", "/data/x", "--load", "o")
    assert script.notes == ()


def test_settings_win_over_the_script(tmp_path):
    """--set NUM_GPUS=4 plans the script as if it said 4, even where it assigns 8."""
    path = write(tmp_path, "NUM_GPUS=8\npython train.py --actor-num-gpus-per-node $NUM_GPUS")
    assert by_reader(path, settings={"NUM_GPUS": "4"}) == ["--actor-num-gpus-per-node", "4"]


def test_several_runs_are_all_found_in_order(tmp_path):
    path = write(tmp_path, "python a/train.py --seed 1\npython -u train_async.py --seed 2", head="")
    commands = read_launch_script(path).commands
    assert [(c.program, c.tokens) for c in commands] == [
        ("a/train.py", ("--seed", "1")),
        ("train_async.py", ("--seed", "2")),
    ]


@pytest.mark.parametrize(
    "body, says",
    [
        ("echo nothing", "found no command that starts train.py"),
        ("source missing.sh\npython train.py", r"run\.sh:1: sources missing\.sh, which is not there"),
        ('source "$(uname).sh"\npython train.py', r"run\.sh:1: it is not known which file is sourced"),
        ("A=(1 2\npython train.py", r"run\.sh:\d+: this array has no closing parenthesis"),
        ('B=1\nA="x\n\n', r'run\.sh:2: this " has no partner'),
        ("if true; then\npython train.py", r"run\.sh:\d+: this `if` has no `fi`"),
        ("f() { f; }; f\npython train.py", "f calls itself too often"),
        ("source run.sh\npython train.py", r"files source one another"),
        ("python train.py $((9 / 0))", r"run\.sh:1: .*the arithmetic `9 / 0`"),
        ("X=X\npython train.py $((X)) $((16#ff))", r"run\.sh:2: .*the arithmetic `X`"),
        ("python train.py $((16#ff))", r"the arithmetic `16#ff` at run\.sh:1 is not followed"),
        ("python train.py $((2 ** -1))", r"the arithmetic `2 \*\* -1` at run\.sh:1 cannot be evaluated"),
        ("python train.py $(seq 1 999999999)", r"the output of `\$\(seq 1 999999999\)` at run\.sh:1"),
        ("A=(1)\nA[2]=x\npython train.py ${A[@]}", r"run\.sh:3: .*A\[\.\.\.\] is assigned at run\.sh:2"),
        ("python train.py {a,b}", r"run\.sh:1: .*`\{a,b\}` at run\.sh:1"),
        ("python train.py ${A/x/y}", r"`\$\{A/x/y\}` at run\.sh:1"),
    ],
)
def test_mistakes_name_file_and_line(body, says, tmp_path):
    with pytest.raises(LaunchScriptError, match=says):
        by_reader(write(tmp_path, body, head=""))


def test_a_missing_script_is_an_error(tmp_path):
    with pytest.raises(LaunchScriptError, match="cannot read .*no-such.sh"):
        read_launch_script(tmp_path / "no-such.sh")
