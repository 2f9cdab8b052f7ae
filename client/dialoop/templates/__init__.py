"""Chat templates: render a history as text, parse text back, and mark who wrote which character.

Histories and Jinja sources enter; text, character masks and histories leave. No token id is known
here.
"""

from dialoop.templates.chat_template import ChatTemplate as ChatTemplate
from dialoop.templates.declared_parser import TemplateParser as TemplateParser
from dialoop.templates.masks import EncodedConversation as EncodedConversation
from dialoop.templates.masks import encode_conversation as encode_conversation
from dialoop.templates.registry import TemplateInfo as TemplateInfo
from dialoop.templates.registry import TemplateRegistry as TemplateRegistry
