"""The words that the pocket model's tasks are made of: each is one token of its tokenizer.

Made-up words besides, of several tokens, so that what is copied need not be known.
"""

import random


def listed(text: str) -> list[str]:
    return text.split()


WORDS = listed("""
ant apple arch arrow axe bag ball band bank barn bath beach bead bean bear bed bee bell belt bike bird boat
bolt bone book boot bowl box brick bush cabin cake camp cap car card cart cave chair cheese cherry chess chest
clay clock cloud coal coat coin comb corn couch cow crab crane crow crown cup desk dice dish dog door dove
drum duck eagle ear egg elk farm fern fig fish flag flute fog fork fox frog gate ghost glass globe glove
goat gold goose grape grass hall ham harp hat hawk hen hill honey hook horn horse house ice ink iron jar jam
jewel judge key king kite knee knife lake lamp leaf lemon lily lime lion lock log maple mask meal melon milk
mint mole moon moose moth mouse nail nest net nut oak oil olive onion orange oven owl paint palm pan panda
paper park peach pear pen piano pig pine pipe plane plum pond pony pot prince rabbit rain ring river road
robe robin rock roof rope rose ruby saddle sail salt sand scarf seal seed shark sheep shell ship shirt shoe
shovel silk skate snail snake snow soap sock sofa soup spoon star stone stove sugar swan table tea tent tiger
toad torch tower train tree trout tulip turtle vase violin wagon wall wasp water wheat wheel whale wind wine
wolf wood wool yarn zebra
""")
VERBS = listed("book cancel check count draw find get list move open pay read send set show stop")
OBJECTS = listed("""account alarm bill chart concert device event flight game hotel invoice lesson letter map meeting
message movie order parcel photo price recipe report room song story task ticket trip weather
""")
FIELDS = listed("""address age amount city code colour country date day height hour label level limit month name
number owner place size speed state street time title unit user week weight year
""")
COUNTS = frozenset(
    listed("age amount code day height hour level limit number size speed week weight year")
)
SYLLABLES = listed("ba do fi ga hu jo ka le mi no pa ru sa ti vo wu ze lor tan vik")


def word(source: random.Random) -> str:
    """One of WORDS, at times a made-up one."""
    return made_up(source) if source.random() < 0.02 else source.choice(WORDS)


def made_up(source: random.Random) -> str:
    return "".join(source.choice(SYLLABLES) for _ in range(source.randint(2, 3)))


def number(source: random.Random, digits: int) -> str:
    """Of one to so many digits, without a zero in front."""
    return str(source.randint(0, 10 ** source.randint(1, digits) - 1))


def distinct(source: random.Random, count: int) -> list[str]:
    """So many different words, made-up ones where WORDS are not enough."""
    found: dict[str, None] = {}
    while len(found) < count:
        often = len(found) < 0.8 * len(WORDS)
        found[word(source) if often else made_up(source)] = None
    return list(found)
