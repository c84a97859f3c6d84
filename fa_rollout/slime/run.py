"""One training's rollouts, as slime's rollout manager holds them: launcher of the hub and only rank of the run.

| who | waits for | at most | unblocked by |
|---|---|---|---|
| the manager, in a call | a batch | `fa_rollout_stall_s` | `Batch`, an error, the hub's death |
| the hub | prompts | | `Feed`, at any moment of a call |

Invariant: prompts are taken from the data source on the calling thread alone, so that they cannot race with
slime's saves; hub and generator end with this process, however it ends.
"""

import atexit
import logging
import os
import pickle
import select
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from fa_rollout.hub.plugin import Plugin
from fa_rollout.launcher.hub_process import RunNames, start_hub
from fa_rollout.launcher.rundir import RunDirectory
from fa_rollout.slime import sidecar, upstream
from fa_rollout.slime.arguments import check_arguments, config_tree, num_rollouts, update_interval
from fa_rollout.slime.options import Options
from fa_rollout.slime.prompts import Prompts, Stock
from fa_rollout.slime.samples import rebuild
from fa_rollout.slime.versions import VersionClock
from fa_rollout.slime.wire import Setup
from shm.errors import ChannelError
from trainer_hook import messages as m
from trainer_hook.errors import HubLost
from trainer_hook.hook import TrainerHook

logger = logging.getLogger(__name__)

GENERATOR = "fa_rollout.slime.generator"
START_DEADLINE_S = 60.0
_TICK_S = 1.0
_PAYLOAD_DEADLINE_S = 30.0
_GRACE_S = 2.0


class Run:
    """The rollouts of one life of the trainer."""

    def __init__(self, args: Any, options: Options, data_source: Any, first_step: int) -> None:
        check_arguments(args)
        self.args = args
        self.options = options
        self.pid = os.getpid()
        self._data_source = data_source
        self._clock = VersionClock(first_step=first_step, interval=update_interval(args))
        self._first_step = first_step
        self._tokenizer: Any = None
        self._prompts = Prompts(
            data_source,
            encode_ids=self._encode_ids,
            first=sidecar.undelivered(args.load, first_step, sidecar.position_of(data_source)),
        )
        filters = args.dynamic_sampling_filter_path is not None
        self._stock = Stock(int(args.over_sampling_batch_size or args.rollout_batch_size) if filters else 0)
        self._wanted = 0
        self._payloads: dict[tuple[int, int], bytes] = {}
        self._departed: list[m.Departed] = []
        self._ended: m.RunEnded | None = None
        num_steps = num_rollouts(args, data_source) - first_step
        self._start(config_tree(args, options, num_steps=num_steps))

    # --- start and end ----------------------------------------------------------------------------

    def _start(self, tree: dict[str, Any]) -> None:
        if self.options.log_dir is not None:
            os.makedirs(self.options.log_dir, exist_ok=True)
        self._directory = RunDirectory.create()
        atexit.register(self.close)
        setup = Setup(
            args=pickle.dumps(self.args, pickle.HIGHEST_PROTOCOL),
            options=msgspec.to_builtins(self.options),
            directory=str(self._directory.path),
        )
        names = RunNames()
        self._hub, self._channel = start_hub(
            tree,
            names,
            self._directory,
            plugin=Plugin(module=GENERATOR, payload=msgspec.msgpack.encode(setup)),
            environment={"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self._ready: m.HubReady | None = None
        deadline_s = time.monotonic() + START_DEADLINE_S
        while self._ready is None:
            self._hear()
            if self._ended is not None or self._hub.exit_code is not None:
                raise HubLost(
                    f"the hub must start: {self._ended.text if self._ended else 'it died; see its log'}"
                )
            if time.monotonic() > deadline_s:
                raise HubLost(f"the hub must be ready within {START_DEADLINE_S:.0f} s; see its log")
            self._wait(_TICK_S)
        self._hook = TrainerHook.attach(
            address=self._ready.address, run=names.run, token=names.token, dp_rank=0, dp_size=1
        )

    def close(self) -> None:
        """End hub and generator; idempotent, and nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        atexit.unregister(self.close)
        if hasattr(self, "_hook"):
            self._hook.close()
        if not self._channel.is_closed:
            self._channel.queue(m.encode(m.Stop(grace_s=_GRACE_S, reason="the training ends")), urgent=True)
            self._channel.flush()
            deadline_s = time.monotonic() + 2 * _GRACE_S
            while self._hub.exit_code is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
            self._channel.close()
        self._hub.end()
        self._directory.close()

    # --- one call ---------------------------------------------------------------------------------

    def step(self, rollout_id: int) -> tuple[list[Any], list[m.Departed], dict[str, Any]]:
        """The groups of a rollout, in the data's order; groups that ended otherwise since the last call; figures.

        Raises:
            GeneratorFailed: with the traceback of what ended the run.
            HubLost, Stalled, EndOfData: as `TrainerHook.next_batch` does.
        """
        self._stock.next_call()
        self._send(
            m.Announce(
                step=rollout_id,
                version=self._clock.trained_by(rollout_id) - 1,  # the hub's bound is one less, too
                held=self._clock.held_at(rollout_id),
            )
        )
        started_s = time.monotonic()
        while not self._hook.is_batch_ready():
            self._hear()
            self._feed()
            self._wait(_TICK_S)
        waited_s = time.monotonic() - started_s
        with self._hook.next_batch() as batch:
            records: dict[tuple[int, int], list[Any]] = {}
            for sample in batch.samples:
                records.setdefault((sample.group, sample.attempt), []).append(sample)
            groups = [
                rebuild(self._payload(key), records[key], arrays=self.options.arrays)
                for key in sorted(records)
            ]
            newest = max(span.version for s in batch.samples for span in s.version_spans)
            figures = {
                "fa_rollout/wait_s": waited_s,
                "fa_rollout/staleness": self._staleness(rollout_id, batch),
            }
        if self._clock.saw(newest, rollout_id):
            logger.warning("event=versions_ahead newest=%d rollout_id=%d", newest, rollout_id)
        delivered = [self._prompts.settle(group) for group, _ in sorted(records)]
        self._write_sidecar(rollout_id, delivered)
        self._feed()
        departed, self._departed = self._departed, []
        return groups, departed, figures | _reasons(departed)

    def _staleness(self, rollout_id: int, batch: Any) -> float:
        versions = [span.version for sample in batch.samples for span in sample.version_spans]
        return float(self._clock.trained_by(rollout_id) - min(versions))

    def _payload(self, key: tuple[int, int]) -> bytes:
        """What came along with a record; it was sent before the batch, over another socket."""
        deadline_s = time.monotonic() + _PAYLOAD_DEADLINE_S
        while key not in self._payloads:
            if time.monotonic() > deadline_s:
                raise HubLost(
                    f"the rest of group {key[0]}, attempt {key[1]} must come with its record; it did not"
                )
            self._wait(0.05)
            self._hear()
        return self._payloads.pop(key)

    def _write_sidecar(self, rollout_id: int, delivered: list[bytes]) -> None:
        if self.args.save is None:
            return
        sidecar.write(
            self.args.save,
            rollout_id,
            sidecar.Sidecar(
                position=sidecar.position_of(self._data_source),
                delivered=delivered,
                outstanding=self._prompts.outstanding(),
                lineage=self._hook.lineage,
            ),
        )

    # --- prompts ----------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give the hub the prompts that it can use, and the stock."""
        missing = self._wanted + self._stock.size - self._prompts.num_taken
        if self._wanted and missing > 0:
            payloads = self._prompts.take(missing)
            if payloads:
                self._send(m.Feed(payloads=payloads))

    def _encode_ids(self, group: list[Any]) -> list[int]:
        first = group[0]
        shared = all(s.prompt == first.prompt and not s.tokens and not s.multimodal_inputs for s in group)
        if not shared or not isinstance(first.prompt, str):
            return []
        if self._tokenizer is None:
            self._tokenizer = upstream.load_tokenizer(self.args)
        ids: list[int] = self._tokenizer.encode(first.prompt, add_special_tokens=False)
        return ids

    # --- the hub ----------------------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        self._channel.queue(m.encode(message))
        self._channel.flush()

    def _hear(self) -> None:
        try:
            self._channel.flush()
            for payload in self._channel.read_ready():
                self._take(m.decode(payload))
        except ChannelError as error:
            # A hint only: the hook's connection tells of the hub's end, with its reason.
            logger.debug("hub_channel=closed reason=%s", error)

    def _take(self, message: m.Message) -> None:
        match message:
            case m.HubReady():
                self._ready = message
            case m.Wanted():
                self._wanted = message.num_groups
            case m.Enclosed():
                self._payloads[message.group, message.attempt] = message.payload
            case m.Departed():
                self._prompts.settle(message.group)
                self._departed.append(message)
                if message.outcome is m.Settlement.FILTERED:
                    self._stock.rejected()
            case m.RunEnded():
                self._ended = message

    def _wait(self, timeout_s: float) -> None:
        """Until the hub has said something, on either socket, or has ended."""
        poll = select.poll()
        poll.register(
            self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0)
        )
        if hasattr(self, "_hook"):
            poll.register(self._hook.fileno(), select.POLLIN)
        if self._hub.pidfd >= 0:
            poll.register(self._hub.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)


def _reasons(departed: list[m.Departed]) -> dict[str, int]:
    """Filtered groups by reason, under slime's own names."""
    reasons = Counter(d.reason for d in departed if d.outcome is m.Settlement.FILTERED and d.reason)
    return {f"rollout/dynamic_filter/drop_{reason}": number for reason, number in reasons.items()}
