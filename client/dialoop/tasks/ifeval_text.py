"""Sentences and words as nltk's English tokenizers find them, without nltk and its data files.

sentences("Dr. Ames left at 5 p.m. They ran!")     # ["Dr. Ames left at 5 p.m.", "They ran!"]
words("I CAN'T.")                                  # ["I", "CA", "N'T", "."]

IFEval counts both. The rules are nltk 3.10's. Its model of English (Punkt) has 20,000 words: those
that decide most are here. The others decide only whether a capital word after an abbreviation, an
initial or an ellipsis begins a sentence. We take it for a name, after an ellipsis for a beginning.
"""

from __future__ import annotations

import re
from bisect import bisect
from itertools import groupby, pairwise
from typing import Final
from unicodedata import category


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ABBREVIATIONS: Final = _set_of(
    """c d e f g h k l m n p r s t v w
    dr gen lt maj messrs mr mrs ms prof rep reps sen jr sr st m.b.a ph.d bros co corp cos inc ltd
    chg cie ave ft mg ok sw vs a.m p.m a.c a.d h.m u.k u.s u.s.a u.s.s.r u.n
    jan feb aug sept sep oct nov dec tues wed fri yr
    adm ariz calif col colo conn ct fla ga ill kan ky mich minn nev okla ore pa tenn va vt wash wis
    ala d.c l.a n.c n.d n.h n.j n.m n.v n.y r.i s.c w.va
    a.a a.g a.h a.m.e a.s a.t b.f b.v c.i.t c.o.m.b c.v d.h d.w e.f e.h e.l e.m f.g f.j g.d g.f
    g.k h.c h.f i.m.s j.b j.c j.j j.k j.p j.r l.f l.p m.d.c m.j p.a.m r.a r.h r.j r.k r.t s.a
    s.a.y s.g s.p.a s.s t.j w.c w.r w.w"""
)
"""What Punkt takes for abbreviations: e.g., i.e. and etc. are none, so they end a sentence."""

_BEGINNINGS: Final = _set_of(
    """according although always among anyone anything behind being beneath between both but despite
    does either enough even ever finally he her here hers herself him himself however i if in
    indeed instead into it many meanwhile mine moreover most myself neither nevertheless
    nonetheless nor nothing please remember right sales same seems separately similarly since
    so some someone sometimes soon still such suddenly thank the them there therefore these
    they things think this though through thus together under unless upon us very wait were
    when whether which while whom within without yes yet your"""
)
"""Words that begin a sentence where they have a capital after an abbreviation."""

_INNER: Final = _set_of(
    """a about after again against all also am an and another any are as at away be because been
    before below by can come could did do during each every everyone everything few first for
    from give go good great had has have having hey his how is its itself just last later let
    like little look may maybe me might more much must my near never next no nobody none not
    now of off often on once one only or other our out over perhaps quite rather really see
    several she should something sure than that their then those three to today too two until
    up was we well what whatever where who whose why will with would you"""
)
"""Words that Punkt has seen with a capital within sentences: such a capital tells nothing."""

_AFTER_NUMBERS: Final = _set_of(
    """abreast business commodities corrections credit dividend financing insider international
    leisure letters notable review who"""
)
"""Words that go with the number before them, as "5. Review" does."""

_CURLY: Final = "\u2018\u2019\u201c\u201d\xab\xbb"
_CLOSING: Final = rf"""[)";}}\]*:@'({{\[?!{_CURLY}]"""
_RUN: Final = r"-{2,}|\.{2,}|(?:\.\s){2,}\."
_END: Final = re.compile(rf"[.?!](?=(?P<after>{_CLOSING}|\s+(?P<next>\S+)))")
_SPACED: Final = re.compile(r"(?:\A[ \t-\r])?[^ \t-\r]+")
_TOKEN: Final = re.compile(
    rf"{_RUN}|[^\s(\"`{{\[:;&#*@)}}\]\-,]\S*?(?=,?(?:\s|$|{_CLOSING}|{_RUN}))|\S"
)
_INITIAL: Final = re.compile(r"[^\W\d]\.")
_NUMBER: Final = re.compile(r"-?[.,]?\d[\d,.-]*")
_REST: Final = re.compile(rf"""["')\]}}{_CURLY}]+?(?:\s+|(?=--)|$)""", re.MULTILINE)


def sentences(text: str) -> list[str]:
    """Return a text's sentences, each with its closing quotes and brackets."""
    starts = [word.start() for word in _SPACED.finditer(text)]
    # Of a word's possible ends the last one counts, and a mark that the word begins with.
    ends: dict[tuple[int, bool], re.Match[str]] = {}
    for end in _END.finditer(text):
        start = starts[bisect(starts, end.start()) - 1]
        ends[start, end.start() == start] = end
    pieces, begin = [], 0
    for (start, _), end in ends.items():
        if _holds_break(text[start : end.end()] + end["after"]):
            pieces.append((begin, end.end()))
            begin = end.start("next") if end["next"] else end.end()
    pieces.append((begin, len(text.rstrip())))
    found, moved = [], 0
    for (first, stop), (following, limit) in pairwise([*pieces, (len(text), len(text))]):
        rest = _REST.match(text, following, max(following, limit))
        taken = following + len(rest[0].rstrip()) if rest else stop
        found.append(text[first + moved : taken])
        moved = len(rest[0]) if rest else 0
    return [sentence for sentence in found if sentence]


def _holds_break(context: str) -> bool:
    return any(_breaks(word, following) for word, following in pairwise(_TOKEN.findall(context)))


def _breaks(word: str, following: str) -> bool:
    """Return whether a sentence ends between two tokens."""
    if word in {".", "?", "!"}:
        return True
    if not word.endswith("."):
        return False
    has_capital = following[0].isupper()
    name = following.lower().removesuffix(".")
    if word.strip(".") == "":
        return has_capital and name not in _INNER
    body = word[:-1].lower()
    is_known = body in _ABBREVIATIONS or body.split("-")[-1] in _ABBREVIATIONS
    is_initial = _INITIAL.fullmatch(word) is not None
    if is_known:
        return not is_initial and has_capital and name in _BEGINNINGS
    if not is_initial and not _NUMBER.fullmatch(body):
        return True
    if following in {";", ":", ",", ".", "!", "?"} or following[0].islower():
        return False
    if is_initial:
        return not has_capital or (name != "i" and name in _BEGINNINGS | _INNER)
    return name not in _AFTER_NUMBERS


_SPLITS: Final = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"[\xab\u201c\u2018\u201e]|`+", r" \g<0> "),
        (r"(?:^|(?<=[ (\[{<]))\"|(?<=[ (\[{<])''", " `` "),
        (r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
        # A sentence's last full stop; others stay with their word, as in "Dr.".
        (r"(?<=[^.])\.(?=[\])}>\"'\xbb\u201d\u2019 ]*+\s*$)", " . "),
        (r"[:,](?!\d)|\.{2,}|[;@#$%&?!\u2012-\u2015]", r" \g<0> "),
        (r"(?<=[^'])' ", " ' "),
        (r"[*\[\](){}<>\xbb\u201d\u2019\"]|--|''", r" \g<0> "),
        (r"\s+|$|^", " "),
        (r"(?<=[^' ])'[sSmMdD]? ", r" \g<0>"),
        (r"(?<=[^' ])(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", r" \g<0>"),
        (
            r"(?i)\b(can(?=not\b)|d(?='ye\b)|(?:gim|lem)(?=me\b)|gon(?=na\b)|got(?=ta\b)"
            r"|more(?='n\b)|wan(?=na\s))(not|'ye|me|na|ta|'n)",
            r" \1 \2 ",
        ),
        (r"(?i) ('t)(is|was)\b", r" \1 \2 "),
    )
)


def words(text: str) -> list[str]:
    """Return a text's words and marks; contractions are two words, hyphenated words are one."""
    found = []
    for sentence in sentences(text):
        for pattern, into in _SPLITS:
            sentence = pattern.sub(into, sentence)
        found += sentence.split()
    return found


def count_words(text: str) -> int:
    """Return the number of runs of letters, their marks, digits and underscores."""
    return sum(is_word for is_word, _ in groupby(text, _is_of_word))


def _is_of_word(character: str) -> bool:
    # Python's own \w ends a word at a vowel sign of Hindi.
    kind = category(character)
    return kind[0] in "LM" or kind in {"Nd", "Nl", "Pc"} or character in "\u200c\u200d"
