# SPDX-License-Identifier: Apache-2.0
"""Times of an emulated device: layers, links and noise, from a JSON file.

The built-in files are in `profiles/`. May import `coding`.

A profile gives the seconds of each pass of each kind of layer at one reference point (N tokens, Σ l² squares, a
tensor-parallel degree). For other workloads they follow T = αN + βΣl² + γ: of the seconds without the fixed ones, the
share `attention` grows with Σ l², and the rest with N. N and Σ l² are those of the emulated job. A full sequence of the
real, tiny job stands for `sequence` tokens of it. Other tensor-parallel degrees divide α and β.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from megatron_resihp.coding import FILE, Holds, WrongValueError, decode, shown, version_said

VERSION: Final = 1
BUILT_IN: Final = Path(__file__).with_name("profiles")
PASSES: Final = ("F", "B", "W")


class ProfileError(ValueError):
    """A profile that cannot be used; the message is one line with cause and mend."""


class LayerKind(StrEnum):
    """Kinds of layers in a profile.

    `attention` and `mlp` are layers without the other half; `moe` has a mixture of experts instead of an MLP.
    """

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    ATTENTION = "attention"
    MLP = "mlp"
    MOE = "moe"
    MAMBA = "mamba"
    HEAD = "head"


_Number = Annotated[float, Holds(math.isfinite, "a number")]
_Positive = Annotated[_Number, Holds(lambda value: value > 0, "above 0")]
_NotNegative = Annotated[_Number, Holds(lambda value: value >= 0, "0 or more")]
_Count = Annotated[_Number, Holds(lambda value: value >= 1, "1 or more")]


@dataclass(frozen=True)
class _Reference:
    tokens: _Positive
    squares: _Positive
    tensor_parallel: _Count


@dataclass(frozen=True)
class _Pass:
    seconds: _NotNegative
    attention: _NotNegative


@dataclass(frozen=True)
class _Layer:
    F: _Pass
    B: _Pass
    W: _Pass


@dataclass(frozen=True)
class _Layers:
    """One entry for each `LayerKind`."""

    embedding: _Layer
    transformer: _Layer
    attention: _Layer
    mlp: _Layer
    moe: _Layer
    mamba: _Layer
    head: _Layer


@dataclass(frozen=True)
class LinkCost:
    """latency + bytes / bandwidth.

    Attributes:
        latency_s: seconds.
        bytes_per_s: in one direction.
    """

    latency_s: _NotNegative
    bytes_per_s: _Positive

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class _Links:
    workers_per_node: _Count
    within_node: LinkCost
    between_nodes: LinkCost


@dataclass(frozen=True)
class _Noise:
    relative: _NotNegative
    seed: _NotNegative


@dataclass(frozen=True)
class _Written:
    """A profile's file; `DeviceProfile` explains most fields."""

    reference: _Reference
    sequence: _Count
    time_scale: _Positive
    fixed_seconds: _NotNegative
    boundary_bytes_per_token: _Positive
    layers: _Layers
    links: _Links
    noise: _Noise
    device: str = "unnamed"


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
class DeviceProfile:
    """An emulated device and its links.

    Attributes:
        device: its name.
        passes: by kind of layer, the cost of F, B and W for a member of a group of `tensor_parallel`.
        tensor_parallel: degree to which the costs apply.
        sequence: tokens that a full sequence of the real job stands for.
        time_scale: seconds of the emulated clock per second of the device; less than 1 compresses.
        workers_per_node: number of workers with neighbouring ids that share an emulated machine.
        within_node, between_nodes: links.
        boundary_bytes_per_token: bytes of a token's activation at a stage boundary.
        noise: standard deviation of an op's duration, relative to it.
        seed: of the noise.
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
        """Seconds of the emulated clock for the activation of `tokens` tokens from one worker to the other."""
        first, second = (worker // self.workers_per_node for worker in ends)
        link = self.within_node if first == second else self.between_nodes
        return self.time_scale * link.seconds(tokens * self.boundary_bytes_per_token)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read the JSON form.

        Raises:
            ProfileError: a value is missing or is no sensible number.
        """
        try:
            version = version_said(data)
            if version != VERSION:
                raise ProfileError(f"version is {shown(version)}; this package reads version {VERSION}")
            written: _Written = decode(_Written, data, FILE)
        except WrongValueError as error:
            raise ProfileError(str(error)) from None
        return cls(
            device=written.device,
            passes=_passes(written),
            tensor_parallel=int(written.reference.tensor_parallel),
            sequence=int(written.sequence),
            time_scale=written.time_scale,
            workers_per_node=int(written.links.workers_per_node),
            within_node=written.links.within_node,
            between_nodes=written.links.between_nodes,
            boundary_bytes_per_token=written.boundary_bytes_per_token,
            noise=written.noise.relative,
            seed=int(written.noise.seed),
        )


def load_profile(name: str) -> DeviceProfile:
    """Read a profile: a JSON file, or the name of a built-in profile.

    Raises:
        ProfileError: there is no such profile, or it cannot be used.
    """
    built_in = sorted(path.stem for path in BUILT_IN.glob("*.json"))
    path = BUILT_IN / f"{name}.json" if name in built_in else Path(name)
    try:
        return DeviceProfile.from_dict(json.loads(path.read_text()))
    except OSError as error:
        choice = ", ".join(built_in)
        raise ProfileError(f"device profile {name}: {error.strerror}; give a JSON file, or one of {choice}") from error
    except ValueError as error:  # also of JSON and of its encoding
        raise ProfileError(f"device profile {name}: {error}") from error


def _passes(written: _Written) -> dict[LayerKind, tuple[PassCost, PassCost, PassCost]]:
    found = {}
    for kind in LayerKind:
        layer: _Layer = getattr(written.layers, kind)
        forward, backward, weight = (
            _pass(part, f"{kind} {name}", written.reference, written.fixed_seconds)
            for name, part in zip(PASSES, (layer.F, layer.B, layer.W), strict=True)
        )
        found[kind] = (forward, backward, weight)
    return found


def _pass(part: _Pass, where: str, reference: _Reference, fixed: float) -> PassCost:
    if part.attention > 1.0:
        raise ProfileError(f"{where}: attention {part.attention:g} is a share, at most 1")
    # A pass that the device lacks (the embedding's W) has no launches either.
    fixed = min(fixed, part.seconds)
    variable = part.seconds - fixed
    return PassCost(
        (1.0 - part.attention) * variable / reference.tokens, part.attention * variable / reference.squares, fixed
    )
