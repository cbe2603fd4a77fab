"""A traced script changes nothing outside, reads no secret and reaches nobody, by whatever this
machine gives; the fall-back is tested everywhere."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace.launch import secret

SCRIPT = Path(__file__).parent / "scripts" / "hostile.py"
SECRETS = {
    "HF_TOKEN": "hush",
    "WANDB_API_KEY": "hush",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "MY_DATABASE": "postgres://me:hush@host/db",
}
TRY = """
import sys
sys.path.insert(0, sys.argv[1])
from memfit.trace import sandbox
print(sandbox.enter(sys.argv[3], most=sys.argv[2]).level)
"""


def given(level: str, folder: Path) -> str:
    """What this machine gives where `level` is asked for."""
    source = str(Path(__file__).parents[2] / "src")
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRY, source, level, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def seen(folder: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()
    }


@pytest.mark.parametrize("level", ["namespaces", "landlock", "none"])
def test_nothing_outside_changes(
    level: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if level != "none" and given(level, tmp_path_factory.mktemp("try") / "it") != level:
        pytest.skip(f"this machine gives no {level}")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for name in ("kept.json", "kept.txt", "kept.sqlite"):
        (tmp_path / name).write_text("mine")
    before = seen(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        monkeypatch.setenv("PORT", str(server.getsockname()[1]))
        gate = "python" if level == "none" else "native"
        found = trace(SCRIPT, str(tmp_path), "hide", gate, steps=0, isolation=level)
        with pytest.raises(TimeoutError):
            server.accept()
    assert seen(tmp_path) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(before)
    assert found.script is not None
    assert found.script.isolation == {"none": "python"}.get(level, level)
    assert bool(found.script.gaps) == (level != "namespaces")
    files = {Path(one.path).name: one.size for one in found.script.files}
    assert files["model.pt"] == 512 * 512 * 4
    assert "model.tmp" not in files
    if level == "namespaces":
        assert {"kept.sqlite", "new.jit", "new.ctypes", "new.io", "new.spawned"} <= {*files}


def test_the_environment_is_kept_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert trace(SCRIPT, str(tmp_path), "keep", "python", steps=0, keep_env=True).script is not None


def test_what_is_a_secret() -> None:
    assert all(secret(name, value) for name, value in SECRETS.items())
    assert not any(
        secret(name, "/usr/bin") for name in ("PATH", "HOME", "HF_HOME", "CUDA_VISIBLE_DEVICES")
    )


def test_a_script_that_ends_early_has_the_last_word(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('usage: train.py --data DIR')\nprint('\\x1b[2Jno data')\nexit(3)\n")
    with pytest.raises(InputError) as caught:
        trace(script)
    assert caught.value.problems[0].message.endswith("with code 3 before its first training step")
    assert "usage: train.py --data DIR / " in caught.value.problems[1].message
