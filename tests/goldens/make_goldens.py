"""Write tests/goldens/<template>.json with torchrl 0.14; run once, in an environment of its own.

python -m venv /tmp/torchrl && /tmp/torchrl/bin/pip install torchrl==0.14.1 'transformers<5.20'
PYTHONPATH=. /tmp/torchrl/bin/python tests/goldens/make_goldens.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torchrl
import transformers
from torchrl.data.llm import History
from transformers import PreTrainedTokenizerFast

from tests.goldens.samples import CONVERSATIONS, SPECIAL, TOOLS, golden_tokenizer

THEIR_NAMES = {
    "chatml": "chatml_format",
    "qwen": "qwen",
    "falcon": "falcon",
    "deepseek": "deepseek",
    "llama": "llama",
    "dialogpt": "dialogpt",
}


def render_with_torchrl(history: Any, tokenizer: Any, name: str, **options: Any) -> dict[str, Any]:
    """What torchrl makes of a conversation: text, ids, mask, and whether it reads it back."""
    arguments = {"tokenizer": tokenizer, "chat_template_name": THEIR_NAMES[name], **options}
    opened = history.apply_chat_template(add_generation_prompt=True, **arguments)
    closed = history.apply_chat_template(add_generation_prompt=False, **arguments)
    row: dict[str, Any] = {"opened": opened, "closed": closed}
    masked = history.apply_chat_template(
        add_generation_prompt=False, return_assistant_tokens_mask=True, **arguments
    )
    row["ids"] = masked["input_ids"].flatten().tolist()
    row["mask"] = masked["assistant_masks"].flatten().int().tolist()
    try:
        parsed = History.from_text(closed, chat_template_name=THEIR_NAMES[name])
        row["parsed"] = [[m.role, m.content, bool(m.is_complete)] for m in parsed.unbind(0)]
    except Exception as error:
        row["parse_raises"] = type(error).__name__
    return row


def main() -> None:
    """One file per template."""
    warnings.simplefilter("ignore")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=golden_tokenizer(), **SPECIAL)
    made_with = {"torchrl": torchrl.__version__, "transformers": transformers.__version__}
    for name in THEIR_NAMES:
        rows: dict[str, Any] = {}
        for key, chats in CONVERSATIONS.items():
            rows[key] = render_with_torchrl(History.from_chats(chats), tokenizer, name)
            if name == "qwen":
                history = History.from_chats(chats)
                row = render_with_torchrl(history, tokenizer, name, tools=TOOLS)
                rows[f"{key}/tools"] = {k: row[k] for k in ("opened", "closed")}
        lines = [
            f"{json.dumps(k)}: {json.dumps(row, ensure_ascii=False)}" for k, row in rows.items()
        ]
        text = f'{{"made_with": {json.dumps(made_with)},\n"rows": {{\n' + ",\n".join(lines) + "}}\n"
        Path(__file__).with_name(f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
