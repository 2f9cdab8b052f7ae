"""The 25 verifiable instructions of IFEval (arXiv 2311.07911): does a response follow one?

follows("punctuation:no_comma", {}, prompt="", response="No commas here.")      # True

Written from the data set's own definitions. Sentences are counted by a rule of punctuation, so that
nothing is downloaded; letter case is judged by letters alone. `language:response_language` needs
langdetect (extra `dialoop[ifeval]`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bDr)(?<!\bMs)(?<!\bMrs)(?<!\be\.g)(?<!\bi\.e)[.!?]+(?=\s|$)"
)


def follows(instruction: str, arguments: Arguments, *, prompt: str, response: str) -> bool:
    """Whether the response follows one instruction; an empty response follows none.

    Raises InvalidInput (UNKNOWN_INSTRUCTION) for an instruction that is not among the 25.
    """
    check = CHECKS.get(instruction)
    if check is None:
        raise InvalidInput(
            f"There is no instruction {instruction!r}.",
            reason=Reason.UNKNOWN_INSTRUCTION,
            remedy=f"It must be one of {', '.join(CHECKS)}.",
        )
    given = {"prompt": prompt} | {k: v for k, v in arguments.items() if v is not None}
    return bool(response.strip()) and check(response, given)


def loose_forms(response: str) -> list[str]:
    """What the loose reading tries: without first or last line or both, and without asterisks."""
    lines = response.split("\n")
    cut = [
        response,
        "\n".join(lines[1:]).strip(),
        "\n".join(lines[:-1]).strip(),
        "\n".join(lines[1:-1]).strip(),
    ]
    return [form for text in cut for form in (text, text.replace("*", ""))]


def check_all(
    instructions: Sequence[str], arguments: Sequence[Arguments], prompt: str, response: str
) -> dict[str, list[bool]]:
    """{"strict": [...], "loose": [...]}, one per instruction. Runs in a process of its own."""
    pairs = list(zip(instructions, arguments, strict=True))
    forms = loose_forms(response)
    return {
        "strict": [follows(i, a, prompt=prompt, response=response) for i, a in pairs],
        "loose": [any(follows(i, a, prompt=prompt, response=f) for f in forms) for i, a in pairs],
    }


def _relation(found: int, wanted: Any, relation: str) -> bool:
    return found < int(wanted) if relation == "less than" else found >= int(wanted)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _has(text: str, keyword: str) -> bool:
    return re.search(keyword, text, re.IGNORECASE) is not None


def _existence(text: str, given: Arguments) -> bool:
    return all(_has(text, keyword) for keyword in given["keywords"])


def _frequency(text: str, given: Arguments) -> bool:
    found = len(re.findall(given["keyword"], text, re.IGNORECASE))
    return _relation(found, given["frequency"], given.get("relation", "at least"))


def _forbidden(text: str, given: Arguments) -> bool:
    return not any(_has(text, rf"\b{word}\b") for word in given["forbidden_words"])


def _letter_frequency(text: str, given: Arguments) -> bool:
    found = Counter(text.lower())[given["letter"].lower()]
    return _relation(found, given["let_frequency"], given.get("let_relation", "at least"))


def _language(text: str, given: Arguments) -> bool:
    try:
        import langdetect
    except ImportError as error:
        raise InvalidConfig(
            "Telling languages apart needs the `langdetect` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop[ifeval]"',
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == given["language"])
    except langdetect.LangDetectException:
        return False


def num_sentences(text: str) -> int:
    """Sentences by their ends; text after the last end is one more."""
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(rest.strip())


def _sentences(text: str, given: Arguments) -> bool:
    return _relation(num_sentences(text), given["num_sentences"], given.get("relation", "at least"))


def _paragraphs(text: str, given: Arguments) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1] if len(parts) > 1 else []
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == int(given["num_paragraphs"])


def _num_words(text: str, given: Arguments) -> bool:
    return _relation(len(_words(text)), given["num_words"], given.get("relation", "at least"))


def _nth_first_word(text: str, given: Arguments) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    number, index = sum(map(bool, parts)), int(given["nth_paragraph"]) - 1
    if number != int(given["num_paragraphs"]) or index >= len(parts) or not parts[index]:
        return False
    first = re.split(r"[.,?!'\"]", parts[index].split()[0].lstrip("'\""))[0]
    return bool(first.lower() == given["first_word"].lower())


def _placeholders(text: str, given: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= int(given["num_placeholders"])


def _postscript(text: str, given: Arguments) -> bool:
    marker = given["postscript_marker"]
    spelled = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker))
    return re.search(rf"^\s*{spelled}.*$", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, given: Arguments) -> bool:
    found = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    found += re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(found) == int(given["num_bullets"])


def _constrained(text: str, given: Arguments) -> bool:
    return any(option in text for option in _CONSTRAINED)


def _highlights(text: str, given: Arguments) -> bool:
    double = [h for h in re.findall(r"\*\*([^\n*]*)\*\*", text) if h.strip()]
    single = [h for h in re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text) if h.strip()]
    return len(double) + len(single) >= int(given["num_highlights"])


def _sections(text: str, given: Arguments) -> bool:
    found = re.split(rf"\s?{re.escape(given['section_spliter'])}\s?\d+\s?", text)
    return len(found) - 1 >= int(given["num_sections"])


def _json(text: str, given: Arguments) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, given: Arguments) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n]+)>>", text))


def _two_responses(text: str, given: Arguments) -> bool:
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    said = [part.strip() for part in parts if part.strip()]
    return len(said) == 2 and said[0] != said[1]


def _repeat(text: str, given: Arguments) -> bool:
    wanted = given.get("prompt_to_repeat") or given["prompt"]
    return text.strip().lower().startswith(wanted.strip().lower())


def _end(text: str, given: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _quotation(text: str, given: Arguments) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == '"' == stripped[-1]


def _capital_words(text: str, given: Arguments) -> bool:
    found = sum(word.isupper() for word in re.findall(r"\S+", text))
    return _relation(found, given["capital_frequency"], given.get("capital_relation", "at least"))


def _upper(text: str, given: Arguments) -> bool:
    return text.isupper()


def _lower(text: str, given: Arguments) -> bool:
    return text.islower()


def _no_comma(text: str, given: Arguments) -> bool:
    return "," not in text


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": _existence,
        "keywords:frequency": _frequency,
        "keywords:forbidden_words": _forbidden,
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": _language,
        "length_constraints:number_sentences": _sentences,
        "length_constraints:number_paragraphs": _paragraphs,
        "length_constraints:number_words": _num_words,
        "length_constraints:nth_paragraph_first_word": _nth_first_word,
        "detectable_content:number_placeholders": _placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:constrained_response": _constrained,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeat,
        "startend:end_checker": _end,
        "startend:quotation": _quotation,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": _upper,
        "change_case:english_lowercase": _lower,
        "punctuation:no_comma": _no_comma,
    }
)
"""The 25 instructions by name."""
