"""The hidden words, their properties, and the patterns that match a question to a property."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_PROPERTIES = ("alive", "animal", "plant", "food", "large", "metal", "water", "fly", "home", "tool")

_TABLE = """
apple      alive=no  animal=no  plant=yes food=yes large=no  metal=no  water=no  fly=no  home=yes tool=no
banana     alive=no  animal=no  plant=yes food=yes large=no  metal=no  water=no  fly=no  home=yes tool=no
bread      alive=no  animal=no  plant=no  food=yes large=no  metal=no  water=no  fly=no  home=yes tool=no
cat        alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=no  fly=no  home=yes tool=no
chair      alive=no  animal=no  plant=no  food=no  large=no  metal=no  water=no  fly=no  home=yes tool=no
cup        alive=no  animal=no  plant=no  food=no  large=no  metal=no  water=no  fly=no  home=yes tool=yes
dog        alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=no  fly=no  home=yes tool=no
eagle      alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=no  fly=yes home=no  tool=no
elephant   alive=yes animal=yes plant=no  food=no  large=yes metal=no  water=no  fly=no  home=no  tool=no
hammer     alive=no  animal=no  plant=no  food=no  large=no  metal=yes water=no  fly=no  home=yes tool=yes
key        alive=no  animal=no  plant=no  food=no  large=no  metal=yes water=no  fly=no  home=yes tool=yes
lamp       alive=no  animal=no  plant=no  food=no  large=no  metal=yes water=no  fly=no  home=yes tool=no
oak        alive=yes animal=no  plant=yes food=no  large=yes metal=no  water=no  fly=no  home=no  tool=no
plane      alive=no  animal=no  plant=no  food=no  large=yes metal=yes water=no  fly=yes home=no  tool=no
rose       alive=yes animal=no  plant=yes food=no  large=no  metal=no  water=no  fly=no  home=no  tool=no
salmon     alive=yes animal=yes plant=no  food=yes large=no  metal=no  water=yes fly=no  home=no  tool=no
saw        alive=no  animal=no  plant=no  food=no  large=no  metal=yes water=no  fly=no  home=yes tool=yes
ship       alive=no  animal=no  plant=no  food=no  large=yes metal=yes water=yes fly=no  home=no  tool=no
sparrow    alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=no  fly=yes home=no  tool=no
whale      alive=yes animal=yes plant=no  food=no  large=yes metal=no  water=yes fly=no  home=no  tool=no
anchor     alive=no  animal=no  plant=no  food=no  large=yes metal=yes water=yes fly=no  home=no  tool=no
beehive    alive=no  animal=no  plant=no  food=no  large=no  metal=no  water=no  fly=no  home=no  tool=no
compass    alive=no  animal=no  plant=no  food=no  large=no  metal=yes water=no  fly=no  home=no  tool=yes
jellyfish  alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=yes fly=no  home=no  tool=no
lighthouse alive=no  animal=no  plant=no  food=no  large=yes metal=no  water=no  fly=no  home=no  tool=no
moth       alive=yes animal=yes plant=no  food=no  large=no  metal=no  water=no  fly=yes home=no  tool=no
seaweed    alive=yes animal=no  plant=yes food=yes large=no  metal=no  water=yes fly=no  home=no  tool=no
sundial    alive=no  animal=no  plant=no  food=no  large=no  metal=no  water=no  fly=no  home=no  tool=yes
"""  # noqa: E501 - a table reads as one

FACTS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        word: {name: value == "yes" for name, value in (cell.split("=") for cell in cells)}
        for word, *cells in (line.split() for line in _TABLE.strip().splitlines())
    }
)

_HARD = ("anchor", "beehive", "compass", "jellyfish", "lighthouse", "moth", "seaweed", "sundial")
_BASIC = tuple(word for word in FACTS if word not in _HARD)

WORDS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("basic", "train"): tuple(w for i, w in enumerate(_BASIC) if i % 5),
        ("basic", "heldout"): _BASIC[::5],
        ("hard", "train"): _HARD[::2],
        ("hard", "heldout"): _HARD[1::2],
    }
)

_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "alive": r"alive|living|live thing",
        "animal": r"animal|creature",
        "plant": r"plant|tree|flower|fruit|grow",
        "food": r"food|eat|edible",
        "large": r"large|big|huge|bigger",
        "metal": r"metal|iron|steel",
        "water": r"water|sea|ocean|swim",
        "fly": r"\bfly|flies|flying|wings",
        "home": r"home|house|indoors|kitchen",
        "tool": r"tool|used to|useful for",
    }
)


def answer_from_table(word: str, question: str) -> str:
    """Return Yes or No if the question names exactly one property, else I don't know."""
    facts = FACTS.get(word.lower())
    properties = [
        name
        for name in _PROPERTIES
        if re.search(_PATTERNS[name], question, re.IGNORECASE) is not None
    ]
    if facts is None or len(properties) != 1:
        return "I don't know"
    return "Yes" if facts[properties[0]] else "No"
