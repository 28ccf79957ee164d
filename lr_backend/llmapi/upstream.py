"""The one place that imports ``tensorrt_llm``, and how its LLM is made. Imported late: the import alone takes hold of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from lr_backend.errors import ConfigError
from lr_backend.llmapi.config import LlmApiConfig
from lr_backend.llmapi.speculation import WITHOUT_OVERLAP, speculative_config
from lr_backend.nvidia import IMAGE, TENSORRT_LLM

INSTALL = f"run inside {IMAGE}, which holds it, or install tensorrt-llm=={TENSORRT_LLM} from NVIDIA's package index"


@dataclass(frozen=True, slots=True)
class Upstream:
    """What is used of ``tensorrt_llm``; a test puts its own here."""

    LLM: Callable[..., Any]
    SamplingParams: Callable[..., Any]
    KvCacheConfig: Callable[..., Any]
    CudaGraphConfig: Callable[..., Any]
    find: Callable[[str], Callable[..., Any] | None]
    """A class of ``tensorrt_llm.llmapi`` by its name; None where this release has none."""


def load_upstream(find: Callable[[str], ModuleType] = import_module) -> Upstream:
    """Import it.

    Raises:
        ConfigError: it is not installed, or broken; says what to install.
    """
    try:
        package, arguments = find("tensorrt_llm"), find("tensorrt_llm.llmapi")
        kv_cache, graphs = arguments.KvCacheConfig, arguments.CudaGraphConfig
        return Upstream(package.LLM, package.SamplingParams, kv_cache, graphs, lambda name: getattr(arguments, name, None))
    except ImportError as error:
        raise ConfigError(f"runtime 'llmapi' needs TensorRT-LLM, which cannot be imported ({error}); {INSTALL}") from error
    except AttributeError as error:
        raise ConfigError(f"this tensorrt_llm has no LLM API as of 1.2 ({error}); {INSTALL}") from error


def llm_arguments(config: LlmApiConfig, upstream: Upstream) -> dict[str, Any]:
    """Keyword arguments of ``LLM``. No tokenizer is loaded: token ids go in and come out.

    Raises:
        ConfigError: this release has no such speculation.
    """
    kv_cache = {
        "enable_block_reuse": config.enable_kv_cache_reuse,
        "free_gpu_memory_fraction": config.kv_cache_free_gpu_mem_fraction,
        "tokens_per_block": config.tokens_per_block,
        "dtype": config.kv_cache_dtype,
    }
    if config.max_tokens_in_paged_kv_cache is not None:
        kv_cache["max_tokens"] = config.max_tokens_in_paged_kv_cache
    graphs = upstream.CudaGraphConfig(max_batch_size=config.max_batch_size, enable_padding=True)
    speculation = {"speculative_config": speculative_config(config, upstream.find)} if config.drafts else {}
    # With it a logits processor does not see the token before; and these kinds of speculation run without it.
    overlaps = not config.coupled_noise and config.speculative not in WITHOUT_OVERLAP
    return {
        "model": str(config.checkpoint_dir),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": config.tp_size,
        "gpus_per_node": len(config.gpu_device_ids) or config.tp_size,
        "dtype": config.dtype,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": config.max_seq_len,
        "max_beam_width": 1,
        "enable_chunked_prefill": config.enable_chunked_context,
        "kv_cache_config": upstream.KvCacheConfig(**kv_cache),
        "cuda_graph_config": graphs,
        "sampler_type": config.sampler,
        "stream_interval": 1,
        **({} if overlaps else {"disable_overlap_scheduler": True}),
        **speculation,
    }


def make_llm(config: LlmApiConfig, upstream: Upstream) -> Any:
    """Load the model; takes minutes.

    Raises:
        ConfigError: TensorRT-LLM refuses the checkpoint or a setting.
    """
    try:
        return upstream.LLM(**llm_arguments(config, upstream))
    except ConfigError:
        raise
    except Exception as error:  # upstream raises whatever its parts raise
        raise ConfigError(f"the LLM API cannot serve {config.checkpoint_dir.name}: {type(error).__name__}: {error}") from error
