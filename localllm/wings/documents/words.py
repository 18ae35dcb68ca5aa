"""The words of a question that are looked up in an index, and the indexed words that are related to them."""

import re
import unicodedata
from collections.abc import Iterable

MAX_QUERY_WORDS = 64
MAX_VARIANTS = 40
"""Related words that are looked up for one of a question."""
LEAST_COMMON, LEAST_CONTAINED = 4, 5
"""Letters that related words have in common at their beginning, or that one contains of another."""
_COMMON_SHARE = 0.6

# Words that say nothing about a document's subject, and that questions are made of: English, German, French, Spanish,
# Italian, Portuguese, Dutch.
_STOP_WORDS = frozenset(
    """
    a about above after again against all also am an and any are aren as at be because been before being below
    between both but by can cannot could did didn do does doesn doing don done down during each else few find for
    from further get gets give go goes got had happen happens has hasn have having he her here hers him his how i
    if in into is isn it its just know let like make makes many may me mean means might more most much must my
    need needs no nor not now of off on once one only or other our ours out over own per please put same say says
    shall she should show so some such take tell than that the their them then there these they this those through
    to too under until up upon us use used using very want was wasn way we well were what when where which while
    who whom whose why will with within without won work works would yes yet you your yours
    aber alle allem allen aller alles als also am an ander andere anderen anderer auch auf aus bei beim bekomme
    bekommen bin bis bist bitte da dabei dafür damit dann daran darauf darf das dass dein deine dem den denn der
    des dich die dies diese diesem diesen dieser dieses dir doch dort du durch dürfen ein eine einem einen einer
    eines er es etwas euch euer für gegen gibt hab habe haben hat hatte hatten hier hin ich ihm ihn ihnen ihr ihre
    ihrem ihren im immer in ins ist ja je jede jedem jeden jeder jedes kann kannst kein keine keinem keinen keiner
    können könnte machen macht man mein meine meinem meinen meiner mich mir mit muss musst müssen nach nicht noch
    nun nur ob oder ohne passiert sehr sein seine seinem seinen seiner sich sie sind so soll sollen sollte sonst
    um und uns unser unsere unter viel vom von vor wann war waren warum was welche welchem welchen welcher welches
    wem wen wenn wer werden wie wieder wieviel will wir wird wo woher wohin wollen worden wurde wurden zu zum zur
    zwischen über
    a au aux avec c ce ces cet cette combien comment d dans de des du elle elles en est et eux faire fait faut il
    ils j je l la le les leur leurs lui m ma mais me mes moi mon n ne nos notre nous on ont ou où par pas peut
    peux plus pour pourquoi puis qu quand que quel quelle quelles quels qui quoi s sa sans se ses si son sont sur
    t ta te tes toi ton tu un une vos votre vous y à étaient était être
    al algo algún como con cual cuando cuál cuáles cuándo cuánto cuántos cómo de del desde donde dónde el ella
    ellos en entre era eres es esa ese eso esta estar este esto estos está están fue ha hace hacer hay he la las
    lo los me mi mis muy más ni no nos o para pero poco por porque puede puedo que quien quién qué se ser si sin
    sobre son su sus sí tal también te tengo tiene todo todos tu un una uno unos y ya yo
    che chi ci come con cosa da dal dalla dei del della delle di dove e gli ha ho i il io la le lo ma mi nel nella
    non per perché più quale quali quando quanto questo se si sono su suo tra un una è
    ao as com como da das do dos em foi mais na no não o onde os para por quais qual quando quanto quem são um uma
    à é
    aan als bij dan dat de die door een en er het hoe ik in is je kan met mijn naar niet om ook op te uit van voor
    waar wanneer wat welke wie zijn
    """.split()  # noqa: SIM905 - a list would have a line for each word
)

# Chinese, Japanese and Thai have no spaces between words: each character is indexed as a word.
_UNSPACED = re.compile(r"([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def searchable(text: str) -> str:
    """A text in the form in which its words are indexed."""
    return _UNSPACED.sub(r" \1 ", text)


def searchable_name(name: str) -> str:
    """A file's name in the form in which its words are indexed: camelCase is two words."""
    return searchable(_HUMP.sub(" ", name))


def content_words(question: str) -> list[str]:
    """A question's words without those that all questions have; all of them if there are no others."""
    words = list(dict.fromkeys(_words(searchable(question))))
    return ([word for word in words if word.lower() not in _STOP_WORDS] or words)[:MAX_QUERY_WORDS]


def folded(word: str) -> str:
    """A word as the index spells it: lower case, without accents."""
    return "".join(one for one in unicodedata.normalize("NFKD", word.lower()) if not unicodedata.combining(one))


def begin_alike(word: str, term: str) -> bool:
    """Whether two different folded words probably have a stem in common, in whatever language.

    They begin with the same letters, either most of the longer word or all of the shorter one: deploy and deployment,
    configure and configuration, Turnier and Turniertag.
    """
    common = next((at for at, (a, b) in enumerate(zip(word, term, strict=False)) if a != b), min(len(word), len(term)))
    enough = common >= _COMMON_SHARE * max(len(word), len(term)) or common == min(len(word), len(term))
    return word != term and common >= LEAST_COMMON and enough


def query(words: Iterable[str]) -> str:
    """An FTS5 query for any of these words, quoted, so that none is an operator; "" for none."""
    return " OR ".join('"{}"'.format(word.replace('"', "")) for word in words)


def _words(text: str) -> Iterable[str]:
    """Runs of letters, digits and marks, which belong to the letters before them."""
    word = ""
    for character in text:
        if character.isalnum() or (word and unicodedata.category(character)[0] == "M"):
            word += character
        elif word:
            yield word
            word = ""
    if word:
        yield word
