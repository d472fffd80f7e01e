# SPDX-License-Identifier: Apache-2.0
"""A copy of experts that are held once: made by the owner, stepped by the keeper, and as good as the owner's own."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.executor.transfer import receive_tensors, send_tensors
from megatron_resihp.integration.state.parameter_slices import renumbered
from megatron_resihp.integration.state.slice_state import Holding, Redistribution, move_state
from megatron_resihp.integration.step import expert_ring, optimizer_shards
from megatron_resihp.integration.step.copied_experts import beside, siblings
from megatron_resihp.integration.step.expert_ring import copy_of, loads_of, needed_bytes, share_expert_gradients
from megatron_resihp.integration.step.optimizer_buddies import Ring
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy
from megatron_resihp.integration.step.optimizer_shards import digest_of, expert_part
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import Shard

HOST = torch.device("cpu")
EXPERTS = 4
KEEPER, OWNER = 0, 1
SHARDS = {worker: (Shard(0, 3, 0, 1, worker, 2),) for worker in (KEEPER, OWNER)}
WHOLE = (Shard(0, 3, 0, 1),)
LAYOUT = 1, None, 2
"""Layers in one cut, no tied head, experts in two shares."""


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(tensors: dict[str, torch.Tensor]) -> str:
        return repr({name: tensors[name].double().flatten().tolist() for name in sorted(tensors)})

    monkeypatch.setattr(optimizer_shards, "_digest_on_device", digest)


class Layer(torch.nn.Module):
    """Two weights that are no expert's beside its experts, as Megatron names them."""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.norm = torch.nn.Linear(3, 2, bias=False)
        self.mlp = torch.nn.Module()
        self.mlp.local_expert_indices = list(own)  # type: ignore[assignment]
        self.mlp.experts = torch.nn.Module()
        experts = [torch.nn.ModuleDict({
            "linear_fc1": torch.nn.Linear(3, 4, bias=False), "linear_fc2": torch.nn.Linear(4, 3, bias=False)
        }) for _ in own]  # fmt: skip
        self.mlp.experts.local_experts = torch.nn.ModuleList(experts)


def chunk(own: range, dtype: torch.dtype) -> Any:
    module = torch.nn.Module()
    module.decoder = torch.nn.Module()
    module.decoder.layers = torch.nn.ModuleList([Layer(own)])
    module.config = SimpleNamespace(num_moe_experts=EXPERTS, gated_linear_unit=False, mtp_num_layers=None)  # type: ignore[assignment]
    return module.to(dtype)


def trained(own: range, dtype: torch.dtype = torch.float32) -> Trained:
    """With optimizers of experts and of all else, as Megatron has them where experts are shared."""
    model = chunk(own, dtype)
    parts = []
    for of_experts in (False, True):
        masters = []
        for name, parameter in model.named_parameters():
            if (".experts." in name) is of_experts:
                if dtype is not torch.float32:
                    parameter.main_param = parameter.detach().float()
                masters.append(getattr(parameter, "main_param", parameter))
        inner = torch.optim.AdamW(masters, lr=0.1)
        parts.append(SimpleNamespace(optimizer=inner, config=SimpleNamespace(clip_grad=0.0), is_stub_optimizer=False))
    return Trained([model], SimpleNamespace(chained_optimizers=parts), None)


def step(objects: Trained) -> None:
    for part in objects.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.grad = master.gradient
        part.optimizer.step()
    for parameter in objects.model[0].parameters():
        if hasattr(parameter, "main_param"):
            parameter.data.copy_(parameter.main_param)


def draw_gradients(objects: Trained) -> None:
    for parameter in objects.model[0].parameters():
        parameter.main_grad = torch.randn(parameter.shape)  # type: ignore[attr-defined]
        getattr(parameter, "main_param", parameter).gradient = parameter.main_grad  # type: ignore[attr-defined]


class Wire:
    """What workers send each other."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def end(self, me: int) -> Any:
        def send(tensor: torch.Tensor, worker: int) -> None:
            self.sent[me, worker].append(tensor.detach().clone())

        def receive(tensor: torch.Tensor, worker: int) -> None:
            tensor.copy_(self.sent[worker, me].pop(0).view(tensor.shape))

        return SimpleNamespace(
            send=send, receive=receive,
            sending=lambda *what: iter([partial(send, *what)]), receiving=lambda *what: iter([partial(receive, *what)]),
            at_once=lambda *transfers: [post() for transfer in transfers for post in transfer],
        )  # fmt: skip


def copied(wire: Wire, owner: Trained) -> ExpertCopy:
    part = expert_part(owner)
    named = {f"{index}/{name}": tensor for index, entry in enumerate(part.values())
             for name, tensor in entry.tensors.items()}  # fmt: skip
    said = {"places": [(where, entry.place) for where, entry in part.items()], "steps": [], "digest": digest_of(part)}
    send_tensors(wire.end(OWNER), KEEPER, named, said)
    tensors, heard = receive_tensors(wire.end(KEEPER), OWNER, HOST)
    return ExpertCopy(SHARDS[OWNER], copy_of(OWNER, tensors, heard))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("load", [4, 1 << 20], ids=["one by one", "together"])
def test_a_survivor_has_the_experts_of_the_dead(dtype: torch.dtype, load: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever the type of parameters; new objects that have all experts are filled from both."""
    monkeypatch.setattr(expert_ring, "LOAD", load)
    torch.manual_seed(0)
    keeper, owner, wire = trained(range(2), dtype), trained(range(2, 4), dtype), Wire()
    experts = copied(wire, owner)
    to_keeper = (OWNER, KEEPER)
    for _ in range(3):
        draw_gradients(keeper)
        draw_gradients(owner)
        back = ExpertCopy(SHARDS[KEEPER], SimpleNamespace(cost=SimpleNamespace(bytes_sent=0, exchange_s=0.0)))  # type: ignore[arg-type]
        share_expert_gradients(owner, back, Ring((to_keeper,), wire.end(OWNER)), OWNER)
        share_expert_gradients(keeper, experts, Ring((to_keeper,), wire.end(KEEPER)), KEEPER)
        assert back.copy.cost.bytes_sent == 4 * experts.copy.elements
        experts.copy.prepare_step(keeper.optimizer, 1.0, None, HOST)
        step(keeper)
        step(owner)
    assert digest_of(experts.copy.part) == digest_of(expert_part(owner))

    new, before = trained(range(4), dtype), Holding(keeper, SHARDS[KEEPER], *LAYOUT)
    before.beside = beside(keeper, SHARDS[KEEPER], experts, *LAYOUT)
    shards = Redistribution({KEEPER: SHARDS[KEEPER]}, {KEEPER: WHOLE}, *LAYOUT, {KEEPER: SHARDS[OWNER]})
    move_state(wire.end(KEEPER), KEEPER, before, Holding(new, WHOLE, *LAYOUT), shards, lambda: None)
    now = {where.name: entry for where, entry in expert_part(new).items()}
    for objects in (keeper, owner):
        for where, entry in expert_part(objects).items():
            assert entry.tensors.keys() == now[where.name].tensors.keys()
            for name, tensor in entry.tensors.items():
                assert torch.equal(tensor, now[where.name].tensors[name]), (where, name)
    for number, expert in enumerate(new.model[0].decoder.layers[0].mlp.experts.local_experts):
        former = (keeper, owner)[number // 2].model[0].decoder.layers[0].mlp.experts.local_experts[number % 2]
        assert all(map(torch.equal, expert.parameters(), former.parameters()))


def test_a_copy_that_is_not_what_the_owner_has_is_an_error() -> None:
    owner = trained(range(2, 4))
    part = expert_part(owner)
    tensors = {f"{index}/param": entry.tensors["param"].clone() for index, entry in enumerate(part.values())}
    said = {"places": [(where, entry.place) for where, entry in part.items()], "steps": [], "digest": digest_of(part)}
    assert copy_of(OWNER, tensors, said).elements == 2 * (3 * 4 + 4 * 3)
    tensors["0/param"][0] += 1
    with pytest.raises(RuntimeError, match="the copy of worker 1's experts is not what worker 1 has"):
        copy_of(OWNER, tensors, said)


def test_gradients_cross_in_loads_that_both_sides_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is larger than a load crosses alone."""
    monkeypatch.setattr(expert_ring, "LOAD", 40)
    assert loads_of([4, 4, 4, 100, 1, 9, 1]) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    assert loads_of([]) == []


def test_room_is_reckoned_with_for_moments_before_there_are_any() -> None:
    fresh, used = trained(range(2)), trained(range(2))
    draw_gradients(used)
    step(used)
    elements = 2 * (3 * 4 + 4 * 3)
    assert needed_bytes(expert_part(fresh)) == 4 * 4 * elements
    assert 4 * 4 * elements <= needed_bytes(expert_part(used)) <= 4 * 4 * elements + 4 * 4


def test_an_expert_is_like_another_of_the_same_layer() -> None:
    names = ["0/layers.1.mlp.experts.local_experts.2.linear_fc1.weight", "0/layers.1.mlp.experts.linear_fc2.weight2",
             "0/layers.1.norm.weight"]  # fmt: skip
    own = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    wanted = [renumbered(name, 7) for name in names[:2]]
    assert siblings(own, [*wanted, "0/layers.2.mlp.experts.linear_fc2.weight7", "0/layers.1.norm.weight"]) == dict(
        zip(wanted, names, strict=False)
    )
