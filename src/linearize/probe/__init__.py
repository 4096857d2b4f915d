"""Probes of recall: what a model can look up in its context."""

from linearize.probe.retrieval import Retrieval, RetrievalCell, retrieval

__all__ = ["Retrieval", "RetrievalCell", "retrieval"]
