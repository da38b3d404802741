"""Prompts for real models: every other one a question of Spec-Bench, the others like those of engines whose outputs repeat.

Those are made from templates: rewriting a text, editing code, the next step of an agent. The questions are in samples/.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

KINDS = ("rewrite", "code", "agent")
_QUESTIONS = Path(__file__).resolve().parents[1] / "samples" / "prompts" / "specbench.jsonl"

_PLACES = ["Lisbon", "Tromsø", "Kyoto", "Nairobi", "Quito", "Halifax", "Riga", "Perth", "Izmir", "Leeds", "Austin", "Gdansk"]
_PEOPLE = ["Amara", "Jonas", "Mei", "Ravi", "Sofia", "Tariq", "Lena", "Diego", "Noor", "Piotr", "Hana", "Samuel"]
_THINGS = ["harbour office", "night train", "seed library", "weather station", "repair workshop", "town archive", "ferry line", "bakery"]
_SENTENCES = [
    "The {thing} in {place} opened {year} years ago with a staff of {number} people.",
    "{person} keeps a notebook in which every visitor of the {thing} is listed by date and by name.",
    "On busy days the team of {person} answers about {number} letters before lunch.",
    "Most of the money comes from a small fee that visitors pay at the entrance of the {thing}.",
    "Last winter a storm damaged the roof, and the repairs took {number} days longer than planned.",
    "{person} has proposed to move the {thing} closer to the market square of {place}.",
    "The council of {place} will vote on the plan in {number} weeks.",
    "Until then the {thing} stays open from Tuesday to Saturday, and closed on public holidays.",
    "Volunteers meet every second Monday to sort what was donated and to label the shelves.",
    "A report about the {thing} counts {number} visits a month, one third of them from outside {place}.",
]
_ORDERS = [
    "Rewrite the following text in the present tense and change as little as possible.",
    "Correct the spelling of the following text and repeat it in full.",
    "Repeat the following text, but call the town {place}.",
    "Make the following text a little more formal. Keep every fact and the order of the sentences.",
]
_FIELDS = ["name", "price", "stock", "weight", "label", "owner", "rating", "colour", "origin", "batch"]
_CLASSES = ["Parcel", "Account", "Sensor", "Recipe", "Ticket", "Invoice", "Vessel", "Course"]
_EDITS = [
    "Rename the field `{field}` to `{field}_value` everywhere and print the whole class.",
    "Add a docstring to each method and print the whole class.",
    "Add type hints to each method and print the whole class.",
    "Raise a ValueError in each setter if the value is None, and print the whole class.",
]
_TOOLS = ["search_orders", "list_files", "get_weather", "read_table", "find_flights", "check_stock"]


def prompts(count: int, first: int = 0) -> list[str]:
    """User messages `first` to `first + count - 1` of an endless list, whose kinds take turns; the same numbers give the same messages.

    No two of any 126 in a row are the same.
    """
    return [_prompt(number) for number in range(first, first + count)]


def templates(count: int, first: int = 0) -> list[str]:
    """As `prompts`, without questions: what is made from templates only."""
    return [_prompt(2 * number) for number in range(first, first + count)]


@cache
def questions() -> list[str]:
    """First turns of Spec-Bench's multi-turn questions."""
    return [json.loads(line)["prompt"] for line in _QUESTIONS.read_text().splitlines()]


def _prompt(number: int) -> str:
    half, question = divmod(number, 2)
    if question:
        return questions()[half % len(questions())]
    return {"rewrite": _rewrite, "code": _code, "agent": _agent}[KINDS[half % len(KINDS)]](random.Random(half))


def _rewrite(chosen: random.Random) -> str:
    facts = {"place": chosen.choice(_PLACES), "person": chosen.choice(_PEOPLE), "thing": chosen.choice(_THINGS)}
    sentences = [
        sentence.format(**facts, number=chosen.randint(3, 90), year=chosen.randint(2, 80)) for sentence in chosen.sample(_SENTENCES, 7)
    ]
    return f"{chosen.choice(_ORDERS).format(place=chosen.choice(_PLACES))}\n\n{' '.join(sentences)}"


def _code(chosen: random.Random) -> str:
    fields = chosen.sample(_FIELDS, 4)
    lines = [f"class {chosen.choice(_CLASSES)}{chosen.randint(1, 99)}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
        lines += ["", f"    def set_{field}(self, {field}):", f"        self.{field} = {field}"]
    return f"{chosen.choice(_EDITS).format(field=fields[0])}\n\n```python\n" + "\n".join(lines) + "\n```"


def _agent(chosen: random.Random) -> str:
    tool = chosen.choice(_TOOLS)
    person, place = chosen.choice(_PEOPLE), chosen.choice(_PLACES)
    steps = []
    for step in range(1, 4):
        call = {"tool": tool, "arguments": {"user": person, "place": place, "page": step, "limit": 5}}
        rows = [{"id": chosen.randint(1000, 9999), "place": place, "amount": chosen.randint(1, 500), "state": "open"} for _ in range(4)]
        steps.append(f"Call {step}: {json.dumps(call)}\nResult {step}: {json.dumps({'page': step, 'rows': rows, 'more': True})}")
    return (
        f"You are an agent that works for {person} with the tool `{tool}`. Answer with the next call as one line of JSON in the form of the"
        " calls so far, then repeat the rows of the last result as a table.\n\n" + "\n".join(steps) + "\nCall 4:"
    )
