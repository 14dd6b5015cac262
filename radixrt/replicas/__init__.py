"""Replicas: one Runtime a process, each on a card of its own, that share one list of prompts."""

from radixrt.replicas.group import ReplicaGroup

__all__ = ["ReplicaGroup"]
