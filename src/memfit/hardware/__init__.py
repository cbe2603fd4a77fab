"""Where a job runs: GPUs and what they really offer, the links between them, clusters."""

from memfit.hardware.auto import auto_gpu, auto_gpus
from memfit.hardware.cluster import Cluster, assumptions, parse_cluster
from memfit.hardware.gpu import (
    GPU,
    MATHS,
    all_gpus,
    apple_gpus,
    custom_gpu,
    find_gpu,
    gpu_problem,
    nvidia_cards,
    variants,
)
from memfit.hardware.link import Link, find_link, links
from memfit.hardware.nccl import communicators
from memfit.hardware.outside import Span, context, desktop, usable
from memfit.hardware.own import own_gpus
from memfit.hardware.rates import Rates, rates
from memfit.hardware.vendors import vendor_of, vendor_remarks

__all__ = [
    "GPU",
    "MATHS",
    "Cluster",
    "Link",
    "Rates",
    "Span",
    "all_gpus",
    "apple_gpus",
    "assumptions",
    "auto_gpu",
    "auto_gpus",
    "communicators",
    "context",
    "custom_gpu",
    "desktop",
    "find_gpu",
    "find_link",
    "gpu_problem",
    "links",
    "nvidia_cards",
    "own_gpus",
    "parse_cluster",
    "rates",
    "usable",
    "variants",
    "vendor_of",
    "vendor_remarks",
]
