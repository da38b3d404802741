"""What the dashboard is made of: samples and events, bounded and as the metrics have them; files for the browser; who may see what."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftd.drafter.stats import EngineStats
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.attachments import Attachment, Engine
from draftd.server.dashboard import events as events_module
from draftd.server.dashboard import history as history_module
from draftd.server.dashboard.events import MAX_EVENTS, Events, Numbers, Watcher
from draftd.server.dashboard.history import COUNTS, MAX_SAMPLES, MAX_SERIES, History
from draftd.server.dashboard.window import Window, summarize
from draftd.server.metrics import CATALOGUE, OTHER, FoldedStats, Metrics
from draftd.server.security.tokens import hash_of
from tests.server.harness import REFRAIN, VOCAB, RunningService, error_of, wait_until

STATIC = Path(history_module.__file__).parent / "static"


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def engine(name: str) -> Attachment:
    """An attachment with nothing behind it."""
    made = Engine(name=name, namespaces=("n",), vocab_size=10, fingerprint="", k=4, max_rows=1, max_length=16)
    return Attachment(id=f"id-{name}", engine=made, transport="mapped", namespaces=["n"], deadline=0.0, stats=EngineStats())


class Bench:
    """A history over attachments and metrics of its own."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        self.metrics = Metrics(max_namespaces=300)
        self.attachments = [engine(name) for name in names]
        self.folded = {a.id: FoldedStats(a.stats) for a in self.attachments}
        self.history = History("run", self.metrics, self.attachments, self.clock)  # type: ignore[arg-type]

    def tick(self, seconds: float = 1.0) -> None:
        """Goes on in time, and samples as the service does."""
        self.clock.now += seconds
        for attachment in self.attachments:
            self.folded[attachment.id].fold_into(self.metrics, attachment.namespace, attachment.transport)
        self.history.sample()


def test_sample_has_what_was_counted_since_the_last() -> None:
    bench = Bench("a", "b")
    a, b = (attachment.stats for attachment in bench.attachments)
    a.count_verified(2, drafted=5, accepted=3)
    a.count_verified(1, drafted=2, accepted=0)
    a.count_proposal(4, 30.0)
    a.committed_tokens[0] += 6
    b.count_fail_open("timeout")
    bench.tick()
    bench.tick()
    a.count_verified(2, drafted=1, accepted=1)
    bench.tick(3.0)
    first, second, third = bench.history.answer(0)["samples"]
    assert dict(zip(COUNTS, first["engines"]["a"], strict=True)) == {
        "drafts": 2,
        "draft_tokens": 7,
        "accepted_tokens": 3,
        "committed_tokens": 6,
        "proposals": 1,
        "rows": 4,
        "fail_opens": 0,
    }
    assert first["engines"]["b"] == [0, 0, 0, 0, 0, 0, 1]
    assert first["namespaces"] == {"n": [2, 7, 3, 6, 1, 4, 1]}
    assert first["sources"] == {"local": [1, 2, 0], "corpus": [1, 5, 3], "group": [0, 0, 0]}
    assert sum(first["propose"]["mapped"]) == 1
    assert (second["engines"], second["namespaces"], second["propose"]) == ({}, {}, {})
    assert third["engines"] == {"a": [1, 1, 1, 0, 0, 0, 0]}
    assert [sample["seconds"] for sample in (first, second, third)] == [1.0, 1.0, 3.0]
    assert bench.history.totals() == dict(zip(COUNTS, [3, 8, 4, 6, 1, 4, 1], strict=True))


def test_samples_are_a_second_apart_however_often_it_is_asked() -> None:
    bench = Bench("a")
    for _ in range(50):
        bench.tick(0.25)
    assert len(bench.history.answer(0)["samples"]) == 12
    bench.clock.now -= 3600  # the host's clock was set back
    bench.tick()
    assert len(bench.history.answer(0)["samples"]) == 13


def test_engine_that_attaches_anew_counts_from_nothing() -> None:
    bench = Bench("a")
    bench.attachments[0].stats.count_verified(2, 3, 3)
    bench.tick()
    again = engine("a")
    again.id = "another"
    again.stats.count_verified(2, 2, 1)
    bench.attachments[:] = [again]
    bench.folded["another"] = FoldedStats(again.stats)
    bench.tick()
    assert bench.history.answer(0)["samples"][1]["engines"]["a"][:3] == [1, 2, 1]


def test_engine_that_writes_nonsense_makes_no_count_negative() -> None:
    bench = Bench("a")
    bench.attachments[0].stats.words[:] = 10
    bench.tick()
    bench.attachments[0].stats.words[:] = -1000
    bench.tick()
    assert bench.history.answer(0)["samples"][1]["engines"] == {}


def test_answer_has_only_what_is_new() -> None:
    bench = Bench("a")
    bench.tick()
    bench.history.events.note("attach", "a", "attached over mapped")
    first = bench.history.answer(0)
    assert (len(first["samples"]), len(first["events"])) == (1, 1)
    nothing = bench.history.answer(first["number"])
    assert (nothing["samples"], nothing["events"], nothing["number"]) == ([], [], first["number"])
    bench.tick()
    assert [s["number"] for s in bench.history.answer(first["number"])["samples"]] == [first["number"] + 1]
    json.dumps(bench.history.answer(0))


def test_memory_is_bounded() -> None:
    bench = Bench(*(f"engine-{i:03}" for i in range(MAX_SERIES * 2)))
    for _ in range(MAX_SAMPLES + 20):
        for i, attachment in enumerate(bench.attachments):
            attachment.stats.count_verified(2, 1 + i, 1)
        bench.tick()
        bench.history.events.note("attach", "x", "attached")
    answer = bench.history.answer(0)
    assert len(answer["samples"]) == MAX_SAMPLES
    assert len(answer["events"]) == MAX_EVENTS
    sample = answer["samples"][-1]
    assert len(sample["engines"]) == MAX_SERIES
    assert sample["engines"][OTHER][0] == MAX_SERIES * 2 - (MAX_SERIES - 1)
    assert sum(counts[1] for counts in sample["engines"].values()) == sum(range(1, MAX_SERIES * 2 + 1))
    assert len(bench.history.events._latest) <= MAX_EVENTS


def test_repeated_events_are_one_until_a_minute_passes() -> None:
    clock = Clock()
    events = Events(Numbers(), clock)
    for _ in range(100):
        clock.now += 1
        events.note("fail-open", "n", "calls without drafts: timeout", level="warning", amount=10)
    (event,) = events.newer_than(0)
    assert (event.amount, event.last_s - event.first_s) == (1000, 99)
    clock.now += 61
    events.note("fail-open", "n", "calls without drafts: timeout", level="warning", amount=1)
    events.note("attach", "e", "attached over mapped")
    events.note("attach", "e", "attached over mapped")
    assert [e.amount for e in events.newer_than(0)] == [1000, 1, 0, 0]


def test_watched_counters_exist_and_their_growth_is_an_event() -> None:
    catalogue = {info.name: info for info in CATALOGUE}
    metrics, events = Metrics(max_namespaces=4), Events(Numbers())
    watcher = Watcher(metrics, events)
    watcher.look()
    assert events.newer_than(0) == []
    for watch in events_module._WATCHED:
        info = catalogue[watch.metric]
        assert info.type == "counter"
        assert not watch.subject or watch.subject in info.labels
        metrics.count(watch.metric, *(f"a-{label}" for label in info.labels), amount=3)
    watcher.look()
    watcher.look()
    noted = events.newer_than(0)
    assert [event.amount for event in noted] == [3] * len(events_module._WATCHED)
    metrics.rpc_error("Propose", "INTERNAL")
    metrics.rpc_error("Propose", "PERMISSION_DENIED")  # told by draftd_refused_calls_total
    metrics.count("draftd_refresh_tokens_total", "live", amount=5)
    watcher.look()
    assert [(e.level, e.subject, e.text) for e in events.newer_than(noted[-1].number)] == [("error", "Propose", "calls answered INTERNAL")]
    metrics.count("draftd_reloads_total", "tokens", "ok")
    metrics.count("draftd_reloads_total", "tokens", "failed")
    watcher.look()
    reloads = [(e.level, e.text) for e in events.newer_than(0) if e.kind == "reload"][-2:]
    assert reloads == [("info", "reloads of tokens: ok"), ("error", "reloads of tokens: failed")]


def test_every_fault_that_is_counted_becomes_an_event() -> None:
    watched = {watch.metric for watch in events_module._WATCHED}
    faults = {
        i.name
        for i in CATALOGUE
        if re.search(
            r"_(errors|timeouts|lost_tokens|fail_opens|dropped|damaged_documents|unsent_documents|refused_calls|refused_messages)_total$",
            i.name,
        )
    }
    assert faults
    assert faults <= watched


def _window(*samples: dict[str, Any]) -> Window:
    answer = {"counts": COUNTS, "bounds_s": {"propose": [1.0, 2.0, 4.0]}}
    empty: dict[str, Any] = {"seconds": 1.0, "engines": {}, "namespaces": {}, "propose": {}}
    return Window(answer, [empty | sample for sample in samples])


def test_missing_is_not_zero() -> None:
    none, idle = _window(), _window({})
    busy = _window({}, {"engines": {"a": [0, 0, 0, 4, 2, 2, 0]}}, {"engines": {"a": [2, 8, 4, 6, 2, 2, 0]}})
    assert (none.rate("engines", None, "proposals"), idle.rate("engines", None, "proposals")) == (None, 0.0)
    assert idle.ratio(idle.total("engines", "a"), "accepted_tokens", "drafts") is None
    assert busy.ratio(busy.total("engines", "a"), "accepted_tokens", "drafts") == 2.0
    assert busy.ratio(busy.total("engines", "a"), "accepted_tokens", "draft_tokens") == 0.5
    # An engine is measured from when it began, all together over the whole time.
    assert busy.rate("engines", "a", "committed_tokens") == 5.0
    assert busy.rate("engines", None, "committed_tokens") == pytest.approx(10 / 3)


@pytest.mark.parametrize(
    ("counts", "q", "seconds"),
    [([0, 0, 0, 0], 0.5, None), ([2, 0, 0, 0], 0.5, 0.5), ([0, 4, 0, 0], 0.75, 1.75), ([1, 0, 1, 0], 0.99, 3.96), ([0, 0, 0, 3], 0.5, 4.0)],
)
def test_percentiles_are_those_of_prometheus(counts: list[int], q: float, seconds: float | None) -> None:
    assert _window({"propose": {"mapped": counts}}).percentile_s("propose", "mapped", q) == (
        seconds if seconds is None else pytest.approx(seconds)
    )


def test_summary_agrees_with_status_and_metrics(service: RunningService) -> None:
    attachment = service.attach("summed", namespace="summed").attachment_id
    for i in range(4):
        service.propose(
            [pb.Row(document_id="s", offset=6 * i, tokens=REFRAIN[6 * i : 6 * i + 6], prompt_length=3 if not i else 0)], attachment
        )
    wait_until(lambda: any("summed" in s["engines"] for s in json.loads(service.get("/v1/history"))["samples"]))
    wait_until(lambda: sum(s["engines"].get("summed", [0] * 9)[4] for s in json.loads(service.get("/v1/history"))["samples"]) == 4)
    status, answer = json.loads(service.get("/v1/status")), json.loads(service.get("/v1/history"))
    figures = summarize(status, answer, answer["samples"], 900)
    (mine,) = [e for e in figures["engines"] if e["engine"] == "summed"]
    assert (mine["proposals"], mine["fail_opens"], mine["rows"], mine["max_rows"]) == (4, None, 1, 4)
    assert mine["proposals_per_s"] > 0
    assert figures["totals"]["proposals"] == sum(
        service.metric(f'draftd_proposals_total{{namespace="{n}",transport="{t}"}}') for n, t in service.service.metrics.engine_totals
    )
    assert [e for e in answer["events"] if (e["kind"], e["subject"], e["text"]) == ("attach", "summed", "attached over inline")]
    # An attachment's id lets its holder act as the engine.
    assert attachment not in json.dumps([status, answer])
    service.drafter.Detach(pb.DetachRequest(attachment_id=attachment))
    events = json.loads(service.get(f"/v1/history?after={answer['number']}"))["events"]
    assert [(e["kind"], e["subject"]) for e in events] == [("detach", "summed")]


def test_lost_lease_and_start_are_events() -> None:
    running = RunningService(lease_ms=400)
    try:
        running.attach("loses")
        wait_until(lambda: "lease lost" in running.get("/v1/history"))
        events = json.loads(running.get("/v1/history"))["events"]
        assert [e["kind"] for e in events] == ["start", "attach", "lease lost"]
        assert events[-1]["level"] == "warning"
    finally:
        running.close()


def test_mapped_engines_show_their_rows(service: RunningService) -> None:
    from draftd.client import Drafter

    with Drafter(f"unix:{service.config.socket_path()}", engine="rows", vocab_size=VOCAB, max_rows=4, max_length=64) as drafter:
        drafter.wait_attached(30)
        for row in range(3):
            drafter.start(row, REFRAIN[:6])
        drafter.finish(2)

        def mine() -> Any:
            return next(e for e in json.loads(service.get("/v1/status"))["attachments"] if e["engine"] == "rows")

        wait_until(lambda: mine()["rows"] == 2)
        assert (mine()["transport"], mine()["max_rows"], mine()["fail_opens"]) == ("mapped", 4, 0)


def _answer(service: RunningService, path: str, token: str = "") -> Any:
    url = f"http://127.0.0.1:{service.service.http_port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10)


FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_come_with_a_strict_policy(service: RunningService, file: Path) -> None:
    with _answer(service, "/" if file.suffix == ".html" else f"/dashboard/{file.name}") as answer:
        assert answer.read() == file.read_bytes()
        policy = answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[file.suffix]
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_load_nothing_from_elsewhere_and_run_nothing_inline(file: Path) -> None:
    text = file.read_text()
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]", text)
    assert not re.search(r"\son\w+\s*=\s*[\"']|javascript:|<style|\sstyle=|innerHTML\s*=|insertAdjacentHTML|outerHTML\s*=|eval\(", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)


def test_data_is_not_kept_by_browsers(service: RunningService) -> None:
    for path in ("/v1/status", "/v1/history"):
        with _answer(service, path) as answer:
            assert answer.headers["cache-control"] == "no-store"
    for wrong in ("-1", "x", "1.5"):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            service.get(f"/v1/history?after={wrong}")
    assert json.loads(service.get(f"/v1/history?after={2**70}"))["samples"] == []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    entries = (("all", "read", "*"), ("some", "read", "mine"), ("writer", "write", "*"))
    file.write_text("".join(f'[tokens.{n}]\nsha256 = "{hash_of(n)}"\nrights = ["{r}"]\nnamespaces = ["{p}"]\n' for n, r, p in entries))
    file.chmod(0o600)
    running = RunningService(token_file=file)
    yield running
    running.close()


def test_the_page_needs_no_token_and_its_data_does(guarded: RunningService) -> None:
    assert "<title>draftd</title>" in guarded.get("/")
    for file in FILES:
        if file.suffix != ".html":
            assert guarded.get(f"/dashboard/{file.name}")
    for path in ("/v1/history", "/v1/status", "/dashboard/", "/dashboard/nothing.js"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            guarded.get(path)
        for token in ("some", "writer"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                guarded.get(path, token)
    assert json.loads(guarded.get("/v1/history", "all"))["run"] == guarded.service.corpus.instance


def test_sampling_survives_what_calls_do_meanwhile(service: RunningService) -> None:
    before = service.metric("draftd_background_errors_total")
    for i in range(20):
        error_of(lambda: service.propose([], "nobody"))
        attachment = service.attach(f"comes-and-goes-{i}").attachment_id
        service.drafter.Detach(pb.DetachRequest(attachment_id=attachment))
        service.get("/v1/history")
        service.on_loop(service.service._history.sample)
    assert service.metric("draftd_background_errors_total") == before
    assert np.all([s["seconds"] > 0 for s in json.loads(service.get("/v1/history"))["samples"]])
