"""Shell scripts that start a training: the command that they come to, beside what bash itself
starts, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.cli.trace import split
from memfit.errors import InputError
from memfit.shell_scripts import started

SCRIPTS = {
    "continued lines": """#!/bin/bash
        python train.py \\
            --model "a b" \\
            --lr 1e-4""",
    "variables": """
        MODEL=llama-7b   # the base
        OUT=./out/${MODEL}-lora
        python train.py --model $MODEL --out "$OUT" --name '$MODEL'""",
    "exported": """
        export WANDB_MODE=disabled
        export OMP_NUM_THREADS=4; set -euo pipefail
        CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py""",
    "defaults and arguments": """
        GPUS=${1:-8}
        NAME=${2:-"my run"}
        SIZE=${SIZE:=7b}
        torchrun --nproc_per_node=$GPUS train.py --name "$NAME" --size $SIZE ${@:-none}""",
    "shifted": """
        MODEL=$1
        shift
        accelerate launch train.py --model "$MODEL" "$@" --count $#""",
    "arrays": """
        ARGS=(
            --layers 24   # of the small one
            --hidden "1024"
        )
        ARGS+=(--heads 16)
        EMPTY=()
        torchrun train.py ${ARGS[@]} "${EMPTY[@]}" "${ARGS[@]}" --second ${ARGS[1]}""",
    "split words": """
        OPTIONS="--fp16 --name two\\ words"
        python train.py $OPTIONS "$OPTIONS" $UNSET "$UNSET" --x=$UNSET""",
    "arithmetic": """
        NODES=2; PER=8
        torchrun --nnodes $NODES train.py --world $((NODES * PER)) --half $(( $PER / 2 ))""",
    "lines read into a variable": """
        SIZE=7b
        read -r -d '' training <<EOF
package.train \\
   --model llama-$SIZE \\
   --name "a b"
EOF
        read -r other <<'END'
--kept $SIZE
--not this
END
        deepspeed --module $training $other --more "$SIZE" """,
    "loops": """
        for lr in 1e-4 3e-4; do
            for seed in $(seq 1 3); do
                python train.py --lr $lr --seed ${seed}
            done
        done""",
    "pipes and files": """
        mkdir -p logs && echo "python train.py" > logs/note
        nohup python -u train.py --lr 1 2>&1 | tee logs/train.log""",
    "before and after": """
        pip install -r requirements.txt
        python -m pip install flash-attn
        python -m pkg.train --lr 3 > log.txt 2>&1 &
        wait
        python evaluate.py""",
    "data for a command": """
cat > hosts.txt <<EOF
python from_the_data.py
EOF
cat <<-'END' > config.yaml
torchrun --nproc_per_node 9 train.py
\tEND
exec torchrun train.py --config config.yaml < /dev/null""",
    "evaluated": """
        args="--lr 1e-4 --name 'two words' "
        cmd="torchrun --nproc_per_node 2 \\
            -m pkg.train \\
            $args "
        echo $cmd
        eval $cmd""",
    "nested arithmetic": """
        TOTAL=128; EACH=4; GPUS=8
        python train.py --steps $((TOTAL / (EACH * GPUS))) --twice $(((TOTAL + 1) * 2))""",
    "conditions": """
        if [ -z "$1" ]; then GPUS=8; else GPUS=$1; fi
        if [[ "$2" == "the"* ]]; then NAME=yes; elif [ "$2" = x ]; then NAME=no; fi
        [ $# -lt 9 ] && MORE=some
        [ -n "$UNSET" ] || OTHER=none
        if [ -d /nowhere ]; then python other.py; fi
        torchrun train.py --gpus $GPUS --name $NAME --more $MORE --other $OTHER""",
    "case": """
        case "$1" in
            2|3) SIZE=small ;;   # a few
            4) SIZE=middle
               DEEP=yes ;;
            *) SIZE=large ;;
        esac
        python train.py --size $SIZE --deep $DEEP""",
    "arguments in a loop": """
        while [[ $# -gt 0 ]]; do
            case $1 in
                --more) MORE="$2"; shift 2 ;;
                4) FIRST=$1; shift ;;
                *) REST="$REST,$1"; shift ;;
            esac
        done
        python train.py "$FIRST" "$MORE" "$REST" $#""",
    "functions": """
        run() {
            local lr=$1
            shift
            python train.py --lr "$lr" --rest "$@"
        }
        function name { NAME=inner; }
        name
        python -m pip install nothing
        run 1e-4 $NAME "$1" """,
    "changed values": """
        MODEL=org/My-Model.v1.bin; UNSET=
        python train.py --a ${MODEL##*/} --b ${MODEL%.*} --c ${MODEL%%.*} --d ${MODEL#*/} \\
            --e ${MODEL//My-/x} --f "${UNSET:+--none}" --g ${MODEL:+set} \\
            --h ${MODEL,,} --i ${MODEL:0:3}""",
    "what commands print": """
        HERE="$(cd -- "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 ; pwd -P)"
        IDS=0,1,2
        export CUDA_VISIBLE_DEVICES=$IDS
        torchrun --nproc_per_node $(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l) train.py \\
            --here $HERE --name `basename /a/b.txt .txt` --cpus $(nproc)""",
    "quotes": """
        python train.py --a "say \\"hi\\" \\$5" --b 'it'"'"'s' --c \\#no --d a#b""",
}
SHIM = """#!{python}
import json, os, sys
own = {{name: os.environ[name] for name in {names} if name in os.environ}}
line = json.dumps([own, [os.path.basename(sys.argv[0]), *sys.argv[1:]]])
open({out!r}, "a").write(line + "\\n")
"""
NAMES = ("CUDA_VISIBLE_DEVICES", "WANDB_MODE", "OMP_NUM_THREADS")
WORDS = ["4", "the name", "--more", "x y"]


def bash_starts(script: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Variables and words of the first program that bash starts."""
    out = folder / "started.jsonl"
    shims = folder / "bin"
    shims.mkdir()
    for name in ("python", "torchrun", "accelerate", "deepspeed", "pip"):
        shim = shims / name
        shim.write_text(SHIM.format(python=sys.executable, names=NAMES, out=str(out)))
        shim.chmod(0o755)
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    environment = {name: one for name, one in os.environ.items() if name not in NAMES}
    subprocess.run(
        ["bash", str(script), *WORDS],
        check=False,
        cwd=folder,
        env={**environment, "PATH": path},
        timeout=60,
    )
    for line in out.read_text().splitlines():
        own, words = json.loads(line)
        if words[0] != "pip" and words[1:3] != ["-m", "pip"]:
            return own, words
    raise AssertionError("bash started nothing")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_is_the_one_that_bash_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*NAMES, "UNSET", "SIZE"):
        monkeypatch.delenv(variable, raising=False)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    found = started(["bash", str(script), *WORDS])
    settings = [one for one in found.words if one.partition("=")[0] in NAMES]
    rest = found.words[len(settings) :]
    rest = rest[1:] if rest[0] == "nohup" else rest
    own, words = bash_starts(script, tmp_path)
    assert dict(one.split("=", 1) for one in settings) == own
    assert rest == words


def test_a_script_may_start_another(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text("torchrun train.py --lr $1 --name $NAME")
    outer = tmp_path / "outer.sh"
    outer.write_text(f"export NAME=n\nbash {tmp_path}/inner.sh 3")
    words = ["torchrun", "train.py", "--lr", "3", "--name", "n"]
    assert started([str(outer)]).words == ["NAME=n", *words]
    (tmp_path / "self.sh").write_text(f"bash {tmp_path}/self.sh")
    with pytest.raises(InputError, match="starts itself"):
        started([str(tmp_path / "self.sh")])


def test_variables_that_are_not_set_are_told(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --model checkpoints/$MODEL_OF_NOBODY\npython other.py")
    found = started(["bash", "-x", str(script)])
    assert found.words == ["python", "train.py", "--model", "checkpoints/"]
    assert (found.programs, found.unset) == (2, ("MODEL_OF_NOBODY",))
    assert started(["MODEL_OF_NOBODY=a", "sh", str(script)]).words == [
        *["MODEL_OF_NOBODY=a", "python", "train.py", "--model", "checkpoints/a"]
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello\nls", "starts no program that a trace can run"),
        ("", "starts no program that a trace can run"),
        ("python train.py --n $(cat n)", r"needs a shell for `\$\(cat n\)`"),
        ("N=`wc -l < x`\ntorchrun train.py $N", "needs a shell for `.wc -l < x"),
        ("python train.py --n ${A//b*/c}", "needs a shell for"),
        ("python train.py --n $((2 ** 9))", "needs a shell for"),
    ],
)
def test_what_only_a_shell_knows_is_refused(text: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(InputError, match=said):
        started([str(script)])


def test_the_folder_and_the_gpus_go_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    script = tmp_path / "run.sh"
    script.write_text("cd missing\ncd src\nN=$(nvidia-smi -L | wc -l)\ntorchrun --n $N train.py")
    words = ["env", "-C", "src", "torchrun", "--n", "8", "train.py"]
    assert started([str(script)], gpus=8).words == words
    found = split(["--gpu", "8xh100", "bash", str(script)], {"--gpu": True})
    assert (found.subject, found.launcher) == ("train.py", "env -C src torchrun --n 8")


def test_what_is_no_file_of_a_script_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "long.sh").write_text("#" * 100_000)
    (tmp_path / "deep.sh").write_text("python train.py " + "${A:-" * 5000 + "}" * 5000)
    wrong = {"pipe": "is not a regular file", "long": "is too long", "deep": "within each other"}
    for name, said in wrong.items():
        with pytest.raises(InputError, match=said):
            started([str(tmp_path / f"{name}.sh")])
    with pytest.raises(InputError, match="is not a regular file"):
        started(["bash", "--norc", str(tmp_path)])
    assert started(["bash", "-xec", "python train.py"]).words == ["python", "train.py"]


def test_an_open_quote_ends_with_the_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --port $((RANDOM % 9 + 2)) \"--name 'x")
    words = ["python", "train.py", "--port", "3", "--name 'x"]
    assert started([str(script)]).words == words


def test_the_command_line_says_which_command_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 4 train.py --lr $1\npython evaluate.py")
    forms = (["bash", str(script), "3"], [str(script), "3"], ["--", str(script), "3"])
    for words in forms:
        found = split(words, {})
        assert (found.subject, found.arguments) == ("train.py", ["--lr", "3"])
        assert found.launcher == "torchrun --nproc_per_node 4"
        said = capsys.readouterr().err
        assert "starts `torchrun --nproc_per_node 4 train.py --lr 3`" in said
        assert "the first of 2 commands" in said
    assert main(["trace", str(tmp_path / "missing.sh")]) == 2
    assert "cannot be read: no such file" in capsys.readouterr().err
