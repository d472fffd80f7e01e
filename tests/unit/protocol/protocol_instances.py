# SPDX-License-Identifier: Apache-2.0
"""Instances of messages: hypothesis' strategies made of the types of fields, and one plain instance of each kind."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from megatron_resihp.coding import Between, Matches, Repeated
from megatron_resihp.coding.decoding import MOST_CHARACTERS
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.protocol.answers import ANSWERS
from megatron_resihp.protocol.logs import CheckpointNote, Scalar, Text, WandbRow
from megatron_resihp.protocol.messages import MESSAGES
from megatron_resihp.protocol.notices import NOTICES
from megatron_resihp.protocol.planning import PLANNER_ANSWERS, PLANNER_REQUESTS
from megatron_resihp.protocol.published import DECISIONS, END, GO
from megatron_resihp.protocol.records import Counters
from megatron_resihp.protocol.values import DigestKey, HeldShard, LayerChunk, Sharers
from megatron_resihp.protocol.wire import Kinds

ALL = (MESSAGES, NOTICES, DECISIONS, GO, END, ANSWERS, PLANNER_REQUESTS, PLANNER_ANSWERS)
PLAN = ParallelPlan((Replica(((0,), (2,)), (0, 1)), Replica(((1,), (3,)), (2, 3))))
JSON = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2)
OF_RULES: Mapping[Any, st.SearchStrategy[Any]] = {
    Shard: st.sampled_from([Shard(0, 3, 4160, 4161), Shard(2, 5, 1, 2)]),
    HeldShard: st.sampled_from([Shard(0, 3, 0, 1), Shard(2, 5, 1, 2), Shard(0, 1, 1, 2, 1, 2, 1)]),
    LayerChunk: st.sampled_from([Chunk(0, 0, 3), Chunk(1, 3, 6)]),
    Sharers: st.sampled_from([Sharing(), Sharing(2, 4, 1)]),
    Scalar: st.sampled_from([Scalar("lm loss", 2.5, 4), Scalar("grad-norm", math.inf, 4)]),
    Text: st.sampled_from([Text("seq_length", "32", 0), Text("seed", "1", None)]),
    WandbRow: st.sampled_from([WandbRow({"lm loss": 2.5}, 4), WandbRow({}, None)]),
    CheckpointNote: st.just(CheckpointNote(True, "/saved/iter_0000004", "/saved", None, 4)),
    DigestKey: st.sampled_from(["0/0", "-1/-1/4", "1/0/1/2"]),
    Counters: st.dictionaries(st.text(max_size=3).filter("totals".__ne__), JSON, max_size=2),
}


@cache
def instances_of(kind: Any) -> st.SearchStrategy[Any]:
    """Of a type, as fields of messages have it; all of its rules hold."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in OF_RULES:
        return OF_RULES[kind]
    if origin is Annotated:
        return _ruled(*arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(instances_of, arguments))
    if origin is tuple:
        row = arguments[1:] != (...,)
        return st.tuples(*map(instances_of, arguments)) if row else st.lists(
            instances_of(arguments[0]), max_size=2).map(tuple)  # fmt: skip
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(*map(instances_of, arguments), max_size=2)
    if kind is Any:
        return JSON
    if kind is ParallelPlan:
        return st.just(PLAN)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{each.name: instances_of(hints[each.name]) for each in dataclasses.fields(kind)})
    if hasattr(kind, "_fields"):
        return st.builds(kind, *map(instances_of, get_type_hints(kind, include_extras=True).values()))
    return {
        int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False), str: st.text(max_size=5),
        bool: st.booleans(), types.NoneType: st.none(),
    }[kind]  # fmt: skip


def _ruled(kind: Any, *rules: Any) -> st.SearchStrategy[Any]:
    rules = tuple(rule for rule in rules if not isinstance(rule, Repeated))
    bounds = [rule for rule in rules if isinstance(rule, Between)]
    if kind is int and bounds:
        least, most = bounds[0].least, bounds[0].most
        return st.integers(None if least is None else int(least), 2**63 - 1 if most is None else int(most))
    assert not any(isinstance(rule, Matches) for rule in rules), "say in OF_RULES what matches"
    return instances_of(kind).filter(lambda value: all(rule.holds(value) for rule in rules))


def malformed(kinds: Kinds[Any], body: Any, sender: str) -> Iterator[str]:
    """Texts that are almost what holds this: without a field, with one too many, with wrong and large values."""
    whole = json.loads(kinds.write(body, sender))
    fields, hints = whole["body"], get_type_hints(type(body))
    for name in fields:
        yield json.dumps({**whole, "body": {key: value for key, value in fields.items() if key != name}})
        if hints[name] is not Any:
            wrong = 7 if hints[name] == dict[str, Any] else {"a": {"b": 1}}
            yield json.dumps({**whole, "body": {**fields, name: wrong}})
            yield json.dumps({**whole, "body": {**fields, name: "x" * (MOST_CHARACTERS + 1)}})
    yield json.dumps({**whole, "body": {**fields, "weather": "sunny"}})
    yield json.dumps({**whole, "protocol": "99.0"})
    yield json.dumps({**whole, "kind": "Weather"})


def spoiled(value: Any) -> Iterator[tuple[str, bool, Any]]:
    """Almost the same plain value, many times: where it is another one, whether something is gone there, and it.

    Each entry of each object, and the first one of each list, is gone (of objects only), of a wrong type, or too large.
    """
    if isinstance(value, dict):
        entries: list[tuple[Any, Any]] = list(value.items())
    else:
        entries = list(enumerate(value[:1])) if isinstance(value, list) else []
    for key, each in entries:
        if isinstance(value, dict):
            yield str(key), True, {name: other for name, other in value.items() if name != key}
        wrong = 7 if isinstance(each, dict) else {"a": {"b": 1}}
        for other in (wrong, "x" * (MOST_CHARACTERS + 1)):
            yield str(key), False, _changed(value, key, other)
        for path, gone, other in spoiled(each):
            yield f"{key}.{path}", gone, _changed(value, key, other)


def _changed(value: Any, key: Any, other: Any) -> Any:
    if isinstance(value, dict):
        return {**value, key: other}
    return [other if number == key else each for number, each in enumerate(value)]


def with_more(value: Any, mapped: Collection[str]) -> Any:
    """The same plain value with one field more in each object, but not in mappings, which go by these names."""
    if isinstance(value, list):
        return [with_more(each, mapped) for each in value]
    if not isinstance(value, dict):
        return value
    more = {name: each if name in mapped else with_more(each, mapped) for name, each in value.items()}
    return {**more, "weather": {"sunny": True}}
