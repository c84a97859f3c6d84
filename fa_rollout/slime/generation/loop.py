"""The generator under slime: wires its parts together and imports slime while the first requests run.

| who | waits for | unblocked by |
|---|---|---|
| a group | the import of slime | a thread |
| a sample | its answers | the engines, which slime pauses and updates |

The rest of the table is in `fa_rollout.generator.serving`.
Invariant: only slime pauses, continues, updates or relabels the engines; this generator never does.
"""

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config, ConfigError
from fa_rollout.data.tokenizer import eos_ids_in
from fa_rollout.filters import RejectionBound
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import Life
from fa_rollout.generator.serving import ServingGenerator
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.process.own_threads import in_thread
from fa_rollout.slime import upstream
from fa_rollout.slime.arguments import num_engines, shows_samples
from fa_rollout.slime.generation.fast import EarlyStart, FastGenerate
from fa_rollout.slime.generation.group_context import GroupSlots
from fa_rollout.slime.generation.runner import SlimeRunner
from fa_rollout.slime.generation.transport import Transport
from fa_rollout.slime.generation.whole import Whole, WholeGenerate, learn_ends, whole_function
from fa_rollout.slime.options import Options
from fa_rollout.slime.upstream import Upstream
from shm import RingWriter
from trainer_hook import messages as m

_FIRST_WARNING = 16
"""Restarts before the first warning; each further warning comes at twice the number."""


class SlimeGenerator(ServingGenerator):
    """The generator under slime, after its start."""

    def __init__(
        self,
        config: Config,
        args: Any,
        options: Options,
        *,
        directory: str,
        writer: RingWriter,
        resume: m.Resume,
        link: HubLink,
        life: Life,
        pool: EnginePool | None,
        session: aiohttp.ClientSession,
    ) -> None:
        book = VersionBook(lineage=resume.lineage, published=resume.version, follows=True)
        super().__init__(
            config,
            resume=resume,
            link=link,
            life=life,
            book=book,
            writer=writer,
            capacity=config.engine.max_concurrent_samples * max(1, num_engines(args)),
        )
        self._args, self._options = args, options
        self._rollout_id = resume.step
        self._warn_at = _FIRST_WARNING
        self._transport = Transport(
            session, book=book, router=config.engine.urls[0], patience_s=config.trainer.stall_s
        )
        self._ends = Ends(eos_ids_in(args.hf_checkpoint))
        self._slime: asyncio.Future[Upstream] = asyncio.get_running_loop().create_future()
        if pool is not None:
            self._request_by(pool, seed=None, ends=self._ends)
        self._runner = SlimeRunner(
            args=args,
            options=options,
            directory=directory,
            slime=self._slime,
            outbox=self._outbox,
            send=link.send,
            depart=self._dispatcher.depart,
            book=book,
            num_candidates=lambda: self._dispatcher.num_queued + self._dispatcher.num_running,
            early=self._early_start(),
            rejections=_rejection_bound(config, args),
            idle_s=config.idle_timeout_s,
        )

    def _early_start(self) -> EarlyStart | None:
        if self._requester is None:
            return None
        early = EarlyStart(self._args, self._requester)
        return early if early.is_possible else None

    @property
    def _groups(self) -> SlimeRunner:
        return self._runner

    def _services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"slime": self._import_slime()}

    async def _import_slime(self) -> None:
        """Import slime while the first requests run.

        Raises:
            ConfigError: it cannot be imported; a restart would not help.
        """
        try:
            slime = await in_thread(upstream.load)
            await in_thread(slime.http_utils.init_http_client, self._args)
        except ImportError as error:
            raise ConfigError(f"slime must be importable where the rollout manager runs: {error}") from error
        state = await in_thread(slime.sglang_rollout.GenerateState, self._args)
        self._set_up(slime, state.tokenizer)
        slime.sglang_rollout.GenerateState(self._args).semaphore = GroupSlots()
        # torch and transformers are never freed: keep the collector from walking their million objects.
        gc.freeze()
        gc.set_threshold(20_000, 10, 1_000)  # samples and their traces are many small objects without cycles
        self._slime.set_result(slime)

    def _set_up(self, slime: Upstream, tokenizer: Any) -> None:
        """Replace slime's client by ours."""
        slime.http_utils._post = self._transport.post
        learn_ends(self._ends, tokenizer)
        whole = Whole(slime, tokenizer, self._ends)
        if self._requester is None:
            slime.sglang_rollout.generate = WholeGenerate(slime.sglang_rollout.generate, whole)
        else:
            arrays = self._options.arrays or not shows_samples(self._args)
            slime.sglang_rollout.generate = FastGenerate(slime, self._requester, whole, arrays=arrays)
        slime.sglang_rollout.load_function = self._loader(slime, whole)
        slime.sample_hooks.set_current_rollout_id(self._rollout_id)

    def _loader(self, slime: Upstream, whole: Whole) -> Callable[[str], Any]:
        """Replaces slime's `load_function` in its rollouts: wraps generate functions in `whole_function`."""

        def load(path: str) -> Any:
            function = slime.load_function(path)
            is_own = path == self._args.custom_generate_function_path
            is_generate = is_own or "sampling_params" in inspect.signature(function).parameters
            return whole_function(function, whole) if is_generate else function

        return load

    def _handle(self, message: m.Message, services: asyncio.TaskGroup) -> bool:
        match message:
            case m.Start():
                self._runner.stock(message.groups, message.payloads)
                self._dispatcher.add(message.groups)
            case m.Announce():
                self._announced(message)
            case _:
                return False
        return True

    def _announced(self, message: m.Announce) -> None:
        self._rollout_id = message.step
        self._book.confirm(max(self._book.published, message.held))
        if self._slime.done():
            self._slime.result().sample_hooks.set_current_rollout_id(message.step)

    def figures(self) -> m.Pulse:
        """This generator's counters; warns when many answers were thrown away."""
        figures = super().figures()
        num_restarts = figures.restarts + self._runner.num_restarts
        if num_restarts >= self._warn_at:
            self._warn_of_restarts(num_restarts, num_restarts + self._runner.num_samples)
        return figures

    def _warn_of_restarts(self, num_restarts: int, num_answers: int) -> None:
        """Without `--partial-rollout`, each update throws away the answers that it interrupts."""
        self._warn_at = 2 * num_restarts
        text = (
            f"{num_restarts} of {num_answers} answers ({num_restarts / num_answers:.0%}) were interrupted by "
            "a weight update and thrown away, because they take longer than the time between two updates; "
            "set --partial-rollout to continue them from the tokens they have"
        )
        self._link.send(m.Warned(text=text))


def _rejection_bound(config: Config, args: Any) -> RejectionBound:
    assert config.rollout.max_rejections is not None, "the manager has set it"
    name = args.dynamic_sampling_filter_path or ""
    return RejectionBound(name, config.rollout.max_rejections, option="fa_rollout_max_rejections")
