"""Tables of pandas, classes that are texts, and misspelled files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.torch.test_script_columns import STEPS, traced
from tests.torch.test_script_pictures import FOLDERS, READER

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import missing_packages, near_files, script_literals

TABLES = """
import pandas as pd
from datasets import Dataset, load_dataset

df = pd.read_csv("mine/reviews.csv")
df = df[["review", "sentiment"]].dropna().rename(columns={"review": "text"})
df["label"] = df["sentiment"].map({"positive": 1, "negative": 0})
assert df["label"].notna().all() and set(df.label) == {0, 1}
assert len(df.text.iloc[3].split()) == 32
df["prompt"] = df.apply(lambda row: f"{row['instruction']} {row.answer}", axis=1)
for _, row in df.iterrows():
    assert row["context"]
    break
for row in df.itertuples():
    assert row.summary
    break
part = df.sample(frac=0.1, random_state=1).reset_index(drop=True)
assert part["category"].nunique() and part.loc[:10, "title"].str.len().min() > 3
data = Dataset.from_pandas(part).map(lambda row: {"n": len(row["question"]) + len(row["text"])})
names = sorted(set(df["topic"]))
label2id = {name: i for i, name in enumerate(names)}
assert [label2id[one] for one in df["topic"]][:2] == [0, 1] and isinstance(names[0], str)
two = pd.read_csv("x.tsv", sep="\\t", header=None, names=["source", "target"])
assert list(two.columns) == ["source", "target"]
two.columns = ["a", "b", "c"]
assert two["c"][0] and len(pd.read_csv("y.csv", nrows=7)) == 7
known = {"bug": 0, "feature": 1}
rows = load_dataset("someone/none", split="train").map(lambda x: {"y": known[x["kind"]]})
assert set(rows["y"]) == {0, 1}
"""


def test_tables_and_folders_have_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text(READER)
    traced(tmp_path, TABLES + FOLDERS + STEPS)


RECORDS = """
import json, os, urllib.request
import pandas as pd
import requests
from datasets import load_dataset
url = "https://example.com/data/instruction-data.json"
with urllib.request.urlopen(url) as answer:
    text = answer.read().decode("utf-8")
with open("instruction-data.json", "w") as file:
    file.write(text)
with open("instruction-data.json") as file:
    data = json.load(file)
train = data[:100]
assert len(data) == 200 and all(len(one["output"].split()) == 32 for one in train[:3])
entry = data[50]
assert entry["instruction"] == entry["instruction"] and entry["instruction"]
assert len(requests.get(url).json()["data"]) == 200
lines = [json.loads(one) for one in requests.get(url + "l").text.splitlines()]
assert len(lines) == 200 and lines[7]["question"]
urllib.request.urlretrieve(url, "again.json")
rows = load_dataset("json", data_files="again.json", split="train")
assert rows[0]["question"]
assert pd.read_json("again.json")["review"][0]
assert json.loads('{"a": 1}') == {"a": 1}
"""


def test_downloaded_json_has_the_fields_that_are_asked_for(tmp_path: Path) -> None:
    traced(tmp_path, RECORDS + STEPS)


READS = """
import pandas as pd
pd.read_json("data/trian.jsonl", lines=True)
"""


def test_a_misspelled_file_has_no_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "run.py").write_text(READS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"`data/trian.jsonl` was not found") as caught:
        trace("run.py")
    assert caught.value.problems[0].hint == "did you mean `data/train.jsonl`?"


def test_names_that_are_meant(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.json", "part-1.parquet", "train.py"):
        (data / name).touch()
    meant = str(data / "train.json")
    assert near_files.near(f"{data}/trian.json") == meant
    assert near_files.near(f"{data}/train.jsonl") == meant
    assert near_files.near(f"{tmp_path}/dta/train.json") == meant
    for other in ("val.json", "test.json", "train.csv", "part-2.parquet"):
        assert near_files.near(f"{data}/{other}") == ""


LITERALS = """
label2id = {name: i for i, name in enumerate(names)}
id2label = {0: "no", 1: "yes"}
def encode(row):
    kind = row["kind"].lower()
    return 1 if kind == "spam" else 0, label2id[row["topic"]], id2label[row["label"]]
df["mood"].replace({"good": 1, "bad": 0})
df = df[(df.lang == "en") & df["lang"].notna() & (df["text"] != "")]
[x for x in row["part"] if x in ("a", "b")]
kept = [place for place in places if isinstance(place, str)]
"""


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("kind", ("spam", script_literals.OTHER)),
        ("topic", script_literals.UNNAMED),
        ("label", (0, 1)),
        ("mood", ("good", "bad")),
        ("lang", ("en", script_literals.OTHER)),
        ("part", ("a", "b")),
        ("text", ()),
        ("place", script_literals.UNNAMED),
    ],
)
def test_values_that_a_script_names(column: str, values: tuple[object, ...]) -> None:
    assert script_literals.joined(script_literals.Reader(LITERALS, column).values()) == values


def test_columns_that_are_joined() -> None:
    text = (
        "a = row['prompt'] + row['chosen']\nb = row['chosen'] + 1\nc = row['other'] + row['prompt']"
    )
    assert list(script_literals.partners(text, "chosen")) == ["prompt"]
    assert list(script_literals.partners(text, "prompt")) == ["chosen", "other"]


def test_constants_of_absent_packages_are_numbers_or_texts() -> None:
    limit = missing_packages.Kind("LIMIT", (missing_packages.Nothing,), {})
    run: object = missing_packages.Nothing()
    assert 10 + limit == limit + 10 == 11  # type: ignore[operator]
    assert (10 - limit, 10 // limit, int(limit), float(limit)) == (9, 10, 1, 1.0)  # type: ignore[operator]
    assert f"{limit:>3d}|{limit}|{run}" == "  1||"
    assert "runs/" + run + "/model" == "runs//model"  # type: ignore[operator]
    assert [*limit] == []


SERIES = """
import pandas as pd, torch

raw = pd.read_csv("dataset/ETT-small/ETTh1.csv")
assert raw.shape == (17420, 8) and raw.columns[0] == "date" and raw.columns[-1] == "OT"
numbers = raw[raw.columns[1:]].values
assert numbers.dtype == float and numbers.std() > 0
stamps = raw[["date"]][0:48]
stamps["date"] = pd.to_datetime(stamps.date)
assert [row.hour for row in stamps["date"]][:3] == [0, 1, 2]
x = torch.tensor(numbers[:96], dtype=torch.float32).cuda()
torch.nn.Linear(7, 7).cuda()(x).sum().backward()
"""


def test_public_time_series(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SERIES)
    found = trace(script, steps=0)
    assert any("7 series of 17,420 numbers" in one.message for one in found.problems)
