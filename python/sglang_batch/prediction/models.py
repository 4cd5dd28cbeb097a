"""Models that ``simulate`` has by name: the part of config.json that gives the size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("models.json").read_bytes()
)
