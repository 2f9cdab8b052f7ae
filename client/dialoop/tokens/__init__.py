"""Tokens: a tokenizer, and the builder that keeps exactly the tokens that were sampled.

Messages and sampled ids enter; `Sequence` values with segments and owners leave.
"""

from dialoop.tokens.builder import TokenBuilder as TokenBuilder
from dialoop.tokens.tokenizer import Encoded as Encoded
from dialoop.tokens.tokenizer import Tokenizer as Tokenizer
