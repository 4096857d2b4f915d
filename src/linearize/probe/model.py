"""The small decoder that the recall probe trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linearize.probe.catalogue import Architecture, layers_of
from linearize.probe.mixers import KernelMixer

__all__ = ["RecallModel"]

EMBEDDING = 0.02  # standard deviation of the embeddings at the start, as published


class RecallModel(nn.Module):
    """Embeddings, blocks of ``x + mixer(norm(x))``, norm, and the embeddings again as the head.

    As published for MQAR: learned positions, no MLP, tied head. Parameters follow from ``seed`` alone.

    Args:
        mixer: name of a mixer; see :func:`linearize.probe.catalogue.mixer_names`.
        architecture: layers, heads and the like.
        vocabulary: tokens.
        length: longest sequence.
        width: channels.
        seed: seed of all parameters.

    Raises:
        PlanError: there is no such mixer, or it cannot have this shape.
    """

    def __init__(
        self,
        mixer: str,
        architecture: Architecture,
        *,
        vocabulary: int,
        length: int,
        width: int,
        seed: int,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = nn.Embedding(length, width)
            nn.init.normal_(self.tokens.weight, std=EMBEDDING)
            nn.init.normal_(self.positions.weight, std=EMBEDDING)
            self.mixers = nn.ModuleList(layers_of(mixer, architecture, width, length, seed))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.mixers)
        self.last_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(architecture.dropout)

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        """Logits of the next answer.

        Args:
            tokens: ``[B, N]`` integers.
            at: booleans ``[B, N]``: only at these positions.

        Returns:
            ``[B, N, vocabulary]``, or ``[at.sum(), vocabulary]`` row by row.
        """
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        if at is not None:
            x = x.flatten(0, 1)[at.flatten().nonzero()[:, 0]]
        return self.last_norm(x) @ self.tokens.weight.T

    def embed(self, tokens: Tensor) -> Tensor:
        """``[B, N]`` -> ``[B, N, width]``."""
        return self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])

    @torch.no_grad()
    def prepare(self, tokens: Tensor) -> None:
        """Let every kernel fix its structure on a first batch ``[B, N]``; before any optimiser."""
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            seen = norm(x)
            if isinstance(mixer, KernelMixer):
                mixer.prepare(seen)
            x = x + mixer(seen)

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> list[Tensor]:
        """Normalised weights ``[B, H, N, N]`` of every kernel layer, first layer first."""
        maps, x = [], self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            seen = norm(x)
            if isinstance(mixer, KernelMixer):
                maps.append(mixer.attention_map(seen))
            x = x + mixer(seen)
        return maps

    @property
    def attends(self) -> bool:
        """Whether any layer mixes with a kernel, so that there are attention maps."""
        return any(isinstance(mixer, KernelMixer) for mixer in self.mixers)

    @property
    def state_numbers(self) -> int | None:
        """Numbers of the recurrent state of all kernel layers; ``None`` if one keeps every key, or
        for references."""
        kernels = [mixer.kernel for mixer in self.mixers if isinstance(mixer, KernelMixer)]
        if not kernels or any(kernel.exact for kernel in kernels):
            return None
        return sum(kernel.state_numbers for kernel in kernels)
