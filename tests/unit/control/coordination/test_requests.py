# SPDX-License-Identifier: Apache-2.0
"""What others on node 0 ask of the coordinator."""

from __future__ import annotations

from megatron_resihp.control.coordination.requests import Requests
from megatron_resihp.protocol.messages import PlanRequest
from megatron_resihp.protocol.notices import ValidationOrder


def test_requests_are_taken_once_and_in_their_order() -> None:
    requests = Requests()
    order, plan = ValidationOrder(1, 0, ()), PlanRequest({}, "by hand")
    requests.validate(order)
    requests.change_plan(plan)
    assert requests.take() == [order, plan] and not requests.take()
