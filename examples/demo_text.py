"""Synthetic English-like text for the demo model: a word list by meaning and a small seeded grammar.

Everything here is made up by this file, so the text and the model trained on it can be shipped freely.
The text has the two things that attention heads feed on:

* *Knowledge of words.* Verbs prefer certain objects, adjectives certain nouns, capitals belong to
  countries, and every story keeps to one topic.
* *Knowledge of this page.* People, trades and places are drawn for every story and then used
  again, and lists are recited twice: only looking back in the page predicts them.

>>> TextMaker(seed=0).story()[:3]  # doctest: +SKIP
['Once', 'upon', 'a']
"""

from __future__ import annotations

import random
import string
from pathlib import Path


def read_words(path: Path) -> tuple[dict[str, list[str]], list[tuple[str, ...]]]:
    """Groups of words by name, and the (country, capital, language) rows, from the word list."""
    groups: dict[str, list[str]] = {}
    nations: list[tuple[str, ...]] = []
    group = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, words = line.partition(":")
        if not colon:  # continues the previous line
            groups[group] += line.split()
        elif name == "nation":
            nations.append(tuple(words.split()))
        else:
            group, groups[name] = name, words.split()
    return groups, nations


WORDS, NATIONS = read_words(Path(__file__).with_name("demo_words.txt"))
FUNCTION_WORDS = WORDS.pop("function")

# topic: places, things, verbs and adjectives of its stories
TOPICS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "cooking": (["rooms"], ["dishes", "vegetables", "fruit", "drinks"], ["cooking", "giving"], ["tastes", "looks"]),
    "farm": (["country"], ["animals", "vegetables", "fruit"], ["growing", "caring"], ["looks", "colours"]),
    "sea": (["sea"], ["sea", "vehicles", "animals"], ["moving", "seeing"], ["looks", "colours"]),
    "space": (["sky"], ["sky", "vehicles"], ["seeing", "reading"], ["looks", "colours"]),
    "garden": (["country"], ["plants", "weather", "tools"], ["growing", "seeing"], ["looks", "colours"]),
    "workshop": (["town"], ["tools", "materials", "furniture"], ["making", "giving"], ["looks"]),
    "school": (["town"], ["learning"], ["reading", "seeing"], ["looks", "feelings"]),
    "music": (["town"], ["music"], ["playing", "reading"], ["looks", "feelings"]),
    "sport": (["town"], ["sports", "clothes"], ["playing", "giving"], ["looks", "colours"]),
    "hospital": (["town"], ["health", "body"], ["caring", "seeing"], ["looks", "feelings"]),
    "market": (["town"], ["money", "fruit", "clothes", "dishes"], ["giving", "seeing"], ["looks", "colours"]),
    "home": (["rooms"], ["furniture", "clothes", "kitchen"], ["making", "giving"], ["looks", "colours"]),
    "wood": (["country"], ["animals", "plants", "weather"], ["seeing", "moving"], ["looks", "colours"]),
}

# A slot is {name}; a, b, c are people of the story, the rest is drawn by `TextMaker.fill`.
OPENINGS = [
    "Once upon a time there was a {trade_a} called {a} who lived in {city} .",
    "{a} was the {trade_a} of {city} , and {b} was the {trade_b} .",
    "In {month} {a} the {trade_a} came to {city} with a {animal} .",
    "This is the story of {a} and {b} from {country} .",
    "{a} , a {trade_a} from {country} , had a {look} {animal} called {c} .",
]
SENTENCES = [
    "{a} {verb} the {adj} {thing} in the {place} .",
    "The {trade_a} {verb} a {adj} {thing} and {verb} the {thing} .",
    "{b} {verb} {number} {thing} s near the {place} .",
    "Then {a} and {b} {move} to the {place} .",
    "On {day} {he_a} {verb} the {thing} of {his_a} {kin} .",
    "The {animal} was {feeling} , but {a} was {feeling} .",
    '" Where is the {thing} ? " {say} {b} . " In the {place} , " {say} {a} .',
    "The {thing} was {colour} and the {thing} was {look} .",
    "{b} , the {trade_b} , {verb} it {adverb} .",
    "There was {weather} over the {place} in {month} .",
    "{he_b} had a {colour} {garment} and a {colour} {garment} .",
    "{a} gave the {thing} to {b} , and {b} gave {a} a {thing} .",
    "Every {day} the {animal} {verb} the {thing} with {his_b} {body} .",
    "In {country} they speak {language} , and the capital is {city_of} .",
    "{c} {say} that the {trade_b} {verb} the {thing} .",
    "The {trade_a} and the {trade_b} were {feeling} because of the {weather} .",
]
ENDINGS = [
    "So {a} the {trade_a} of {city} was {feeling} again .",
    "And {b} never {verb} a {thing} again .",
    "{a} and {b} {move} home with the {animal} .",
]
SPECIAL = ["<|endoftext|>", "<unk>"]
END = SPECIAL[0]
# punctuation follows a word without a space; letters spell the words that are not in the list
SPELLING = list(string.ascii_letters + string.digits + ".,:;?!\"'-()")
JOINED = frozenset(SPELLING) - {"a", "I"}


def word_list() -> list[str]:
    """Every whole word of the text, once, in a fixed order."""
    words = [w for group in WORDS.values() for w in group]
    words += [w for row in NATIONS for w in row] + FUNCTION_WORDS
    return [w for w in dict.fromkeys(words) if w not in JOINED]


class TextMaker:
    """Stories, lists and facts as lists of words; the same seed gives the same text.

    The preferences between words (which object a verb likes) are part of the language: they come
    from a seed of their own, so training and held-out text speak the same language.
    """

    def __init__(self, seed: int, language_seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.language_seed = language_seed
        self._likes: dict[tuple[str, str], list[str]] = {}

    def prefer(self, previous: str, group: str) -> str:
        """A word of a group, usually one of the five that the previous word likes."""
        key = (previous, group)
        if key not in self._likes:
            taste = random.Random(f"{self.language_seed} {previous} {group}")
            self._likes[key] = taste.sample(WORDS[group], min(5, len(WORDS[group])))
        if self.rng.random() < 0.8:
            return self.rng.choice(self._likes[key])
        return self.rng.choice(WORDS[group])

    def cast(self) -> dict[str, str]:
        """People, trades, animal and home of one story, drawn independently of each other."""
        rng = self.rng
        facts: dict[str, str] = {}
        for who in "abc":
            group = rng.choice(["women", "men"])
            facts[who] = rng.choice(WORDS[group])
            facts["he_" + who] = "she" if group == "women" else "he"
            facts["his_" + who] = "her" if group == "women" else "his"
            facts["trade_" + who] = rng.choice(WORDS["trades"])
        facts["animal"] = rng.choice(WORDS["animals"])
        facts["city"] = rng.choice(NATIONS)[1]
        return facts

    def fill(self, template: str, facts: dict[str, str], topic: str) -> list[str]:
        """One sentence: slots of the story from its facts, the others by the taste of the word before."""
        places, things, verbs, adjectives = TOPICS[topic]
        groups = {
            "verb": verbs, "thing": things, "adj": adjectives, "place": places, "move": ["moving"],
            "say": ["speaking"], "day": ["days"], "month": ["months"], "number": ["numbers"],
            "feeling": ["feelings"], "look": ["looks"], "colour": ["colours"], "weather": ["weather"],
            "garment": ["clothes"], "adverb": ["adverbs"], "body": ["body"], "kin": ["family"],
        }  # fmt: skip
        nation = self.rng.choice(NATIONS)
        local = dict(facts, country=nation[0], city_of=nation[1], language=nation[2])
        words: list[str] = []
        taste = topic  # the last word with a meaning: function words have no taste
        for part in template.split():
            if not part.startswith("{"):
                words.append(part)
                continue
            slot = part[1:-1]
            if slot in groups:
                taste = self.prefer(taste, self.rng.choice(groups[slot]))
                words.append(taste)
            else:
                words.append(local[slot])
        if words[0] in ("he", "she"):
            words[0] = words[0].capitalize()
        return words

    def story(self) -> list[str]:
        """An opening, three to eight sentences about one topic, an ending."""
        facts, topic, rng = self.cast(), self.rng.choice(list(TOPICS)), self.rng
        templates = [rng.choice(OPENINGS), *rng.choices(SENTENCES, k=rng.randint(3, 8)), rng.choice(ENDINGS)]
        return [word for template in templates for word in self.fill(template, facts, topic)]

    def recital(self) -> list[str]:
        """A list of things of one or two kinds, repeated twice."""
        rng = self.rng
        pool = [w for group in rng.sample(list(WORDS), 2) for w in WORDS[group]]
        items = rng.sample(pool, min(len(pool), rng.randint(4, 16)))
        listed = [w for item in items for w in (item, ",")][:-1]
        return ["Here", "is", "the", "list", ":", *listed, ".", "Say", "it", "again", ":", *listed, "."]

    def facts(self) -> list[str]:
        """Countries, capitals and languages: knowledge that is true on every page."""
        words: list[str] = []
        for country, capital, language in self.rng.sample(NATIONS, self.rng.randint(2, 4)):
            words += f"{capital} is the capital of {country} , and they speak {language} .".split()
        return words

    def document(self) -> list[str]:
        kind = self.rng.random()
        words = self.story() if kind < 0.8 else self.recital() if kind < 0.9 else self.facts()
        return [*words, END]


def pieces(words: list[str]) -> list[str]:
    """Words as the tokenizer's pieces: ``▁`` stands for the space before a word, punctuation has none."""
    return [w if w in JOINED or w in SPECIAL else "▁" + w for w in words]


def write(words: list[str]) -> str:
    """Words as plain text, the way the tokenizer reads it back."""
    return "".join(pieces(words)).replace("▁", " ").strip()
