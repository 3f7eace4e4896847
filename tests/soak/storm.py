"""The storm: many clients at once, in rounds, with a look at the server when each has passed."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc
from tests.soak import http
from tests.soak.calls import ACTIONS, Action, Client, channel_to
from tests.soak.cases import Answer, Case, make_cases
from tests.soak.server import Served

CLIENTS = 64
CHANNELS = 4
CALL_LIMIT_S = 60.0
SETTLE_LIMIT_S = 20.0
NUM_STREAMS = 2000
GROWTH_LIMIT = 1.05  # of memory, over what it was after warm-up
SPARE_FILES = 4
CLOSE_PATIENCE = 30  # tenths of a second


@dataclass
class Look:
    """The server at rest after a round. over: requests that it has ended, by reason."""

    rss_bytes: int
    num_files: int
    num_threads: int
    over: dict[str, int]

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes / 2**20:.0f} MiB, {self.num_files} files, {self.num_threads} threads"
        )


@dataclass
class Storm:
    """tally: calls by how they ended; problems: what must not be."""

    served: Served
    seed: int
    tally: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cases: list[Case] = make_cases(self.seed)
        self.answers: dict[int, Answer] = {}
        self._draw = random.Random(self.seed + 1)

    @property
    def num_calls(self) -> int:
        return sum(self.tally.values())

    async def learn(self) -> None:
        """What each case says alone, one after the other."""
        async with channel_to(self.served.grpc_port) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)
            for case in self.cases:
                messages = [message async for message in stub.Generate(case.message())]
                tokens = tuple(i for message in messages for i in message.token_ids)
                text = "".join(message.text for message in messages)
                self.answers[case.number] = Answer(tokens, text)

    async def round(self, seconds: float) -> None:
        """Storm, then calm; then nothing may be left."""
        ends_s = time.monotonic() + seconds
        channels = [channel_to(self.served.grpc_port) for _ in range(CHANNELS)]
        clients = [self._client(channels) for _ in range(CLIENTS)]
        await asyncio.gather(*(self._run(client, ends_s) for client in clients))
        for channel in channels:
            await channel.close()
        await self.settle()

    async def many_streams(self) -> None:
        """NUM_STREAMS at once, all of them whole and right."""
        case = self.cases[0]
        channels = [channel_to(self.served.grpc_port) for _ in range(CHANNELS)]
        client = self._client(channels)
        expected = self.answers[case.number].token_ids

        async def one(number: int) -> None:
            stub: Any = pb_grpc.InferenceStub(channels[number % CHANNELS])
            tokens: list[int] = []
            async for message in stub.Generate(case.message()):
                tokens += message.token_ids
            client.check(case, tuple(tokens), expected)
            self.tally["whole, of 2,000 at once"] += 1

        outcomes = await asyncio.gather(
            *(one(number) for number in range(NUM_STREAMS)), return_exceptions=True
        )
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            self.problems.append(f"{len(failed)} of {NUM_STREAMS} streams: {failed[0]!r}")
        for channel in channels:
            await channel.close()
        await self.settle()

    def _client(self, channels: list[grpc.aio.Channel]) -> Client:
        draw = random.Random(self._draw.getrandbits(64))
        ports = self.served.grpc_port, self.served.http_port
        return Client(*ports, channels, self.cases, self.answers, draw)

    async def _run(self, client: Client, ends_s: float) -> None:
        client.num_ids = client.draw.getrandbits(60)  # nobody else's
        actions, weights = list(ACTIONS), list(ACTIONS.values())
        while time.monotonic() < ends_s:
            await self._call(client.draw.choices(actions, weights)[0], client)

    async def _call(self, action: Action, client: Client) -> None:
        name = action.__name__
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                self.tally[await action(client)] += 1
        except TimeoutError:
            self.problems.append(f"{name}: no end after {CALL_LIMIT_S:g} s")
        except Exception as error:
            self.problems.append(f"{name}: {error!r}")

    async def settle(self) -> None:
        """Waits until the server is at rest, and looks at it. Requests, pages, connections: where
        something stays, that is a problem."""
        gc.collect()  # a connection is closed when the last of its calls is no more
        left = "nothing was seen"
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        async with channel_to(self.served.grpc_port) as channel:
            while (left := await self._left(channel)) and time.monotonic() < deadline_s:
                await asyncio.sleep(0.1)
        if left:
            self.problems.append(f"left behind: {left}")
        over, served = await self._over(), self.served
        for _ in range(CLOSE_PATIENCE):  # connections that were cut a moment ago
            if not self.looks or served.num_files <= self.looks[-1].num_files:
                break
            await asyncio.sleep(0.1)
        self.looks.append(Look(served.rss_bytes, served.num_files, served.num_threads, over))

    async def _left(self, channel: grpc.aio.Channel) -> str:
        """What requests still hold; empty if nothing."""
        stub: Any = pb_grpc.InferenceStub(channel)
        load = await stub.GetLoad(pb.GetLoadRequest())
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        if answer.status != health_pb2.HealthCheckResponse.SERVING or not load.accepting:
            return "a server that does not serve"
        parts = []
        if load.num_waiting or load.num_prefilling or any(g.num_decodes for g in load.groups):
            parts.append(f"requests {load}")
        if any(group.free_pages != group.num_pages for group in load.groups):
            parts.append("pages")
        return ", ".join(parts)

    async def _over(self) -> dict[str, int]:
        """Requests that have ended, by reason, by the server's own count."""
        _, text = await http.get(self.served.http_port, "/metrics")
        over = {}
        for line in text.decode().splitlines():
            if line.startswith("vllm:request_success_total{"):
                labels, _, count = line.rpartition(" ")
                over[labels.partition('finished_reason="')[2].partition('"')[0]] = int(float(count))
        return over

    def judge(self, num_warm: int) -> None:
        """Memory, files and threads at the end, against those after `num_warm` rounds."""
        warm, last = self.looks[num_warm - 1], self.looks[-1]
        if last.rss_bytes > GROWTH_LIMIT * warm.rss_bytes:
            self.problems.append(f"memory grew: {warm}, then {last}")
        if last.num_files > warm.num_files + SPARE_FILES:
            self.problems.append(f"files were left open: {warm}, then {last}")
        if last.num_threads > warm.num_threads + SPARE_FILES:
            self.problems.append(f"threads grew: {warm}, then {last}")
        if last.over.get("error"):
            self.problems.append(f"requests ended with an error: {last.over}")
