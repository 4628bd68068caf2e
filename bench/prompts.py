"""100 varied chat prompts for SmolLM2, made from templates and from texts that lie in this repository: the same on every machine."""

from __future__ import annotations

import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPICS = (
    "rivers", "the moon", "bread", "prime numbers", "volcanoes", "honey bees", "sailing", "the violin", "chess", "glass",
    "earthquakes", "coffee", "cats", "compilers", "the human heart", "deserts", "bicycles", "paper", "clouds", "maps",
)  # fmt: skip
ASKS = (
    "What should a child know about {}?",
    "Write a short poem about {}.",
    "List five facts about {}, one a line.",
    "Explain {} to an engineer in three sentences.",
)
CODE = (
    "def mean(xs):\n    return sum(xs) / len(xs)\n",
    "for i in range(10):\n    print(i * i)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;\n",
    "int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }\n",
)
LANGUAGES = (
    "¿Cuál es la capital de España y por qué es importante?",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Pourquoi le ciel est-il bleu ?",
    "日本で一番高い山は何ですか。",
    "Какая планета самая большая?",
)


def prompts() -> list[tuple[str, str]]:
    """(kind, text) of 100 prompts: 60 questions, 20 texts to quote or repeat, 10 of code, 5 foreign, 5 long ones past 512 tokens."""
    rng = random.Random(2026)
    made = [("question", ask.format(topic)) for ask in ASKS for topic in TOPICS]
    rng.shuffle(made)
    made = made[:60]
    sentences = [s.strip().replace("\n", " ") for s in (ROOT / "LICENSE").read_text().split("\n\n") if len(s) > 200]
    made += [("quote", f"Repeat this text word for word:\n\n{rng.choice(sentences)[:600]}") for _ in range(20)]
    made += [
        ("code", f"{ask}\n\n{code}")
        for code in CODE
        for ask in ("What does this code do?", "Rewrite this code with comments.")
    ]
    made += [("foreign", text) for text in LANGUAGES]
    long = (ROOT / "LICENSE").read_text()
    made += [
        ("long", f"Here is a licence.\n\n{long[at : at + 3200]}\n\nWhat does it allow?") for at in range(0, 5000, 1000)
    ]
    return made


def spread(count: int) -> list[tuple[str, str]]:
    """So many of the 100 prompts, evenly taken, so that every kind is among them."""
    chosen = prompts()
    return [chosen[int(i * len(chosen) / count)] for i in range(count)]


REPEATED = (
    "Count from 1 to 100 in words of one line each, like 'This is line 1.', 'This is line 2.' and so on.",
    'Write the sentence "The quick brown fox jumps over the lazy dog." thirty times, one a line.',
    "Print a table of the squares of 1 to 40 in the form '1 x 1 = 1', one a line.",
    "Write a JSON list of 20 objects with the keys id, name, email and active.",
    "Write the days of the week again and again, ten times, one a line.",
    "Write the multiplication table of 7 up to 7 x 40, one a line.",
    "Say the alphabet with a word for each letter, like 'A is for apple.', then say all of it once more.",
    "Write an SQL script that inserts 30 rows into the table users(id, name, age).",
    "Copy this list three times: red, orange, yellow, green, blue, indigo, violet.",
    "Write a chess board of 8 x 8 in HTML, cell by cell, without any loop.",
)  # what is said is said again: nearly every draft can be right
LOOPS = (
    "Write 'hello' one hundred times.",
    "Repeat the words 'hello' over and over again, without end.",
    "Write 'goodbye' one hundred times.",
    "Print the number 1 two hundred times, separated by spaces.",
    "Write a Python list with one hundred zeros, written out.",
    "Write an HTML table with 50 rows, all cells empty.",
    "Write an HTML list with 40 items, all of them 'item'.",
    "Write 40 lines, each of them '# --------'.",
    "Write a poem in which every line is 'Row, row, row your boat'.",
    "Write the chorus 'Row, row, row your boat' ten times.",
    "Write a song whose chorus is sung ten times.",
    "Write a poem in which every line begins with 'I am'.",
    "Write a story in which every sentence is 'The cat sat on the mat.'",
    "Write a chant for a football crowd, thirty lines.",
)
"""High acceptance: of 60 prompts that ask for repetition those whose answers SmolLM2 does repeat itself in, 10 tokens a pass or more of
`hybrid` at width 31. Counted on a CPU (2026-11-30), before any of them was timed."""
TONGUES = (
    "Explique la diferencia entre un río y un lago.",
    "Erzähle eine kurze Geschichte über einen Fuchs und einen Raben.",
    "Décris une journée d'hiver à la campagne.",
    "Quais são os ingredientes de um bom pão?",
    "Spiega come funziona una bussola.",
    "Hoe maak je een papieren vliegtuig?",
    "Vad är skillnaden mellan en katt och en hund?",
    "Dlaczego niebo jest niebieskie?",
    "Güneş neden doğudan doğar?",
    "Расскажи о реке Волге.",
    "请介绍一下长城的历史。",
    "춘천은 어떤 도시입니까?",
    "ما هي عاصمة مصر؟",
    "भारत की सबसे लंबी नदी कौन सी है?",
    "Ποια είναι η πρωτεύουσα της Ελλάδας;",
)
