"""`TrainerHook`: the API that a trainer calls.

| call | waits for | at most |
|---|---|---|
| `attach` | hub and handshake | `timeout_s` |
| `next_batch` | all ranks to ask, the generator to fill a step | the run's `trainer.stall_s` |
| `update_weights` | all ranks to enter, then the engines to load | `trainer.stall_s` each |
| `state_dict` | all ranks to leave the steps that the state counts | `trainer.stall_s` |
| `evaluate` | all prompts | `trainer.stall_s` between two finished prompts |
| all others | the hub's answer | 30 s |

Invariants: the hook starts no thread, and every wait has a deadline; calls from several threads run one after
another; in a forked child the hook does nothing and releases nothing, because the parent owns the records.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from trainer_hook import messages as m
from trainer_hook.batches.batch import Batch
from trainer_hook.batches.block import Block
from trainer_hook.calls.checkpoint import Checkpoints
from trainer_hook.calls.evaluating import PendingEvaluation
from trainer_hook.calls.evaluation import Evaluation, Prompt, order_of
from trainer_hook.calls.stepping import Stepping
from trainer_hook.calls.update import Updating, WeightUpdate
from trainer_hook.errors import HookStateError
from trainer_hook.session.attach import Attached, attach
from trainer_hook.session.nodes import Nodes
from trainer_hook.session.process import close_at_exit, is_orderly, name_crashes
from trainer_hook.session.session import Session
from trainer_hook.session.sharing import EngineSharing
from trainer_hook.session.statistics import HookStatistics, RunShape
from trainer_hook.weights.pushing import Pusher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TrainerHook:
    """Connects a trainer process to its rollouts; create it with `TrainerHook.attach()`.

        with TrainerHook.attach() as hook:
            for step in range(hook.step, hook.run.num_steps):
                with hook.next_batch() as batch:
                    for micro_batch in batch.micro_batches():
                        logprobs = token_logprobs(model(micro_batch.padded_tokens).logits, micro_batch)
                        (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
                    optimizer.step()
                with hook.update_weights() as update:
                    update.push(model)

    Every rank makes the same calls in the same order. All calls raise `HubLost` if the hub has exited, the
    error that ended the run (`GeneratorFailed`, `PeerLost`) if the run has failed, and `HookStateError` if
    the hook is closed or was inherited by a forked child.
    """

    def __init__(self, attached: Attached) -> None:
        welcome = attached.welcome
        self._session = Session(attached)
        self._stepping = Stepping(self._session, step=welcome.step)
        pusher = Pusher(self._session, via=welcome.publish, bucket_bytes=welcome.bucket_bytes)
        self._updating = Updating(self._session, self._stepping.time, pusher=pusher, version=welcome.version)
        self._lineage = welcome.lineage
        self._checkpoints = Checkpoints(
            self._session,
            spool_dir=welcome.spool_dir,
            limit_bytes=welcome.checkpoint_bytes,
            leads=attached.leads,
            attach=welcome.attach,
            node=(welcome.node, welcome.num_nodes),
        )
        self.run = RunShape.of(welcome)
        close_at_exit(self)

    @classmethod
    def attach(
        cls,
        *,
        address: str | Path | None = None,
        run: str | None = None,
        token: str | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        peer: int = 0,
        num_peers: int = 1,
        nodes: "ProcessGroup | None" = None,
        node: int | None = None,
        num_nodes: int | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Join the run as one rank of a trainer.

        Args:
            address: the hub's socket. Default: FA_ROLLOUT_ADDRESS. `fa-rollout-proc run` sets this variable
                and the next two.
            run: the run's id. Default: FA_ROLLOUT_RUN.
            token: the run's token. Default: FA_ROLLOUT_TOKEN.
            dp_rank: data-parallel rank. Default: RANK, which is correct for pure data parallelism only. Under
                torchrun with several nodes: LOCAL_RANK, because each node has its own hub.
            dp_size: number of data-parallel ranks. Default: WORLD_SIZE or LOCAL_WORLD_SIZE.
            peer: with tensor, pipeline or context parallelism, the index among the processes that share a
                data-parallel rank. All of them get the same samples.
            num_peers: number of processes that share the data-parallel rank.
            nodes: for a job of several nodes, a process group of all its ranks that accepts CPU tensors, such
                as `torch.distributed.new_group(backend="gloo")`. Every rank of the job then gets the same
                number of micro-batches, and batches carry the totals of the whole job.
            node: index of this node. Default: GROUP_RANK, which torchrun sets.
            num_nodes: number of nodes. Default: GROUP_WORLD_SIZE. `node` and `num_nodes` select this node's
                prompts unless the configuration does.

        Raises:
            AttachTimeout: the hub was not ready in time; the text names the stage it reached.
            HandshakeRefused: the hub serves another run, user or release, or has no slot for this rank.
            HookStateError: no address was found.
        """
        attached = attach(
            address=address,
            run=run,
            token=token,
            dp_rank=dp_rank,
            dp_size=dp_size,
            peer=peer,
            num_peers=num_peers,
            node=node,
            num_nodes=num_nodes,
            timeout_s=timeout_s,
        )
        name_crashes()
        hook = cls(attached)
        if nodes is not None:
            hook._join_nodes(nodes, attached)
        elif attached.welcome.shares_engines:
            hook.close()
            raise HookStateError(
                "nodes that share engines (engine.shared) must coordinate weight updates; found no process "
                "group for it: pass nodes= to TrainerHook.attach"
            )
        return hook

    def _join_nodes(self, group: "ProcessGroup", attached: Attached) -> None:
        nodes = Nodes(
            group,
            speaks=attached.leads,
            node=attached.welcome.node,
            timeout_s=self._session.wait_timeout_s,
        )
        self._stepping.nodes = nodes
        self._updating.pusher.nodes = nodes
        if attached.welcome.shares_engines:
            leads = attached.welcome.node == 0
            sharing = EngineSharing(self._session, nodes, leads=leads, speaks=attached.leads)
            self._stepping.sharing = self._updating.sharing = sharing

    # --- progress of the run ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that this rank is training or trains next."""
        return self._stepping.step

    @property
    def version(self) -> int:
        """The engines' weight version, as far as this rank knows."""
        return self._updating.version

    @property
    def lineage(self) -> str:
        """Id of the branch of weight versions; it changes when an older checkpoint is loaded."""
        sharing = self._stepping.sharing
        return self._lineage if sharing is None else sharing.lineage or self._lineage

    # --- batches ----------------------------------------------------------------------------------

    def next_batch(self, *, copy: bool = False) -> AbstractContextManager[Batch]:
        """This rank's part of the next step, as a context manager; train inside the block.

        Leaving the block normally marks the step as trained. An exception returns the step: the same samples
        are delivered again, to this trainer or its replacement. Records return to the ring at the end of the
        block, except records that a tensor from `batch.samples` still views: these return when the tensor is
        freed.

            with hook.next_batch() as batch:
                tokens = batch.samples[0].tokens        # zero-copy view of the ring
                kept = tokens.clone()                   # own memory
            # `tokens` is still valid and still holds its record; `kept` holds none

        Args:
            copy: copy the batch out of the ring. Tensors are then writable and valid after the block.

        Raises (on entering the block):
            EndOfData: there are no more batches.
            Stalled: no batch arrived within `trainer.stall_s`; the text says what is waiting for what. The
                call can be repeated.
            GeneratorFailed: the generator failed for good; the text contains its traceback.
            PeerLost: another rank has exited.
            UnsplittableBatch: the step cannot be split over this number of ranks or within this micro-batch
                limit.
        """
        return Block(lambda: self._stepping.enter(copy=copy), self._stepping.leave)

    def is_batch_ready(self) -> bool:
        """Request the next batch without waiting. True if `next_batch` would return or raise immediately.

        For a trainer that does other work in the meantime; register `fileno` with its selector.
        """
        return self._stepping.is_ready()

    def fileno(self) -> int:
        """File descriptor that becomes readable when a message from the hub arrives."""
        return self._session.connection.fileno()

    # --- weights ----------------------------------------------------------------------------------

    def update_weights(self) -> AbstractContextManager[WeightUpdate]:
        """Publish the next weight version, as a context manager; all ranks enter, push and leave.

            with hook.update_weights() as update:
                update.push(model)                      # by files, HTTP or broadcast

            with hook.update_weights() as update:
                update.pause()                          # engines pause until the block ends
                my_own_push(model, update.version)

        After the block every engine has `update.version`, and `hook.version` equals it. A block that raises
        publishes nothing.

        Raises (on entering and on leaving the block):
            WeightUpdateFailed: the engines did not load the weights, or another rank's block raised; the
                version is unchanged.
            Stalled: a rank did not enter, or an engine did not answer, within `trainer.stall_s`.
            PeerLost, GeneratorFailed: as for `next_batch`.
        """
        self._stepping.end_lent()
        return Block(self._updating.enter, self._updating.leave)

    # --- control ----------------------------------------------------------------------------------

    def abort(
        self, *, group: int | None = None, member: int | None = None, older_than: int | None = None
    ) -> int:
        """Abort running requests: of one group, of one sample, of groups started before a version, or all.

        Aborted samples continue or restart according to `rollout.partial`; nothing is lost. Evaluations are
        not affected. Returns the number of groups with aborted requests.
        """
        return self._session.ask_alone(
            lambda number: m.Abort(request=number, group=group, member=member, older_than=older_than),
            m.Aborted,
        ).num_groups

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(
        self,
        source: str | Sequence[Prompt | dict[str, Any]] | None = None,
        *,
        samples_per_prompt: int | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> Evaluation:
        """Sample and score prompts with the current weights, alongside training; wait for the result.

        Call it on one rank. Evaluation samples never enter a batch, the training counts or the data cursor.

        Args:
            source: prompts (text, chat messages, or dicts of prompt, label and metadata), the name of a data
                set in `[evaluation]`, or a file path. None: `evaluation.path`.
            samples_per_prompt: overrides the value in `[evaluation]`.
            sampling: overrides keys of the sampling parameters in `[evaluation]`.

        Raises:
            EvaluationFailed: the data set or the sampling parameters are invalid. A prompt that fails does
                not raise; see `Evaluation.num_failed`.
        """
        order = order_of(source, samples_per_prompt=samples_per_prompt, sampling=sampling)
        with PendingEvaluation(self._session, order) as pending:
            return pending.result()

    def begin_evaluation(
        self,
        source: str | Sequence[Prompt | dict[str, Any]] | None = None,
        *,
        samples_per_prompt: int | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> PendingEvaluation:
        """Start an evaluation without waiting; continue training and call `is_ready` and `result` later.

        If a weight update happens before it finishes, its versions are mixed (`Evaluation.is_mixed`)."""
        order = order_of(source, samples_per_prompt=samples_per_prompt, sampling=sampling)
        return PendingEvaluation(self._session, order)

    def pause(self) -> None:
        """Start no new groups. Running groups finish, and finished groups can still be trained."""
        self._session.ask_alone(lambda number: m.Hold(request=number, held=True), m.Reply)

    def resume(self) -> None:
        """Start new groups again."""
        self._session.ask_alone(lambda number: m.Hold(request=number, held=False), m.Reply)

    def statistics(self) -> HookStatistics:
        """Time spent by this process, and the hub's statistics of the whole run."""
        taken = self._session.ask_alone(lambda number: m.QueryStatistics(request=number), m.StatisticsTaken)
        return HookStatistics(
            num_steps=self._stepping.num_trained,
            num_held_records=self._session.leases.num_held,
            hub=MappingProxyType(msgspec.to_builtins(taken.statistics)),
            **self._stepping.time.figures(),
        )

    def state_dict(self, *, payload: bool = False, interrupt: bool = False) -> dict[str, Any]:
        """State of the rollouts, to save with the model: trained prompts and unfinished groups.

        A step counts as trained when every rank of this node has left it; the call waits for the others.

        The state contains plain numbers, text and lists. All ranks of a node that call it between the same
        two steps get the same state. With several nodes, each node gets its own part, under the node's name:
        save all parts. With `rollout.partial = "resume"` the state includes the tokens of unfinished samples
        that the engines have returned so far, for example at a weight update. `trainer.checkpoint_bytes`
        limits the size of the unfinished groups.

        Args:
            payload: include finished groups in full, so that they are not generated again. The state is then
                as large as their records: call it only on the ranks that save it.
            interrupt: abort all running requests briefly, to include all tokens generated so far. Always done
                when the run is ending, for example after SIGTERM.

        Raises:
            PeerLost: a rank exited before it left a step of the state.
            HookStateError: another rank returned such a step, because its block raised.
            Stalled: a rank did not leave such a step within `trainer.stall_s`.
        """
        self._stepping.end_lent()
        return self._checkpoints.take(step=self.step, payload=payload, interrupt=interrupt)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a checkpoint. Call it on every rank, before the first batch.

        Everything trained after the checkpoint is delivered again; `step`, `version` and `lineage` are set to
        the checkpoint's. None restarts the run, for a trainer that was lost before its first checkpoint.

        Raises:
            HookStateError: a batch was already delivered, or the state belongs to other data.
        """
        where = self._checkpoints.load(state)
        self._stepping.step, self._updating.version = where.step, where.version
        self._lineage = where.lineage
        if self._stepping.sharing is not None:
            self._stepping.sharing.unsettle()

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run normally; idempotent. Records return to the ring; tensors that still view them become
        copies."""
        self._leave(in_order=True)

    def _leave(self, *, in_order: bool) -> None:
        if in_order:
            self._stepping.end_lent()
        self._updating.pusher.close()
        self._session.close(in_order=in_order)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. If the block failed, report this rank to the others as lost."""
        self._leave(in_order=is_orderly(error))
