# SPDX-License-Identifier: Apache-2.0
"""What a device that is only emulated takes for its work: layer times, links and noise, from a JSON file.

The files of this package are in `profiles/`. Imports the standard library.

A profile gives the seconds of each pass of each kind of layer at one reference point (N tokens, Σ l² squares, a
tensor-parallel degree). Between workloads they follow T = αN + βΣl² + γ: `attention` is the share of the seconds, less
the fixed ones, that grows with Σ l²; the rest grows with N. N and Σ l² are those of the emulated job, in which a full
sequence of the real, tiny one stands for `sequence` tokens. Other tensor-parallel degrees divide α and β.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

VERSION: Final = 1
BUILT_IN: Final = Path(__file__).with_name("profiles")
PASSES: Final = ("F", "B", "W")


class ProfileError(ValueError):
    """A profile that cannot be used; the message is one line that names cause and mend."""


class LayerKind(StrEnum):
    """What a profile has times for. `attention` and `mlp` are layers of which the other half is missing; `moe` has a
    mixture of experts for an MLP."""

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    ATTENTION = "attention"
    MLP = "mlp"
    MOE = "moe"
    MAMBA = "mamba"
    HEAD = "head"


@dataclass(frozen=True)
class PassCost:
    """T = αN + βΣl² + γ.

    Attributes:
        per_token: α, seconds per token.
        per_square: β, seconds per token².
        fixed: γ, seconds.
    """

    per_token: float = 0.0
    per_square: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(self.per_token + other.per_token, self.per_square + other.per_square, self.fixed + other.fixed)

    def seconds(self, tokens: float, squares: float) -> float:
        return self.per_token * tokens + self.per_square * squares + self.fixed

    def scaled(self, variable: float, fixed: float) -> PassCost:
        """α and β times `variable`, γ times `fixed`."""
        return PassCost(self.per_token * variable, self.per_square * variable, self.fixed * fixed)


@dataclass(frozen=True)
class LinkCost:
    """latency + bytes / bandwidth.

    Attributes:
        latency_s: seconds.
        bytes_per_s: of one direction.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class DeviceProfile:
    """An emulated device and its links.

    Attributes:
        device: its name.
        passes: by kind of layer, the cost of F, B and W for a member of a group of `tensor_parallel`.
        tensor_parallel: degree that the costs are for.
        sequence: tokens that a full sequence of the real job stands for.
        time_scale: seconds of the emulated clock per second of the device; less than 1 compresses.
        workers_per_node: workers with neighbouring ids that share an emulated machine.
        within_node, between_nodes: links.
        boundary_bytes_per_token: what a token of an activation at a stage boundary weighs.
        noise: standard deviation of an op's duration, relative to it.
        seed: of that noise.
    """

    device: str
    passes: Mapping[LayerKind, tuple[PassCost, PassCost, PassCost]]
    tensor_parallel: int
    sequence: int
    time_scale: float
    workers_per_node: int
    within_node: LinkCost
    between_nodes: LinkCost
    boundary_bytes_per_token: float
    noise: float
    seed: int

    def stage(self, layers: Iterable[LayerKind], tensor_parallel: int) -> tuple[PassCost, PassCost, PassCost]:
        """The costs of F, B and W of some layers together, in seconds of the emulated clock.

        Args:
            layers: kinds, one for each layer.
            tensor_parallel: degree of the group that runs them.
        """
        share = self.tensor_parallel / tensor_parallel
        total = [PassCost()] * len(PASSES)
        for kind in layers:
            total = [sum_ + cost for sum_, cost in zip(total, self.passes[kind], strict=True)]
        forward, backward, weight = (cost.scaled(share * self.time_scale, self.time_scale) for cost in total)
        return forward, backward, weight

    def transfer_seconds(self, ends: tuple[int, int], tokens: float) -> float:
        """Seconds of the emulated clock that the activation of so many tokens takes from one worker to the other."""
        first, second = (worker // self.workers_per_node for worker in ends)
        link = self.within_node if first == second else self.between_nodes
        return self.time_scale * link.seconds(tokens * self.boundary_bytes_per_token)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the JSON form.

        Raises:
            ProfileError: if something is missing or is no sensible number.
        """
        if data.get("version") != VERSION:
            raise ProfileError(f"version is {data.get('version')!r}; this package reads version {VERSION}")
        reference, links, noise = (_part(data, name) for name in ("reference", "links", "noise"))
        return cls(
            device=str(data.get("device", "unnamed")),
            passes=_passes(data, reference),
            tensor_parallel=int(_number(reference, "tensor_parallel", least=1)),
            sequence=int(_number(data, "sequence", least=1)),
            time_scale=_number(data, "time_scale"),
            workers_per_node=int(_number(links, "workers_per_node", least=1)),
            within_node=_link(links, "within_node"),
            between_nodes=_link(links, "between_nodes"),
            boundary_bytes_per_token=_number(data, "boundary_bytes_per_token"),
            noise=_number(noise, "relative", least=0.0),
            seed=int(_number(noise, "seed", least=0)),
        )


def load_profile(name: str) -> DeviceProfile:
    """Read a profile: a JSON file, or one of this package's by its name.

    Raises:
        ProfileError: if there is none or it cannot be used.
    """
    built_in = sorted(path.stem for path in BUILT_IN.glob("*.json"))
    path = BUILT_IN / f"{name}.json" if name in built_in else Path(name)
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise ProfileError("it holds no JSON object")
        return DeviceProfile.from_dict(data)
    except OSError as error:
        choice = ", ".join(built_in)
        raise ProfileError(f"device profile {name}: {error.strerror}; give a JSON file, or one of {choice}") from error
    except ValueError as error:  # also of JSON and of its encoding
        raise ProfileError(f"device profile {name}: {error}") from error


def _passes(
    data: Mapping[str, Any], reference: Mapping[str, Any]
) -> dict[LayerKind, tuple[PassCost, PassCost, PassCost]]:
    tokens, squares = _number(reference, "tokens"), _number(reference, "squares")
    fixed = _number(data, "fixed_seconds", least=0.0)
    layers = _part(data, "layers")
    found = {}
    for kind in LayerKind:
        layer = _part(layers, kind)
        forward, backward, weight = (_pass(layer, name, f"{kind} {name}", tokens, squares, fixed) for name in PASSES)
        found[kind] = (forward, backward, weight)
    return found


def _pass(layer: Mapping[str, Any], name: str, where: str, tokens: float, squares: float, fixed: float) -> PassCost:
    part = _part(layer, name)
    seconds, attention = _number(part, "seconds", least=0.0), _number(part, "attention", least=0.0)
    if attention > 1.0:
        raise ProfileError(f"{where}: attention {attention:g} is a share, at most 1")
    # A pass that the device does not have (the embedding's W) has no launches either.
    fixed = min(fixed, seconds)
    variable = seconds - fixed
    return PassCost((1.0 - attention) * variable / tokens, attention * variable / squares, fixed)


def _link(links: Mapping[str, Any], name: str) -> LinkCost:
    link = _part(links, name)
    return LinkCost(_number(link, "latency_s", least=0.0), _number(link, "bytes_per_s"))


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    if not isinstance(part, dict):
        raise ProfileError(f"{str(name)!r} is missing or no JSON object")
    return part


def _number(data: Mapping[str, Any], name: str, least: float | None = None) -> float:
    """A finite number: above 0, or at least `least`."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProfileError(f"{name!r} is {value!r}, not a number")
    if value < least if least is not None else value <= 0:
        raise ProfileError(f"{name!r} is {value:g}, not {'above 0' if least is None else f'{least:g} or more'}")
    return float(value)
