"""Guessing the next tokens without a model, and choosing whose guess to believe. Pure: no torch, no I/O, no clock.

Imports nothing else of ours. Nothing here can change an output: what is guessed is only ever verified.
"""

from shared.speculation.chooser import Chooser, Tally
from shared.speculation.prompt_lookup import PROMPT_LOOKUP, PromptLookup
from shared.speculation.proposer import Guess, Proposer
from shared.speculation.suffix_tree import SUFFIX_TREE, RecentOutputs, SuffixProposer

__all__ = [
    "PROMPT_LOOKUP",
    "SUFFIX_TREE",
    "Chooser",
    "Guess",
    "PromptLookup",
    "Proposer",
    "RecentOutputs",
    "SuffixProposer",
    "Tally",
]
