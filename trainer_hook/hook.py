"""`TrainerHook`: what a trainer calls.

| a call | waits for | at most |
|---|---|---|
| `attach` | hub and handshake | `timeout_s` |
| `next_batch` | all ranks to ask, the generator to fill a step | the run's `trainer.stall_s` |
| `update_weights` | all ranks to enter, the engines to load | the same, for each of the two |
| `state_dict` | all ranks to leave the steps that it counts | `trainer.stall_s` |
| `evaluate` | all its prompts | `trainer.stall_s` from one prompt's end to the next |
| any other | the hub's answer | 30 s |

Invariants: no thread of its own and no wait without a deadline; calls from several threads take turns; a
forked child's hook does nothing and gives nothing back, since the records are its parent's.
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
    """A trainer process's way to its rollouts; make one with `TrainerHook.attach()`.

        with TrainerHook.attach() as hook:
            for step in range(hook.step, hook.run.num_steps):
                with hook.next_batch() as batch:
                    for micro_batch in batch.micro_batches():
                        logprobs = token_logprobs(model(micro_batch.padded_tokens).logits, micro_batch)
                        (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()
                    optimizer.step()
                with hook.update_weights() as update:
                    update.push(model)

    Every rank makes the same calls in the same order. All calls raise `HubLost` when the hub is gone, the
    error that ended the run (`GeneratorFailed`, `PeerLost`) when it was given up, and `HookStateError` when
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
            address: the hub's socket; from FA_ROLLOUT_ADDRESS, which `fa-rollout-proc run` sets like
                the next two.
            run: from FA_ROLLOUT_RUN.
            token: from FA_ROLLOUT_TOKEN.
            dp_rank: place among the data-parallel ranks; from RANK, which is right only for pure data
                parallelism. Under a torchrun of several nodes it counts inside the node (LOCAL_RANK), since
                each node has a hub of its own.
            dp_size: how many data-parallel ranks there are; from WORLD_SIZE or LOCAL_WORLD_SIZE.
            peer: with tensor, pipeline or context parallelism, the place among the processes that share a
                data-parallel rank: they all get the same samples.
            num_peers: how many share it.
            nodes: for a job of several nodes, a process group of all its ranks that takes tensors of the CPU,
                such as `torch.distributed.new_group(backend="gloo")`: batches then have as many micro-batches
                on every rank of the job, and the figures of the whole job.
            node: place of this node; from GROUP_RANK, as torchrun sets it.
            num_nodes: how many there are; from GROUP_WORLD_SIZE. Where the configuration does not say which
                prompts are this node's, these two do.

        Raises:
            AttachTimeout: the hub was not ready in time; the text says how far it had come.
            HandshakeRefused: the hub serves another run, user or release, or the rank does not fit its world.
            HookStateError: there is no address to go to.
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
                "ranks whose nodes share engines must be able to agree: pass nodes= to attach (engine.shared)"
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

    # --- where the run stands ---------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Step that this rank trains now or next."""
        return self._stepping.step

    @property
    def version(self) -> int:
        """Weight version that the engines have, as far as this rank knows."""
        return self._updating.version

    @property
    def lineage(self) -> str:
        """Name of the branch that versions count in; another one after an older checkpoint was loaded."""
        sharing = self._stepping.sharing
        return self._lineage if sharing is None else sharing.lineage or self._lineage

    # --- batches ----------------------------------------------------------------------------------

    def next_batch(self, *, copy: bool = False) -> AbstractContextManager[Batch]:
        """This rank's part of the next step, as a context manager: what happens inside the block is training.

        Leaving the block in order says that the step is trained. Leaving it by an exception gives the step
        back: the same samples come again, to this trainer or the next. Records go back to the ring at the
        end of the block, except those that a tensor made from `batch.samples` still looks at: these follow
        when it dies.

            with hook.next_batch() as batch:
                tokens = batch.samples[0].tokens        # zero-copy: looks at the ring
                kept = tokens.clone()                   # its own memory
            # here `tokens` is still valid, and still holds its record; `kept` does not

        Args:
            copy: take copies out of the ring: writable tensors, and a batch that can be used after the block.

        Raises (on entering the block):
            EndOfData: there is no further batch.
            Stalled: none came in `trainer.stall_s`; the text says who waits for whom. The call may be made
                again.
            GeneratorFailed: the generator was given up; the text has its traceback.
            PeerLost: another rank is gone.
            UnsplittableBatch: the step cannot be cut for this number of ranks or this micro-batch limit.
        """
        return Block(lambda: self._stepping.enter(copy=copy), self._stepping.leave)

    def is_batch_ready(self) -> bool:
        """Ask for the next batch, without waiting; whether `next_batch` would return, or raise, at once.

        For a trainer that has something to do meanwhile, with `fileno` for its selector.
        """
        return self._stepping.is_ready()

    def fileno(self) -> int:
        """Becomes readable when the hub has said something."""
        return self._session.connection.fileno()

    # --- weights ----------------------------------------------------------------------------------

    def update_weights(self) -> AbstractContextManager[WeightUpdate]:
        """Publish the next weight version, as a context manager; all ranks enter, push and leave.

            with hook.update_weights() as update:
                update.push(model)                      # by files, HTTP or broadcast: see there

            with hook.update_weights() as update:
                update.pause()                          # engines stand still until the block ends
                my_own_push(model, update.version)

        On leaving the block every engine has `update.version`, and `hook.version` is it. A block that raises
        publishes nothing.

        Raises (on entering and on leaving the block):
            WeightUpdateFailed: the engines did not take the weights, or another rank's block raised; the
                version stays what it was.
            Stalled: a rank did not enter, or an engine did not answer, in `trainer.stall_s`.
            PeerLost, GeneratorFailed: as for `next_batch`.
        """
        self._stepping.end_lent()
        return Block(self._updating.enter, self._updating.leave)

    # --- control ----------------------------------------------------------------------------------

    def abort(
        self, *, group: int | None = None, member: int | None = None, older_than: int | None = None
    ) -> int:
        """Abort running requests: of one group, one sample of it, groups begun before a version, or all.

        What they have so far goes on or starts again as the run's `rollout.partial` says; nothing is lost.
        Evaluations go on. Returns how many groups it struck.
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
        """Sample and score prompts with the engines' present weights, beside training; wait for all of it.

        Call it on one rank. Nothing of it enters a batch, the counts of training or its cursor.

        Args:
            source: prompts (text, chat messages, or dicts of prompt, label and metadata); or a data set of
                `[evaluation]` by name, or a file's path; None: `evaluation.path`.
            samples_per_prompt: in place of that of `[evaluation]`.
            sampling: in place of keys of `[evaluation]`'s.

        Raises:
            EvaluationFailed: the data set or the sampling cannot be used. A prompt that fails is none.
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
        """The same without waiting: train on, and call `is_ready` and `result` when it suits.

        A weight update meanwhile makes it one of mixed versions (`Evaluation.is_mixed`)."""
        order = order_of(source, samples_per_prompt=samples_per_prompt, sampling=sampling)
        return PendingEvaluation(self._session, order)

    def pause(self) -> None:
        """Start no further groups; running ones finish, and what is finished can still be trained."""
        self._session.ask_alone(lambda number: m.Hold(request=number, held=True), m.Reply)

    def resume(self) -> None:
        """Start groups again."""
        self._session.ask_alone(lambda number: m.Hold(request=number, held=False), m.Reply)

    def statistics(self) -> HookStatistics:
        """Where this process spent its time, and the hub's figures of the whole run."""
        taken = self._session.ask_alone(lambda number: m.QueryStatistics(request=number), m.StatisticsTaken)
        return HookStatistics(
            num_steps=self._stepping.num_trained,
            num_held_records=self._session.leases.num_held,
            hub=MappingProxyType(msgspec.to_builtins(taken.statistics)),
            **self._stepping.time.figures(),
        )

    def state_dict(self, *, payload: bool = False, interrupt: bool = False) -> dict[str, Any]:
        """Where the data stands, to be saved with the model: what is trained, and what is under way.

        The state counts a step as trained when every rank of this node has left it: the call waits for the
        ranks that have not.

        Plain numbers, text and lists; all ranks that call it between the same two steps get the same, and
        those of several nodes each the part of their own, under the node's name: save all of them. Tokens
        of samples under way are in it where `rollout.partial` is `"resume"`: those that engines gave back so
        far, as at a weight update. `trainer.checkpoint_bytes` bounds what is kept of unfinished groups.

        Args:
            payload: keep finished groups whole, so that they need not be made again. The state is as large
                as their records then: call it on the ranks that save it.
            interrupt: end all running requests for a moment, so that all tokens so far are kept. Where the
                run ends, as after SIGTERM, that is done without being asked for.

        Raises:
            PeerLost: a rank is gone that had not left a step of the state.
            HookStateError: another rank gave such a step back: its block raised.
            Stalled: a rank did not leave such a step in `trainer.stall_s`.
        """
        self._stepping.end_lent()
        return self._checkpoints.take(step=self.step, payload=payload, interrupt=interrupt)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint, on every rank and before its first batch.

        What was trained after the checkpoint comes again; `step`, `version` and `lineage` are the
        checkpoint's. With None the run begins again: for a trainer that was lost before it could save.

        Raises:
            HookStateError: a batch was taken already, or the state is not of this run's data.
        """
        where = self._checkpoints.load(state)
        self._stepping.step, self._updating.version = where.step, where.version
        self._lineage = where.lineage
        if self._stepping.sharing is not None:
            self._stepping.sharing.unsettle()

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run in order; idempotent. Records go back; tensors that you kept become copies of
        them."""
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
        """Close; where the block has failed, the other ranks are told that this one is gone."""
        self._leave(in_order=is_orderly(error))
