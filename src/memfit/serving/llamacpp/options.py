"""llama-server's flags as data (common/arg.cpp, llama.cpp b11549), and memfit's own few."""

from __future__ import annotations

from memfit.serving.base import Option, plain_options

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_SWITCH = ("on", "off", "auto")

_FROM_HUB = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
OPTIONS: tuple[Option, ...] = (
    Option(
        name="quant",
        flags=("--quant",),
        help="GGUF quantization for a model named without a file, like Q4_K_M, Q8_0, IQ4_XS",
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
        name="host_bandwidth",
        flags=("--host-bandwidth",),
        help="GB/s that the CPU reads of its memory: the speed of layers that it computes",
        kind="float",
        low=1,
        default="46",
    ),
    Option(name="model", flags=("-m", "--model"), help="path of a GGUF file", names_model=True),
    Option(name="hf", flags=("-hf", "-hfr", "--hf-repo"), help="REPO[:QUANT] on the hub"),
    Option(
        name="context",
        flags=("-c", "--ctx-size"),
        help="Tokens of context over all slots; 0: what the model was trained for",
        kind="size",
        low=0,
        default="the model's, less if it does not fit",
        means="context",
    ),
    Option(
        name="parallel",
        flags=("-np", "--parallel"),
        help="Slots: requests at once",
        kind="int",
        low=-1,
        high=256,
        default="4 with one cache for all, 1 before b7400",
        means="slots",
    ),
    Option(
        name="unified",
        flags=("-kvu", "--kv-unified"),
        help="one cache for all slots",
        kind="flag",
    ),
    Option(
        name="batch",
        flags=("-b", "--batch-size"),
        help="Tokens of a batch",
        kind="size",
        low=1,
        default="2048",
    ),
    Option(
        name="ubatch",
        flags=("-ub", "--ubatch-size"),
        help="Tokens of a micro-batch",
        kind="size",
        low=1,
        default="512",
    ),
    Option(
        name="cache_k",
        flags=("-ctk", "--cache-type-k"),
        help="type of cached keys",
        choices=CACHE_TYPES,
        default="f16",
    ),
    Option(
        name="cache_v",
        flags=("-ctv", "--cache-type-v"),
        help="type of cached values",
        choices=CACHE_TYPES,
        default="f16",
    ),
    Option(
        name="flash",
        flags=("-fa", "--flash-attn"),
        help="flash attention",
        choices=_SWITCH,
        default="auto",
    ),
    Option(
        name="gpu_layers",
        flags=("-ngl", "--gpu-layers", "--n-gpu-layers"),
        help="layers on GPUs, `auto` or `all`; the output matrix counts as one",
        default="all, fewer if they do not fit",
    ),
    Option(
        name="cpu_moe_layers",
        flags=("-ncmoe", "--n-cpu-moe"),
        help="keep the experts of the first N layers on the CPU",
        kind="int",
        low=0,
    ),
    Option(
        name="cpu_moe",
        flags=("-cmoe", "--cpu-moe"),
        help="keep all experts on the CPU",
        kind="flag",
    ),
    Option(
        name="overrides",
        flags=("-ot", "--override-tensor"),
        help="PATTERN=BUFFER[,…], like `exps=CPU`",
    ),
    Option(
        name="devices",
        flags=("-dev", "--device"),
        help="GPUs to use, like CUDA0,CUDA1; `none`: the CPU alone",
        default="all",
    ),
    Option(
        name="split",
        flags=("-ts", "--tensor-split"),
        help="shares of the GPUs, like 3,1",
        default="by free memory",
    ),
    Option(
        name="split_mode",
        flags=("-sm", "--split-mode"),
        help="how GPUs share a model",
        choices=("none", "layer", "row", "tensor"),
        default="layer",
    ),
    Option(name="swa_full", flags=("--swa-full",), help="windows cached in full", kind="flag"),
    Option(
        name="no_kv_offload",
        flags=("-nkvo", "--no-kv-offload"),
        help="the cache on the CPU",
        kind="flag",
    ),
    Option(
        name="no_op_offload",
        flags=("--no-op-offload", "-nopo"),
        help="large products run where their weights lie",
        kind="flag",
    ),
    Option(
        name="no_mmap",
        flags=("--no-mmap",),
        help="read the file instead of mapping it",
        kind="flag",
    ),
    Option(
        name="embedding",
        flags=("--embedding", "--embeddings", "--rerank", "--reranking"),
        help="serve embeddings only, or ranks",
        kind="flag",
    ),
    Option(
        name="fit",
        flags=("-fit", "--fit"),
        help="reduce what was not set until it fits",
        choices=("on", "off"),
        default="on",
    ),
    Option(
        name="margin",
        flags=("-fitt", "--fit-target"),
        help="MiB that `--fit` leaves free",
        kind="int",
        low=0,
        default="1024",
    ),
    Option(name="mmproj", flags=("-mm", "--mmproj"), help="GGUF file of a vision tower"),
    Option(
        name="draft",
        flags=("-md", "--model-draft", "--spec-draft-model", *_FROM_HUB),
        help="a draft model: a GGUF file or NAME:QUANT",
    ),
    Option(
        name="draft_layers",
        flags=("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
        help="the draft's layers on GPUs",
        default="all",
    ),
    Option(
        name="draft_context",
        flags=("-cd", "--ctx-size-draft"),
        help="tokens of a draft's context; newer builds have the model's",
        kind="size",
        low=0,
        default="a slot's",
    ),
    Option(
        name="draft_cache_k",
        flags=("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
        help="type of the draft's cached keys",
        choices=CACHE_TYPES,
        default="f16",
    ),
    Option(
        name="draft_cache_v",
        flags=("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
        help="type of the draft's cached values",
        choices=CACHE_TYPES,
        default="f16",
    ),
    Option(
        name="draft_device",
        flags=("-devd", "--device-draft", "--spec-draft-device"),
        help="the draft's GPU, like CUDA1",
        default="as the model",
    ),
    Option(
        name="drafted",
        flags=("--draft-max", "--draft", "--draft-n", "--spec-draft-n-max"),
        help="most tokens of a draft",
        kind="int",
        low=0,
        default="3",
    ),
    Option(name="spec_type", flags=("--spec-type",), help="how drafts are made: draft-simple"),
    Option(
        name="longest_context",
        flags=("--longest-context",),
        help="also report the longest context that fits",
        kind="flag",
    ),
    Option(
        name="most_slots",
        flags=("--most-slots",),
        help="also report how many slots of the context fit (`-c` is then one slot's)",
        kind="flag",
    ),
)
_VALUED = """
--host --port -t --threads -tb --threads-batch --temp --top-k --top-p --min-p --seed -s
--repeat-penalty --alias -a --api-key --chat-template --chat-template-file --timeout -to
--log-file -lv --log-verbosity --n-predict -n --predict --samplers --cache-ram -cram
--ctx-checkpoints --rope-freq-base --rope-freq-scale --rope-scaling --rope-scale --yarn-orig-ctx
--slot-save-path --reasoning-format --reasoning-budget --media-path --keep --main-gpu -mg
--numa --load-mode --hf-file -hff --hf-token --path --threads-http --grp-attn-n
--image-min-tokens --image-max-tokens -p --prompt --presence-penalty --frequency-penalty
--dry-multiplier --xtc-probability --prio --poll
-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch -dt --defrag-thold --yarn-ext-factor
--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -hft --log-colors --verbosity
--sampler-seq --sampling-seq --temperature --top-nsigma --top-n-sigma --xtc-threshold
--typical --typical-p --repeat-last-n --dry-base --dry-allowed-length --dry-penalty-last-n
--dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
--mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j
--json-schema -jf --json-schema-file -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
-ctxcp --swa-checkpoints -cms --checkpoint-min-step -r --reverse-prompt --video-fps
--video-timestamp-interval --video-ffmpeg-dir --tags --embd-normalize --cors-origins
--cors-methods --cors-headers --api-prefix --ui-config --webui-config --ui-config-file
--webui-config-file --tools --tools-runtime --mcp-servers-config --mcp-servers-json
--api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs --sse-ping-interval
--cache-reuse -rea --reasoning --reasoning-effort --reasoning-budget-message -sps
--slot-prompt-similarity --sleep-idle-seconds --log-prompts-dir -lm
"""
# Of a draft, without effect on its memory.
_OF_A_DRAFT = """
--draft-min --draft-n-min --draft-p-min --draft-p-split
--spec-draft-n-min --spec-draft-p-min --spec-draft-p-split
-td --threads-draft --spec-draft-threads -tbd
--threads-batch-draft --spec-draft-threads-batch --spec-draft-sampling
"""
_PLAIN = """
--jinja --no-jinja --metrics --slots --no-slots --props --verbose -v --mlock --no-webui --webui
--cont-batching -cb --no-warmup --warmup --log-disable --offline --check-tensors
--no-context-shift --context-shift --special --no-mmproj --no-host --no-perf
--log-timestamps --log-prefix -e --escape --no-log-prefix --no-log-timestamps
--cache-prompt --no-cache-prompt --no-ui --ui
--perf --no-escape --kv-offload -kvo --op-offload --log-jsonl --no-log-jsonl --log-verbose
--ignore-eos --cache-idle-slots --no-cache-idle-slots -sp --spm-infill -nocb --no-cont-batching
--reuse-port --cors-credentials --no-cors-credentials --ui-mcp-proxy --webui-mcp-proxy
--no-ui-mcp-proxy --no-webui-mcp-proxy -ag --agent -no-ag --no-agent --reasoning-preserve
--no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing --prefill-assistant
--no-prefill-assistant --mmproj-auto --mmproj-offload --mmap
"""
# They change the memory, and are not counted: a model beside the model, states of guessed tokens,
# adapters, weights of other machines, sizes by other rules.
_REFUSED_VALUED = """
-otd --override-tensor-draft -ncmoed --n-cpu-moe-draft
--lora --lora-scaled --control-vector --control-vector-scaled --rpc --moe-cache-mib -ncffn
--n-cpu-ffn -fitc --fit-ctx --override-kv -mu --model-url -dr --docker-repo
--kv-unified-per-slot -mmu --mmproj-url -mmdev --mmproj-device --mtmd-batch-max-tokens
--models-dir --models-preset -lzm --lazy-mode --pooling
"""
_REFUSED_PLAIN = """
-cmoed --cpu-moe-draft --spec-default -bs --backend-sampling --no-mmproj-offload
--fim-qwen-7b-spec --fim-qwen-14b-spec
"""
SILENT = plain_options(values=(_VALUED + _OF_A_DRAFT).split(), flags=_PLAIN.split())
REFUSED = plain_options(refused=_REFUSED_VALUED.split(), refused_flags=_REFUSED_PLAIN.split())
