"""The text generator of the examples, as its users run it: real processes, real HTTP; the model is small and random."""

from __future__ import annotations

import importlib
import math
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

httpx = pytest.importorskip("httpx")
for package in ("prometheus_client", "safetensors", "starlette", "uvicorn"):
    pytest.importorskip(package)

from generator import LONG, Served, assert_right, one_thread, random_model  # noqa: E402
from supervised import EXAMPLES, HANGS  # noqa: E402

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(HANGS, method="signal"),  # the signal raises in the test, which then ends its processes
]

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 4 * 2 * 32 * 32 * 8
"""The bytes that the shards sum for a chunk: layers, halves of a layer, tokens, features, bytes of a number."""
PROMPTS = ["x", "a lane", "sixteen bytes ok", "naïve café, 東京, 😀", "seventeen bytes!!", "longer than a chunk, " * 9]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Yield the example's module of the model."""
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("text_generator.model")


@pytest.fixture(scope="module")
def path(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model, and return its path."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    random_model(example).save(path)
    return path


@pytest.fixture(scope="module")
def model(example: ModuleType, path: Path) -> Any:
    """Return the unsplit model."""
    return example.Model.load(path)


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[Served]:
    """Yield a server with two decoders of two shards each."""
    with Served(path, tp=2, decoders=2) as server:
        yield server


def assert_all_right(server: Served, model: Any, count: int = 40) -> None:
    """Send each prompt in two requests, all at the same time, and check every token."""
    prompts = PROMPTS * 2
    with ThreadPoolExecutor(len(prompts)) as threads:
        for prompt, tokens in zip(prompts, threads.map(lambda it: server.generate(it, count), prompts), strict=True):
            assert len(tokens) == count
            assert_right(model, prompt, tokens)


@pytest.mark.search
def test_every_token_equals_the_unsplit_models(pair: Served, model: Any) -> None:
    assert_all_right(pair, model)
    assert pair.measured("near_ties_total") == 0


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.search
def test_every_token_is_right_for_any_tp_and_pp(path: Path, model: Any, tp: int, pp: int) -> None:
    with Served(path, tp=tp, pp=pp) as server:
        assert_all_right(server, model)


def test_disconnected_clients_pages_are_freed(pair: Served, model: Any) -> None:
    before, wasted = pair.health(), pair.measured("wasted_tokens_total")
    with pair.stream("stays", 300) as stays:
        for _ in range(3):
            with pair.stream("leaves", LONG) as leaves:
                leaves.read(5)
        after = pair.wait_for(lambda health: health["clients_left"] == before["clients_left"] + 3)
        assert len(after["pages_free_after_ms"]) >= 3
        assert_right(model, "stays", stays.read_to_end())
    pair.wait_for(lambda health: all(it["pages_free"] == it["pages"] for it in health["decoders"].values()))
    assert pair.measured("wasted_tokens_total") - wasted <= 3  # at most the tokens of the current step
    assert pair.measured("tokens_total") < LONG


@pytest.mark.search
def test_client_that_disconnects_amid_prefill_stops_its_prefill(pair: Served) -> None:
    """The prefill group is stopped while the client connects and leaves, so it computes few of many chunks."""
    left, written = pair.health()["clients_left"], pair.summed_up("prefill.1")
    body = b'{"prompt": "%s", "max_tokens": 9}' % (b"word " * 1500)
    with pair.stopped("prefill.1"):
        with socket.create_connection((pair.http.base_url.host, pair.http.base_url.port)) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            pair.wait_for(lambda health: health["requests"] == 1)
        pair.wait_for(lambda health: health["requests"] == 0)
    health = pair.wait_for(lambda health: health["clients_left"] == left + 1)
    assert all(it["pages_free"] == it["pages"] for it in health["decoders"].values())
    assert pair.summed_up("prefill.1") - written < 10 * CHUNK_BYTES


@pytest.mark.search
def test_killed_decoder_is_replaced_while_all_streams_go_on(pair: Served, model: Any) -> None:
    again = pair.measured("again_total")
    prompts = [f"stream {i}" for i in range(4)]  # two on each decoder
    with ExitStack() as stack:
        streams = [stack.enter_context(pair.stream(prompt, 1200)) for prompt in prompts]
        for stream in streams:
            stream.read(3)
        [name] = [name for name in pair.groups if name.startswith("decode-1")]
        pair.send(signal.SIGKILL, name, 1)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert_right(model, prompt, stream.read_to_end())
    assert pair.measured("again_total") - again == 2
    pair.wait_for_another("decode-1")
    assert "decode-0.1" in pair.health()["decoders"]
    assert_all_right(pair, model)


@pytest.mark.search
def test_killed_prefill_group_is_replaced(pair: Served, model: Any) -> None:
    """The replacement does the pending prefill. A stream that a decoder already has continues without a repetition."""
    again = pair.measured("again_total")
    with pair.stream("decoded by then", LONG) as stream, ThreadPoolExecutor(1) as threads:
        stream.read(2)  # The prefill makes the first token, before the decoder has its pages.
        pair.send(signal.SIGSTOP, "prefill.1", 1)  # the prefill stalls, so the test determines the order of events
        amid = threads.submit(pair.generate, "amid", 20)
        pair.wait_for(lambda health: health["requests"] == 2)
        pair.send(signal.SIGKILL, "prefill.1", 1)
        assert_right(model, "amid", amid.result())
        assert_right(model, "decoded by then", stream.read(100).tokens)
    assert pair.measured("again_total") - again == 1
    assert pair.health()["prefill"] == [pair.wait_for_another("prefill")]
    assert_all_right(pair, model)


@pytest.mark.search
@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b'{"prompt": "\xff", "max_tokens": 1}', 400, "not valid JSON"),
        (b'["a text"]', 400, "must be a JSON object"),
        (b'{"prompt": "no count"}', 400, "must be a JSON object"),
        (b'{"prompt": "", "max_tokens": 1}', 400, "must be a string that is not empty"),
        (b'{"prompt": 7, "max_tokens": 1}', 400, "must be a string"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens must be an integer"),
        (b'{"prompt": "x", "max_tokens": true}', 400, "max_tokens must be an integer"),
        (b'{"prompt": "x", "max_tokens": 1.5}', 400, "max_tokens must be an integer"),
        (b'{"prompt": "\\ud83d", "max_tokens": 1}', 400, "not valid Unicode"),
        (b'{"prompt": "x", "max_tokens": 8192}', 413, "together at most 8176 are taken"),
        (b" " * 3_000_000, 413, "3000000 bytes"),
    ],
    ids=lambda value: value[:16].decode("ascii", "replace") if isinstance(value, bytes) else None,
)
def test_bad_request_is_answered_with_its_error(pair: Served, body: bytes, status: int, sentence: str) -> None:
    response = pair.http.post("/generate", content=body)
    assert response.status_code == status
    assert sentence in response.json()["error"]


@pytest.mark.search
def test_metrics_cover_all_processes(pair: Served, model: Any) -> None:
    assert_all_right(pair, model, 4)
    page = pair.http.get("/metrics").raise_for_status().text
    health = pair.health()
    for name in [*health["prefill"], *health["decoders"]]:
        for rank in range(2):
            assert f'text_generator_loop_lateness_seconds_count{{process="{name} rank {rank}"}}' in page
            assert f'aiocomms_bytes_total{{comm="{name} stage 0",op="all_reduce",rank="{rank}"' in page
    assert page.count("# TYPE aiocomms_op_seconds histogram") == 1


@pytest.fixture(scope="module")
def narrow(path: Path) -> Iterator[Served]:
    """Yield a server with one unsplit decoder that has pages for 400 tokens."""
    with Served(path, "--pages=26") as server:
        yield server


@pytest.mark.search
def test_request_without_free_pages_waits(narrow: Served, model: Any) -> None:
    with ThreadPoolExecutor(3) as threads:
        with narrow.stopped("decode-0.1"):
            answers = [threads.submit(narrow.generate, "much", 250) for _ in range(3)]
            narrow.wait_for(lambda health: health["requests"] == 3)
        for answer in answers:
            assert_right(model, "much", answer.result())
    assert narrow.measured("waited_total") == 2


@pytest.mark.search
def test_client_that_disconnects_while_waiting_gets_no_pages(narrow: Served, model: Any) -> None:
    left, waited = narrow.health()["clients_left"], narrow.measured("waited_total")
    with narrow.stopped("decode-0.1"), ThreadPoolExecutor(1) as threads:
        first = threads.submit(narrow.generate, "all", 390)
        narrow.wait_for(lambda health: health["requests"] == 1)
        body = b'{"prompt": "waits", "max_tokens": 250}'
        with socket.create_connection((narrow.http.base_url.host, narrow.http.base_url.port)) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            narrow.wait_for(lambda health: health["requests"] == 2)
        narrow.wait_for(lambda health: health["requests"] == 1)
        narrow.send(signal.SIGCONT, "decode-0.1")
        narrow.wait_for(lambda health: health["clients_left"] == left + 1)
        assert_right(model, "all", first.result())
    assert narrow.measured("waited_total") == waited + 1
    assert narrow.measured("wasted_tokens_total") == 0


@pytest.mark.search
def test_sigterm_finishes_streams_and_refuses_new_requests(narrow: Served, model: Any) -> None:
    with narrow.stream("the last", 390) as last, ExitStack() as stack:
        with narrow.stopped("decode-0.1"):
            narrow.process.terminate()
            while narrow.http.get("/healthz").status_code == 200:
                pass
            refused = narrow.post("too late", 10)
            assert (refused.status_code, refused.json()["error"]) == (503, "The server is stopping.")
            half = stack.enter_context(socket.create_connection((narrow.http.base_url.host, narrow.http.base_url.port)))
            half.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert_right(model, "the last", last.read_to_end())
        assert half.recv(1) == b""
    assert narrow.process.wait() == 0
    assert [line for line in narrow.errors().splitlines() if not line.startswith("aiocomms run: ")] == []


@pytest.mark.search
def test_killed_front_is_replaced_and_all_groups_form_anew(path: Path, model: Any) -> None:
    with Served(path, tp=2) as server:
        with server.stream("breaks off", LONG) as stream:
            stream.read(1)
            server.kill_front()
            with pytest.raises(httpx.TransportError):
                stream.read_to_end()
        assert_right(model, "anew", server.generate("anew", 40))  # the launcher keeps the socket


@pytest.mark.search
def test_stopped_rank_is_replaced(path: Path, model: Any) -> None:
    with Served(path, tp=2, decoders=2, heartbeat="2") as server:
        with server.stream("goes on", 1200) as stream:
            stream.read(1)
            health = server.health()
            [group] = [name for name, it in health["decoders"].items() if it["sequences"]]
            server.send(signal.SIGSTOP, group, 1)
            assert_right(model, "goes on", stream.read_to_end())
        server.wait_for(lambda health: len(health["decoders"]) == 2 and group not in health["decoders"])
        assert_all_right(server, model)


@pytest.mark.search
def test_training_lowers_the_loss_reproducibly(example: ModuleType) -> None:
    """A small model trains for 40 steps from its own seed. `make demo-generate` trains for longer."""
    train = importlib.import_module("text_generator.train")
    text, shape = train.documentation(), example.Shape(width=32, heads=2, layers=1, context=64)
    models = [train.train(text, shape, steps=steps, texts=8, window=64) for steps in (1, 40, 40)]
    lines = torch.frombuffer(bytearray(text[: 64 * 64]), dtype=torch.uint8).view(64, 64).long()

    def bits(model: Any) -> float:
        logits = model.logits(lines[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, lines[:, 1:].flatten()).item() / math.log(2)

    assert bits(models[1]) < 0.8 * bits(models[0])
    assert all(torch.equal(models[1].weights[name], models[2].weights[name]) for name in shape.weights())


def test_text_generator_demo_runs_and_ends_its_processes(path: Path) -> None:
    program = "from text_generator import demo; demo.anyio.run(demo.main)"
    command = [sys.executable, "-c", program, f"--model={path}"]
    demo = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "all processes have ended" in demo.stdout
