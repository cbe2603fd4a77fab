"""`--python`: the trace runs with another environment's packages, where memfit is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import memfit
from memfit.api.verbs import trace
from memfit.errors import InputError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def environment(folder: Path, *paths: str) -> Path:
    """A virtual environment without pip, that sees what lies on `paths`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "seen.pth").write_text("".join(f"{one}\n" for one in paths))
    return folder


# What the operators of torch 2.5 and later are called; where memfit asks for one of them, there is
# none.
OLDER = """\
import sys
if any(word.endswith("child.py") for word in sys.orig_argv):
    import torch
    NEWER = ("_fused_rms_norm", "_fused_rms_norm_backward", "_grouped_mm",
             "_scaled_grouped_mm", "_safe_softmax")
    kind = type(torch.ops.aten)
    true = kind.__getattr__
    def found(self, name):
        if name in NEWER and sys._getframe(1).f_globals["__name__"].startswith("memfit."):
            raise AttributeError(name)
        return true(self, name)
    kind.__getattr__ = found
    for name in NEWER:
        vars(torch.ops.aten).pop(name, None)
"""


def packages() -> list[str]:
    """Where this interpreter finds what is installed."""
    return sorted(
        {
            sysconfig.get_path("purelib"),
            sysconfig.get_path("platlib"),
            *(one for one in sys.path if "site-packages" in one),
        }
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With this one's packages, and one of its own; without memfit."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "own").mkdir()
    (folder / "own" / "only_there.py").write_text("WIDTH = 96\n")
    return environment(folder / "venv", *packages(), str(folder / "own"))


def python_of(folder: Path) -> str:
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


def test_a_script_has_the_packages_of_the_environment_that_is_named(
    other: Path, tmp_path: Path
) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python_of(other), "-c", "import memfit"],
        capture_output=True,
        text=True,
        check=False,
        env=bare,
    )
    if done.returncode == 0:
        pytest.skip("memfit lies among this interpreter's packages")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport only_there\nmodel = torch.nn.Linear(only_there.WIDTH, 8).cuda()\n"
        "model(torch.randn(2, "
        "only_there.WIDTH).cuda()).sum().backward()\ntorch.optim.SGD(model.parameters(), "
        "lr=1.0).step()\n"
    )
    with pytest.raises(InputError, match="needs the package `only_there`"):
        trace(script)
    for named in (str(other), python_of(other)):
        assert trace(script, python=named).parameters.total == 96 * 8 + 8


def test_a_model_is_traced_there_to_the_same_byte(other: Path) -> None:
    found = trace(CONFIG, gpu="a100-sxm-80gb", seq=64, framework="transformers", python=str(other))
    here = memfit.estimate(
        CONFIG, gpu="a100-sxm-80gb", seq=64, framework="transformers", by="trace"
    )
    assert (found.memory.allocated, found.memory.reserved, found.memory.parts) == (
        here.memory.allocated,
        here.memory.reserved,
        here.memory.parts,
    )
    assert found.versions == here.versions


def test_an_environment_that_lacks_what_it_takes_is_told(tmp_path: Path) -> None:
    bare = environment(tmp_path / "bare")
    with pytest.raises(InputError) as caught:
        trace(CONFIG, python=str(bare))
    (problem,) = caught.value.problems
    assert "has no `torch`" in problem.message
    assert problem.where == "python"
    for named in (str(tmp_path / "nothing"), str(Path(__file__))):
        with pytest.raises(InputError, match="` is not an interpreter or a virtual environment"):
            trace(CONFIG, python=named)


@pytest.mark.parametrize(
    "job",
    [{"attention": "math"}, {"method": "lora", "checkpointing": "full"}],
    ids=["math", "lora"],
)
def test_operators_that_an_older_torch_lacks_are_not_needed(
    job: dict[str, str], tmp_path: Path
) -> None:
    """Not by this model; the packages around memfit go on finding them."""
    folder = environment(tmp_path / "venv", *packages())
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "sitecustomize.py").write_text(OLDER)
    found = trace(
        CONFIG, gpu="a100-sxm-80gb", seq=64, framework="transformers", python=str(folder), **job
    )
    here = memfit.estimate(
        CONFIG, gpu="a100-sxm-80gb", seq=64, framework="transformers", by="trace", **job
    )
    assert found.memory.allocated == here.memory.allocated
