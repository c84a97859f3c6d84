"""Every admitted group ends exactly once, whatever engines, generator, rank and versions do when."""

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.generator import misbehaving_code
from tests.generator.virtual import VirtualRun, true_ids, true_logprob
from tests.hub.rig import add_up
from trainer_hook import EvaluatedPrompt
from trainer_hook import messages as m

PICK = st.integers(0, 1000)
NUM_STEPS, GROUPS_PER_STEP = 8, 2


class RunMachine(RuleBasedStateMachine):
    """One rank, one generator, engines: all that can happen between them."""

    user_code: Any = None

    @initialize(
        policy=st.sampled_from(["wait", "wait", "wait", "drop", "retry", "mask", "keep"]),
        partial=st.sampled_from(["resume", "restart"]),
        staleness=st.integers(0, 3),
        interval=st.integers(1, 2),
        surplus=st.sampled_from([0, 0, 1, 2]),
        is_regular=st.booleans(),
        timeout_s=st.sampled_from([None, 40.0]),
    )
    def begin(
        self,
        policy: str,
        partial: str,
        staleness: int,
        interval: int,
        surplus: int,
        is_regular: bool,
        timeout_s: float | None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fa-rollout-test-"))
        self.policy, self.staleness, self.interval = policy, staleness, interval
        self.run = VirtualRun(
            self.folder,
            num_steps=NUM_STEPS,
            groups_per_step=GROUPS_PER_STEP,
            staleness_policy=policy,
            partial=partial,
            staleness=staleness,
            update_interval=interval,
            surplus_groups=surplus,
            group_timeout_s=timeout_s,
            idle_timeout_s=5.0,
            user_code=self.user_code,
        )
        self.request = 0
        self.asked: int | None = None
        self.batch: m.Batch | None = None
        self.trained: list[int] = []
        self.num_since_update = 0
        self.is_regular = is_regular
        """Versions come as the configuration says."""
        self.may_drop = policy in ("drop", "retry") or surplus > 0
        """Also once versions come faster than the trainer trains."""
        self.is_over = False
        self.evaluation: int | None = None
        self.evaluated: list[int] = []
        self.collecting: int | None = None

    # --- engines ------------------------------------------------------------------------------------

    @rule(pick=PICK, num_tokens=st.integers(1, 9))
    def an_answer_comes(self, pick: int, num_tokens: int) -> None:
        flight = self.run.flight(pick)
        if flight is not None:
            flight.make(num_tokens, self.run.engines.label)
            self.run.engines.land(flight, "stop")
            self.run.step()

    @rule(num_answers=st.integers(1, 8))
    def newer_groups_overtake_the_oldest(self, num_answers: int) -> None:
        for _ in range(num_answers):
            oldest = self.run.flight(0)
            newest = self.run.flight(-1)
            if oldest is None or newest is None or oldest.group == newest.group:
                return
            newest.make(9, self.run.engines.label)
            self.run.engines.land(newest, "stop")
            self.run.step(0.6)

    @rule(pick=PICK, num_tokens=st.integers(0, 3))
    def an_engine_aborts(self, pick: int, num_tokens: int) -> None:
        flight = self.run.flight(pick)
        if flight is not None:
            flight.make(num_tokens, self.run.engines.label)
            self.run.engines.land(flight, "abort")
            self.run.step()

    @rule(pick=PICK)
    def an_engine_refuses(self, pick: int) -> None:
        flight = self.run.flight(pick)
        if flight is not None:
            self.run.refuse(flight)
            self.run.step()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.run.step(seconds)

    # --- the generator --------------------------------------------------------------------------------

    @rule(how=st.sampled_from(["no", "no", "no", "killed", "retired"]))
    def the_generator_ends(self, how: str) -> None:
        if how == "killed":
            self.run.kill_generator()
        elif how == "retired":
            self.run.retire_generator()

    # --- the trainer ----------------------------------------------------------------------------------

    def number(self) -> int:
        self.request += 1
        return self.request

    @precondition(lambda self: self.batch is None and self.asked is None and not self.is_over)
    @rule()
    def the_trainer_asks(self) -> None:
        self.asked = self.number()
        self.run.say(m.Next(request=self.asked, step=len(self.trained) // GROUPS_PER_STEP))
        self.look()

    def look(self) -> None:
        """Whether the answer is there."""
        answer = self.run.to_rank_box.pop(self.asked or -1, None)
        if answer is None:
            return
        self.asked = None
        if isinstance(answer, m.Batch):
            self.batch = answer
            self.check(answer)
        elif isinstance(answer, m.Ended):
            self.is_over = True
        else:
            assert isinstance(answer, m.Refused), answer
            assert "update_weights" in answer.text

    def check(self, batch: m.Batch) -> None:
        """Every record is what engines sampled; the bound holds where the policy promises it."""
        for handout in batch.records:
            group = self.run.read(handout)
            tokens, logprobs = group.columns["tokens"], group.columns["logprobs"]
            bounds = zip(pairwise(group.ends), pairwise(group.response_ends), group.spans, strict=True)
            for (start, end), (first, last), spans in bounds:
                prompt = int(tokens[start])
                assert prompt == group.head.prompt_index
                expected = true_ids(prompt, 3, end - start)
                np.testing.assert_array_equal(tokens[start + 3 : end], expected)
                begin = 0
                for version, stop in spans:
                    label = f"{self.run.hub.core.lineage}:{version}"
                    assert (logprobs[first + begin : first + stop] == np.float32(true_logprob(label))).all()
                    begin = stop
                assert begin == last - first
        if self.policy in ("wait", "drop", "retry"):
            assert batch.staleness_max is not None
            assert batch.staleness_max <= self.staleness

    @precondition(lambda self: self.batch is not None)
    @rule(is_trained=st.booleans())
    def the_trainer_ends_its_step(self, is_trained: bool) -> None:
        assert self.batch is not None
        names = [self.run.read(handout).head.group for handout in self.batch.records]
        outcome = m.Outcome.TRAINED if is_trained else m.Outcome.RETURNED
        sequences = [handout.sequence for handout in self.batch.records]
        self.run.say(m.Released(step=self.batch.step, outcome=outcome, sequences=sequences))
        self.batch = None
        if is_trained:
            self.trained += names
            self.num_since_update += 1
        self.run.step()

    @precondition(lambda self: self.batch is None and self.asked is None)
    @rule()
    def weights_are_published(self) -> None:
        if self.num_since_update < self.interval:
            if self.is_regular:
                return
            self.may_drop = True
        number = self.number()
        self.run.say(m.UpdateEnter(request=number))
        assert isinstance(self.run.to_rank_box.pop(number), m.UpdateBegun)
        number = self.number()
        self.run.say(m.UpdatePublish(request=number, leader=True))
        for _ in range(40):
            self.run.step(0.1)
            if number in self.run.to_rank_box:
                break
        assert isinstance(self.run.to_rank_box.pop(number), m.UpdateDone)
        self.num_since_update = 0

    @rule(group=st.one_of(st.none(), st.integers(0, 12)), member=st.one_of(st.none(), st.integers(0, 1)))
    def the_trainer_aborts(self, group: int | None, member: int | None) -> None:
        self.run.say(m.Abort(request=self.number(), group=group, member=member))
        self.run.step()

    @precondition(lambda self: self.evaluation is None)
    @rule()
    def an_evaluation_begins(self) -> None:
        number = self.number()
        prompts = [m.EvaluationPrompt(prompt=f"test {label}", label=label) for label in (7, 8, 9)]
        self.run.say(m.Evaluate(request=number, order=m.EvaluationOrder(prompts=prompts)))
        reply = self.run.to_rank_box.pop(number)
        assert isinstance(reply, m.EvaluationBegun)
        self.evaluation, self.evaluated = reply.evaluation, []
        self.run.step()

    @precondition(lambda self: self.evaluation is not None)
    @rule()
    def the_trainer_collects(self) -> None:
        assert self.evaluation is not None
        if self.collecting is None:
            self.collecting = self.number()
            self.run.say(m.Collect(request=self.collecting, evaluation=self.evaluation))
        part = self.run.to_rank_box.pop(self.collecting, None)
        if part is None:
            return
        self.collecting = None
        assert isinstance(part, m.EvaluationPart)
        self.evaluated += [msgspec.msgpack.decode(r, type=EvaluatedPrompt).index for r in part.results]
        assert len(set(self.evaluated)) == len(self.evaluated)
        if part.is_over:
            assert sorted(self.evaluated) == [0, 1, 2]
            self.evaluation = None

    @rule(held=st.booleans())
    def the_trainer_holds(self, held: bool) -> None:
        self.run.say(m.Hold(request=self.number(), held=held))
        self.run.step()

    # --- what must hold -------------------------------------------------------------------------------

    @invariant()
    def the_run_goes_on_and_its_counts_add_up(self) -> None:
        assert self.run.failure is None
        assert self.run.hub.core.flow is not None
        counts = self.run.hub.core.flow.books.counts()
        assert add_up({name: getattr(counts, name) for name in type(counts).__slots__})
        assert counts.trained == len(self.trained)
        assert self.may_drop or counts.dropped == 0

    @invariant()
    def no_group_is_answered_or_trained_twice(self) -> None:
        assert len(set(self.run.answers)) == len(self.run.answers)
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def live_groups_stay_within_the_window(self) -> None:
        flow = self.run.hub.core.flow
        assert flow is not None
        window = flow.window
        most = (window.staleness + 1) * window.groups_per_version + window.surplus_groups
        assert flow.books.counts().live <= most

    def teardown(self) -> None:
        """From any state the run comes to its end, with every step trained and nothing left over."""
        if not hasattr(self, "run"):
            return
        try:
            self.the_trainer_holds(False)
            for _ in range(600):
                if self.is_over and self.evaluation is None:
                    break
                self.go_on()
            assert self.is_over
            assert self.evaluation is None
            assert len(self.trained) == NUM_STEPS * GROUPS_PER_STEP
            self.the_run_goes_on_and_its_counts_add_up()
            self.no_group_is_answered_or_trained_twice()
            self.run.step(1.0)
            self.nothing_is_left_over()
        finally:
            self.run.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def nothing_is_left_over(self) -> None:
        """What was begun and is not needed any more was ended; the ring holds what the books say."""
        flow = self.run.hub.core.flow
        assert flow is not None
        counts = flow.books.counts()
        assert (counts.issued, counts.running) == (0, 0)
        assert self.run.engines.flights == {}
        assert self.run.table.statistics().num_live == counts.committed

    def go_on(self) -> None:
        if self.evaluation is not None:
            self.the_trainer_collects()
        if self.batch is not None:
            self.the_trainer_ends_its_step(True)
        elif self.asked is not None or self.is_over:
            self.look()
            for number in range(6):
                self.an_answer_comes(number, 9)
            self.run.step(0.6)
        elif self.num_since_update >= self.interval:
            self.weights_are_published()
        else:
            self.the_trainer_asks()


RunMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_every_group_ends_once = RunMachine.TestCase


class MisbehavingMachine(RunMachine):
    """The same with user code that does anything: the generator's task never ends of it."""

    user_code = misbehaving_code

    @invariant()
    def the_generator_lives(self) -> None:
        if hasattr(self, "run"):
            assert not self.run.serving.done()


MisbehavingMachine.TestCase.settings = settings(
    max_examples=3,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_every_group_ends_once_whatever_user_code_does = MisbehavingMachine.TestCase
