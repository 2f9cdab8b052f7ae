"""What a policy wrote, read: a thought, content, and calls in the form of each family of models.

Token ids or text enter, with the form of the model's answers; `Reading` leaves. Nothing here
renders a message, and nothing changes what was sampled.
"""

from dialoop.answers.grammars import GRAMMARS as GRAMMARS
from dialoop.answers.grammars import CallGrammar as CallGrammar
from dialoop.answers.grammars import WrittenCall as WrittenCall
from dialoop.answers.reader import AnswerForm as AnswerForm
from dialoop.answers.reader import AnswerReader as AnswerReader
from dialoop.answers.reader import Reading as Reading
from dialoop.answers.reader import grammar_of as grammar_of
from dialoop.answers.reader import read_text as read_text
