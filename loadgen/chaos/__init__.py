"""Kills, stops and cuts every process of a stack under load, and proves that no answer changed and nothing leaked."""
