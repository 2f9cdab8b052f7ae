"""Twenty questions: find a hidden word by asking, then guess it in brackets.

    "Is it alive?"   ->  "No"
    "[key]"          ->  reward 1, done

A guess is `[word]` of letters, blanks and underscores, without a question mark. By default the
second wrong guess ends the game (`error_allowance`). States are values, so games that run at the
same time share nothing. No prompt shows the word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.errors import InvalidInput
from dialoop.user_functions import call

from dialoop_extras.trials.game import Move
from dialoop_extras.trials.words import WORDS, answer_from_table

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWERS = ("Yes", "No", "I don't know")
_GUESS = re.compile(r"\[([A-Za-z_ ]+)\]")
_RULES = (
    "I am thinking of a thing. Ask up to {questions} questions that can be answered with yes or "
    "no. Guess by writing the thing in brackets, as [apple]."
)


class Gamemaster(Protocol):
    """Answers questions about the word. It may be async."""

    def answer(self, word: str, question: str) -> str | Awaitable[str]:
        """Return Yes, No or I don't know; after anything else the player has to ask again."""
        ...


@dataclass(frozen=True, slots=True)
class TableGamemaster:
    """Answers from a table of properties, by the words of the question."""

    async def answer(self, word: str, question: str) -> str:
        """Look for a property that the question names."""
        return answer_from_table(word, question)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The state of one game; `reply` is what the player reads next."""

    word: str = field(repr=False)
    num_questions: int = 0
    num_wrong_guesses: int = 0
    reply: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwentyQuestions:
    """The game with its rules."""

    gamemaster: Gamemaster = field(default_factory=TableGamemaster)
    hardcore: bool = False
    max_turns: int = 21
    error_allowance: int = 1

    def __post_init__(self) -> None:
        if self.max_turns < 2 or self.error_allowance < 0:
            raise InvalidInput(
                f"max_turns is {self.max_turns} and error_allowance is {self.error_allowance}.",
                remedy="Allow at least one question and one guess, and 0 or more errors.",
            )

    @property
    def max_steps(self) -> int:
        """Return the limit on questions and guesses together."""
        return self.max_turns

    def words(self, split: str) -> Sequence[str]:
        """Return the hidden words of a split, "train" or "heldout"; none is in both."""
        level = "hard" if self.hardcore else "basic"
        return WORDS[level, split]

    def begin(self, task: Mapping[str, Any], *, seed: int) -> Hidden:
        """Return the game of `solution` (older data: `prompt`), or of a word the seed chooses."""
        word = task.get("solution", task.get("prompt"))
        if word is None:
            word = random.Random(seed).choice(self.words("train"))
        if not isinstance(word, str) or not word.strip():
            raise InvalidInput(
                "The task's `solution` is empty or not a text.", remedy="Give a word."
            )
        return Hidden(word=word.strip(), reply=_RULES.format(questions=self.max_turns - 1))

    def prompt(self, state: Hidden, step: int) -> str:
        """Return what the player reads: the rules, the last answer, or a warning before the end."""
        if step == self.max_turns - 1:
            return f"{state.reply}\nNo question is left: guess now, as [thing]."
        return state.reply

    async def play(self, state: Hidden, action: str) -> Move[Hidden]:
        """Play a guess or a question."""
        guess = _GUESS.search(action)
        if guess is not None and "?" not in action:
            return self._guess(state, guess.group(1))
        if "?" not in action:
            return self._invalid(state, "Ask a question that ends with ?, or guess as [thing].")
        answer = str(await call(self.gamemaster.answer, state.word, action)).strip()
        if answer not in ANSWERS:
            reply = "That cannot be answered with yes or no. Ask otherwise."
            return Move(state=replace(state, reply=reply), info={"move": "unanswered"})
        next_state = replace(state, num_questions=state.num_questions + 1, reply=answer)
        return Move(state=next_state, info={"move": "question"})

    def _guess(self, state: Hidden, guess: str) -> Move[Hidden]:
        if _plain(guess) == _plain(state.word):
            return Move(
                state=replace(state, reply="Yes!"), reward=1.0, done=True, info={"move": "correct"}
            )
        return self._invalid(state, f"It is not {guess.strip()}.")

    def _invalid(self, state: Hidden, reply: str) -> Move[Hidden]:
        wrong = replace(state, num_wrong_guesses=state.num_wrong_guesses + 1, reply=reply)
        over = wrong.num_wrong_guesses > self.error_allowance
        return Move(state=wrong, done=over, info={"move": "invalid"})


def _plain(word: str) -> str:
    return " ".join(word.replace("_", " ").lower().split())
