"""The generator under slime: `python -m fa_rollout.slime.generation.generator`, started by the hub.

In: an inherited channel and ring, and slime's arguments. Out: messages and records, until it exits.
Invariant: the loop runs on the main thread, since reward functions may use SIGALRM. slime and torch are
imported while the first requests run, not before them.
"""

import pickle
from contextlib import AsyncExitStack

import msgspec

from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.network import open_session
from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import Life
from fa_rollout.generator.main import leave, main
from fa_rollout.generator.serving import read_run, ring_writer
from fa_rollout.process.own_threads import in_thread
from fa_rollout.slime.arguments import takes_fast_path
from fa_rollout.slime.generation.loop import SlimeGenerator
from fa_rollout.slime.options import Options
from fa_rollout.slime.wire import SlimeSetup
from shm.ring.segment import Segment
from trainer_hook.record import schema_fingerprint


async def open_generator(link: HubLink, ring_fd: int, life: Life, stack: AsyncExitStack) -> SlimeGenerator:
    """Read the run from the hub and open pool, session and ring; slime itself is imported later.

    Raises:
        ClientError: the engines do not start.
    """
    run, config = await read_run(link, life, stack)
    resume = await link.resume()
    setup = msgspec.msgpack.decode(resume.payload, type=SlimeSetup)
    args = pickle.loads(setup.args)
    options = msgspec.convert(setup.options, Options)
    # slime's Ray actors for requests cannot be reached from outside Ray.
    args.use_distributed_post = False
    policy = FailurePolicy(
        max_attempts=60,
        request_timeout_s=config.engine.request_timeout_s,
        unavailable_timeout_s=config.trainer.stall_s,
        backoff_cap_s=2.0,
    )
    pool = await _open_pool(config, policy, stack) if takes_fast_path(args, options) else None
    session = await stack.enter_async_context(open_session(policy))
    segment = await in_thread(Segment.attach, ring_fd, writable=True)
    writer = ring_writer(config, segment, resume, run=run, schema=schema_fingerprint())
    return SlimeGenerator(
        config,
        args,
        options,
        directory=setup.directory,
        writer=writer,
        resume=resume,
        link=link,
        life=life,
        pool=pool,
        session=session,
    )


async def _open_pool(config: Config, policy: FailurePolicy, stack: AsyncExitStack) -> EnginePool:
    pool = EnginePool(
        config.engine.urls,
        router=True,
        max_concurrent_samples=config.engine.max_concurrent_samples,
        policy=policy,
        # slime pauses engines for its updates: to continue during one would sample from half-updated weights.
        ends_pauses=False,
    )
    return await stack.enter_async_context(pool)


if __name__ == "__main__":
    leave(lambda: main(open_generator))
