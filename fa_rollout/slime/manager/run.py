"""The rollouts of one training run, in slime's rollout manager.

| who | waits for | at most | unblocked by |
|---|---|---|---|
| the manager, in a call | a batch | `fa_rollout_stall_s` | `Batch`, an error, the hub's exit |
| the hub | prompts | | `Feed`, at any time during a call |

Invariant: prompts are taken from the data source on the calling thread only, so they cannot race with slime's
saves. Every prompt taken is delivered once, reported as filtered, or kept for the next start.
"""

import logging
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fa_rollout.config import from_dict, to_dict
from fa_rollout.hub.io.plugin import Plugin
from fa_rollout.launcher.output import OutputFolder
from fa_rollout.launcher.rundir import RunDirectory
from fa_rollout.slime import upstream
from fa_rollout.slime.arguments import check_arguments, config_tree, num_rollouts, update_interval
from fa_rollout.slime.manager import prompt_checkpoint
from fa_rollout.slime.manager.hub import HubChild
from fa_rollout.slime.manager.prompts import Prompts, Stock
from fa_rollout.slime.manager.samples import rebuild
from fa_rollout.slime.manager.versions import VersionClock
from fa_rollout.slime.options import Options
from fa_rollout.slime.wire import SlimeSetup, flatten
from trainer_hook import messages as m
from trainer_hook.batches.batch import Batch
from trainer_hook.errors import HubLost

logger = logging.getLogger(__name__)

GENERATOR = "fa_rollout.slime.generation.generator"
_TICK_S = 1.0
_PAYLOAD_DEADLINE_S = 30.0

Key = tuple[int, int]
"""(group, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeRollout:
    """The result of one call."""

    groups: list[Any]
    """Lists of samples, or of lists of samples after a fan-out; sorted by sample index."""
    departed: list[m.Departed]
    """Groups that ended without being delivered since the last call."""
    figures: dict[str, float]


class SlimeRun:
    """The rollouts from one start of the trainer to its exit."""

    def __init__(self, args: Any, options: Options, data_source: Any, first_step: int) -> None:
        """
        Raises:
            ConfigError: slime's arguments are not supported.
            HubLost: the hub did not start.
        """
        check_arguments(args)
        self.args = args
        self._options = options
        self._data_source = data_source
        self._clock = VersionClock(first_step=first_step, interval=update_interval(args))
        self._tokenizer: Any = None
        kept = prompt_checkpoint.undelivered(
            args.load, first_step, prompt_checkpoint.position_of(data_source)
        )
        self._prompts = Prompts(data_source, encode_ids=self._encode_ids, first=kept)
        has_filter = args.dynamic_sampling_filter_path is not None
        oversampling = int(args.over_sampling_batch_size or args.rollout_batch_size)
        self._stock = Stock(oversampling if has_filter else 0)
        self._wanted = 0
        self._payloads: dict[Key, bytes] = {}
        self._departed: list[m.Departed] = []
        num_steps = num_rollouts(args, data_source) - first_step
        num_prompts = len(data_source) if hasattr(data_source, "__len__") else 0
        self._hub = self._start(config_tree(args, options, num_steps=num_steps, num_prompts=num_prompts))

    def _start(self, tree: dict[str, Any]) -> HubChild:
        tree = to_dict(from_dict(tree))
        output = OutputFolder.open(tree["run"]["output_dir"])
        directory = RunDirectory.create()
        setup = SlimeSetup(
            args=pickle.dumps(self.args, pickle.HIGHEST_PROTOCOL),
            options=msgspec.to_builtins(self._options),
            directory=str(directory.path),
        )
        plugin = Plugin(module=GENERATOR, payload=msgspec.msgpack.encode(setup))
        return HubChild(tree, plugin, directory, output)

    def close(self) -> None:
        """End hub and generator; idempotent."""
        self._hub.close()

    # --- one call ---------------------------------------------------------------------------------

    def step(self, rollout_id: int) -> SlimeRollout:
        """The groups of a rollout.

        Raises:
            GeneratorFailed: with the traceback of the error that ended the run.
            HubLost, Stalled, EndOfData: as `TrainerHook.next_batch` does.
        """
        self._stock.next_call()
        self._announce(rollout_id)
        started_s = time.monotonic()
        while not self._hub.hook.is_batch_ready():
            self._read()
            self._feed()
            self._hub.wait(_TICK_S)
        waited_s = time.monotonic() - started_s
        with self._hub.hook.next_batch() as batch:
            keys, groups = self._take(batch)
            figures = self._figures(rollout_id, batch) | {"fa_rollout/wait_s": waited_s}
        delivered = [self._prompts.settle(group) for group, _ in keys]
        self._write_checkpoint(rollout_id, delivered)
        departed, self._departed = self._departed, []
        return SlimeRollout(groups=groups, departed=departed, figures=figures | _reasons(departed))

    def _announce(self, rollout_id: int) -> None:
        self._hub.send(
            m.Announce(
                step=rollout_id,
                version=self._clock.trained_by(rollout_id) - 1,  # the hub's staleness limit is one less, too
                held=self._clock.held_at(rollout_id),
            )
        )

    def _take(self, batch: Batch) -> tuple[list[Key], list[Any]]:
        records: dict[Key, list[Any]] = {}
        for sample in batch.samples:
            records.setdefault((sample.group, sample.attempt), []).append(sample)
        arrays = self._options.arrays
        groups = [rebuild(self._payload(key), records[key], arrays=arrays) for key in records]
        return list(records), sorted(groups, key=first_index)

    def _payload(self, key: Key) -> bytes:
        """The other attributes of a group; sent before the batch, over another socket."""
        deadline_s = time.monotonic() + _PAYLOAD_DEADLINE_S
        while key not in self._payloads:
            if time.monotonic() > deadline_s:
                raise HubLost(
                    f"the hub must send the samples of group {key[0]}, attempt {key[1]}; "
                    f"nothing arrived for {_PAYLOAD_DEADLINE_S:.0f} s"
                )
            self._read()
            if key not in self._payloads:
                self._hub.wait(_TICK_S)
        return self._payloads.pop(key)

    def _figures(self, rollout_id: int, batch: Batch) -> dict[str, float]:
        versions = [span.version for sample in batch.samples for span in sample.version_spans]
        if self._clock.saw(max(versions), rollout_id):
            logger.warning(
                "rollout %d has tokens of weight version %d, newer than slime's order of calls implies; "
                "staleness is counted from that version",
                rollout_id,
                max(versions),
            )
        return {"fa_rollout/staleness": float(self._clock.trained_by(rollout_id) - min(versions))}

    def _write_checkpoint(self, rollout_id: int, delivered: list[bytes]) -> None:
        if self.args.save is None:
            return
        prompt_checkpoint.write(
            self.args.save,
            rollout_id,
            prompt_checkpoint.PromptCheckpoint(
                position=prompt_checkpoint.position_of(self._data_source),
                delivered=delivered,
                outstanding=self._prompts.outstanding(),
                lineage=self._hub.hook.lineage,
            ),
        )

    # --- prompts ----------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Send the hub the prompts that it can use, and the surplus."""
        missing = self._wanted + self._stock.size - self._prompts.num_taken
        if self._wanted and missing > 0:
            payloads = self._prompts.take(missing)
            if payloads:
                self._hub.send(m.Feed(payloads=payloads))

    def _encode_ids(self, group: Sequence[Any]) -> list[int]:
        """Ids of the prompt that a group shares; empty if slime itself must encode it."""
        first = group[0]
        is_plain = all(s.prompt == first.prompt and _is_plain(s) for s in group)
        if not is_plain or not isinstance(first.prompt, str):
            return []
        if self._tokenizer is None:
            self._tokenizer = upstream.load_tokenizer(self.args)
        ids: list[int] = self._tokenizer.encode(first.prompt, add_special_tokens=False)
        return ids

    def _read(self) -> None:
        for message in self._hub.read():
            match message:
                case m.Wanted():
                    self._wanted = message.num_groups
                case m.Enclosed():
                    self._payloads[message.group, message.attempt] = message.payload
                case m.Departed():
                    self._prompts.settle(message.group)
                    self._departed.append(message)
                    if message.outcome is m.Settlement.FILTERED:
                        self._stock.rejected()


def _is_plain(sample: Any) -> bool:
    """Whether its prompt alone determines the request."""
    own_function = getattr(sample, "generate_function_path", None)
    return not sample.tokens and not sample.multimodal_inputs and own_function is None


def first_index(group: Sequence[Any]) -> int:
    """The index that slime sorts groups by."""
    return int(flatten(group[:1])[0].index)


def _reasons(departed: Sequence[m.Departed]) -> dict[str, float]:
    """Filtered groups by reason, under slime's own names."""
    reasons = Counter(d.reason for d in departed if d.outcome is m.Settlement.FILTERED and d.reason)
    return {f"rollout/dynamic_filter/drop_{reason}": number for reason, number in reasons.items()}
