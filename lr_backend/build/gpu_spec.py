"""Specs of the runtimes ``tensorrtllm`` and ``llmapi``: three models on NVIDIA GPUs, each where its section puts it.

``runtime`` at the top is every role's; a role's section may name another.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lr_backend.build.base import DeploymentSpec, EngineSpec, Section
from lr_backend.build.placement import Placement
from lr_backend.contract import DRAFTING_ENGINE_INPUTS, TensorSpec
from lr_backend.engine import Role
from lr_backend.parameters import as_parameters
from lr_backend.request import ProposerName

GpuRuntime = Literal["tensorrtllm", "llmapi"]
EXECUTOR_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
"""Where the NGC image has the process that orchestrator mode starts for each rank."""

FP8_CAPABILITY = 8.9
"""Ada and newer have FP8 units."""
LEAST_CAPABILITY = 8.0
"""External draft tokens need Ampere or newer (TensorRT-LLM's draft-target example), and so does bfloat16."""

WHOLE = 0.99
"""Of what is free, beside a KV budget in tokens. Upstream takes the smaller of the two, and 0.9 where no share is given: this
would cut the budget of the engine that loads last on a shared card (kvCacheManager.cpp)."""

GPUS_A_NODE = 8
"""As compiled engines are built: upstream's ``mapping.gpus_per_node``. Loading checks ids against it."""


LEAST_MEMORY = 0.98
"""Share of the memory that a spec is for, which a card has to have: drivers keep more or less of it."""


class HardwareSpec(Section):
    """What the engines are built for; an engine runs on the architecture that it was built on and on no other.

    Attributes:
        gpu: the card, for people; what is compared are capability and memory.
        num_gpus: of one machine.
        gpu_memory_gib: of one card, as CUDA reports it: less than what is printed on it.
        compute_capability: as ``nvidia-smi --query-gpu=compute_cap`` prints it.
        reserve_gib: of each card, left to the driver and to fragments.
    """

    gpu: str
    num_gpus: int = Field(ge=1, le=64)
    gpu_memory_gib: float = Field(gt=0)
    compute_capability: str = Field(pattern=r"^\d{1,2}\.\d$")
    reserve_gib: float = Field(default=1.0, ge=0)

    @property
    def least_memory_mib(self) -> float:
        """What a card must have, as ``nvidia-smi`` counts."""
        return LEAST_MEMORY * 1024 * self.gpu_memory_gib


class GpuEngineSpec(EngineSpec):
    """What both runtimes say of a model on GPUs. Sizes are in tokens, except ``max_batch_size`` (sequences).

    Attributes:
        hub: where the checkpoint comes from; nothing is downloaded. While the checkpoint is not there, its shape is taken from
            the models known by this name.
        tp_size: GPUs over which each weight is split.
        num_nodes: machines that these are on, as many on each; a role over several has servers of its own.
        gpu_device_ids: those GPUs, as each of the machines counts its own.
        max_num_tokens: of one iteration.
        max_tokens_in_paged_kv_cache: absolute KV budget, or else
        kv_cache_free_gpu_mem_fraction: its share of what is free once this engine is loaded, which depends on who loaded before.
        enable_chunked_context: prompts longer than an iteration are computed in pieces instead of refused.
    """

    hub: str = ""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    tp_size: int = Field(default=1, ge=1, le=64)
    num_nodes: int = Field(default=1, ge=1, le=16)
    gpu_device_ids: tuple[int, ...]
    max_batch_size: int = Field(ge=1, le=2048)
    max_num_tokens: int = Field(ge=1)
    max_tokens_in_paged_kv_cache: int | None = Field(default=None, ge=32)
    kv_cache_free_gpu_mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    enable_chunked_context: bool = True
    enable_kv_cache_reuse: bool = True

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, size: int) -> int:
        if size & (size - 1):
            raise ValueError("must be a power of two")
        return size

    @model_validator(mode="after")
    def _holds_a_sequence(self) -> Self:
        ids, budget = self.gpu_device_ids, self.max_tokens_in_paged_kv_cache
        # Upstream's executor asks for the same: device ids times nodes are its ranks.
        if len(ids) * self.num_nodes != self.tp_size or len(set(ids)) != len(ids) or any(number < 0 for number in ids):
            where = f" on num_nodes = {self.num_nodes} machines, so tp_size / num_nodes of each" if self.num_nodes > 1 else ""
            raise ValueError(f"gpu_device_ids={list(ids)} must name tp_size = {self.tp_size} different GPUs{where}")
        if (budget is None) == (self.kv_cache_free_gpu_mem_fraction is None):
            raise ValueError("give one of max_tokens_in_paged_kv_cache and kv_cache_free_gpu_mem_fraction")
        if budget is not None and budget < self.max_seq_len:
            raise ValueError(f"max_tokens_in_paged_kv_cache must hold one sequence of max_seq_len = {self.max_seq_len}")
        if not self.enable_chunked_context and self.max_num_tokens < self.max_seq_len:
            raise ValueError(
                "without enable_chunked_context a prompt must fit max_num_tokens, so that must be max_seq_len or more"
            )
        least = self.max_batch_size * (self.num_drafts + 1)
        if self.max_num_tokens < least:
            raise ValueError(f"max_num_tokens must be at least max_batch_size x (max_draft_len + 1) = {least}")
        if self.max_num_tokens < self.tokens_per_block:
            raise ValueError(f"max_num_tokens must be at least tokens_per_block = {self.tokens_per_block}, a chunk")
        return self

    @property
    def loads_fp8(self) -> bool:
        """Whether it takes a checkpoint whose weights are quantised already."""
        return False

    @property
    def weight_dtype(self) -> str:
        """What the weights are held in: ``dtype``, or ``fp8`` where they are quantised."""
        return self.dtype

    @property
    def kv_dtype(self) -> str:
        """What keys and values are held in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def common_settings(self) -> dict[str, Any]:
        """What both runtimes render, under upstream's keys; None is not rendered."""
        fraction = self.kv_cache_free_gpu_mem_fraction
        return {
            "gpu_device_ids": ",".join(map(str, self.gpu_device_ids)),
            "num_nodes": self.num_nodes if self.num_nodes > 1 else None,
            "enable_chunked_context": self.enable_chunked_context,
            "enable_kv_cache_reuse": self.enable_kv_cache_reuse,
            "exclude_input_in_output": True,
            "max_tokens_in_paged_kv_cache": self.max_tokens_in_paged_kv_cache,
            "kv_cache_free_gpu_mem_fraction": WHOLE if fraction is None else fraction,
        }


class TrtllmEngineSpec(GpuEngineSpec):
    """One role as a compiled engine behind Triton's ``tensorrtllm`` backend.

    Attributes:
        quantization: ``fp8`` weights and activations, calibrated by upstream's ``quantize.py``.
        calib_dataset: texts for it, as nothing is downloaded: a folder, relative to the project root or absolute, that
            ``datasets.load_dataset`` reads, with a split ``train`` and a column ``text``; or CNN/DailyMail, with
            ``cnn_dailymail`` in its path.
        calib_size: how many of them.
        max_draft_len: most draft tokens of one verification; above 0 on the target alone.
        multiple_profiles: let TensorRT choose kernels by batch; faster, and results then vary with the batch.
        cancellation_check_period_ms: how long a cancelled request may go on.
        recv_poll_period_ms: how often an orchestrator looks for messages; 0 looks all the time and takes a core for it.
        max_queue_size: requests that may wait in the executor, which learns of it from Triton's dynamic batcher alone; without
            it the batcher is left out (see the template).
    """

    runtime: Literal["tensorrtllm"] = "tensorrtllm"
    quantization: Literal["none", "fp8"] = "none"
    calib_dataset: Path | None = None
    calib_size: int = Field(default=512, ge=1)
    max_draft_len: int = Field(default=0, ge=0, le=128)
    multiple_profiles: bool = False
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    cancellation_check_period_ms: int = Field(default=10, ge=1, le=1000)
    recv_poll_period_ms: int = Field(default=1, ge=0, le=100)

    @field_validator("calib_dataset")
    @classmethod
    def _a_folder(cls, folder: Path | None) -> Path | None:
        if folder is not None and len(folder.parts) < 2:
            raise ValueError(f"{folder} is a name on a hub, and the build has no network: give a folder, as checkpoints/{folder}")
        return folder

    @property
    def num_drafts(self) -> int:
        return self.max_draft_len

    @property
    def weight_dtype(self) -> str:
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def triton_max_batch_size(self) -> int:
        # The backend refuses a request with more than one row in a model that is not decoupled; so Triton says it first.
        return 1

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.kv_cache_dtype == "fp8" and self.quantization != "fp8":
            raise ValueError("kv_cache_dtype fp8 needs its scales, which only quantization fp8 makes")
        if self.quantization != "none" and self.calib_dataset is None:
            raise ValueError("quantization needs a calib_dataset: upstream's default is on a hub, and the build has no network")
        if self.max_num_tokens > self.max_batch_size * self.max_seq_len:
            raise ValueError("max_num_tokens beyond max_batch_size x max_seq_len is never used, and trtllm-build lowers it")
        if max(self.gpu_device_ids) >= GPUS_A_NODE:
            rule = f"TensorRT-LLM knows {GPUS_A_NODE} cards a machine: serve this role by a server with CUDA_VISIBLE_DEVICES"
            raise ValueError(f"gpu_device_ids={list(self.gpu_device_ids)}: {rule}")
        if self.max_draft_len and not self.enable_kv_cache_reuse:
            raise ValueError("every verification sends the whole prefix again, so max_draft_len needs enable_kv_cache_reuse")
        return self

    def parameters(self, model_dir: Path) -> dict[str, str]:
        """Keys that only other kinds of models use are left out, so that their defaults hold."""
        settings = {
            **self.common_settings(),
            "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": model_dir,
            "max_beam_width": 1,
            "batch_scheduler_policy": self.batch_scheduler_policy,
            "kv_cache_host_memory_bytes": 0,
            "cancellation_check_period_ms": self.cancellation_check_period_ms,
            "recv_poll_period_ms": self.recv_poll_period_ms,
            "stats_check_period_ms": 100,
            # Over the tokens that top-k and top-p leave, a greedy token's would be 0, whatever the draft thinks of it.
            "normalize_log_probs": False,
            "speculative_decoding_fast_logits": False,
            "executor_worker_path": EXECUTOR_WORKER,
            # The backend reads these three without asking whether they are there. Empty switches guided decoding off.
            "tokenizer_dir": "",
            "guided_decoding_backend": "",
            "xgrammar_tokenizer_info_path": "",
        }
        return as_parameters(settings)


class SpeculativeSpec(Section):
    """Draft tokens that an engine of the LLM API writes by itself, in every request: it cannot do without.

    Attributes:
        kind: ``ngram`` looks in the request's own text, ``draft_target`` runs a draft model on the target's cards, ``eagle3`` a
            head.
        max_draft_len: so many for each pass of the target.
        checkpoint: Hugging Face folder of draft model or head, as the engine's own; ``draft_target`` takes the deployment's draft
            where it is not said.
        hub: where that comes from; while the folder is not there, a draft model's sizes are taken from the models known by it.
        max_matching_ngram_size: tokens that must have stood there before.
    """

    kind: Literal["ngram", "draft_target", "eagle3"]
    max_draft_len: int = Field(ge=1, le=64)
    checkpoint: Path | None = None
    hub: str = ""
    max_matching_ngram_size: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _has_its_model(self) -> Self:
        if self.kind == "eagle3" and self.checkpoint is None:
            raise ValueError("kind eagle3 needs the checkpoint of a head that was trained for the target")
        if self.kind == "ngram" and self.checkpoint is not None:
            raise ValueError("kind ngram needs no checkpoint")
        return self


class LlmapiEngineSpec(GpuEngineSpec):
    """One role on TensorRT-LLM's LLM API (the PyTorch flow), behind a Python model of ours. It takes no draft tokens.

    Attributes:
        speculative: draft tokens of its own; on the target alone.
        max_queue_size: the request that finds as many waiting is refused at once.
        sampler: upstream's ``sampler_type``; up to 1.2 only ``TRTLLMSampler`` heeds a request's seed.
        coupled_noise: draw with the noise of a request's seed as the embedded engine does; without upstream's overlap scheduler.
    """

    runtime: Literal["llmapi"] = "llmapi"
    speculative: SpeculativeSpec | None = None
    max_queue_size: int = Field(default=256, ge=1)
    sampler: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    coupled_noise: bool = False

    @model_validator(mode="after")
    def _on_one_machine(self) -> Self:
        if self.num_nodes > 1:
            raise ValueError("num_nodes: only an engine of the runtime tensorrtllm spans machines")
        return self

    @model_validator(mode="after")
    def _speculates(self) -> Self:
        if self.speculative is not None and (self.coupled_noise or self.sampler == "TRTLLMSampler"):
            raise ValueError("speculative excludes coupled_noise and sampler TRTLLMSampler: upstream has neither beside it")
        return self

    @property
    def loads_fp8(self) -> bool:
        return True

    @property
    def num_drafts(self) -> int:
        return self.speculative.max_draft_len if self.speculative is not None else 0

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return DRAFTING_ENGINE_INPUTS if self.speculative is not None else super().inputs

    def parameters(self, model_dir: Path) -> dict[str, str]:
        """With upstream's keys where upstream has one."""
        sizes = ("tp_size", "tokens_per_block", "max_batch_size", "max_num_tokens", "max_seq_len", "max_queue_size")
        others = ("dtype", "kv_cache_dtype", "sampler", "coupled_noise")
        settings = {**self.common_settings(), "gpt_model_path": model_dir}
        settings |= {name: getattr(self, name) for name in (*sizes, *others)}
        if (ours := self.speculative) is not None:
            window = ours.max_matching_ngram_size if ours.kind == "ngram" else None
            settings |= {"speculative": ours.kind, "max_draft_len": ours.max_draft_len, "max_matching_ngram_size": window}
        return as_parameters(settings)


GpuRole = Annotated[TrtllmEngineSpec | LlmapiEngineSpec, Field(discriminator="runtime")]


class GpuDeployment(DeploymentSpec):
    """Three models on NVIDIA GPUs."""

    runtime: GpuRuntime
    hardware: HardwareSpec
    target: GpuRole
    draft: GpuRole
    judge: GpuRole

    def engine(self, role: Role) -> TrtllmEngineSpec | LlmapiEngineSpec:
        engine: TrtllmEngineSpec | LlmapiEngineSpec = getattr(self, role.value)
        return engine

    def template(self, role: Role) -> str:
        return self.engine(role).runtime

    @property
    def remotes_load_s(self) -> int:
        """A leader waits for its nodes as long as for its models."""
        return self.server.load_timeout_s * (2 if any(self.engine(role).num_nodes > 1 for role in self.remotes) else 1)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where each role of this server runs."""
        engines = {role: self.engine(role) for role in self.roles_here}
        return tuple(
            Placement(role, one.runtime, one.tp_size, one.gpu_device_ids, one.num_nodes) for role, one in engines.items()
        )

    def roles_on(self, gpu: int) -> tuple[Role, ...]:
        """Who of this server has a part of one GPU."""
        return tuple(role for role in self.roles_here if gpu in self.engine(role).gpu_device_ids)

    def runtime_loop_settings(self) -> dict[str, Any]:
        # Upstream draws again where a token-only draft differs, which at temperature > 0 is not the target's distribution.
        return {"draft_logits": "one_hot"}

    @property
    def coupled_noise(self) -> bool:
        return all(getattr(self.engine(role), "coupled_noise", False) for role in (Role.TARGET, Role.DRAFT))

    def _cards(self, role: Role) -> set[tuple[str, int]]:
        """Machine and number of each of them."""
        engine = self.engine(role)
        return set(product(engine.hosts, engine.gpu_device_ids))

    @property
    def engine_drafts(self) -> bool:
        return self.speculation is not None

    @property
    def engine_always_drafts(self) -> bool:
        return self.speculation is not None

    @property
    def speculation(self) -> SpeculativeSpec | None:
        """What the target's engine drafts with by itself."""
        return self.target.speculative if isinstance(self.target, LlmapiEngineSpec) else None

    def engine_parameters(self, role: Role, model_dir: Path) -> dict[str, str]:
        parameters = super().engine_parameters(role, model_dir)
        folder = self.speculative_dir if role is Role.TARGET else None
        return parameters if folder is None else parameters | {"speculative_model_dir": str(folder)}

    @property
    def speculative_dir(self) -> Path | None:
        """Absolute folder of the checkpoint that the target's engine drafts with; None: it needs none."""
        ours = self.speculation
        if ours is None or ours.kind == "ngram":
            return None
        return self.checkpoint_dir(Role.DRAFT) if ours.checkpoint is None else self.locate(ours.checkpoint)

    @model_validator(mode="before")
    @classmethod
    def _inherit_runtime(cls, raw: Any) -> Any:
        """Each role's section gets the top's runtime where it names none. A target that drafts by itself is its own proposer."""
        if not isinstance(raw, dict):
            return raw
        sections = {role.value: raw.get(role.value) for role in Role}
        filled = {name: {"runtime": raw.get("runtime"), **it} for name, it in sections.items() if isinstance(it, dict)}
        loop = raw.get("lookahead")
        if isinstance(loop, dict) and filled.get(Role.TARGET.value, {}).get("speculative") is not None:
            defaults = loop.get("defaults", {})
            if isinstance(defaults, dict):
                filled["lookahead"] = {**loop, "defaults": {"proposer": ProposerName.ENGINE.value, **defaults}}
        return {**raw, **filled}

    @model_validator(mode="after")
    def _engines_fit(self) -> Self:
        capability = float(self.hardware.compute_capability)
        shared = Counter(card for role in Role for card in self._cards(role))
        for role in Role:
            engine = self.engine(role)
            if max(engine.gpu_device_ids) >= self.hardware.num_gpus:
                raise ValueError(
                    f"{role}.gpu_device_ids={list(engine.gpu_device_ids)}: there are {self.hardware.num_gpus} GPUs on a machine"
                    "; a compiled engine over more says num_nodes"
                )
            if engine.num_nodes > 1 and not engine.url:
                raise ValueError(
                    f"{role}.num_nodes={engine.num_nodes}: a role over several machines has servers of its own; give its url"
                )
            if engine.max_tokens_in_paged_kv_cache is None and any(shared[card] > 1 for card in self._cards(role)):
                raise ValueError(
                    f"{role} shares a GPU, where a kv_cache_free_gpu_mem_fraction depends on who loads first: "
                    "give max_tokens_in_paged_kv_cache (the same number on the same host is taken for the same GPU)"
                )
            fp8 = "fp8" in (engine.weight_dtype, engine.kv_dtype)
            least = FP8_CAPABILITY if fp8 else LEAST_CAPABILITY
            if capability < least:
                raise ValueError(f"{role}{' with fp8' if fp8 else ''} needs compute capability {least}, not {capability}")
            if role is not Role.TARGET and engine.num_drafts:
                raise ValueError(f"{role}.max_draft_len must be 0: only the target verifies draft tokens")
        self._drafts_fit()
        return self

    def _drafts_fit(self) -> None:
        config = self.loop_config()
        drafts = self.target.num_drafts
        if drafts and config.draft_logits == "none":
            raise ValueError(
                'lookahead.draft_logits="none" would sample with a bias, as TensorRT-LLM draws again where a token-only draft'
                ' differs; use "one_hot" or "off"'
            )
        # A verification that does not fit max_seq_len is cut short silently.
        longest = config.limits.max_prompt_tokens + config.limits.max_tokens + drafts
        if self.target.max_seq_len < longest:
            raise ValueError(f"target.max_seq_len must hold the longest answer and its last drafts: {longest}")


GpuDeployment.register("tensorrtllm", "llmapi")
