"""Prints prompts as people write them to a chat, one a line: what the shipped draft of the default model learned from.

    python infra/draft/prompts.py > prompts.txt

Drawn from a seed, without repeats. Nothing in it stands in the chats that `make bench-spec` asks; a test looks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

SEED: Final = 1
COUNT: Final = 6000

HEROES: Final = (
    "a young sailor", "an old gardener", "two brothers on a farm", "a girl named Mira", "a cat who can read",
    "a lonely astronaut", "a village doctor", "a clever crow", "a king without a crown", "a taxi driver in Lagos",
    "a shepherd and her dog", "a boy named Tomas", "a detective who cannot lie", "a nurse on the night shift",
    "a talking tree", "a violin maker", "a family of hedgehogs", "an inventor of toys", "a princess who loves maths",
    "a fisherman's daughter", "a lost tourist", "a chess player of ninety", "a mouse in a cathedral",
    "a soldier coming home", "a woman who repairs radios", "three friends at school", "a giant with tiny shoes",
    "a weather reporter", "a chef in a small restaurant", "a pilot of an old plane", "a pair of twins", "a wizard",
    "a student in her first year", "a goldsmith", "a grandfather and his grandson", "a penguin", "a football coach",
    "a truck driver", "a poet who has lost her words", "a scientist at the South Pole", "a bear cub", "a watchmaker",
    "an elephant who wants to dance", "a new girl in class", "a knight who hates fighting", "a ghost in a library",
    "a dancer", "a tailor", "a little cloud", "a farmer and his donkey", "a computer programmer", "a vampire",
    "a mother of five", "a journalist", "a turtle", "an archaeologist", "a boy who never speaks", "a jazz musician",
    "a mail robot", "an owl who is afraid of the night",
)  # fmt: skip
DEEDS: Final = (
    "discovers a hidden garden", "has to choose between two friends", "gets lost in the mountains",
    "finds an old map", "saves a stranger from a storm", "learns to swim", "wants to become famous",
    "receives a strange phone call", "finds a box of old photographs", "must repair a broken machine",
    "makes a terrible mistake", "goes on a long journey", "meets a dragon", "starts a new life abroad",
    "tries to win back a lost love", "sees the sea for the first time", "solves a mystery", "learns to be brave",
    "finds out a family secret", "organizes a great feast", "helps a lost child", "builds a flying machine",
    "loses everything in one night", "makes a new friend", "is chased by wolves", "has an unusual dream",
    "returns after many years", "travels back in time", "teaches everybody a lesson", "finds a magic stone",
    "is invited to a royal wedding", "discovers a new planet", "runs away from home", "learns the value of honesty",
    "tries to save the old theatre", "writes a letter to the president", "wins the lottery", "hides a small animal",
    "gets a second chance", "breaks the rules for a good reason",
)  # fmt: skip
SCENES: Final = (
    "", "", "", "", " in a small village", " in a big city", " during a war", " at Christmas", " in a dark forest",
    " on a ship", " in the year 2150", " near the coast", " at school", " in ancient Rome", " in the winter",
    " on the moon", " in a castle", " during a thunderstorm", " on a farm", " at the market", " in the jungle",
    " in a hospital", " on the last day of school", " under the sea",
)  # fmt: skip
STORIES: Final = (
    "Write a short story about {hero} who {deed}{scene}.", "Tell me a story about {hero} who {deed}{scene}.",
    "Write a story in which {hero} {deed}{scene}.", "Can you write me a bedtime story about {hero} who {deed}{scene}?",
    "Write the beginning of a novel about {hero} who {deed}{scene}.", "I need a story about {hero}{scene}.",
    "Write a fairy tale about {hero} who {deed}{scene}.", "Write a funny story: {hero} {deed}{scene}.",
    "Once upon a time there was {hero}{scene}. Continue the story.", "Write a story about {hero} who {deed}{scene}.",
    "Make up a story for my children about {hero} who {deed}{scene}.", "Write a scene where {hero} {deed}{scene}.",
)  # fmt: skip

MATTERS: Final = (
    "photosynthesis", "gravity", "how earthquakes happen", "inflation", "how a microwave oven works", "black holes",
    "why the sea is salty", "how planes fly", "the water cycle", "how the heart works", "evolution", "democracy",
    "how electric cars work", "how the internet works", "the French Revolution", "how a vaccine is tested",
    "why we have seasons", "machine learning", "how rainbows form", "the stock market", "how plants drink",
    "the human brain", "how batteries store energy", "climate change", "how clouds form", "the Roman Empire",
    "how muscles grow", "why cats purr", "how soap cleans", "supply and demand", "how the eye sees", "DNA",
    "how lightning is made", "the Industrial Revolution", "how yeast works", "why stars twinkle", "recycling",
    "how a computer stores data", "the immune system", "how wind turbines work", "the moon landing", "osmosis",
    "why ice floats", "how a telephone works", "taxes", "how spiders build webs", "atoms", "how music is recorded",
    "why we sleep", "how a parliament makes laws", "the greenhouse effect", "how a submarine dives",
    "compound interest", "how chocolate is made", "the solar system",
    "how fish breathe", "the Renaissance", "why onions make you cry",
    "how a compass works", "fractions", "how diamonds form", "the history of writing", "how elevators work",
    "how fireworks get their colours", "magnetism", "how the lungs work", "the Cold War", "how satellites stay up",
    "why bread goes stale", "probability", "how deserts form", "the food chain", "how a clock keeps time", "insurance",
    "how whales communicate", "the speed of light", "how salt is harvested", "why people yawn", "renewable energy",
    "how a steam engine works", "cholesterol", "how mountains are formed", "the Great Wall of China", "plate tectonics",
    "how a thermometer works", "what a virus is", "the periodic table", "how bridges carry loads", "allergies",
    "how ants find food", "the Silk Road", "how silk is made", "why the wind blows", "how sound travels", "vitamins",
    "how a mortgage works", "artificial intelligence", "how cells divide", "jet lag", "how a printer works",
    "the Big Bang", "how coral reefs grow", "the United Nations", "how caves form", "blood pressure", "ocean currents",
    "how a dishwasher works", "the Vikings", "how leather is made", "friction", "how memory works", "coral bleaching",
)  # fmt: skip
EXPLAIN: Final = (
    "Explain {}.", "Explain {} in simple terms.", "Can you explain {}?", "Explain {} to a child.", "Tell me about {}.",
    "Describe {} in a few sentences.", "Give me a short introduction to {}.", "Write a paragraph about {}.",
    "What should everybody know about {}?", "Help me understand {}.", "Write a short essay about {}.",
    "I have an exam about {}. What are the main points?", "Write a blog post about {}.", "Summarize {} for a beginner.",
    "What are common myths about {}?", "Give an example that makes {} easy to understand.",
    "Write an article about {} for a school magazine.", "What is interesting about {}?",
    "Prepare a five minute talk about {}.", "Explain step by step {}.", "My daughter asked me about {}. What do I say?",
)  # fmt: skip

SKILLS: Final = (
    "cook rice", "write a CV", "start a blog", "sleep better", "paint a room", "make new friends", "change a tyre",
    "lose weight", "learn the guitar", "study for exams", "bake a chocolate cake", "speak in public", "save water",
    "write a good essay", "plan a birthday party", "clean a kitchen", "start running", "take better photographs",
    "grow tomatoes", "negotiate a salary", "make pasta", "stop procrastinating", "pack for a long trip", "knit a scarf",
    "build a website", "set up a small business", "choose a laptop", "learn Spanish", "meditate", "remove a stain",
    "write a poem", "train a puppy", "prepare for a marathon", "make a budget", "deal with stress", "fix a bicycle",
    "read more books", "learn to draw", "teach a child to read", "make a good first impression", "apologize",
    "organize a wardrobe", "keep a houseplant alive", "give feedback to a colleague", "find a flat", "make soup",
    "travel cheaply", "wake up early", "write a cover letter", "use less plastic", "improve my memory", "learn chess",
    "plan a week of meals", "get over a cold", "become a better listener", "buy a used car", "play the piano",
    "repair a wall", "run a meeting", "write a wedding speech",
)  # fmt: skip
ADVICE: Final = (
    "How do I {}?", "What is the best way to {}?", "Give me tips on how to {}.", "I want to {}. Where do I start?",
    "Can you give me a step-by-step guide to {}?", "What mistakes should I avoid when I {}?",
    "List five things to remember when you {}.", "My friend wants to {}. What would you advise?",
    "How long does it take to {}?", "Why is it so hard to {}?", "Make a checklist to {}.",
)  # fmt: skip

PAIRS: Final = (
    ("coffee", "tea"), ("cats", "dogs"), ("city life", "country life"), ("books", "films"), ("trains", "planes"),
    ("renting", "buying a house"), ("Python", "Java"), ("cycling", "driving"), ("summer", "winter"), ("gas", "liquid"),
    ("mitosis", "meiosis"), ("a crocodile", "an alligator"), ("weather", "climate"), ("a virus", "a bacterium"),
    ("credit cards", "debit cards"), ("jam", "marmalade"), ("speed", "velocity"), ("a republic", "a monarchy"),
    ("running", "swimming"), ("working from home", "working in an office"), ("rice", "pasta"), ("a lake", "a pond"),
    ("reptiles", "amphibians"), ("butter", "margarine"), ("fame", "success"), ("violins", "guitars"),
)  # fmt: skip
COMPARE: Final = (
    "What is the difference between {} and {}?", "Compare {} and {}.", "Which is better, {} or {}, and why?",
    "Write a dialogue in which two people argue about {} and {}.", "Make a list of pros and cons of {} and {}.",
    "Are {} and {} the same?",
)  # fmt: skip

PLACES: Final = (
    "France", "Japan", "Brazil", "Egypt", "Canada", "India", "Australia", "Kenya", "Italy", "Norway", "Mexico", "Peru",
    "Greece", "Turkey", "Vietnam", "Spain", "Argentina", "Iceland", "Morocco", "South Korea", "Scotland", "Poland",
    "Thailand", "Portugal", "Chile", "New Zealand", "Finland", "Indonesia", "Ireland", "Cuba",
)  # fmt: skip
TRAVEL: Final = (
    "What is the capital of {}?", "What is {} known for?", "Plan a trip of three days to {}.", "Tell me about {}.",
    "What do people eat in {}?", "Write a postcard from {}.", "Describe the history of {} briefly.",
    "Name ten facts about {}.", "What is the climate of {} like?", "What should I see in {}?",
    "Which languages are spoken in {}?", "Write a travel report about {}.",
)  # fmt: skip

FEELINGS: Final = (
    "love", "autumn", "the sea", "friendship", "rain", "hope", "my grandmother", "time", "the night sky", "a lost toy",
    "home", "spring", "silence", "courage", "the wind", "music", "a river", "being late", "a small town", "growing up",
)  # fmt: skip
VERSES: Final = (
    "Write a poem about {}.", "Write a haiku about {}.", "Write a song about {}.", "Write a letter about {}.",
    "Give me five quotes about {}.", "Describe {} in three sentences.", "Write a diary entry about {}.",
    "What does {} mean to people?", "Write a short speech about {}.",
)  # fmt: skip

ERRANDS: Final = (
    "a delayed delivery", "a job application", "a holiday request", "a broken dishwasher", "an invitation to a wedding",
    "a missed meeting", "a noisy neighbour", "a recommendation", "a refund", "a new timetable", "a thank-you gift",
    "a parking fine", "a change of address", "a school trip", "a birthday surprise", "a lost suitcase", "a late bill",
    "a hotel booking", "a team lunch", "a price offer",
)  # fmt: skip
LETTERS: Final = (
    "Write an email about {}.", "Write a polite letter about {}.", "Help me write a message about {}.",
    "Draft a short note to my boss about {}.", "Write a complaint about {}.", "Write a friendly reply about {}.",
)  # fmt: skip

TASKS: Final = (
    "reverses a string", "adds two numbers", "checks whether a number is prime", "sorts a list", "counts words",
    "finds the largest number in a list", "computes a factorial", "reads a file", "removes duplicates from a list",
    "converts Celsius to Fahrenheit", "prints the Fibonacci numbers", "checks for a palindrome", "sums a column",
    "merges two dictionaries", "rolls two dice", "capitalizes each word", "computes an average", "guesses a number",
)  # fmt: skip
CODE: Final = (
    "Write a Python function that {}.", "How do I write a program that {}?", "Show me code that {} and explain it.",
    "Write a JavaScript function that {}.", "Explain to a beginner how a program {}.",
)  # fmt: skip

LISTS: Final = (
    "healthy breakfasts", "animals that live in the desert", "books for teenagers", "names for a dog", "indoor games",
    "hobbies for retired people", "famous inventors", "gifts for a teacher", "questions for an interview", "jobs",
    "ways to say thank you", "ideas for a science project", "things to do on a rainy day", "vegetarian dinners",
    "inventions that changed the world", "exercises without equipment", "team building activities", "kinds of clouds",
    "musical instruments", "famous paintings", "snacks for a party", "topics for an essay", "uses for old newspapers",
    "sports at the Olympic Games", "ways to help the environment", "rules for a classroom", "planets and moons",
)  # fmt: skip
LISTING: Final = (
    "Give me a list of {}.", "List five {}.", "What are some {}?", "Suggest ten {}.", "Name three {} and explain each.",
    "I am looking for {}. Any ideas?", "Describe the best {} you know.",
)  # fmt: skip

GREETINGS: Final = (
    "Hello!", "Hi, how are you?", "Who are you?", "What can you do?", "Tell me a joke.",
    "Tell me something interesting.", "Good morning! Can you help me?", "I am bored. What should I do?",
    "I feel sad today.", "Thank you for your help.",
    "What is your favourite colour?", "Do you like music?", "Give me a riddle.", "Surprise me.", "What is the time?",
)  # fmt: skip


def prompts(seed: int, count: int) -> Iterator[str]:
    """`count` different prompts: a third of them stories, a third explanations."""
    rng = random.Random(seed)
    shares = (
        (34, lambda: _story(rng)),
        (30, lambda: _filled(rng, EXPLAIN, MATTERS)),
        (12, lambda: _filled(rng, ADVICE, SKILLS)),
        (4, lambda: rng.choice(COMPARE).format(*rng.choice(PAIRS))),
        (5, lambda: _filled(rng, TRAVEL, PLACES)),
        (5, lambda: _filled(rng, VERSES, FEELINGS)),
        (3, lambda: _filled(rng, LETTERS, ERRANDS)),
        (2, lambda: _filled(rng, CODE, TASKS)),
        (4, lambda: _filled(rng, LISTING, LISTS)),
        (1, lambda: rng.choice(GREETINGS)),
    )
    weights = [weight for weight, _ in shares]
    given: set[str] = set()
    while len(given) < count:
        _, make = rng.choices(shares, weights)[0]
        line = make()
        if line not in given:
            given.add(line)
            yield line


def _story(rng: random.Random) -> str:
    return rng.choice(STORIES).format(hero=rng.choice(HEROES), deed=rng.choice(DEEDS), scene=rng.choice(SCENES))


def _filled(rng: random.Random, templates: Sequence[str], subjects: Sequence[str]) -> str:
    return rng.choice(templates).format(rng.choice(subjects))


if __name__ == "__main__":
    print(*prompts(SEED, COUNT), sep="\n")
