"""The bill of materials of each image: valid, and with what the image is locked to (test_deploy_files.py: what it installs)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from packaging.utils import canonicalize_name

from tools.supply_chain import IMAGES, ROOT, locked, pinned, sbom

OF_THE_LLM_API = ROOT / "deploy" / "requirements-llmapi.txt"


@pytest.fixture(scope="module")
def is_valid() -> Callable[[str], bool]:
    """Imported here alone: it compiles a grammar, 2 s for whoever looks which tests there are."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    return lambda document: validator.validate_str(document) is None


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    return {image: sbom(image) for image in IMAGES}


@pytest.mark.parametrize("image", IMAGES)
def test_a_bill_is_valid_and_holds_what_the_image_is_locked_to(
    documents: dict[str, str], is_valid: Callable[[str], bool], image: str
) -> None:
    assert is_valid(documents[image])
    document = json.loads(documents[image])
    assert document["metadata"]["component"]["name"] == "lookahead-server"
    found = {canonicalize_name(each["name"]): each["version"] for each in document["components"]}
    assert found == locked(image)
    assert all(each["purl"].startswith("pkg:pypi/") for each in document["components"])
    in_common = found.items() - pinned(OF_THE_LLM_API).items() - {("tritonclient", "2.71.0")}
    assert in_common <= pinned(ROOT / "constraints.txt").items(), "both images get one version of a package, but for that"


def test_a_bill_that_is_none_is_found(documents: dict[str, str], is_valid: Callable[[str], bool]) -> None:
    document = json.loads(documents["cpu"])
    del document["components"][0]["name"]
    assert not is_valid(json.dumps(document))
