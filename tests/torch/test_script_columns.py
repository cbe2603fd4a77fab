"""Data sets that are not there, where a library and not a line of the script names the columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import trace
from memfit.trace import trainer_columns
from memfit.trace.asked_columns import MARK, Columns, kind_of
from memfit.trace.cuda import Device
from memfit.trace.embedding_columns import completed, read_by
from memfit.trace.refuse import Watcher
from memfit.trace.synthetic_data import Source, entry, rows, spoken
from memfit.trace.synthetic_tokenizers import table

STEPS = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
STREAMS = """
from datasets import load_dataset
import json
from huggingface_hub import HfApi, create_repo, get_full_repo_name, notebook_login, whoami
from huggingface_hub import hf_hub_download, snapshot_download
from google.colab import userdata
import IPython.display

notebook_login()
assert whoami()["name"] == HfApi().whoami()["name"]
assert get_full_repo_name("model") == "user/model" and not userdata.get("HF_TOKEN")
assert create_repo("model").repo_id == "user/model" and create_repo("a/b").repo_id == "a/b"

file = hf_hub_download("someone/files", "train/a.json", repo_type="dataset")
assert len(json.load(open(file))) == 200 and file.endswith("train/a.json")
lines = [json.loads(one) for one in open(file)]
assert len(lines[0].get("answer", "").split()) == len(lines[0][1].get("answer").split()) == 32
assert not hf_hub_download("someone/files", "a.bin").endswith("train/a.json")
assert snapshot_download("someone/files") == "someone/files"
assert list(load_dataset("Abirate/english_quotes")) == ["train"]
marco = load_dataset("microsoft/ms_marco", "v1.1", split="train[:4]")
for query, passages in zip(marco["query"], marco["passages"]):
    assert len(passages["passage_text"]) == 10 and sum(passages["is_selected"]) == 1
replies = load_dataset("eli5_category", split="train[:4]").flatten()["answers.text"]
assert [len(one.split()) for texts in replies for one in texts] == [32] * 4
for row in load_dataset("someone/strange", split="train").shuffle(seed=1).select(range(2)):
    assert row["review_title"]
pair = load_dataset("someone/pairs", split="train")[0]
assert isinstance(pair["prompt"] + pair["chosen"], str)
assert [one["role"] for one in pair["rejected"]] == ["user", "assistant"]
parts = load_dataset("imdb", split="test").train_test_split(train_size=10_000, test_size=1_000)
assert parts["test"].remove_columns(["text", "gone"]).column_names == ["label"]
assert 100 < len(parts["train"]) < 200 and 10 < len(parts["test"]) < 20
data = load_dataset("someone/streamed", split="train", streaming=True)
assert len(next(iter(data))["question"].split()) == 32
assert "gone" not in next(iter(data))
data = data.skip(50_000).shuffle(buffer_size=10)
assert next(iter(load_dataset("imdb", split="train", streaming=True).skip(50_000)))["text"]
joined = data.map(
    lambda rows: {"n": [len(a + b) for a, b in zip(rows["question"], rows["response"])]},
    batched=True, remove_columns=["question", "response", "text", "label"])
assert set(next(iter(joined))) == {"n"}
assert next(iter(data.rename_column("thing", "words")))["words"]
kept = data.filter(lambda row: len(row["answer"]) > 0).remove_columns("answer")
assert set(next(iter(kept))) == {"text", "label"}

def told(row):
    assert "input_ids" not in row and "image" not in row.keys()
    assert all(one in row.keys() for one in ("real", "generated")) and "history" in row
    return {"both": row["real"] + row["generated"]}

assert len(load_dataset("someone/pairs", split="train").map(told)[0]["both"].split()) == 63
fetched = load_dataset("someone/fetched", split="train").with_transform(
    lambda rows: {"n": [len(one.split()) for one in rows["caption"]]})
assert fetched[0]["n"] == 32 and fetched[:3]["n"] == [32] * 3
mine = load_dataset("json", data_files={"train": "data/mine.jsonl", "test": "t.jsonl"})
assert len(mine["train"][0]["question"].split()) == 32 and len(mine["test"]) == 200
assert load_dataset("csv", data_files="mine.csv", split="train")[0]["review"]
for row in load_dataset("someone/streamed", streaming=True)["train"]:
    assert row["title"]
    break
"""
PREFERENCES = """
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path=name)
AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=name, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, num_hidden_layers=1))
settings = DPOConfig("out", per_device_train_batch_size=1)
data = load_dataset("someone/unheard-of", split="train").select(range(20))
DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer).train()
"""


def traced(folder: Path, text: str, *, steps: int = 3) -> None:
    script = folder / "train.py"
    script.write_text(text)
    found = trace(script, tokens=32, steps=steps)
    assert found.script is not None
    assert found.script.steps == steps


def test_streams_and_logins(tmp_path: Path) -> None:
    traced(tmp_path, STREAMS + STEPS)


INFERENCE = """
import torch
from datasets import load_dataset

row = load_dataset("someone/strange", split="test")[1]
prompt = "Sentence: " + row["target"] + "\\n"
assert len(prompt.split()) == 33 and row["label"] == 1
with torch.no_grad():
    model = torch.nn.Linear(64, 64).cuda()
    model(torch.randn(8, 64, device="cuda"))
"""


def test_inference_is_an_answer(tmp_path: Path) -> None:
    """A script without training is followed to its end; a label that it joins to texts is one."""
    script = tmp_path / "chat.py"
    script.write_text(INFERENCE)
    found = trace(script, tokens=32, gpu="t4")
    assert found.script is not None
    assert (found.script.steps, found.parameters.total, found.parameters.trainable) == (0, 4160, 0)
    assert found.memory.parts["weights"] == 16640


def test_trainer_of_preferences_finds_its_columns(tmp_path: Path) -> None:
    traced(tmp_path, PREFERENCES, steps=1)


def test_reward_functions_name_columns() -> None:
    def reward(prompts, completions, solution, *args, level="", **more):  # type: ignore[no-untyped-def]
        return [more["answer"], more.get("trainer_state"), more.get("task")]

    assert [*trainer_columns.rewarded(reward)] == ["solution", "level", "answer", "task"]
    assert [*trainer_columns.rewarded(["a model", reward])][:1] == ["solution"]


def test_preferences_have_no_label() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    data._info.description = MARK
    grown = trainer_columns.grow(Columns(Source(8, 8, print)), data, trainer_columns.PREFERENCE)
    assert set(grown.column_names) == {"text", "prompt", "chosen", "rejected"}


class TripletLoss:
    """Named like a loss of sentence-transformers that reads three texts."""


class MatryoshkaLoss:
    def __init__(self, loss: object) -> None:
        self.loss = loss


class SoftmaxLoss:
    num_labels = 5


@pytest.mark.parametrize(
    ("loss", "asked", "found"),
    [
        (MatryoshkaLoss(TripletLoss()), [], ["text", "positive", "negative"]),
        ({"all": TripletLoss}, ["query", "answer", "other"], ["query", "answer", "other"]),
        (SoftmaxLoss(), [], ["text", "positive", "label"]),
        (None, ["sentence1", "sentence2", "score"], ["sentence1", "sentence2", "score"]),
    ],
)
def test_losses_of_embeddings_find_their_texts(
    loss: object, asked: list[str], found: list[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = Columns(Source(64, 8, print))
    data = datasets.Dataset.from_dict({"text": ["a", "b"]})
    data._info.description = MARK
    for name in asked:
        columns.grow(data, name)
    made = completed(data, *read_by(loss), columns)
    assert made.column_names == found
    assert all(len(made[0][one].split()) > 10 for one in found[1:2])


def test_losses_read_classes_and_scores() -> None:
    assert read_by(SoftmaxLoss()) == (2, "label 5")
    assert read_by(None) == (2, "float")
    assert read_by(object()) == (0, "")


def test_rows_beyond_a_stand_ins_end() -> None:
    datasets = pytest.importorskip("datasets")
    watcher = Watcher(Device())
    changed = rows(watcher, lambda module: [])(datasets.arrow_dataset)
    select = next(one[2] for one in changed if one[1] == "select")
    data = datasets.Dataset.from_dict({"text": ["a"] * 10})
    assert len(select(data, range(100, 200))) == 10
    assert len(select(data, range(8, 100))) == 2
    assert len(select(data, range(8, 10))) == 2
    assert len(select(data, range(100, len(data)))) == 10
    assert len(select(data, range(0))) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("patient_history", "text"),
        ("article_body", "text"),
        ("doc_id", "sentence"),
        ("title", "sentence"),
        ("tweet", "sentence"),
        ("ner_tags", "tags 9"),
    ],
)
def test_columns_that_nobody_knows_are_as_long_as_asked(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    found = Source(500, 8, print).value(kind, 0)
    assert len(str(found).split()) > 400 or kind != "text"


CLONED = """
import json, os
from huggingface_hub.repository import Repository
from transformers import AutoConfig, AutoTokenizer
repository = Repository("out", clone_from="codeparrot/codeparrot-small")
repository.git_checkout("run-1", create_branch_ok=True)
with repository.commit("one"):
    pass
repository.git_pull()
assert AutoConfig.from_pretrained(repository.local_dir).vocab_size == 32768
tokenizer = AutoTokenizer.from_pretrained(repository.local_dir)
assert tokenizer.init_kwargs["name_or_path"] == "out"
"""


def test_clones_of_repositories_are_folders(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub.repository", reason="up to huggingface_hub 0.36")
    script = tmp_path / "train.py"
    script.write_text(CLONED + STEPS)
    trace(script)


def test_an_owner_names_columns_alike() -> None:
    assert entry("SetFit/sst2", "") == "setfit/*"
    assert entry("stanfordnlp/sst2", "") == "sst2"
    assert entry("nyu-mll/glue", "sst2") == "glue/sst2"
    assert set(table()["names"]["setfit/*"]) == {"text", "label", "label_text"}


def test_a_configuration_names_languages() -> None:
    columns = spoken({"id": "sentence", "translation": "translation"}, "Helsinki/opus_books en-it")
    assert columns == {"id": "sentence", "translation": "translation it"}
    assert set(Source(9, 8, print).value(columns["translation"], 0)) >= {"en", "it"}


def test_both_answers_of_a_dialogue_follow_one_prompt() -> None:
    source = Source(100, 8, print)
    chosen, rejected = source.value("dialogue", 3), source.value("dialogue", 3)
    prompts = [one[: one.rfind("Assistant:")] for one in (chosen, rejected)]
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("\n\nHuman: ")
    assert chosen != rejected
    assert len(chosen.split()) == 102
