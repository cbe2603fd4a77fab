"""Small things at which scripts of other people stopped, a few lines for each, and the ways in
which people start a program."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import torch
from memfit.api.verbs import trace
from memfit.cli.trace import split
from memfit.errors import InputError
from memfit.trace import failures, lines
from memfit.trace.failures import stand_in
from memfit.trace.imports import ORIGINALS

STEPS = """
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
best = 1e9
for _ in range(3):
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    each(model, loss, best)
"""
MAKERS = """
import torch
gpu = torch.device("cuda")
made = [
    torch.tensor([1, 2], device="cuda"), torch.tensor(1.5, device=gpu), torch.tensor([1], device=0),
    torch.as_tensor([1.0], device="cuda"), torch.as_tensor(torch.ones(2), device=gpu),
    torch.asarray([1.0], device="cuda"), torch.zeros(2, device=gpu),
]
small = torch.tensor([1, 2, 3])
there = small.to(gpu)
made += [
    small.to(gpu, torch.float32), small.to(gpu, torch.int32), (small > 1).to(gpu, torch.int32),
    there.to(made[0].device, torch.int32), (there != 2).to(gpu, torch.int32),
    there.to(device=gpu, dtype=torch.int32), there.new_tensor([1, 2]), made[1].new_tensor([1.0]),
    torch.cumsum(there, 0).type_as(there), there.type_as(made[1]), made[1].type_as(there),
    there.new(2, 3), torch.nn.utils.rnn.pad_sequence([there, there[:2]]),
]
assert all(one.is_cuda for one in made), [one.device for one in made]
assert not there.new_tensor([1], device="cpu").is_cuda
assert there.to(gpu) is there
last = (torch.arange(3, device=gpu) * (there != 2).to(gpu, torch.int32)).argmax(-1)  # as in heads

from torch.utils.flop_counter import FlopCounterMode  # asks whether functions are Triton's
import functorch
stream = torch.cuda.Stream()
with torch.cuda.stream(stream=stream), torch.cuda.device(device=0):
    pass


def each(model, loss, best):
    if loss > 3 or loss < best or not torch.allclose(loss, loss + 1):
        pass
    if (model.weight > 0).any():
        raise SystemExit("a condition was taken as true")
    drawn = torch.randn(8, 8, device="cuda")
    drawn[drawn > 0] = 0
    assert torch.masked_select(drawn, drawn > 0).shape == (64,)
    assert (drawn > 0).nonzero().shape == (64, 2) and (drawn > 2).nonzero().item() == 1
    assert len(torch.where(drawn > 0)) == 2
"""


def test_small_things_come_through(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MAKERS + STEPS)
    found = trace(script)
    assert found.script is not None
    assert found.script.steps == 3
    assert [one.level for one in found.problems] == ["note"] * len(found.problems)
    assert any("conditions" in one.message for one in found.problems)
    with pytest.raises(InputError, match="taken as true"):
        trace(script, assume="true")


BY_VALUES = """
import torch, torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
gpu = torch.device("cuda")
words = nn.Embedding(100, 32).to(gpu)
lstm = nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True).to(gpu)
head = nn.DataParallel(nn.Linear(128, 50).to(gpu))
Tensor = torch.cuda.FloatTensor
optimizer = torch.optim.Adam([*words.parameters(), *lstm.parameters(), *head.parameters()])
for _ in range(2):
    ids, lengths = torch.randint(0, 100, (8, 40)), torch.randint(20, 41, (8,))
    packed = pack_padded_sequence(words(ids.to(gpu)), lengths, batch_first=True,
                                  enforce_sorted=False)
    assert packed.data.shape == (int(lengths.sum()), 32)
    out, known = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    logits = head(out)
    targets, counts = torch.randint(1, 50, (8, 10)).to(gpu), torch.full((8,), 10)
    loss = nn.CTCLoss()(logits.log_softmax(-1).transpose(0, 1), targets, known, counts)
    loss.backward()
    optimizer.step()
    choice = torch.distributions.Categorical(logits=logits[0, 0]).sample().item()
    assert 0 <= choice < 50 and int((logits > 0).sum()) > 0
    noise = Tensor(8, 4).fill_(1.0)
    assert noise.is_cuda and noise.type() == "torch.cuda.FloatTensor"
    assert ids.float().type(Tensor).is_cuda and isinstance(noise, Tensor)
linear = nn.Linear(4, 4).to(gpu)
of_weights = torch.func.grad(
    lambda weights, x: torch.func.functional_call(linear, weights, (x,)).sum()
)
each = torch.func.vmap(of_weights, (None, 0))
gradients = each(dict(linear.named_parameters()), torch.randn(5, 4, device=gpu))
assert gradients["weight"].shape == (5, 4, 4)
torch.cuda.memory._snapshot()
"""
ABSENT = """
import torch, wandb
from datasets import Audio, load_dataset
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import SummaryWriter
from transformers import AutoModelForSequenceClassification, AutoTokenizer

strange = load_dataset("someone/unknown")
assert "audio" in strange["train"].column_names  # a script that looks for it needs it
strange = strange.rename_column("intent", "labels").cast_column("audio", Audio(sampling_rate=16000))
assert strange["train"].features["audio"].sampling_rate == 16000
assert strange["train"].features["labels"].names == ["0", "1"] and len(strange["test_sft"])
heard = strange["train"].map(
    lambda rows: {"n": [len(one["array"].squeeze()) + len(said) * 0
                        for one, said in zip(rows["audio"], rows["transcript"])]},
    batched=True, remove_columns=strange["train"].column_names)
assert heard.column_names == ["n"] and heard[0]["n"] == 160000
faster = strange["train"].cast_column("audio", Audio(sampling_rate=24000))
assert faster[0]["audio"]["array"].shape == (240000,)
assert faster.map(lambda row: {"n": len(row["audio"]["array"])})[0]["n"] == 240000
files = {"train": "hf://datasets/someone/files/train.parquet"}
files = load_dataset("parquet", data_files=files, split="train")
assert "nothing" not in files.with_format("torch")[0] and files[0]["question"]
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
data = load_dataset("glue", "mrpc")
data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True,
                                       padding="max_length", max_length=64), batched=True)
data = data["train"].select_columns(["input_ids", "attention_mask", "token_type_ids", "label"])
data = data.rename_column("label", "labels").with_format("torch")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased").cuda()
kept = torch.load("last.pt")
model.load_state_dict(kept["model"])
rows = [torch.load(f"row{place}.pt") for place in range(20)]
optimizer = torch.optim.AdamW(model.parameters())
writer = SummaryWriter()
wandb.init(project="x")
for place, batch in enumerate(torch.utils.data.DataLoader(data.select(range(6)), batch_size=2)):
    loss = model(**{name: one.cuda() for name, one in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss.item(), place)
    wandb.log({"loss": loss})
"""
COPIES = """
from transformers import AutoConfig, AutoTokenizer

assert len(AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1")) == 32000
name = "unsloth/Llama-3.2-1B-Instruct-bnb-4bit"
assert len(AutoTokenizer.from_pretrained(name)) == 128256
config = AutoConfig.from_pretrained(name)
assert config.hidden_size == 2048 and config.quantization_config["load_in_4bit"]
AutoConfig.from_pretrained("unsloth/Llama-3.2-1B-unsloth-bnb-4bit")

from transformers import AutoFeatureExtractor, AutoModelForCausalLM, Mxfp4Config
assert AutoTokenizer.from_pretrained("facebook/opt-350m").pad_token == "<pad>"
assert AutoTokenizer.from_pretrained("xlnet-base-cased").model_max_length > 10**20
small = AutoConfig.from_pretrained("openai/gpt-oss-20b", num_hidden_layers=1)
small = AutoModelForCausalLM.from_pretrained(
    "openai/gpt-oss-20b", config=small, quantization_config=Mxfp4Config(dequantize=True))
assert small.dtype.itemsize == 2
waves = AutoFeatureExtractor.from_pretrained("facebook/wav2vec2-base")
assert waves([0.0] * 800, sampling_rate=16000)["input_values"][0].shape == (800,)

import urllib.request
import requests
there = requests.get("https://data.invalid/input.txt", timeout=1)
there.raise_for_status()
assert len(there.text) == len(urllib.request.urlopen("https://data.invalid/a.txt").read()) > 100_000
"""
DOWNLOADS = """
import sys, urllib.request
import requests
address = "https://data.invalid/a.dat"
requests.get(address, timeout=1) if sys.argv[1:] else urllib.request.urlopen(address)
"""
UNPACKS = """
import io, tarfile, urllib.request
packed = io.BytesIO(urllib.request.urlopen("https://data.invalid/cora.tgz").read())
tarfile.open(fileobj=packed).extractall(".")
raise FileNotFoundError("./cora/cora.content not found.")  # without a name, as numpy's
"""
EVALUATES = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    with torch.no_grad():
        losses = [model(torch.randn(8, 64, device="cuda")).mean().item() for _ in range(COUNT)]
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
BEFORE_AND_AFTER = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())

def evaluate(count):
    with torch.no_grad():
        for _ in range(count):
            model(torch.randn(8192, 512, device="cuda"))

evaluate(COUNT)
for _ in range(2):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    evaluate(5)
"""
COLLECTS = """
import torch

class First(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 64)

    def forward(self, given):
        return self.head(given)[:, :1].mT

model, found, seen = First().cuda(), [], []
with torch.no_grad():
    for _ in range(COUNT):
        found.append(model(torch.randn(8, 32, 64, device="cuda")))
        assert found[-1].stride() == (32 * 64, 1, 64), found[-1].stride()
    model.head.register_forward_hook(lambda module, given, made: seen.append(made))
    model(torch.randn(8, 32, 64, device="cuda"))
assert len(seen) == 1
"""
GATHERS = """
import torch

class Gathering(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        self.found = []

    def forward(self, given):
        self.found.append(super().forward(given))
        return self.found[-1]

model = Gathering().cuda()
with torch.no_grad():
    for _ in range(9):
        model(torch.randn(8, 64, device="cuda"))
assert len(model.found) == 9, len(model.found)
model, seen = torch.nn.Sequential(torch.nn.Linear(64, 64)).cuda(), []
model[0].register_forward_hook(lambda module, given, made: seen.append(made))
with torch.no_grad():
    for _ in range(9):
        model(torch.randn(8, 64, device="cuda"))
assert len(seen) == 9, len(seen)
"""
COUNTS = """
import torch
model = torch.nn.BatchNorm1d(64).cuda()
with torch.no_grad():
    for _ in range(9):
        model(torch.randn(8, 64, device="cuda"))
assert model.num_batches_tracked.item() == 9
"""


def test_values_that_nobody_knows(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_VALUES)
    found = trace(script, steps=0)
    assert found.script is not None
    assert found.script.steps == 2
    assert any("integers" in one.message for one in found.problems)


def test_what_is_not_there(tmp_path: Path) -> None:
    """Data, a tokenizer, a checkpoint and packages that report: each is named."""
    script = tmp_path / "train.py"
    script.write_text(ABSENT)
    found = trace(script)
    assert found.script is not None
    assert found.script.steps == 3
    assert found.parameters.total == 108_311_810  # of the true model
    said = " ".join(one.message for one in found.problems)
    for word in (
        "`glue`",
        "`someone/files`",
        "the script asks for, with values that their names and its lines suggest",
        "10 s of silence at 16 kHz",
        "tokenizer of `bert-base-cased`",
        "`last.pt`",
        "`wandb`",
        "tensorboard",
    ):
        assert word in said
    files = [one for one in found.problems if ".pt` was not found" in one.message]
    assert len(files) == 5
    assert "`row4.pt`, like other files after it, was not found" in said


def test_tokenizers_without_files_and_copies_of_models(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COPIES)
    found = trace(script, steps=0, offline=True)
    said = " ".join(one.message for one in found.problems)
    assert "assumed to have the sizes of `meta-llama/Llama-3.2-1B-Instruct`" in said
    assert "processor of `facebook/wav2vec2-base` was not found" in said
    assert "config of `xlnet-base-cased` was not found: the published sizes are assumed" in said
    for name in ("mistralai/Mistral-7B-v0.1", "facebook/opt-350m", "xlnet-base-cased"):
        assert f"tokenizer of `{name}` was not found" in said
    assert "`input.txt` was not downloaded" in said
    assert said.count("takes more memory, for some of its layers stay in 16 bits") == 1


def test_a_failed_download_names_its_address(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DOWNLOADS)
    for words in ((), ("by-requests",)):
        with pytest.raises(InputError, match=r"downloads `https://data\.invalid/a\.dat`") as caught:
            trace(script, *words)
        assert "`--network`" in caught.value.problems[0].hint


WITHOUT_DATA = "def {name}(*_): raise LookupError\n"
SPLITS = """
import nltk.data, torch
from nltk.tokenize import sent_tokenize
nltk.data.find("tokenizers/punkt")
assert sent_tokenize("A sentence. Another one.") == ["A sentence.", "Another one."]
torch.from_numpy(torch.load("series.pt"))
"""


def test_data_of_nltk_and_of_a_missing_file(tmp_path: Path) -> None:
    """nltk's two modules, as they are without their data."""
    (tmp_path / "nltk").mkdir()
    for module, names in (("data", ["find"]), ("tokenize", ["sent_tokenize", "word_tokenize"])):
        text = "".join(WITHOUT_DATA.format(name=name) for name in names)
        (tmp_path / "nltk" / f"{module}.py").write_text(text)
    script = tmp_path / "train.py"
    script.write_text(SPLITS)
    with pytest.raises(InputError, match=r"needs the data of a file that was not found") as caught:
        trace(script)
    assert "torch.from_numpy" in str(caught.value.problems[0].where)


def test_a_file_of_an_empty_archive_names_the_archive(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNPACKS)
    expected = r"lacks a file, probably from `cora\.tgz`, which was not downloaded: \./cora"
    with pytest.raises(InputError, match=expected) as caught:
        trace(script)
    assert "`--network`" in caught.value.problems[0].hint
    missing = KeyError("There is no item named 'cora.content' in the archive")
    for bad, said in ((missing, True), (FileExistsError("images"), True), (KeyError("a"), False)):
        found = failures.explain(bad, "train.py", "script", ["cora.zip"]).message
        assert ("`cora.zip`" in found) == said


def test_repeated_passes_are_skipped(tmp_path: Path) -> None:
    """Many take what few take; the first of all differs by a workspace."""
    found = []
    for count in (3, 400):
        script = tmp_path / "train.py"
        script.write_text(EVALUATES.replace("COUNT", str(count)))
        found.append(trace(script, steps=2))
    few, many = found
    assert few.memory.allocated == many.memory.allocated
    assert any("796 passes without gradients" in one.message for one in many.problems)


def test_a_pass_is_run_again_where_more_is_alive(tmp_path: Path) -> None:
    """Optimizer states and gradients come between an evaluation and the next."""
    found = []
    for count in (0, 9):
        script = tmp_path / "train.py"
        script.write_text(BEFORE_AND_AFTER.replace("COUNT", str(count)))
        found.append(trace(script, steps=0))
    alone, preceded = found
    assert preceded.memory.allocated == alone.memory.allocated > 58_000_000
    assert any("passes without gradients" in one.message for one in preceded.problems)
    for text in (COUNTS, GATHERS):
        script.write_text(text)
        trace(script, steps=0)  # what is counted in a buffer or gathered in a list is not skipped


def test_results_of_skipped_passes_keep_all_that_true_ones_keep(tmp_path: Path) -> None:
    """A view keeps its whole storage; hooks that came later are called."""
    found = []
    for count in (3, 9):
        script = tmp_path / "train.py"
        script.write_text(COLLECTS.replace("COUNT", str(count)))
        found.append(trace(script, steps=0).memory.allocated)
    assert found[1] - found[0] == 6 * 8 * 32 * 64 * 4


def test_a_defect_of_ours_is_not_the_scripts(tmp_path: Path) -> None:
    """The stand-in for an event is handed what no event is."""
    script = tmp_path / "train.py"
    event = "torch.cuda.Event()"
    script.write_text(f"import torch\n{event}.elapsed_time(None)\n")
    with pytest.raises(InputError, match="memfit's stand-in failed with AttributeError") as caught:
        trace(script)
    assert "not in `train.py`" in caught.value.problems[0].hint
    script.write_text("import torch\ntorch.zeros('three', device='cuda')\n")
    with pytest.raises(InputError, match="failed with TypeError: zeros"):
        trace(script)


STAND_IN = """
def refused(kind):
    return kind("cuda", "one")
def indexes(true, value):
    return true(value)[3]
def reads(true):
    return int(true.nothing())
def plain(value):
    return len(int(value))
"""


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (lambda made: made["refused"](torch.device), False),
        (lambda made: made["indexes"](tuple, [1]), True),
        (lambda made: made["reads"](object()), True),
        (lambda made: made["plain"](None), True),
        (lambda made: made["indexes"](lambda: 0, 1), False),
    ],
)
def test_who_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, ours: bool
) -> None:
    """Not by what a line looks like: by the function that its failing instruction called."""
    file = tmp_path / "made.py"
    file.write_text(STAND_IN)
    monkeypatch.setattr(lines, "OWN", str(tmp_path))
    monkeypatch.setitem(ORIGINALS, (id(torch), "device"), torch.device)
    made = runpy.run_path(str(file))
    with pytest.raises((TypeError, AttributeError, IndexError)) as caught:
        call(made)
    assert (stand_in(caught.value, "train.py") is not None) == ours


def test_modules_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind them is theirs, whatever it is called."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text("def each(*_): ...\n")
    ours = "import sys, torch\nfrom .own import each\nassert sys.argv[1:] == ['--gpu', '0']\n"
    (package / "train.py").write_text(ours + STEPS)
    monkeypatch.chdir(tmp_path)
    found = trace("-m package.train", "--gpu", "0", gpu="t4")
    assert found.script is not None
    assert found.script.steps == 3
    cells = [
        {"cell_type": "markdown", "source": ["# not code"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n"]},
        {"cell_type": "code", "source": ["!pip install it\n", "def each(*_): ...\n", STEPS]},
    ]
    Path("run.ipynb").write_text(json.dumps({"cells": cells}))
    assert trace("run.ipynb", gpu="t4").script is not None
    Path("bad.ipynb").write_text("[]")
    with pytest.raises(InputError, match="no notebook"):
        trace("bad.ipynb")
    with pytest.raises(InputError, match=r"no module `package\.nosuch`"):
        trace("-m package.nosuch")


def test_a_package_of_another_version(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.nosuch.module\n")
    with pytest.raises(InputError, match=r"needs `torch\.nosuch`, which the installed `torch`"):
        trace(script)


def test_what_is_no_script(tmp_path: Path) -> None:
    folder = tmp_path / "run.py"
    folder.mkdir()
    (folder / "train.py").touch()
    with pytest.raises(InputError, match="is a folder"):
        trace(folder)
    with pytest.raises(InputError, match=r"has no config\.json") as caught:
        trace(folder.rename(tmp_path / "run"))
    assert "run/train.py`" in caught.value.problems[0].hint
    with pytest.raises(InputError, match="set by the script itself") as caught:
        trace(tmp_path / "run" / "train.py", use="fsdp=8")
    assert "`--ranks N`" in caught.value.problems[0].hint


def test_whose_words_are_whose() -> None:
    valued = {"--gpu": True, "--json": False}
    told = split(["--gpu", "t4", "train.py", "--gpu", "0", "--json", "--", "x"], valued)
    assert told == ("train.py", ["--gpu", "t4"], ["--gpu", "0", "--json", "--", "x"], "")
    told = split(["--json", "-m", "package.train", "--gpu", "0"], valued)
    assert told == ("-m package.train", ["--json"], ["--gpu", "0"], "")
    told = split(["gpt2", "--gpu", "t4"], valued)
    assert told == ("gpt2", ["--gpu", "t4"], [], "")
