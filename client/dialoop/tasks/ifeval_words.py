"""IFEval's instructions in words: what an answer that failed a check should have done.

words_of("punctuation:no_comma", {})     # "Do not use any commas."
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "keywords:existence": "Use these words: {keywords}.",
        "keywords:frequency": "Use the word {keyword} {relation} {frequency} times.",
        "keywords:forbidden_words": "Do not use these words: {forbidden_words}.",
        "keywords:letter_frequency": (
            "Use the letter {letter} {let_relation} {let_frequency} times."
        ),
        "language:response_language": "Answer in the language {language} and in no other.",
        "length_constraints:number_sentences": "Write {relation} {num_sentences} sentences.",
        "length_constraints:number_paragraphs": (
            "Write exactly {num_paragraphs} paragraphs with the divider *** between them."
        ),
        "length_constraints:number_words": "Write {relation} {num_words} words.",
        "length_constraints:nth_paragraph_first_word": (
            "Write exactly {num_paragraphs} paragraphs with an empty line between them, and begin "
            "paragraph {nth_paragraph} with the word {first_word}."
        ),
        "detectable_content:number_placeholders": (
            "Use at least {num_placeholders} placeholders in square brackets, such as [name]."
        ),
        "detectable_content:postscript": "Add a postscript that starts with {postscript_marker}",
        "detectable_format:number_bullet_lists": (
            "Write exactly {num_bullets} bullet points, such as * This point."
        ),
        "detectable_format:constrained_response": (
            "Answer with one of: My answer is yes. My answer is no. My answer is maybe."
        ),
        "detectable_format:number_highlighted_sections": (
            "Highlight at least {num_highlights} parts with asterisks, such as *this part*."
        ),
        "detectable_format:multiple_sections": (
            "Write at least {num_sections} sections, each begun with {section_spliter} and its "
            "number."
        ),
        "detectable_format:json_format": "Write the whole answer as JSON.",
        "detectable_format:title": "Give a title in double angular brackets, such as <<title>>.",
        "combination:two_responses": (
            "Give two different answers with six asterisks between them: ******"
        ),
        "combination:repeat_prompt": "First repeat the request word for word, then answer it.",
        "startend:end_checker": "End with exactly this phrase: {end_phrase}",
        "startend:quotation": "Put the whole answer in double quotation marks.",
        "change_case:capital_word_frequency": (
            "Use words in all capital letters {capital_relation} {capital_frequency} times."
        ),
        "change_case:english_capital": "Write in English and in capital letters only.",
        "change_case:english_lowercase": "Write in English and in lowercase letters only.",
        "punctuation:no_comma": "Do not use any commas.",
    }
)
"""The 25 instructions with places for their arguments."""

_RELATIONS: Final = MappingProxyType(
    dict.fromkeys(("relation", "let_relation", "capital_relation"), "at least")
)


def words_of(instruction: str, arguments: Mapping[str, Any]) -> str:
    """Return an instruction of WORDS in words; a relation that is not given is "at least"."""
    given = {name: value for name, value in arguments.items() if value is not None}
    shown = {
        name: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for name, value in {**_RELATIONS, **given}.items()
    }
    return WORDS[instruction].format_map(shown)
