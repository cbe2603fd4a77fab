"""Ollama: the runner's buffers, which are llama.cpp's, with Ollama's own defaults.

Defaults by version: envconfig/config.go, api/types.go DefaultOptions, server/routes.go (context by
VRAM), llm/llama_server.go (flags of llama-server, from 0.30 on) of ollama/ollama.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.errors import InputError, Problem
from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Device, Option, Question, Subject
from memfit.serving.llamacpp import rows
from memfit.serving.llamacpp.engine import answered, room_in_all
from memfit.serving.llamacpp.fit import fits
from memfit.serving.llamacpp.memory import buffers
from memfit.serving.llamacpp.named import subject as named_subject
from memfit.serving.llamacpp.options import CACHE_TYPES
from memfit.serving.llamacpp.setup import Run, loaded, set_up
from memfit.serving.llamacpp.tags import resolve, tag_of
from memfit.serving.llamacpp.versions import LLAMA_SERVER, ollama_build, ollama_version
from memfit.serving.result import Pool, ServingAnswer
from memfit.units import GIB, MIB

BY_VRAM = (0, 15, 5)  # defaults by the GPUs' memory since this version
# Since 0.7 or so a context is never longer than the model's (NewLlamaServer of llm/server.go);
# versions of 2024 warned and went on.
REDUCES = (0, 7, 0)
_VARIABLES = {
    "OLLAMA_NUM_PARALLEL": "parallel",
    "OLLAMA_KV_CACHE_TYPE": "kv_cache_type",
    "OLLAMA_FLASH_ATTENTION": "flash_attention",
    "OLLAMA_CONTEXT_LENGTH": "num_ctx",
}

OPTIONS: tuple[Option, ...] = (
    Option(
        name="quant",
        flags=("--quant",),
        help="GGUF quantization for a model that is no tag of Ollama's library",
        default="Q4_K_M",
    ),
    Option(
        name="backend",
        flags=("--backend",),
        help="backend of the GPUs",
        choices=("cuda", "rocm", "vulkan", "metal", "cpu"),
        default="by the GPU",
    ),
    Option(
        name="num_ctx",
        flags=("--num-ctx", "--ollama-context-length"),
        help="Tokens of context of one request",
        kind="size",
        low=1,
        default="4k, 32k from 23 GiB of VRAM, 256k from 47 GiB",
        means="context",
    ),
    Option(
        name="parallel",
        flags=("--num-parallel", "--ollama-num-parallel"),
        help="requests at once (OLLAMA_NUM_PARALLEL)",
        means="users",
        kind="int",
        low=1,
        high=256,
        default="1",
    ),
    Option(
        name="kv_cache_type",
        flags=("--kv-cache-type", "--ollama-kv-cache-type"),
        help="type of the cache (OLLAMA_KV_CACHE_TYPE)",
        choices=CACHE_TYPES,
        default="f16",
    ),
    Option(
        name="flash_attention",
        flags=("--flash-attention", "--ollama-flash-attention"),
        help="flash attention (OLLAMA_FLASH_ATTENTION)",
        kind="flag",
        default="by the GPU; off before 0.13",
    ),
    Option(
        name="num_gpu",
        flags=("--num-gpu",),
        help="layers on GPUs",
        kind="int",
        low=-1,
        default="all, fewer if they do not fit",
    ),
    Option(
        name="num_batch",
        flags=("--num-batch",),
        help="Tokens of a batch",
        kind="size",
        low=1,
        default="512",
    ),
    Option(
        name="beside",
        flags=("--beside",),
        help="models that stay loaded beside it, separated by commas",
    ),
)


class Ollama:
    """The engine as the registry knows it."""

    name = "ollama"
    title = "Ollama"
    options: tuple[Option, ...] = OPTIONS
    needs_memory = False
    shared_flag = ""

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """`OLLAMA_NUM_PARALLEL=4 ollama run qwen3:8b`: the model and the variables as flags."""
        flags: list[str] = []
        rest: list[str] = []
        for word in words:
            name, equals, value = word.partition("=")
            if equals and re.fullmatch(r"OLLAMA_[A-Z_]+", name):
                if name in _VARIABLES:
                    flags.append(f"--{name.lower().replace('_', '-')}={value}")
                continue
            rest.append(word)
        while rest and rest[0].rpartition("/")[2] in ("ollama", "run", "pull", "serve", "env"):
            rest.pop(0)
        named = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        return named, (*flags, *(word for word in rest if word.startswith("--")))

    def online(self, question: Question) -> tuple[str, ...]:
        return ()

    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The runner's own settings, as its log prints them."""
        printed = rows.row_options(row)
        printed.pop("build", None)  # Ollama's version tells it
        return {"printed": printed}

    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return rows.row_figures(figures)

    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None:
        return rows.row_subject(name, options)

    def subject(self, name: str, offline: bool = False) -> Subject | None:
        """A tag of the library, a model of the catalog that has one, or what llama.cpp reads."""
        found = resolve(name)
        if found is None and (tag := tag_of(catalog.find(name) or "")):
            name, found = tag, resolve(tag)
        if found is None:
            hub = re.sub(r"^(hf\.co|huggingface\.co)/", "", name)
            return named_subject(hub, offline)
        repo, quantization = found
        if catalog.find(repo) is None:
            return named_subject(f"{repo}-GGUF:{quantization.partition(' ')[0]}", offline)
        source = from_catalog(repo)
        return Subject(
            name=name,
            config={**source.config, "gguf_quantization": quantization},
            source=source,
            parameters=source.parameters,
            origin=f"{source.name}, {source.origin}",
        )

    def answer(self, question: Question) -> ServingAnswer:
        """Models that stay loaded (`OLLAMA_MAX_LOADED_MODELS`) are runners of their own, with the
        same variables, and leave the rest; one that does not fit whole unloads them (sched.go)."""
        if not question.beside:
            return self.alone(question, fit=True)
        if len(question.devices) != 1:
            raise InputError.one(
                "`--beside` is supported for one GPU",
                where="--beside",
                hint="name it, like `--gpu rtx-4090`",
            )
        (device,) = question.devices
        kept = question.options.items()
        own = {name: value for name, value in kept if name not in ("quant", "num_gpu")}
        others = [
            self.alone(replace(question, subject=one, options=own), fit=False)
            for one in question.beside
        ]
        held = tuple(
            Pool(name=other.model, bytes=other.on(where), where=where)
            for other in others
            for where in ("gpu", "cpu")
        )
        taken = sum(one.bytes for one in held if one.where == "gpu")
        left = replace(device, free=max(1, room_in_all(device) - taken - margin(question)))
        answer = self.alone(replace(question, devices=(left,)), fit=False)
        failure = answer.failure
        if failure:
            failure += " beside the others, so Ollama unloads them"
        return replace(
            answer, pools=(*answer.pools, *held), usable=room_in_all(device), failure=failure
        )

    def alone(self, question: Question, *, fit: bool) -> ServingAnswer:
        """One model, with what is free of the GPU; `fit`: with fewer layers where it must."""
        version = ollama_version(question.version)
        given = question.options
        if "printed" in given:
            printed = replace(question, options=given["printed"])
            run = set_up(printed, self.name, self.title, ollama_build(question.version))
            keeps = replace(run.settings, keeps_embeddings=version < LLAMA_SERVER)
            return answered(on_one_gpu(replace(run, settings=keeps)))
        inner: dict[str, Any] = {
            name: given[name] for name in ("quant", "backend") if name in given
        }
        parallel = int(given.get("parallel", 1))
        wanted = int(given.get("num_ctx") or default_context(question.devices, version))
        trained = loaded(question.subject, str(given.get("quant", "")))[0].number("context_length")
        context = min(wanted, trained or wanted) if version >= REDUCES else wanted
        batch = int(given.get("num_batch", 512))
        new = version >= LLAMA_SERVER
        inner |= {
            "context": context * parallel,
            "parallel": parallel,
            "batch": batch if new else batch * parallel,
            "ubatch": batch,
            "cache_k": given.get("kv_cache_type", "f16"),
            "cache_v": given.get("kv_cache_type", "f16"),
            "unified": False,
            "margin": margin(question) // MIB,
        }
        flash = given.get("flash_attention", version >= (0, 13, 0))
        inner["flash"] = "on" if flash else "off"
        if int(given.get("num_gpu", -1)) >= 0:
            inner["gpu_layers"] = str(given["num_gpu"])
        asked = replace(question, options=inner)
        run = set_up(asked, self.name, self.title, ollama_build(question.version))
        settings = replace(run.settings, keeps_embeddings=not new)
        known = {"context", *(("gpu_layers",) if "gpu_layers" in inner else ())}
        run = replace(run, settings=settings, asked=frozenset(known), fit=fit)
        shown = question.version or f"with llama.cpp {run.version}"
        answer = answered(on_one_gpu(replace(run, version=shown)))
        problems = answer.problems
        if "num_ctx" in given and context < wanted:
            problems = (*problems, reduced(wanted, context))
        shown = command(question.subject.name, context, inner)
        return replace(answer, command=shown, problems=problems)


def margin(question: Question) -> int:
    """Bytes that stay free on a GPU."""
    return 1024 * MIB if ollama_version(question.version) >= LLAMA_SERVER else 0


def on_one_gpu(run: Run) -> Run:
    """A model that fits one GPU is not spread over several (server/sched.go, llm/server.go)."""
    if len(run.devices) < 2 or not all(one.total for one in run.devices):
        return run
    first = replace(run.machine, free=run.machine.free[:1])
    alone = replace(run, machine=first, devices=run.devices[:1])
    return alone if fits(buffers(run.model, run.settings, first), first, run.margin) else run


def command(name: str, context: int, options: Mapping[str, Any]) -> str:
    """What a user types: the server takes its settings from variables. A model that the library
    does not have, or not in these types, has no name there."""
    words = [f"OLLAMA_CONTEXT_LENGTH={context}"]
    if options["parallel"] > 1:
        words.append(f"OLLAMA_NUM_PARALLEL={options['parallel']}")
    if options["cache_k"] != "f16":
        words.append(f"OLLAMA_KV_CACHE_TYPE={options['cache_k']}")
    lines = [" ".join([*words, "ollama serve"])]
    if resolve(name) is not None and not options.get("quant"):
        lines.append(f"ollama run {name}")
    return "\n".join(lines)


def reduced(wanted: int, context: int) -> Problem:
    return Problem(
        level="warning",
        message=(
            f"Ollama reduces {wanted:,} tokens of context to the {context:,} that the model was "
            "trained for"
        ),
        where="--num-ctx",
    )


def default_context(devices: tuple[Device, ...], version: tuple[int, int, int]) -> int:
    """Tokens where nobody says a number, for models that were trained for as many."""
    if version < (0, 6, 4):
        return 2048
    total = sum(device.total for device in devices)
    if version < BY_VRAM or total < 23 * GIB:
        return 4096
    return 262144 if total >= 47 * GIB else 32768


ENGINE = Ollama()
