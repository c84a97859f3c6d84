"""A whole run on a virtual clock, without processes or sockets: the real hub and the real generator.

Only engines, prompts, tokenizer and rewards are models. What the two say to one another goes through the wire
format; messages to the hub arrive when the run is stepped, so that a death can come between.
"""

import asyncio
import selectors
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from fa_rollout.client.base.errors import RequestRefused
from fa_rollout.client.base.patience import Patience, Trouble
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.wire.completion import Completion, empty_abort
from fa_rollout.config import Config, from_dict
from fa_rollout.data.row import Row
from fa_rollout.filters import GroupFilter
from fa_rollout.generator.base.life import End
from fa_rollout.generator.generator import Generator
from fa_rollout.generator.startup import Parts
from fa_rollout.hub.hub import Hub
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.state.world import Attachment
from fa_rollout.rewards.call import Shape
from fa_rollout.rewards.loop import LoopScorer
from fa_rollout.rewards.outcomes import FailureReason, RewardFailed, RewardOutcome, Scored
from fa_rollout.sample import Sample
from fa_rollout.user_code.loop import HardenedLoop
from shm import Descriptor, RingReader, RingTable
from shm.ring.segment import Segment
from trainer_hook import messages as m
from trainer_hook.batches.group import Group
from trainer_hook.record import run_number, schema_fingerprint

RUN = "virtual"
NUM_PROMPTS = 13
BUDGET = 8


class VirtualLoop(HardenedLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Jump(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Jump())

    def time(self) -> float:
        return self.now_s


class Flight:
    """One request at an engine."""

    def __init__(self, rid: str, input_ids: np.ndarray, budget: int) -> None:
        self.rid = rid
        self.input_ids = input_ids
        self.budget = budget
        self.spans: list[tuple[str | None, int]] = []
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def group(self) -> int:
        return int(self.rid[1:].split(".")[0])

    @property
    def num_made(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    def make(self, num_tokens: int, label: str) -> None:
        """Sample further tokens under a version, as far as the budget goes."""
        end = min(self.budget, self.num_made + num_tokens)
        if end > self.num_made:
            self.spans.append((label, end))

    def land(self, finish: str) -> None:
        """Come back with what was made."""
        if self.answer.done():
            return
        start, end = len(self.input_ids), len(self.input_ids) + self.num_made
        finish = "length" if self.num_made == self.budget else finish
        prompt = int(self.input_ids[0])
        self.answer.set_result(
            Completion(
                output_ids=true_ids(prompt, start, end),
                logprobs=np.concatenate([np.empty(0, np.float32), *self._logprobs()]),
                finish=finish,
                versions=tuple(self.spans),
                has_spans=True,
            )
        )

    def _logprobs(self) -> Iterable[np.ndarray]:
        begin = 0
        for label, end in self.spans:
            yield np.full(end - begin, true_logprob(str(label)), np.float32)
            begin = end


def true_ids(prompt: int, start: int, end: int) -> np.ndarray:
    """What engines sample at these positions behind a prompt."""
    return ((prompt * 31 + np.arange(start, end)) % 97).astype(np.int32)


def true_logprob(label: str) -> float:
    return -float(zlib.crc32(label.encode()) % 1000) / 1024


class _NoStreams:
    """Weights come by files here."""

    async def abandon(self, label: str) -> None: ...

    async def supersede(self) -> None: ...


class VirtualEngines:
    """What `EnginePool` is to the generator."""

    context_length: int | None = None
    policy = FailurePolicy()

    def __init__(self, capacity: int) -> None:
        self.label = "default"
        self.weights = self
        self.streams = _NoStreams()
        self.flights: dict[str, Flight] = {}
        self.engines = (
            EngineInfo(
                url="http://virtual",
                version_label=None,
                has_spans=True,
                model_path=None,
                server_version=None,
                vocab_size=None,
            ),
        )
        self.capacity = 2 * capacity
        self.patience = Patience(600.0)

    def bear(self, trouble: Trouble | None, text: str) -> Trouble:
        return self.patience.met(trouble, asyncio.get_running_loop().time())

    async def generate(self, *, rid: str, input_ids: Any, sampling_params: Any, **_: Any) -> Completion:
        flight = self.flights[rid] = Flight(rid, np.asarray(input_ids), sampling_params["max_new_tokens"])
        try:
            return await flight.answer
        finally:
            del self.flights[rid]

    async def abort(self, rids: Iterable[str]) -> None:
        for rid in rids:
            flight = self.flights.get(rid)
            if flight is not None:
                flight.make(zlib.crc32(rid.encode()) % 3, self.label)
                self.land(flight, "abort")

    def land(self, flight: Flight, finish: str) -> None:
        """An answer; one without a token is an abort from the queue."""
        if not flight.num_made and not flight.answer.done():
            flight.answer.set_result(empty_abort())
        flight.land(finish)

    async def pause(self, mode: str, *, may_be_none: bool = False) -> None:
        await asyncio.sleep(0.1)

    async def continue_(self) -> None:
        await asyncio.sleep(0.1)

    async def set_label(self, label: str) -> None:
        for flight in self.flights.values():
            flight.make(flight.num_made == 0 and flight.budget > 1, self.label)
        self.label = label

    async def load(self, path: str, label: str, **_: Any) -> None:
        await self.set_label(label)

    async def check_score(self, scored: m.Scored | None) -> None:
        pass

    async def until_taken(self) -> None:
        await asyncio.Event().wait()

    def recheck(self) -> bool:
        raise AssertionError("every version here is known")


class _Prompts:
    def __len__(self) -> int:
        return NUM_PROMPTS

    def row(self, index: int) -> Row:
        return Row(prompt=f"prompt {index}", label=index, metadata={}, tools=None)


class _Tokenizer:
    eos_ids = ()

    def encode_prompt(self, row: Row, *, chat_template: bool | None) -> np.ndarray:
        return np.array([row.label, 1, 2], np.int32)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


class _Rewards:
    """Takes a while, and fails for attempts of every fifth group."""

    patience = Patience(600.0)

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        await asyncio.sleep(0.5)
        return [
            RewardFailed(reason=FailureReason.RAISED, text="no verdict")
            if (sample.group, sample.attempt % 2) == (sample.group // 5 * 5, 1)
            else Scored(value=float(sample.member))
            for sample in samples
        ]


class _UsersRewards(LoopScorer):
    """The real scorer of async functions."""

    patience = Patience(600.0)

    def __init__(self, function: Any) -> None:
        super().__init__(function, Shape(group=False, key=None), timeout_s=5.0)


def _keep(samples: list[Sample]) -> bool:
    return samples[0].group % 7 != 3


class _Link:
    """Both ends of the channel: what the generator sent waits here until the run is stepped."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()
        self.inbox: asyncio.Queue[m.Message] = asyncio.Queue()

    def send(self, message: m.Message) -> None:
        self.sent.append(m.encode(message))

    async def receive(self) -> m.Message:
        return await self.inbox.get()

    async def flushed(self) -> None:
        pass


class _Life:
    def __init__(self) -> None:
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    async def ended(self) -> End:
        return await self.end


class VirtualRun:
    """Hub, generator and one rank; also the hub's outbox."""

    def __init__(
        self, folder: Path, *, ring_bytes: int = 32 << 10, user_code: Any = None, **rollout: Any
    ) -> None:
        """`user_code`: has `generate`, `reward` and `keep`, in place of well-behaved models of them."""
        self.loop = VirtualLoop()
        self._user_code = user_code
        self.config = _config(ring_bytes, rollout)
        self.segment = Segment.create(ring_bytes, prefault=False)
        self.table = RingTable(self.segment.size_bytes)
        self.reader = RingReader(self.segment, run=run_number(RUN), schema=schema_fingerprint())
        self.engines = VirtualEngines(self.config.engine.max_concurrent_samples)
        self.answers: list[tuple[int, int, int]] = []
        """(life, group, attempt) of every commit and settlement."""
        self.failure: str | None = None
        self.to_rank_box: dict[int, m.Message] = {}
        self._link: _Link | None = None
        self.hub = Hub(
            self.config,
            run=RUN,
            directory=folder,
            table=self.table,
            outbox=self,
            log=EventLog(None),
        )
        hello = m.Hello(protocol=m.PROTOCOL, run=RUN, token="", role="rank", pid=0, schema=0)
        rank = self.hub.ranks.hello(hello, None)
        assert isinstance(rank, Attachment)
        self.rank = rank
        self.num_lives = 0
        self.begin_life()

    # --- the hub's outbox -----------------------------------------------------------------------------

    def to_rank(self, rank: Attachment, message: m.Message) -> None:
        message = m.decode(m.encode(message))
        self.to_rank_box[getattr(message, "request", 0)] = message

    def to_generator(self, message: m.Message) -> None:
        if self._link is not None:
            self._link.inbox.put_nowait(m.decode(m.encode(message)))

    def to_launcher(self, message: m.Message) -> None:
        pass

    def end(self, exit_code: int, text: str) -> None:
        self.failure = text

    # --- the generator's lives ------------------------------------------------------------------------

    def begin_life(self) -> None:
        """A generator starts, as the hub's server would have it."""
        self.num_lives += 1
        resume = self.hub.generator.resume_message()

        async def start() -> None:
            self._link, self._life = _Link(), _Life()
            generator = Generator(
                self.config,
                cast(Any, self._parts()),
                run=RUN,
                resume=resume,
                link=cast(Any, self._link),
                life=cast(Any, self._life),
            )
            self.serving = asyncio.ensure_future(generator.serve())
            await self.engines.set_label(f"{resume.lineage}:{resume.version}")

        self.loop.run_until_complete(start())
        self.step()

    def _parts(self) -> Parts:
        code = self._user_code
        return Parts(
            segment=self.segment,
            source=cast(Any, _Prompts()),
            tokenizer=cast(Any, _Tokenizer()),
            rewards=cast(Any, _Rewards() if code is None else _UsersRewards(code.reward)),
            group_filter=GroupFilter("keep", _keep if code is None else code.keep),
            generate=None if code is None else code.generate,
            pool=cast(Any, self.engines),
        )

    def kill_generator(self) -> None:
        """It dies: what it sent is read, then its successor begins."""
        assert self._link is not None
        link, self._link = self._link, None
        sent = list(link.sent)
        self.serving.cancel()
        self._run_until_ended()
        self._deliver(sent)
        self._replace("by signal SIGKILL")

    def retire_generator(self) -> None:
        """It is asked to end in order; every group comes back."""
        assert self._link is not None
        self._life.end.set_result(End(reason="retired", grace_s=4.0, exit_code=0))
        self._run_until_ended()
        link, self._link = self._link, None
        self._deliver(link.sent)
        self._replace("with exit code 0")

    def _run_until_ended(self) -> None:
        self.loop.run_until_complete(asyncio.wait([self.serving]))
        if not self.serving.cancelled():
            self.serving.result()

    def _replace(self, how: str) -> None:
        self.hub.generator.gone(how, will_restart=True)
        assert not self.engines.flights, "requests outlive the generator that sent them"
        self.hub.advance()
        self.begin_life()

    # --- time -----------------------------------------------------------------------------------------

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and all that was said arrive."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for _ in range(12):
            self.loop.run_until_complete(_turns(12))
            assert self._link is not None
            sent, self._link.sent = list(self._link.sent), deque()
            self._deliver(sent)
            if not sent:
                return

    def _deliver(self, sent: Iterable[bytes]) -> None:
        for payload in sent:
            message = m.decode(payload)
            if isinstance(message, m.Commit | m.Settled):
                self.answers.append((self.num_lives, message.group, message.attempt))
            self.hub.generator.receive(message)
        self.hub.advance()

    # --- engines and rank -------------------------------------------------------------------------------

    def flight(self, pick: int) -> Flight | None:
        """One of the requests under way, by age of their groups."""
        flights = sorted(self.engines.flights.values(), key=lambda flight: (flight.group, flight.rid))
        return flights[pick % len(flights)] if flights else None

    def refuse(self, flight: Flight) -> None:
        """The engine refuses a request for good."""
        if not flight.answer.done():
            flight.answer.set_exception(RequestRefused(f"400 for {flight.rid}"))

    def say(self, message: m.Message) -> None:
        """The rank speaks."""
        self.hub.ranks.from_rank(self.rank, m.decode(m.encode(message)))
        self.hub.advance()

    def read(self, handout: m.Handout) -> Group:
        """A record of a batch, copied out of the ring."""
        descriptor = Descriptor(handout.incarnation, handout.sequence, handout.position, handout.length)
        return Group(self.reader.open(descriptor, copy=True), keep=True)

    def close(self) -> None:
        """No task, no memory is left."""
        self.serving.cancel()
        self._run_until_ended()
        self.loop.run_until_complete(self.loop.finish())
        self.loop.close()
        self.segment.close()


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _config(ring_bytes: int, rollout: dict[str, Any]) -> Config:
    return from_dict(
        {
            "data": {"path": "virtual", "seed": 3},
            "reward": {"function": "virtual.reward"},
            "engine": {"urls": ["http://virtual"], "max_concurrent_samples": 6},
            "sampling": {"max_new_tokens": BUDGET},
            "ring": {"bytes": ring_bytes},
            "rollout": {
                "num_steps": 8,
                "groups_per_step": 2,
                "samples_per_group": 2,
                "max_failure_rate": 1.0,
                "max_rejections": 1000,
            }
            | rollout,
        }
    )
