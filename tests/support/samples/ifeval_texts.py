"""Texts near the edges of IFEval's 25 checks, with arguments for them; the same for the same seed.

A text is a few pieces of its check in any order. Pieces for sentences hold no capital word of which
only nltk's model knows whether it begins a sentence: see dialoop/tasks/ifeval_text.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Arguments = dict[str, Any]
Draw = Callable[[random.Random], Arguments]


def _cut(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


RELATIONS: Final = ("at least", "less than")
_COMMON: Final = ("", " ", " ", "\n", "\n\n", "a", ".", "\u00e9", "\u65e5\u672c", "\xa0", "\u2028")
_MARKS: Final = (*""".?!,:;'"()[]{}<>*-&%$#@`/_""", "...", "..", "--", "---", "!!", "?!")
_MARKS_BEYOND_ASCII: Final = tuple("\u201c\u201d\u2018\u2019\xab\xbb\u201e\u2014")
_CAPITALS: Final = _cut(
    "the|The|THE|AND|It|IT'S|it's|DON'T|don't|CANNOT|cannot|GONNA|WANNA|GIMME|LEMME|GOTTA|D'YE"
    "|MORE'N|'TIS|'TWAS|Dr|U.S|P.M|e.g|Ph.D|J|B|I|A|1|2.5|1,000|-3|BIG|BIG-TIME|lower|I'M|HE'LL"
    "|WE'RE|THEY'VE|I'D|o'clock|5th|A1|Inc|v|S't|'Em|'S|DON\u2019T|\u00df|\u00c9|\u01c5|\u03a3"
)
_SENTENCES: Final = _cut(
    "It works.|Does it?|No!|Wow!!|Really?!|no end|and so on|(So it is.)|[see it.]|end.)|1. First"
    "|2. second|3. Who|4. Review|3.5 is it.|version 1.2.3.|e.g. this|i.e. that|etc. and|No. 5"
    "|Dr. Ames|Mr. and Mrs. Ames ran.|at 5 p.m. The|at 5 a.m. and|the U.S. But|the U.S. army"
    "|J. Ames|Plan B. The|x. y|Ph.D. students|the Inc. However|Well... The|well... then|hm.. so"
    "|*Bold.* Then|**Bold.** Then|- one.|* two!|!|?|.|--|\u65e5\u672c\u3002|na\u00efve."
    "|\u201cYes.\u201d She|\u2018Yes!\u2019 she|\xabOui.\xbb He|It ends.\u201d"
    '|"Yes."|"Yes?" he said.|It ends."|It ends. "'
)
_ENGLISH: Final = _cut(
    "this is a plain sentence about the weather.|we all like to read good books|and it was late"
    "|nothing else is here|das ist ein ganz gew\u00f6hnlicher satz|je ne sais pas|ok|1234|?!"
    "|http://a.b/c|a@b.c"
)
_LANGUAGES: Final = _cut(
    "This is a plain English sentence about the weather.|Das ist ein ganz gew\u00f6hnlicher Satz."
    "|Il fait tr\u00e8s beau aujourd'hui, n'est-ce pas?|\u0421\u0435\u0433\u043e\u0434\u043d\u044f "
    "\u0445\u043e\u0440\u043e\u0448\u0430\u044f \u043f\u043e\u0433\u043e\u0434\u0430"
    "|\u4eca\u65e5\u306f\u5929\u6c17\u304c\u3044\u3044\u3067\u3059\u3002|12345|!!! ???|http://a.b/c"
)

_PIECES: Final[Mapping[str, tuple[str, ...]]] = {
    "keywords:existence": _cut("sun|Sun|SUN|sunny|su n|moon|mo\non|k|\u212a|\u017fun|m00n"),
    "keywords:frequency": _cut("sun|Sun| sun |sunsun|moon|k|\u212a|\u017fun|su|nsu"),
    "keywords:forbidden_words": _cut("cat|Cat.|category|the cat|a b|ab|_cat|\u00c9|\u00e9a"),
    "keywords:letter_frequency": _cut("a|A|aa|zebra|sS|\u017f|K|\u212a|I\u0130\u0131|\u00e0"),
    "language:response_language": _LANGUAGES,
    "length_constraints:number_sentences": _SENTENCES,
    "length_constraints:number_paragraphs": (
        *("***", "\n***\n", " *** ", "\n\n***\n\n", "****", "******", "* * *", "one", "two"),
    ),
    "length_constraints:number_words": _cut(
        "one |two_three|it's|a-b|\xb2|e\u0301a|\u0939\u093f|1.5| \u0663|\n-\n"
    ),
    "length_constraints:nth_paragraph_first_word": (
        *("\n\n", "\n\n\n", "\n", "Then ", "then", "\"Then'", "'then", "''\"THEN,", "\"'then"),
        *("then.x", "first", "\u039f\u0394\u039f\u03a3 ", "\u03bf\u03b4\u03bf\u03c2", '"', "*then"),
    ),
    "detectable_content:number_placeholders": _cut("[|]|[a]|[]|[b\nc]|[[d]]|[e] [f]|\\[g\\]"),
    "detectable_content:postscript": (
        *("P.S.", "p. s.", "P. S", "P.P.S", "p.p. s.", "PS ", "a P.S. b", "P.\nS.", "\n  P.S. c"),
        *("P.\nP.S", "Note: d", "NOTE", "Pxp,s!", "\u0130"),
    ),
    "detectable_format:number_bullet_lists": (
        *("* a", "\n* b", "\n*c", "\n** d", "\n- e", "\n-", "\n--", "\n  - f", "\n\u2022 g", "\n*"),
        *("\n***", "\n\t* h", "\n\n"),
    ),
    "detectable_format:constrained_response": (
        *("My answer is ", "my answer is ", "yes.", "no.", "maybe.", "yes", "My answer is no."),
        *("My answer is maybe", "\nyes.", "Mine is no."),
    ),
    "detectable_format:number_highlighted_sections": (
        *("*", "*", "**", "***", "*b*", "**c**", "*d**e*", "***f***", "* *", "** **", "*g\nh*"),
    ),
    "detectable_format:multiple_sections": (
        *("Section 1", "Section2", "section 3", "SECTION 4", "Sections 5", "Section  6", "1"),
        *(
            "Section\n7",
            "Section \u0663",
            "Day 1",
            "Day 2 ",
            "Q. 1",
            "Qx2",
            "Q.3",
            "a4",
            "-Section 8",
        ),
    ),
    "detectable_format:json_format": (
        *(
            "```",
            "```json",
            "```JSON\n",
            "```Json",
            "```jSON",
            "json",
            '{"a": [1, null]}',
            "[1, 2]",
        ),
        *('"b"', "1", "NaN", "{'c': 1}", "{}", "\n```", "```\n"),
    ),
    "detectable_format:title": ("<<", ">>", "<<<", ">>>", "<", ">", "b", "<<c>>", "<<d\n>>"),
    "combination:two_responses": (
        *("******", "******", "\n******\n", "*****", "*******", "***", "b", "a\n", "c", "***\n***"),
    ),
    "combination:repeat_prompt": (
        *(
            "Say hi.",
            "say HI. ",
            "Say hi",
            "Say  hi.",
            "Stra\u00dfe",
            "STRASSE",
            "stra\u00dfe \u0130",
        ),
    ),
    "startend:end_checker": (
        *(
            "The end.",
            "THE END. ",
            'the end."',
            "'The end.'",
            "Bye",
            'bye"" ',
            "The end",
            "stra\u00dfe",
        ),
    ),
    "startend:quotation": ('"', '"', ' "', '"\n', "\u201c", "\u201d", "'", "b"),
    "change_case:capital_word_frequency": (
        *(*_CAPITALS, *(f"{word} " for word in _CAPITALS), *_MARKS, *_MARKS_BEYOND_ASCII),
        *("''", "``", "\t", *(" ",) * 20, ". ", ". ", "! ", "? "),
    ),
    "change_case:english_capital": (*(text.upper() for text in _ENGLISH), "a", "\u00df", "A"),
    "change_case:english_lowercase": (*_ENGLISH, "A", "\u01c5", "a"),
    "punctuation:no_comma": ("b", "c", "d.", ",", "\uff0c", "\u060c", ";", "'", "\u201a"),
}
_SEPARATED: Final = {
    "length_constraints:number_sentences": (" ", " ", " ", "\n", "\n\n", ' "', "  "),
    "change_case:english_capital": (" ", " ", "\n"),
    "change_case:english_lowercase": (" ", " ", "\n"),
    "language:response_language": (" ", "\n"),
}
_LONG: Final = {"change_case:capital_word_frequency": 14, "punctuation:no_comma": 4}


def _related(name: str, relation: str, most: int, **choices: tuple[Any, ...]) -> Draw:
    """Return what draws a count, a relation and one of each choice."""

    def draw(pick: random.Random) -> Arguments:
        drawn = {key: pick.choice(values) for key, values in choices.items()}
        return {**drawn, name: pick.randint(1, most), relation: pick.choice(RELATIONS)}

    return draw


def _count(name: str, most: int) -> Draw:
    return lambda pick: {name: pick.randint(1, most)}


def _choice(name: str, *values: str) -> Draw:
    return lambda pick: {name: pick.choice(values)}


def _some(name: str, *values: str) -> Draw:
    return lambda pick: {name: pick.sample(values, pick.randint(1, 2))}


def _nth_first_word(pick: random.Random) -> Arguments:
    number = pick.randint(1, 2)
    word = pick.choice(("then", "then", "Then", "\u03bf\u03b4\u03bf\u03c3"))
    return {"num_paragraphs": number, "nth_paragraph": pick.randint(1, number), "first_word": word}


def _section(pick: random.Random) -> Arguments:
    spliter = pick.choice(("Section", "SECTION", " Section ", "Day", "Q.", "(a)"))
    return {"section_spliter": spliter, "num_sections": pick.randint(1, 3)}


_ARGUMENTS: Final[Mapping[str, Draw]] = {
    "keywords:existence": _some("keywords", "sun", "moon", "k", "s.n"),
    "keywords:frequency": _related(
        "frequency", "relation", 4, keyword=("sun", " sun ", "moon", "k")
    ),
    "keywords:forbidden_words": _some("forbidden_words", "cat", "a b", "\u00e9"),
    "keywords:letter_frequency": _related(
        "let_frequency", "let_relation", 5, letter=tuple("azsKIi")
    ),
    "language:response_language": _choice("language", "en", "de", "fr", "ru", "ja"),
    "length_constraints:number_sentences": _related("num_sentences", "relation", 9),
    "length_constraints:number_paragraphs": _count("num_paragraphs", 3),
    "length_constraints:number_words": _related("num_words", "relation", 9),
    "length_constraints:nth_paragraph_first_word": _nth_first_word,
    "detectable_content:number_placeholders": _count("num_placeholders", 4),
    "detectable_content:postscript": _choice(
        "postscript_marker", "P.S.", "P.P.S", " P.S. ", "P.P.S.", "PS", "Note:"
    ),
    "detectable_format:number_bullet_lists": _count("num_bullets", 4),
    "detectable_format:number_highlighted_sections": _count("num_highlights", 5),
    "detectable_format:multiple_sections": _section,
    "combination:repeat_prompt": _choice(
        "prompt_to_repeat", "Say hi.", " say HI. ", "Stra\u00dfe", "a"
    ),
    "startend:end_checker": _choice("end_phrase", "The end.", " the END. ", "Bye", "stra\u00dfe"),
    "change_case:capital_word_frequency": _related("capital_frequency", "capital_relation", 6),
}


def ifeval_cases(name: str, num: int, *, seed: int = 0) -> Iterator[tuple[Arguments, str]]:
    """Yield arguments and a text for one check, `num` times."""
    pick = random.Random(f"{name} {seed}")
    pieces, between = _PIECES[name], _SEPARATED.get(name)
    for _ in range(num):
        length = pick.randint(0, _LONG.get(name, 8))
        if between:
            parts = [pick.choice(pieces) + pick.choice(between) for _ in range(length)]
        else:
            parts = [pick.choice(pick.choice((pieces, pieces, _COMMON))) for _ in range(length)]
        arguments = _ARGUMENTS[name](pick) if name in _ARGUMENTS else {}
        yield arguments, "".join(parts)
