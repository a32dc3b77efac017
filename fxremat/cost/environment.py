"""The environment of a measurement: all that an op's time and workspace depend on, apart from the op itself.

A cost measured in one environment is not valid in another: with oneDNN off a convolution needs other
workspaces, with cudnn.benchmark on it uses another algorithm, with fewer threads it is slower. So each
environment has its own costs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from fxremat.device import device_name, kind_of
from fxremat.torch_private import nnpack_enabled

MEASURING = 4  # version of the measuring method; increase it when `measure`, `calibrate` or the keys of ops change

VARIABLES = (  # environment variables by which libraries choose kernels and workspaces
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
)

DRIVER = Path("/proc/driver/nvidia/version")

Settings = dict[str, Any]


def environment(device: torch.device) -> Settings:
    """Return all that costs on a device depend on, apart from the ops, as values that JSON can represent."""
    found = {"measuring": MEASURING, "device": device_name(device)} | software() | switches()
    if kind_of(device).of_cuda:
        found |= cuda_switches() | cuda_hardware(device)
    return found


def name_of(found: Mapping[str, Any]) -> str:
    """Return a file name for an environment, equal for equal ones; it begins with device, torch version and threads."""
    text = f"{found['device']}-torch{found['torch']}-{found['threads']}threads"
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', text)}-{digest[:16]}"


def software() -> Settings:
    """Return torch's version, the CPU's capability, and the environment variables by which libraries choose kernels."""
    return {
        "torch": str(torch.__version__),
        "git": torch.version.git_version,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def switches() -> Settings:
    """Return the settings of torch that a program may change and that affect ops on any device."""
    backends: Any = torch.backends
    mkldnn, utils = backends.mkldnn, cast(Any, torch.utils)
    return _read_all(
        {
            "threads": torch.get_num_threads,
            "deterministic": torch.are_deterministic_algorithms_enabled,
            "fill uninitialized memory": lambda: utils.deterministic.fill_uninitialized_memory,
            "flush denormal": flushes_denormals,
            "float32 matmul": torch.get_float32_matmul_precision,
            "mkldnn": lambda: mkldnn.enabled,
            "mkldnn deterministic": lambda: mkldnn.deterministic,
            "mkldnn tf32": lambda: mkldnn.allow_tf32,
            "mkldnn fp32": lambda: _first_set(mkldnn, backends),
            "mkldnn matmul fp32": lambda: _first_set(mkldnn.matmul, mkldnn, backends),
            "mkldnn conv fp32": lambda: _first_set(mkldnn.conv, mkldnn, backends),
            "mkldnn rnn fp32": lambda: _first_set(mkldnn.rnn, mkldnn, backends),
            "nnpack": nnpack_enabled,
            "fp32": lambda: backends.fp32_precision,
        }
    )


def _first_set(*levels: Any) -> str:
    """Return the float32 precision in force: the first of these levels that is not "none"; if all are, "ieee".

    `torch.set_float32_matmul_precision("highest")`, the default, changes "none" to "ieee", which means the
    same.
    """
    return next((level.fp32_precision for level in levels if level.fp32_precision != "none"), "ieee")


def cuda_switches() -> Settings:
    """Return the settings of torch that a program may change and that affect ops on CUDA devices."""
    backends: Any = torch.backends
    cudnn, cuda, matmul = backends.cudnn, backends.cuda, backends.cuda.matmul
    return _read_all(
        {
            "cudnn": lambda: cudnn.enabled,
            "cudnn benchmark": lambda: cudnn.benchmark,
            "cudnn benchmark limit": lambda: cudnn.benchmark_limit,
            "cudnn deterministic": lambda: cudnn.deterministic,
            "cudnn tf32": lambda: cudnn.allow_tf32,
            "cudnn fp32": lambda: cudnn.fp32_precision,
            "cudnn conv fp32": lambda: cudnn.conv.fp32_precision,
            "cudnn rnn fp32": lambda: cudnn.rnn.fp32_precision,
            "matmul tf32": lambda: matmul.allow_tf32,
            "matmul fp32": lambda: matmul.fp32_precision,
            "matmul fp16 sums": lambda: matmul.allow_fp16_accumulation,
            "matmul fp16 reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "matmul fp16 split": lambda: matmul.allow_fp16_reduced_precision_reduction_split_k,
            "matmul bf16 reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
            "matmul bf16 split": lambda: matmul.allow_bf16_reduced_precision_reduction_split_k,
            "attention flash": cuda.flash_sdp_enabled,
            "attention efficient": cuda.mem_efficient_sdp_enabled,
            "attention math": cuda.math_sdp_enabled,
            "attention cudnn": cuda.cudnn_sdp_enabled,
            "attention reduction": cuda.fp16_bf16_reduction_math_sdp_allowed,
            "blas": lambda: str(cuda.preferred_blas_library()),
            "linalg": lambda: str(cuda.preferred_linalg_library()),
        }
    )


def cuda_hardware(device: torch.device) -> Settings:
    """Return the properties of a CUDA device (or of its MIG slice), and the versions of driver and libraries."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "bytes": properties.total_memory,
        "processors": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        # reading the cuDNN version raises if torch was built for another one
        "cudnn version": _read(torch.backends.cudnn.version),
        "allocator": torch.cuda.get_allocator_backend(),
    }


def driver_version() -> str:
    """Return the line of text that states the NVIDIA driver's version; "" if the system does not have it."""
    with contextlib.suppress(OSError):
        return DRIVER.read_text(errors="replace").partition("\n")[0]
    return ""


def flushes_denormals() -> bool:
    """Tell whether arithmetic in this thread treats denormal numbers as 0, which torch can set but not report."""
    least = sys.float_info.min
    return least * 0.5 == 0.0


def _read_all(readers: Mapping[str, Callable[[], Any]]) -> Settings:
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Callable[[], Any]) -> Any:
    """Return a setting; "unreadable" if this torch lacks it, or a program used both its old and its new name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(AttributeError, RuntimeError):
            return reader()
    return "unreadable"
