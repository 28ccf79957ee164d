"""What is rendered is what Triton reads: parsed with its own protobuf and held against the contract tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from lr_backend.build.repository import build_repository
from lr_backend.build.spec import DeploymentSpec
from lr_backend.contract import DRAFTING_ENGINE_INPUTS, ENGINE_OUTPUTS, TensorSpec
from lr_backend.embedded.config import EngineConfig
from lr_backend.fields import LOOKAHEAD_INPUTS, LOOKAHEAD_OUTPUTS
from tests.support.tiny_models import make_tiny_models

ROLES = ("target", "draft", "judge")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's spec over tiny checkpoints, so that the test needs no trained model; its engines as models of the server."""
    root = tmp_path_factory.mktemp("demo")
    make_tiny_models(root / "demo" / "checkpoints")
    (root / "engines").mkdir()
    path = root / "engines" / "demo.toml"
    path.write_text(DeploymentSpec.load("demo").path.read_text().replace('"one_process"', '"process_a_role"'))
    return build_repository(DeploymentSpec.load(path)).output


def config(repository: Path, model: str) -> model_config_pb2.ModelConfig:
    text = (repository / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def read_input(tensor: model_config_pb2.ModelInput) -> tuple[object, ...]:
    kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    scalar = tensor.HasField("reshape") and list(tensor.reshape.shape) == []
    return tensor.name, kind, tuple(tensor.dims), tensor.optional, scalar, tensor.allow_ragged_batch


def wanted_input(spec: TensorSpec) -> tuple[object, ...]:
    return spec.name, spec.dtype, spec.dims, spec.optional, spec.scalar, spec.ragged


def read_output(tensor: model_config_pb2.ModelOutput) -> tuple[object, ...]:
    return tensor.name, model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"), tuple(tensor.dims)


@pytest.mark.parametrize("role", ROLES)
def test_an_engine_has_the_whole_contract(repository: Path, role: str) -> None:
    model = config(repository, role)
    assert [read_input(tensor) for tensor in model.input] == [wanted_input(spec) for spec in DRAFTING_ENGINE_INPUTS]
    assert [read_output(tensor) for tensor in model.output] == [(spec.name, spec.dtype, spec.dims) for spec in ENGINE_OUTPUTS]
    assert (model.name, model.backend, model.max_batch_size) == (role, "python", 64)
    assert not model.model_transaction_policy.decoupled
    assert not model.HasField("dynamic_batching")  # its lost wake-ups cost half a second each
    (group,) = model.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)


@pytest.mark.parametrize("role", ROLES)
def test_the_embedded_engine_takes_every_parameter(repository: Path, role: str) -> None:
    parameters = {key: value.string_value for key, value in config(repository, role).parameters.items()}
    engine = EngineConfig.from_parameters(parameters)
    assert engine.checkpoint_dir == repository.parents[2] / "demo" / "checkpoints" / role
    assert engine.max_draft_len == (16 if role == "target" else 0)
    assert engine.max_queue_size == 256
    assert engine.enable_kv_cache_reuse
    assert engine.exclude_input_in_output


def test_the_lookahead_model_is_what_clients_are_promised(repository: Path) -> None:
    model = config(repository, "lookahead")
    assert [read_input(tensor) for tensor in model.input] == [wanted_input(spec) for spec in LOOKAHEAD_INPUTS]
    outputs = [(spec.name, spec.dtype, spec.dims) for spec in LOOKAHEAD_OUTPUTS]
    assert [read_output(tensor) for tensor in model.output] == outputs
    assert (model.name, model.backend, model.max_batch_size) == ("lookahead", "python", 0)
    assert model.model_transaction_policy.decoupled
    assert not model.HasField("dynamic_batching")


@pytest.mark.parametrize("model", [*ROLES, "lookahead"])
def test_model_files_hold_no_code(repository: Path, model: str) -> None:
    module = ast.parse((repository / model / "1" / "model.py").read_text())
    assert {type(node) for node in module.body} == {ast.Expr, ast.ImportFrom, ast.Assign}
    (source,) = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    assert source.module == f"lr_backend.triton.{'bls_model' if model == 'lookahead' else 'engine_model'}"
