"""Whether a deployment's answers begin inside the reasoning: its chat template knows."""

from __future__ import annotations

import json
from pathlib import Path

from lr_backend.errors import CheckpointError


def opens_reasoning(checkpoint: Path, think_open: str | None) -> bool:
    """Whether the prompt that the chat template makes ends by opening the reasoning.

    Raises:
        CheckpointError: there is no template, or it refuses a plain question.
    """
    if not think_open:
        return False
    # The renderer of the tokenizers themselves, without the rest of transformers, which would bring torch.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        prompts, _ = render_jinja_template(
            [[{"role": "user", "content": "?"}]],
            chat_template=_template(checkpoint),
            add_generation_prompt=True,
            **_special_tokens(checkpoint),
        )
    except Exception as error:  # templates raise whatever they like
        raise CheckpointError(f"{checkpoint.name}: its chat template cannot be rendered: {error}") from error
    return str(prompts[0]).rstrip().endswith(think_open)


def _special_tokens(checkpoint: Path) -> dict[str, str]:
    """``bos_token`` and the like, which templates may write."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (checkpoint / name).is_file():
            for key, value in json.loads((checkpoint / name).read_text(encoding="utf-8")).items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(text, str):
                    found[key] = text
    return found


def _template(checkpoint: Path) -> str:
    file = checkpoint / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    if isinstance(template, list):  # several by name
        template = next(one["template"] for one in template if one["name"] == "default")
    return str(template)
