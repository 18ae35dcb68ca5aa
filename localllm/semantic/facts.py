"""What two questions must have in common to have the same answer, however near their vectors are.

Embedding models hardly tell apart texts that differ in a number, a unit, a date, a negation, a name or a direction. So
these are compared as words, and any difference means another question: a false difference only costs an answer from the
cache. The lists know English, German and French, and numbers and negations of more languages. Words that are not in
Latin letters must all be equal.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

# A number, the first part of words such as l'eau, a word, or a sign.
_WORD = re.compile(
    r"[+±\u2212-]?\d[\d.,:/]*\d|[+±\u2212-]?\d|(?:[CDJLMNSTcdjlmnst]|[Qq]u|[Jj]usqu)'(?=[^\W\d_])|"
    r"[^\W\d_]+(?:'[^\W\d_]+)*|[%$€£¥°<>=≠≤≥+#*^&|~@]"
)
_QUOTED = re.compile(r"`[^`]+`|\"[^\"]+\"|“[^”]+”|«[^»]+»|„[^“]+“")

# A word that several languages have is listed once.
_NUMBERS = frozenset(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands "
    "million millions billion billions trillion trillions first second third fourth fifth sixth seventh eighth ninth "
    "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth "
    "thirtieth hundredth thousandth once twice thrice half halves quarter quarters thirds dozen dozens both single "
    "double triple pair couple null eins einmal zweimal dreimal halb halbe halben viertel drittel dutzend beide deux "
    "trois quatre cinq sept huit neuf dix onze douze treize quatorze quinze seize vingt vingts trente quarante "
    "cinquante soixante cent cents mille milliard premier première deuxième troisième quatrième cinquième dixième demi "
    "demie moitié tiers quart douzaine dos tres cuatro cinco seis siete ocho nueve diez doce veinte treinta cuarenta "
    "cincuenta sesenta setenta ochenta noventa cien ciento mil primero primera segundo segunda tercero medio media due "
    "tre quattro cinque sei sette otto nove dieci venti trenta quaranta cinquanta cento primo prima secondo seconda "
    "dois duas três quatro sete oito dez vinte trinta primeiro twee drie vier vijf zes zeven acht negen tien twintig "
    "honderd duizend".casefold().split()
)
# German writes a number as one word: einundzwanzig, dritte.
_GERMAN_NUMBER = re.compile(
    r"(?!(?:und|ein(?:e[nrms]?)?)$)(?:ein|zwei|zwo|drei|dreissig|vier|fünf|sechs|sech|sieben|sieb|acht|neun|zehn|elf|"
    r"zwölf|zwan|zig|und|hundert|tausend|million(?:en)?|milliarden?|erst|dritt|siebt)+(?:s?te[nrms]?|e[nrms]?)?"
)
_UNITS = frozenset(
    "mm cm km mi ft kg mg lb lbs oz ml cl dl kb mb gb tb kib mib gib hz khz mhz ghz kw kwh mw mv kj kcal cal ms min hr "
    "hrs am pm bc ad bce ce usd eur gbp chf jpy millimeter centimeter meter kilometer millimetre centimetre metre "
    "kilometre inch inches foot feet yard mile acre hectare gram milligram kilogram kilo tonne ton ounce pound stone "
    "liter litre milliliter millilitre gallon pint cup tablespoon teaspoon degree celsius fahrenheit kelvin watt volt "
    "ampere joule calorie bit byte kilobyte megabyte gigabyte terabyte percent dollar euro cent yen franc rupee yuan "
    "ruble peso millisecond second minute hour day night week weekend fortnight month year decade century daily weekly "
    "monthly yearly annual annually hourly monday tuesday wednesday thursday friday saturday sunday january february "
    "march april may june july august september october november december spring summer autumn winter morning noon "
    "afternoon evening midnight today tomorrow yesterday tonight now ago gramm kilogramm pfund zoll grad prozent "
    "sekunde stunde tag woche monat jahr jahrzehnt jahrhundert sekunden minuten stunden tage tagen wochen monate "
    "monaten jahre jahren täglich wöchentlich monatlich jährlich montag dienstag mittwoch donnerstag freitag samstag "
    "sonnabend sonntag januar februar märz mai juni juli oktober dezember heute gestern morgen übermorgen vorgestern "
    "morgens mittags abends nachts jetzt gramme kilogramme livre mètre kilomètre pouce pied degré seconde heure jour "
    "semaine mois ans année siècle lundi mardi mercredi jeudi vendredi samedi dimanche janvier février mars avril juin "
    "juillet août septembre octobre novembre décembre aujourd'hui hier demain matin midi soir nuit printemps été "
    "automne hiver maintenant lunes martes miércoles jueves viernes sábado domingo enero febrero marzo abril mayo "
    "junio julio agosto septiembre octubre noviembre diciembre hoy ayer mañana".casefold().split()
)
_NOT = frozenset(
    "not cannot dont doesnt didnt isnt arent wasnt werent cant couldnt wont wouldnt shouldnt hasnt havent hadnt mustnt "
    "neednt aint nicht pas не".casefold().split()
)
_NEGATIONS = frozenset(
    "no never none nobody nothing nowhere neither nor without except excepting excluding excluded exclude excludes "
    "unless hardly barely scarcely rarely seldom lack lacks lacking fail fails failed avoid avoids avoiding stop stops "
    "stopped refuse refuses instead rather minus free but kein keine keinen keiner keinem keines nie niemals niemand "
    "niemanden nichts nirgends nirgendwo keinesfalls keineswegs ohne außer ausgenommen ausgeschlossen weder noch statt "
    "anstatt kaum selten sondern ne non jamais sans aucun aucune rien personne nul nulle ni sauf excepté hormis guère "
    "plutôt sinon nunca jamás sin nada nadie ningún ninguna ninguno tampoco salvo excepto mai senza niente nessuno "
    "nessun nessuna né tranne eccetto não nem sem ninguém nenhum nenhuma exceto niet geen nooit zonder behalve bez "
    "inte ingen aldrig utan ikke uden uten ei eivät nincs není nu fără tidak bukan tanpa jangan değil yok không "
    "chưa".casefold().split()
)
_OPPOSITES = frozenset(
    "before after more less fewer most least many much few over under above below up down left right in inside out "
    "outside on off into from to toward by with within through between until till since during increase decrease rise "
    "fall raise lower higher highest lowest maximum minimum max min maximal minimal largest smallest larger smaller "
    "bigger longer shorter longest shortest taller tallest faster slower fastest slowest older newer oldest newest "
    "younger youngest earlier later earliest latest early late first last next previous current past future begin end "
    "start enable disable allow deny forbid permit ban open close shut lock add remove insert delete buy buyer sell "
    "seller sender receiver lender borrower employer employee lend borrow give take send receive win lose push pull "
    "load save encode decode hot cold warm cool hotter colder heavy light heavier lighter north south east west "
    "northern southern eastern western always never all any some every each only best worst better worse good bad true "
    "false yes old new young big small large little high low deep shallow long short tall wide narrow fast slow far "
    "near often easy hard difficult simple cheap cheaper expensive rich poor strong weak safe dangerous legal even odd "
    "positive negative plus multiply divide subtract sum difference product quotient gain loss profit pass alive dead "
    "born died birth death male female man woman men women boy girl husband wife mother father son daughter brother "
    "sister king queen he she his her my your our their was were will would did had must may might same different "
    "similar full empty public private wet dry if whether who whom what when where why how which whose english french "
    "german spanish italian portuguese dutch russian chinese japanese korean arabic hindi turkish polish vor nach mehr "
    "weniger meiste meisten wenigste wenigsten viele wenige über unter auf ab hoch runter rechts links aus von zu bis "
    "seit mit bei oben unten drinnen draußen größer kleiner größte größten kleinste kleinsten höher niedriger höchste "
    "höchsten niedrigste niedrigsten länger kürzer längste kürzeste schneller langsamer älter jünger älteste jüngste "
    "neu alt neue alte früher später früh spät groß klein große kleine lang kurz schnell langsam gut schlecht besser "
    "schlechter beste schlechteste heiß kalt kühl immer alle jede jeder jedes einige manche nur letzte letzten nächste "
    "nächsten vorige vorigen erlaubt verboten öffnen schließen kaufen verkaufen richtig falsch leicht schwer billig "
    "teuer reich arm stark schwach sicher gefährlich war waren wird wurde werden muss darf soll mein meine dein deine "
    "sein seine ihr ihre unser unsere wer wen wem wann wo wohin woher warum wie welche welcher welches wessen ob avant "
    "après moins beaucoup peu sur sous dessus dessous haut bas gauche droite dans hors entre vers de depuis jusqu "
    "jusque avec pendant supérieur inférieur grand grande petit petite longue court courte rapide lent vieux vieille "
    "jeune nouveau nouvelle ancien ancienne bon bonne mauvais mauvaise meilleur meilleure pire chaud froid toujours "
    "tout tous toute toutes quelques chaque seulement seul dernier dernière prochain prochaine précédent permis "
    "interdit autorisé ouvrir fermer acheter vendre vrai faux facile difficile cher riche pauvre fort faible augmenter "
    "diminuer monter descendre était étaient sera seront mon ma mes ton ta tes sa ses notre votre leur qui que quoi "
    "quand où pourquoi comment combien quel quelle quels quelles si antes después más menos con desde hasta siempre "
    "todo todos solo quién qué cuándo dónde cómo cuál cuánto prima dopo più meno sempre chi cosa quando dove perché "
    "come quale".casefold().split()
)
# Of a word's beginning, where the rest is the same: possible and impossible, include and exclude, an- and ausschalten.
_PREFIXES = frozenset(
    "a ab an anti auf aus be bi counter de dé des dés di dis down e ein em en ent ex ext exo endo hyper hypo il im in "
    "inter intra ir macro mal micro mis mono multi nach ne nie no non out over para per poly post pre pro re sub super "
    "sur trans un under uni unter über up ver vor zu zer не без".casefold().split()
)
_NEGATING_ENDS = ("less", "frei", "freie", "freien", "freier", "freies", "los", "lose", "losen", "loser", "loses")
_ENDS = ("", "s", "es", "d", "ed", "ing", "n", "en")
_PASSING = frozenset(
    "a an the i you we it me do does can could should have has please tell explain describe show list write find is "
    "are be am of and or for there here that this so just hello hi hey thanks thank der die das dem den des ein eine "
    "einen einem einer bitte ich du sie wir ist sind kann können gibt es zeige erkläre nenne schreibe und oder für le "
    "la les l' d' qu' un une au aux et ou est sont je tu il elle on nous vous ce peux peut explique donne "
    "pour".casefold().split()
)


def same_facts(one: str, other: str) -> bool:
    """Whether numbers, units, negations, quotations, names, directions and the order of words allow one answer."""
    first, second = (unicodedata.normalize("NFKC", text).replace("\u2019", "'") for text in (one, other))
    if _QUOTED.findall(first) != _QUOTED.findall(second):
        return False
    words, others = ([word.removesuffix("'s") for word in _WORD.findall(text)] for text in (first, second))
    plain, plain_others = [word.casefold() for word in words], [word.casefold() for word in others]
    if sorted(plain) == sorted(plain_others):  # only the order may differ: from A to B, from B to A
        return plain == plain_others
    return (
        _in_sequence(plain) == _in_sequence(plain_others)
        and _facts(plain) == _facts(plain_others)
        and {*_names(words)} <= {*plain_others}
        and {*_names(others)} <= {*plain}
        and _in_order(plain, plain_others)
        and not _turned_by_prefix({*plain}, {*plain_others})
    )


def _in_sequence(words: list[str]) -> list[str]:
    """Numbers, with digits of any script as ASCII, signs, single letters, and words not in Latin letters; in order."""
    return [
        "".join(str(unicodedata.digit(one)) if one.isdigit() else one for one in word)
        for word in words
        if _is_number(word)
        or (len(word) == 1 and word not in "aiàyoe")
        or (word[0].isalpha() and not unicodedata.name(word[0], "").startswith("LATIN"))
    ]


def _is_number(word: str) -> bool:
    return any(map(str.isdigit, word)) or word in _NUMBERS or _GERMAN_NUMBER.fullmatch(word) is not None


def _facts(words: Iterable[str]) -> "Counter[str]":
    """How often each negation, unit and direction comes."""
    return Counter(found for word in words if (found := _fact(word)))


def _fact(word: str) -> str | None:
    """The form in which a word is compared; None if it may be missing in the other question."""
    if word in _NOT or word.endswith("n't"):
        return "not"
    if word.endswith(_NEGATING_ENDS) and word not in ("less", "los"):
        return word
    known = (word[: len(word) - len(end)] for end in _ENDS if word.endswith(end))
    return next((one for one in known if one in _NEGATIONS or one in _UNITS or one in _OPPOSITES), None)


def _names(words: list[str]) -> list[str]:
    """Words with capital letters, casefolded; not a first word that often begins questions."""
    found = [(at, word.casefold()) for at, word in enumerate(words) if word not in (word.lower(), "I")]
    return [word for at, word in found if at or not (word in _PASSING or _is_number(word) or _fact(word))]


def _in_order(words: list[str], others: list[str]) -> bool:
    """Whether the words of both come in the same order; articles, pronouns and courtesies are passed over."""
    both = {*words} & {*others} - _PASSING
    return [word for word in words if word in both] == [word for word in others if word in both]


def _turned_by_prefix(words: set[str], others: set[str]) -> bool:
    """Whether a word of one is a word of the other but for a prefix that may turn its meaning round."""
    only, only_others = words - others, others - words
    return not {*_rests(only)}.isdisjoint(_rests(only_others))


def _rests(words: Iterable[str]) -> Iterable[str]:
    """Words without each of the prefixes, and as they are."""
    for word in words:
        yield word
        yield from (word[at:] for at in range(1, min(8, len(word) - 2)) if word[:at] in _PREFIXES)
