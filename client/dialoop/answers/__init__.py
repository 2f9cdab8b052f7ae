"""What a policy wrote, read: a thought, content, and calls in the form of each family of models.

Token ids or text enter, with the form of the model's answers; `Reading` leaves. Nothing here
renders a message, and nothing changes what was sampled.
"""

from dialoop.answers.grammars import GRAMMARS, CallGrammar, WrittenCall
from dialoop.answers.reader import AnswerForm, AnswerReader, Reading, read_text

__all__ = [
    "GRAMMARS",
    "AnswerForm",
    "AnswerReader",
    "CallGrammar",
    "Reading",
    "WrittenCall",
    "read_text",
]
