"""The class of the demo model."""

from sglang.srt.models.llama import EntryClass as EntryClass
