"""Loads GGUF files with llama.cpp in a process of its own; its log goes to stderr.

Run as a script: a line of JSON for each file on stdin. The log names each file as it begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time


def main() -> None:
    import xllamacpp

    kept = []
    for line in sys.stdin:
        job = json.loads(line)
        params = xllamacpp.CommonParams()
        params.model.path = job["path"]
        params.verbosity, params.fit_params, params.warmup = 4, False, False
        params.n_parallel = 1
        for name, value in job["settings"].items():
            if name == "flash_attn_type":
                value = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{value}")
            elif name == "load_mode":
                value = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{value}")
            elif name.startswith("cache_type"):
                value = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{value}")
            setattr(params, name, value)
        with contextlib.suppress(RuntimeError):  # the log says why
            kept.append(xllamacpp.Server(params))
    time.sleep(0.3)  # a thread of llama.cpp writes the log
    os._exit(0)  # and need not end by itself


if __name__ == "__main__":
    main()
