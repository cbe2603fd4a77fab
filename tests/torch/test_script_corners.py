"""Corners of what a script may do with tensors, each checked by the script itself."""

from __future__ import annotations

import pickle
import re
import runpy
import types
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import failures, lines, synthetic_data, synthetic_downloads, synthetic_tokenizers
from memfit.trace.cuda import Device
from memfit.trace.failures import explain
from memfit.trace.notebooks import beginning
from memfit.trace.refuse import Watcher
from memfit.trace.synthetic_data import columns_of, pictures, stand_in

HEAD = "import copy, torch\n"
MASKS = """
x = torch.randn(1000, 5000)
mask = torch.rand(1000) > 0.5
y = x[mask]
assert y.shape == (int(mask.sum()), 5000) and not y.is_cuda
assert torch.cuda.max_memory_allocated() == 0
"""
NOWHERE = """
half = torch.ones(4, 4, device="cuda").to("meta", torch.float16)
assert half.dtype == torch.float16 and half.device.type == "meta"
"""
NUMBERS = """
for one in (torch.inf, 1e9):
    chosen = torch.where(torch.ones(4) > 2, torch.ones(4), one)
    assert chosen.tolist() == [one] * 4
"""
COPIES = """
class Wrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8)
        self.own = torch.ones(3, requires_grad=True)
        self.own.tag, self.own.grad = [1], torch.full((3,), 2.0)


wrapper = Wrapper()
copied = copy.deepcopy(wrapper)
assert copied.own.grad.sum() == 6 and copied.own.tag == [1]
assert copied.own.tag is not wrapper.own.tag
copied.cuda()
assert copied.lstm.weight_hh_l0.is_cuda
pair = copy.deepcopy([torch.arange(3)] * 2)
assert pair[0] is pair[1] and pair[0].tolist() == [0, 1, 2]
there = torch.ones(3, device="cuda", requires_grad=True)
there.grad, there.tag = torch.ones(3, device="cuda"), [1]
again = copy.deepcopy(there)
assert again.tag == [1] and again.is_cuda and again.grad.is_cuda and again.grad is not there.grad
"""
SCALARS = """
assert (torch.ones(3, device="cuda") + torch.ones(())).is_cuda
try:
    torch.ones(3) + torch.ones((), device="cuda")
except RuntimeError as bad:
    assert "at least two devices" in str(bad)
else:
    raise SystemExit("a number on the GPU was added to a tensor on the CPU")
"""
TYPES = """
assert torch.ones(3, dtype=torch.complex64, device="cuda").type() == "torch.cuda.ComplexFloatTensor"
torch.set_default_tensor_type("torch.cuda.FloatTensor")
assert torch.ones(2).is_cuda
torch.set_default_tensor_type("torch.FloatTensor")
assert not torch.ones(2).is_cuda
"""


MOVES = """
moving = torch.nn.Linear(64, 64)
for one in moving.parameters():
    one.data = one.data.to("cuda")
held = torch.cuda.memory_allocated()
assert held >= 16384 and all(one.is_cuda for one in moving.parameters())
for one in moving.parameters():
    one.data = one.data.to("cpu")
assert torch.cuda.memory_allocated() == held - 16896
assert not any(one.is_cuda for one in moving.parameters())
for one in moving.parameters():
    one.data = one.data.to("cuda", non_blocking=True)
assert torch.cuda.memory_allocated() == held and moving.weight.is_cuda
moving(torch.randn(8, 64, device="cuda")).sum().backward()
assert moving.weight.grad.is_cuda
"""


def test_corners(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + MASKS + NOWHERE + NUMBERS + COPIES + MOVES + SCALARS + TYPES)
    trace(script, steps=0)


DISTRIBUTED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,))
spread = distribute_tensor(torch.ones(1, 4, device="cuda"), mesh, [Shard(1)])
spread.squeeze_(0)
assert spread._spec.shape == (spread * 2).shape == (4,), (spread._spec, (spread * 2).shape)
"""


def test_distributed_tensors_change_their_shape_in_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    trace(script, ranks=2, steps=0)


RESUMES = """
import torch
from collections import OrderedDict
from torch.optim import lr_scheduler as schedules

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = torch.load("last.pt")
model.load_state_dict(kept["model"].to(0))
renamed = OrderedDict((name[7:], one) for name, one in kept["state_dict"].items())
model.load_state_dict(renamed)
optimizer.load_state_dict(kept["optimizer"])
steps = schedules.StepLR(optimizer, 1)
for kind in (
    schedules.SequentialLR(optimizer, [steps, schedules.StepLR(optimizer, 1)], [1]),
    schedules.ChainedScheduler([steps]),
    schedules.ReduceLROnPlateau(optimizer),
):
    kind.load_state_dict(kept["scheduler"])
best = kept["best"]
assert max(0.5, best) == 0.5 and not best > 0.1 and best < 1 and best == 0
assert best * 3 + 2 == 2 and 1 - best == 1 and round(best, 2) == 0 and f"{best:.1f}" == "0.0"
assert [*range(kept["epoch"] + 1, 3)] == [1, 2]
first, second, third = kept["rest"]
first.anything(second)[third].more()
assert [one for one in kept["list"]] == []
try:
    torch.load("best.pt")
except FileNotFoundError:
    pass
else:
    raise SystemExit("its own way for a missing file was not taken")
"""


def test_resuming_from_what_is_not_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUMES)
    found = trace(script, steps=0)
    assert any("`last.pt` was not found" in one.message for one in found.problems)


SIZED = """
import torch
kept = torch.load("last.pt")

class Net(torch.nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, width) for _ in range(count))

Net(WIDTH, COUNT)
"""


@pytest.mark.parametrize(
    ("width", "count"),
    [("64", "kept['layers']"), ("kept['width']", "2"), ("4 * kept['width']", "kept['layers']")],
)
def test_a_model_is_not_made_without_its_sizes(tmp_path: Path, width: str, count: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SIZED.replace("WIDTH", width).replace("COUNT", count))
    with pytest.raises(InputError, match="takes its sizes from a checkpoint that was not found"):
        trace(script, steps=0)


def test_a_data_sets_own_error_stays_one() -> None:
    """Only files that are not there have a stand-in."""

    class Flowers102:
        def __init__(self) -> None:
            raise RuntimeError("a mistake of its own")

    change = dict(pictures(Watcher(Device()), 8))["torchvision.datasets.flowers102"]
    [(_, _, init)] = change(types.SimpleNamespace(Flowers102=Flowers102))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a mistake of its own"):
        init(object())


def test_blank_pictures_where_a_download_fails() -> None:
    """torchvision's own sentence, in mnist.py; what takes the place is named."""

    class MNIST:
        def __init__(self, root: str, train: bool = True) -> None:
            raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    watcher = Watcher(Device())
    change = dict(pictures(watcher, 8))["torchvision.datasets.mnist"]
    [(_, _, init)] = change(types.SimpleNamespace(MNIST=MNIST))  # type: ignore[arg-type]
    made: Any = MNIST.__new__(MNIST)
    init(made, "data", False)
    assert len(made) == 10_000
    assert made.data.shape == (10_000, 28, 28)
    assert "`MNIST` were not found" in watcher.notes["data MNIST"].message


def test_the_size_of_a_data_sets_pictures_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(Device())
    monkeypatch.setattr(synthetic_data, "picture", lambda size, mode: (size, mode))
    source = synthetic_data.Source(8, 64, watcher.note)
    assert source.value("image", 0) == (64, "RGB")
    assert source.value("gray 28", 0) == (28, "L")
    chosen, fixed = watcher.notes.values()
    assert "64 by 64" in chosen.message
    assert "--image-size" in chosen.hint
    assert "28 by 28" in fixed.message
    assert not fixed.hint


def test_only_what_nobody_answers_has_a_stand_in() -> None:
    """A server that says no, and a name that tiktoken does not know, are errors of the script."""
    watcher = Watcher(Device())

    def urlopen(url: str) -> Any:
        raise urllib.error.HTTPError(url, 404, "Not Found", Message(), None)

    def get_encoding(name: str) -> Any:
        raise ValueError(f"Unknown encoding {name}")

    answers = {
        **synthetic_downloads.changes(watcher, columns_of(watcher, 8, 8)),
        **synthetic_tokenizers.changes(watcher),
    }
    downloads: Any = types.SimpleNamespace(urlopen=urlopen)
    [(_, _, patched)] = answers["urllib.request"](downloads)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        patched("https://data.invalid/a.txt")
    [(_, _, patched)] = answers["tiktoken.registry"](
        types.SimpleNamespace(get_encoding=get_encoding)  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError, match="Unknown encoding nosuch"):
        patched("nosuch")
    assert not watcher.notes


def test_data_of_nltk_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        raise LookupError(name)

    watcher = Watcher(Device())
    module: Any = types.SimpleNamespace(find=find)
    [(_, _, patched)] = synthetic_downloads.changes(watcher, columns_of(watcher, 8, 8))[
        "nltk.data"
    ](module)
    monkeypatch.setattr(lines, "is_users", lambda name: name == __file__)
    assert patched("tokenizers/punkt") == "tokenizers/punkt"
    assert [*watcher.notes] == ["nltk tokenizers/punkt"]
    monkeypatch.setattr(lines, "is_users", lambda name: False)
    with pytest.raises(LookupError):
        patched("tokenizers/punkt")


def test_a_tokenizer_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ValueError("Unrecognized configuration class MarianConfig to build an AutoTokenizer.")
    monkeypatch.setattr(failures, "is_there", lambda name: False)
    assert "needs the package `sentencepiece`" in explain(bad, "train.py", "script").message
    monkeypatch.setattr(failures, "is_there", lambda name: True)
    assert "failed with ValueError" in explain(bad, "train.py", "script").message


class Pictures:
    """A class that a started process can import."""


def test_blank_pictures_go_to_started_processes() -> None:
    made: Any = Pictures()
    stand_in(made, 3, 8, (), {"root": "data"})
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - made a line above
    assert len(again) == len(made) == 2048
    assert again.class_to_idx == {"0": 0, "1": 1, "2": 2}
    assert again.root == "data"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import transformers\ntransformers.TrainingArgumentz", "uses `TrainingArgumentz` of"),
        ("import transformers\ntransformers.GPT2Config().never", "uses `never` of `GPT2Config`"),
        ("from transformers import Never", "imports `Never` from `transformers`"),
        ("import torch\ntorch.nn.Linear(1, 2, never=3)", "passes `never` to `"),
        ("import torch\ntorch.nn.Linear(1, 2).never", "uses `never` of `Linear`"),
    ],
)
def test_other_versions_are_named(line: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(line)
    with pytest.raises((AttributeError, ImportError, TypeError)) as bad:
        runpy.run_path(str(script))
    found = explain(bad.value, "train.py", "script")
    assert said in found.message
    assert re.search(r"the installed (torch|transformers) \d", found.message)
    assert "--python" in str(found.hint)


def test_own_mistakes_are_not_a_version(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f(): ...\nf(never=3)")
    with pytest.raises(TypeError) as bad:
        runpy.run_path(str(script))
    assert "installed" not in explain(bad.value, "train.py", "script").message


def test_files_that_are_not_there_are_named() -> None:
    with pytest.raises(FileNotFoundError) as bad:
        Path("never.json").read_text()
    assert "`never.json`, which is not there" in explain(bad.value, "train.py", "script").message


def test_what_a_cell_takes_from_the_future_comes_first() -> None:
    made = beginning("import os\nfrom __future__ import print_function, division\nprint(1)\n")
    compile(made, "cell", "exec")
    assert made.count("\n") == 3
    assert beginning("import os\n") == "import os\n"


ON_THE_CPU = """
import torch
model = torch.nn.Linear(8, 8)
model(torch.randn(8, 8)).mean().backward()
torch.optim.SGD(model.parameters()).step()
"""


def test_a_script_that_stays_on_the_cpu_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_THE_CPU)
    found = trace(script, steps=1)
    assert [one.message for one in found.problems if "puts nothing on the GPU" in one.message]


def test_how_a_script_ended_says_what_to_try() -> None:
    asked = explain(SystemExit(2), "train.py", "").hint
    failed = explain(SystemExit(1), "train.py", "").hint
    assert "arguments" in asked
    assert "--show-output" in failed
