"""Rollouts by an agent: a session at the gateway, the user's code in a worker, samples at the end.

In: a fresh sample and the engines. Out: the samples of all branches, the last one with the reward.

| the reward is | |
|---|---|
| what the agent returns | if it returns a number |
| what it posted to the session | otherwise |
| the reward function's | if neither is there; it finds the messages in `sample.messages` |

Invariant: when `run` returns or raises, the session is closed, and its agent has ended or was killed.
"""

import asyncio
import json
import logging
import sys
from typing import Any

from fa_rollout.agents.frames import Begin, Ended, Setup
from fa_rollout.agents.pool import AgentWorkers, Running
from fa_rollout.agents.session import MODEL
from fa_rollout.config import Config, ConfigError
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.agents.gateway import Gateway
from fa_rollout.generator.agents.history import History
from fa_rollout.generator.agents.parsing import FORMATS, Parsed, Parser, format_of, parser_of
from fa_rollout.generator.agents.rendering import Rendering
from fa_rollout.generator.agents.session import Session
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.generator.turns.sampling import Params
from fa_rollout.sample import Sample
from fa_rollout.user_code.deadline import Deadline
from fa_rollout.user_code.dotted import resolve
from fa_rollout.user_code.failure import UserCodeFailed, UserCodeTimedOut

logger = logging.getLogger(__name__)

_NUM_RENDERINGS = 64


class AgentRunner:
    """Carries out rollouts; opened once for a life of the generator."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ConfigError: the tokenizer has no chat template, or the parser cannot be used.
        """
        rollout = config.rollout
        self._tokenizer = tokenizer
        self._parser = rollout.agent_parser or format_of(tokenizer.template_text)
        self._own_parser: Parser | None = None
        if self._parser not in FORMATS:
            self._own_parser = _checked_parser(self._parser)
        self._gateway = Gateway(rollout.agent_address, rollout.agent_port or 0, MODEL)
        setup = Setup(agent=rollout.agent, command=rollout.agent_command, sys_path=list(sys.path))
        self._workers = AgentWorkers(setup, rollout.agent_workers)
        self._renderings: dict[str, Rendering] = {}
        if reason := self.rendering(config.data.chat_template_kwargs).extension.reason:
            logger.warning("event=template_not_extended reason=%s; such turns start new samples", reason)

    async def start(self) -> None:
        """Listen, and start the workers.

        Raises:
            ConfigError: the address cannot be used, or the agent cannot be loaded.
        """
        try:
            await self._gateway.start()
        except OSError as error:
            raise ConfigError(
                "rollout.agent_address and agent_port must be an address of this machine that is free: "
                f"{error.strerror or error}"
            ) from error
        await self._workers.start()

    async def aclose(self) -> None:
        """End all agents."""
        await self._workers.aclose()
        await self._gateway.aclose()

    async def run(
        self, context: GenerateContext, deadline: Deadline, sample: Sample, params: Params, row: Row
    ) -> list[Sample]:
        """The samples of one rollout.

        Raises:
            UserCodeFailed: the agent failed, or did nothing for too long.
            SampleFailed: it never asked for an answer.
        """
        sessions: list[Session] = []

        def begin(ticket: int) -> Begin:
            """Also after the death of a worker: the agent starts anew, and so does its session."""
            self._leave(sessions)
            sessions.append(self._session(context, sample, params, row))
            self._gateway.add(sessions[-1])
            session = sessions[-1]
            return Begin(
                ticket=ticket,
                address=self._gateway.address_of(session),
                secret=session.secret,
                row={"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata},
            )

        try:
            ended = await self._to_end(await self._workers.begin(begin), deadline)
        finally:
            self._leave(sessions)
            closed = [await session.close() for session in sessions]
        if ended.failure is not None:
            raise UserCodeFailed(f"agent: {ended.failure}")
        samples = closed[-1]
        if not samples:
            raise SampleFailed("agent: it ended without an answer of the model; nothing can be trained")
        session = sessions[-1]
        samples[-1].reward = session.reward if ended.reward is None else ended.reward
        samples[-1].messages = session.messages
        return samples

    async def _to_end(self, running: Running, deadline: Deadline) -> Ended:
        over = asyncio.Event()
        deadline.start(over.set)
        late: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
        try:
            both: set[asyncio.Future[Any]] = {running.ended, late}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not running.ended.done():
                at = await self._workers.cancel(running)
                raise UserCodeTimedOut(f"agent: timeout: {deadline.rule}{f'; it was at {at}' if at else ''}")
            return running.ended.result()
        finally:
            deadline.stop()
            late.cancel()
            if not running.ended.done():
                self._workers.cancel_soon(running)

    def _leave(self, sessions: list[Session]) -> None:
        for session in sessions:
            self._gateway.remove(session)

    def rendering(self, kwargs: dict[str, Any]) -> Rendering:
        """Of the template with these variables; each is examined once."""
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._renderings:
            if len(self._renderings) >= _NUM_RENDERINGS:
                self._renderings.clear()
            self._renderings[key] = Rendering(self._tokenizer, kwargs)
        return self._renderings[key]

    def _session(self, context: GenerateContext, sample: Sample, params: Params, row: Row) -> Session:
        rendering = self.rendering(row.chat_template_kwargs)
        parse = self._own_parser or parser_of(self._parser, opens_thinking=rendering.opens_thinking)
        return Session(
            engines=context,
            history=History(rendering, sample),
            parse=parse,
            params=params,
            eos_ids=self._tokenizer.eos_ids,
        )


def _checked_parser(path: str) -> Parser:
    """The user's own parser, in the generator's loop.

    Raises:
        ConfigError: there is no such function.
    """
    if ":" not in path and "." not in path:
        raise ConfigError(
            f"rollout.agent_parser must be one of {', '.join(FORMATS)}, or module:function, found {path!r}"
        )
    function = resolve(path, option="rollout.agent_parser")

    def parse(text: str) -> Parsed:
        found = function(text)
        if not isinstance(found, Parsed):
            raise UserCodeFailed(f"agent_parser: {path} must return a Parsed, found {found!r:.200}")
        return found

    return parse
