"""What two questions must have in common to have the same answer, however near their vectors are.

Embedding models hardly tell apart texts that differ in a number, a negation, a name or a direction. So these are
compared as words, and any difference means another question: a false difference only costs an answer from the cache.
"""

import re
import unicodedata
from collections import Counter

_WORD = re.compile(r"[+±\u2212-]?\d[\d.,:/]*\d|[+±\u2212-]?\d|[^\W\d_]+(?:['\u2019][^\W\d_]+)*|[%$€£°<>=≠≤≥]")
_QUOTED = re.compile(r"`[^`]+`|\"[^\"]+\"|“[^”]+”|«[^»]+»")

_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "first second third fourth fifth sixth seventh eighth ninth tenth once twice thrice half quarter dozen both single "
    "double triple "
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf zwanzig hundert tausend erste zweite dritte "
    "un deux trois quatre cinq sept huit neuf dix onze douze vingt cent mille premier deuxième "
    "dos tres cuatro cinco seis siete ocho nueve diez once doce veinte ciento mil primero segundo "
    "due tre quattro cinque sei sette otto nove dieci"
)
_NUMBERS = frozenset(_COUNTED.split())
_NEGATED = (
    "not no never none nobody nothing nowhere neither nor cannot without except unless hardly barely lack lacks "
    "lacking fail fails avoid stop "
    "nicht kein keine keinen keiner keinem nie niemals ohne außer weder noch "
    "pas ne non jamais sans aucun aucune rien personne ni sauf "
    "nunca jamás sin nada nadie ningún ninguna ninguno tampoco salvo "
    "mai senza niente nessuno nessun né não nem sem nunca niet geen nooit zonder "
    "не нет ни никогда без"
)
_NEGATIONS = frozenset(_NEGATED.split())
_OPPOSED = (
    "before after more less most least fewer over under above below up down left right in out on off into from to "
    "increase decrease rise fall raise lower higher lower highest lowest maximum minimum max min largest smallest "
    "longer shorter longest shortest faster slower fastest slowest older newer oldest newest earlier later earliest "
    "latest first last begin end start stop enable disable allow deny open close add remove insert delete buy sell "
    "import export encrypt decrypt encode decode hot cold warm cool north south east west inside outside with without "
    "always never all any some every each only best worst good bad true false yes no old new big small high low "
    "if whether who what when where why how which whose"
)
_OPPOSITES = frozenset(_OPPOSED.split())
_PREFIXES = ("un", "im", "in", "il", "ir", "dis", "non", "de", "mis", "anti")


def same_facts(one: str, other: str) -> bool:
    """Whether numbers, negations, quotations, names, directions and the order of words allow the same answer."""
    first, second = (unicodedata.normalize("NFKC", text).replace("\u2019", "'") for text in (one, other))
    if _QUOTED.findall(first) != _QUOTED.findall(second):
        return False
    words, others = _WORD.findall(first), _WORD.findall(second)
    plain, plain_others = [word.casefold() for word in words], [word.casefold() for word in others]
    if sorted(plain) == sorted(plain_others):  # only the order may differ: from A to B, from B to A
        return plain == plain_others
    return (
        _numbers(plain) == _numbers(plain_others)
        and _negations(plain) == _negations(plain_others)
        and Counter(filter(_OPPOSITES.__contains__, plain)) == Counter(filter(_OPPOSITES.__contains__, plain_others))
        and _names_agree(words, plain_others)
        and _names_agree(others, plain)
        and _in_order(words, others)
        and not _negated_by_prefix({*plain}, {*plain_others})
    )


def _numbers(words: list[str]) -> list[str]:
    """Numbers, with digits of any script as ASCII, number words, and signs and units that change them; in order."""
    return [_digits(word) for word in words if _is_number(word) or not word[0].isalnum()]


def _is_number(word: str) -> bool:
    return any(character.isdigit() for character in word) or word in _NUMBERS


def _digits(word: str) -> str:
    return "".join(str(unicodedata.digit(one)) if one.isdigit() else one for one in word)


def _negations(words: list[str]) -> int:
    return sum(word in _NEGATIONS or word.endswith("n't") for word in words)


def _names(words: list[str]) -> list[str]:
    """Words with a capital letter after the first, and words with capitals inside; casefolded."""
    found = (word for at, word in enumerate(words) if word != word.lower() and (at or word[1:] != word[1:].lower()))
    return [word.casefold() for word in found if word != "I"]


def _names_agree(words: list[str], others: list[str]) -> bool:
    return {*_names(words)} <= {*others}


def _in_order(words: list[str], others: list[str]) -> bool:
    """Whether the names of both come in the same order."""
    both = {*_names(words)} | {*_names(others)}
    mentioned = ([word.casefold() for word in some if word.casefold() in both] for some in (words, others))
    return next(mentioned) == next(mentioned)


def _negated_by_prefix(words: set[str], others: set[str]) -> bool:
    """Whether a word of one is a word of the other with a prefix such as un-."""
    only, only_others = words - others, others - words
    return any(
        f"{prefix}{word}" in there
        for here, there in ((only, only_others), (only_others, only))
        for word in here
        for prefix in _PREFIXES
    )
