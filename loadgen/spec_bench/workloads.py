"""What is asked: chats, edits of a given text, loops of an agent. Written here, drawn from a seed. Pure.

A script is what one client asks, turn by turn; each turn's prompt holds all turns before it. Scripts of one workload
and seed all differ, so that a proposer that remembers answers never meets a question again; nor do chats and sampled
chats share any.
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

Api = Literal["chat", "completion"]
WorkloadName = Literal["chat", "chat-sampled", "edit", "agent"]

WORKLOADS: Final[tuple[WorkloadName, ...]] = ("chat", "chat-sampled", "edit", "agent")
TEMPERATURE: Final = 0.7
"""Of `chat-sampled`; the others are greedy."""


class Size(msgspec.Struct, frozen=True):
    """How long answers may be, in tokens; `turns` of the agent; `sentences` of a text that is edited."""

    chat_tokens: int = 96
    edit_tokens: int = 192
    agent_tokens: int = 96
    turns: int = 4
    sentences: int = 8


class Script(msgspec.Struct, frozen=True):
    """One client's requests. After each answer but the last comes an observation, and both become part of the prompt.

    `given` is the text that the answer should repeat, where there is one.
    """

    api: Api
    opening: str
    max_tokens: int
    seed: int
    temperature: float = 0.0
    observations: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    given: str = ""

    @property
    def turns(self) -> int:
        return len(self.observations) + 1

    def prompt(self, answers: Sequence[str]) -> str:
        """What is asked after these answers."""
        parts = zip(answers, self.observations[: len(answers)], strict=True)
        return self.opening + "".join(itertools.chain.from_iterable(parts))

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The request but for the model, how it is streamed and whether it speculates."""
        prompt = self.prompt(answers)
        asked = {"prompt": prompt} if self.api == "completion" else {"messages": [{"role": "user", "content": prompt}]}
        stop = {"stop": list(self.stop)} if self.stop else {}
        return {**asked, **stop, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


def script(workload: WorkloadName, size: Size, seed: int, number: int) -> Script:
    """Script `number` of a workload, the same for the same seed. Raises IndexError for chats from MOST_CHATS on."""
    rng = random.Random(f"{workload}:{seed}:{number}")
    return _MAKERS[workload](size, seed, number, rng)


def repeated_share(given: str, answer: str) -> float:
    """How much of the answer's words stand in the given text in the same order, 0 to 1."""
    ours, theirs = given.split(), answer.split()
    if not theirs:
        return 0.0
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(theirs)


# Chats: stories and questions in turn.

_HEROES: Final = (
    "a retired ferry captain", "a shy beekeeper", "a clock that runs backwards", "two sisters with a bakery",
    "a young mapmaker", "an old dog named Biscuit", "a lighthouse keeper", "a robot gardener", "a tired librarian",
    "a boy who collects sounds", "a night train driver", "a painter without colours", "a curious fox",
    "a teacher on her last day", "a postman in the mountains", "a girl who mends umbrellas", "an honest thief",
    "a baker who cannot sleep", "a small green dragon", "a diver who fears the dark",
)  # fmt: skip
_DEEDS: Final = (
    "finds a letter that was never sent", "learns to forgive a friend", "must cross a frozen lake before sunrise",
    "opens a door that should have stayed shut", "hears the same song every evening", "loses the only key",
    "plants a tree that grows overnight", "is given one wish too many", "follows a trail of blue feathers",
    "wakes up a hundred years later", "wins a prize for the wrong thing", "keeps a promise for forty years",
    "meets a stranger with the same name", "builds a bridge out of books", "tries to catch the wind",
)  # fmt: skip
_PLACES: Final = (
    "in a harbour town", "on a quiet island", "in a city without bridges", "at the edge of a desert",
    "in a village under snow", "on a train through the night", "in an empty museum", "by a river that changes its way",
    "in the middle of a long summer", "under an orange moon",
)  # fmt: skip
_QUESTIONS: Final = (
    "Explain to a ten-year-old {}.", "I have to give a short talk about {}. What should I say?",
    "What do most people get wrong about {}?", "Write a few paragraphs for a newspaper about {}.",
    "Tell me step by step {}.", "I never understood {}. Can you explain it with an example?",
)  # fmt: skip
_SUBJECTS: Final = (
    "how bread rises", "why the sky is blue", "how a sailing boat can go against the wind", "how vaccines work",
    "why leaves change their colour", "how a bicycle stays upright", "how rivers shape valleys", "how a piano works",
    "why we dream", "how to plan a vegetable garden", "how bees find their way home", "how glass is made",
    "why the moon has phases", "how to save money as a student", "how a refrigerator cools", "how tides come about",
    "how to prepare for a job interview", "how coffee is grown and roasted", "why old cities have narrow streets",
    "how to train for a first long run", "how a bank lends money", "how paper is recycled", "how birds migrate",
    "how to calm a nervous dog", "why metals rust", "how a camera takes a picture", "how cheese is made",
    "how to learn a language", "how volcanoes erupt", "how a court reaches a verdict", "how compost is made",
    "how a telescope gathers light", "how solar panels work", "why traffic jams form", "how tunnels are dug",
    "how honey is made", "what happened in the ice ages", "how a solar eclipse comes about",
    "how a thermos keeps tea warm", "how a zipper closes", "how glaciers move", "how beavers build a dam",
    "how a smoke detector notices smoke", "how films get their subtitles", "how mushrooms grow",
    "where an echo comes from", "how a lock on a canal works", "how to read a weather map", "why knives get blunt",
    "how a violin makes its sound", "how hot air balloons steer", "how a newspaper is printed",
    "how to repair a puncture", "how wool becomes a jumper", "why popcorn pops", "how an airport handles luggage",
    "how a hedgehog survives the cold months", "how ships are launched", "how to keep bread fresh",
    "how a library orders its shelves", "why some stones float", "how perfume is mixed", "how a relay race is won",
    "how to pitch a tent in the rain", "how streets get their names", "how sugar beets are grown",
    "why deserts are cold at night", "how a sundial shows the time", "how bells are cast", "how to brew ginger beer",
    "how an election is counted", "how moss lives on walls", "how a kite stays in the air", "how barrels are made",
    "why old paintings crack", "how a crane stands upright", "how ferries keep to their timetable",
    "how tea is dried", "how to sharpen a pencil with a knife", "how a snowplough clears a pass",
)  # fmt: skip


MOST_CHATS: Final = len(_QUESTIONS) * len(_SUBJECTS)
"""Of each kind and seed: every other chat is a question, half of which are kept for sampled chats."""


def _chat(size: Size, seed: int, number: int, rng: random.Random) -> Script:
    return Script("chat", _chat_prompt(seed, number, number // 2), size.chat_tokens, rng.getrandbits(31))


def _chat_sampled(size: Size, seed: int, number: int, rng: random.Random) -> Script:
    # From the other end of the lists, since a proposer may remember the answers of the greedy chats.
    prompt = _chat_prompt(seed, number, -1 - number // 2)
    return Script("chat", prompt, size.chat_tokens, rng.getrandbits(31), TEMPERATURE)


def _chat_prompt(seed: int, number: int, place: int) -> str:
    if number >= MOST_CHATS:
        raise IndexError(f"there are {MOST_CHATS} chats of a kind, and no number {number}")
    if number % 2 == 0:
        hero, deed, scene = _draw(f"story:{seed}", place, _HEROES, _DEEDS, _PLACES)
        return f"Write a story about {hero} who {deed} {scene}."
    question, subject = _draw(f"question:{seed}", place, _QUESTIONS, _SUBJECTS)
    return question.format(subject)


def _draw(label: str, place: int, *columns: Sequence[str]) -> tuple[str, ...]:
    """The combination at `place` of a shuffled list of all; from its end for a negative one."""
    count = 1
    for column in columns:
        count *= len(column)
    places = random.Random(label).sample(range(count), count)
    place = places[place]
    found = []
    for column in columns:
        place, index = divmod(place, len(column))
        found.append(column[index])
    return tuple(found)


# Edits: a small model repeats a text well after examples, and badly when it is told to.

_NAMES: Final = (
    "Anna", "Peter", "Clara", "Martin", "Julia", "Simon", "Laura", "Victor", "Helen", "Oscar", "Nina", "Felix",
    "Maria", "Thomas", "Emma", "David", "Sarah", "Robert", "Alice", "George",
)  # fmt: skip
_SLOTS: Final[dict[str, tuple[str, ...]]] = {
    "shop": ("bakery", "book shop", "bicycle workshop", "tea house", "flower shop", "pottery", "print shop"),
    "place": ("old harbour", "railway station", "north gate", "market square", "stone bridge", "town hall"),
    "hour": ("six", "seven", "half past seven", "eight", "a quarter to nine", "nine"),
    "colour": ("green", "dark blue", "yellow", "grey", "red", "white"),
    "thing": ("bench", "ladder", "lamp", "clock", "sign", "door"),
    "weather": ("rains", "snows", "storms", "gets hot", "turns cold", "clears up"),
    "number": ("three", "four", "five", "six", "seven", "eleven", "twelve"),
    "kin": ("brother", "aunt", "neighbour", "cousin", "grandmother", "friend"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    "month": ("January", "March", "April", "June", "August", "October"),
    "trade": ("a carpenter", "a nurse", "a gardener", "a driver", "a teacher", "an engineer"),
}
_SENTENCES: Final = (
    "{who} runs a small {shop} near the {place} and opens it at {hour} every morning.",
    "The walls are {colour}, and a {colour} {thing} stands beside the window.",
    "On {day} the {kin} of {who} comes by with {number} boxes and stays until {hour}.",
    "When it {weather}, {who} carries the {thing} inside and makes tea for the guests.",
    "In {month} there were {number} customers on one morning, more than in the whole week before.",
    "One of them was {trade} from the street behind the {place}, who asked for a {colour} {thing}.",
    "{who} had only {number} left, so they agreed to meet again on {day} at {hour}.",
    "Since then the two have talked about the {place}, the weather and the price of a good {thing}.",
    "Last {month} {who} bought a second {thing} for the {shop} and painted it {colour}.",
    "The {kin} of {who} says that the {shop} will still be there in {number} years.",
)
_EXAMPLE_SENTENCES: Final = (
    "Nobody knows why {who} left the village that {month}, not even the {kin} who lived next door.",
    "Some believe that {trade} had offered work across the sea; others speak of a quarrel about a {colour} boat.",
    "A postcard that arrived {number} weeks later said only that all was well.",
)
"""Other sentences than those of the text: where an example and the text agree, a small model goes on with either."""


def _edit(size: Size, seed: int, number: int, rng: random.Random) -> Script:
    kinds: tuple[Callable[[Size, random.Random], tuple[str, str]], ...] = (_corrected, _renamed_code)
    opening, given = kinds[number % len(kinds)](size, rng)
    return Script("completion", opening, size.edit_tokens, rng.getrandbits(31), stop=("\n\n", "\n#"), given=given)


def _text(who: str, sentences: Sequence[str], rng: random.Random) -> str:
    return " ".join(_fill(sentence, who, rng) for sentence in sentences)


def _fill(sentence: str, who: str, rng: random.Random) -> str:
    parts = sentence.split("{")
    filled = parts[0]
    for part in parts[1:]:
        name, _, rest = part.partition("}")
        filled += (who if name == "who" else rng.choice(_SLOTS[name])) + rest
    return filled


def _corrected(size: Size, rng: random.Random) -> tuple[str, str]:
    example = _text(rng.choice(_NAMES), _EXAMPLE_SENTENCES, rng)
    given = _text(rng.choice(_NAMES), _SENTENCES[: size.sentences], rng)
    opening = (
        "Spelling mistakes are corrected; nothing else is changed.\n\n"
        f"Text: {_misspelled(example, 1, rng)}\nCorrected: {example}\n\n"
        f"Text: {_misspelled(given, 3, rng)}\nCorrected:"
    )
    return opening, given


def _misspelled(text: str, mistakes: int, rng: random.Random) -> str:
    """With letters swapped in some words."""
    words = text.split()
    for index in rng.sample([n for n, word in enumerate(words) if word.isalpha() and len(word) > 4], mistakes):
        word = words[index]
        words[index] = word[:2] + word[3] + word[2] + word[4:]
    return " ".join(words)


_NOUNS: Final = ("order", "ticket", "invoice", "parcel", "account", "message", "device", "report", "session", "sensor")
_FIELDS: Final = ("total", "count", "limit", "weight", "status", "owner", "price", "delay", "level", "score")


def _renamed_code(size: Size, rng: random.Random) -> tuple[str, str]:
    noun, example_noun = rng.sample(_NOUNS, 2)
    fields = rng.sample(_FIELDS, max(1, size.sentences * 2 // 3))
    example, given = _code(example_noun, fields[:1]), _code(noun, fields)
    opening = (
        "# The variable `item` gets a better name; nothing else is changed.\n\n"
        f"# Before:\n{example}\n# After, `item` is now `{example_noun}`:\n{example.replace('item', example_noun)}\n\n"
        f"# Before:\n{given}\n# After, `item` is now `{noun}`:\n"
        # Begun for it: else the model goes on with the old name.
        f"def check_{noun}({noun}):\n"
    )
    return opening, given


def _code(noun: str, fields: Sequence[str]) -> str:
    lines = [f"def check_{noun}(item):"]
    for field in fields:
        lines.append(f"    if item.{field} is None or item.{field} < 0:")
        lines.append(f'        raise ValueError("{noun} without {field}")')
    lines.append(f"    return item.{' + item.'.join(fields)}")
    return "\n".join(lines)


# The agent: a ticket, tools, and a log that the model goes on writing in the form of what stands there.

_SERVICES: Final = ("checkout", "billing", "search", "catalog", "login", "mailer", "reports", "gateway", "stock")
_PATHS: Final = ("/cart", "/pay", "/query", "/items", "/session", "/send", "/daily", "/status", "/reserve")
_SYMPTOMS: Final = (
    "answers slowly", "returns errors for some users", "uses more memory every hour", "drops every tenth request",
    "has been silent since its last start", "reports a full disk",
)  # fmt: skip
_TOOLS: Final = ("status", "read_log", "metrics", "restart", "configuration", "ask_owner")
_LEVELS: Final = ("info", "info", "info", "warning", "error")
_EVENTS: Final = (
    "request served", "request refused", "connection closed", "worker restarted", "cache refilled",
    "database asked again",
)  # fmt: skip


def _agent(size: Size, seed: int, number: int, rng: random.Random) -> Script:
    case = _Case(
        ticket=rng.randrange(1000, 9999),
        service=rng.choice(_SERVICES),
        path=rng.choice(_PATHS),
        symptom=rng.choice(_SYMPTOMS),
        owner=rng.choice(_NAMES),
    )
    tools = [rng.choice(_TOOLS) for _ in range(size.turns + 2)]
    printed = [case.printed(rng) for _ in tools]
    opening = (
        "An agent works on tickets. In each step it writes one line of JSON: a tool, what it saw last, and what it "
        "knows. Then comes what the tool printed.\n\n"
        f"Ticket {case.ticket}, owner {case.owner}: {case.service} {case.symptom}.\n\n"
        f"{case.begun(1, tools[0])}{case.rest('nothing yet')}\n{printed[0]}"
        f"{case.begun(2, tools[1])}{case.rest(printed[0].splitlines()[-1])}\n{printed[1]}"
        f"{case.begun(3, tools[2])}"
    )
    observations = tuple(
        f"\n{printed[step - 2]}{case.begun(step, tools[step - 1])}" for step in range(4, size.turns + 3)
    )
    return Script(
        "completion",
        opening,
        size.agent_tokens,
        rng.getrandbits(31),
        observations=observations,
        stop=("\n",),
        given=opening,
    )


class _Case(msgspec.Struct, frozen=True):
    """A ticket, and what is printed about it."""

    ticket: int
    service: str
    path: str
    symptom: str
    owner: str

    def begun(self, step: int, tool: str) -> str:
        """The agent's framework says which tool is next: else a small model does the last step again."""
        return f'agent: {{"step": {step}, "tool": "{tool}", "seen": "'

    def rest(self, seen: str) -> str:
        return (
            f'{seen}", "known": {{"ticket": {self.ticket}, "owner": "{self.owner}", "state": "open", '
            f'"service": "{self.service}", "problem": "{self.symptom}", "path": "{self.path}"}}}}'
        )

    def printed(self, rng: random.Random) -> str:
        return "".join(
            f"{self.service}-{rng.randrange(3)} {rng.choice(_LEVELS)} {rng.choice(_EVENTS)} for {self.path} "
            f"after {rng.randrange(10, 99)} ms\n"
            for _ in range(4)
        )


_MAKERS: Final[dict[WorkloadName, Callable[[Size, int, int, random.Random], Script]]] = {
    "chat": _chat,
    "chat-sampled": _chat_sampled,
    "edit": _edit,
    "agent": _agent,
}
