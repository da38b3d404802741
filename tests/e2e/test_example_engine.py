"""The engine of docs/engines.md: drafts make it faster, and change nothing."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from draftd.client import Drafter
from draftd.client.examples import toy_engine
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import FAIL_OPEN_REASONS
from draftd.server.replay.service import PrivateService

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def greedy(prompt: list[int], max_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != toy_engine.END):
        output.append(toy_engine.next_token(prompt + output))
    return output


def test_the_example_engine_is_exact_and_takes_fewer_steps_the_second_time() -> None:
    prompts = [[1 + i, 7, 3 * i + 2] for i in range(6)]
    expected = [greedy(prompt, 120) for prompt in prompts]
    taken = []
    with PrivateService(http=False) as service:
        for run in range(2):
            with Drafter(
                service.endpoint,
                engine=f"toy-{run}",
                vocab_size=toy_engine.VOCAB_SIZE,
                max_rows=toy_engine.ROWS,
                max_length=toy_engine.MAX_LENGTH,
                timeout_ms=2000.0,
            ) as drafter:
                assert drafter.wait_attached(60)
                outputs, steps = toy_engine.generate(drafter, prompts, 120)
                assert drafter.wait_visible(60)
                assert drafter.stats.fail_opens.sum() == 0
            assert outputs == expected
            taken.append(steps)
    assert taken[1] < taken[0] / 2


def test_the_example_engine_needs_no_service() -> None:
    prompts = [[5, 6, 7]]
    with Drafter("unix:/nowhere", engine="toy", vocab_size=toy_engine.VOCAB_SIZE, max_rows=4, max_length=512) as drafter:
        outputs, steps = toy_engine.generate(drafter, prompts, 50)
    assert outputs == [greedy(prompts[0], 50)]
    assert steps == len(outputs[0])


def test_the_documentation_shows_the_engine_that_is_tested() -> None:
    document = PAGE.read_text()
    assert f"```python\n{Path(toy_engine.__file__).read_text()}```" in document
    assert all(f"| `{reason}` |" in document for reason in FAIL_OPEN_REASONS)


def test_the_documentation_has_every_knob() -> None:
    knobs = PAGE.read_text().partition("## Every knob")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in knobs.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    arguments = set(inspect.signature(Drafter).parameters)
    fields = {field.name for field in dataclasses.fields(DraftParams)}
    assert named == arguments | fields


def test_the_calls_for_other_languages_are_answered() -> None:
    script = PAGE.read_text().partition("## Any other language")[2].partition("```sh\n")[2].partition("```")[0]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with PrivateService(http=False) as service:
        environment = {**os.environ, "PATH": tools, "SOCKET": service.endpoint.removeprefix("unix:")}
        run = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, env=environment, timeout=60, check=True)
    answers = _json_values(run.stdout)
    drafts = [answer["drafts"][0]["tokens"] for answer in answers[:2]]
    assert [draft[:2] for draft in drafts] == [[9, 7], [9, 7]]
    (kept,) = answers[2]["results"]
    assert (kept["document_id"], kept["total_tokens"], kept["committed"]) == ("r1", 5, True)


def _json_values(text: str) -> list[Any]:
    """The JSON values that follow each other in a text."""
    values = []
    while text := text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        values.append(value)
        text = text[end:]
    return values
