"""Reading from the hub, against a real HTTP server that behaves like it, or behaves badly."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.core import fake_hub
from tests.core.fake_hub import COMMIT, TOKEN, Hub, Repo
from tests.core.writers import packed

from memfit.errors import SourceError
from memfit.model.source import Source
from memfit.model.sources import hub as reader

CONFIG = {"model_type": "llama", "hidden_size": 8}
RAW = json.dumps(CONFIG).encode()
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NAME = "acme/tiny"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the cache nor the token of whoever runs the tests; and no session that outlives its
    hub."""
    from huggingface_hub import constants, utils

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    (
        getattr(utils, "close_session", None) or utils.reset_sessions
    )()  # its name since 1.0, and before


@pytest.fixture
def hub() -> Iterator[Hub]:
    with fake_hub.running() as server:
        yield server


def read(hub: Hub, name: str = NAME, **options: Any) -> Source:
    return reader.read_hub(name, endpoint=hub.endpoint, **{"timeout": 2.0, **options})


def refused(hub: Hub, name: str = NAME, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read(hub, name, **options)
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0].message
    return str(caught.value)


def sharded(count: int = 3, **sizes: int) -> dict[str, bytes]:
    names = [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    files = {name: packed({f"layer.{index}": ENTRY}) for index, name in enumerate(names)}
    index = {"weight_map": {f"layer.{index}": name for index, name in enumerate(names)}}
    return {"config.json": RAW, "model.safetensors.index.json": json.dumps(index).encode(), **files}


# ---------------------------------------------------------------- what is read


def test_config_and_tensors_of_a_single_file(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW, "model.safetensors": packed({"w": ENTRY})})
    source = read(hub)
    assert source.name == NAME
    assert source.origin == f"{hub.endpoint.removeprefix('http://')}/{NAME} at commit {COMMIT[:12]}"
    assert source.config == CONFIG
    assert [(one.name, one.bytes) for one in source.tensors or ()] == [("w", 8)]
    assert source.problems == ()


def test_the_shards_of_an_index_are_read_side_by_side(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files=sharded(40))
    assert [one.name for one in read(hub).tensors or ()] == [
        f"layer.{index}" for index in range(40)
    ]


@pytest.mark.parametrize("ranges", [True, False])
def test_weights_are_never_fetched(hub: Hub, ranges: bool) -> None:
    """64 MiB of weights behind a header of a hundred bytes; a server without ranges is left after
    the first of them."""
    size = 2**26
    weights = packed({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    hub.repos[NAME] = Repo(files={"config.json": RAW, "model.safetensors": weights}, ranges=ranges)
    source = read(hub)
    assert source.stored_bytes == size
    assert all(asked for _, path, asked in hub.asked if path.endswith(".safetensors"))
    assert hub.sent < (2**20 if ranges else size)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_header_longer_than_the_first_request_is_fetched_in_two(hub: Hub, ranges: bool) -> None:
    header = {
        f"{'x' * 100}.{index}": {"dtype": "U8", "shape": [1], "data_offsets": [index, index + 1]}
        for index in range(2000)
    }
    hub.repos[NAME] = Repo(
        files={"config.json": RAW, "model.safetensors": packed(header)}, ranges=ranges
    )
    assert len(read(hub).tensors or ()) == 2000
    assert len([path for _, path, asked in hub.asked if path.endswith("model.safetensors")]) == 2


def test_a_repository_without_safetensors_is_a_warning(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW, "pytorch_model.bin": b"\x80"})
    source = read(hub)
    assert source.tensors is None
    assert [problem.level for problem in source.problems] == ["warning"]
    assert "has no model.safetensors, so tensors follow the config" in source.problems[0].message


def test_a_revision_and_a_renamed_repository(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    hub.moved["old/name"] = NAME
    assert read(hub, revision="v1.0").name == f"{NAME}@v1.0"
    assert read(hub, "old/name").config == CONFIG


def test_tensors_are_of_the_commit_of_the_config(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW, "model.safetensors": packed({"w": ENTRY})})
    read(hub)
    assert {path.split("/")[4] for method, path, _ in hub.asked if "safetensors" in path} == {
        COMMIT
    }


def test_a_token_opens_a_private_repository(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW}, private=True)
    assert read(hub, token=TOKEN).config == CONFIG
    assert "is not on 127.0.0.1" in refused(hub)


# ---------------------------------------------------------------- refusals


def test_a_gated_repository_without_and_with_a_token(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW}, gated=True)
    said = refused(hub)
    assert "is gated and needs you to accept its license" in said
    assert f"accept the license at {hub.endpoint}/{NAME}, then log in with `hf auth login`" in said
    assert "is not open to your token" in refused(hub, token=TOKEN)


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    said = refused(hub, "meta-lama/Llama-3.1-8B")
    assert "`meta-lama/Llama-3.1-8B` is not on 127.0.0.1" in said
    assert "or is private" in said
    assert "`meta-llama/Llama-3.1-8B`" in said


def test_a_token_that_is_not_accepted_is_not_shown(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    for token, words in (
        ("hf_wrong_wrong", "does not accept the token"),
        ("hf_\nwrong_wrong", "cannot be"),
        ("hf_wrжng_wrong", "cannot be"),
    ):
        said = refused(hub, token=token)
        assert words in said
        assert "ng_wrong" not in said


def test_a_revision_that_is_not_there(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    assert f"`{NAME}` has no revision `v9`" in refused(hub, revision="v9")


@pytest.mark.parametrize("revision", ["", "a b", "../x", "x" * 300, "ä"])
def test_a_revision_that_cannot_be_one_is_not_sent(hub: Hub, revision: str) -> None:
    assert "` is not a revision" in refused(hub, revision=revision)
    assert not hub.asked


@pytest.mark.parametrize(
    ("files", "card", "said"),
    [
        ({"README.md": b""}, {}, "give a repository in the transformers format"),
        (
            {"b.Q8_0.gguf": b"", "a.Q4_0.gguf": b""},
            {},
            "it holds GGUF files; download one and name it: `a.Q4_0.gguf`, `b.Q8_0.gguf`",
        ),
        (
            {"adapter_config.json": b"{}"},
            {"base_model": "acme/base"},
            "it is an adapter: estimate its base model, `acme/base`, with `--method lora`",
        ),
        (
            {"adapter_config.json": b"{}"},
            {},
            "it is an adapter: estimate its base model with `--method lora`",
        ),
    ],
)
def test_a_repository_without_config_says_what_it_is(
    hub: Hub, files: dict[str, bytes], card: dict[str, object], said: str
) -> None:
    hub.repos[NAME] = Repo(files=files, card=card)
    found = refused(hub)
    assert f"`{NAME}` has no config.json" in found
    assert said in found


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (fake_hub.status(403, "Forbidden"), "refuses `acme/tiny`"),
        (fake_hub.status(403, "Access to this resource is disabled."), "the hub has disabled it"),
        (fake_hub.status(401), "is not on 127.0.0.1"),
        (fake_hub.status(404), "is not on 127.0.0.1"),
        (fake_hub.status(410), "answers with status 410"),
        (fake_hub.status(429, **{"Retry-After": "17"}), "hint: wait 17 s"),
        (fake_hub.status(500), "answers with status 500"),
        (fake_hub.status(503), "answers with status 503"),
        (fake_hub.silent, "did not send `acme/tiny/config.json` within 0.5 s"),
        (fake_hub.trickle, "did not send `acme/tiny/config.json` within 0.5 s"),
        (fake_hub.trickle_of_headers, "did not send `acme/tiny/config.json` within 0.5 s"),
        (fake_hub.endless, "sent more than 10 MiB"),
        (fake_hub.huge, "sent more than 10 MiB"),
        (fake_hub.hangs_up, "its response was cut off"),
        (fake_hub.no_http, "its response is not HTTP"),
        (fake_hub.circle, "it redirects endlessly"),
        (fake_hub.body(b"<!DOCTYPE html><title>Log in to the network</title>"), "it is a web page"),
        (fake_hub.body(b""), "is empty"),
        (fake_hub.body(b"[1]"), "contains a JSON list, not an object"),
        (fake_hub.body(b"\xff\xd8\xff"), "is not UTF-8 text"),
        (
            fake_hub.body(b'{"peft_type": "LORA", "base_model_name_or_path": "a/b"}'),
            "is the config of an adapter",
        ),
    ],
)
def test_a_hub_that_answers_badly_is_one_sentence_in_bounded_time(
    hub: Hub, behaviour: Callable[..., None], said: str
) -> None:
    hub.repos[NAME] = Repo(behave={"config.json": behaviour})
    started = time.monotonic()
    quick = {"timeout": 0.5} if "within 0.5 s" in said else {"timeout": 5.0}
    assert said in refused(hub, **quick)
    assert time.monotonic() - started < 4


def test_a_trickle_is_left_by_the_reader_itself(hub: Hub) -> None:
    """Not only by whoever waits for it: else its thread would go on reading for as long as the
    other side likes."""
    from memfit.model.sources import http

    hub.repos[NAME] = Repo(behave={"config.json": fake_hub.trickle})
    started = time.monotonic()
    with pytest.raises(http.Late):
        http.get(
            f"{hub.endpoint}/{NAME}/resolve/main/config.json", headers={}, limit=1000, seconds=0.3
        )
    assert time.monotonic() - started < 2


def test_no_hub_at_all() -> None:
    with fake_hub.running() as gone:
        pass
    said = refused(gone)
    assert ": connection refused" in said
    assert "check the network, `HF_ENDPOINT` and proxies" in said


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:99999", "http://[::1"]
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(SourceError, match="cannot reach"):
        reader.read_hub(NAME, endpoint=endpoint, timeout=2.0)


# ---------------------------------------------------------------- headers that cannot be had, or
# lie


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model.safetensors"])
@pytest.mark.parametrize(
    "behaviour", [fake_hub.silent, fake_hub.trickle, fake_hub.status(503), fake_hub.hangs_up]
)
def test_headers_that_do_not_come_are_a_warning(
    hub: Hub, file: str, behaviour: Callable[..., None]
) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW}, behave={file: behaviour})
    started = time.monotonic()
    source = read(hub, timeout=0.5)
    assert time.monotonic() - started < 0.5 * reader.HEADERS_PATIENCE + 2
    assert (source.config, source.tensors) == (CONFIG, None)
    assert [problem.level for problem in source.problems] == ["warning"]
    assert "so tensors follow the config" in source.problems[0].message


def test_all_headers_together_have_a_time_limit(hub: Hub) -> None:
    files = sharded(160)

    def slow(name: str) -> Callable[[fake_hub.Handler], None]:
        def behave(handler: fake_hub.Handler) -> None:
            time.sleep(0.25)
            handler.file(hub.repos[NAME], files[name])

        return behave

    shards = {name: slow(name) for name in files if name.startswith("model-")}
    hub.repos[NAME] = Repo(
        files={name: content for name, content in files.items() if name not in shards},
        behave=shards,
    )
    started = time.monotonic()
    source = read(
        hub, timeout=0.3
    )  # the config is quick; 160 headers by sixteen take 2.5 s, and 1.8 s are allowed
    assert time.monotonic() - started < 5
    assert source.tensors is None
    assert "so tensors follow the config" in source.problems[0].message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ((2**31).to_bytes(8, "little") + b"{}", "declares a header of 2147483648 bytes"),
        ((90_000_000).to_bytes(8, "little") + b"{}", "more than the file has (10)"),
        (packed({"w": ENTRY})[:-1], "the file is truncated"),
        (packed({"w": {**ENTRY, "shape": [3]}}), "has 8 bytes of data, but shape"),
        (b"<html>", "has 6 bytes, too few"),
        (b"", "status 416"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    ],
)
def test_a_header_that_lies_is_an_error(hub: Hub, content: bytes, said: str) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW, "model.safetensors": content})
    assert said in refused(hub)


def test_a_missing_or_wrong_shard_and_an_index_that_leads_elsewhere(hub: Hub) -> None:
    files = sharded()
    hub.repos[NAME] = Repo(
        files={name: content for name, content in files.items() if "00002" not in name}
    )
    source = read(hub)
    assert source.tensors is None
    assert "has no model-00002-of-00003.safetensors" in source.problems[0].message
    hub.repos[NAME] = Repo(
        files={**files, "model-00002-of-00003.safetensors": packed({"other": ENTRY})}
    )
    assert "the files do not match the index: `layer.1`" in refused(hub)
    hub.repos[NAME] = Repo(
        files={
            **files,
            "model.safetensors.index.json": (
                b'{"weight_map": {"w": "../../x/resolve/main/y.safetensors"}}'
            ),
        }
    )
    assert "safetensors`:" in refused(hub)


# ---------------------------------------------------------------- the cache, and being offline


def test_what_was_read_once_is_there_offline(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW, "model.safetensors": packed({"w": ENTRY})})
    assert read(hub).tensors is not None
    asked = len(hub.asked)
    source = read(hub, offline=True)
    assert len(hub.asked) == asked
    assert (source.config, source.tensors) == (
        CONFIG,
        None,
    )  # the cache has the config; weights were never fetched
    assert source.origin.startswith("local cache of ")
    assert COMMIT[:12] in source.origin
    assert read(hub, offline=True, revision=COMMIT).config == CONFIG


def test_a_whole_model_in_the_cache_has_its_tensors_offline(hub: Hub) -> None:
    from huggingface_hub import hf_hub_download

    hub.repos[NAME] = Repo(files=sharded())
    for name in hub.repos[NAME].files:
        hf_hub_download(NAME, name, endpoint=hub.endpoint)
    assert [one.name for one in read(hub, offline=True).tensors or ()] == [
        "layer.0",
        "layer.1",
        "layer.2",
    ]


def test_the_second_time_asks_for_the_config_once(hub: Hub) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    read(hub)
    hub.asked.clear()
    read(hub)
    assert [path for _, path, _ in hub.asked if path.endswith("config.json")] == [
        f"/{NAME}/resolve/main/config.json"
    ]


@pytest.mark.parametrize(
    "behaviour", [fake_hub.silent, fake_hub.status(503), fake_hub.status(429), fake_hub.hangs_up]
)
def test_a_hub_in_trouble_gives_way_to_the_cache_with_a_warning(
    hub: Hub, behaviour: Callable[..., None]
) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    read(hub)
    hub.repos[NAME] = Repo(behave={"config.json": behaviour})
    source = read(hub, timeout=0.5)
    assert source.config == CONFIG
    assert "; memfit used the copy in the local cache" in source.problems[-1].message
    hub.repos[NAME] = Repo(behave={"config.json": fake_hub.body(b"{")})
    assert "` is not valid JSON:" in refused(
        hub
    )  # what is wrong, rather than absent, is not papered over


def test_offline_and_not_in_the_cache(hub: Hub) -> None:
    said = refused(hub, "meta-lama/Llama-3.1-8B", offline=True)
    assert "is not in the local cache of the hub, and memfit is offline" in said
    assert "`meta-llama/Llama-3.1-8B`" in said
    assert not hub.asked


def in_a_process(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: huggingface_hub reads its environment when it is imported."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING")) and "proxy" not in name.lower()
    }
    clean |= {
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_of_huggingface_hub_is_honoured(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME] = Repo(
        files={"config.json": RAW, "model.safetensors": packed({"w": ENTRY})}, private=True
    )
    code = (
        "from memfit.model.source import read; s = read('hub:acme/tiny'); "
        "print(s.config['hidden_size'], s.tensors and len(s.tensors))"
    )
    done = in_a_process(code, tmp_path, HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN)
    assert (done.stdout, done.stderr) == ("8 1\n", "")
    assert all(path.startswith(f"/{NAME}/") for _, path, _ in hub.asked)  # and nothing else
    done = in_a_process(code, tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    assert (done.stdout, done.stderr) == ("8 None\n", "")
    done = in_a_process(
        code.replace("tiny", "other"), tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1"
    )
    assert "`acme/other` is not in the local cache of the hub, and memfit is offline" in done.stderr


@pytest.mark.parametrize("endpoint", ["http://[::1", "nonsense", "http://127.0.0.1:1"])
def test_an_endpoint_of_the_environment_that_is_none(tmp_path: Path, endpoint: str) -> None:
    """huggingface_hub itself breaks on the first one, while it is imported."""
    code = (
        "from memfit.model.source import read\nfrom memfit.errors import SourceError\ntry: "
        "read('hub:acme/tiny')\nexcept SourceError as error: print(error)"
    )
    done = in_a_process(code, tmp_path, HF_ENDPOINT=endpoint)
    assert "HF_ENDPOINT" in done.stdout
    assert done.stderr == ""


def test_a_late_answer_does_not_hold_up_the_end_of_the_process(hub: Hub, tmp_path: Path) -> None:
    hub.repos[NAME] = Repo(behave={"config.json": fake_hub.silent})
    code = (
        "from memfit.model.source import read\ntry: read('hub:acme/tiny', "
        "timeout=0.3)\nexcept Exception as error: print(error)"
    )
    started = time.monotonic()
    done = in_a_process(code, tmp_path, HF_ENDPOINT=hub.endpoint)
    assert "within 0.3 s" in done.stdout
    assert done.stderr == ""
    assert time.monotonic() - started < 4


@pytest.mark.parametrize(
    "spec",
    [
        "https://huggingface.co/acme/tiny",
        "https://huggingface.co/acme/tiny/tree/v1.0",
        "hub:acme/tiny@v1.0",
        "acme/tiny",
    ],
)
def test_every_spelling_of_a_hub_model(hub: Hub, tmp_path: Path, spec: str) -> None:
    hub.repos[NAME] = Repo(files={"config.json": RAW})
    code = f"from memfit.model.source import read; print(read({spec!r}).name)"
    done = in_a_process(code, tmp_path, HF_ENDPOINT=hub.endpoint)
    assert done.stdout == (f"{NAME}@v1.0\n" if "v1.0" in spec else f"{NAME}\n"), done.stderr


# ---------------------------------------------------------------- what is asked, and what is shown


def test_what_comes_with_a_redirection_is_not_read(hub: Hub) -> None:
    def endless(handler: fake_hub.Handler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"/acme/other/resolve/{COMMIT}/config.json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(4000):
                handler.server.sent += handler.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        handler.close_connection = True

    hub.repos[NAME] = Repo(files={"config.json": RAW}, behave={"config.json": endless})
    hub.repos["acme/other"] = Repo(files={"config.json": RAW})
    assert read(hub).config == CONFIG
    assert hub.sent < 2**25


def test_a_password_in_the_address_is_not_shown(hub: Hub) -> None:
    at = hub.endpoint.replace("http://", "http://me:secret@")
    with pytest.raises(SourceError, match="127") as caught:
        reader.read_hub("acme/none", endpoint=at, timeout=2.0)
    assert "secret" not in str(caught.value)
    assert "me:" not in str(caught.value)
