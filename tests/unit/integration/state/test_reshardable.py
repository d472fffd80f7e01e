# SPDX-License-Identifier: Apache-2.0
"""What a plain optimizer saves, made such that a distributed one can load it: common state, and masters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Linear(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, master: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 5, dtype=dtype))
        if master:
            self.weight.main_param = self.weight.detach().float() + 1e-5  # type: ignore[attr-defined]


def sharded(model: Linear) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {"model0": {"weight": ShardedTensor.from_rank_offsets("layer.weight", model.weight, (0, 1, 4))}}


def saved(sixteen: bool, **group: Any) -> dict[str, Any]:
    """What Megatron's plain optimizers give, of 16-bit parameters and of others."""
    inner = {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{"wd_mult": 1.0, "params": [0], **group}]}
    return {"optimizer": inner, "fp32_from_fp16_params": []} if sixteen else inner


def add(own: dict[Any, Any], model: Linear, chunks: dict[str, Any] | None = None, parts: int = 1) -> list[Any]:
    from megatron_resihp.integration.state.reshardable import add_reshardable

    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None)] * parts)
    return add_reshardable(own, optimizer, [model], sharded(model) if chunks is None else chunks)


@pytest.mark.parametrize("sixteen", [False, True], ids=["32 bits", "16 bits"])
def test_groups_get_the_count_of_steps_and_masters_their_own_key(sixteen: bool) -> None:
    model = Linear(torch.bfloat16 if sixteen else torch.float32, master=sixteen)
    own = saved(sixteen)
    [master] = add(own, model)
    assert own["param_state_sharding_type"] == "fully_reshardable"
    assert own["optimizer"]["param_groups"] == [{"wd_mult": 1.0, "step": 7}]
    assert master.key == "optimizer.state.param.layer.weight"
    assert (master.dtype, master.global_shape, master.global_offset) == (torch.float32, (12, 5), (3, 0))
    assert master.data is (model.weight.main_param if sixteen else model.weight)
    # What jobs without the distributed optimizer load is still there.
    assert (own["optimizer"] if sixteen else own)["state"] == {"common_step": torch.tensor(7.0)}


def test_each_part_of_a_chained_optimizer_is_made_loadable() -> None:
    own = {0: saved(False), 1: saved(False)}
    add(own, Linear(torch.float32, master=False), parts=2)
    assert all(part["optimizer"]["param_groups"][0]["step"] == 7 for part in own.values())


def test_one_that_steps_matrices_is_left_as_it_is() -> None:
    """Megatron shares it out by layers, and loads it as a plain one."""
    from megatron_resihp.integration.state.reshardable import add_common

    own = {0: {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, 1: saved(True)}
    muon = SimpleNamespace(optimizer=SimpleNamespace(scaled_orthogonalize_fn=len))
    add_common(own, SimpleNamespace(chained_optimizers=[muon, SimpleNamespace(optimizer=None)]))
    assert own[0] == {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}
    assert own[1]["optimizer"]["param_groups"][0]["step"] == 7


def test_a_fused_optimizer_s_own_count_stays() -> None:
    own = saved(False, step=9)
    del own["state"]["common_step"]
    add(own, Linear(torch.float32, master=False))
    assert own["optimizer"]["param_groups"] == [{"wd_mult": 1.0, "step": 9}]


def test_what_could_not_be_gone_on_from_is_refused() -> None:
    model = Linear(torch.float32, master=False)
    uncounted = saved(False)
    del uncounted["state"]["common_step"]
    with pytest.raises(ValueError, match="not taken a step yet"):
        add(uncounted, model)
    with pytest.raises(ValueError, match="weight is trained"):
        add(saved(False), model, chunks={})
    with pytest.raises(ValueError, match="weight has no master"):
        add(saved(True), Linear(torch.bfloat16, master=False))


@pytest.mark.parametrize(("own", "others", "expected"), [(False, 0, False), (True, 0, True), (False, 1, True)])
def test_a_worker_that_trains_nothing_goes_by_the_others(
    monkeypatch: pytest.MonkeyPatch, own: bool, others: int, expected: bool
) -> None:
    from megatron_resihp.integration.state import reshardable

    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, dtype, device: plain(values, dtype=dtype))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda some, op: some.clamp_(min=others))
    stub = SimpleNamespace(is_stub_optimizer=True, optimizer=None)
    state = {"weight": {"exp_avg": 0.0} if own else {}}
    part = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(state=state))
    assert reshardable.has_stepped(SimpleNamespace(chained_optimizers=[stub, part])) is expected
