"""Engines in other processes and on other machines, as the replicas of one engine."""
