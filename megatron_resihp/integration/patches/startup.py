# SPDX-License-Identifier: Apache-2.0
"""Patches of start-up: the world comes from the control plane's store; builders are kept for later epochs.

Replaces training.initialize_megatron, parallel_state.initialize_model_parallel and training.setup_model_and_optimizer.
"""

import atexit
import functools
import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_resihp import cpu
from megatron_resihp.config import ResihpConfig
from megatron_resihp.control.commands.launch.interface import GLOO
from megatron_resihp.control.node import environment
from megatron_resihp.control.node.absences import Seen
from megatron_resihp.control.node.environment import ABSENCES_FD, SLOTS
from megatron_resihp.control.transport.shipping import Outbox
from megatron_resihp.control.transport.store.client import StoreClient, open_connection
from megatron_resihp.control.transport.store.lasting import LastingStore
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.control.worker.heard import NO_EPOCH
from megatron_resihp.control.worker.identity import Identity, check_in, identity_of_job
from megatron_resihp.control.worker.own_address import own_address
from megatron_resihp.control.worker.reach import Door
from megatron_resihp.cost.arguments import ARGUMENTS
from megatron_resihp.cost.training import (
    why_equal_rounds,
    why_even_experts,
    why_own_context,
    why_own_degree,
    why_own_experts,
    why_powers_of_two,
)
from megatron_resihp.detector.input.wire import pack
from megatron_resihp.events.workers import WorkerStarted
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.executor.groups.control_store import ControlStore
from megatron_resihp.integration.failing import fail
from megatron_resihp.integration.job import Job, job_of
from megatron_resihp.integration.loop import nccl_watch
from megatron_resihp.integration.loop.device_loss import abort_or_die
from megatron_resihp.integration.loop.joining import build_lonely_world, is_joining, lonely_groups
from megatron_resihp.integration.loop.preparing import Preparation
from megatron_resihp.integration.loop.reach_watch import ReachWatch
from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.patches.arguments.own_functions import unheeded
from megatron_resihp.integration.patches.counting import sizes_as_they_are
from megatron_resihp.integration.probes.device_slowing import DeviceSlowing
from megatron_resihp.integration.probes.emulation import padding_of
from megatron_resihp.integration.probes.probe_sheet import Sheet, with_absences
from megatron_resihp.integration.releases import Release
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.expert_biases import count_exactly
from megatron_resihp.integration.state.room import free_on_host
from megatron_resihp.integration.step.step import install_step
from megatron_resihp.integration.support.batches import iterations_of
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.integration.world.engine import meet_before_it
from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups, Sizes
from megatron_resihp.integration.world.whereabouts import whereabouts
from megatron_resihp.integration.world.world import build_world, needs_of
from megatron_resihp.plan.slots import node_of
from megatron_resihp.plan.spelling import spelled_out
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import JobStarted, ModelBuilt

CONNECT_TIMEOUT_S = 300.0
REOPEN_S = 30.0
"""How long a network may be without a way to the store when groups are about to meet there."""
LAST_RECORDS_S = 1.0
"""How long a worker that has finished waits for its last records to be sent."""
CONFIG_HOOKS = (
    "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func", "grad_scale_func", "timers",
)  # fmt: skip


def create_runtime(config: ResihpConfig, derived: DerivedArguments, identify: Callable[[], Identity]) -> Runtime:
    """Connect this worker to the control plane.

    Args:
        identify: finds out what this worker was started with.

    Raises:
        UnlikeError: it was started otherwise than the job.
    """
    store = LastingStore(StoreClient(open_connection(environment.way_to_store(), CONNECT_TIMEOUT_S)))
    worker = int(os.environ["RESIHP_WORKER"])
    joining = is_joining()
    for name, value in check_in(store, identify(), joining).items():
        setattr(get_args(), name, value)
    # The notice thread starts before there is anything to abort.
    communicators: list[Communicators] = []

    def abort() -> None:
        for each in communicators:
            abort_or_die(each.connections.abort_if_interrupted)

    door = Door(own_address(store.address.host, os.environ.get(GLOO))).address
    slots, here = int(os.environ[SLOTS]), int(os.environ["LOCAL_WORLD_SIZE"])
    control = WorkerControl(
        store, worker, abort, NO_EPOCH if joining else 0, door, lambda worker: node_of(worker, slots, here)
    )
    if store.way.leaders is not None:
        control.channel.stand(identity_of_job(store))

    def open_store() -> dist.Store:
        return ControlStore(open_connection(store.way, REOPEN_S))

    communicators.append(Communicators(open_store(), worker, control.heard.broken, reopen=open_store))
    ReachWatch(communicators[0].waiter.longest_s, control).begin()
    pack_sheet = functools.partial(_pack, Seen(int(os.environ[ABSENCES_FD])), config.resihp_emulate is not None)
    outbox = Outbox(socket.socket(fileno=int(os.environ["RESIHP_RECORDS_FD"])), pack_sheet)
    atexit.register(outbox.close, LAST_RECORDS_S)
    job = job_of(config, get_args(), derived, store.run)
    runtime = Runtime(job, control, communicators[0], outbox.offer)
    runtime.joining = joining
    nccl_watch.begin(control, lambda: runtime.mode.nccl_failed())  # there are groups only where there is a mode
    runtime.preparation = Preparation(control, communicators[0], functools.partial(needs_of, runtime))
    control.heard.on_change = runtime.preparation.begin
    runtime.probes.pauses.watch()
    # What was imported until now stays: looking through it again took a recovery 0.25 s, at any moment of training.
    gc.collect()
    gc.freeze()
    if config.resihp_emulate is not None:
        runtime.pads.padding = padding_of(runtime, config.resihp_emulate)
        runtime.probes.ops.emulated = True
    if not cpu.installed():
        runtime.pads.slowing = DeviceSlowing(lambda: control.heard.slowness.speed(worker), runtime.probes.event)
    return runtime


def _pack(absences: Seen, emulated: bool, sheet: Sheet, lost: int) -> bytes:
    record = replace(sheet.record(), lost=lost)
    # On the emulated clock what the host does is no device's doing.
    return pack(record if emulated else with_absences(record, absences.between(record.start, record.end)))


def wrap_initialize_megatron(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """Join the world of epoch 0 through the control plane's store before Megatron looks for one."""

    @functools.wraps(original)
    def initialize_megatron(*positional: Any, **options: Any) -> Any:
        args = runtime.job.args
        # Before there are connections to other workers, which what is forked here would keep.
        runtime.saves.writer.start()
        runtime.control.event(WorkerStarted(**whereabouts(args.local_rank)))
        if runtime.joining:
            torch.cuda.set_device(args.local_rank)
            build_lonely_world(runtime)
            return original(*positional, **options)
        if runtime.worker == 0 and runtime.log.is_wanted:
            runtime.control.tell(runtime.log.wanted)
        runtime.control.tell(JobStarted(runtime.worker, describe_job(runtime.job)))
        plan = runtime.control.first_plan()
        runtime.held.shards = spelled_out(plan, runtime.job.own.chunks).shards_of(runtime.worker)
        torch.cuda.set_device(args.local_rank)
        build_world(runtime, plan)
        runtime.log.begin_epoch(runtime.view)
        finish = original(*positional, **options)
        meet_before_it(args)
        return finish

    return initialize_megatron


def describe_job(job: Job, stand_in: bool | None = None) -> JobDescription:
    """What the coordinator must know of Megatron's arguments and of ours. `stand_in`: as in `as_run`."""
    args, config, own = job.args, job.config, job.own
    arguments = as_run(args, stand_in)
    return JobDescription(
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        context_parallel=args.context_parallel_size,
        expert_parallel=own.expert_parallel,
        expert_members=own.expert_members,
        experts=args.num_experts or 0,
        expert_copies=job.copies_experts,
        chunks=own.chunks,
        micro_batch_group=own.micro_batch_group,
        tied=own.tied_head is not None,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        micro_batches=args.global_batch_size // args.micro_batch_size,
        batch_steps=job.batch_steps,
        seq_length=args.seq_length,
        sequence_parallel=own.sequence_parallel,
        keeps_degree=why_own_degree(arguments),
        keeps_context=why_own_context(arguments),
        keeps_experts=why_own_experts(arguments),
        equal_rounds=why_equal_rounds(arguments),
        even_experts=why_even_experts(arguments),
        powers_of_two=why_powers_of_two(arguments),
        emulated=config.resihp_emulate,
        train_iters=iterations_of(vars(args)),
        ends_early=bool(args.exit_interval or job.minutes),
        eval_interval=args.eval_interval if args.eval_iters else None,
        save_interval=args.save_interval if args.save else None,
        non_persistent_save_interval=args.non_persistent_save_interval if args.save else None,
        saves=bool(args.save),
        pipeline_last=not args.use_tp_pp_dp_mapping,
        gemm=(
            args.micro_batch_size * args.seq_length,
            args.ffn_hidden_size // args.tensor_model_parallel_size,
            args.hidden_size,
        ),
        false_alarms_per_job=config.resihp_false_alarms_per_job,
        distributed_optimizer=job.shares_optimizer,
        strategy=config.resihp_strategy,
        plan_wait=config.resihp_plan_wait,
        act=config.resihp_act,
        begins_with_a_plan=config.begins_with_a_plan,
        seconds_between_changes=config.resihp_seconds_between_changes,
        device_memory=None if cpu.installed() else torch.cuda.get_device_properties(args.local_rank).total_memory,
        memory_reserve=config.resihp_memory_reserve,
        # Other processes of the host need some, too, and more later than as the job begins.
        host_memory=None if cpu.installed() else free_on_host() * 3 // 4,
        cost_model=config.resihp_cost_model and os.path.abspath(config.resihp_cost_model),
        carrier=config.resihp_carrier,
        spread_replicas=config.resihp_spread_replicas,
    )


def as_run(args: Any, stand_in: bool | None = None) -> dict[str, Any]:
    """Megatron's arguments. On the stand-in for CPUs groups are gloo's, whatever --distributed-backend says.

    Args:
        stand_in: whether workers run on it; None: as this process does.
    """
    on_cpus = cpu.installed() if stand_in is None else stand_in
    return vars(args) | ({"distributed_backend": "gloo"} if on_cpus else {})


def model_fields(args: Any, stand_in: bool | None = None) -> dict[str, Any]:
    """What a planner must know of Megatron's arguments once the tokenizer is there. `stand_in`: as in `as_run`."""
    arguments = as_run(args, stand_in)
    found = {name: arguments.get(name) for name in ARGUMENTS}
    return {name: value.name if isinstance(value, Enum) else value for name, value in found.items()}


def wrap_initialize_model_parallel(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """Remember how Megatron's groups were made, to make them again in later worlds."""

    @functools.wraps(original)
    def initialize_model_parallel(*positional: Any, **options: Any) -> None:
        options = {name: chosen_once(value) if callable(value) else value for name, value in options.items()}
        runtime.setup.build_groups = functools.partial(original, *positional, **options)
        with lonely_groups() if runtime.joining else runtime.communicators.meeting_at_once():
            original(*positional, **options)
        runtime.setup.groups = MegatronGroups()

    return initialize_model_parallel


def chosen_once(choose: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    """A script's choice among the ranks of a pipeline, for the embedding say, made once for each length of pipelines.

    It may depend on arguments, and these say something else while a heterogeneous plan is run.
    """
    positions: dict[int, list[int]] = {}

    @functools.wraps(choose)
    def chosen(ranks: list[int]) -> list[int]:
        if len(ranks) not in positions:
            positions[len(ranks)] = [ranks.index(rank) for rank in choose(ranks)]
        return [ranks[position] for position in positions[len(ranks)]]

    return chosen


def wrap_setup_model_and_optimizer(
    runtime: Runtime, release: Release, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Remember how model, optimizer and scheduler were made, and make the optimizer's step the agreed one."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **options: Any) -> Any:
        if runtime.worker == 0:  # first, so that planners practise meanwhile
            runtime.control.tell(ModelBuilt(runtime.worker, model_fields(runtime.job.args)))
        # What a joining worker will hold comes from others, not from a checkpoint.
        with _without_loading(runtime.job.args) if runtime.joining else nullcontext():
            model, optimizer, scheduler = original(*positional, **options)
        runtime.held.live = Trained(model, optimizer, scheduler)
        config = get_model_config(model[0])
        parameters = {name: each for chunk in model for name, each in chunk.named_parameters()}
        per_token = runtime.job.args.calculate_per_token_loss
        if lines := unheeded(config, [part.config for part in parts_of(optimizer)], per_token, parameters):
            fail(*lines)
        runtime.setup.sizes = sizes_of(runtime.job.args, runtime.job.derived, options.get("cfg_container"))
        hooks = {name: getattr(config, name) for name in CONFIG_HOOKS}
        options.pop("pg_collection", None)
        again = functools.partial(original, *positional, **options)
        runtime.setup.build_trained = functools.partial(_build_again, runtime, release, again, hooks)
        install_step(runtime)
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def sizes_of(args: Any, derived: DerivedArguments, container: Any) -> Sizes:
    """The job's own sizes, where Megatron looks them up."""
    model, wrapping = getattr(container, "model", None), getattr(container, "ddp", None)
    if model is None:
        return Sizes(args.padded_vocab_size, derived, args)
    vocabulary = model.vocab_size
    if model.should_pad_vocab:
        degree = model.tensor_model_parallel_size
        vocabulary = calculate_padded_vocab_size(vocabulary, model.make_vocab_size_divisible_by, degree)
    return Sizes(vocabulary, derived, args, model, *([] if wrapping is None else [wrapping]))


def wrap_build_model(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """This worker's chunks, as the plan's mode builds them."""

    @functools.wraps(original)
    def build_model(*positional: Any, **options: Any) -> Any:
        with sizes_as_they_are():
            model = runtime.mode.state.build_model(functools.partial(original, *positional, **options))
        count_exactly(model)
        return model

    return build_model


def wrap_ddp(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """Chunks that are built again take over the old ones' parameters, and have no gradients before they are whole."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, ddp_config: Any, module: Any, *positional: Any, **options: Any) -> None:
        succession = runtime.held.succession
        if succession is not None:
            succession.parameters_of(module, in_buffers=ddp_config.use_distributed_optimizer)
        original(self, config, ddp_config, module, *positional, **options)
        if succession is not None:
            succession.built(self)

    return __init__


def _build_again(runtime: Runtime, release: Release, set_up: Callable[..., Any], hooks: dict[str, Any]) -> Trained:
    """Megatron's own set-up in the new groups, without loading a checkpoint or resetting the counters.

    Args:
        set_up: as it was called at the start, without the groups of then.
        hooks: what the configuration held before train() changed it.
    """
    args = runtime.job.args
    # The builder reuses the config object, on which train() has left functions of the old model.
    config = get_model_config(runtime.held.live.model[0])
    for name, value in hooks.items():
        setattr(config, name, value)
    # All parameters come from the old objects or from other workers. Scripts may make a configuration of the arguments.
    config.perform_initialization = args.perform_initialization = False
    with _without_loading(args), counting_samples(args):
        if not release.set_up_takes_groups:
            return Trained(*set_up())
        return Trained(*set_up(pg_collection=ProcessGroupCollection.use_mpu_process_groups()))


@contextmanager
def counting_samples(args: Any) -> Iterator[None]:
    """Let Megatron make the scheduler of a job of so many samples as it made the first one. That has set how many
    iterations these are, and where that is set Megatron reads the flags of the other kind of jobs."""
    kept = args.train_iters, args.step_batch_size_schedule
    if args.train_samples:
        # Without the schedule, so that it counts no iterations one by one.
        args.train_iters = args.step_batch_size_schedule = None
    try:
        yield
    finally:
        args.train_iters, args.step_batch_size_schedule = kept


@contextmanager
def _without_loading(args: Any) -> Iterator[None]:
    """Let Megatron find no checkpoint to load, and leave the counters as they are, if there are any yet."""
    names = ("load", "pretrained_checkpoint", "iteration", "num_floating_point_operations_so_far")
    kept = {name: getattr(args, name) for name in names if hasattr(args, name)}
    args.load = args.pretrained_checkpoint = None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)
