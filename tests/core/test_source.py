"""Naming a model: what is looked for where, and one clear message for every path and file that
cannot be a model."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.core.writers import packed, sharded

from memfit.errors import InputError, SourceError
from memfit.model import catalog
from memfit.model.source import Source, read
from memfit.model.sources import files, folder
from memfit.model.spellings import LATEST, OLLAMA, meant

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "text_config": {"hidden_size": 4},
}
TENSOR = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def refused(spec: str | Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(spec, **options)
    assert all(problem.message and "\n" not in problem.message for problem in caught.value.problems)
    return str(caught.value)


def config_folder(path: Path, config: Any = LLAMA) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "spec",
    [
        "meta-llama/Llama-3.1-8B",
        "Llama-3.1-8B",
        "llama-3.1-8b",
        "catalog:Llama-3.1-8B",
        " meta-llama/llama-3.1-8b ",
    ],
)
def test_a_bundled_model_needs_no_network(spec: str) -> None:
    source = read(spec, offline=True)
    assert source.name == "meta-llama/Llama-3.1-8B"
    assert source.origin == "bundled catalog (verbatim copy of config.json)"
    assert source.config["num_hidden_layers"] == 32
    assert source.parameters == 8_030_261_248
    assert source.tensors is None
    assert source.stored_bytes is None


def test_every_bundled_model_is_read() -> None:
    for name in catalog.names():
        source = read(name, offline=True)
        assert source.name == name
        assert source.config["model_type"]


def test_the_published_count_stands_in_where_none_could_be_counted() -> None:
    assert read("nvidia/Llama-3_3-Nemotron-Super-49B-v1", offline=True).parameters == 49_867_145_216
    assert read("xai-org/grok-1", offline=True).parameters is None


def test_an_ambiguous_short_name_lists_what_it_could_be() -> None:
    said = refused("Llama-3.1")
    assert "could be any of" in said
    assert "`meta-llama/Llama-3.1-8B`" in said


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("qwen3:8b", "Qwen/Qwen3-8B"),
        ("gemma3", "google/gemma-3-4b-it"),
        ("llama2:7b", "meta-llama/Llama-2-7b-hf"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "meta-llama/Llama-3.2-3B-Instruct"),
        ("deepseek-r1:14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
        ("Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-8B-GGUF", "Qwen/Qwen3-8B"),
        ("qwen2.5:7b-instruct-q4_K_M", "Qwen/Qwen2.5-7B-Instruct"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
    ],
)
def test_names_of_other_tools_find_the_model_and_say_so(spec: str, name: str) -> None:
    source = read(spec, offline=True)
    assert source.name == name
    (note,) = source.problems
    assert note.level == "note"
    assert f"`{spec.removeprefix('hf.co/')}` is read as {name}" in note.message
    assert ("with its own weights" in note.message) == (":" in spec or spec == "gemma3")
    assert ("--engine" in note.hint) == ("with its own weights" in note.message)


def test_ollamas_own_names_are_in_the_catalog() -> None:
    assert [name for name in OLLAMA.values() if catalog.find(name) is None] == []
    for name in LATEST:
        assert meant(name) is not None, name


def test_a_page_of_the_hub_is_the_model_of_the_catalog() -> None:
    source = read("https://huggingface.co/Qwen/Qwen3-8B", offline=True)
    assert source.origin.startswith("bundled catalog")


def test_metas_newer_names_are_the_same_models() -> None:
    source = read("meta-llama/Llama-3.1-8B-Instruct", offline=True)
    assert source.name == "meta-llama/Meta-Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("spec", "name", "others"),
    [
        ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", 0),
        ("qwen3-coder-30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", 0),
        ("mistral small 3.2", "mistralai/Mistral-Small-3.2-24B-Instruct-2506", 0),
        ("devstral-small-2", "mistralai/Devstral-Small-2-24B-Instruct-2512", 0),
        ("granite-4-h-tiny", "ibm-granite/granite-4.0-h-tiny", 0),
        ("smollm3", "HuggingFaceTB/SmolLM3-3B", 1),
        ("qwen3-next-80b", "Qwen/Qwen3-Next-80B-A3B-Instruct", 1),
        ("qwen 3.6 35b", "Qwen/Qwen3.6-35B-A3B", 1),  # and NVIDIA's, which is quantized
        ("nemotron-3-nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1),
    ],
)
def test_the_beginning_of_one_size_is_a_name(spec: str, name: str, others: int) -> None:
    """Models that differ in nothing but their training use the same memory."""
    source = read(spec, offline=True)
    assert source.name == name
    (note,) = source.problems
    assert note.level == "note"
    assert (f"one of {others + 1} models of its size" in note.message) == bool(others)


@pytest.mark.parametrize("spec", ["gpt-oss-2", "llama-3", "qwen3-coder", "bert-base", "kimi"])
def test_the_beginning_of_several_sizes_is_none(spec: str) -> None:
    with pytest.raises(SourceError):
        read(spec, offline=True)


def test_one_candidate_is_a_suggestion_and_not_a_choice() -> None:
    said = refused("Scout")
    assert "could be any of" not in said
    assert "did you mean `meta-llama/Llama-4-Scout-17B-16E-Instruct`?" in said


@pytest.mark.parametrize("spec", ["Lama-3.1-8B", "catalog:meta-lama/Llama-3.1-8B", "lama3.1:8b"])
def test_an_unknown_name_offers_the_nearest(spec: str) -> None:
    said = refused(spec)
    assert "neither a path nor a model of the catalog" in said
    assert "meta-llama/Llama-3.1-8B" in said


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "   ",
        "a\nb",
        "x" * 5000,
        "\x00",
        "a\x00b/c",
        "https://example.com/model",
        "file:///etc/passwd",
        "s3://bucket/x",
        "org/name/more",
        "hub:",
        "hub:a b/c",
        "hub:../x",
    ],
)
def test_a_name_that_can_be_nothing_is_refused_at_once(spec: str) -> None:
    started = time.monotonic()
    refused(spec)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "spec",
    [
        "./missing",
        "/no/such/folder",
        "~/no-such-folder-here",
        "missing.gguf",
        "missing/config.json",
        "a/b/c.safetensors",
        "org/missing.gguf",
        "..\\x",
    ],
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(spec: str) -> None:
    assert "there is no such file" in refused(spec)


def test_what_lies_here_comes_before_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_folder(tmp_path / "meta-llama" / "Llama-3.1-8B")
    assert read("meta-llama/Llama-3.1-8B").config == LLAMA
    assert read("catalog:meta-llama/Llama-3.1-8B").config["num_hidden_layers"] == 32


def test_a_revision_means_the_hub_since_the_catalog_has_none() -> None:
    # The hub is out of reach by `offline`; that it was asked shows in the message.
    for spec, revision in (
        ("meta-llama/Llama-3.1-8B@0000000", None),
        ("meta-llama/Llama-3.1-8B", "v9"),
    ):
        assert "not in the local cache of the hub" in refused(spec, offline=True, revision=revision)
    assert "not in the local cache of the hub" in refused(
        "hub:no-such-org-here/no-such-model-here", offline=True
    )

    assert "`meta-llama/Llama-3.1-8B@v9` is not in the local cache" in refused(
        "Llama-3.1-8B", offline=True, revision="v9"
    )


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for spec in (config_folder(tmp_path), str(tmp_path), "catalog:meta-llama/Llama-3.1-8B"):
        assert "has no revisions, so `v9` is not available" in refused(spec, revision="v9")


# ---------------------------------------------------------------- folders and files


def test_a_folder_with_config_alone(tmp_path: Path) -> None:
    source = read(config_folder(tmp_path / "mine"))
    assert source == Source(name="mine", origin=str(tmp_path / "mine"), config=LLAMA)
    assert read(str(tmp_path / "mine" / "config.json")).name == "mine"


def test_a_nested_text_model_is_passed_through_unchanged(tmp_path: Path) -> None:
    config = {
        "model_type": "thing",
        "thinker_config": {"text_config": {"hidden_size": 4}},
        "llm_config": {},
    }
    assert read(config_folder(tmp_path, config)).config == config


def test_a_folder_with_one_file_of_tensors(tmp_path: Path) -> None:
    config_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(packed(TENSOR))
    source = read(tmp_path)
    assert source.tensors is not None
    assert source.stored_bytes == 8
    assert read(tmp_path / "model.safetensors").tensors == source.tensors


def test_a_folder_with_shards(tmp_path: Path) -> None:
    index = sharded(config_folder(tmp_path))
    for spec in (tmp_path, index, str(index)):
        tensors = read(spec).tensors
        assert tensors is not None
        assert [tensor.name for tensor in tensors] == ["layer.0", "layer.1", "layer.2"]


def test_shards_that_were_not_downloaded_are_a_warning_for_the_folder_and_an_error_for_the_index(
    tmp_path: Path,
) -> None:
    index = sharded(config_folder(tmp_path), skip=("model-00001.safetensors",))
    (tmp_path / "model-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    )
    source = read(tmp_path)
    assert source.tensors is None
    assert [problem.level for problem in source.problems] == ["warning"]
    assert "2 of 3 weight files are missing, so tensors follow the" in source.problems[0].message
    assert "1 of the 3 files that" in refused(index)


def test_a_broken_header_in_a_folder_is_an_error(tmp_path: Path) -> None:
    config_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(packed(TENSOR)[:-1])
    assert "truncated" in refused(tmp_path)


def test_tensors_without_config_say_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(packed(TENSOR))
    assert "has 1 tensors, but no config.json next to it" in refused(tmp_path / "model.safetensors")
    said = refused(tmp_path)
    assert "has no config.json" in said
    assert "the folder has tensors but no config.json" in said


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ([], "is empty"),
        (["README.md"], "has no config.json"),
        (["params.json", "consolidated.00.pth"], "format of the original authors"),
        (["model_index.json"], "diffusers pipeline"),
        (["a.Q4_K_M.gguf", "b.Q8_0.gguf"], "has 2 GGUF models: `a.Q4_K_M.gguf`, `b.Q8_0.gguf`"),
    ],
)
def test_a_folder_without_config_says_what_it_is(
    tmp_path: Path, present: list[str], said: str
) -> None:
    for name in present:
        (tmp_path / name).write_bytes(b"x")
    assert said in refused(tmp_path)


def test_an_adapter_leads_to_its_base_model(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    for spec in (tmp_path, tmp_path / "adapter_config.json"):
        said = refused(spec)
        assert "is the config of an adapter" in said
        assert "`meta-llama/Llama-3.1-8B`, with `--method lora`" in said


def test_an_index_under_another_name_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "is an index of weights" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"{", "` is not valid JSON:"),
        (b'{"model_type": "llama", "hidden', "the file seems to be truncated"),
        (b'{"model_type": "llama",}', "` is not valid JSON:"),
        (b"model_type: llama", "` is not valid JSON:"),
        (b"[1, 2]", "contains a JSON list, not an object with the model"),
        (b'"llama"', "contains a JSON string, not an object with the model"),
        (b"null", "contains a JSON null, not an object with the model"),
        (b"true", "contains a JSON true or false, not an object with the"),
        (b"12", "contains a JSON number, not an object with the model"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"model_type": "llama"}'.encode("utf-16"), "is UTF-16"),
        (b'{"a": "\xff\xfe"}', "is not UTF-8 text: byte 0xff at offset 7"),
        (b'{"a": 1, "a": 2}', "key `a` is given twice in one object"),
        (b'{"b": {"c": 1, "c": 1}}', "key `c` is given twice in one object"),
        (b'{"rope_theta": NaN}', "`rope_theta` is nan, not a number"),
        (b'{"a": {"b": [1, Infinity]}}', "`a.b.1` is inf, not a number"),
        (b'{"a": 1e999}', "`a` is inf, not a number"),
        (b'{"a": ' + b"7" * 5000 + b"}", "too many digits"),
        (b'{"a": "\\ud800"}', "` contains an invalid character"),
        (b"[" * 100_000, "` is nested too deeply: more than"),
        (b'{"a":' * 100_000, "` is nested too deeply: more than"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "` is nested too deeply: more than"),
        (b"<html>Sign in</html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x80\x04\x95\x01\x00", "Python pickle"),
    ],
)
def test_a_config_that_is_none_is_one_clear_message(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for spec in (tmp_path, tmp_path / "config.json"):
        assert said in refused(spec)


def test_all_flaws_of_a_config_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": NaN, "b": -Infinity, "c": 1, "c": 2}')
    with pytest.raises(SourceError) as caught:
        read(tmp_path)
    assert len(caught.value.problems) == 3


def test_infinity_passes_where_transformers_itself_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}'
    )
    assert read(tmp_path).config["time_step_limit"][1] == float("inf")


def test_a_config_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(11 * 2**20)
    assert "has 11534336 bytes, more than the limit of 10 MiB" in refused(tmp_path)


def test_a_file_of_another_kind_says_which_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04rest")
    assert "loading one can run code" in refused(tmp_path / "pytorch_model.bin")
    (tmp_path / "notes.txt").write_text("hello")
    assert "name a folder, a config.json" in refused(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "model.gguf"]
)
def test_a_pipe_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refused(tmp_path / name)
    if name == "config.json":
        assert "not a regular file" in refused(tmp_path)


def test_devices_and_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("/dev/zero", "/dev/null"):
        assert "not a regular file" in refused(device)
    path = tmp_path / "config.json"
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's path may not be long
        server.bind("config.json")
        assert "not a regular file" in refused(path)


def test_symbolic_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for spec in (tmp_path / "a", str(tmp_path / "a")):
        assert "its symbolic links form a loop" in refused(spec)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "a")
    assert "its symbolic links form a loop" in refused(tmp_path / "model")


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    assert "there is no such file" in refused(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied(tmp_path: Path) -> None:
    config_folder(tmp_path)
    (tmp_path / "config.json").chmod(0)
    assert "permission denied" in refused(tmp_path)


def test_the_words_for_what_the_system_refuses() -> None:
    assert "permission denied" in str(
        files.unreadable(Path("x"), PermissionError(errno.EACCES, "Permission denied"))
    )
    assert "Stale file handle" in str(
        files.unreadable(Path("x"), OSError(errno.ESTALE, "Stale file handle"))
    )


def test_a_path_longer_than_the_system_takes(tmp_path: Path) -> None:
    assert "too long" in refused(tmp_path / ("x" * 300))
    assert "too long" in refused("./" + "x" * 300)


def test_a_name_with_control_characters_does_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mred.gguf"
    path.write_bytes(b"no")
    assert "\x1b" not in refused(path)


def test_a_folder_of_thousands_of_files_is_no_model(tmp_path: Path) -> None:
    for index in range(folder.MOST_ENTRIES + 1):
        (tmp_path / str(index)).touch()
    assert "more than 10000 entries" in refused(tmp_path)


def test_nothing_in_a_config_is_executed(tmp_path: Path) -> None:
    """`auto_map` names code to run; it is data like all else, and the module beside it is never
    imported."""
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {
        "model_type": "evil",
        "auto_map": {"AutoModel": "modeling_evil.Evil"},
        "architectures": ["__import__('os').system('true')"],
    }
    assert read(config_folder(tmp_path, config)).config == config
    assert not (tmp_path / "ran").exists()


def test_source_errors_are_input_errors() -> None:
    with pytest.raises(InputError):
        read("")
