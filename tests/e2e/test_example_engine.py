"""The engine of docs/engines.md: drafts make it faster, and change nothing."""

from pathlib import Path

from draftd.client import Drafter
from draftd.client.examples import toy_engine
from draftd.drafter.stats import FAIL_OPEN_REASONS
from draftd.server.replay.service import PrivateService


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
    document = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    assert f"```python\n{Path(toy_engine.__file__).read_text()}```" in document
    assert all(f"| `{reason}` |" in document for reason in FAIL_OPEN_REASONS)
