"""Copies and quantized checkpoints of known models, by their names where the hub does not show
their config; and checkpoints of bitsandbytes, whose config is the quantization of a job."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.core import fake_hub
from tests.core.fake_hub import Hub, Repo

from memfit.api.verbs import estimate, study
from memfit.errors import InputError, SourceError
from memfit.model.families import build
from memfit.model.named import bases, by_name
from memfit.model.quantized import bitsandbytes_options
from memfit.model.source import Source, from_catalog, read
from memfit.model.sources import hub as reader
from memfit.plan.card import uses_of

COPY = "somebody/Qwen3-0.6B-AWQ"


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants, utils

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    yield
    # its name since 1.0, and before
    (getattr(utils, "close_session", None) or utils.reset_sessions)()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with fake_hub.running() as server:
        asked = partial(reader.read_hub, endpoint=server.endpoint)
        monkeypatch.setattr(reader, "read_hub", asked)
        yield server


def is_guessed(source: Source, why: str) -> None:
    assert source.config["quantization_config"]["quant_method"] == "awq"
    assert source.config["hidden_size"] == from_catalog("Qwen/Qwen3-0.6B").config["hidden_size"]
    assert source.origin.endswith("bundled catalog, quantized as the name says")
    (warning,) = source.problems
    assert warning.level == "warning"
    assert why in warning.message
    assert warning.message.endswith("memfit goes by the name")


def test_without_a_network_a_copy_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(reader, "read_hub", partial(reader.read_hub, endpoint=address))
    is_guessed(read(COPY, timeout=2.0), "cannot reach 127.0.0.1")
    is_guessed(read(COPY, offline=True), "is not in the local cache")
    assert read("qwen3-0.6b-awq").config["quantization_config"]["bits"] == 4  # without an owner
    typo = "Qwem/Qwen3-0.6B"
    for other in (f"hub:{COPY}", f"{COPY}@main", "somebody/a-model-of-mine", typo):
        with pytest.raises(SourceError, match="cannot reach"):
            read(other, timeout=2.0)


def test_a_gated_copy_goes_by_its_name_and_an_absent_one_does_not(hub: Hub) -> None:
    hub.repos[COPY] = Repo(files={"config.json": b"{}"}, gated=True)
    is_guessed(read(COPY), "is gated")
    with pytest.raises(SourceError, match="is not on 127"):
        read("nobody/Qwen3-0.6B-AWQ")
    hub.repos[COPY] = Repo(files={"config.json": b'{"model_type": "llama"}'})
    assert read(COPY).config == {"model_type": "llama"}  # the hub knows better


STORED: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"],
}


def of_bitsandbytes(**settings: Any) -> dict[str, Any]:
    config = from_catalog("Qwen/Qwen3-0.6B").config
    return {**config, "quantization_config": {**STORED, **settings}}


def test_options_of_what_bitsandbytes_stored() -> None:
    def options(settings: dict[str, Any]) -> dict[str, Any]:
        return bitsandbytes_options({"quantization_config": settings})

    assert options(STORED) == {
        "quant": "nf4",
        "double_quant": True,
        "quant_compute": "bfloat16",
        "quant_skip": "lm_head,model.layers.0.mlp",
    }
    plain = {"quant_method": "bitsandbytes", "_load_in_4bit": True}
    fp4 = {"quant": "fp4", "double_quant": False, "quant_compute": "float32"}
    assert options(plain) == fp4  # BitsAndBytesConfig's own defaults
    assert options({"quant_method": "bitsandbytes", "load_in_8bit": True}) == {"quant": "int8"}
    assert options({"quant_method": "awq", "bits": 4}) == options({}) == {}


def test_a_checkpoint_of_bitsandbytes_is_its_job() -> None:
    """The same figures as the 16-bit model with the options, and one layer's MLP more than with
    all of them in 4 bits."""
    known: dict[str, Any] = {"method": "qlora", "batch": 2, "seq": 256, "quant_compute": "bfloat16"}
    found = estimate(of_bitsandbytes(), gpu="t4", batch=2, seq=256)
    kept = ",".join(STORED["llm_int8_skip_modules"])
    same = estimate("Qwen/Qwen3-0.6B", gpu="t4", quant_skip=kept, **known)
    assert (found.job.method, found.job.quant) == ("qlora", "nf4")
    assert found.memory.allocated == same.memory.allocated
    whole = estimate("Qwen/Qwen3-0.6B", gpu="t4", **known)
    mlp = 3 * 1024 * 3072
    more = found.memory.parts["weights"] - whole.memory.parts["weights"]
    assert more == pytest.approx(mlp * (2 - 0.516), rel=0.01)
    notes = [one.message for one in found.problems if one.level == "note"]
    assert "`--quant nf4` is assumed: bitsandbytes stored the weights" in notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "int8"}, "bitsandbytes stored the weights in nf4, not in int8"),
        ({"quant": "none", "method": "lora"}, "stored the weights in nf4, not in 16 bits"),
        ({"method": "full"}, "a quantized weight cannot be trained"),
    ],
)
def test_it_loads_in_no_other_way(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimate(of_bitsandbytes(), **options)


def test_cards_and_studies_of_it_have_adapters_alone(tmp_path: Path) -> None:
    four, eight = of_bitsandbytes(), of_bitsandbytes(load_in_4bit=False)
    for config, title in ((four, "nf4"), (eight, "int8")):
        uses = uses_of(build(config, name="stored"))
        assert [(use.key, use.title) for use in uses] == [("16-bit", title), ("qlora", "QLoRA")]
        assert "quant" not in uses[0].options

    (tmp_path / "config.json").write_text(json.dumps(four))
    (panel,) = study(tmp_path, gpu="rtx-4090", method="full,qlora").to_dict()["panels"]
    refused = {(cell["method"], "refused" in cell) for cell in panel["cells"]}
    assert refused == {("full", True), ("qlora", False)}


@pytest.mark.parametrize("row", bases(), ids=lambda row: str(row["name"]))
def test_each_base_builds_and_has_the_parameters_that_its_source_says(row: dict[str, Any]) -> None:
    assert row["source"]
    source = by_name(row["name"])
    assert source is not None
    model = build(source.config, name=row["name"])
    stated = row.get("parameters") or row.get("published") or source.parameters
    assert model.parameters == pytest.approx(stated, rel=0.01)
