"""The 25 verifiable instructions of IFEval (arXiv 2311.07911): does a response follow one?

follows("punctuation:no_comma", {}, prompt="", response="No commas here.")      # True

The checks answer as the published ones do, in edge cases too: a postscript may stand anywhere in a
line. Sentences and words in capitals are counted without nltk's data files. A response's language,
and whether text in one letter case is English, needs langdetect (extra `dialoop[ifeval]`).
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
from dialoop.tasks.ifeval_text import count_words, sentences, words

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def follows(instruction: str, arguments: Arguments, *, prompt: str, response: str) -> bool:
    """Return whether the response follows one instruction; an empty response follows none.

    Raise InvalidInput (UNKNOWN_INSTRUCTION) for an instruction that is not among the 25.
    """
    check = CHECKS.get(instruction)
    if check is None:
        raise InvalidInput(
            f"There is no instruction {instruction!r}.",
            reason=Reason.UNKNOWN_INSTRUCTION,
            remedy=f"It must be one of {', '.join(CHECKS)}.",
        )
    filled = {"prompt": prompt} | {k: v for k, v in arguments.items() if v is not None}
    return bool(response.strip()) and check(response, filled)


def loose_forms(response: str) -> list[str]:
    """Return the forms for loose checks: without first or last line or both, or asterisks."""
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
    """Return {"strict": [...], "loose": [...]}, one entry per instruction."""
    pairs = list(zip(instructions, arguments, strict=True))
    forms = loose_forms(response)
    return {
        "strict": [follows(i, a, prompt=prompt, response=response) for i, a in pairs],
        "loose": [any(follows(i, a, prompt=prompt, response=f) for f in forms) for i, a in pairs],
    }


def _relation(count: int, wanted: Any, relation: str) -> bool:
    return count < int(wanted) if relation == "less than" else count >= int(wanted)


def _has(text: str, keyword: str) -> bool:
    return re.search(keyword, text, re.IGNORECASE) is not None


def _existence(text: str, arguments: Arguments) -> bool:
    return all(_has(text, keyword) for keyword in arguments["keywords"])


def _frequency(text: str, arguments: Arguments) -> bool:
    count = len(re.findall(arguments["keyword"].strip(), text, re.IGNORECASE))
    return _relation(count, arguments["frequency"], arguments.get("relation", "at least"))


def _forbidden(text: str, arguments: Arguments) -> bool:
    return not any(_has(text, rf"\b{word}\b") for word in arguments["forbidden_words"])


def _letter_frequency(text: str, arguments: Arguments) -> bool:
    count = Counter(text.lower())[arguments["letter"].lower()]
    return _relation(count, arguments["let_frequency"], arguments.get("let_relation", "at least"))


def require_langdetect() -> None:
    """Raise InvalidConfig (PACKAGE_MISSING) unless langdetect is installed."""
    try:
        import langdetect  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            "The check of a response's language needs the `langdetect` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop[ifeval]"',
        ) from error


def _is_in(language: str, text: str) -> bool:
    """Return whether a text is in a language; one that langdetect finds none in passes for any."""
    require_langdetect()
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:
        return True


def _language(text: str, arguments: Arguments) -> bool:
    return _is_in(arguments["language"], text)


def _sentences(text: str, arguments: Arguments) -> bool:
    return _relation(
        len(sentences(text)), arguments["num_sentences"], arguments.get("relation", "at least")
    )


def _paragraphs(text: str, arguments: Arguments) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1] if len(parts) > 1 else []
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == int(arguments["num_paragraphs"])


def _num_words(text: str, arguments: Arguments) -> bool:
    return _relation(
        count_words(text), arguments["num_words"], arguments.get("relation", "at least")
    )


def _nth_first_word(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    number, index = sum(map(bool, parts)), int(arguments["nth_paragraph"]) - 1
    if number != int(arguments["num_paragraphs"]) or index >= number or not parts[index]:
        return False
    opened = parts[index].split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", opened)[0]
    # Letter by letter: a Greek word's last sigma has another small letter.
    return bool("".join(map(str.lower, first)) == arguments["first_word"].lower())


def _placeholders(text: str, arguments: Arguments) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= int(arguments["num_placeholders"])


def _postscript(text: str, arguments: Arguments) -> bool:
    marker = arguments["postscript_marker"].strip()
    # Another marker is a pattern itself.
    spelled = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker, marker.lower())
    return re.search(spelled, text.lower(), re.MULTILINE) is not None


def _bullets(text: str, arguments: Arguments) -> bool:
    bullets = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    bullets += re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(bullets) == int(arguments["num_bullets"])


def _constrained_response(text: str, arguments: Arguments) -> bool:
    return any(option in text for option in _CONSTRAINED)


def _highlights(text: str, arguments: Arguments) -> bool:
    # Read twice: between single asterisks "**a**" holds nothing, and "*a**b*" holds two parts.
    inner = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in inner) >= int(arguments["num_highlights"])


def _sections(text: str, arguments: Arguments) -> bool:
    parts = re.split(rf"\s?{arguments['section_spliter'].strip()}\s?\d+\s?", text)
    return len(parts) - 1 >= int(arguments["num_sections"])


def _json(text: str, arguments: Arguments) -> bool:
    body = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, arguments: Arguments) -> bool:
    # The outermost brackets of a line count, and further ones on the inside are none of the title.
    return any(t.lstrip("<").rstrip(">").strip() for t in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    responses = [part.strip() for part in parts if part.strip()]
    return len(responses) == 2 and responses[0] != responses[1]


def _repeat(text: str, arguments: Arguments) -> bool:
    wanted = arguments.get("prompt_to_repeat") or arguments["prompt"]
    return text.strip().lower().startswith(wanted.strip().lower())


def _end(text: str, arguments: Arguments) -> bool:
    return text.strip().strip('"').lower().endswith(arguments["end_phrase"].strip().lower())


def _quotation(text: str, arguments: Arguments) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == '"' == stripped[-1]


def _capital_words(text: str, arguments: Arguments) -> bool:
    count = sum(word.isupper() for word in words(text))
    return _relation(
        count, arguments["capital_frequency"], arguments.get("capital_relation", "at least")
    )


def _upper(text: str, arguments: Arguments) -> bool:
    return text.isupper() and _is_in("en", text)


def _lower(text: str, arguments: Arguments) -> bool:
    return text.islower() and _is_in("en", text)


def _no_comma(text: str, arguments: Arguments) -> bool:
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
        "detectable_format:constrained_response": _constrained_response,
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

IN_A_LANGUAGE = frozenset(
    {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
)
"""The instructions whose checks need langdetect."""
