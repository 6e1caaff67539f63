"""Prompts for the comparison with Transformers: 1 to 1,500 tokens of prose, code, tables, other scripts and chats.

The same prompts on every machine: texts that stand here, lines made by a seeded generator, cut at seeded places.
"""
# ruff: noqa: RUF001 - letters of other scripts are meant

from __future__ import annotations

import random
from collections.abc import Callable

from shared.models import ChatTokenizer

PROSE = [
    """The lock keeper had three clocks and trusted none of them. The one in the kitchen was fast because his
wife liked to be early; the one in the office was slow because nobody had wound it properly since the flood; and
the one on the church across the water struck whatever it pleased. So he went by the barges. The coal boat came
through at what must be seven, the milk at what must be eight, and when the two of them met below the lower
gate, which happened perhaps twice in a winter, he would stand on the wall and laugh, because on such a day it
was no time at all.""",
    """To repair a leaking tap, first close the valve under the sink and open the tap until no more water comes.
Put a cloth over the drain, so that no screw is lost. Take off the cap, loosen the screw beneath it, and pull
the handle straight up. Now the nut can be turned with a wrench. Under it sits the spindle, and at the end of
the spindle a small rubber washer, which is almost always the culprit. Replace it with one of the same size, put
everything together in the opposite order, and open the valve slowly. If it still drips, the seat is worn and
must be ground.""",
    """Dear Mr Okafor, thank you for your letter of the fourteenth. We have looked at the wall that you describe
and agree that it leans. It leaned already in 1911, according to a photograph that my colleague found in the
archive, and by the same amount as far as anybody can tell from a photograph. We would therefore propose to do
nothing, but to do it carefully: two glass plates across the crack, a pencil mark with the date, and a visit
every spring. Should a plate break, please call at once, at any hour. Yours sincerely, Ingrid Halvorsen,
Department of Bridges and Retaining Walls.""",
    """"You said it was a short cut." "It is a short cut. It is shorter than the road." "We have been walking
for two hours." "Shorter," said Amal, "does not mean quicker." They climbed over the last fence and saw the
village beneath them, its roofs still wet, smoke going straight up from one chimney only. A dog began to bark,
thought better of it, and lay down again. "They will all be at the fair," said Ruth. "Then who lit the fire?"
Neither of them had an answer to that, and so they went down more slowly than they had come up.""",
    """In the second experiment the temperature was held at 21 degrees and only the salt was varied. Below two
grams a litre nothing happened that had not been seen before. Between two and five grams the crystals grew in
plates rather than in needles, and their number fell by half. Above five grams no crystals formed within the six
days of observation, although two samples that had been forgotten on the shelf showed a few after three weeks.
We cannot say whether this is a matter of speed or of equilibrium; the third experiment was meant to decide it,
but the power failed on the ninth day.""",
    """Onions first, always: two large ones, cut small, in more butter than seems right, on a low flame for half
an hour until they are the colour of a violin. Then flour, a spoonful, and stir until it smells of biscuits.
Then the broth, hot, a ladle at a time. A glass of white wine if there is one open. Bread from yesterday, cheese
from the mountains, and the hottest oven that you have. It will burn your tongue; it has burned the tongues of
kings.""",
    """The council met on Tuesday to discuss the bridge. Mrs Lindqvist asked why the estimate had doubled since
March. The engineer replied that in March nobody had looked under it. There was some laughter. Mr Adeyemi moved
that the old bridge be closed to lorries at once and to everybody from the first of November; the motion was
carried by nine votes to four. The ferry will run every twenty minutes between six and ten, and after that on
request, by ringing the bell.""",
    """What is a number? Ask a child and it will count something: fingers, stairs, the days until a birthday.
Ask a carpenter and he will measure. Ask a mathematician and you will be told about sets that contain the empty
set, which is an honest answer but not one that has ever helped anybody to buy nails. Perhaps it is better to
ask what numbers are for. They let two people who do not trust each other agree. That is a great deal, and it
may be enough.""",
]

CODE = [
    '''def binary_search(items, wanted):
    """Return the index of `wanted` in the sorted list `items`, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1

class Tank:
    def __init__(self, litres: float) -> None:
        self.litres = litres

    def draw(self, amount: float) -> float:
        if amount > self.litres:
            raise ValueError(f"only {self.litres} litres left, wanted {amount}")
''',
    """#include <stdio.h>

static unsigned gcd(unsigned a, unsigned b) {
    while (b != 0) { unsigned t = a % b; a = b; b = t; }
    return a;
}

int main(void) {
    for (unsigned i = 1; i < 20; i++)
        printf("%2u: %u\\n", i, gcd(i * 12, 90));
    return 0;
}
""",
    """SELECT m.name, COUNT(*) AS sacks, SUM(s.weight_kg) / 1000.0 AS tonnes
FROM sacks AS s JOIN mills AS m ON m.id = s.mill_id
WHERE s.ground_at >= '1894-03-01' AND s.ground_at < '1894-04-01'
GROUP BY m.name HAVING COUNT(*) > 10 ORDER BY tonnes DESC LIMIT 5;

-- the same for every month of the year
CREATE VIEW monthly AS
  SELECT strftime('%Y-%m', ground_at) AS month, mill_id, COUNT(*) AS sacks FROM sacks GROUP BY 1, 2;
""",
    """const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function retry(action, { times = 3, pause = 200 } = {}) {
  for (let i = 1; ; i++) {
    try { return await action(i); }
    catch (error) { if (i === times) throw error; await wait(pause * 2 ** i); }
  }
}
""",
    """fn longest<'a>(words: &[&'a str]) -> Option<&'a str> {
    words.iter().copied().max_by_key(|w| w.chars().count())
}

#[test]
fn picks_the_longest() {
    assert_eq!(longest(&["sluice", "weir", "headrace"]), Some("headrace"));
    assert_eq!(longest(&[]), None);
}
""",
    """<table class="tides">
  <tr><th>Day</th><th>High</th><th>Low</th></tr>
  <tr><td>Mon</td><td>06:12</td><td>12:31</td></tr>
  <tr><td>Tue</td><td>06:58</td><td>13:17</td></tr>
</table>
<style>.tides td { padding: 0 1.5em; text-align: right } .tides tr:nth-child(2n) { background: #eef }</style>
""",
]

SCRIPTS = [
    "Der Fluss führte Hochwasser, und die Mühle stand still. Niemand wusste, wie lange es dauern würde; der Müller am "
    "wenigsten. „Morgen“, sagte er jeden Abend, und jeden Morgen sah er aus dem Fenster und sagte nichts.",
    "Où vont les bateaux quand le canal est gelé ? Ils restent là, côte à côte, et les mariniers jouent aux cartes "
    "jusqu'au dégel. L'été, on les voit passer, lents, chargés de sable, de blé ou de pierres.",
    "El agua que mueve el molino no vuelve. Mi abuela lo decía siempre, y también decía que nunca hay que contar los "
    "sacos antes de la noche. ¿Cuántos quedan? ¡Demasiados para un solo burro!",
    "Река за ночь поднялась на два метра. Утром старик вышел на берег, посмотрел на мост и покачал головой. "
    "Мост стоял, но уже никому не нравился.",
    "Ο μύλος στέκεται στην άκρη του χωριού εδώ και τριακόσια χρόνια. Το νερό φτάνει από το βουνό με ένα στενό κανάλι.",
    "水は低い方へ流れる。水車小屋のおじいさんは、毎朝四時に起きて、水門を少しだけ開ける。春は多く、夏は少なく。"
    "「急ぐことはない」と彼は言う。",
    "春天的时候,河水上涨,磨坊主把闸门打开一掌宽。夏天水少,他就坐在墙上等。村里的人都说,等待也是一种工作。",
    "النهر مرتفع هذا الصباح، والطاحونة لا تعمل. قال الطحان: غدا، إن شاء الله، يعود الماء إلى مكانه.",
    "नदी का पानी आज बहुत ऊँचा है। चक्की बंद है, और लोग पुल के पास खड़े होकर बातें कर रहे हैं।",
    "강물이 밤새 두 자나 불었다. 방앗간 주인은 수문을 닫고 비가 그치기를 기다렸다.",
    "🚣‍♀️ 07:30 – start at the weir 🌊 → 🏞️ 5 km → ☕ break → 🏁 at 11:00! (🌡️ 14 °C, 💨 NW 3) 👍🏽👍🏽",
]

QUESTIONS = [
    "What is the capital of Norway, and what is it known for?",
    "Write a haiku about a water wheel.",
    "I have 12 apples and give away a third of them, then buy five more. How many do I have now? Explain each step.",
    "Translate into French: The bridge is closed until Monday.",
    "Give me a list of seven things to pack for a week in the mountains in October.",
    "Why is the sky blue? Answer as if I were six years old.",
    "Fix this Python code: for i in range(10) print(i * 2",
    "Summarise the story of Cinderella in three sentences.",
    "Schreibe einen kurzen Brief an meinen Vermieter: Die Heizung ist kaputt.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
]

EDGES = [
    1,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
    256,
    257,
    300,
]
"""Around the lengths of blocks, tiles and chunks."""

LONG = [350, 400, 450, 512, 513, 600, 700, 800, 1000, 1200, 1350, 1499, 1500]


def parity_prompts(tokenizer: ChatTokenizer) -> dict[str, list[int]]:
    """109 prompts, name -> token ids. The name tells kind and length. Most are short, for comparing takes long."""
    rng = random.Random(17)
    lengths = EDGES + [rng.randint(10, 120) for _ in range(40)] + [rng.randint(120, 300) for _ in range(18)] + LONG
    kinds = [_prose, _code, _scripts, _records, _mixture]
    found: dict[str, list[int]] = {}
    for number, length in enumerate(lengths):
        kind = kinds[number % len(kinds)]
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(kind(rng), add_special_tokens=False)
        found[f"{number:03} {kind.__name__.strip('_')}, {length} tokens"] = ids[:length]
    for number, question in enumerate(QUESTIONS, len(lengths)):
        ids = tokenizer.render_chat([{"role": "user", "content": question}])
        found[f"{number:03} chat, {len(ids)} tokens"] = ids
    return found


def _prose(rng: random.Random) -> str:
    sentences = rng.choice(PROSE).replace("\n", " ").split(". ")
    return ". ".join(sentences[rng.randrange(3) :]) + "\n\n"


def _code(rng: random.Random) -> str:
    lines = rng.choice(CODE).splitlines(keepends=True)
    return "".join(lines[rng.randrange(3) :]) + "\n"


def _scripts(rng: random.Random) -> str:
    return rng.choice(SCRIPTS) + "\n"


def _records(rng: random.Random) -> str:
    """Log lines, CSV or JSON, with numbers that never repeat."""
    names = ["weir", "sluice", "wheel", "stones", "belt", "granary"]
    at = f"1894-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    styles: list[Callable[[], str]] = [
        lambda: (
            f"{at}T{rng.randrange(24):02}:{rng.randrange(60):02}Z WARN {rng.choice(names)} level={rng.random():.4f}"
        ),
        lambda: f"{at},{rng.choice(names)},{rng.randrange(10**6)},{rng.uniform(-90, 90):.3f}",
        lambda: (
            f'{{"id": {rng.randrange(10**9)}, "part": "{rng.choice(names)}", "ok": {rng.choice(["true", "false"])}}}'
        ),
        lambda: f"| {rng.choice(names):10} | {rng.randrange(10**4):6} | {rng.random():8.5f} |",
    ]
    style = rng.choice(styles)
    return "".join(style() + "\n" for _ in range(rng.randint(2, 8)))


def _mixture(rng: random.Random) -> str:
    return rng.choice([_prose, _code, _scripts, _records])(rng)
