"""Chat templates that behave like those of the model families, on the tiny model's tokens."""

from __future__ import annotations

from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import CHAT_TEMPLATE, tiny_tokenizer

CHATML = CHAT_TEMPLATE

# Thinking is kept after the last user message only, and spaced the template's way; tool messages
# that follow each other share one user turn; calls are JSON between markers.
THINKING = """
{%- set ns = namespace(last_query=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == "user" %}
{%- set ns.open = false %}{%- set ns.last_query = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" or message.role == "system" %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{%- set content = message.content %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{{- content.lstrip('\\n') }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# A BOS at the start only, trimmed contents, tools' text as JSON.
TRIMMING = """
{{- '<|endoftext|>' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '<request>\\n\\n' }}
{%- if message.role == 'tool' %}{{ message.content | tojson }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<request>\\n\\n' }}{%- endif %}
"""

# No system or tool roles of its own, turns must alternate, the assistant is called model.
ALTERNATING = """
{{- '<|endoftext|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{% set role = 'user' %}
{%- elif message.role == 'assistant' %}{% set role = 'model' %}
{%- else %}{% set role = message.role %}{% endif %}
{%- if loop.first and role != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}
{{- '<|im_start|>' + role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}
"""

FAMILIES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "trimming": TRIMMING,
    "alternating": ALTERNATING,
}


def builder(template: str = CHATML) -> TokenBuilder:
    """A builder on the tiny model's tokenizer, with the ends Qwen's generation config names."""
    end = tiny_tokenizer().token_to_id("<|im_end|>")
    other = tiny_tokenizer().token_to_id("<|endoftext|>")
    config = {
        "eos_token": "<|im_end|>",
        "eos_token_ids": [end, other],
        "chat_template": template,
    }
    tokenizer = Tokenizer(tiny_tokenizer(), tiny_tokenizer(), config)
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
