"""Chat templates: render a history as text, parse text back, and mark who wrote which character.

Histories and Jinja sources enter; text, character masks and histories leave. No token id is known
here.
"""

from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.declared_parser import TemplateParser
from dialoop.templates.masks import EncodedConversation, encode_conversation
from dialoop.templates.registry import TemplateInfo, TemplateRegistry

__all__ = [
    "ChatTemplate",
    "EncodedConversation",
    "TemplateInfo",
    "TemplateParser",
    "TemplateRegistry",
    "encode_conversation",
]
