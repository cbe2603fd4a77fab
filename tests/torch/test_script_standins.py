"""Models and packages that are not there, and what takes their place."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from memfit.api.verbs import trace
from memfit.errors import InputError
from memfit.trace import (
    missing_packages,
    public_configs,
    synthetic_processors,
    synthetic_tokenizers,
    vision_tokens,
)
from memfit.trace.pretrained import in_bits, original

FLASH = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
name = "someone/Qwen2.5-0.5B-Instruct"
config = AutoConfig.from_pretrained(name, num_hidden_layers=1)
for asked in ("flash_attention_2", "kernels-community/flash-attn3"):
    model = AutoModelForCausalLM.from_pretrained(
        name, config=config, dtype=torch.bfloat16, attn_implementation=asked).cuda()
    assert model.config._attn_implementation.startswith("flash_attention")
    optimizer = torch.optim.SGD(model.parameters())
    ids = torch.randint(0, 1000, (2, 512), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    optimizer.step()
"""
STOPPED = """
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, WhisperTokenizer

whisper = "openai/whisper-tiny"
spoken = WhisperTokenizer.from_pretrained(whisper, language="hindi", task="transcribe")
spoken.set_prefix_tokens(language="french")
roberta = AutoTokenizer.from_pretrained("roberta-base")
assert (roberta.model_max_length, roberta.init_kwargs["name_or_path"]) == (512, "roberta-base")
assert spoken.language == "french" and spoken("a word").input_ids
assert torch.hub.list("pytorch/vision:main") == []
float(load_dataset("someone/strange", split="train")[0]["story"])
"""


def test_flash_attention_needs_no_package(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FLASH)
    found = trace(script, steps=2)
    said = "\n".join(one.message for one in found.problems)
    assert "flash-attn is not installed" in said
    assert "assumed to have the sizes of `Qwen/Qwen2.5-0.5B-Instruct`" in said


def test_an_error_comes_with_what_was_assumed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    with pytest.raises(InputError, match="could not convert") as caught:
        trace(script)
    notes = [one.message for one in caught.value.problems if one.level == "note"]
    assert any("`someone/strange` was not found" in one for one in notes)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("someone/SmolLM-135M-Instruct", "HuggingFaceTB/SmolLM-135M"),
        ("someone/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("someone/Qwen3-4B-unsloth-bnb-4bit", "Qwen/Qwen3-4B"),
        ("someone/strange-it", ""),
    ],
)
def test_names_of_tuned_models(name: str, known: str) -> None:
    found = original(name)
    assert (found[0] if found else "") == known


def test_a_chat_format_takes_the_place_of_the_stand_in() -> None:
    def setup_chat_format(model: Any, tokenizer: Any) -> Any:
        return model, tokenizer.chat_template

    trl: Any = SimpleNamespace(setup_chat_format=setup_chat_format)
    (_, _, setup), *_ = synthetic_tokenizers.templates(trl)
    own = SimpleNamespace(chat_template="ours", memfit_template="ours")
    assert setup(model=1, tokenizer=own) == (1, None)
    assert setup(1, SimpleNamespace(chat_template="its own")) == (1, "its own")
    assert synthetic_tokenizers.templates(cast("Any", SimpleNamespace())) == []


class Sizes:
    """A config as a processor's tokens need it."""

    model_type = "qwen2_5_vl"
    image_token_id, video_token_id, vision_start_token_id = 7, 8, 5


def test_tokens_of_pictures_have_the_numbers_of_the_config() -> None:
    names = vision_tokens.placed([f"<t{one}>" for one in range(10)], Sizes())
    assert names[7] == "<|image_pad|>"
    assert names[5] == "<|vision_start|>"
    assert len(names) == 10
    assert "<|vision_end|>" in names
    assert vision_tokens.placed(["a", "b"], None) == ["a", "b"]


def test_a_missing_package_sets_no_limits() -> None:
    limit: Any = missing_packages.Nothing.MAX_LENGTH
    assert not limit < 7
    assert limit > 7
    assert [*range(0, 3, limit)] == [0, 1, 2]


class Slow:
    """A processor before transformers 5, whose sizes are arguments alone."""

    def __init__(self, size: object = None, max_image_size: object = None) -> None: ...


def test_tiles_have_the_size_of_the_config(tmp_path: Path) -> None:
    config = {"model_type": "idefics3", "vision_config": {"image_size": 384}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = synthetic_processors.size_of(Slow, str(tmp_path))
    assert found["max_image_size"] == {"longest_edge": 384}
    assert found["size"] == {"longest_edge": 4 * 384}


class Cuts:
    patch_size, temporal_patch_size, merge_size = 14, 2, 2


def test_pictures_are_cut_as_the_config_says(tmp_path: Path) -> None:
    """Qwen3-VL's patches have 16 pixels, its processor's own ones 14."""
    pytest.importorskip("transformers")
    tower = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    config = {"model_type": "qwen3_vl", "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = synthetic_processors.patches_of(Cuts, str(tmp_path))
    assert found == {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    assert synthetic_processors.patches_of(Crops, str(tmp_path)) == {}


SEES = """
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

for name, tokens in (("Qwen/Qwen2.5-VL-3B-Instruct", 256), ("google/gemma-3-4b-it", 256),
                     ("llava-hf/llava-1.5-7b-hf", 576),
                     ("HuggingFaceTB/SmolVLM-256M-Instruct", 17 * 64)):
    processor = AutoProcessor.from_pretrained(name)
    config = AutoConfig.from_pretrained(name)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    said = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    batch = processor(text=[said], images=[[Image.new("RGB", (448, 448))]], return_tensors="pt",
                      padding=True)
    number = getattr(config, "image_token_id", None) or config.image_token_index
    assert int((batch["input_ids"] == number).sum()) == tokens, name
    if "Smol" in name:
        continue  # its code asks which tiles have values, which a trace does not know
    config.get_text_config().num_hidden_layers = 1
    config.get_text_config().layer_types = ["full_attention"]
    config.vision_config.num_hidden_layers = config.vision_config.depth = 1
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(**batch.to("cuda"), labels=batch["input_ids"].cuda()).loss.backward()
    optimizer.step()
"""


class Crops:
    size: ClassVar = {"shortest_edge": 224}
    crop_size: ClassVar = {"height": 224, "width": 224}
    do_center_crop = True


def test_a_picture_s_tokens_are_counted_by_the_config(tmp_path: Path) -> None:
    """LLaVA 1.5's processor_config.json: patches of 14, CLIP's token for the class, 336 pixels."""
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(patch_size=14, image_size=336)
    assert vision_tokens.settings(transformers.LlavaConfig(vision_config=vision)) == {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    config = {"model_type": "llava", "vision_config": {"image_size": 336}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert synthetic_processors.size_of(Crops, str(tmp_path)) == {
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    }


@pytest.mark.slow
@pytest.mark.skipif(
    not all(find_spec(one) for one in ("PIL", "torchvision")), reason="they are not installed"
)
def test_models_with_a_vision_tower_see(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SEES)
    trace(script, steps=2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 507_482_304),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2_246_784_880),
    ],
)
def test_published_sizes_have_the_published_count(name: str, count: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {**(public_configs.find(name) or {})}
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert sum(one.numel() for one in model.parameters()) == count


def test_a_class_that_cannot_be_worn_is_left() -> None:
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    base = transformers.PreTrainedTokenizerFast

    class Strange(base):  # type: ignore[misc, valid-type]
        def __init__(self, never: bool = True) -> None: ...

        def more(self) -> str:
            return "more"

        def __setattr__(self, name: str, value: object) -> None:
            if name == "never":
                raise AttributeError(name)
            super().__setattr__(name, value)

    class Updating(base):  # type: ignore[misc, valid-type]
        def update_post_processor(self) -> None: ...

    for kind in (Strange, Updating):
        words = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
        tokenizer = base(tokenizer_object=tokenizers.Tokenizer(words), unk_token="<unk>")
        assert type(synthetic_tokenizers.dressed(tokenizer, kind, {})) is base


def test_bits_without_a_config_before_transformers_5() -> None:
    pytest.importorskip("bitsandbytes")
    given: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_cache": False}
    found = in_bits(given, True)
    assert (found.load_in_4bit, found.bnb_4bit_quant_type) == (True, "nf4")
    assert given == {"use_cache": False}
    given = {"load_in_8bit": False}
    assert in_bits(given, True) is None
    assert given == {}
    assert in_bits({"load_in_8bit": True}, False) is None
