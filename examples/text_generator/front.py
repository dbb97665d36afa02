"""The front, which computes nothing: it passes each request to a decode group and a prefill group.

client ──> front ── take ──> decoder       the pages of the whole sequence, when they are free
           front ── fill ──> prefill       the prompt's pages, which are handed over
           front ── go ────> decoder       reads them; then a token at each step, until the client leaves or has all
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import anyio

from .links import LOST, Channel, Endpoint
from .metrics import Measures, merge
from .model import Shape
from .pages import PAGE, pages_for

AT_ONCE = 256  # the most requests, with those that wait for pages
PATIENCE = 30.0  # seconds that a running request waits for a replaced group
ATTEMPTS = 4  # a request that has lost so many groups may be the cause
SHOWN = 16  # the clients that have left and are listed in the health check
SCRAPE = 10.0  # seconds within which a group must send its metrics, as long as Prometheus waits


class UnavailableError(Exception):
    """The error of a request without an answer, as a sentence for the client."""


class TooLargeError(Exception):
    """The error of a request that is too large, as a sentence for the client."""


class LostError(Exception):
    """The loss of a group during a request."""


@dataclass(eq=False)
class Group:
    """The front's record of a group."""

    role: str
    name: str
    channel: Channel
    ranks: list[Any]
    """The addresses of a decode group's ranks, for prefill groups."""
    pages: int
    free: int
    calls: dict[int, Call] = field(default_factory=dict)
    knows: set[str] = field(default_factory=set)
    """The decode groups to which a prefill group is connected."""
    measured: asyncio.Future[list[str]] | None = None


class Call:
    """One attempt of two groups to answer a request."""

    def __init__(self, key: int, prefill: Group, decoder: Group) -> None:
        self.key, self.prefill, self.decoder = key, prefill, decoder
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.filling = False  # True while the prefill group may have pages of the call

    async def hear(self, wanted: str) -> Any:
        """Return the content of the next message.

        :raises LostError: a group is lost
        """
        kind, what = await self.heard.get()
        if kind != wanted:
            raise LostError(what)
        return what


@dataclass
class Client:
    """The client of a request."""

    left: float | None = None
    """The time at which the client left, by the monotonic clock; None before."""


class Front:
    """The front, which knows the groups and answers requests."""

    def __init__(self, here: Endpoint, shape: Shape) -> None:
        self._here, self._shape = here, shape
        self._keys = itertools.count(1)
        self.groups: dict[str, Group] = {}
        self.under_way = 0
        self.stopping: str | None = None
        self._left = 0  # the number of clients that have left and whose pages are free
        self._freed: deque[float] = deque(maxlen=SHOWN)  # the seconds until their pages were free
        self._news = anyio.Event()
        self.measures = measures = Measures("front")
        self._first = measures.histogram("first_token_seconds", "Time from a request to its first token.")
        self._tokens = measures.counter("tokens", "Tokens given to clients.")
        self._again = measures.counter("again", "Attempts that were lost with a group, and made again.")
        self._until_free = measures.histogram("pages_free_seconds", "Time until a client that leaves has no page.")

    # -------------------------------------------------------------------------------------------------- groups

    async def run(self) -> None:
        """Accept connections of groups until the task is cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                tasks.start_soon(self._serve, await Channel.accept(self._here))

    async def _serve(self, channel: Channel) -> None:
        """Handle the messages of a group until it is lost."""
        group: Group | None = None
        try:
            _, role, name, ranks, pages = await channel.hear()
            group = self.groups[name] = Group(role, name, channel, ranks, pages, pages - 1)
            for prefill, decoder in itertools.product(self._of("prefill"), self._of("decode")):
                if group in (prefill, decoder):
                    prefill.channel.tell("connect", decoder.name, decoder.ranks)
            while True:
                kind, *what = await channel.hear()
                getattr(self, f"_on_{kind}")(group, *what)
        except LOST as error:
            if group is not None:
                self._forget(group, str(error))
        finally:
            await channel.aclose()

    def _forget(self, group: Group, why: str) -> None:
        """Forget a lost group, and fail its calls."""
        del self.groups[group.name]
        if group.measured is not None and not group.measured.done():
            group.measured.set_result([])
        for call in list(group.calls.values()):
            if group is call.decoder or call.filling:
                call.heard.put_nowait(("lost", why))
        self._tell()

    def _of(self, role: str) -> list[Group]:
        return [group for group in self.groups.values() if group.role == role]

    def pairs(self) -> list[tuple[Group, Group]]:
        """Return each usable decode group with a prefill group that is connected to it."""
        return [(p, d) for d in self._of("decode") for p in self._of("prefill")[-1:] if d.name in p.knows]

    async def ready(self, decoders: int = 1) -> None:
        """Wait until a number of decode groups are usable."""
        while len(self.pairs()) < decoders:
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _on_connected(self, prefill: Group, decoder: str) -> None:
        prefill.knows.add(decoder)
        self._tell()

    def _on_room(self, decoder: Group, key: int, free: int) -> None:
        decoder.free = free
        self._pass_on(decoder, key, "room", None)

    def _on_filled(self, prefill: Group, key: int, token: int | None) -> None:
        self._pass_on(prefill, key, "lost" if token is None else "filled", token)

    def _on_tokens(self, decoder: Group, tokens: list[tuple[int, int]]) -> None:
        for key, token in tokens:
            self._pass_on(decoder, key, "token", token)

    def _on_lost(self, decoder: Group, key: int) -> None:
        self._pass_on(decoder, key, "lost", "its prefill group was lost")

    def _on_freed(self, decoder: Group, key: int, seconds: float | None, free: int) -> None:
        decoder.free = free
        if seconds is not None:
            self._until_free.observe(seconds)
            self._left += 1
            self._freed.append(seconds)

    def _on_metrics(self, group: Group, texts: list[str]) -> None:
        if group.measured is not None and not group.measured.done():
            group.measured.set_result(texts)

    def _pass_on(self, group: Group, key: int, kind: str, what: Any) -> None:
        if key in group.calls:  # a call that has ended is not there
            group.calls[key].heard.put_nowait((kind, what))

    # ------------------------------------------------------------------------------------------------ requests

    def check(self, prompt: bytes, count: int) -> None:
        """Check the size of a request.

        :raises TooLargeError: the request is too large
        """
        tokens, most = len(prompt) + count, self._shape.context
        for group in self._of("decode"):
            most = min(most, (group.pages - 1) * PAGE)
        if tokens > most:
            raise TooLargeError(
                f"The prompt has {len(prompt)} bytes, and max_tokens is {count}: together at most {most} are taken."
            )

    async def generate(self, prompt: bytes, count: int, client: Client) -> AsyncGenerator[int]:
        """Yield the tokens that continue a prompt. If a group is lost, other groups continue at the same place.

        :raises UnavailableError: the request has no answer, or the answer cannot continue
        """
        if self.stopping or not self.pairs() or self.under_way >= AT_ONCE:
            busy = f"The server has {AT_ONCE} requests already; try again later."
            raise UnavailableError(self.stopping or (busy if self.pairs() else "No decoder is there; one is coming."))
        began, text, attempts = time.monotonic(), bytearray(prompt), 0
        self.under_way += 1
        try:
            while (missing := len(prompt) + count - len(text)) > 0:
                try:
                    with self._call(client) as call:
                        async for token in self._attempt(call, bytes(text), missing):
                            if len(text) == len(prompt):
                                self._first.observe(time.monotonic() - began)
                            text.append(token)
                            self._tokens.inc()
                            yield token
                except LostError as error:
                    attempts += 1
                    await self._wait_for_another(attempts, error)
        finally:
            self.under_way -= 1
            self._tell()

    async def _wait_for_another(self, attempts: int, why: LostError) -> None:
        if attempts == ATTEMPTS:
            raise UnavailableError(f"The request was lost {attempts} times, last because {why}.")
        self._again.inc()
        with anyio.move_on_after(PATIENCE):
            await self.ready()
            return
        raise UnavailableError(f"No decoder has joined within {PATIENCE:g} s.")

    def _call(self, client: Client) -> _Calling:
        prefill, decoder = min(self.pairs(), key=lambda pair: len(pair[1].calls))
        return _Calling(Call(next(self._keys), prefill, decoder), client)

    async def _attempt(self, call: Call, text: bytes, missing: int) -> AsyncGenerator[int]:
        decoder, prefill = call.decoder.channel, call.prefill.channel
        decoder.tell("take", call.key, pages_for(len(text) + missing))
        await call.hear("room")
        if call.prefill.name not in self.groups:
            raise LostError(f"{call.prefill.name} is lost")
        call.filling = True
        prefill.tell("fill", call.key, call.decoder.name, text)
        token = await call.hear("filled")
        call.filling = False
        decoder.tell("go", call.key, call.prefill.name, token, len(text), missing - 1)
        yield token
        for _ in range(missing - 1):
            yield await call.hear("token")

    # ------------------------------------------------------------------------------------------------- the end

    async def drain(self, why: str, patience: float) -> None:
        """Refuse new requests, and wait at most `patience` seconds until running requests have ended."""
        self.stopping = why
        with anyio.move_on_after(patience):
            while self.under_way:
                await self._news.wait()

    def end(self) -> None:
        """Tell all groups to end."""
        for group in self.groups.values():
            group.channel.tell("end")

    async def metrics(self) -> str:
        """Return the metrics of all processes as text for Prometheus."""
        texts = [[self.measures.text()]]
        for group in self.groups.values():
            if group.measured is None or group.measured.done():
                group.measured = asyncio.get_running_loop().create_future()
                group.channel.tell("metrics")
        if wanted := [group.measured for group in self.groups.values() if group.measured is not None]:
            done, _ = await asyncio.wait(wanted, timeout=SCRAPE)
            texts += [each.result() for each in done]
        return merge(chain(*texts))

    def statistics(self) -> dict[str, Any]:
        """Return the numbers for the health check."""
        decoders = {
            group.name: {"sequences": len(group.calls), "pages": group.pages - 1, "pages_free": group.free}
            for group in self._of("decode")
        }
        return {
            "requests": self.under_way,
            "prefill": [group.name for group in self._of("prefill")],
            "decoders": decoders,
            "clients_left": self._left,
            "pages_free_after_ms": [round(1e3 * seconds, 2) for seconds in self._freed],
        }


class _Calling:
    """The context of a call, which is registered at its groups. At the end the groups learn that the call is over."""

    def __init__(self, call: Call, client: Client) -> None:
        self._call, self._client = call, client

    def __enter__(self) -> Call:
        for group in (self._call.prefill, self._call.decoder):
            group.calls[self._call.key] = self._call
        return self._call

    def __exit__(self, *_: object) -> None:
        call = self._call
        for group in (call.prefill, call.decoder):
            del group.calls[call.key]
        if call.filling:
            call.prefill.channel.tell("stop", call.key)
        call.decoder.channel.tell("drop", call.key, self._client.left)
