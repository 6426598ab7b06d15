"""Words and sentences of the built-in tasks."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


WOMEN = _words("""
Mary Anna Emma Alice Laura Julia Maria Helen Lucy Jane Grace Hannah Martha Diana Karen Ruth Clara Nina Sara Ella Eva
Lily Rosa Iris Nora Amy Kate Sarah Emily Lisa Linda Susan Rachel Rebecca Jessica Jennifer Michelle Elizabeth Katherine
Amanda Melissa Nicole Margaret Barbara Patricia Nancy Betty Carol Sandra
""")

MEN = _words("""
John Tom James Paul Peter David Michael Robert Mark Daniel Adam Henry George Frank Jack Simon Thomas Oliver Arthur Carl
Eric Luke Max Sam Ben Oscar Walter Victor Fred Nick Kevin Brian Steven Andrew Matthew Anthony Richard Charles William
Joseph Edward Patrick Jason Ryan Justin Scott Alan Bruce Roger
""")

PLACES = _words("""
park school market library station shop garden museum hospital restaurant office house beach farm church hotel
""")

OBJECTS = _words("""
book ball letter coin map drink ring cake gift ticket box pen flower bottle hat picture
""")

# A name is never the first word, so that all names are tokens after a space.
IOI = [
    "Then, {first} and {second} walked to the {place}. {subject} gave a {object} to",
    "When {first} and {second} went to the {place}, {subject} gave a {object} to",
    "After {first} and {second} came home from the {place}, {subject} gave a {object} to",
    "Then {first} and {second} had a long talk at the {place}. Later {subject} sent a {object} to",
    "Once {first} and {second} were at the {place}, {subject} showed a {object} to",
    "Today {first} and {second} worked together in the {place}. Then {subject} brought a {object} to",
    "When {first} and {second} found a {object} near the {place}, {subject} gave it to",
    "Then {first} and {second} were in the {place}, and {subject} offered the {object} to",
]

EVENTS = _words("""
war siege trial reign project voyage drought strike famine dispute alliance campaign expedition construction rebellion
occupation treaty conflict marriage experiment
""")
GREATER_THAN = "The {event} lasted from the year {year} to the year {stem}"
CENTURIES = range(11, 19)

# Lists whose order models know. Days and months begin again after the last.
CYCLES = {
    "days": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months": _words("January February March April May June July August September October November December"),
}
SERIES = {
    "number words": _words("""
        one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
        eighteen nineteen twenty
    """),
    "digits": list("123456789"),
    "numbers": [str(i) for i in range(10, 31)],  # for tokenizers that do not split them
    "letters": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "ordinals": _words("first second third fourth fifth sixth seventh eighth ninth tenth"),
}
SUCCESSOR = ["{items}", "In order: {items}", "The list: {items}", "Say them again: {items}"]

PRONOUNS = {"women": " she", "men": " he"}
GENDERED_PRONOUN = [
    "So {name} is a really great friend, isn't",
    "I think {name} is a very good teacher, isn't",
    "But {name} was at home all day, wasn't",
    "Today {name} is very happy, because",
    "When {name} came home in the evening,",
    "After {name} had read the letter,",
    "Then {name} said that",
    "Every day {name} walked to school, and then",
    "Once {name} was so tired that",
    "Before {name} went to bed,",
]
